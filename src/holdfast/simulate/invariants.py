"""What must hold in every run, simulated or real: a checker that is told what happened, in order, and raises at the
first thing that must not be."""

from __future__ import annotations

import itertools
from collections import deque

from holdfast.control.causes import Kind
from holdfast.control.incidents import Incident
from holdfast.control.membership import Budget, Policy, Settings
from holdfast.control.quarantine import QUARANTINE_S
from holdfast.control.worlds import World
from holdfast.simulate.observed import (
    Committed,
    Discarded,
    EndAsked,
    Ended,
    Event,
    Excluded,
    Finished,
    FoundHung,
    Hung,
    IncidentClosed,
    IncidentOpened,
    Launched,
    Left,
    Quit,
    Ran,
    Released,
    Renewed,
    Restored,
    SetAside,
    Stepped,
    Stopped,
    TakenBack,
)

# A node that comes and goes may cost worlds, but not more than these in a minute. A program that raises, and gets
# further each time before it does, may have as many as it likes: slower it would only be later.
WORLDS_PER_MINUTE = 40


IDLE = " restarts in a row got no further "
NEARLY_S = 0.05  # what clocks and timers may be off by
LATE_S = 2.0  # between a decision and the moment it is seen to be made


class Violation(Exception):
    def __init__(self, invariant: str, text: str) -> None:
        super().__init__(f"{invariant}: {text}")
        self.invariant = invariant
        self.text = text


class Plan:
    """What is known of one world."""

    def __init__(self, world: World, term: int, at_s: float) -> None:
        self.world = world
        self.term = term
        self.at_s = at_s
        self.shares: dict[int, tuple[str, World]] = {}
        self.incident: Incident | None = None


