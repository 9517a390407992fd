"""The limits that a rank is held to, as values, and as the plain dict that goes into a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

CURRENT = "current_timeouts"
NAME_CHARS = 200
FOREVER_S = 1e9


class RankMonitorClientError(RuntimeError):
    """A call that cannot be meant, or that cannot be obeyed here."""


class RankInfo(msgspec.Struct, frozen=True):
    global_rank: int
    local_rank: int
    host: str
    pid: int


class HeartbeatTimeouts(msgspec.Struct, frozen=True):
    """Until the first heartbeat, and between two. None: no limit."""

    initial: float | None = None
    subsequent: float | None = None
    were_calculated: bool = False

    @property
    def are_valid(self) -> bool:
        return self.initial is not None and self.subsequent is not None


class SectionTimeouts(msgspec.Struct, frozen=True):
    """How long each section may be open, and how long none may be. None: no limit."""

    section: dict[str, float | None] = {}
    out_of_section: float | None = None
    calculated_sections: frozenset[str] = frozenset()
    is_out_of_section_calculated: bool = False

    @property
    def were_calculated(self) -> bool:
        return self.calculated_sections == set(self.section) and self.is_out_of_section_calculated

    @property
    def are_valid(self) -> bool:
        return all(limit_s is not None for limit_s in self.section.values()) and self.out_of_section is not None


class Learned(msgspec.Struct, frozen=True):
    """What was learned, and nothing of what was configured. A pair has both of its values or none."""

    heartbeat: tuple[float, float] | None = None
    section: dict[str, float] = {}
    out_of_section: float | None = None

    def over(self, older: Learned) -> Learned:
        return Learned(
            self.heartbeat or older.heartbeat,
            {**older.section, **self.section},
            self.out_of_section or older.out_of_section,
        )

    def state(self) -> dict[str, Any]:
        current: dict[str, Any] = {}
        if self.heartbeat is not None:
            initial, subsequent = self.heartbeat
            current["heartbeat"] = {"initial": initial, "subsequent": subsequent, "were_calculated": True}
        if self.section or self.out_of_section is not None:
            current["section"] = {
                "section": {name: self.section[name] for name in sorted(self.section)},
                "out_of_section": self.out_of_section,
                "calculated_sections": sorted(self.section),
                "is_out_of_section_calculated": self.out_of_section is not None,
            }
        return {CURRENT: current}


def parse(state: Mapping[str, Any]) -> Learned:
    """Read what `Learned.state` wrote, or the same of NVIDIA's client, which keeps configured values beside learned."""
    if not isinstance(state, Mapping):
        raise _malformed(f"a dict is meant, not {type(state).__name__}")
    if not state:
        return Learned()
    if CURRENT not in state:
        raise _malformed(f"it has no {CURRENT!r}")
    current = _mapping(state, CURRENT)
    heartbeat, section = _mapping(current, "heartbeat"), _mapping(current, "section")
    pair = None
    if heartbeat.get("were_calculated"):
        pair = _seconds(heartbeat, "initial"), _seconds(heartbeat, "subsequent")
    names, limits = section.get("calculated_sections", ()), _mapping(section, "section")
    if not isinstance(names, list | tuple | set | frozenset) or not all(isinstance(name, str) for name in names):
        raise _malformed("'calculated_sections' is no list of names")
    outside = _seconds(section, "out_of_section") if section.get("is_out_of_section_calculated") else None
    return Learned(pair, {check_name(name): _seconds(limits, name) for name in sorted(names)}, outside)


def check_name(name: object) -> str:
    if not isinstance(name, str) or not 0 < len(name) <= NAME_CHARS:
        raise RankMonitorClientError(f"section {_short(name)}: a name is a text of 1 to {NAME_CHARS} characters")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise RankMonitorClientError(f"section {name!r}: a name is text that can be written as UTF-8") from None
    return name


def seconds_or_none(value: object) -> float | None:
    """None where it is no time that one could wait for."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < FOREVER_S:
        return None
    return float(value)


def listed(items: Iterable[object]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    *most, last = [str(item) for item in items]
    return f"{', '.join(most)} and {last}" if most else last


def _mapping(outer: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    inner = outer.get(key, {})
    if not isinstance(inner, Mapping):
        raise _malformed(f"{key!r} is no dict")
    return inner


def _seconds(outer: Mapping[str, Any], key: str) -> float:
    if (value := seconds_or_none(outer.get(key))) is None:
        raise _malformed(f"{key!r} is {_short(outer.get(key))}, a number of seconds above 0 is meant")
    return value


def _malformed(what: str) -> RankMonitorClientError:
    return RankMonitorClientError(f"the state cannot be loaded: {what}; load what state_dict() returned")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
