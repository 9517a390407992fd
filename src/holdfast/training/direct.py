"""A state that is on a GPU, straight from the memory of another process of the same machine: CUDA's IPC by libcuda.

Torch has the same, with a file in shared memory for each process that has ever given something away, which a killed one
leaves behind. Here nothing is counted: who gives waits until all have taken.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """Where a tensor's bytes are: in which allocation, and how far into it."""

    block: int
    offset: int
    size: int


class Given(msgspec.Struct, frozen=True, array_like=True):
    blocks: list[bytes]  # handles of allocations
    pieces: dict[str, Piece]


@functools.cache
def machine() -> str:
    """Two processes with the same can open each other's handles. One without a GPU has none."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return ""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def give(tensors: Mapping[str, torch.Tensor]) -> Given:
    """Those of them that are on a GPU, in one piece, in memory that can be opened elsewhere."""
    driver = _driver()
    blocks: dict[int, int] = {}  # at an address, which of the handles
    given = Given([], {})
    for key, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if not size or not tensor.is_cuda or not tensor.is_contiguous():
            continue
        base, handle = ctypes.c_uint64(), ctypes.create_string_buffer(_HANDLE_BYTES)
        if driver.cuMemGetAddressRange_v2(ctypes.byref(base), None, ctypes.c_uint64(tensor.data_ptr())):
            continue
        if base.value not in blocks:
            if driver.cuIpcGetMemHandle(handle, base):
                continue
            blocks[base.value] = len(given.blocks)
            given.blocks.append(handle.raw)
        given.pieces[key] = Piece(blocks[base.value], tensor.data_ptr() - base.value, size)
    torch.cuda.synchronize()
    return given


def take(given: Given, targets: Mapping[str, torch.Tensor]) -> bool:
    """Copy it into these. False: it cannot be opened here."""
    wanted = [(piece, targets[key]) for key, piece in given.pieces.items() if key in targets]
    if not all(target.is_contiguous() for _, target in wanted):
        return False
    opened = _open(given.blocks)
    if opened is None:
        return False
    ends = [0] * len(opened)
    for piece, _ in wanted:
        ends[piece.block] = max(ends[piece.block], piece.offset + piece.size)
    blocks = [torch.as_tensor(_Memory(address, end)) for address, end in zip(opened, ends, strict=True)]
    with torch.no_grad():
        for piece, target in wanted:
            target.view(-1).view(torch.uint8).copy_(blocks[piece.block][piece.offset : piece.offset + piece.size], True)
    torch.cuda.synchronize()
    # Nobody has to wait for that.
    closing = threading.Thread(
        target=_close_beside, args=(torch.cuda.current_device(), opened), name="holdfast-direct", daemon=True
    )
    closing.start()
    return True


class _Memory:
    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3
        }  # fmt: skip


def _open(handles: Sequence[bytes]) -> list[int] | None:
    """The addresses of allocations of another process."""
    driver = _driver()
    found: list[int] = []
    for handle in handles:
        address = ctypes.c_uint64()
        if driver.cuIpcOpenMemHandle_v2(ctypes.byref(address), _Handle(*handle), _LAZY_PEER_ACCESS):
            _close(found)
            return None
        found.append(address.value)
    return found


def _close_beside(device: int, opened: Sequence[int]) -> None:
    torch.cuda.set_device(device)  # a new thread has no context, and libcuda closes nothing without one
    _close(opened)


def _close(opened: Sequence[int]) -> None:
    for address in opened:
        _driver().cuIpcCloseMemHandle(ctypes.c_uint64(address))


class _Handle(ctypes.Structure):
    """It goes by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * _HANDLE_BYTES),)

    def __init__(self, *content: int) -> None:
        super().__init__((ctypes.c_ubyte * _HANDLE_BYTES)(*content))


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")
