"""Stacks of real processes, whatever keeps them: Python, C with the interpreter's lock, a stop, a data loader."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast import linux
from holdfast.agent import dumps, native_stacks
from holdfast.agent.dumps import Target
from holdfast.control import stacks
from holdfast.control.stacks import Stack
from holdfast.worker.stacks import STACK_SIGNAL

# As the zygote is started: the bottom frame is a <string>.
BOOTSTRAP = """
import sys, runpy
if "cold" not in sys.argv:
    from holdfast.worker import stacks
    stacks.install(int(sys.argv[2]))
runpy.run_path(sys.argv[1])
"""
SLEEPS = "import time\ndef read():\n    ready()\n    time.sleep(60)\nread()\n"
LOOPS = "def spin():\n    ready()\n    while True:\n        pass\nspin()\n"
HOLDS_THE_LOCK = (
    "import ctypes\nlibc = ctypes.PyDLL(None)\ndef hold():\n    ready()\n    while True: libc.sleep(60)\nhold()\n"
)
HAS_THREADS = """
import threading, time
def other():
    time.sleep(60)
for _ in range(5):
    threading.Thread(target=other, daemon=True).start()
def waits():
    ready()
    time.sleep(60)
waits()
"""
IS_DEEP = "import time\ndef deep(n):\n    if n: deep(n - 1)\n    ready()\n    time.sleep(60)\ndeep(150)\n"
LOADS = """
import os, time, torch
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, i):
        ready()
        time.sleep(60)
def main():
    next(iter(torch.utils.data.DataLoader(Data(), num_workers=1)))
main()
"""


class Ranks:
    """Processes with the handler, each at its script."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self._fds: list[int] = []

    def start(self, script: str, cold: bool = False) -> Target:
        rank = len(self._processes)
        path = self._folder / f"user{rank}.py"
        ready_r, ready_w = os.pipe()
        # Not a Python function, so that there is never a frame of it.
        path.write_text(f"import functools, os; ready = functools.partial(os.write, {ready_w}, b'.')\n{script}")
        read_end, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        process = subprocess.Popen(
            [sys.executable, "-c", BOOTSTRAP, str(path), str(write_end), *(["cold"] if cold else [])],
            pass_fds=[write_end, ready_w],
            start_new_session=True,
        )
        os.close(write_end)
        os.close(ready_w)
        self._processes.append(process)
        self._fds.append(read_end)
        assert os.read(ready_r, 1) == b"."
        os.close(ready_r)
        while script != LOOPS and linux.state(process.pid) != "S":
            os.sched_yield()
        return Target(rank, process.pid, -1 if cold else read_end)

    def alive(self, target: Target) -> bool:
        return self._processes[target.rank].poll() is None

    def end(self, target: Target) -> None:
        for pid in [target.pid, *linux.descendants(target.pid)]:
            linux.end(pid, wait_s=5.0)
        self._processes[target.rank].wait()

    def close(self) -> None:
        for rank, process in enumerate(self._processes):
            self.end(Target(rank, process.pid, -1))
        for fd in self._fds:
            os.close(fd)


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    found = Ranks(tmp_path)
    yield found
    found.close()


def take(*targets: Target, folder: Path | None = None, native: bool = False) -> tuple[Stack, ...]:
    async def scene() -> tuple[Stack, ...]:
        taken = await dumps.take(targets, str(folder) if folder is not None else None, native)
        loop = asyncio.get_running_loop()
        assert not any(loop.remove_reader(target.fd) for target in targets if target.fd >= 0)
        return taken

    return asyncio.run(scene())


def places(found: tuple[Stack, ...]) -> list[tuple[str, str]]:
    """File and function of each rank's innermost frame."""
    return [(os.path.basename(one.frames[0].file), one.frames[0].function) for one in found]


def wait_until_stopped(pid: int) -> None:
    """Like every signal, a stop takes effect a moment after it is sent."""
    while linux.state(pid) != "T":
        os.sched_yield()


def test_ranks_in_python_and_in_c_are_seen_and_go_on(ranks: Ranks) -> None:
    targets = [ranks.start(SLEEPS), ranks.start(LOOPS), ranks.start(HOLDS_THE_LOCK)]
    found = take(*targets)
    assert places(found) == [("user0.py", "read"), ("user1.py", "spin"), ("user2.py", "hold")]
    assert [one.rank for one in found] == [0, 1, 2]
    assert {(one.state, one.note) for one in found} == {("", "")}
    assert all(one.frames[-1].function == "<module>" for one in found)  # ours below it are left out
    assert all(map(ranks.alive, targets))


