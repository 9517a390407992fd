"""Slots, with real processes that fill them and are killed while they do."""

from __future__ import annotations

import gc
import mmap
import os
import random
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from holdfast.checkpoint import slots
from holdfast.checkpoint.errors import CheckpointError
from holdfast.checkpoint.format import Piece, Policy, Snapshot
from holdfast.checkpoint.slots import DATA_AT, Slot


def snapshot(step: int, size: int = 1000, world: str = "w0", extra: str = "") -> Snapshot:
    return Snapshot(
        url="/nowhere", term=1, generation=0, step=step, epoch=None, rank=3, world_size=4, ranks=(0, 1, 2, 3),
        pieces=(Piece("x", "uint8", (size,), (0,), (size,), 0),), written=1, written_bytes=size,
        own=msgspec.Raw(b"null"), common=msgspec.Raw(msgspec.json.encode({"state": extra})), metrics={},
        policy=Policy(), world=world,
    )  # fmt: skip


@pytest.fixture
def fd() -> Iterator[int]:
    fd = os.memfd_create("slot")
    yield fd
    os.close(fd)


def fill(slot: Slot, step: int, size: int = 1000, **rest: Any) -> None:
    data = slot.fill(snapshot(step, size, **rest), size)
    data[:] = bytes([step % 256]) * size
    slot.complete()


def mappings(fd: int) -> int:
    inode = os.fstat(fd).st_ino
    with open("/proc/self/maps") as maps:
        return sum(line.split()[4] == str(inode) and "memfd:slot" in line for line in maps)


# -- what is in it -----------------------------------------------------------------------------------------------------


def test_what_was_filled_is_loaded(fd: int) -> None:
    fill(Slot(fd), 7)
    loaded = Slot(fd).load()  # by another, with a mapping of its own
    assert loaded is not None
    assert loaded[0] == snapshot(7)
    assert loaded[1] == bytes([7]) * 1000
    assert Slot(fd).peek() == slots.Head(step=7, world="w0", rank=3, complete=True, sequence=1)


def test_an_empty_one_is_nothing(fd: int) -> None:
    slot = Slot(fd)
    assert slot.peek() is None and slot.load() is None
    os.ftruncate(fd, 100)
    assert slot.peek() is None and slot.load() is None
    os.ftruncate(fd, 10_000)
    assert slot.peek() is None and slot.load() is None
    fill(slot, 1)
    assert slot.peek() is not None


def test_one_that_is_being_filled_is_not_loaded(fd: int) -> None:
    slot = Slot(fd)
    fill(slot, 1)
    slot.fill(snapshot(2), 1000)
    for reader in (slot, Slot(fd)):
        head = reader.peek()
        assert head is not None and not head.complete and head.step == 2
        assert reader.load() is None
    slot.complete()
    assert slot.load() is not None
    with pytest.raises(RuntimeError):
        slot.complete()
    slot.clear()
    assert slot.peek() is None and slot.load() is None


def test_an_empty_state_is_a_state(fd: int) -> None:
    slot = Slot(fd)
    empty = msgspec.structs.replace(snapshot(1), pieces=(), written=0, written_bytes=0)
    assert len(slot.fill(empty, 0)) == 0
    slot.complete()
    loaded = Slot(fd).load()
    assert loaded is not None and loaded[0] == empty and len(loaded[1]) == 0


@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, 300_000])
def test_it_grows_and_shrinks(fd: int, size: int) -> None:
    slot, reader = Slot(fd), Slot(fd)
    for step, part in enumerate([size, 10 * size, size, 30 * size, 1], 1):
        fill(slot, step, part, extra="x" * part if part < 5000 else "")
        loaded = reader.load()
        assert loaded is not None and loaded[0].step == step
        assert loaded[1] == bytes([step]) * part


def test_what_it_does_not_need_any_more_is_given_back(fd: int) -> None:
    slot = Slot(fd)
    fill(slot, 1, 80 << 20)
    kept = slot.load()
    assert kept is not None
    fill(slot, 2, 1000)
    assert os.fstat(fd).st_blocks * 512 < 10 << 20
    assert kept[1][70 << 20] == 0  # who still looks there is not killed for it


def test_a_step_with_another_digit_needs_no_new_mapping(fd: int) -> None:
    slot = Slot(fd)
    fill(slot, 9, 1 << 20)
    address, size = slot.address, slot.size_bytes
    for step in (10, 99, 100, 10**9):
        fill(slot, step, 1 << 20, extra="x" * 1000)
    assert (slot.address, slot.size_bytes) == (address, size)
    assert mappings(fd) == 1


def test_memory_is_there_before_it_is_filled(fd: int) -> None:
    slot = Slot(fd)
    slot.reserve(8 << 20)
    assert os.fstat(fd).st_blocks * 512 >= 8 << 20
    address = slot.address
    fill(slot, 1, 8 << 20)
    assert slot.address == address and address % mmap.PAGESIZE == 0


