"""What tells that a dataset is not the one of the save: cheap, and the same in every process.

A few samples are read, so it notices other data, another tokeniser or another order of the files; it cannot notice
that one sample in the middle of many was edited. A dataset that knows better says so by a `fingerprint` of its own.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
import xxhash

from holdfast.checkpoint import randomness

MAX_DEPTH = 20  # of a sample; one that contains itself has no end


def of(dataset: Any) -> str:
    """Its own `fingerprint`, a string or a method that gives one; else its type, its length, and a hash of its first,
    middle and last sample. The hash is left out where reading fails, and where the samples are augmented at random.
    Random generators are left as they were."""
    own = getattr(dataset, "fingerprint", None)
    if callable(own):
        own = own()
    if isinstance(own, str):
        return own
    kind = type(dataset).__qualname__
    try:
        size = len(dataset)
    except TypeError:
        return kind
    content = _content(dataset, size) if size else None
    return f"{kind}[{size}]" if content is None else f"{kind}[{size}]-{content}"


def _content(dataset: Any, size: int) -> str | None:
    before = randomness.capture()
    probes = sorted({0, size // 2, size - 1})
    try:
        # Two readings of a sample that is flipped or not are often alike. That one has drawn from a random generator
        # shows at once; the readings are compared for the sake of generators that are the dataset's own.
        first, second = (_hash([dataset[probe] for probe in probes]) for _ in range(2))
        drawn = any(value != before[name] for name, value in randomness.capture().items() if name in before)
    except Exception:
        return None
    finally:
        randomness.put_back(before)
    return first if first == second and not drawn else None


def _hash(samples: list[Any]) -> str:
    hashed = xxhash.xxh3_64()
    for sample in samples:
        _add(hashed, sample, 0)
    return hashed.hexdigest()


def _add(hashed: Any, value: Any, depth: int) -> None:
    """Every part goes in with its type and length, so that no two samples run together to the same bytes."""
    if isinstance(value, torch.Tensor):
        _put(hashed, f"tensor {value.dtype} {tuple(value.shape)}", _bytes(value))
    elif type(value).__module__ == "numpy" and hasattr(value, "tobytes") and not value.dtype.hasobject:
        _put(hashed, f"numpy {value.dtype.str} {value.shape}", value.tobytes())
    elif value is None or isinstance(value, bool | int | float | complex):
        _put(hashed, "number", repr(value).encode())
    elif isinstance(value, str):
        _put(hashed, "text", value.encode("utf-8", "surrogatepass"))
    elif isinstance(value, bytes | bytearray):
        _put(hashed, "bytes", value)
    elif isinstance(value, tuple | list | dict) and depth < MAX_DEPTH:
        _put(hashed, f"{'dict' if isinstance(value, dict) else 'list'} {len(value)}", b"")
        for part in value.items() if isinstance(value, dict) else value:
            _add(hashed, part, depth + 1)
    else:
        _put(hashed, type(value).__qualname__, b"")


def _put(hashed: Any, kind: str, content: bytes | bytearray) -> None:
    hashed.update(f"{kind} {len(content)}\n".encode())
    hashed.update(content)


def _bytes(tensor: torch.Tensor) -> bytes:
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
        return b""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return ctypes.string_at(plain.data_ptr(), plain.nbytes) if plain.numel() else b""
