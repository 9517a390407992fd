"""Where every random generator stands that a training script commonly draws from."""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from typing import Any, NamedTuple

_PYTHON = struct.Struct("<625I")
_TWISTER_BYTES = 625 * 4  # of both generators, in memory: 624 words, and how many of them are used up

_python: Any = getattr(random.getstate, "__self__", None)  # the generator behind the module's functions


def _find_python_words() -> int:
    """Where they are. 0: not where CPython has them."""
    if type(_python) is not random.Random or sys.implementation.name != "cpython":
        return 0
    _, words, _ = _python.getstate()
    in_memory = ctypes.string_at(id(_python), random.Random.__bases__[0].__basicsize__)
    return id(_python) + at if (at := in_memory.find(struct.pack("=625I", words[-1], *words[:-1]))) > 0 else 0


_python_at = _find_python_words()


def _python_words() -> bytes:
    return ctypes.string_at(_python_at, _TWISTER_BYTES) if _python_at else b""


class Mark(NamedTuple):
    """The generators' states as they give them: quick to take, and of no use to another process."""

    python: tuple[Any, ...]
    torch: Any
    cuda: Any
    numpy: Any
    words: tuple[bytes, bytes]  # Python's and numpy's, as they are in memory


def mark(before: Mark | None = None) -> Mark:
    """`before` is an earlier one: to say where they stand takes Python's generator 10 µs and numpy's 22 µs, and few
    programs draw from these in each step."""
    import torch

    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    words, numpy_words, drawn = _python_words(), b"", None
    same = before is not None and words and before.words[0] == words and before.python[2] == _python.gauss_next
    python = before.python if same and before is not None else random.getstate()
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_words = _numpy_words(numpy_random)
        # Normal numbers come in pairs. Whether the second of one is still there is not in the words, but it cannot come
        # to be there without them.
        same = before is not None and numpy_words and before.words[1] == numpy_words and not before.numpy[3]
        drawn = before.numpy if same and before is not None else numpy_random.get_state()
    return Mark(python, torch.get_rng_state(), cuda, drawn, (words, numpy_words))


def _numpy_words(numpy_random: Any) -> bytes:
    """Empty, where numpy is too old to be asked (1.24), or the program has put another generator in its place."""
    if not hasattr(numpy_random, "get_bit_generator"):
        return b""
    generator = numpy_random.get_bit_generator()
    if type(generator) is not numpy_random.MT19937:
        return b""
    return ctypes.string_at(generator.ctypes.state_address, _TWISTER_BYTES)


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
