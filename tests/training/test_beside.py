"""What keeps two ranks from being there at once for a moment, and what does not."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch

from holdfast.training import beside

FIRST_GIVEN = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])


@contextlib.contextmanager
def a_chosen_port(_: Path) -> Iterator[None]:
    for port in range(FIRST_GIVEN - 1, 1024, -1):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            yield
            return


@contextlib.contextmanager
def a_given_port(_: Path) -> Iterator[None]:
    with socket.create_server(("127.0.0.1", 0)):
        yield


@contextlib.contextmanager
def a_locked_file(folder: Path) -> Iterator[None]:
    with open(folder / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def a_shared_lock(folder: Path) -> Iterator[None]:
    with open(folder / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        yield


@contextlib.contextmanager
def a_locked_file_without_a_name(_: Path) -> Iterator[None]:
    fd = os.memfd_create("slot")
    fcntl.lockf(fd, fcntl.LOCK_EX)
    yield
    os.close(fd)


@pytest.mark.parametrize(
    ("has", "alone"),
    [
        (a_chosen_port, True),
        (a_given_port, False),
        (a_locked_file, True),
        (a_shared_lock, False),
        (a_locked_file_without_a_name, False),
    ],
)
def test_what_one_process_alone_can_have(
    has: Callable[[Path], AbstractContextManager[None]], alone: bool, tmp_path: Path
) -> None:
    assert not beside.holds_alone()
    with has(tmp_path):
        assert beside.holds_alone() is alone
    assert not beside.holds_alone()


class Gpu:
    """With so much memory; this process has some of it."""

    def __init__(self, free: int, reserved: int, most: int) -> None:
        self.free, self.reserved, self.most = free, reserved, most

    def is_initialized(self) -> bool:
        return True

    def mem_get_info(self) -> tuple[int, int]:
        return self.free, 1 << 40

    def memory_reserved(self) -> int:
        return self.reserved

    def max_memory_reserved(self) -> int:
        return self.most


def looked(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> beside.Beside:
    monkeypatch.setattr(torch, "cuda", gpu)
    found = beside.Beside()
    for _ in range(beside.LOOKS_AT):
        found.step()
    return found


@pytest.mark.parametrize(
    ("gpu", "possible"),
    [
        (Gpu(free=100 << 30, reserved=10 << 30, most=20 << 30), True),
        (Gpu(free=21 << 30, reserved=10 << 30, most=20 << 30), True),
        (Gpu(free=20 << 30, reserved=10 << 30, most=20 << 30), False),  # CUDA itself wants some
        (Gpu(free=1 << 30, reserved=60 << 30, most=60 << 30), False),
    ],
)
def test_two_are_possible_where_there_is_room_for_two(
    gpu: Gpu, possible: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert looked(gpu, monkeypatch).possible is possible


def test_what_was_taken_since_the_look_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(free=30 << 30, reserved=10 << 30, most=10 << 30)
    found = looked(gpu, monkeypatch)
    assert found.possible
    gpu.reserved = gpu.most = 25 << 30
    assert not found.possible


def test_nobody_says_so_who_has_not_looked_in_this_world(monkeypatch: pytest.MonkeyPatch) -> None:
    found = looked(Gpu(free=100 << 30, reserved=1 << 30, most=1 << 30), monkeypatch)
    found.begin_world()
    assert not found.possible


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_is_nothing_to_be_won() -> None:
    found = beside.Beside()
    for _ in range(2 * beside.LOOKS_AT):
        found.step()
    assert not found.possible
