"""`holdfast top`: what is on its screen, and that it behaves on a real terminal."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.agent.doorbell import Sign
from holdfast.observe import find, record, screen
from holdfast.observe.screen_job import Watched
from holdfast.observe.screen_top import frame, line
from watching.jobs_on_disk import Written, large

WAIT_S = 30.0
TOP = [sys.executable, "-m", "holdfast", "top"]
LEFT = b"\x1b[?1049l"  # the screen that was there before


def watched(job: Written) -> Watched:
    found = Watched(find.Found(job.run_id, job.run_dir, job.record))
    found.look()
    return found


def texts(job: Written, columns: int = 80, lines: int = 24) -> list[str]:
    rows = frame(watched(job), columns, lines)
    assert len(rows) <= lines
    assert all(screen.width(row.text) <= columns and row.text.isprintable() for row in rows)
    return [row.text for row in rows]


# -- what is on it ----------------------------------------------------------------------------------------------------


def test_a_small_job_fits_with_all_there_is(alone: Path, tmp_path: Path) -> None:
    job = Written(tmp_path).starts().launches(5).note(6, record.WorldStarted(0, {0: 4711, 1: 4712})).steps(8)
    job.progresses(3590, (40, 41), base=100, step_us=(250_000, 250_000), own_us=(100_000, 100_000), phases="13").fails(
        1800
    )
    job.launches(1801, 1).steps(1802, 1).progresses(3595, (40, 41), 1, 100, step_us=(250_000, 250_000), phases="13")
    shown = texts(job, 120)
    assert shown[0].startswith("holdfast top   train.py   job made   training   60 min ")
    assert shown[0].endswith("  q quits ")
    assert [text.split() for text in shown if text.lstrip().startswith(("0  ", "1  "))] == [
        ["0", "training", "140", "250", "ms", "-", "-", "-"],
        ["1", "saving", "141", "250", "ms", "-", "-", "-"],
    ]
    assert any(text.startswith("1. 30 min ago, ") and text.endswith("killed by SIGKILL at step 27") for text in shown)


def test_what_the_agent_says_of_each_rank_now_is_shown(alone: Path, tmp_path: Path) -> None:
    job = watched(Written(tmp_path).starts().launches(5).steps(8))
    job.signs = {0: Sign(0, 0.25), 1: Sign(1, 31.0, "data\x1b[2J", 30.5)}
    shown = [row.text for row in frame(job, 120, 24)]
    [first, second] = [text for text in shown if text.lstrip().startswith(("0  ", "1  "))]
    assert "250 ms" in first and "31.0 s" in second and second.endswith("in data\\x1b[2J for 30.5 s")


def test_processes_that_stand_by_are_counted(alone: Path, tmp_path: Path) -> None:
    job = Written(tmp_path).trains()
    assert not any("standby" in text for text in texts(job))
    assert "standby 1 process, 312 MB of memory" in texts(job.note(3591, record.StandbyReady(0, 77, 312_000_000)))


def test_eighty_columns_have_room_for_the_last_sign_and_for_sections_if_there_are_any(
    alone: Path, tmp_path: Path
) -> None:
    written = Written(tmp_path, node="a-node-with-a-long-name:7").starts().starts(node="n2:5").launches(5).steps(8)
    job = watched(written.progresses(20, (40, 40), step_us=(250_000,) * 2, own_us=(100_000,) * 2))
    job.signs = {0: Sign(0, 0.25)}
    [head, first] = [row.text.split("  ") for row in frame(job, 79, 24) if row.text.lstrip().startswith(("RANK", "0 "))]
    assert [cell.strip() for cell in head if cell.strip()][-2:] == ["OWN TIME", "LAST SIGN"]
    assert [cell.strip() for cell in first if cell.strip()] == [
        *("0", "a-node-w..", "training", "40", "250 ms", "100 ms", "250 ms")
    ]
    with_sections = watched(written.progresses(30, (41, 41), section_us=(7_000, 90_000)))
    shown = [row.text for row in frame(with_sections, 79, 24)]
    assert [text.split()[-3:] for text in shown if text.lstrip().startswith("1 ")] == [["90", "ms", "-"]]
    assert any(text.endswith("OWN TIME  SECTIONS  LAST SIGN") for text in shown)


@pytest.mark.parametrize(("columns", "lines"), [(80, 24), (160, 50), (40, 12), (20, 5), (1, 1), (300, 2000)])
def test_a_thousand_ranks_fit_any_screen(alone: Path, tmp_path: Path, columns: int, lines: int) -> None:
    assert texts(large(tmp_path), columns, lines)


def test_of_a_thousand_ranks_those_in_trouble_are_shown(alone: Path, tmp_path: Path) -> None:
    shown = texts(large(tmp_path))
    ranks = [text.split()[:3] for text in shown if text[:4].strip().isdigit() and "." not in text[:4]]
    assert ranks[:3] == [["700", "n087", "hung"], ["998", "n124", "failed"], ["611", "n076", "training"]]
    assert any(text.startswith("and ") and "more ranks" in text for text in shown)
    assert any(text.startswith("spare ") and " spare " in text for text in shown)


def test_a_large_screen_has_a_mark_for_each_rank(alone: Path, tmp_path: Path) -> None:
    shown = texts(large(tmp_path), 160, 50)
    lines = [text.split() for text in shown]
    marks = "".join(line[1] for line in lines if len(line) == 2 and set(line[1]) <= set(".!HF"))
    assert len(marks) == 1000
    assert {at: mark for at, mark in enumerate(marks) if mark != "."} == {611: "!", 700: "H", 998: "F"}


def test_a_node_that_left_is_gone_and_one_that_waits_is_a_spare(alone: Path, tmp_path: Path) -> None:
    job = Written(tmp_path).starts(nproc=1).starts(node="n2:5", nproc=1).starts(node="n3:5", nproc=1)
    job.launches(5, 0, 2, 0, 1).launches(5, 0, 2, 1, 1, "n2:5")
    job.launches(500, 1, 2, 0, 1).launches(500, 1, 2, 1, 1, "n3:5")
    assert dict(watched(job).nodes()) == {"n1:100": "in the world", "n2:5": "gone", "n3:5": "in the world"}
    job.note(600, record.NodeHello("10.0.0.2", 1), "n2:5")
    assert watched(job).spares == ["n2:5"]


def test_nothing_that_a_rank_says_reaches_the_terminal_raw(alone: Path, tmp_path: Path) -> None:
    evil = "\x1b[31mred\x07\r\n\u202e\x9b2J"
    job = Written(tmp_path, node=f"{evil}:7").starts(program={"path": evil}).starts(node=f"{evil}2:8").launches(5)
    job.note(6, record.RankRaised(0, 1, evil)).fails(7, headline=evil, action=evil, node=evil)
    assert any(r"\x1b[31mred" in text for text in texts(job, 200, 50))
    assert line(watched(job)).isprintable()


def test_wide_characters_are_counted_as_such() -> None:
    assert screen.width("日本") == 4
    assert screen.cut("日本語の名前", 7) == "日本.."
    assert screen.left("日本", 6) == "日本  "
    assert screen.cut("abcdef", 1) == "."


# -- a real terminal --------------------------------------------------------------------------------------------------


class Terminal:
    """One that `holdfast top` runs on, as seen from outside."""

    def __init__(self, job: Path, columns: int = 80, lines: int = 24) -> None:
        self._master, self.slave = os.openpty()
        self.resize(columns, lines)
        env = os.environ | {"TERM": "xterm", "NO_COLOR": "1"}
        self.process = subprocess.Popen(
            [*TOP, str(job)], stdin=self.slave, stdout=self.slave, stderr=self.slave, env=env, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        self.seen = b""

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("4H", lines, columns, 0, 0))

    def type(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def wait_for(self, text: bytes) -> bytes:
        """What came up to this, and is forgotten then."""
        until_s = time.monotonic() + WAIT_S
        while text not in self.seen:
            left_s = until_s - time.monotonic()
            there = select.select([self._master], [], [], max(0.0, left_s))[0]
            assert there, f"no {text!r} in {self.seen[-2000:]!r}"
            self.seen += os.read(self._master, 65536)
        before, _, self.seen = self.seen.partition(text)
        return before

    @property
    def is_cooked(self) -> bool:
        return bool(termios.tcgetattr(self.slave)[3] & termios.ICANON)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._master)
        os.close(self.slave)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    Written(tmp_path, now_s=time.time()).trains(12_345)
    with contextlib.closing(Terminal(tmp_path)) as opened:
        yield opened


def test_it_follows_the_record_and_the_size_of_the_terminal(terminal: Terminal, tmp_path: Path) -> None:
    terminal.wait_for(b"\x1b[?1049h")
    terminal.wait_for(b"step 12,345, ")
    assert not terminal.is_cooked
    [job] = [path for path in tmp_path.iterdir() if path.is_dir()]
    with (job / "events.jsonl").open("ab") as file:
        file.write(b'{"node":"n1:100","name":"trained","at_s":3600.5,"time":"","data":{"step":67890,"loss":1.5}}\n')
    terminal.wait_for(b"step 67,890, 250 ms each, loss 1.5")
    terminal.resize(120, 40)
    terminal.wait_for(b"PID")  # for which 80 columns are too few
    terminal.type(b"q")
    terminal.wait_for(LEFT)
    assert terminal.process.wait(WAIT_S) == 0
    assert terminal.is_cooked


@pytest.mark.parametrize("how", ["Ctrl-C", "SIGTERM"])
def test_whatever_ends_it_the_terminal_is_as_before(terminal: Terminal, how: str) -> None:
    terminal.wait_for(b"step 12,345, ")
    if how == "Ctrl-C":
        terminal.type(b"\x03")
    else:
        terminal.process.send_signal(signal.SIGTERM)
    terminal.wait_for(b"\x1b[?25h" + LEFT)
    assert terminal.process.wait(WAIT_S) == 0
    assert terminal.is_cooked


def test_it_can_be_stopped_and_brought_back(terminal: Terminal) -> None:
    terminal.wait_for(b"step 12,345, ")
    terminal.process.send_signal(signal.SIGTSTP)
    terminal.wait_for(LEFT)
    assert os.waitid(os.P_PID, terminal.process.pid, os.WSTOPPED | os.WNOWAIT) is not None
    assert terminal.is_cooked
    terminal.process.send_signal(signal.SIGCONT)
    terminal.wait_for(b"\x1b[?1049h")
    terminal.wait_for(b"step 12,345, ")
    terminal.type(b"q")
    assert terminal.process.wait(WAIT_S) == 0


def test_without_a_terminal_it_prints_lines_until_the_end(tmp_path: Path) -> None:
    job = Written(tmp_path, now_s=time.time()).trains()
    with subprocess.Popen([*TOP, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().endswith("; 40, 250 ms each; generation 0, 2 ranks: 2 training\n")
        job.ends(3600, "error", "rank 1: ValueError")
        assert process.stdout.readline().startswith("failed (error) ")
    assert process.returncode == 1
