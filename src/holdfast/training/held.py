"""What a script does once a step and writes once a batch: of a step's several batches, only the last has it done."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

# These would count steps that are none.
_HELD: tuple[tuple[type[Any], tuple[str, ...]], ...] = (
    (LRScheduler, ("step",)),
    (GradScaler, ("unscale_", "step", "update")),
)


def hold(value: Any, step_ends: Callable[[], bool]) -> None:
    """Let an optimizer, a scheduler or a scaler act only where that says so. All else is left alone."""
    if isinstance(value, Optimizer):
        value.step = _held_step(step_ends, value.step)  # type: ignore[method-assign]
    for kind, names in _HELD:
        if isinstance(value, kind):
            # A class of its own, since a scheduler takes all that it has for its state.
            methods = {name: _only_if(step_ends, getattr(type(value), name)) for name in names}
            value.__class__ = type(type(value).__name__, (type(value),), methods)


def _held_step(step_ends: Callable[[], bool], step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)  # with the mark by which a scheduler knows that it counts its calls
    def held(*args: Any, **kwargs: Any) -> Any:
        return step(*args, **kwargs) if step_ends() else None

    return held


def _only_if(step_ends: Callable[[], bool], method: Callable[..., Any]) -> Callable[..., Any]:
    def held(self: Any, *args: Any, **kwargs: Any) -> Any:
        return method(self, *args, **kwargs) if step_ends() else None

    return held
