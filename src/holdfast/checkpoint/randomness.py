"""Where every random generator stands that a training script commonly draws from."""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from typing import Any, NamedTuple

_PYTHON = struct.Struct("<625I")


class Mark(NamedTuple):
    """The generators' states as they give them: quick to take, and of no use to another process."""

    python: tuple[Any, ...]
    torch: Any
    cuda: Any
    numpy: Any


def mark() -> Mark:
    import torch

    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    numpy_random = sys.modules.get("numpy.random")
    drawn = numpy_random.get_state() if numpy_random is not None else None
    return Mark(random.getstate(), torch.get_rng_state(), cuda, drawn)


def go_back(to: Mark) -> None:
    import torch

    random.setstate(to.python)
    torch.set_rng_state(to.torch)
    if to.cuda is not None:
        torch.cuda.set_rng_state(to.cuda)
    if to.numpy is not None:
        sys.modules["numpy.random"].set_state(to.numpy)


def capture() -> dict[str, Any]:
    """As plain values."""
    return told(mark())


def told(marked: Mark) -> dict[str, Any]:
    version, words, gauss = marked.python
    state: dict[str, Any] = {"torch": _bytes(marked.torch), "python": (version, _PYTHON.pack(*words), gauss)}
    if marked.cuda is not None:
        state["cuda"] = _bytes(marked.cuda)
    if marked.numpy is not None:
        name, keys, position, has_gauss, cached = marked.numpy
        state["numpy"] = (name, keys.tobytes(), int(position), int(has_gauss), float(cached))
    return state


def put_back(state: dict[str, Any]) -> None:
    import torch

    torch.set_rng_state(_bytes_tensor(state["torch"]))
    version, words, gauss = state["python"]
    random.setstate((version, _PYTHON.unpack(words), gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(_bytes_tensor(state["cuda"]))
    if "numpy" in state and (numpy_random := sys.modules.get("numpy.random")) is not None:
        import numpy

        name, keys, position, has_gauss, cached = state["numpy"]
        numpy_random.set_state((name, numpy.frombuffer(keys, dtype=numpy.uint32), position, has_gauss, cached))


def _bytes(state: Any) -> bytes:
    return ctypes.string_at(state.data_ptr(), state.numel())  # some 60 times faster than by way of a list


def _bytes_tensor(content: bytes) -> Any:
    import torch

    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
