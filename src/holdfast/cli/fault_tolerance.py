"""The flags and the file of fault tolerance: flags beat the file, the file beats the defaults."""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Iterable
from typing import Any

from holdfast.cli.usage import Remember, Usage
from holdfast.fault_tolerance import files
from holdfast.fault_tolerance.config import (
    ALIASES,
    DETECTION,
    KEYS,
    POLICIES,
    TIMEOUTS,
    WITHOUT_EFFECT,
    BadConfig,
    FaultToleranceConfig,
    settle,
)

# Ours have a flag of their own name too.
OWN = ("hang_detection", "hang_floor", "max_no_progress_restarts")

_HELP: dict[str, tuple[str, str]] = {
    "hang_detection": ("MODE", "off, warn, or restart when a rank hangs (default restart)"),
    "hang_floor": ("S", "no rank is hung before it was silent for so long, where limits are learned (default 30)"),
    "max_no_progress_restarts": (
        "N",
        "give up after N restarts in a row that did not get further; 0: never (default 3)",
    ),
    "initial_rank_heartbeat_timeout": ("S", "until a rank's first step or heartbeat (default: as learned; null: none)"),
    "rank_heartbeat_timeout": ("S", "between heartbeats of RankMonitorClient (default: none)"),
    "rank_section_timeouts": ("NAME:S,...", "how long each of its sections may be open"),
    "rank_out_of_section_timeout": ("S", "how long none may be open (default: none)"),
    "safety_factor": ("X", "a learned limit is X times the longest that was seen (default 5)"),
    "rank_termination_signal": ("SIG", "what a hung rank is sent, before SIGKILL (default SIGKILL)"),
    "restart_policy": ("POLICY", "as --restart-policy"),
    "use_infra_group_rank": ("BOOL", "True: --rank-assignment=infrastructure, False: deterministic"),
}
DESTS = {"ft_cfg_path", "ft_ignore_missing_cfg", *(f"ft_{key}" for key in (*KEYS, *WITHOUT_EFFECT))}


def add(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("hangs and fault tolerance")
    group.add_argument(
        *("--ft-cfg-path", "--ft-cfg_path", "--ft_cfg_path"),
        dest="ft_cfg_path",
        action=Remember,
        metavar="FILE",
        help="YAML or JSON with a fault_tolerance: section at any depth; its keys are those of the flags below",
    )
    for key in _HELP:
        metavar, text = _HELP[key]
        choices = {"restart_policy": POLICIES, "hang_detection": DETECTION}.get(key)
        names = [key, *(alias for alias, meant in ALIASES.items() if meant == key)]
        shown = {"choices": choices} if choices else {"metavar": metavar}
        group.add_argument(*_spellings(names), dest=f"ft_{key}", action=Remember, help=text, **shown)
    for key in WITHOUT_EFFECT:
        group.add_argument(*_spellings([key]), dest=f"ft_{key}", action=Remember, help=argparse.SUPPRESS)
    group.add_argument(
        *("--ft-ignore-missing-cfg", "--ft-ignore_missing_cfg", "--ft_ignore_missing_cfg"),
        dest="ft_ignore_missing_cfg",
        action=Remember,
        nargs=0,
        const=True,
        help=argparse.SUPPRESS,
    )


def _spellings(keys: Iterable[str]) -> dict[str, None]:
    found: list[str] = []
    for key in keys:
        dashed = key.replace("_", "-")
        if key in OWN:
            found += [f"--{dashed}", f"--{key}"]
        found += [f"--ft-{dashed}", f"--ft-{key}", f"--ft_{key}"]
        found += [f"--ft-param-{dashed}", f"--ft-param-{key}", f"--ft_param_{key}"]
    return dict.fromkeys(found)


def read(args: Namespace) -> FaultToleranceConfig:
    """Raises Usage, in which the file and its line, or the flag, are named."""
    found: dict[str, Any] = {}
    args.ft_notes = _notes("", [key for key in WITHOUT_EFFECT if getattr(args, f"ft_{key}") is not None])
    if (path := args.ft_cfg_path) is not None:
        found, ignored = _from_file(path)
        args.ft_notes += _notes(path, ignored)
    for key in KEYS:
        if (text := getattr(args, f"ft_{key}")) is not None:
            try:
                found |= settle({key: _parsed(key, text)})
            except BadConfig as wrong:
                raise Usage(f"{_flag(key)}: {str(wrong).removeprefix(f'{key}: ')}") from None
    return FaultToleranceConfig(**found)


def notes(args: Namespace) -> list[str]:
    """What was asked for and has no effect, once it has been read."""
    said: list[str] = getattr(args, "ft_notes", [])
    if args.ft_ignore_missing_cfg:
        said = [*said, "--ft-ignore-missing-cfg has no effect: a missing file is an error"]
    return said


def truth(text: str) -> bool | str:
    """The text itself, where it is neither."""
    if text.lower() in ("1", "true", "t", "yes", "y"):
        return True
    return False if text.lower() in ("0", "false", "f", "no", "n") else text


def _from_file(path: str) -> tuple[dict[str, Any], list[str]]:
    section = files.Section({})
    try:
        section = files.load(path)
        return settle(section.values), [key for key in section.values if key in WITHOUT_EFFECT]
    except files.BadFile as wrong:
        raise Usage(f"--ft-cfg-path: {wrong}") from None
    except BadConfig as wrong:
        line = section.lines.get(wrong.key.partition(":")[0])
        raise Usage(f"--ft-cfg-path: {path}{f' line {line}' if line else ''}: {wrong}") from None


def _notes(path: str, keys: list[str]) -> list[str]:
    """One for each reason."""
    by_reason: dict[str, list[str]] = {}
    for key in keys:
        by_reason.setdefault(WITHOUT_EFFECT[key], []).append(key if path else _flag(key))
    return [
        f"{path and path + ': '}{', '.join(names)} {'have' if len(names) > 1 else 'has'} no effect: {reason}"
        for reason, names in by_reason.items()
    ]


def _flag(key: str) -> str:
    return f"--{'' if key in OWN else 'ft-'}{key.replace('_', '-')}"


def _parsed(key: str, text: str) -> Any:
    """As a file would have it. What cannot be parsed stays text, and is refused as such."""
    if key == "rank_section_timeouts":
        return _sections(text)
    if key == "use_infra_group_rank":
        return truth(text)
    if key in TIMEOUTS or key in ("safety_factor", "hang_floor"):
        return _number(text)
    if key in ("max_no_progress_restarts", "rank_termination_signal"):
        return int(text) if text.strip().lstrip("+-").isdecimal() else text
    return text


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _sections(text: str) -> dict[str, Any]:
    """`name:seconds` or `name=seconds`, with commas between; no seconds: no limit."""
    found: dict[str, Any] = {}
    for pair in filter(None, (part.strip() for part in text.split(","))):
        name, between, limit = pair.rpartition("=" if "=" in pair else ":")
        if not between:
            raise BadConfig("rank_section_timeouts", f"{pair!r} is not of the form name:seconds")
        if name.strip() in found:
            raise BadConfig("rank_section_timeouts", f"{name.strip()!r} is given twice")
        found[name.strip()] = _number(limit.strip())
    return found