def test_the_main_thread_is_the_one_of_many_that_counts(ranks: Ranks) -> None:
    assert places(take(ranks.start(HAS_THREADS))) == [("user0.py", "waits")]


def test_a_deep_stack_is_cut_at_its_outer_end(ranks: Ranks) -> None:
    (found,) = take(ranks.start(IS_DEEP))
    assert len(found.frames) == 100
    assert [frame.line for frame in found.frames[:3]] == [6, 4, 4]


def test_a_look_may_be_repeated_and_two_may_come_at_once(ranks: Ranks) -> None:
    target = ranks.start(SLEEPS)

    async def scene() -> None:
        both = await asyncio.gather(dumps.take([target], None), dumps.take([target], None))
        assert both[0] == both[1]
        assert both[0][0].frames

    asyncio.run(scene())
    assert places(take(target)) == [("user0.py", "read")]


def test_a_stopped_rank_is_seen_and_still_stopped(ranks: Ranks) -> None:
    stopped, other = ranks.start(SLEEPS), ranks.start(SLEEPS)
    os.kill(stopped.pid, signal.SIGSTOP)
    wait_until_stopped(stopped.pid)
    found = take(stopped, other)
    assert places(found) == [("user0.py", "read"), ("user1.py", "read")]
    assert [one.state for one in found] == [stacks.STOPPED, ""]
    assert stacks.suspects(stacks.group(found)) == (0,)
    wait_until_stopped(stopped.pid)
    os.kill(stopped.pid, signal.SIGCONT)
    assert places(take(stopped)) == [("user0.py", "read")]


def test_a_cold_rank_is_not_harmed(ranks: Ranks) -> None:
    cold = ranks.start(SLEEPS, cold=True)
    assert take(cold) == (Stack(0, note="started cold"),)
    assert ranks.alive(cold)


def test_a_rank_without_our_handler_is_not_harmed_whatever_we_were_told(ranks: Ranks) -> None:
    cold, warm = ranks.start(SLEEPS, cold=True), ranks.start(SLEEPS)
    found = take(Target(0, cold.pid, warm.fd))
    assert found == (Stack(0, note="it closed our pipe or took our signal"),)
    assert ranks.alive(cold)


def test_a_rank_that_closed_our_pipe_keeps_its_own_files_clean(ranks: Ranks, tmp_path: Path) -> None:
    own = tmp_path / "checkpoint"
    script = f"import os, sys\nos.close(int(sys.argv[2]))\nfile = open({str(own)!r}, 'w')\n"
    script += "assert file.fileno() <= int(sys.argv[2])\nos.dup2(file.fileno(), int(sys.argv[2]))\n"
    (found,) = take(ranks.start(script + SLEEPS))
    assert found.note == "it closed our pipe or took our signal"
    assert own.read_bytes() == b""


def test_a_rank_whose_program_has_ended_is_seen_to_shut_down(ranks: Ranks) -> None:
    (found,) = take(ranks.start("import atexit, time\natexit.register(time.sleep, 60)\nready()\n"))
    assert stacks.describe(stacks.group([found])) == "rank 0 in Python's shutdown"


def test_a_look_that_comes_after_pythons_end_does_not_kill_the_rank(ranks: Ranks) -> None:
    last = "ctypes.pythonapi.Py_AtExit(ctypes.cast(ctypes.CDLL(None).pause, ctypes.c_void_p))"
    target = ranks.start(f"import ctypes\n{last}\nready()\n")
    while dumps._listens(target.pid, target.fd):
        os.sched_yield()
    os.kill(target.pid, STACK_SIGNAL)
    assert take(target)[0].note == "it closed our pipe or took our signal"
    assert ranks.alive(target)


def test_a_rank_that_is_gone_is_no_trouble(ranks: Ranks) -> None:
    gone, here = ranks.start(SLEEPS), ranks.start(SLEEPS)
    ranks.end(gone)
    found = take(gone, here)
    assert found[0] == Stack(0, note="gone")
    assert found[1].frames


