"""`RankMonitorClient`: what a script calls to be watched by limits of its own."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping
from typing import Any

from holdfast.fault_tolerance import agreement, persistence
from holdfast.fault_tolerance.agreement import Ask, Seen, Together
from holdfast.fault_tolerance.requests import WORDS, WorkloadAction, WorkloadControlRequest
from holdfast.fault_tolerance.signs import Signs
from holdfast.fault_tolerance.timeouts import Learned, RankMonitorClientError, check_name, listed, parse
from holdfast.wire import messages
from holdfast.worker import place as places
from holdfast.worker.beacon import OUTSIDE_AT

LEAST_S = 1.0  # a limit below this is one for hiccups of a machine, not for hangs
DESCRIPTION_CHARS = 4000


class RankMonitorClient(Signs):
    """`required=False`: outside of `holdfast run` every call does nothing, so that a script also runs alone."""

    __slots__ = ()

    def section(self, section: str) -> OpenSection:
        """`with client.section("data"):`"""
        return OpenSection(self, section)

    # -- learned timeouts ---------------------------------------------------------------------------------------------

    def calculate_and_set_hb_timeouts(self, skip_if_not_ready: bool = False) -> bool:
        """Learn how far heartbeats are apart. Every rank must call it, and all get the same."""
        return self._calculate(Ask(heartbeat=True), skip_if_not_ready)

    def calculate_and_set_section_timeouts(
        self,
        selected_sections: Collection[str] | None = None,
        calc_out_of_section: bool = True,
        skip_if_not_ready: bool = False,
    ) -> bool:
        """Learn how long sections take: those that are selected, or all. Every rank must call it, with the same."""
        if isinstance(selected_sections, str):
            raise RankMonitorClientError(f"selected_sections={selected_sections!r}: a list of names is meant")
        selected = None
        if selected_sections is not None:
            selected = tuple(sorted({check_name(name) for name in selected_sections}))
        expected = tuple(sorted(self.cfg.rank_section_timeouts)) if self.cfg is not None else ()
        return self._calculate(Ask(False, True, selected, expected, calc_out_of_section), skip_if_not_ready)

    def _calculate(self, ask: Ask, skip_if_not_ready: bool) -> bool:
        if not self._is_fit():
            return False
        together = agreement.agree(ask, self._seen(), self._learned, agreement.world())
        if missing := together.lacks(ask):
            if skip_if_not_ready:
                return False
            more = ["more"] if len(missing) > 3 else []
            raise RankMonitorClientError(
                f"not enough data for timeouts: no rank has had {listed(missing[:3] + more)}; "
                "call this later, or with skip_if_not_ready=True"
            )
        self._learned = self._merged(ask, together)
        place = self._place
        assert place is not None
        self._set_limits()
        self._poke()
        place.report(messages.Learned(place.rank, place.generation, persistence.pack(self._learned)))
        return True

    def _seen(self) -> Seen:
        """What is still going on counts for as long as it already takes."""
        now_s = time.monotonic()
        longest = dict(self._longest)
        for name, since_s in dict(self._opened).items():
            longest[name] = max(longest.get(name, 0.0), now_s - since_s)
        outside_s = self._times[OUTSIDE_AT]
        outside_s = max(self._outside, now_s - outside_s) if outside_s else self._outside
        return Seen(self._first, self._gap, outside_s, longest)

    def _merged(self, ask: Ask, together: Together) -> Learned:
        seen, old = together.seen, together.learned
        heartbeat, outside = old.heartbeat, old.out_of_section
        if ask.heartbeat:
            first, gap = old.heartbeat or (None, None)
            heartbeat = self._limit(seen.first, first), self._limit(seen.gap, gap)
        if ask.outside:
            outside = self._limit(seen.outside, outside)
        new = {name: self._limit(seen.sections[name], old.section.get(name)) for name in together.needed}
        return Learned(heartbeat, {**old.section, **new}, outside)

    def _limit(self, longest_s: float, learned_s: float | None) -> float:
        assert self.cfg is not None
        floor_s = min(LEAST_S, self.cfg.hang_floor) if self.floor_s is None else self.floor_s
        limit_s = max(self.cfg.safety_factor * longest_s, floor_s)
        if learned_s is not None:
            # The mean, so that one outlier does not stay for ever; but never what would already have been a hang.
            limit_s = max((limit_s + learned_s) / 2, longest_s)
        return math.ceil(1000 * limit_s) / 1000

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What was learned, the same on all ranks, as plain JSON."""
        return self._learned.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Before or after init. It replaces what was learned; what the state does not have is kept."""
        loaded = parse(state)
        if self.is_initialized:
            self._is_fit()
        self._learned = loaded.over(self._learned)
        if self.is_initialized:
            self._set_limits()
            self._poke()

    # -- requests -----------------------------------------------------------------------------------------------------

    def send_workload_control_request(self, req: WorkloadControlRequest) -> None:
        """Ask for something that concerns more than this rank. Needs no init."""
        if not isinstance(req, WorkloadControlRequest):
            raise RankMonitorClientError(f"a WorkloadControlRequest is meant, not {type(req).__name__}")
        if not isinstance(req.action, WorkloadAction) or not isinstance(req.description, str):
            raise RankMonitorClientError("a request has a WorkloadAction and a text")
        if (place := places.current()) is None:
            return self._not_a_rank()
        text = req.description[:DESCRIPTION_CHARS].encode(errors="replace").decode()
        if not place.report(messages.Control(place.rank, place.generation, WORDS[req.action], text)):
            raise RankMonitorClientError(
                "the request did not reach the agent; it is gone, or this program closed its line"
            )
        return None


class OpenSection:
    """A section for as long as a `with` block."""

    __slots__ = ("_client", "_name")

    def __init__(self, client: RankMonitorClient, name: str) -> None:
        self._client = client
        self._name = name

    def __enter__(self) -> None:
        self._client.start_section(self._name)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self._client.end_section(self._name)
        except RankMonitorClientError:
            if kind is None:  # else the block's own error is the one to tell
                raise
