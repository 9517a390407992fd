"""What a program makes that counts steps besides optimizers: schedulers and scalers. Noted as they are made, since
torch keeps no list of them."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

# By id: one that a program has derived may have its own idea of what is equal, and no hash.
_made: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_on_schedule: Callable[[Any], None] | None = None


def wrap() -> None:
    """Note all that are made from now on. In the zygote, as `phases.wrap`."""
    from torch.amp.grad_scaler import GradScaler
    from torch.optim.lr_scheduler import LRScheduler

    # Several schedulers of torch's own leave out the `__init__` of what they are derived from.
    LRScheduler.__new__ = _noting_new(LRScheduler)  # type: ignore[method-assign]
    # But whether a scaler scales at all it knows only after that.
    GradScaler.__init__ = _noting_init(GradScaler.__init__)  # type: ignore[method-assign]


def _noting_new(kind: type[Any]) -> Any:
    def __new__(cls: type[Any], *args: Any, **kwargs: Any) -> Any:
        new = super(kind, cls).__new__
        made = new(cls) if new is object.__new__ else new(cls, *args, **kwargs)
        _note(made)
        return made

    return staticmethod(__new__)


def _noting_init(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if self.is_enabled():
            _note(self)

    return __init__


def _note(made: Any) -> None:
    _made[id(made)] = made
    if _on_schedule is not None:
        _on_schedule(made)


def schedules() -> list[Any]:
    """Each scheduler, and each scaler that scales, that the program has made and still has; the last one first, since
    one may be made of others."""
    return list(_made.values())[::-1]


def on_schedule(call: Callable[[Any], None]) -> None:
    """What is to be called with each that is made from now on."""
    global _on_schedule
    _on_schedule = call
