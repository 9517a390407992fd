"""Snapshots without a training: bytes that their step determines, put into slots as a rank would."""

from __future__ import annotations

import os
import select
import socket
import subprocess
from collections.abc import Mapping

import msgspec

from holdfast.checkpoint import catalogue, shards, writing
from holdfast.checkpoint.format import Piece, Policy, Snapshot
from holdfast.checkpoint.slots import Slot
from holdfast.checkpoint.storage import open_storage

WAIT_S = 30.0
SIZE = 100_000


def a_snapshot(
    url: str, step: int, rank: int = 0, ranks: tuple[int, ...] = (0,), world: str = "w", term: int = 1, part: int = 0
) -> Snapshot:
    return Snapshot(
        url=url, term=term, generation=0, step=step, epoch=None, rank=rank, world_size=len(ranks), ranks=ranks,
        pieces=(Piece(f"x{rank}", "uint8", (SIZE,), (0,), (SIZE,), 0),), written=1, written_bytes=SIZE,
        own=msgspec.Raw(b"null"), common=msgspec.Raw(b'{"state": {}}' if rank == 0 else b"null"), metrics={},
        policy=Policy(last=0), world=world, local_size=len(ranks), part=part,
    )  # fmt: skip


def fill(slot: Slot, snapshot: Snapshot, complete: bool = True) -> None:
    assert slot.lock()
    data = slot.fill(snapshot, SIZE)
    data[:] = bytes([(snapshot.step + snapshot.part) % 251]) * SIZE
    if complete:
        slot.complete()
    slot.unlock()


def saved_steps(url: str) -> list[int]:
    """What is committed there, newest first; each shard is read and checked."""
    storage = open_storage(url)
    there = catalogue.find(storage)
    steps = []
    for found in there.found:
        assert found.step is not None
        opened = shards.open_step(storage, found)
        for rank in opened.shards:
            content = b"".join(bytes(chunk) for _, chunk in opened.chunks(rank, [(0, SIZE)]))
            assert content == bytes([found.step % 251]) * SIZE
        steps.append(found.step)
    return steps


_started: list[int] = []
_start_writer = writing.start_writer


def _start_and_note(
    owner: str, env: Mapping[str, str] | None = None, loads_torch: bool = True
) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    line, process = _start_writer(owner, env, loads_torch)
    _started.append(process.pid)
    return line, process


writing.start_writer = _start_and_note


def last_writer() -> int:
    """The one that this process started last."""
    return _started[-1]


def wait_for_end(pid: int) -> None:
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([fd], [], [], WAIT_S)[0], f"process {pid} is still there"
    finally:
        os.close(fd)
