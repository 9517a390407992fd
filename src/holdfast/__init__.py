"""Holdfast: fault-tolerant training for PyTorch. Importing this imports neither torch nor an event loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast._version import __version__

if TYPE_CHECKING:
    from holdfast.agent.launch import JobFailed, launch

__all__ = ["JobFailed", "__version__", "launch"]

_HOMES = {"launch": "holdfast.agent.launch", "JobFailed": "holdfast.agent.launch"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
