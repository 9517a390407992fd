"""Holdfast: fault-tolerant training for PyTorch. Importing this imports neither torch nor an event loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast._version import __version__

if TYPE_CHECKING:
    from holdfast.agent.launch import JobFailed, launch
    from holdfast.checkpoint.accumulation import GradientAccumulation
    from holdfast.checkpoint.checkpointer import Checkpointer
    from holdfast.checkpoint.errors import CheckpointError
    from holdfast.training.health import HealthCheckFailed
    from holdfast.training.run import Run, init

__all__ = [
    "CheckpointError",
    "Checkpointer",
    "GradientAccumulation",
    "HealthCheckFailed",
    "JobFailed",
    "Run",
    "__version__",
    "init",
    "launch",
]

_HOMES = {
    "CheckpointError": "holdfast.checkpoint.errors",
    "Checkpointer": "holdfast.checkpoint.checkpointer",
    "GradientAccumulation": "holdfast.checkpoint.accumulation",
    "launch": "holdfast.agent.launch",
    "JobFailed": "holdfast.agent.launch",
    "HealthCheckFailed": "holdfast.training.health",
    "Run": "holdfast.training.run",
    "init": "holdfast.training.run",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