class Checker:
    def __init__(self, settings: Settings, stays: bool = False) -> None:
        self.settings = settings
        self.stays = stays  # ranks outlive their worlds
        self.worlds: dict[int, Plan] = {}
        self.newest = -1
        self.steps = 0
        self.restarts = 0  # the most that any world was told
        self.ended: Ended | None = None
        self._coordinators: dict[int, str] = {}  # by term
        self._last_step = (-1, 0)  # generation and step of the last that was done or committed
        self._committed = 0
        self.incidents: dict[int, int] = {}  # and their generations
        self._term = 0  # the newest that has said anything of one
        self._since = 0  # the term in which this job began
        self._open: dict[int, int] = {}  # those that are, and in which term they were opened
        self._aside: dict[str, float] = {}
        self._left: dict[str, int] = {}
        self._began: deque[float] = deque()  # worlds of the last minute
        self._given_up: dict[int, bool] = {}  # generations after which the job began anew
        self._given_back = 0
        self._lifted: dict[str, float] = {}
        self._bygone: list[World] = []  # of earlier jobs of the same name
        self._hangs: dict[int, set[int]] = {}  # ranks that hang, by generation
        self._quits: dict[int, int] = {}  # the rank that was first to quit, by generation
        self._silent: dict[int, bool] = {}  # generations that had a verdict
        self._excluded: dict[str, int] = {}  # hosts, and the generation that was the newest then
        self._end_asked = False
        self._released: dict[str, bool] = {}
        self._furthest = 0
        self._advanced: dict[int, bool] = {}  # generations that got further than any before
        self._no_step = 0  # restarts in a row without one
        self._handlers = {
            Launched: self._launched,
            Stopped: self._stopped,
            Ran: self._ran,
            Stepped: self._stepped,
            Committed: self._committed_,
            Restored: self._restored,
            Discarded: self._discarded,
            IncidentOpened: self._opened,
            IncidentClosed: self._closed,
            SetAside: self._set_aside,
            TakenBack: self._taken_back,
            Left: self._left_,
            Renewed: self._renewed,
            Hung: self._hung,
            Quit: self._quit,
            FoundHung: self._found_hung,
            Excluded: self._excluded_,
            EndAsked: self._end_asked_,
            Released: self._released_,
            Ended: self._ended,
            Finished: self._finished,
        }

    def saw(self, at_s: float, event: Event) -> None:
        if not isinstance(event, Renewed) and getattr(event, "term", self._since) < self._since:
            # A coordinator of the job before, which slept through its end.
            self._bygone += [event.world] if isinstance(event, Launched) else []
            return
        self._handlers[type(event)](at_s, event)  # type: ignore[operator]

    # -- worlds -------------------------------------------------------------------------------------------------------

    def _act(self, term: int, coordinator: str) -> None:
        if self._coordinators.setdefault(term, coordinator) != coordinator:
            raise Violation("one coordinator", f"term {term} is {self._coordinators[term]}'s and {coordinator}'s")

    def _launched(self, at_s: float, event: Launched) -> None:
        world, generation = event.world, event.world.generation
        self._act(event.term, event.coordinator)
        plan = self.worlds.get(generation)
        if plan is None:
            plan = self._new_world(at_s, event)
        shared = ("restart_count", "max_restarts", "master_addr", "master_port", "world_size", "group_size", "job_id")
        for name in shared:
            if getattr(world, name) != getattr(plan.world, name):
                text = f"{name} of generation {generation} is {getattr(plan.world, name)} and {getattr(world, name)}"
                raise Violation("agreement", text)
        node, share = plan.shares.setdefault(world.group_rank, (event.node, world))
        if (node, share) != (event.node, world):
            raise Violation("agreement", f"group rank {world.group_rank} of generation {generation} went out twice")
        if len(plan.shares) == world.group_size:
            self._whole_world(plan)
        if generation < self.newest:
            return  # one that was lost on the way is sent again
        aside_s = self._aside.get(event.host)
        if aside_s is not None and at_s < aside_s + QUARANTINE_S * 0.99:
            raise Violation("quarantine", f"{event.node} is in generation {generation}, but its host is set aside")
        if generation > self._excluded.get(event.host, generation):
            raise Violation("requests", f"{event.node} is in generation {generation}, but its host was to be excluded")
        if generation > self._left.get(event.node, generation):
            raise Violation("leavers", f"{event.node} had said that it leaves, and is in generation {generation}")

    def _new_world(self, at_s: float, event: Launched) -> Plan:
        world, generation, settings = event.world, event.world.generation, self.settings
        if self.ended is not None:
            raise Violation("the end", f"generation {generation} is formed after the job has ended")
        if self._end_asked:
            raise Violation("requests", f"generation {generation} is formed, but a rank had asked to end the job")
        if generation <= self.newest:
            raise Violation("generations", f"generation {generation} comes after {self.newest}")
        if not settings.min_nodes <= world.group_size <= settings.max_nodes:
            raise Violation("size", f"generation {generation} has {world.group_size} nodes")
        plan = self.worlds[generation] = Plan(world, event.term, at_s)
        if (before := self.worlds.get(self.newest)) is not None:
            self._charge(before, plan)
        self.newest = generation
        self.restarts = max(self.restarts, world.restart_count)
        if before is None or not self._got_on(before):
            self._began.append(at_s)
        while self._began and self._began[0] < at_s - 60.0:
            self._began.popleft()
        if len(self._began) > WORLDS_PER_MINUTE:
            raise Violation("flapping", f"{len(self._began)} worlds within a minute")
        return plan

    def _got_on(self, plan: Plan) -> bool:
        raised = plan.incident is not None and plan.incident.kind is Kind.ERROR
        return raised and plan.world.generation in self._advanced

    def _charge(self, before: Plan, plan: Plan) -> None:
        was, is_, settings = before.world.restart_count, plan.world.restart_count, self.settings
        generation, apart = plan.world.generation, plan.world.generation - before.world.generation
        if is_ < was:
            raise Violation("restarts", f"generation {generation} counts {is_} restarts, the one before {was}")
        if is_ - was > apart:
            raise Violation("restarts", f"{is_ - was} restarts are charged from generation {generation - apart} on")
        given_back = self._given_back + (self.steps // settings.refill_steps if settings.refill_steps else 0)
        if is_ > settings.max_restarts + given_back:
            raise Violation("restarts", f"{is_} restarts, of {settings.max_restarts} and {given_back} given back")
        free = {Kind.MEMBERSHIP} if settings.budget is Budget.ALL else {Kind.MEMBERSHIP, Kind.LOST_NODE, Kind.PREEMPTED}
        if self.stays:
            free |= {Kind.PREEMPTED}
        ended = before.incident
        if before.world.generation in self._given_up:
            return
        if before.world.job_id != plan.world.job_id:
            raise Violation("generations", f"generation {generation} is of another job than the one before")
        among_themselves = ended is not None and settings.policy is Policy.MIN_HEALTHY and " stay" in ended.action
        if apart == 1 and is_ == was and ended is not None and ended.kind not in free and not among_themselves:
            raise Violation("restarts", f"generation {generation} was not charged for: {ended.headline}")

    def _whole_world(self, plan: Plan) -> None:
        shares = [plan.shares[rank][1] for rank in sorted(plan.shares)]
        generation = plan.world.generation
        if sorted(plan.shares) != list(range(plan.world.group_size)):
            raise Violation("ranks", f"the group ranks of generation {generation} are {sorted(plan.shares)}")
        if len({node for node, _ in plan.shares.values()}) != len(shares):
            raise Violation("ranks", f"a node is in generation {generation} twice")
        ranks = [share.first_rank + local for share in shares for local in range(share.local_size)]
        if ranks != list(range(plan.world.world_size)):
            raise Violation("ranks", f"the ranks of generation {generation} are {ranks}")
        for role in dict.fromkeys(share.role for share in shares):
            of_role = [share for share in shares if share.role == role]
            role_ranks = [share.role_first_rank + local for share in of_role for local in range(share.local_size)]
            if role_ranks != list(range(len(role_ranks))) or any(s.role_size != len(role_ranks) for s in of_role):
                raise Violation("ranks", f"the {role} ranks of generation {generation} are {role_ranks}")

    def _ran(self, at_s: float, event: Ran) -> None:
        generation = event.world.generation
        plan = self.worlds.get(generation)
        if event.world in self._bygone:
            return  # a node that slept through the end of the job before; its world lacks all others
        if plan is None or plan.shares.get(event.world.group_rank) != (event.node, event.world):
            raise Violation("agreement", f"{event.node} runs another generation {generation} than it was told")
        if event.old_ranks:
            raise Violation(
                "fencing", f"{event.node} starts generation {generation} beside {event.old_ranks} old ranks"
            )

    def _stopped(self, at_s: float, event: Stopped) -> None:
        self._act(event.term, event.coordinator)
        if not event.why:
            raise Violation("causes", f"{event.node} was told to stop generation {event.generation} without a reason")

    # -- the program --------------------------------------------------------------------------------------------------

    def _in_order(self, generation: int, step: int, what: str) -> None:
        if generation < self._last_step[0]:
            text = f"generation {generation} {what} step {step} after generation {self._last_step[0]} has stepped"
            raise Violation("fencing", text)
        self._last_step = (generation, step)

    def _stepped(self, at_s: float, event: Stepped) -> None:
        self.steps += 1
        self._in_order(event.generation, event.step, "does")
        if event.step > self._furthest:
            self._furthest = event.step
            self._advanced[event.generation] = True

    def _committed_(self, at_s: float, event: Committed) -> None:
        self._in_order(event.generation, event.step, "commits")
        self._committed = max(self._committed, event.step)

    def _restored(self, at_s: float, event: Restored) -> None:
        if event.step < self._committed:
            text = f"generation {event.generation} begins at step {event.step}; {self._committed} was committed"
            raise Violation("checkpoints", text)
        if event.step < event.held:
            text = f"generation {event.generation} begins at step {event.step}; a rank of it had done {event.held}"
            raise Violation("staying", text)

    def _discarded(self, at_s: float, event: Discarded) -> None:
        if not event.why and event.generation not in self._silent:
            who = f"rank {event.rank} of generation {event.generation} on {event.node}"
            raise Violation("staying", f"{who} could stay, and is ended for no reason")

    # -- incidents ----------------------------------------------------------------------------------------------------

    def _opened(self, at_s: float, event: IncidentOpened) -> None:
        incident = event.incident
        self._term = max(self._term, event.term)
        if incident.number in self.incidents:
            if self.incidents[incident.number] != incident.generation:
                raise Violation("incidents", f"incident {incident.number} is of two generations")
            return  # the same, told to another node
        survived = self.settings.policy is Policy.MIN_HEALTHY and incident.action.endswith(" go on")
        if (plan := self.worlds.get(incident.generation)) is not None and not survived:
            if plan.incident is not None:
                text = f"generation {incident.generation} has incidents {plan.incident.number} and {incident.number}"
                raise Violation("incidents", text)
            plan.incident = incident
        if incident.kind is Kind.MEMBERSHIP and incident.headline == "the world was stopped":
            raise Violation("causes", f"generation {incident.generation} was stopped, and nobody knows why")
        if incident.kind is Kind.BACKEND and incident.generation in self._quits:
            quits = self._quits[incident.generation]
            raise Violation("causes", f"rank {quits} of generation {incident.generation} quit, and a peer is blamed")
        self._explained(incident)
        self._progress(incident)
        self.incidents[incident.number] = incident.generation
        self._open[incident.number] = event.term

    def _closed(self, at_s: float, event: IncidentClosed) -> None:
        number = event.incident.number
        self._term = max(self._term, event.term)
        if number not in self.incidents:
            if event.term == min(self._coordinators, default=event.term):
                raise Violation("incidents", f"incident {number} was closed, but never opened")
            # A coordinator that died as soon as it had written it could not tell. It is told whole when it is closed.
            self._opened(at_s, IncidentOpened(event.term, event.incident))
        self._open.pop(number, None)

    def _explained(self, incident: Incident) -> None:
        if incident.kind is not Kind.HANG or "does not end even by SIGKILL" in incident.headline:
            return
        generation = incident.generation
        if generation not in self._silent:
            raise Violation("hangs", f"generation {generation} ended by a hang, but no monitor has found one")
        if wrong := set(incident.suspects) - self._hangs.get(generation, set()):
            raise Violation("hangs", f"ranks {sorted(wrong)} of generation {generation} are suspected, and do not hang")

    def _progress(self, incident: Incident) -> None:
        """Worlds without a step may follow each other only so often."""
        plan = self.worlds.get(incident.generation)
        if incident.generation in self._given_up:
            return  # told late, by the coordinator with which the job began anew
        if incident.steps or not incident.restarted or incident.generation in self._advanced:
            self._no_step = 0
        elif incident.steps is not None and incident.kind is not Kind.MEMBERSHIP and plan is not None:
            self._no_step += plan.world.restart_count > 0
        if 0 < self.settings.max_no_progress <= self._no_step:
            raise Violation("progress", f"{self._no_step} restarts in a row, and none got a step further")

    def _unclosed(self) -> list[int]:
        """A coordinator that dies as it writes the next incident cannot tell that the last one is closed by it; every
        other one must be."""
        newest = max(self.incidents, default=0)
        return [number for number, term in self._open.items() if term == self._term or number == newest]

    # -- hangs and requests -------------------------------------------------------------------------------------------

    def _hung(self, at_s: float, event: Hung) -> None:
        self._hangs.setdefault(event.generation, set()).add(event.rank)

    def _quit(self, at_s: float, event: Quit) -> None:
        self._quits[event.generation] = event.rank

    def _found_hung(self, at_s: float, event: FoundHung) -> None:
        who = f"rank {event.rank} of generation {event.generation} on {event.node}"
        if event.silent_s < event.limit_s - NEARLY_S:
            raise Violation("hangs", f"{who} counts as hung after {event.silent_s:.2f} of {event.limit_s:.2f} s")
        if event.awake_s < event.limit_s - NEARLY_S:
            raise Violation("hangs", f"{who} counts as hung, awake for {event.awake_s:.2f} of {event.limit_s:.2f} s")
        if event.limit_s < event.least_s - NEARLY_S:
            raise Violation("hangs", f"{who} has {event.limit_s:.2f} s, and should have {event.least_s:.2f} s")
        self._silent[event.generation] = True

    def _excluded_(self, at_s: float, event: Excluded) -> None:
        self._excluded.setdefault(event.host, self.newest)

    def _end_asked_(self, at_s: float, event: EndAsked) -> None:
        self._end_asked = True

    # -- nodes --------------------------------------------------------------------------------------------------------

    def _set_aside(self, at_s: float, event: SetAside) -> None:
        # It is said once it is written, and a lift may have been faster.
        if at_s > self._lifted.get(event.host, -LATE_S) + LATE_S:
            self._aside.setdefault(event.host, at_s)

    def _taken_back(self, at_s: float, event: TakenBack) -> None:
        self._aside.pop(event.host, None)
        self._excluded.pop(event.host, None)
        self._lifted[event.host] = at_s

    def _released_(self, at_s: float, event: Released) -> None:
        self._released[event.node] = True

    def _left_(self, at_s: float, event: Left) -> None:
        self._left.setdefault(event.node, event.generation)

    def _renewed(self, at_s: float, event: Renewed) -> None:
        self._given_up[self.newest] = True
        self._given_back = event.restarts
        self._end_asked, self._no_step = False, 0
        if event.another_job:
            self.at_end()
            self._since = event.term
            self._bygone += [world for plan in self.worlds.values() for _, world in plan.shares.values()]
            self.ended, self.newest, self.restarts, self._given_up = None, -1, 0, {}
            self.worlds, self._coordinators, self.incidents, self._open, self._aside = {}, {}, {}, {}, {}
            self._last_step = (-1, 0)
            self._advanced = {}
            self._excluded, self._hangs, self._quits, self._silent = {}, {}, {}, {}

    # -- the end ------------------------------------------------------------------------------------------------------

    def _ended(self, at_s: float, event: Ended) -> None:
        if self.ended is not None:
            if (self.ended.kind, self.ended.reason) != (event.kind, event.reason):
                raise Violation("the end", f"the job ended with {self.ended.reason!r} and with {event.reason!r}")
            return
        self.ended = event
        if self._end_asked and event.kind is not Kind.REQUESTED:
            raise Violation("requests", f"a rank had asked to end the job, but: {event.reason}")
        if event.kind is Kind.REQUESTED and not self._end_asked:
            raise Violation("requests", f"nobody had asked for it, but: {event.reason}")
        if IDLE in event.reason and (idle := self._idle_worlds()) < self.settings.max_no_progress:
            raise Violation("progress", f"{event.reason}, after {idle}")
        # Whether a lift was written before its coordinator died, nobody can tell.
        held = self._aside or self._excluded or self._lifted
        enough = event.fit >= self.settings.min_nodes and not held
        if event.kind is Kind.LOST_NODE and " nodes came within " in event.reason and enough:
            raise Violation("the end", f"{event.fit} nodes were there, but: {event.reason}")
        gives_up = event.reason.startswith("no restart:") or IDLE in event.reason
        if event.kind is Kind.PREEMPTED and not event.leaving and not gives_up:
            raise Violation("the end", "nobody was told to stop, but the job was preempted")
        if event.reason.startswith("no restart:") and self.newest + 1 < self.settings.max_restarts:
            raise Violation("the end", f"{event.reason}, after {self.newest + 1} worlds")

    def _idle_worlds(self) -> int:
        """Worlds in a row that got no further, as far as a coordinator can know of their steps."""
        idle = 0
        for generation, plan in reversed(self.worlds.items()):
            if plan.incident is None or plan.incident.steps is None:
                continue
            if generation in self._advanced:
                break
            idle += 1
        return idle

    def _finished(self, at_s: float, event: Finished) -> None:
        if event.live_ranks:
            raise Violation("leftovers", f"{event.node} finished with {event.live_ranks} live ranks")
        if event.kind is None and self.is_spare(event.node):
            return
        own = (Kind.PREEMPTED, Kind.HANG)  # what a node knows better
        heard = self.ended is not None and event.node in self.ended.reached and event.kind not in own
        if self.ended is not None and heard and event.kind is not self.ended.kind:
            raise Violation(
                "the end", f"{event.node} finished with {event.reason!r}, the job with {self.ended.reason!r}"
            )

    def is_spare(self, node: str) -> bool:
        """Whether it has no part in the newest world, and so ends well however that ends."""
        newest = self.worlds.get(self.newest)
        return newest is None or node in self._released or node not in [held for held, _ in newest.shares.values()]

    def at_end(self) -> None:
        """After everybody has finished."""
        if self.ended is not None and (unclosed := self._unclosed()):
            raise Violation("incidents", f"incident {', '.join(map(str, unclosed))} was never closed")
        plans = list(self.worlds.values())
        for plan, following in itertools.pairwise(plans):
            # Of what a coordinator decided and wrote in its last moment, its successor tells only the outcome.
            same_term = plan.term == following.term and following.world.generation == plan.world.generation + 1
            whole = len(plan.shares) == plan.world.group_size
            if plan.incident is None and same_term and whole and plan.world.generation not in self._given_up:
                raise Violation("incidents", f"generation {plan.world.generation} ended without one")
