"""Gradients of a global batch that do not depend on how it is split over ranks.

A script computes the mean loss of what it was given, and calls `backward()`. What the model gave it is hooked, so that
the gradient that comes back is weighted by how much of the global batch that was; where a step has several units, what
one has left in `.grad` is put away when its backward ends, and the optimizer finds nothing to step with before the
last. No line of the script changes for either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from holdfast.checkpoint.contents import unwrap
from holdfast.exact.step import ExactStep
from holdfast.training.units import Unit


class Sums(Protocol):
    """What becomes of the gradients of a step's units."""

    def begin(self, unit: Unit) -> None:
        """Before the forward of a unit."""

    def take(self, unit: Unit) -> None:
        """After its backward. After the last one the gradients are those of the whole step."""

    def so_far(self) -> dict[str, Any]:
        """After a unit that `keeps`: what can be gone on from, at any number of ranks."""

    def go_on(self, step: int, samples: int, state: dict[str, Any]) -> None:
        """With what another process had so far."""


class Weights:
    """The weight of the unit that is being computed, for all modules of a training."""

    def __init__(self, modules: Iterable[nn.Module], sums: Sums | None) -> None:
        self._sums = sums
        self._unit: Unit | None = None
        self._weighs = False  # else the hooks have nothing to do, as in most steps
        self._taken = self._queued = False
        self._hooks: list[RemovableHandle] = []
        for module in _outermost(modules):
            self._hooks.append(module.register_forward_pre_hook(self._before_forward, with_kwargs=True))
            self._hooks.append(module.register_forward_hook(self._after_forward))

    def begin(self, unit: Unit) -> None:
        """From here on forward and backward are this unit's."""
        if self._sums is not None:
            self._sums.begin(unit)
        self._unit, self._taken, self._queued = unit, False, False
        self._weighs = unit.weight != 1.0 or self._sums is not None

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _before_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """What comes from another module is weighted where it left that one, and there once: what goes back out of this
        one is given without."""
        unit = self._unit
        if not self._weighs or unit is None or unit.weight in (0.0, 1.0) or not torch.is_grad_enabled():
            return None
        given = pytree.tree_leaves((args, kwargs))
        if not any(isinstance(value, torch.Tensor) and value.requires_grad for value in given):
            return None

        def unweighted(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or not value.requires_grad:
                return value
            seen = value.view_as(value)
            seen.register_hook(lambda gradient: gradient / unit.weight)  # type: ignore[no-untyped-call]
            return seen

        return pytree.tree_map(unweighted, (args, kwargs))  # type: ignore[no-any-return]

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._weighs or not torch.is_grad_enabled():
            return
        for tensor in pytree.tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(self._weigh)  # type: ignore[no-untyped-call]

    def _weigh(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """As its backward begins."""
        assert self._unit is not None
        if self._sums is not None and not self._queued:
            self._queued = True
            _queue(
                lambda: _queue(self._after_backward)
            )  # after what DDP and FSDP have queued by then: their reductions
        return gradient * self._unit.weight if self._unit.weight != 1.0 else None

    def _after_backward(self) -> None:
        self._queued = False
        assert self._unit is not None and self._sums is not None
        if self._taken:
            raise RuntimeError(
                "backward() was called twice for one batch; where a step has several (exact=True, micro_batch_size), "
                "add the losses up and call it once"
            )
        self._taken = True
        self._sums.take(self._unit)


class Accumulated:
    """Gradients that are summed in place, unit by unit, and reduced over the ranks with the last one, and with those
    that are kept: the mean over ranks of what they all have is what they have."""

    def __init__(self, modules: Iterable[nn.Module], keeps: Callable[[Unit], bool]) -> None:
        self._modules = list(modules)
        self._keeps = keeps
        self._names = [f"{at}.{name}" for at, module in enumerate(self._modules) for name, _ in _parameters(module)]
        self._parameters = [parameter for module in self._modules for _, parameter in _parameters(module)]
        self._away: list[torch.Tensor | None] | None = None

    def begin(self, unit: Unit) -> None:
        if self._away is not None:
            for parameter, gradient in zip(self._parameters, self._away, strict=True):
                parameter.grad = gradient
            self._away = None
        for module in self._modules:
            for reduced in _reduces(module):
                reduced(unit.is_last or self._keeps(unit))

    def take(self, unit: Unit) -> None:
        if not unit.is_last:
            self._away = [parameter.grad for parameter in self._parameters]
            for parameter in self._parameters:
                parameter.grad = None

    def so_far(self) -> dict[str, Any]:
        pairs = zip(self._names, self._away or (), strict=False)
        return {name: gradient.detach().clone() for name, gradient in pairs if gradient is not None}

    def go_on(self, step: int, samples: int, state: dict[str, Any]) -> None:
        self._away = [
            _as_gradient(parameter, state[name]) if name in state else None
            for name, parameter in zip(self._names, self._parameters, strict=True)
        ]


class Exact:
    """Leaves, summed in one fixed tree. Whoever gives out the units says which step they are of, and how many leaves
    that has on all ranks together."""

    def __init__(self, modules: Iterable[nn.Module], seed: int) -> None:
        self._leaves = ExactStep(modules, seed)
        self.step = self.count = 0

    def begin(self, unit: Unit) -> None:
        self._leaves.begin(self.step, unit.number, self.count, unit.round)

    def take(self, unit: Unit) -> None:
        self._leaves.take(unit.number if unit.weight else None, unit.closes, unit.is_last)

    def so_far(self) -> dict[str, Any]:
        return self._leaves.so_far()

    def go_on(self, step: int, samples: int, state: dict[str, Any]) -> None:
        self._leaves.go_on(step, samples, state)


def _parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(unwrap(module).named_parameters())


def _as_gradient(parameter: nn.Parameter, saved: torch.Tensor) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        return saved.to(parameter.device)
    if isinstance(saved, DTensor):
        return saved
    return distribute_tensor(saved.to(parameter.device), parameter.device_mesh, parameter.placements)


def _queue(callback: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def _outermost(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Without those that are a part of another one, whose output is weighted already."""
    given = list(modules)
    inner = {id(part) for module in given for part in module.modules() if part is not module}
    return [module for module in given if id(module) not in inner]


def _reduces(module: nn.Module) -> list[Callable[[bool], None]]:
    """How a module is told whether its next backward is to reduce gradients over ranks."""
    if isinstance(module, DistributedDataParallel):
        return [lambda now: setattr(module, "require_backward_grad_sync", now)]
    if callable(told := getattr(module, "set_requires_gradient_sync", None)):  # FSDP2
        return [told]
    return []
