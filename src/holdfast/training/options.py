"""What `holdfast.init` was given."""

from __future__ import annotations

import os

import msgspec


class Options(msgspec.Struct, frozen=True):
    """As given to `holdfast.init`, with its defaults."""

    checkpoints: str | os.PathLike[str] | None = None
    keep: int = 3
    keep_best: int = 0
    keep_every: int = 0
    metric: str = "loss"
    mode: str = "min"
    save_epochs: int = 1
    save_steps: int | None = None
    save_minutes: float | None = None
    memory_every: int | None = None
    shared: bool = True
    health_check_steps: int = 10
    health_check_s: float = 10.0
    exact: bool = False
    leaves: int = 8
    stays: bool = True
