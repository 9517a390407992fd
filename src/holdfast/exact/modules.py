"""What a model's forward changes besides its gradients: buffers, such as BatchNorm's running statistics.

The rule must not depend on which leaves share a rank. Every leaf starts from the buffers as they were when the step
began. After the step a floating-point buffer is the mean of what the leaves have left, and any other one (BatchNorm's
count of batches) is what leaf 0 has left.

The mean is taken over differences from the start. A buffer that no leaf changes then stays as it is: the mean of equal
numbers is not always that number. Where the start is not finite (a mask, an observer's first minimum), it is taken over
the values themselves.

Buffers with persistent=False are no part of a model's state by their own word, and are left alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from holdfast.exact.buffers import Flat


class _Slot(NamedTuple):
    owner: nn.Module
    name: str
    shape: torch.Size

    def now(self) -> torch.Tensor:
        """A forward may put another tensor in the place of the last one."""
        found = self.owner._buffers[self.name]
        if found is None or found.shape != self.shape:
            kind = type(self.owner).__name__
            raise ValueError(f"buffer {self.name!r} of {kind} is no longer of shape {tuple(self.shape)}")
        return found


class _Kept:
    """Some of the buffers, and what they were when the step began."""

    def __init__(self, slots: list[_Slot]) -> None:
        self.slots = slots
        self.tensors = [slot.now() for slot in slots]
        self._starts = [torch.empty_like(tensor) for tensor in self.tensors]

    def now(self) -> list[torch.Tensor]:
        return [slot.now() for slot in self.slots]

    def begin(self) -> None:
        self.tensors = self.now()
        _copy(self._starts, self.tensors)

    def put_back(self) -> None:
        for slot, tensor in zip(self.slots, self.tensors, strict=True):
            slot.owner._buffers[slot.name] = tensor
        _copy(self.tensors, self._starts)


class Buffers:
    """A module's persistent buffers through the leaves of a step. For a module without any, all of it is free."""

    def __init__(self, module: nn.Module) -> None:
        found: dict[int, tuple[bool, _Slot]] = {}
        for owner in module.modules():
            for name, tensor in owner._buffers.items():
                if tensor is not None and name not in owner._non_persistent_buffers_set:
                    found.setdefault(id(tensor), (tensor.is_floating_point(), _Slot(owner, name, tensor.shape)))
        self._floating = _Kept([slot for floating, slot in found.values() if floating])
        self._others = _Kept([slot for floating, slot in found.values() if not floating])
        self.firsts = [torch.empty_like(tensor) for tensor in self._others.tensors]
        self._flat = Flat(self.floating)
        self._flats: list[torch.Tensor] | None = None
        self._bases: list[torch.Tensor] = []  # views: the start, where it is finite, else 0
        self._as_begun = False

    @property
    def floating(self) -> list[torch.Tensor]:
        return self._floating.tensors

    @torch.no_grad()
    def begin_step(self) -> None:
        self._floating.begin()
        self._others.begin()
        self._flats = self._flat.gather(self.floating, self._flats)
        for flat in self._flats:
            torch.nan_to_num(flat, nan=0.0, posinf=0.0, neginf=0.0, out=flat)
        if not self._bases:
            self._bases = [view for view in self._flat.views(self._flats) if view is not None]
        self._as_begun = True

    @torch.no_grad()
    def begin_leaf(self) -> None:
        """Put the buffers back to where they were when the step began."""
        if not self._as_begun:
            self._put_back()
        self._as_begun = False

    @torch.no_grad()
    def after_leaf(self, leaf: int) -> list[torch.Tensor]:
        """What the leaf has added to each of `floating`, to be summed with the gradients; keeps `firsts` of leaf 0."""
        if leaf == 0:
            _copy(self.firsts, self._others.now())
        if not self._bases:
            return []
        return list(torch._foreach_sub(self._floating.now(), self._bases))

    @torch.no_grad()
    def finish(self, sums: Sequence[torch.Tensor | None], count: int) -> None:
        """Set the buffers from the sums over all leaves of what `after_leaf` gave. `firsts` must be leaf 0's by now."""
        self._put_back()
        if self._bases:
            means = torch._foreach_div([total for total in sums if total is not None], count)
            _copy(self.floating, torch._foreach_add(self._bases, means))
        _copy(self._others.tensors, self.firsts)

    def _put_back(self) -> None:
        self._floating.put_back()
        self._others.put_back()


def _copy(into: list[torch.Tensor], values: list[torch.Tensor] | tuple[torch.Tensor, ...]) -> None:
    if into:
        torch._foreach_copy_(into, values)
