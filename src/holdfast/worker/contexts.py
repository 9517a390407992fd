"""CUDA's context of a process. Of all that a new rank does before it can compute, it takes longest. Which GPU a program
uses is its own to choose; but one that takes a place chooses as the last one there has. So its context is opened beside
what the program does before it comes to that."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterable

from torch import nn

LIBRARY = "libcuda.so.1"
NO_GPU = -1

_given: dict[str, str] = {}


def _settings() -> dict[str, str]:
    """What CUDA reads once, and a program may set before it does. One of them torch sets, to what it is anyway."""
    found = {name: value for name, value in os.environ.items() if name.startswith("CUDA_")}
    if found.get("CUDA_MODULE_LOADING") == "LAZY":
        del found["CUDA_MODULE_LOADING"]
    return found


def given() -> None:
    """The program has not begun."""
    global _given
    _given = _settings()


def in_use(modules: Iterable[nn.Module]) -> int:
    """The GPU that these are on, if the one who has this place next can have its context before its program begins."""
    on = {p.device.index for module in modules for p in module.parameters() if p.device.type == "cuda"}
    return on.pop() if len(on) == 1 and _settings() == _given else NO_GPU


def open_ahead(gpu: int) -> threading.Thread:
    """In another thread. An exit waits for it: a library is not to be unloaded under it."""
    thread = threading.Thread(target=_open, args=(gpu,), name="holdfast-context")
    thread.start()
    return thread


def _open(gpu: int) -> None:
    """What fails here fails for the program, too, if it wants the same, and is said there."""
    with contextlib.suppress(OSError):
        cuda = ctypes.CDLL(LIBRARY)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        if cuda.cuInit(0) == 0 and cuda.cuDeviceGet(ctypes.byref(device), gpu) == 0:
            cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
