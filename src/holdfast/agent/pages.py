"""The agent's end of the beacons: what a rank's area says, believed only as far as it makes sense."""

from __future__ import annotations

import math
import mmap
import struct

from holdfast.control.hangs import MEASURED, Section, Vitals
from holdfast.lifeline import Lifeline
from holdfast.worker import beacon
from holdfast.worker.beacon import AREA_BYTES, END, GAPS, KNOWN, MAGIC, MAX_SECTIONS, OPEN, SECTIONS

_FIELDS = struct.Struct(beacon.RANKS_FIELDS)
_MAX_STEPS = 1 << 47  # nobody gets there
_AHEAD_S = 1.0  # a time that is further ahead than this was not written by a clock


class Corrupt(Exception):
    """Something else has written into this area. What it says must not end a rank."""


class Page:
    """One rank's area."""

    def __init__(self, fd: int, slot: int, config: tuple[int, int] = (0, 0)) -> None:
        area = mmap.mmap(fd, AREA_BYTES, offset=slot * AREA_BYTES)
        self._area = memoryview(area)
        self._words = self._area.cast("Q")
        self._times = self._area.cast("d")
        self._seen = b""
        self._read_before = False
        self._words[beacon.CONFIG_AT], self._words[beacon.CONFIG_BYTES] = config
        self.lifeline = Lifeline(self._area, 8 * beacon.LIFELINE)
        self.lifeline.make()

    @property
    def written(self) -> bool:
        """Whether there is a rank that writes here: a program that was started cold may never do."""
        return self._words[MAGIC] == beacon.MARK

    @property
    def steps(self) -> int | None:
        return self._count(beacon.STEPS) if self.written else None

    @property
    def last_step_s(self) -> float:
        """When the last step was done, on this machine's monotonic clock; 0.0 before the first."""
        return self._times[beacon.STEP_AT]

    @property
    def base(self) -> int:
        """The steps that its optimizer had done before this life, if it says; else 0."""
        return self._count(beacon.BASE)

    @property
    def is_based(self) -> bool:
        return self._words[beacon.BASED] == 1

    def _count(self, field: int) -> int:
        count = self._words[field]
        return count if count < _MAX_STEPS else 0

    @property
    def phase(self) -> tuple[int, float, float]:
        """What it is at, since when, and when it was last done with an evaluation or a save."""
        return self._words[beacon.PHASE], self._times[beacon.PHASE_AT], self._times[beacon.BUSY_AT]

    @property
    def paces(self) -> tuple[float, float, int, float]:
        """How long saves have held it up, how long it took for itself, in how many steps, and for its sections."""
        times = self._times
        own_steps = self._count(beacon.OWN_STEPS)
        return times[beacon.SAVED_S], times[beacon.OWN_S], own_steps, times[beacon.SECTION_S]

    def sign(self, now_s: float) -> tuple[float, list[tuple[int, float]]]:
        """For how long there was no sign of life, and the sections that are open, with since when."""
        times = self._times
        newest_s = max(times[beacon.PHASE_AT], times[beacon.STEP_AT], times[beacon.HEARTBEAT_AT])
        known = min(self._words[KNOWN], MAX_SECTIONS) if self._words[OPEN] else 0
        opened = [(slot, times[SECTIONS + 2 * slot]) for slot in range(known)]
        return max(0.0, now_s - newest_s), [(slot, since_s) for slot, since_s in opened if since_s]

    def lease(self, until_s: float) -> None:
        self._times[beacon.LEASE] = until_s

    @property
    def drains(self) -> bool | None:
        """Whether the rank ends at a boundary when it is asked to; None: it has not said so yet, and may never do."""
        said = self._words[beacon.DRAINS] if self.written else 0
        return said == 1 if said else None

    def drain(self) -> None:
        """Ask it to. Who is not there yet will see it."""
        self._words[beacon.DRAIN] = 1

    @property
    def is_draining(self) -> bool:
        return self._words[beacon.DRAIN] != 0

    def say_limits(self, limits_s: tuple[float, ...]) -> None:
        for phase, limit_s in enumerate(limits_s):
            self._times[beacon.LIMITS + phase] = limit_s

    def say_wake(self, at_s: float) -> None:
        self._times[beacon.WAKE_AT] = at_s

    def read(self, now_s: float, generation: int) -> Vitals | None:
        """None while there is no one who writes here. Raises Corrupt."""
        self._seen = bytes(self._area[: _FIELDS.size])
        fields = _FIELDS.unpack(self._seen)
        if fields[MAGIC] == 0 and not self._read_before:
            return None  # it is written last of all
        gaps_s = fields[GAPS : GAPS + MEASURED]
        phase, alive_s, heartbeat_s = fields[beacon.PHASE], fields[beacon.PHASE_AT], fields[beacon.HEARTBEAT_AT]
        client_s, outside_s = fields[beacon.CLIENT_AT], fields[beacon.OUTSIDE_AT]
        limits_s = fields[beacon.FIRST_LIMIT], fields[beacon.HEARTBEAT_LIMIT], fields[beacon.OUTSIDE_LIMIT]
        if fields[MAGIC] != beacon.MARK or fields[END] != beacon.END_MARK or fields[beacon.GENERATION] != generation:
            raise Corrupt("its marks are gone")
        self._read_before = True
        if phase > 4 or fields[beacon.KNOWN] > MAX_SECTIONS or fields[OPEN] > fields[KNOWN]:
            raise Corrupt("a number in it is out of range")
        if max(fields[beacon.STEPS], fields[beacon.BASE]) >= _MAX_STEPS:
            raise Corrupt("a count in it cannot be")
        for at_s in (alive_s, heartbeat_s, client_s, outside_s):
            if not 0 <= at_s <= now_s + _AHEAD_S:
                raise Corrupt("a time in it cannot be")
        if not all(0 <= value < math.inf for value in (*gaps_s, *limits_s)):
            raise Corrupt("a limit in it cannot be")
        return Vitals(
            phase=phase,
            alive_s=alive_s,
            steps=fields[beacon.STEPS],
            trains=bool(fields[beacon.TRAINS]),
            gaps_s=gaps_s,
            client_s=client_s,
            heartbeat_s=heartbeat_s,
            first_limit_s=limits_s[0],
            heartbeat_limit_s=limits_s[1],
            outside_s=outside_s,
            outside_limit_s=limits_s[2],
            sections=self._open_sections(fields[KNOWN], now_s) if fields[OPEN] else (),
        )

    def is_as_read(self) -> bool:
        """Whether the rank has done nothing since it was last read."""
        return self._area[: _FIELDS.size] == self._seen and not self._words[OPEN]

    def _open_sections(self, known: int, now_s: float) -> tuple[Section, ...]:
        table = self._times[SECTIONS : SECTIONS + 2 * known].tolist()
        found = []
        for slot in range(known):
            since_s, limit_s = table[2 * slot], table[2 * slot + 1]
            if since_s == 0.0 or limit_s == 0.0:
                continue
            if not 0 <= since_s <= now_s + _AHEAD_S or not 0 <= limit_s < math.inf:
                raise Corrupt("a section in it cannot be")
            found.append(Section(slot, since_s, limit_s))
        return tuple(found)


def make(ranks: int, config: bytes) -> tuple[int, list[Page]]:
    """A file of areas, one a rank, and what all ranks are to read."""
    fd = beacon.make(ranks, config)
    where = (AREA_BYTES * ranks, len(config))
    return fd, [Page(fd, slot, where) for slot in range(ranks)]
