"""The `fault_tolerance:` section of a YAML or JSON file, at any depth."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec

SECTION = "fault_tolerance"


class BadFile(ValueError):
    """One line about what is wrong with a file, with its name."""


class Section(msgspec.Struct, frozen=True):
    values: dict[str, Any]
    lines: dict[str, int] = {}  # of the keys, where known


def load(path: str) -> Section:
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except OSError as failure:
        raise BadFile(f"{path} cannot be read: {failure.strerror}") from None
    except UnicodeDecodeError:
        raise BadFile(f"{path} is not UTF-8 text") from None
    found = list(_in_json(path, text) if path.endswith(".json") else _in_yaml(path, text))
    if not found:
        raise BadFile(f"{path} has no section {SECTION}: in it, at any depth")
    if len(found) > 1:
        lines = ", ".join(str(line) for _, line in found if line)
        raise BadFile(f"{path} has {len(found)} sections {SECTION}:{' in lines ' + lines if lines else ''}")
    return found[0][0]


def _section(path: str, line: int, values: Any, lines: dict[str, int]) -> tuple[Section, int]:
    if values is None:
        values = {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise BadFile(f"{path}{f' line {line}' if line else ''}: {SECTION} is not a list of keys and values")
    return Section(values, lines), line


# -- JSON -------------------------------------------------------------------------------------------------------------


def _in_json(path: str, text: str) -> Iterator[tuple[Section, int]]:
    try:
        everything = json.loads(text, object_pairs_hook=_distinct)
    except json.JSONDecodeError as wrong:
        raise BadFile(f"{path} line {wrong.lineno}: no JSON: {wrong.msg}") from None
    except (ValueError, RecursionError) as wrong:
        raise BadFile(f"{path}: {wrong}") from None
    rest = [everything]
    while rest:
        item = rest.pop(0)
        if isinstance(item, dict):
            if SECTION in item:
                yield _section(path, 0, item[SECTION], {})
            rest += [value for key, value in item.items() if key != SECTION]
        elif isinstance(item, list):
            rest += item


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} is given twice")
        found[key] = value
    return found


# -- YAML -------------------------------------------------------------------------------------------------------------


def _in_yaml(path: str, text: str) -> Iterator[tuple[Section, int]]:
    """Only our section is constructed: what tags the rest of the file uses is its own affair."""
    try:
        import yaml
    except ImportError:
        raise BadFile(f"{path}: to read YAML, pip install 'holdfast[yaml]'; JSON needs nothing") from None
    try:
        for key, value in _find(yaml, list(yaml.compose_all(text, yaml.SafeLoader))):
            lines: dict[str, int] = {}
            for name, _ in value.value if isinstance(value, yaml.MappingNode) else ():
                line = name.start_mark.line + 1
                if name.value in lines:
                    raise BadFile(f"{path} line {line}: the key {name.value!r} is given twice")
                lines[str(name.value)] = line
            loader = yaml.SafeLoader("")
            yield _section(path, key.start_mark.line + 1, loader.construct_object(value, deep=True), lines)
    except yaml.MarkedYAMLError as wrong:
        mark = wrong.problem_mark or wrong.context_mark
        where = f" line {mark.line + 1}" if mark is not None else ""
        raise BadFile(f"{path}{where}: no YAML: {wrong.problem or wrong.context}") from None
    except yaml.YAMLError as wrong:
        raise BadFile(f"{path}: no YAML: {str(wrong).splitlines()[0]}") from None
    except RecursionError:
        raise BadFile(f"{path}: it is nested too deeply") from None
    except (ValueError, TypeError) as wrong:  # a date that is none, or a key that is a list
        if isinstance(wrong, BadFile):
            raise
        raise BadFile(f"{path}: no YAML: {wrong}") from None


def _find(yaml: Any, rest: list[Any]) -> Iterator[tuple[Any, Any]]:
    seen: set[int] = set()
    while rest:
        node = rest.pop(0)
        if id(node) in seen:  # an alias is the same node again
            continue
        seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                if key.value == SECTION:
                    yield key, value
                else:
                    rest.append(value)
        elif isinstance(node, yaml.SequenceNode):
            rest += node.value
