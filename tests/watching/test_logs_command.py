"""`holdfast logs`: what ranks printed, unchanged, and what to do where nothing was kept."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.cli import logs
from holdfast.observe import record
from watching.jobs_on_disk import Written

LOGS = [sys.executable, "-m", "holdfast", "logs"]
WILD = b"\x1b[31mred\x1b[0m\r 10%\r 20%\n\xff\xfe\x00 not text\nthe last line has no end"


@pytest.fixture
def job(alone: Path, tmp_path: Path) -> Written:
    """Two generations of two ranks. In the second, rank 0 said nothing and rank 1 all there is."""
    job = Written(tmp_path / "logs").trains().fails(1800).launches(1801, 1).note(1802, record.WorldStarted(1, {}))
    for rank in (0, 1):
        job.prints(0, rank, {"stdout": b"first %d\nsecond %d\n" % (rank, rank), "stderr": b"error %d\n" % rank})
    job.prints(1, 0, {"stdout": b"", "stderr": b""}).prints(1, 1, {"stdout": WILD, "stderr": b""})
    return job


def printed(capsysbinary: pytest.CaptureFixture[bytes], *argv: str) -> tuple[int, bytes, bytes]:
    code = logs.main(argv)
    out, err = capsysbinary.readouterr()
    return code, out, err


# -- which lines ------------------------------------------------------------------------------------------------------


def test_of_one_rank_every_byte_is_as_it_was(job: Written, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    assert printed(capsysbinary, str(job.run_dir), "--rank", "1") == (0, WILD, b"")


def test_of_several_ranks_each_line_says_whose_it_is(job: Written, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    code, out, err = printed(capsysbinary, str(job.run_dir), "--generation", "0")
    assert (code, err) == (0, b"")
    assert out.splitlines() == [
        b"[default0]:first 0", b"[default0]:second 0", b"[default0]:error 0",
        b"[default1]:first 1", b"[default1]:second 1", b"[default1]:error 1",
    ]  # fmt: skip
    last = printed(capsysbinary, str(job.run_dir))[1]
    assert last == b"".join(b"[default1]:" + line + b"\n" for line in WILD.split(b"\n"))


def test_all_generations_are_told_apart(job: Written, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    code, out, err = printed(capsysbinary, str(job.run_dir), "--rank", "1", "--generation", "all")
    assert (code, out, err) == (0, b"first 1\nsecond 1\nerror 1\n" + WILD, b"holdfast logs: generation 1\n")


@pytest.mark.parametrize(
    ("flags", "lines"),
    [
        (["--grep", "sec|err"], b"second 1\nerror 1\n"),
        (["--grep", "^first .$"], b"first 1\n"),
        (["--only", "stderr"], b"error 1\n"),
        (["-n", "1"], b"second 1\nerror 1\n"),
        (["-n", "0"], b""),
        (["-n", "5"], b"first 1\nsecond 1\nerror 1\n"),
        (["-n", "1", "--grep", "first"], b""),
    ],
)
def test_some_lines(job: Written, capsysbinary: pytest.CaptureFixture[bytes], flags: list[str], lines: bytes) -> None:
    code, out, _ = printed(capsysbinary, str(job.run_dir), "--rank", "1", "--generation", "0", *flags)
    assert (out, code) == (lines, 0 if lines or "--grep" not in flags else 1)


@pytest.mark.parametrize("count", [0, 1, 3, 100])
def test_the_last_lines_of_a_large_file(
    alone: Path, tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes], count: int
) -> None:
    lines = [b"%d " % number + b"x" * (number % 7000) for number in range(200)]  # 100 of them are over a piece's size
    job = Written(tmp_path).trains().prints(0, 0, {"stdout": b"\n".join(lines)})
    out = printed(capsysbinary, str(job.run_dir), "--rank", "0", "-n", str(count))[1]
    assert out == (b"\n".join(lines[-count:]) if count else b"")


def test_a_pattern_may_match_bytes_that_are_no_text(job: Written, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    out = printed(capsysbinary, str(job.run_dir), "--rank", "1", "--grep", "\udcff")[1]
    assert out == b"\xff\xfe\x00 not text\n"


# -- several nodes ----------------------------------------------------------------------------------------------------


def test_ranks_of_other_nodes_are_found_beside(
    alone: Path, tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    main, other = Written(tmp_path, "job", "n1:100"), Written(tmp_path, "job", "n2:200")
    earlier = Written(tmp_path, "job", "n2:7").starts(node="n2:7").launches(5, 0, 4, 2, 2)
    main.starts().starts(node="n2:200").starts(node="n3:300")
    main.launches(5, 0, 6, 0, 2).launches(5, 0, 6, 2, 2, "n2:200").launches(5, 0, 6, 4, 2, "n3:300")
    other.starts(node="n2:200").launches(5, 0, 6, 2, 2)
    for written, word in ((main, b"main"), (other, b"other"), (earlier, b"earlier")):
        for local in (0, 1):
            written.prints(0, local, {"stdout": b"%s %d\n" % (word, local)})
    both = b"[default0]:main 0\n[default3]:other 1\n"
    assert printed(capsysbinary, str(main.run_dir), "--rank", "0,3") == (0, both, b"")
    code, out, err = printed(capsysbinary, str(main.run_dir), "--rank", "5")
    assert (code, out) == (1, b"")
    assert err == b"holdfast logs: rank 5 ran on n3, and what it printed is there; ask there\n"
    assert printed(capsysbinary, str(other.run_dir), "--rank", "2")[1] == b"other 0\n"


# -- nothing to show --------------------------------------------------------------------------------------------------


def test_a_job_that_keeps_no_logs_says_how_to(
    alone: Path, tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    job = Written(tmp_path).trains().prints(0, 0, {}).prints(0, 1, {})
    for flags in ((), ("--rank", "1"), ("--generation", "all")):
        code, out, err = printed(capsysbinary, str(job.run_dir), *flags)
        assert (code, out) == (1, b"")
        assert err == (
            b"holdfast logs: the job keeps no logs, what its ranks print goes to the console; give holdfast run "
            b"--redirects 3 (to files) or --tee 3 (to files and to the console)\n"
        )


@pytest.mark.parametrize(
    ("flags", "why", "code"),
    [
        (["--rank", "9"], "there is no rank 9; there are 2 ranks", 1),
        (["--generation", "5"], "there is no generation 5; the last one is 1", 1),
        (["--rank", "one"], "--rank: 'one' is no list of ranks like 0,3 or 0-7", 2),
        (["--generation=-1"], "--generation: '-1' is neither a number, nor last, nor all", 2),
        (["--grep", "("], "--grep: missing ), unterminated subpattern at position 0", 2),
        (["-n-1"], "-n: a number of lines, 0 or more", 2),
    ],
)
def test_what_cannot_be(
    job: Written, capsysbinary: pytest.CaptureFixture[bytes], flags: list[str], why: str, code: int
) -> None:
    assert printed(capsysbinary, str(job.run_dir), *flags) == (code, b"", f"holdfast logs: {why}\n".encode())


def test_one_rank_of_two_keeps_a_log(alone: Path, tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    job = Written(tmp_path).trains().prints(0, 0, {"stdout": b"x\n"}).prints(0, 1, {})
    code, _, err = printed(capsysbinary, str(job.run_dir), "--rank", "1")
    assert (code, err) == (1, b"holdfast logs: there is no log of rank 1; kept are those of rank 0\n")


def test_before_the_first_world(alone: Path, tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    code, _, err = printed(capsysbinary, str(Written(tmp_path).starts().run_dir))
    assert (code, err) == (1, b"holdfast logs: the job has started no rank yet\n")


# -- as they print ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def following(job: Written, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [*LOGS, str(job.run_dir), "-f", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def line(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    return process.stdout.readline()


def test_it_follows_into_the_next_generation_and_to_the_end(alone: Path, tmp_path: Path) -> None:
    job = Written(tmp_path).trains().note(9, record.WorldStarted(0, {})).prints(0, 0, {"stdout": b"old\n"})
    with following(job) as process:
        assert line(process) == b"[default0]:old\n"
        job.prints(0, 1, {"stdout": b"new\nhalf a "})
        assert line(process) == b"[default1]:new\n"
        job.prints(0, 1, {"stdout": b"line\n"})
        assert line(process) == b"[default1]:half a line\n"
        job.launches(3595, 1).prints(1, 0, {"stderr": b"again\n"})
        assert line(process) == b"[default0]:again\n"
        job.prints(1, 1, {"stdout": b"no end"}).ends(3600)
        assert line(process) == b"[default1]:no end\n"
        assert line(process) == b""
        assert process.wait(30) == 0


def test_one_generation_is_followed_until_the_next(alone: Path, tmp_path: Path) -> None:
    job = Written(tmp_path).trains().prints(0, 0, {"stdout": b"a\nb\n"})
    with following(job, "--generation", "0", "--rank", "0", "-n", "1") as process:
        assert line(process) == b"b\n"
        job.prints(0, 0, {"stdout": b"c\n"}).launches(3595, 1).prints(1, 0, {"stdout": b"d\n"})
        assert line(process) == b"c\n"
        assert line(process) == b""
        assert process.wait(30) == 0


def test_a_reader_who_has_enough_ends_it(alone: Path, tmp_path: Path) -> None:
    job = Written(tmp_path).trains().prints(0, 0, {"stdout": b"x" * 100 + b"\n" * 1_000_000})
    with subprocess.Popen([*LOGS, str(job.run_dir)], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0