def test_an_older_kernel_will_do(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "_MADV_POPULATE_WRITE", 9999)
    slot = Slot(fd)
    fill(slot, 1, 5 << 20)
    fill(slot, 2, 9 << 20)
    loaded = slot.load()
    assert loaded is not None and loaded[1] == bytes([2]) * (9 << 20)


def test_too_little_memory_is_said_and_leaves_nothing_torn() -> None:
    """A file that may not grow stands for a machine whose memory is used up."""
    fd = os.memfd_create("slot", os.MFD_ALLOW_SEALING)
    slot = Slot(fd)
    fill(slot, 1)
    import fcntl

    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    with pytest.raises(CheckpointError, match=r"no memory for a snapshot of 0\.1 GiB"):
        slot.fill(snapshot(2, 100 << 20), 100 << 20)
    assert slot.load() is None
    fill(slot, 3)
    assert slot.load() is not None
    os.close(fd)


# -- damage ------------------------------------------------------------------------------------------------------------


def test_every_flipped_byte_of_header_and_index_is_found(fd: int) -> None:
    slot = Slot(fd)
    fill(slot, 1, 100)
    content = os.pread(fd, slot.size_bytes, 0)
    index_at = content.index(b'{"url"')
    index_end = content.rindex(b"}") + 1
    places = [*range(slots._HEADER_BYTES), *range(index_at, index_end)]
    chance = random.Random(1)
    for place in places:
        os.pwrite(fd, bytes([content[place] ^ (1 << chance.randrange(8))]), place)
        assert Slot(fd).load() is None, place
        os.pwrite(fd, content[place : place + 1], place)
    assert Slot(fd).load() is not None


def test_an_index_that_speaks_of_other_bytes_is_not_loaded(fd: int) -> None:
    wrong: dict[str, dict[str, Any]] = {
        "piece outside": {"pieces": (Piece("x", "uint8", (5000,), (0,), (5000,), 0),)},
        "piece before": {"pieces": (Piece("x", "uint8", (10,), (0,), (10,), -5),)},
        "type": {"pieces": (Piece("x", "object", (10,), (0,), (10,), 0),)},
        "negative": {"pieces": (Piece("x", "uint8", (10,), (0,), (-10,), 0),)},
        "written": {"written": 2},
        "written_bytes": {"written_bytes": 1001},
    }
    for name, change in wrong.items():
        slot = Slot(fd)
        slot.fill(msgspec.structs.replace(snapshot(1), **change), 1000)
        slot.complete()
        assert Slot(fd).load() is None, name


def test_a_cut_file_is_not_loaded(fd: int) -> None:
    fill(Slot(fd), 1, 100_000)
    size = os.fstat(fd).st_size
    os.ftruncate(fd, DATA_AT + 50_000)
    assert Slot(fd).load() is None
    os.ftruncate(fd, size)  # the index is zeros now
    assert Slot(fd).load() is None


# -- mappings ----------------------------------------------------------------------------------------------------------


def test_views_outlive_the_slot_and_the_mapping_goes_with_the_last(fd: int) -> None:
    import torch

    slot = Slot(fd)
    fill(slot, 5, 1 << 20)
    loaded = slot.load()
    assert loaded is not None
    tensor = torch.frombuffer(loaded[1], dtype=torch.uint8)[100:]
    del loaded
    slot.close()
    slot.close()
    gc.collect()
    assert mappings(fd) == 1
    assert int(tensor.sum()) == 5 * len(tensor)
    del tensor
    assert mappings(fd) == 0
    assert slot.load() is not None  # and may be used again


def test_thousands_of_fills_keep_nothing(fd: int) -> None:
    slot = Slot(fd)
    before = len(os.listdir("/proc/self/fd"))
    for step in range(3000):
        fill(slot, step, 1000 + step % 7)
        slot.load()
        slot.peek()
    assert mappings(fd) == 1
    assert len(os.listdir("/proc/self/fd")) == before
    head = slot.peek()
    assert head is not None and head.sequence == 3000


# -- processes ---------------------------------------------------------------------------------------------------------

FILLER = """
import os, sys, signal
sys.path.insert(0, {tests!r})
from test_slots import snapshot, fill
from holdfast.checkpoint.slots import Slot
assert "torch" not in sys.modules
fd = int(sys.argv[1])
slot = Slot(fd)
def say(text):
    os.write(1, (text + "\\n").encode())
"""


def start(body: str, fd: int, **environ: str) -> subprocess.Popen[bytes]:
    code = FILLER.format(tests=os.path.dirname(__file__)) + body
    return subprocess.Popen(
        [sys.executable, "-c", code, str(fd)],
        pass_fds=[fd],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | environ,
    )


def line(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], 30)
    assert ready, "it says nothing"
    return process.stdout.readline().decode().strip()


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


