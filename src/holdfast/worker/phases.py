"""What a rank is at, seen through torch: its steps, evaluations and saves, with no line of the user's code changed.

Steps come through torch's public hook. That a rank evaluates or saves is known by `Module.eval` and `torch.save`, which
are wrapped: both are called seldom, and what they cost here is a store to memory.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from holdfast.worker.beacon import (
    BASE,
    BASED,
    LIMITS,
    OWN_S,
    OWN_STEPS,
    PHASE,
    PHASE_AT,
    STEP_AT,
    TRAINS,
    Beacon,
    Phase,
)

F = TypeVar("F", bound=Callable[..., Any])

STEPS_TO_LEARN = 6  # as `control.hangs` has it, which a rank does not import
_SAVERS = ("torch.distributed.checkpoint.state_dict_saver", ("save", "async_save"))


_current: Phases | None = None
_wrapped = False


def wrap() -> None:
    """Have torch tell of evaluations, saves and optimizers that are made. A zygote does that for all its children: to
    change a class that hundreds inherit from touches all of them, which takes a fresh fork some milliseconds."""
    global _wrapped
    if _wrapped:
        return
    _wrapped = True
    import torch
    from torch.optim.optimizer import Optimizer

    Optimizer.__init__ = _wrap_optimizer(Optimizer.__init__)  # type: ignore[method-assign]
    torch.nn.Module.eval = _wrap_eval(torch.nn.Module.eval)  # type: ignore[method-assign]
    torch.save = _wrap_save(torch.save)
    module, names = _SAVERS
    if (saver := sys.modules.get(module)) is not None:
        package = sys.modules["torch.distributed.checkpoint"]
        for name in names:
            saved = _wrap_save(getattr(saver, name))
            setattr(saver, name, saved)
            setattr(package, name, saved)


class Phases:
    """The hooks of one rank. In a child of it they do nothing."""

    def __init__(self, beacon: Beacon, on_first_step: Callable[[], None]) -> None:
        self.beacon = beacon
        self._on_first_step = on_first_step
        self._main = threading.get_ident()
        self._measures = False
        self._own = False  # the first gradient after a step is still to come

    def install(self) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        global _current
        wrap()
        _current = self
        os.register_at_fork(after_in_child=_forget)
        register_optimizer_step_post_hook(self._after_step)

    @property
    def _rank(self) -> bool:
        return _current is self

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        if not self._rank:
            return
        steps = self.beacon.step_done()
        self._own = True
        if steps == 1:
            if (before := steps_before(optimizer)) is not None:
                self.beacon.words[BASE], self.beacon.words[BASED] = before, 1
            if not self._measures:
                self._measures = True
                self._measure_own(optimizer)
            self._on_first_step()
        elif steps == STEPS_TO_LEARN:
            self.beacon.poke()

    def _measure_own(self, optimizer: Any) -> None:
        """A world steps together, so a slow rank is not seen by its steps: the others wait for it. It is seen by the
        time from a step to the first gradient of the next, in which nobody waits for anybody. That gradient is the
        last parameter's. Sharded ones come by a collective, and are no measure."""
        with contextlib.suppress(Exception):
            for parameter in reversed(optimizer.param_groups[-1]["params"]):
                if parameter.grad is not None and parameter.is_leaf:
                    if type(parameter).__name__ in ("Parameter", "Tensor"):
                        parameter.register_post_accumulate_grad_hook(self._first_gradient)
                    return

    def _first_gradient(self, _: Any) -> None:
        if self._own and self._rank:
            self._own = False
            words, times = self.beacon.words, self.beacon.times
            if words[PHASE] == Phase.TRAINING:
                times[OWN_S] += time.monotonic() - times[STEP_AT]
                words[OWN_STEPS] += 1

    def optimizer_made(self) -> None:
        words, times = self.beacon.words, self.beacon.times
        if not words[TRAINS]:
            words[TRAINS] = 1
            self.beacon.poke_if_due(times[PHASE_AT] + times[LIMITS])

    @property
    def trains_here(self) -> bool:
        """Whether this is the thread that trains: saves in the background hold up nobody."""
        return threading.get_ident() == self._main


def _forget() -> None:
    global _current
    _current = None


def _wrap_optimizer(init: F) -> F:
    @functools.wraps(init)
    def __init__(optimizer: Any, *args: Any, **kwargs: Any) -> None:
        init(optimizer, *args, **kwargs)
        if _current is not None:
            _current.optimizer_made()

    return __init__  # type: ignore[return-value]


def _wrap_eval(original: F) -> F:
    @functools.wraps(original)
    def evaluate(module: Any) -> Any:
        here = _current
        trains = here is not None and here.trains_here
        if here is not None and trains and here.beacon.words[PHASE] in (Phase.TRAINING, Phase.EVALUATING):
            here.beacon.enter(Phase.EVALUATING)
        return original(module)

    return evaluate  # type: ignore[return-value]


def _wrap_save(original: F) -> F:
    @functools.wraps(original)
    def save(*args: Any, **kwargs: Any) -> Any:
        here = _current
        if here is None or not here.trains_here:
            return original(*args, **kwargs)
        with here.beacon.within(Phase.SAVING):
            return original(*args, **kwargs)

    return save  # type: ignore[return-value]


def steps_before(optimizer: Any) -> int | None:
    """The steps an optimizer had done before the one just done, by its own count: a loaded Adam goes on where it was.
    None for those that do not count, or whose count is on a GPU, which would have to be waited for."""
    with contextlib.suppress(Exception):
        for state in optimizer.state.values():
            count = state.get("step")
            if count is None or getattr(getattr(count, "device", None), "type", "cpu") != "cpu":
                return None
            return max(0, int(count) - 1)
    return None
