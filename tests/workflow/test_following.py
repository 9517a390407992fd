"""Looking on: what a task prints as it prints it, and the table on a terminal."""

from __future__ import annotations

import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from fcntl import ioctl
from pathlib import Path

import pytest

from workflow.flows import WAIT_S, Here


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Here]:
    with Here(tmp_path) as here:
        os.mkfifo(here.outside / "go")
        yield here


# -- what a task prints -----------------------------------------------------------------------------------------------


TWICE = """
    workflow:
      name: w
      tasks:
      - name: a
        command: [bash, -c]
        args: ["echo first $HOLDFAST_ATTEMPT; read x < OUT/go; echo wrong >&2; echo last $HOLDFAST_ATTEMPT;
                [ $HOLDFAST_ATTEMPT = 2 ] || exit 3"]
        exitActions: {RESCHEDULE: 3}
"""


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def go(here: Here) -> None:
    (here.outside / "go").write_text("on\n")


def test_it_is_followed_through_all_of_its_lives(here: Here) -> None:
    runner = here.start("submit", str(here.file(TWICE)), "--nodes", "2")
    here.until(lambda: (here.folder / "workflows/w-1/standing.json").exists())
    following = here.start("logs", "w-1", "a", "-f")
    assert line(following) == "first 1\n"
    go(here)
    assert [line(following), line(following)] == ["last 1\n", "first 2\n"]
    go(here)
    out, err = following.communicate(timeout=WAIT_S)
    assert (following.returncode, out) == (0, "last 2\n")
    assert err == "wrong\nholdfast: a is begun anew, attempt 2 on node-2\nwrong\n"
    assert runner.wait(WAIT_S) == 0
    assert here.run("logs", "w-1", "a", "--attempt", "1", "--follow")[:2] == (0, "first 1\nlast 1\n")
    assert here.run("logs", "w-1", "a")[:2] == (0, "first 2\nlast 2\n")
    assert here.run("logs", "w-1", "a", "--attempt", "3")[1:] == (
        "", "holdfast workflow: a has no attempt 3: its last is 2\n",
    )  # fmt: skip


def test_it_is_followed_without_a_runner_and_with_the_next_one(here: Here) -> None:
    runner = here.start("submit", str(here.file(TWICE)))
    here.until(lambda: (here.folder / "workflows/w-1/tasks/a/1/pid").exists())
    here.kill(runner)
    following, last = here.start("logs", "w-1", "a", "-f"), here.start("logs", "w-1", "a", "-f")
    assert line(following) == line(last) == "first 1\n"
    last.send_signal(signal.SIGINT)
    assert last.communicate(timeout=WAIT_S) == ("", "") and last.returncode == 130
    go(here)
    out, err = following.communicate(timeout=WAIT_S)
    assert (following.returncode, out) == (0, "last 1\n")
    assert err == "wrong\nholdfast: its runner is gone; go on with: holdfast workflow resume w-1\n"


def test_following_takes_no_time_while_nothing_happens(here: Here) -> None:
    runner = here.start("submit", str(here.file(TWICE)))
    here.until(lambda: (here.folder / "workflows/w-1/tasks/a/1/pid").exists())
    following = here.start("logs", "w-1", "a", "-f")
    assert line(following) == "first 1\n"
    assert any(ticks_in(following.pid, 0.5) <= 1 for _ in range(10)), "the best of some: it has just begun"
    here.kill(following)
    runner.terminate()
    assert runner.wait(WAIT_S) == 130


def ticks_in(pid: int, window_s: float) -> int:
    before = ticks(pid)
    time.sleep(window_s)
    return ticks(pid) - before


def ticks(pid: int) -> int:
    """Of CPU time; there are 100 in a second."""
    return sum(map(int, Path(f"/proc/{pid}/stat").read_text().split()[13:15]))