def test_a_rank_that_goes_while_it_is_looked_at_is_no_trouble(ranks: Ranks) -> None:
    """Its main thread blocks the signal, so that the look lasts until the end comes."""
    target = ranks.start("import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\n" + SLEEPS)

    async def scene() -> tuple[Stack, ...]:
        look = asyncio.create_task(dumps.take([target], None))
        await asyncio.sleep(0.02)
        os.kill(target.pid, signal.SIGKILL)
        return await look

    (found,) = asyncio.run(scene())
    assert not found.frames
    assert found.note


def test_what_came_too_late_for_one_look_is_not_in_the_next(ranks: Ranks) -> None:
    target = ranks.start(SLEEPS)
    os.kill(target.pid, STACK_SIGNAL)
    assert select.select([target.fd], [], [], 10)[0]
    (found,) = take(target)
    assert [frame.function for frame in found.frames] == ["read", "<module>"]


def test_the_worker_of_a_data_loader_is_named(ranks: Ranks, tmp_path: Path) -> None:
    target = ranks.start(LOADS)
    while not (found := take(target, folder=tmp_path / "out")[0]).workers:
        pass  # the worker is there, and the rank is not done yet with having started it
    (one,) = stacks.group([found])
    assert one.what in ("user0.py:8 __getitem__ (data loader worker)", "user0.py:9 __getitem__ (data loader worker)")
    assert not one.collective
    assert (tmp_path / "out/rank_0.txt").read_text().count("-- data loader worker, pid ") == len(found.workers)


def test_files_tell_the_same(ranks: Ranks, tmp_path: Path) -> None:
    targets = [ranks.start(SLEEPS), ranks.start(SLEEPS, cold=True)]
    take(*targets, folder=tmp_path / "a/b")
    first = (tmp_path / "a/b/rank_0.txt").read_text()
    assert first.startswith(f"rank 0, pid {targets[0].pid}\n\nCurrent thread 0x")
    assert 'user0.py", line 5 in read' in first
    assert (tmp_path / "a/b/rank_1.txt").read_text() == f"rank 1, pid {targets[1].pid}, started cold\n"
    summary = (tmp_path / "a/b/summary.txt").read_text()
    assert summary.startswith("rank 0 in user0.py:5 read, rank 1 in an unknown place (started cold)\n")


@pytest.mark.parametrize("where", ["/proc/nowhere", "/dev/full"])
def test_without_room_for_files_there_are_still_stacks(ranks: Ranks, where: str) -> None:
    (found,) = take(ranks.start(SLEEPS), folder=Path(where), native=True)
    assert found.frames


def tool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str) -> None:
    path = tmp_path / "py-spy"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setattr(native_stacks, "tool", lambda: str(path))


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ('echo "C frames of $*"', "C frames of dump --native --pid {pid}"),
        ("echo 'Error: Permission Denied'; echo more; exit 1", "py-spy failed: Error: Permission Denied"),
        ("exec sleep 30", "py-spy took more than 0.2 s"),
    ],
)
def test_what_py_spy_says_is_added(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, said: str
) -> None:
    tool(monkeypatch, tmp_path, script)
    if "more than 0.2 s" in said:
        monkeypatch.setattr(native_stacks, "LIMIT_S", 0.2)
    target = ranks.start(SLEEPS)
    take(target, folder=tmp_path, native=True)
    page = (tmp_path / "rank_0.txt").read_text()
    assert page.endswith(f"\n-- with C frames, by py-spy\n\n{said.format(pid=target.pid)}\n")


def test_without_py_spy_nothing_is_added(ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_stacks, "tool", lambda: None)
    take(ranks.start(SLEEPS), folder=tmp_path, native=True)
    assert "py-spy" not in (tmp_path / "rank_0.txt").read_text()


@pytest.mark.skipif(native_stacks.tool() is None, reason="py-spy is not installed")
def test_the_real_py_spy_shows_c_frames_or_says_why_not(ranks: Ranks, tmp_path: Path) -> None:
    take(ranks.start(HOLDS_THE_LOCK), folder=tmp_path, native=True)
    page = (tmp_path / "rank_0.txt").read_text().partition("-- with C frames, by py-spy\n\n")[2]
    assert "nanosleep" in page or page.startswith("py-spy failed: ")
