"""Which thread will not get out of what it is in, and which only takes its time."""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from holdfast import linux
from holdfast.training import stuck
from holdfast.training.stuck import COLLECTIVES, IDLE, LOST, Look, Watch
from holdfast.worker.seat import LATE_S

SPIN = "import os; os.sched_setaffinity(0, {int(os.sys.argv[1])}); print(flush=True)\nwhile True: pass"
NOTHING, LATE, STUCK = Look(False, False), Look(True, False), Look(False, True)


class Thread:
    """That trains, and is watched."""

    def __init__(self, does: Callable[[], object]) -> None:
        self._does = does
        self._begun = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        self._begun.wait()

    def _run(self) -> None:
        self.watch = Watch()
        self._begun.set()
        self._does()

    def wait_until_it_waits(self) -> Watch:
        assert self.thread.native_id is not None
        while linux.state(self.thread.native_id) != "S":
            time.sleep(0.001)
        self.watch.begin()
        return self.watch


@pytest.fixture
def comes() -> Iterator[threading.Lock]:
    """What is waited for."""
    lock = threading.Lock()
    lock.acquire()
    yield lock
    lock.release()


def in_file(name: str, lock: threading.Lock) -> Callable[[], object]:
    """Code of that file, which waits there."""
    there: dict[str, Callable[[], object]] = {"acquire": lock.acquire}
    exec(compile("def wait(): acquire()", name, "exec"), there)
    return there["wait"]


def test_one_that_waits_for_what_never_comes_is_stuck(comes: threading.Lock) -> None:
    watch = Thread(comes.acquire).wait_until_it_waits()
    half = IDLE // 2
    assert [watch.look() for _ in range(IDLE)] == [NOTHING] * (half - 1) + [LATE] + [NOTHING] * (half - 1) + [STUCK]
    watch.begin()
    assert watch.look() == NOTHING, "of another world"


@pytest.mark.parametrize("folder", COLLECTIVES)
def test_in_a_collective_it_is_so_sooner(folder: str, comes: threading.Lock) -> None:
    watch = Thread(in_file(f"{folder}any.py", comes)).wait_until_it_waits()
    assert [watch.look() for _ in range(LOST)] == [LATE, STUCK]


def test_but_not_where_that_may_yet_come_to_its_end(comes: threading.Lock) -> None:
    watch = Thread(in_file(f"{COLLECTIVES[0]}any.py", comes)).wait_until_it_waits()
    assert [watch.look(collectives=False) for _ in range(LOST)] == [NOTHING] * LOST


def test_one_that_has_done_something_since_is_not(monkeypatch: pytest.MonkeyPatch, comes: threading.Lock) -> None:
    watch = Thread(comes.acquire).wait_until_it_waits()
    now_s = 0.0
    monkeypatch.setattr(Watch, "_now_s", lambda self: now_s)
    watch.begin()
    for _ in range(IDLE - 1):
        assert not watch.look().stuck
    now_s += 0.01
    assert [watch.look() for _ in range(IDLE)].count(STUCK) == 0
    assert watch.look() == STUCK


def test_one_that_does_something_is_waited_for_only_so_long(
    monkeypatch: pytest.MonkeyPatch, comes: threading.Lock
) -> None:
    monkeypatch.setattr(stuck, "BUSY", 3)
    monkeypatch.setattr(Watch, "_now_s", lambda self: time.monotonic() * 1e6)
    watch = Thread(comes.acquire).watch
    assert [watch.look() for _ in range(3)] == [NOTHING, NOTHING, Look(late=True, stuck=True)]


def test_one_that_may_wait_for_its_gpu_is_late_all_the_same(
    monkeypatch: pytest.MonkeyPatch, comes: threading.Lock
) -> None:
    """Or for the store, as NCCL does with its first collective."""
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    watch = Thread(in_file(f"{COLLECTIVES[0]}any.py", comes)).wait_until_it_waits()
    assert [watch.look().late for _ in range(3)] == [True, False, False]
    assert not any(watch.look().stuck for _ in range(stuck.BUSY - 4)) and watch.look().stuck


def test_one_that_waits_for_a_core_is_not() -> None:
    """It is to run when nobody else wants to, on a core that somebody always wants."""
    cores = os.sched_getaffinity(0)

    def works() -> None:
        os.sched_setaffinity(0, {min(cores)})
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        begun.set()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 100_000)  # and holds no GIL

    begun = threading.Event()
    with subprocess.Popen([sys.executable, "-c", SPIN, str(min(cores))], stdout=subprocess.PIPE) as spins:
        try:
            assert spins.stdout is not None and spins.stdout.readline()
            thread = Thread(works)
            begun.wait()
            for _ in range(2):
                time.sleep(LATE_S)
                assert thread.watch.look() == NOTHING
        finally:
            spins.kill()
    with contextlib.suppress(ProcessLookupError):
        os.sched_setaffinity(thread.thread.native_id or 0, cores)
