"""Where every random generator stands that a training script commonly draws from."""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from typing import Any, NamedTuple

import torch

_PYTHON = struct.Struct("<625I")
_WORDS = 624  # of a Mersenne twister, as Python and numpy have it

_python: Any = getattr(random.getstate, "__self__", None)  # the generator behind the module's functions


class _Twister:
    """Where a generator stands, in memory, and so much of it that another place in its course is seen: each draw
    changes how many words are used up, and each 624th draw all the words."""

    def __init__(self, words_at: int, used_at: int) -> None:
        self._words = (ctypes.c_char * 128).from_address(words_at)
        self._used = ctypes.c_uint32.from_address(used_at)

    def look(self) -> tuple[int, bytes]:
        return self._used.value, self._words.raw


def _find_python() -> _Twister | None:
    """None: it is not where CPython has it."""
    if type(_python) is not random.Random or sys.implementation.name != "cpython":
        return None
    _, words, _ = _python.getstate()
    in_memory = ctypes.string_at(id(_python), random.Random.__bases__[0].__basicsize__)
    at = id(_python) + (found := in_memory.find(struct.pack(f"={_WORDS + 1}I", words[-1], *words[:-1])))
    return _Twister(at + 4, at) if found > 0 else None


_python_twister = _find_python()
_numpy_generator: Any = None  # behind the module's functions, when it was last looked at
_numpy_twister: _Twister | None = None


class Mark(NamedTuple):
    """The generators' states as they give them: quick to take, and of no use to another process."""

    python: tuple[Any, ...]
    torch: Any
    cuda: Any
    numpy: Any
    seen: tuple[Any, Any]  # of Python's and numpy's


def mark(before: Mark | None = None) -> Mark:
    """`before` is an earlier one: to say where they stand takes Python's generator 10 µs and numpy's 22 µs, and few
    programs draw from these in each step."""
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    seen, numpy_seen, numpy = _python_twister.look() if _python_twister is not None else None, None, None
    same = before is not None and seen and before.seen[0] == seen and before.python[2] == _python.gauss_next
    python = before.python if same and before is not None else random.getstate()
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_seen = _look_at_numpy(numpy_random)
        # Normal numbers come in pairs. Whether the second of one is still there is not in the words, but it cannot come
        # to be there without them.
        same = before is not None and numpy_seen and before.seen[1] == numpy_seen and not before.numpy[3]
        numpy = before.numpy if same and before is not None else numpy_random.get_state()
    return Mark(python, torch.default_generator.get_state(), cuda, numpy, (seen, numpy_seen))


def _look_at_numpy(numpy_random: Any) -> tuple[int, bytes] | None:
    """None, where numpy is too old to be asked (1.24), or the program has put another kind of generator there."""
    global _numpy_generator, _numpy_twister
    if (asked := getattr(numpy_random, "get_bit_generator", None)) is None:
        return None
    generator = asked()
    if generator is not _numpy_generator:
        at = generator.ctypes.state_address if type(generator) is numpy_random.MT19937 else 0
        _numpy_generator, _numpy_twister = generator, _Twister(at, at + 4 * _WORDS) if at else None
    return _numpy_twister.look() if _numpy_twister is not None else None


def go_back(to: Mark) -> None:
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
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
