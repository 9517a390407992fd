"""When a rank counts as hung: one monitor a rank, fed with what its beacon says, kept over worlds.

Two kinds of limits. A script may set its own, by heartbeats and sections. Where it does not, the longest gap that was
seen between two steps sets one: several times that gap, and never less than a floor. What the script says about itself
replaces what was learned.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import StrEnum
from operator import gt
from typing import NamedTuple

import msgspec

STARTING, TRAINING, EVALUATING, SAVING, ENDING = range(5)
PHASES = ("starting", "training", "evaluating", "saving", "ending")
Gaps = tuple[float, float, float, float]  # starting, training, evaluating, saving
NO_GAPS: Gaps = (0.0, 0.0, 0.0, 0.0)
MEASURED = 4  # phases whose gaps are learned

FLOOR_S = 30.0
SAFETY_FACTOR = 5.0
# The gaps of the first steps say little: caches are cold, and graphs are compiled.
STEPS_TO_LEARN = 6
# A first evaluation or save has no gap to go by: an hour, with the default floor.
UNSEEN_FLOORS = 120
# A world may have started from nothing, and the next from a checkpoint of a terabyte: ten minutes at least. A script
# may evaluate on ten samples, and save a handful of numbers, before it does so in earnest: five.
STARTING_FLOORS = 20
SELDOM_FLOORS = 10
# An agent that is this late has been stopped, or its machine has; so may the ranks have been, and they start afresh.
LATE_S = 1.0


def longest(ours_s: Gaps, theirs_s: Gaps) -> Gaps:
    starting, training, evaluating, saving = map(max, ours_s, theirs_s)
    return starting, training, evaluating, saving


class Mode(StrEnum):
    OFF = "off"
    WARN = "warn"
    RESTART = "restart"


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for."""

    mode: Mode = Mode.RESTART
    floor_s: float = FLOOR_S
    safety_factor: float = SAFETY_FACTOR
    first_s: float | None = None  # until the first step or heartbeat; None: as learned, 0: no limit

    def limit_s(self, phase: int, gaps_s: Gaps, stepped: bool, trains: bool, beats: bool = False) -> float:
        """How long a rank may give no sign in that phase. `stepped`: enough steps were seen to learn from; `trains`: it
        has an optimizer; `beats`: it has sent a heartbeat, so the limit for the first sign of life is done with."""
        unseen_s = UNSEEN_FLOORS * self.floor_s
        if phase == ENDING:
            return unseen_s
        learned_s = max(self.floor_s, self.safety_factor * gaps_s[phase])
        if phase == STARTING:
            if self.first_s is not None and not beats:
                return self.first_s or math.inf
            if gaps_s[STARTING]:
                return max(learned_s, STARTING_FLOORS * self.floor_s)
            # A program without an optimizer may never step, and is none of our business.
            return unseen_s if trains else math.inf
        if not gaps_s[phase] or (phase == TRAINING and not stepped):
            return max(unseen_s, learned_s)
        return learned_s if phase == TRAINING else max(learned_s, SELDOM_FLOORS * self.floor_s)


class Busy(NamedTuple):
    """Ranks for which the others may have to wait: until when they may evaluate or save by their limits, and when the
    last one was done with it. And whether any has done a step in this world."""

    evaluating_s: float = 0.0
    saving_s: float = 0.0
    done_s: float = 0.0
    stepped: bool = False


class Section(NamedTuple):
    slot: int
    since_s: float
    limit_s: float


class Vitals(NamedTuple):
    """What a rank's beacon said at one moment. A limit of 0 is none, a time of 0 never."""

    phase: int
    alive_s: float  # the last step, or the beginning of the phase
    steps: int
    trains: bool  # it has an optimizer
    gaps_s: Gaps
    client_s: float = 0.0  # since when the script monitors itself
    heartbeat_s: float = 0.0
    first_limit_s: float = 0.0
    heartbeat_limit_s: float = 0.0
    outside_s: float = 0.0  # since when no section is open
    outside_limit_s: float = 0.0
    sections: tuple[Section, ...] = ()  # the open ones that have a limit


class Hang(msgspec.Struct, frozen=True):
    """A rank has given no sign of life for too long."""

    rank: int
    what: str  # "no step": "for 31 s (limit 30 s)" is added by who tells it
    since_s: float
    limit_s: float
    phase: int = -1  # where the limit was a learned one
    slot: int = -1  # where it was a section's

    def headline(self, now_s: float, section: str = "") -> str:
        what = f"section {section!r} open" if self.slot >= 0 else self.what
        return f"{what} for {now_s - self.since_s:.3g} s (limit {self.limit_s:.3g} s)"