def test_a_reader_that_goes_away(here: Here) -> None:
    """It is no concern of the runner's, nor of who prints much."""
    path = here.file("""
        workflow:
          name: w
          tasks: [{name: a, command: [bash, -c, "seq 100000; read x < OUT/go"]}]
    """)
    runner = here.start("submit", str(path))
    assert runner.stdout is not None and line(runner).startswith("w-1 begins")
    runner.stdout.close()
    here.until(lambda: (here.folder / "workflows/w-1/tasks/a/1/stdout").exists())
    go(here)
    assert runner.wait(WAIT_S) == 0
    logs = here.start("logs", "w-1", "a")
    assert line(logs) == "1\n" and logs.stdout is not None
    logs.stdout.close()
    assert logs.stderr is not None and logs.stderr.read() == ""


# -- the table --------------------------------------------------------------------------------------------------------


class Terminal:
    """Of so many lines and columns, with a program in it."""

    def __init__(self, here: Here, lines: int, columns: int, *args: str) -> None:
        self._fd, theirs = pty.openpty()
        ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        env = {name: value for name, value in here.env.items() if name not in ("LINES", "COLUMNS")}
        command = [sys.executable, "-m", "holdfast", "workflow", *args]
        self.process = subprocess.Popen(command, env=env, stdin=theirs, stdout=theirs, stderr=theirs)
        os.close(theirs)
        self.lines, self.columns = lines, columns
        self.seen = ""
        self._reading = threading.Thread(target=self._read)
        self._reading.start()

    def _read(self) -> None:
        try:
            while piece := os.read(self._fd, 65536):
                self.seen += piece.decode()
        except OSError:
            pass  # all have closed it

    def wait(self) -> int:
        code = self.process.wait(WAIT_S)
        self._reading.join()
        os.close(self._fd)
        return code

    def tables(self) -> list[list[str]]:
        """As they were drawn, one over the other."""
        drawn = re.split(r"\x1b\[\d+F", re.sub(r"\x1b\[[JK]|\r", "", self.seen))
        return [table.splitlines() for table in drawn]


def test_a_terminal_is_never_scrolled(here: Here) -> None:
    path = here.file("""
        workflow:
          name: w
          tasks:
          {% for i in range(30) %}
          - {name: t{{i}}, command: [bash, -c, "{{ {11: 'exit 7', 29: 'read x < OUT/go'}.get(i, 'true') }}"]}
          {% endfor %}
    """)
    terminal = Terminal(here, 12, 40, "submit", str(path))
    made = here.folder / "workflows/w-1/standing.json"
    here.until(lambda: made.exists() and list(here.states().values()).count("completed") == 28)
    looking = Terminal(here, 50, 100, "status", "-f")
    here.until(lambda: "t29" in looking.seen)
    go(here)
    assert terminal.wait() == 7 and looking.wait() == 0
    for table in terminal.tables()[1:-1]:
        assert len(table) <= 11 and max(map(len, table)) <= 40, table
    *_, last = terminal.tables()
    assert last[0].startswith("task  state") and last[-1].startswith("w-1: failed; 29 completed, 1 failed")
    assert any(line.startswith("t11   failed") and line.endswith("…") for line in last)  # it stays in sight
    assert last[-2] == "... and 21 more: 21 completed"
    *_, last = looking.tables()
    assert len(last) == 32 and last[12].split() == ["t11", "failed", "node-1", "1", "0", "-", "exit", "code", "7"]


def test_cut_to_a_narrow_terminal(here: Here) -> None:
    path = here.file("workflow: {name: w, tasks: [{name: a, command: [bash, -c, 'exit 7']}]}\n")
    assert here.run("submit", str(path))[0] == 7
    terminal = Terminal(here, 24, 30, "status")
    assert terminal.wait() == 0
    assert terminal.seen.splitlines()[:2] == ["task  state   node    attempt…", "a     failed  node-1  1      …"]
    assert "exit code 7" in here.run("status")[1]
