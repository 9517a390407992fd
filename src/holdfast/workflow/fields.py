"""YAML read with its lines, so that whatever is wrong with a value can be told where it stands."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Any, TypeVar

from holdfast.workflow.spec import Problem

T = TypeVar("T")

_UNITS_S = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6}
_DURATION = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)(d|h|m|s|ms|us)?")
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,9})?)\s*([KMGTP]i?)?B?", re.IGNORECASE)
_MOST = 2**63 - 1  # what a file of ours can hold


class Field:
    """A value of the file, and where it is."""

    def __init__(self, node: Any, name: str, file: str, lines: list[int]) -> None:
        self.node, self._name, self._file, self._lines = node, name, file, lines

    @property
    def line(self) -> int:
        return self._line_at(self.node.start_mark.line)

    def _line_at(self, row: int) -> int:
        return self._lines[row] if row < len(self._lines) else self._lines[-1]

    def problem(self, text: str, at: int = 0) -> Problem:
        """`at`: so many characters into the text that it is."""
        line = self.line
        if getattr(self.node, "style", None) == "|":  # each line of it is one of the file's
            line = self._line_at(self.node.start_mark.line + 1 + self.node.value.count("\n", 0, at))
        return Problem(f"{self._name}: {text}" if self._name else text, self._file, line)

    # -- kinds of values ----------------------------------------------------------------------------------------------

    def mapping(self, known: Collection[str] | None = None) -> dict[str, Field]:
        """By key. A key that is not known is a mistake; None: any may be."""
        if self.node.id != "mapping":
            raise self.problem(f"keys and values are meant, not {self._said()}")
        found: dict[str, Field] = {}
        for key_node, value_node in self.node.value:
            key = Field(key_node, self._name, self._file, self._lines)
            name = key.text(empty=True)
            if name in found:
                raise key.problem(f"{name!r} is there twice")
            if known is not None and name not in known:
                raise key.problem(f"unknown key {name!r}; there may be {', '.join(known)}")
            found[name] = Field(value_node, f"{self._name}.{name}" if self._name else name, self._file, self._lines)
        return found

    def items(self) -> list[Field]:
        if self.node.id != "sequence":
            raise self.problem(f"a list is meant, not {self._said()}")
        return [Field(node, f"{self._name}[{at}]", self._file, self._lines) for at, node in enumerate(self.node.value)]

    def text(self, empty: bool = False) -> str:
        if self.node.id != "scalar" or self._tag == "null":
            raise self.problem(f"a text is meant, not {self._said()}")
        if not self.node.value and not empty:
            raise self.problem("it is empty")
        if wrong := re.search("[\0\ud800-\udfff]", self.node.value):
            raise self.problem(f"no program can be given the character {wrong[0]!r}", wrong.start())
        return str(self.node.value)

    def flag(self) -> bool:
        if self._tag != "bool":
            raise self.problem(f"true or false is meant, not {self._said()}")
        return self.node.value.lower() in ("true", "yes", "on")

    def count(self, least: int = 0) -> int:
        if self._tag != "int" or not re.fullmatch(r"[+-]?\d{1,9}", self.node.value) or int(self.node.value) < least:
            raise self.problem(f"a whole number of at least {least} is meant, not {self._said()}")
        return int(self.node.value)

    def number(self, least: float = 0) -> float:
        try:
            found = float(self.text())
        except ValueError:
            found = -1.0
        if not found >= least or found == float("inf"):
            raise self.problem(f"a number of at least {least:g} is meant, not {self._said()}")
        return found

    def duration_s(self, least_s: float = 0.0) -> float:
        match = _DURATION.fullmatch(self.text())
        if match is None or float(match[1]) <= 0:
            raise self.problem(f"a time such as 30s, 5m, 2h or 1d is meant, not {self._said()}")
        found_s = float(match[1]) * _UNITS_S[match[2] or "s"]
        if found_s < least_s:
            raise self.problem(f"at least {least_s:g}s is meant, not {self._said()}")
        return found_s

    def size_bytes(self) -> int:
        match = _SIZE.fullmatch(self.text())
        unit = (match[2] or "").upper() if match is not None else ""
        power = "KMGTP".index(unit[0]) + 1 if unit else 0
        found = float(match[1]) * (1024 if unit.endswith("I") else 1000) ** power if match is not None else -1.0
        if not 0 <= found <= _MOST:
            raise self.problem(f"a size such as 512Mi or 16Gi is meant, not {self._said()}")
        return int(found)

    def pattern(self) -> str:
        try:
            re.compile(self.text())
        except re.error as wrong:
            raise self.problem(f"{self.text()!r} is no regular expression: {wrong}") from None
        return self.text()

    def each(self, make: Callable[[Field], T]) -> tuple[T, ...]:
        return tuple(make(item) for item in self.items())

    def all(self) -> list[Field]:
        """Of a list, or the one that it is."""
        return self.items() if self.is_list else [self]

    def count_all(self, enough: int) -> int:
        """All values in it, as often as aliases repeat them; a few more than `enough` may do."""
        count, left = 0, [self.node]
        while left and count <= enough:
            node = left.pop()
            count += 1
            if node.id == "sequence":
                left += node.value
            elif node.id == "mapping":
                left += [one for pair in node.value for one in pair]
        return count

    @property
    def is_list(self) -> bool:
        return bool(self.node.id == "sequence")

    @property
    def _tag(self) -> str:
        return str(self.node.tag).rpartition(":")[2] if self.node.id == "scalar" else ""

    def _said(self) -> str:
        return repr(self.node.value) if self.node.id == "scalar" else {"sequence": "a list"}.get(self.node.id, "keys")


def parse(text: str, file: str, lines: list[int]) -> Field:
    """A document. Aliases and tags of Python's are not for workflow files."""
    import yaml

    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as wrong:
        mark = wrong.problem_mark or wrong.context_mark
        row = min(mark.line, len(lines) - 1) if mark is not None else 0
        raise Problem(f"this is no YAML: {wrong.problem or wrong.context}", file, lines[row]) from None
    except yaml.reader.ReaderError as wrong:
        row = text.count("\n", 0, wrong.position)
        raise Problem(f"this is no YAML: {chr(wrong.character)!r} is not allowed in it", file, lines[row]) from None
    except RecursionError:
        raise Problem("it is nested too deeply", file, lines[0]) from None
    if node is None:
        raise Problem("it is empty", file, lines[0] if lines else None)
    return Field(node, "", file, lines)
