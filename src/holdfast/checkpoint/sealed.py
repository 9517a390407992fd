"""Small files that carry their own checksum, read whole and within a bound."""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from holdfast.checkpoint.errors import Damaged
from holdfast.checkpoint.format import unseal
from holdfast.checkpoint.storage import Storage

S = TypeVar("S", bound=msgspec.Struct)


def read_bytes(storage: Storage, name: str, limit_bytes: int) -> bytes:
    """Raises Damaged, and FileNotFoundError."""
    size = storage.size(name)
    if size > limit_bytes:
        raise Damaged(f"{name}: {size} bytes are more than such a file can have")
    content = bytearray(size)
    got = storage.read(name, 0, memoryview(content)) if size else 0
    return bytes(content[:got])


def read(storage: Storage, name: str, kind: type[S], limit_bytes: int) -> S:
    return parse(read_bytes(storage, name, limit_bytes), kind, name)


def parse(content: bytes, kind: type[S], name: str) -> S:
    try:
        return unseal(content, kind, name)
    except (RecursionError, ValueError) as failure:  # nested too deeply, or text that is none
        raise Damaged(f"{name}: {failure}") from None


def finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """JSON has no other numbers. A loss that is not a number is never the best, and so need not be remembered."""
    return {name: float(value) for name, value in metrics.items() if math.isfinite(value)}


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