def test_the_lock_is_of_a_process_and_goes_with_it(fd: int) -> None:
    other = start("say(str(slot.lock())); sys.stdin.read()", fd)
    assert line(other) == "True"
    slot = Slot(fd)
    assert not slot.lock()
    end(other)
    assert slot.lock()

    third = start("say(str(slot.lock())); sys.stdin.readline(); say(str(slot.lock())); sys.stdin.read()", fd)
    assert line(third) == "False"
    slot.unlock()
    assert third.stdin is not None
    third.stdin.write(b"\n")
    third.stdin.flush()
    assert line(third) == "True"
    assert not slot.lock()
    end(third)


def test_filling_growing_and_closing_keep_the_lock(fd: int) -> None:
    """Python's own mmap would drop it whenever a mapping is closed."""
    body = """
assert slot.lock()
fill(slot, 1)
fill(slot, 2, 90_000_000)
fill(slot, 3, 10)
slot.load()
slot.close()
say("grown")
sys.stdin.read()
"""
    filler = start(body, fd)
    assert line(filler) == "grown"
    assert not Slot(fd).lock()
    end(filler)


def test_a_forked_child_does_not_keep_the_lock(fd: int) -> None:
    body = """
assert slot.lock()
child = os.fork()
if child == 0:
    say(f"child {os.getpid()} {slot.lock()}")
    slot.unlock()
    slot.close()
    sys.stdin.read()
    os._exit(0)
os.waitpid(child, 0)
"""
    filler = start(body, fd)
    _, child, got = line(filler).split()
    assert got == "False"
    slot = Slot(fd)
    assert not slot.lock()  # what the child did to it has changed nothing
    filler.kill()
    filler.wait()
    try:
        assert slot.lock()
    finally:
        os.kill(int(child), signal.SIGKILL)
        filler.communicate()


def test_two_that_contend_never_both_have_it(fd: int) -> None:
    """Each writes its number, looks again, and counts how often it had the lock."""
    body = """
import mmap
page = mmap.mmap(-1, 1)  # only so that this process has other mappings
had = 0
shared = os.open(sys.argv[2], os.O_RDWR)
while had < 300:
    if slot.lock():
        mine = os.getpid().to_bytes(4, "little")
        os.pwrite(shared, mine, 0)
        fill(slot, had)
        assert os.pread(shared, 4, 0) == mine, "somebody else was here"
        had += 1
        slot.unlock()
say("done")
"""
    shared = os.memfd_create("shared")
    os.truncate(f"/proc/self/fd/{shared}", 4)
    code = FILLER.format(tests=os.path.dirname(__file__)) + body
    both = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(fd), f"/proc/{os.getpid()}/fd/{shared}"],
            pass_fds=[fd],
            stdout=subprocess.PIPE,
        )
        for _ in range(2)
    ]
    assert [process.communicate(timeout=60)[0] for process in both] == [b"done\n"] * 2
    os.close(shared)


@pytest.mark.parametrize("point", ["slot.filling", "slot.indexed", "slot.complete.before", "slot.complete.after"])
def test_killed_at_each_point_of_a_filling(fd: int, point: str) -> None:
    fill(Slot(fd), 1)
    filler = start("slot.lock(); fill(slot, 2, 4_000_000); say('alive')", fd, HOLDFAST_FAULT=point)
    assert filler.communicate(timeout=60)[0] == b""
    assert filler.returncode == -signal.SIGKILL
    slot = Slot(fd)
    assert slot.lock()
    loaded = slot.load()
    if point == "slot.complete.after":
        assert loaded is not None and loaded[0].step == 2 and loaded[1] == bytes([2]) * 4_000_000
    else:
        assert loaded is None
    fill(slot, 3, 2000)
    loaded = slot.load()
    assert loaded is not None and loaded[0].step == 3 and loaded[1] == bytes([3]) * 2000


def test_killed_at_any_moment_it_is_complete_or_not_loaded(fd: int) -> None:
    """A process fills it again and again, larger and smaller, and is killed at a random moment."""
    body = """
import random
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for seed in sys.stdin:
    if os.fork() == 0:
        say(str(os.getpid()))
        chance = random.Random(int(seed))
        step = 0
        while True:
            step += 1
            fill(slot, step, chance.choice([100, 5_000, 300_000]), extra="x" * chance.randrange(3000))
"""
    nursery = start(body, fd)
    assert nursery.stdin is not None
    chance = random.Random(3)
    reader = Slot(fd)
    outcomes = {"whole": 0, "torn": 0}
    for seed in range(60):
        nursery.stdin.write(f"{seed}\n".encode())
        nursery.stdin.flush()
        pidfd = os.pidfd_open(int(line(nursery)))
        select.select([pidfd], [], [], chance.random() * 0.02)
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        select.select([pidfd], [], [], 30)
        os.close(pidfd)
        loaded = reader.load()
        outcomes["whole" if loaded else "torn"] += 1
        if loaded is not None:
            step, size = loaded[0].step, loaded[0].pieces[0].sizes[0]
            assert loaded[1] == bytes([step % 256]) * size
    end(nursery)
    assert min(outcomes.values()) > 0, outcomes
