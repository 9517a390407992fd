"""Copies between the memory of CUDA devices and the host's, beside what the devices do.

`copy_(..., non_blocking=True)` is `cudaMemcpyAsync`, whatever the host's memory is (aten/src/ATen/native/cuda/Copy.cu).
It runs beside the host, at the full bandwidth of the link, if the driver knows that memory as page-locked: torch's own
pinned memory, or any that was registered, as slots are here. Where that fails the same copies are right, but slow.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch

from holdfast.checkpoint.format import Piece

_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for all devices of the process
_MOST_PINNED = 4  # two slots, and two that are no longer mapped by anybody else


_cuda: Any = torch.cuda


def new_stream(device: torch.device) -> torch.cuda.Stream:
    stream: torch.cuda.Stream = _cuda.Stream(device)
    return stream


class Pinned:
    """Memory that is registered with the driver, which takes long, so once. What is registered is kept mapped."""

    def __init__(self) -> None:
        self._known: OrderedDict[int, tuple[memoryview, bool]] = OrderedDict()

    def pin(self, data: memoryview, address: int) -> bool:
        """Whether it is page-locked now."""
        known = self._known.get(address)
        if known is not None and len(known[0]) >= len(data):
            self._known.move_to_end(address)
            return known[1]
        self._unpin(address)
        while len(self._known) >= _MOST_PINNED:
            self._unpin(next(iter(self._known)))
        error = int(_cuda.cudart().cudaHostRegister(address, len(data), _PORTABLE))
        if error:
            _clear_error()
            warnings.warn(
                f"{len(data) / 2**30:.1f} GiB of memory could not be page-locked (CUDA error {error}; `ulimit -l`?): "
                "snapshots of a GPU's memory will be several times slower",
                stacklevel=2,
            )
        self._known[address] = (data, not error)
        return not error

    def _unpin(self, address: int) -> None:
        known = self._known.pop(address, None)
        if known is not None and known[1] and int(_cuda.cudart().cudaHostUnregister(address)):
            _clear_error()

    def close(self) -> None:
        for address in list(self._known):
            self._unpin(address)

    def forget(self) -> None:
        """In a forked child, where CUDA cannot be used and nothing is registered."""
        self._known.clear()


def _clear_error() -> None:
    """The runtime keeps the last error, and torch's next kernel would be blamed for it."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")


_one_by_one: set[str] = set()  # types for which torch has no kernel that copies many


class Gathered:
    """Many small tensors of a device, and volatile ones: copied together on the device, where that takes microseconds,
    and from there to the host as one."""

    def __init__(self, pieces: Sequence[tuple[int, Piece]], host: torch.Tensor, device: torch.device) -> None:
        start = pieces[0][1].at
        end = pieces[-1][1].at + pieces[-1][1].size_bytes
        self._host = host[start:end]
        self._staging = torch.empty(end - start, dtype=torch.uint8, device=device)
        self._groups: dict[str, tuple[list[int], list[torch.Tensor]]] = {}  # by type: then it is one kernel
        for index, piece in pieces:
            indexes, views = self._groups.setdefault(piece.dtype, ([], []))
            indexes.append(index)
            views.append(piece_view(self._staging, piece, piece.at - start))

    def gather(self, sources: Sequence[torch.Tensor]) -> None:
        for dtype, (indexes, views) in self._groups.items():
            found = [sources[index] for index in indexes]
            if dtype not in _one_by_one:
                try:
                    torch._foreach_copy_(views, found)
                except NotImplementedError:
                    _one_by_one.add(dtype)
            if dtype in _one_by_one:
                for view, source in zip(views, found, strict=True):
                    view.copy_(source)

    def send(self) -> None:
        self._host.copy_(self._staging, non_blocking=True)


class Outward:
    """The copies from one device into one slot."""

    def __init__(
        self,
        device: torch.device,
        stream: torch.cuda.Stream,
        gathered: Sequence[Gathered],
        large: dict[int, torch.Tensor],
    ) -> None:
        self.device = device
        self._stream = stream
        self._gathered = gathered
        self._indexes = list(large)
        self._views = list(large.values())

    def launch(self, sources: Sequence[torch.Tensor]) -> torch.cuda.Event:
        """The sources must stay, and stay as they are, until the event has happened."""
        current = torch.cuda.current_stream(self.device)
        for gathered in self._gathered:
            gathered.gather(sources)
        self._stream.wait_stream(current)
        event: torch.cuda.Event = _cuda.Event(blocking=True)  # who waits for it sleeps
        try:
            with torch.cuda.stream(self._stream):
                for gathered in self._gathered:
                    gathered.send()
                if self._indexes:
                    large = [_resolved(sources[index]) for index in self._indexes]
                    torch._foreach_copy_(self._views, large, non_blocking=True)
                event.record(self._stream)
        except BaseException:
            with contextlib.suppress(RuntimeError):
                self._stream.synchronize()  # what was begun must not go on behind the back of the next filling
            raise
        return event


def _resolved(tensor: torch.Tensor) -> torch.Tensor:
    """torch would conjugate or negate on the host, without waiting for the bytes to be there."""
    return tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor


def piece_view(base: torch.Tensor, piece: Piece, at: int) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, piece.dtype)
    return base[at : at + piece.size_bytes].view(dtype).view(piece.sizes)
