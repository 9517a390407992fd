"""YAML read with its lines, so that whatever is wrong with a value can be told where it stands."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Any, TypeVar

from holdfast.workflow.spec import Problem

T = TypeVar("T")

_UNITS_S = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(d|h|m|s|ms|us)?")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGTP]i?)?B?", re.IGNORECASE)


class Field:
    """A value of the file, and where it is."""

    def __init__(self, node: Any, name: str, file: str, lines: list[int]) -> None:
        self._node, self._name, self._file, self._lines = node, name, file, lines

    @property
    def line(self) -> int:
        row = self._node.start_mark.line
        return self._lines[row] if row < len(self._lines) else self._lines[-1]

    def problem(self, text: str) -> Problem:
        return Problem(f"{self._name}: {text}" if self._name else text, self._file, self.line)

    # -- kinds of values ----------------------------------------------------------------------------------------------

    def mapping(self, known: Collection[str] | None = None) -> dict[str, Field]:
        """By key. A key that is not known is a mistake; None: any may be."""
        if self._node.id != "mapping":
            raise self.problem(f"keys and values are meant, not {self._said()}")
        found: dict[str, Field] = {}
        for key_node, value_node in self._node.value:
            key = Field(key_node, self._name, self._file, self._lines)
            name = str(key_node.value)
            if name in found:
                raise key.problem(f"{name!r} is there twice")
            if known is not None and name not in known:
                raise key.problem(f"unknown key {name!r}; there may be {', '.join(known)}")
            found[name] = Field(value_node, f"{self._name}.{name}" if self._name else name, self._file, self._lines)
        return found

    def items(self) -> list[Field]:
        if self._node.id != "sequence":
            raise self.problem(f"a list is meant, not {self._said()}")
        return [Field(node, f"{self._name}[{at}]", self._file, self._lines) for at, node in enumerate(self._node.value)]

    def text(self, empty: bool = False) -> str:
        if self._node.id != "scalar" or self._tag == "null":
            raise self.problem(f"a text is meant, not {self._said()}")
        if not self._node.value and not empty:
            raise self.problem("it is empty")
        return str(self._node.value)

    def flag(self) -> bool:
        if self._tag != "bool":
            raise self.problem(f"true or false is meant, not {self._said()}")
        return self._node.value.lower() in ("true", "yes", "on")

    def count(self, least: int = 0) -> int:
        if self._tag != "int" or not re.fullmatch(r"[+-]?\d+", self._node.value) or int(self._node.value) < least:
            raise self.problem(f"a whole number of at least {least} is meant, not {self._said()}")
        return int(self._node.value)

    def number(self, least: float = 0) -> float:
        try:
            found = float(self.text())
        except ValueError:
            found = -1.0
        if not found >= least or found == float("inf"):
            raise self.problem(f"a number of at least {least:g} is meant, not {self._said()}")
        return found

    def duration_s(self) -> float:
        match = _DURATION.fullmatch(self.text())
        if match is None or float(match[1]) <= 0:
            raise self.problem(f"a time such as 30s, 5m, 2h or 1d is meant, not {self._said()}")
        return float(match[1]) * _UNITS_S[match[2] or "s"]

    def size_bytes(self) -> int:
        match = _SIZE.fullmatch(self.text())
        if match is None:
            raise self.problem(f"a size such as 512Mi or 16Gi is meant, not {self._said()}")
        unit = (match[2] or "").upper()
        power = "KMGTP".index(unit[0]) + 1 if unit else 0
        return int(float(match[1]) * (1024 if unit.endswith("I") or not unit else 1000) ** power)

    def pattern(self) -> str:
        try:
            re.compile(self.text())
        except re.error as wrong:
            raise self.problem(f"{self.text()!r} is no regular expression: {wrong}") from None
        return self.text()

    def each(self, make: Callable[[Field], T]) -> tuple[T, ...]:
        return tuple(make(item) for item in self.items())

    @property
    def is_list(self) -> bool:
        return bool(self._node.id == "sequence")

    @property
    def _tag(self) -> str:
        return str(self._node.tag).rpartition(":")[2] if self._node.id == "scalar" else ""

    def _said(self) -> str:
        return (
            repr(self._node.value) if self._node.id == "scalar" else {"sequence": "a list"}.get(self._node.id, "keys")
        )


def parse(text: str, file: str, lines: list[int]) -> Field:
    """A document. Aliases and tags of Python's are not for workflow files."""
    import yaml

    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as wrong:
        mark = wrong.problem_mark or wrong.context_mark
        row = min(mark.line, len(lines) - 1) if mark is not None else 0
        raise Problem(f"this is no YAML: {wrong.problem or wrong.context}", file, lines[row]) from None
    if node is None:
        raise Problem("it is empty", file, lines[0] if lines else None)
    return Field(node, "", file, lines)