class Watch:
    """The monitors of one node's ranks. `look` is asked when a rank's deadline has come, or when it has poked."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.gaps_s = NO_GAPS  # the longest of any rank in any world, of all nodes
        self.learned = False  # a rank has done enough steps, in any world
        self._fresh_s = 0.0  # ranks are not blamed for anything before
        self._told: dict[int, float] = {}  # ranks that were warned of, and since when they hang
        self._elsewhere = Busy()

    def begin(self, now_s: float) -> None:
        """A new world: nothing of the old one counts but what was learned."""
        self._fresh_s = now_s
        self._told = {}

    def agree(self, gaps_s: Gaps, learned: bool) -> None:
        """What was seen elsewhere. The longest counts."""
        if any(map(gt, gaps_s, self.gaps_s)):
            self.gaps_s = longest(self.gaps_s, gaps_s)
        self.learned = self.learned or learned

    def others(self, elsewhere: Busy) -> None:
        """The same of other nodes."""
        self._elsewhere = elsewhere

    def late(self, now_s: float, by_s: float) -> None:
        """This agent was asked to look, and did only now."""
        if by_s > LATE_S:
            self._fresh_s = now_s

    def limits_s(self) -> tuple[float, ...]:
        """The learned limits by phase, for a rank that trains."""
        return tuple(self.rules.limit_s(phase, self.gaps_s, self.learned, True) for phase in range(len(PHASES)))

    def look(
        self, now_s: float, rank: int, vitals: Vitals | None, busy: Callable[[], Busy] = lambda: Busy()
    ) -> Hang | float:
        """A hang, or until when there can be none. No vitals: the rank has not got as far as to leave any. `busy` is
        asked only where it matters: who of this node's ranks the others may be waiting for."""
        if self.rules.mode is Mode.OFF:
            return math.inf
        if vitals is None:
            limits = self._before_the_beacon(rank)
        else:
            self.agree(vitals.gaps_s, vitals.steps >= STEPS_TO_LEARN)
            # A program that has come to its end beats no more, and its sections are nobody's.
            own = self._own(rank, vitals) if vitals.phase != ENDING else []
            limits = own or self._learned(rank, vitals)
        if not limits:
            return math.inf
        first = min(limits, key=lambda hang: hang.since_s + hang.limit_s)
        if first.since_s + first.limit_s > now_s:
            return first.since_s + first.limit_s
        if vitals is not None and (until_s := self._excused_s(now_s, first, vitals, busy)) > now_s:
            return until_s
        again = self._told.get(rank) == first.since_s
        self._told[rank] = first.since_s
        if again and self.rules.mode is Mode.WARN:
            return now_s + first.limit_s  # once is enough, until it has gone on and hangs again
        if first.phase in range(MEASURED) and not again:
            # If this was no hang after all, the next world must not be stopped at the same place again.
            doubled_s = [0.0] * MEASURED
            doubled_s[first.phase] = 2 * first.limit_s / self.rules.safety_factor
            self.gaps_s = longest(self.gaps_s, (doubled_s[0], doubled_s[1], doubled_s[2], doubled_s[3]))
        return first

    def _excused_s(self, now_s: float, hang: Hang, vitals: Vitals, busy: Callable[[], Busy]) -> float:
        """Until when a rank may be silent because of what others do.

        It may wait for one that evaluates or saves: often one rank saves for all. Its own time counts from when that
        one was done. And while others step, one without an optimizer is not waited for: it has another part to play.
        """
        if hang.phase == STARTING and not vitals.trains and self.rules.first_s is None:
            return now_s + hang.limit_s if busy().stepped or self._elsewhere.stepped else 0.0
        if hang.phase not in (TRAINING, EVALUATING):
            return 0.0
        here = busy()
        until_s = here.saving_s if hang.phase == EVALUATING else max(here.saving_s, here.evaluating_s)
        if max(until_s, self._elsewhere.saving_s) > now_s:
            return now_s + hang.limit_s
        return max(here.done_s, self._elsewhere.done_s) + hang.limit_s

    def _before_the_beacon(self, rank: int) -> list[Hang]:
        first_s = self.rules.first_s
        return [] if not first_s else [Hang(rank, "not started", self._fresh_s, first_s)]

    def _own(self, rank: int, vitals: Vitals) -> list[Hang]:
        """The limits that the script set for where it is now. Every open section counts, however deep."""
        found = [Hang(rank, "", self._since(s.since_s), s.limit_s, slot=s.slot) for s in vitals.sections]
        if not vitals.client_s:
            return found
        if not vitals.heartbeat_s and vitals.first_limit_s:
            found.append(Hang(rank, "no first heartbeat", self._since(vitals.client_s), vitals.first_limit_s))
        if vitals.heartbeat_s and vitals.heartbeat_limit_s:
            found.append(Hang(rank, "no heartbeat", self._since(vitals.heartbeat_s), vitals.heartbeat_limit_s))
        if vitals.outside_s and vitals.outside_limit_s:
            found.append(Hang(rank, "outside of any section", self._since(vitals.outside_s), vitals.outside_limit_s))
        return found

    def _learned(self, rank: int, vitals: Vitals) -> list[Hang]:
        phase = vitals.phase
        limit_s = self.rules.limit_s(phase, self.gaps_s, self.learned, vitals.trains, bool(vitals.heartbeat_s))
        if math.isinf(limit_s):
            return []
        what = "no first step" if phase == STARTING else "no step" if phase == TRAINING else PHASES[phase]
        since_s = self._since(max(vitals.alive_s, vitals.heartbeat_s, vitals.outside_s))
        return [Hang(rank, what, since_s, limit_s, phase=phase)]

    def _since(self, at_s: float) -> float:
        return max(at_s, self._fresh_s)
