"""What counts steps and is not attached. A rank that is new would begin with an empty one, while the others go on with
theirs, and from then on all would train another model. Before ranks stayed, all began alike."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterable
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from holdfast.checkpoint.contents import is_stateful
from holdfast.worker import counters

DEPTH = 8  # an object, its dict, a list in that, a scheduler, the list of those it is made of, and one of them
MOST = 10_000  # objects that are looked at
_COUNTS = (Optimizer, LRScheduler, GradScaler)
_CLOSED = (nn.Module, torch.Tensor, int, float, str, bytes, type, ModuleType)  # a module's state has no optimizer in it


def within(state: Iterable[Any]) -> dict[int, Any]:
    """Those of a state, by id. An object with a state of its own is trusted with what it has. A scheduler has its
    optimizer, and keeps nothing of it."""
    found: dict[int, Any] = {}
    seen: set[int] = set()
    layer = [value for value in state if is_stateful(value)]
    for _ in range(DEPTH):
        layer = [value for value in layer if id(value) not in seen and not isinstance(value, _CLOSED)]
        layer = layer[: MOST - len(seen)]
        seen.update(map(id, layer))
        found |= {id(value): value for value in layer if isinstance(value, _COUNTS)}
        layer = [inner for value in layer for inner in _inside(value)]
    return found


def _inside(value: Any) -> Collection[Any]:
    if isinstance(value, Optimizer):
        return [inner for name, inner in vars(value).items() if name not in ("state", "param_groups", "defaults")]
    if isinstance(value, LRScheduler):
        return [inner for inner in vars(value).values() if not isinstance(inner, Optimizer)]
    if isinstance(value, dict):
        value = value.values()
    if isinstance(value, list | tuple | set | type({}.values())):
        return list(value)[:MOST]
    return list(getattr(value, "__dict__", {}).values())


def left_out(state: Collection[Any]) -> str:
    """Which scheduler or scaler of the program's is not attached, and what to do about it."""
    known = within(state)
    if all(id(made) in known for made in counters.schedules()):
        return ""
    gc.collect()  # nobody may have it any more
    for made in counters.schedules():
        if id(made) not in known:
            return f"{type(made).__name__} is not attached, and would begin anew in a new rank; attach it, too"
    return ""


def watch(state: Iterable[Any], withdraw: Callable[[str], None]) -> None:
    """Have it told of an optimizer that steps and is not of this state, and of what is made later. Also in run.train:
    what is not attached is not held back in a step that cannot be completed."""
    known = within(state)

    def steps(optimizer: Optimizer, *_: Any) -> None:
        if id(optimizer) not in known:
            name = type(optimizer).__name__
            withdraw(f"{name} steps and is not attached; a new rank would have an empty one; attach it, too")

    def made(it: Any) -> None:
        withdraw(f"{type(it).__name__} is made after run.attach(); make it before, and attach it, too")

    register_optimizer_step_pre_hook(steps)
    counters.on_schedule(made)
