"""Every byte that ranks write: shown, kept, counted, and none lost."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys

import pytest

from harness import TRAINS, Job

CHATTY = """
import os, sys
rank = os.environ["RANK"]
sys.stdout.write(f"out {rank} apple\\n")  # at once: of print's pieces, other ranks' may come between
sys.stderr.write(f"err {rank} orange\\n")
"""


def chatty(job: Job, *flags: str, nproc: int = 2) -> None:
    script = job.folder / "chatty.py"
    script.write_text(CHATTY)
    assert job.run(script, nproc=nproc, flags=("--quiet", *flags)) == 0


def log(job: Job, rank: int, name: str) -> str:
    return (job.run_dir / "attempt_0" / str(rank) / f"{name}.log").read_text()


def test_by_default_the_console_has_it_all_and_redirects_go_to_files_alone(job: Job) -> None:
    """Ranks of two digits too."""
    chatty(job, "--redirects=0:3,1:1,10:3,11:1", nproc=12)
    for rank in (0, 10):
        assert (log(job, rank, "stdout"), log(job, rank, "stderr")) == (f"out {rank} apple\n", f"err {rank} orange\n")
    for rank in (1, 11):
        assert log(job, rank, "stdout") == f"out {rank} apple\n"
    assert sorted(job.out.splitlines()) == [f"out {rank} apple" for rank in range(2, 10)]
    assert sorted(job.err.splitlines()) == sorted(f"err {rank} orange" for rank in range(12) if rank not in (0, 10))


def test_tee_goes_to_both_behind_a_prefix_and_filters_copy_matching_lines(job: Job) -> None:
    filters = ("--duplicate-stdout-filters=out 0,nothing", "--duplicate-stderr-filters=orange")
    chatty(job, "--tee=3", "--role=trainer", *filters)
    assert sorted(job.out.splitlines()) == ["[trainer0]:out 0 apple", "[trainer1]:out 1 apple"]
    assert sorted(job.err.splitlines()) == ["[trainer0]:err 0 orange", "[trainer1]:err 1 orange"]
    assert log(job, 1, "stderr") == "err 1 orange\n"
    attempt = job.run_dir / "attempt_0"
    assert (attempt / "filtered_stdout.log").read_text() == "[trainer0]:out 0 apple\n"
    assert len((attempt / "filtered_stderr.log").read_text().splitlines()) == 2


def test_the_prefix_is_the_users_to_choose_and_a_rank_filter_hides_the_others(job: Job) -> None:
    script = job.folder / "chatty.py"
    script.write_text(CHATTY)
    template = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "<${role_name}|${rank}> "}
    assert job.run(script, nproc=3, flags=("-q", "--tee=0:1,1:1", "--local-ranks-filter=1,2"), env=template) == 0
    assert sorted(job.out.splitlines()) == ["<default|1> out 1 apple", "out 2 apple"]
    assert sorted(job.err.splitlines()) == ["err 1 orange", "err 2 orange"]
    assert log(job, 0, "stdout") == "out 0 apple\n"


def test_logs_of_every_generation_are_kept(job: Job) -> None:
    faults = [json.dumps({"rank": 1, "step": g + 1, "how": "raise", "generations": [g]}) for g in range(3)]
    assert job.run(TRAINS, "5", *faults, max_restarts=3, flags=("--redirects=2",)) == 0
    texts = [(job.run_dir / f"attempt_{g}" / "1" / "stderr.log").read_text() for g in range(4)]
    assert ["planned at rank 1" in text for text in texts] == [True, True, True, False]


def test_a_hundred_megabytes_through_tee(job: Job) -> None:
    line = "x" * 999
    script = job.folder / "shouts.py"
    script.write_text(
        "import os, sys\n"
        f"line = b'{line}\\n'\n"
        "for start in range(0, 50_000, 500):\n"
        "    os.write(1, b''.join(b'%06d' % n + line[6:] for n in range(start, start + 500)))\n"
    )
    assert job.run(script, flags=("--tee=1",)) == 0
    for rank in (0, 1):
        text = log(job, rank, "stdout")
        assert len(text) == 50_000 * 1000
        numbers = [int(line[:6]) for line in text.splitlines()]
        assert numbers == list(range(50_000))
    shown = job.out.splitlines()
    assert len(shown) == 100_000
    for rank in (0, 1):
        prefix = f"[default{rank}]:"
        assert [int(line[len(prefix) :][:6]) for line in shown if line.startswith(prefix)] == list(range(50_000))


def test_bytes_that_are_no_text(job: Job) -> None:
    odd = bytes(range(256)) * 3
    script = job.folder / "odd.py"
    script.write_text(f"import os, sys\nos.write(1, {odd!r})\nos.write(2, {odd!r})\nsys.exit(3)\n")
    assert job.run(script, nproc=1, flags=("--tee=1",)) == 1
    assert (job.run_dir / "attempt_0" / "0" / "stdout.log").read_bytes() == odd
    assert odd in (job.folder / "err").read_bytes()
    assert job.incidents()[0]["stderr_tail"]


def test_standard_error_of_the_dead_is_quoted(job: Job) -> None:
    script = job.folder / "dies.py"
    script.write_text("import os\nos.write(2, b'the reason is 42\\n')\nos.kill(os.getpid(), 9)\n")
    assert job.run(script, nproc=1, flags=("--redirects=2",)) == 1
    assert "the last lines of its stderr:" in job.err
    assert "the reason is 42" in job.err


def test_a_full_log_disk_stops_logs_and_nothing_else(job: Job) -> None:
    """/dev/full answers every write as a full disk does."""
    script = job.folder / "launches.py"
    script.write_text(
        "import holdfast, sys\n"
        "from holdfast.agent.logs import Destination\n"
        "class Full:\n"
        "    def place(self, generation, local_rank):\n"
        "        return Destination('/dev/full', '/dev/full', prefixed=True)\n"
        "def shout():\n"
        "    print('still here', flush=True)\n"
        "    return 7\n"
        "if __name__ == '__main__':\n"
        "    print(holdfast.launch(shout, nproc=2, logs=Full()))\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert "{0: 7, 1: 7}" in done.stdout
    assert done.stdout.count("still here") == 2
    assert "No space left on device; training goes on" in done.stderr


def test_dev_null_for_a_log_dir_leaves_no_file(job: Job) -> None:
    script = job.folder / "chatty.py"
    script.write_text(CHATTY)
    temporary = job.folder / "tmp"
    temporary.mkdir()
    assert job.run(script, log_dir=os.devnull, flags=("--tee=3",), env={"TMPDIR": str(temporary)}) == 0
    assert not job.log_dir.exists()
    assert [path for path in temporary.iterdir() if path.name.startswith("holdfast")] == []


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--nproc-per-node=gpu",), r"--nproc-per-node=gpu: there is no CUDA device here; leave it out"),
        (("--nproc-per-node=tpu",), r"--nproc-per-node=tpu: 'tpu' is not a number, cpu, gpu, xpu or auto"),
        (("--log-dir=/proc/nowhere",), r"--log-dir: cannot write /proc/nowhere: No such file or directory"),
        (("--master-port={port}",), r"cannot listen on port {port} on 127.0.0.1: Address already in use"),
        (("--local-addr=203.0.113.7",), r"cannot listen on the address 203.0.113.7: Cannot assign requested address"),
    ],
)
def test_what_cannot_be_had_is_refused_before_any_worker(job: Job, flags: tuple[str, ...], says: str) -> None:
    script = job.folder / "fine.py"
    script.write_text("print('ran', flush=True)\n")
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = str(busy.getsockname()[1])
        given = [flag.replace("{port}", port) for flag in flags]
        command = [sys.executable, "-m", "holdfast", "run", *given, str(script)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stdout == ""
    complaints = [line for line in done.stderr.splitlines() if "OMP_NUM_THREADS" not in line]
    assert len(complaints) == 1, done.stderr
    assert re.search(re.escape(says.replace("{port}", port)), complaints[0])
