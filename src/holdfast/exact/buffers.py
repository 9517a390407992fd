"""Many tensors in few: one flat buffer for each dtype and device, which is what is summed and sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor

_ALIGNMENT_BYTES = 64  # where a tensor begins in a flat buffer, so that vector loads work on its view


class Spec(NamedTuple):
    """What a flat buffer is."""

    size: int
    dtype: torch.dtype
    device: torch.device

    def zeros(self) -> torch.Tensor:
        return torch.zeros(self.size, dtype=self.dtype, device=self.device)


class _Place(NamedTuple):
    """Where one tensor lies, with its dimensions in the order in which it lies in memory: channels_last stays so."""

    number: int
    name: str
    start: int
    numel: int
    padding: int
    order: tuple[int, ...]
    ordered: tuple[int, ...]
    back: tuple[int, ...]


class _Group:
    def __init__(self, dtype: torch.dtype, device: torch.device, tensors: Sequence[tuple[int, torch.Tensor]]) -> None:
        step = _ALIGNMENT_BYTES // dtype.itemsize
        self.places: list[_Place] = []
        end = 0
        for number, tensor in tensors:
            axes = range(tensor.ndim)
            order = tuple(
                axes if tensor.is_contiguous() else sorted(axes, key=tensor.stride().__getitem__, reverse=True)
            )
            back = tuple(order.index(axis) for axis in axes)
            padding = -tensor.numel() % step
            ordered = tuple(tensor.shape[axis] for axis in order)
            name = f"tensor {number} of shape {tuple(tensor.shape)}"
            self.places.append(_Place(number, name, end, tensor.numel(), padding, order, ordered, back))
            end += tensor.numel() + padding
        self.flags = slice(end, end + len(self.places))
        self.spec = Spec(self.flags.stop, dtype, device)
        self.zero = torch.zeros(1, dtype=dtype, device=device)
        self.padding = torch.zeros(step, dtype=dtype, device=device)
        self.all_there = torch.ones(len(self.places), dtype=dtype, device=device)

    def gather(self, tensors: Sequence[torch.Tensor | None], into: torch.Tensor) -> None:
        pieces, there = [], []
        for place in self.places:
            tensor = tensors[place.number]
            there.append(tensor is not None)
            if tensor is None:
                pieces.append(self.zero.expand(place.numel))
            elif tensor.layout is not torch.strided or tensor.numel() != place.numel:
                raise ValueError(f"{place.name} came as {tensor.layout} of shape {tuple(tensor.shape)}")
            else:
                pieces.append(tensor.permute(place.order).reshape(-1))
            if place.padding:
                pieces.append(self.padding[: place.padding])
        flags = self.all_there
        if not all(there):
            flags = torch.tensor(there, dtype=self.spec.dtype).to(self.spec.device)
        torch.cat([*pieces, flags], out=into)  # half the time of _foreach_copy_ and the views it needs

    def views(self, flat: torch.Tensor) -> list[torch.Tensor | None]:
        there: list[bool] = (flat[self.flags] != 0).tolist()
        return [
            flat[place.start : place.start + place.numel].view(place.ordered).permute(place.back) if had else None
            for place, had in zip(self.places, there, strict=True)
        ]


class Flat:
    """How a list of tensors lies in flat buffers. It holds none of their contents.

    Behind its tensors a buffer has one element for each of them: 1 when it was given, 0 when there was None. These are
    summed with the rest, so that in the end all ranks know which tensors no leaf had, without a message of its own: an
    optimizer does not do the same with a gradient of zeros as with none.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        groups: dict[tuple[torch.dtype, torch.device], list[tuple[int, torch.Tensor]]] = {}
        for number, tensor in enumerate(tensors):
            if isinstance(tensor, DTensor) or tensor.layout is not torch.strided:
                raise TypeError(f"tensor {number} is sharded or sparse; exact sums need whole, dense ones")
            if not (tensor.is_floating_point() or tensor.is_complex()):
                raise TypeError(f"tensor {number} is {tensor.dtype}; only floating-point ones are summed")
            groups.setdefault((tensor.dtype, tensor.device), []).append((number, tensor))
        self._length = len(tensors)
        self._groups = [_Group(dtype, device, members) for (dtype, device), members in groups.items()]
        self.specs = [group.spec for group in self._groups]

    @torch.no_grad()
    def gather(
        self, tensors: Sequence[torch.Tensor | None], into: Sequence[torch.Tensor] | None = None
    ) -> list[torch.Tensor]:
        """Copy tensors, zeros where there is None, into the given flat buffers or into new ones."""
        if len(tensors) != self._length:
            raise ValueError(f"{len(tensors)} tensors came where there are places for {self._length}")
        flats = list(into) if into is not None else [spec.zeros() for spec in self.specs]
        for group, flat in zip(self._groups, flats, strict=True):
            group.gather(tensors, flat)
        return flats

    def views(self, flats: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """The tensors in flat buffers, in their first order, and None for those that were None in all that was summed.
        Nothing is copied: a view changes when its buffer is used again. Waits for the device."""
        found: list[torch.Tensor | None] = [None] * self._length
        for group, flat in zip(self._groups, flats, strict=True):
            for place, view in zip(group.places, group.views(flat), strict=True):
                found[place.number] = view
        return found

    @torch.no_grad()
    def scatter(self, flats: Sequence[torch.Tensor], into: Sequence[torch.Tensor]) -> list[bool]:
        """Copy out of flat buffers, and say which tensors were there; the others are left as they are."""
        views = self.views(flats)
        pairs = [(old, new) for old, new in zip(into, views, strict=True) if new is not None]
        if pairs:
            torch._foreach_copy_([old for old, _ in pairs], [new for _, new in pairs])
        return [view is not None for view in views]
