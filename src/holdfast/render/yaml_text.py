"""YAML from plain values, so that rendering needs no package. Strings can be taken for nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TypeAlias

Value: TypeAlias = "str | int | Mapping[str, Value] | Sequence[Value]"

# What is written without quotes. Of these, YAML 1.1, which Kubernetes reads, takes some words for truth or nothing.
_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9/_.-]*")
_WORDS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}
# JSON leaves these as they are. In YAML they are not printable, or end a line.
_ESCAPED = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")


def document(value: Value) -> str:
    return "".join(f"{line}\n" for line in _lines(value))


def _lines(value: Value) -> list[str]:
    if isinstance(value, str | int):
        return [_scalar(value)]
    if isinstance(value, Mapping):
        return [line for key, item in value.items() for line in _entry(f"{_scalar(key)}:", item)] or ["{}"]
    return [f"{'  ' if at else '- '}{line}" for item in value for at, line in enumerate(_lines(item))] or ["[]"]


def _entry(key: str, value: Value) -> list[str]:
    lines = _lines(value)
    if isinstance(value, str | int) or not value:
        return [f"{key} {lines[0]}"]
    return [key, *(f"  {line}" for line in lines)]


def _scalar(value: str | int) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    return _ESCAPED.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(value, ensure_ascii=False))
