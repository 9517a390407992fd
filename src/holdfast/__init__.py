"""Holdfast: fault-tolerant training for PyTorch. Importing this imports neither torch nor an event loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast._version import __version__

if TYPE_CHECKING:
    from holdfast.agent.launch import JobFailed, launch
    from holdfast.worker.run import HealthCheckFailed, Run, init

__all__ = ["HealthCheckFailed", "JobFailed", "Run", "__version__", "init", "launch"]

_HOMES = {
    "launch": "holdfast.agent.launch",
    "JobFailed": "holdfast.agent.launch",
    "HealthCheckFailed": "holdfast.worker.run",
    "Run": "holdfast.worker.run",
    "init": "holdfast.worker.run",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
