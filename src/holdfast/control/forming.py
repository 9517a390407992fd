"""Forming worlds: who is here, whether that is enough, and who gets which place."""

from __future__ import annotations

from enum import StrEnum

from holdfast.control import protocol, texts
from holdfast.control.account import Account
from holdfast.control.causes import Cause
from holdfast.control.hangs import NO_GAPS
from holdfast.control.incidents import Incident
from holdfast.control.membership import Budget, Member, Policy, Record, Seat, Settings, choose, seat, shares, target
from holdfast.control.orders import Action, Send, Timer, Write
from holdfast.control.quarantine import Quarantine
from holdfast.control.restarts import Decide, decide_unless_same_error
from holdfast.control.stacks import Group
from holdfast.control.stragglers import Stragglers
from holdfast.control.worlds import World


class Phase(StrEnum):
    GATHERING = "gathering"  # there is no world: nodes are waited for
    RUNNING = "running"
    STOPPING = "stopping"
    WAITING = "waiting"  # before a restart that backs off
    OVER = "over"


class Forming:
    """The half of a coordinator that makes worlds out of nodes. The other half hears of them, and ends what it made."""

    def __init__(
        self,
        settings: Settings,
        term: int,
        record: Record | None,
        node: str = "",
        decide: Decide = decide_unless_same_error,
    ) -> None:
        self.settings = settings
        self.node = node
        self.term = term
        self.account = Account(settings, decide, record)
        self.phase = Phase.GATHERING
        self.members: dict[str, Member] = {}
        self.generation = record.generation if record else -1
        self.steps = record.steps if record else 0  # in worlds that have ended
        self.arrivals = record.arrivals if record else 0
        self.quarantine = Quarantine()
        self.record = record
        self.over: protocol.Over | None = None
        self.since, self.former = term, None
        if record is not None:
            self.since, self.former = (term, record.over) if record.over else (record.since, record.former)
        self.job_id, self.first_generation = self._new_job_id, self.generation + 1
        if record is not None and not record.over and record.job_id:
            self.job_id, self.first_generation = record.job_id, record.first_generation
        self.epoch = 0  # of the phase, so that an old timer is known as such
        self.seats: dict[str, Seat] = {}
        self.up: set[str] = set()  # nodes of the world that may have live ranks
        self.absent: set[str] = set()  # nodes of the world that this coordinator has not met yet
        self.unstarted: set[str] = set()
        self.unstepped: set[str] = set()
        self.undone: set[str] = set()  # neither done nor failed
        self.stay: set[str] = set()  # nodes of the world whose ranks can all outlive it
        self.has_stay = False  # there was a world of which all were such
        self.done: set[str] = set()
        self.unconfirmed: set[str] = set()  # nodes of the last world that have not said that their ranks are gone
        self.heard_s = 0.0  # when one of its lost nodes was last heard of
        self.world_steps = 0
        self.stragglers = Stragglers()
        self.steps_known = False  # there are beacons to tell
        self.steps_seen = False
        self.has_stepped = False  # how many steps there were may never be heard
        self.launched_at_s = 0.0
        self.broken_at_s = 0.0
        self.causes: list[Cause] = []
        self.draining = False  # its ranks were asked to end at a boundary
        self.joining = ""  # why a world that nothing is wrong with is being stopped
        self.first_call_over = False
        self.inherited = False  # the world was formed by an earlier coordinator
        self.remembered = False  # a node has known a coordinator of this job before
        self.ending: protocol.Over | None = None  # how the job ends once this world is down: a rank asked for it
        self.groups: list[Group] = []  # what the ranks of a hung world were doing
        self.world_base = 0  # the steps that an optimizer had done before this world
        self.stayers = 0  # ranks of it that have left it, and stay
        self.as_they_are = False  # in a world of the same size only
        self.replaced = 0  # ranks that could have, and did not get out
        self.anew = ""  # why they do not, if they could
        self.gaps_s = NO_GAPS
        self.trained = False
        self.learned = record.learned if record and not record.over else ""
        self.unheard: list[Incident] = []  # closed while no node was here to be told
        self.missing: list[str] = []  # names of nodes that were lost since the last world

    def _gather(self, now_s: float) -> list[Action]:
        self._enter(Phase.GATHERING)
        actions: list[Action] = []
        if not self.settings.alone:
            actions.append(Timer("join", self.epoch, self.settings.join_timeout_s))
        return actions + self._consider(now_s)

    def _consider(self, now_s: float, newcomer: str = "") -> list[Action]:
        """Whether a world can be formed, or a running one be made larger."""
        if self.phase is Phase.GATHERING:
            return self._form_if_possible(now_s, newcomer)
        if self.phase is Phase.RUNNING:
            return self._grow_if_possible(now_s)
        return []

    def _available(self) -> tuple[bool, list[Member]]:
        """Whether somebody is about to be available, and who is."""
        returning = False
        found: list[Member] = []
        for node, member in self.members.items():
            if self.quarantine.holds(member.hello.host):
                continue
            if member.available:
                found.append(member)
            elif member.returning and node in self.seats:
                returning = True
        return returning, found

    def _form_if_possible(self, now_s: float, newcomer: str) -> list[Action]:
        settings = self.settings
        if len(self.members) < settings.min_nodes:
            return self._tell_who_is_missing(newcomer, len(self.members))
        if not self.first_call_over and settings.last_call_s > 0 and len(self.members) < settings.everyone:
            return [Timer("last call", self.epoch, settings.last_call_s)] if newcomer else []
        if not self.confirmed:
            return self._wait_for_fence(now_s)
        returning, available = self._available()
        if returning:
            return []
        chosen = choose(settings, available, tuple(self.seats.values()))
        if not chosen:
            return self._tell_who_is_missing(newcomer, len(available))
        return self._form(now_s, chosen)

    def _wait_for_fence(self, now_s: float) -> list[Action]:
        """Nobody of the last world could be asked to stop, so it may still run, cut off from here. Its ranks' leases
        count from when their nodes were last heard of; a world without any of them has to wait until these are over."""
        left_s = self._fence_left_s(now_s)
        if left_s <= 0:
            self.unconfirmed = set()
            return self._consider(now_s)
        text = f"no node of generation {self.generation} answers; it may still run, and ends by itself"
        told = self._broadcast(protocol.Waiting(f"{text} within {left_s:.0f} s"))
        return [*told, Timer("fence", self.epoch, left_s)]

    def _fence_left_s(self, now_s: float) -> float:
        # More than a lease, since a coordinator that was replaced may have prolonged it before it noticed.
        return self.heard_s + self.settings.join_timeout_s + self.settings.return_s - now_s

    def _form(self, now_s: float, chosen: list[Member]) -> list[Action]:
        seats = seat(self.settings, chosen, tuple(self.seats.values()))
        as_large = sum(s.local_size for s in seats) == sum(s.local_size for s in self.seats.values())
        self.generation += 1
        self._seat(seats, now_s)
        for member in chosen:
            member.staying = False
        self.first_call_over = True
        self.missing = []
        self.account.launched(now_s, as_large)
        self._enter(Phase.RUNNING)
        launches: list[Action] = [
            Send(place.node, protocol.Launch(world, self.learned))
            for place, world in zip(seats, self._shares(seats), strict=True)
        ]
        return [Write(self._record(now_s)), *launches, *self._stand_by()]

    def _seat(self, seats: tuple[Seat, ...], now_s: float) -> None:
        self.seats = {place.node: place for place in seats}
        self.up = set(self.seats)
        self.absent = set()
        self.unstarted, self.unstepped, self.undone = set(self.seats), set(self.seats), set(self.seats)
        self.unconfirmed, self.done = set(self.seats), set()
        self.stay = set()
        self.heard_s = 0.0
        self.world_steps = self.world_base = self.stayers = self.replaced = 0
        self.as_they_are = False
        self.anew = ""
        self.stragglers.begin()
        self.steps_known = self.steps_seen = self.has_stepped = False
        self.groups, self.ending = [], None
        self.causes, self.joining, self.inherited = [], "", False
        self.launched_at_s = now_s

    def _launch_of(self, node: str) -> protocol.Launch:
        worlds = self._shares(tuple(self.seats.values()))
        return protocol.Launch(worlds[self.seats[node].group_rank], self.learned)

    def _shares(self, seats: tuple[Seat, ...]) -> list[World]:
        ordinal = self.generation - self.first_generation
        return shares(self.settings, seats, self.generation, self.account.history.spent, self.job_id, ordinal)

    def _grow_if_possible(self, now_s: float) -> list[Action]:
        settings = self.settings
        waiting = len(self.members) > len(self.seats)
        goes_on = settings.policy is Policy.MIN_HEALTHY and not self.stay >= self.seats.keys()
        if not waiting or self.absent or settings.static or goes_on:
            return self._stand_by() if waiting else []
        if len(self.undone) < len(self.seats):
            return self._stand_by()  # it is about to end
        _, available = self._available()
        chosen = choose(settings, available, tuple(self.seats.values()))
        if len(chosen) <= len(self.seats) or target(settings, len(available)) <= len(self.seats):
            return self._stand_by()
        new = [member.hello.host for member in chosen if member.hello.node not in self.seats]
        free = not self.steps_seen or settings.budget is Budget.FAILURES or self.stay >= self.seats.keys()
        if not free and self.account.history.left <= 0:
            return self._stand_by("no restarts are left to take it in")
        self.joining = texts.joined(new)
        return self._break(now_s, self.joining, drain=True)

    def _stand_by(self, why: str = "") -> list[Action]:
        """Tell those that are not in the world, once."""
        actions: list[Action] = []
        for node, member in self.members.items():
            if node in self.seats or member.leaving is not None:
                continue
            text = texts.standby(self.quarantine.why(member.hello.host), why)
            if member.told != text:
                member.told = text
                actions.append(Send(node, protocol.Standby(text)))
        return actions

    def _tell_who_is_missing(self, newcomer: str, here: int) -> list[Action]:
        if self.settings.alone:
            return []
        orders = {member.hello.order for member in self.members.values()} if self.settings.static else set()
        text = texts.missing(self.settings, here, orders, self.missing)
        if newcomer:
            return [Send(newcomer, protocol.Waiting(text))]
        return self._broadcast(protocol.Waiting(text)) if self.missing else []

    def _break(
        self, now_s: float, why: str, failing: protocol.Failing | None = None, drain: bool = False
    ) -> list[Action]:
        """Stop the world, to form another."""
        raise NotImplementedError

    # -- what is known ------------------------------------------------------------------------------------------------

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        self.epoch += 1

    def _can_stay(self, node: str) -> None:
        self.stay.add(node)
        self.has_stay = self.has_stay or self.stay >= self.seats.keys()

    @property
    def _stays(self) -> bool:
        """Its ranks outlive it, as far as that is known: each says so when it has begun. Until all have stepped they
        wait for whoever is new, and a program whose ranks could stay in another world waits in this one, too."""
        return self.has_stay or any(place.stays for place in self.seats.values())

    @property
    def _new_job_id(self) -> str:
        """Of a job that begins in this term: the node's part is of one life of one agent, so no other has it."""
        return f"{self.node}.{self.term}"

    @property
    def confirmed(self) -> bool:
        """The last world can do no more steps: too many of its nodes have said that their ranks are gone. One suffices,
        unless it was one to do without some."""
        if self.settings.policy is Policy.MIN_HEALTHY:
            return len(self.unconfirmed) < self.settings.min_nodes
        return not self.unconfirmed or len(self.unconfirmed) < len(self.seats)

    def _record(self, now_s: float) -> Record:
        return Record(
            run_id=self.settings.run_id,
            term=self.term,
            generation=self.generation,
            history=self.account.history,
            node=self.node,
            incidents=self.account.incidents,
            steps=self.steps,
            arrivals=self.arrivals,
            refill_mark=self.account.refill_mark,
            seats=tuple(self.seats.values()),
            settled=self.phase not in (Phase.RUNNING, Phase.STOPPING),
            confirmed=self.confirmed,
            incident=None if self.account.incident is None else protocol.shifted(self.account.incident, -now_s),
            quarantine=self.quarantine.remaining(now_s),
            over=self.over,
            since=self.since,
            former=self.former,
            learned=self.learned,
            ending=self.ending,
            job_id=self.job_id,
            first_generation=self.first_generation,
        )

    def _broadcast(self, message: protocol.ToAgent) -> list[Action]:
        return [Send(node, message) for node in self.members]
