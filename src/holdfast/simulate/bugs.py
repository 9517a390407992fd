"""Bugs that were planted on purpose, for tests of the simulator: each must be found. A checker that never fails proves
nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import msgspec

from holdfast.control import acts, causes, forming, membership, orders, protocol
from holdfast.control.coordinator import Coordinator
from holdfast.control.forming import Phase
from holdfast.control.hangs import Rules, Watch
from holdfast.control.node import Node
from holdfast.control.quarantine import Quarantine
from holdfast.control.restarts import History
from holdfast.simulate.ledgers import Etcd
from holdfast.simulate.ranks import Group, Training
from holdfast.simulate.server import Server

Bug = Callable[[], contextlib.AbstractContextManager[Any]]


def _instead(owner: Any, name: str, make: Callable[[Any], Any]) -> Any:
    """Replace a method by one made from it."""
    return mock.patch.object(owner, name, make(getattr(owner, name)))


def lease_ignored() -> Any:
    """Ranks step although their lease is over."""

    def is_able(self: Training, group: Any) -> bool:
        return group.whole and not group.stuck and not group.hung and not group.agent.host.frozen

    return mock.patch.object(Training, "_is_able", is_able)


@contextlib.contextmanager
def lease_from_receipt() -> Iterator[None]:
    """A lease counts from when the answer was read, not from when the question was asked."""
    read_s = 0.0

    def make_handle(real: Any) -> Any:
        def handle(self: Node, now_s: float, event: Any) -> Any:
            nonlocal read_s
            read_s = now_s
            return real(self, now_s, event)

        return handle

    def make_lease(real: Any) -> Any:
        return lambda self, said_s: real(self, read_s)

    with _instead(Node, "handle", make_handle), _instead(Node, "_lease", make_lease):
        yield


def charged_twice() -> Any:
    def make(real: Any) -> Any:
        return lambda self: real(real(self))

    return _instead(History, "charged", make)


def never_charged() -> Any:
    return mock.patch.object(History, "charged", lambda self: self)


def charged_per_node() -> Any:
    """Each node's end is charged, not the world's."""

    def make(real: Any) -> Any:
        def down(self: Coordinator, now_s: float, node: str, member: Any, message: Any) -> Any:
            if message.causes and node in self.up:
                self.account.history = self.account.history.charged()
            return real(self, now_s, node, member, message)

        return down

    return _instead(Coordinator, "_down", make)


def budget_ignored() -> Any:
    return mock.patch.object(History, "left", property(lambda self: 1))


def generation_forgotten() -> Any:
    """A restarted coordinator takes the generation before the last for the last."""

    def make(real: Any) -> Any:
        def begin(self: Coordinator, now_s: float) -> Any:
            self.generation = max(-1, self.generation - 1)
            return real(self, now_s)

        return begin

    return _instead(Coordinator, "begin", make)


def sent_before_written() -> Any:
    """What was decided is told before it is in the ledger."""

    def write(self: Server, record: Any) -> None:
        self._writing = False
        real(self, record)
        self._writing = False

    real = Server._write
    return mock.patch.object(Server, "_write", write)


@contextlib.contextmanager
def not_fenced() -> Iterator[None]:
    """etcd lets a coordinator go on whose term is over."""

    def put(self: Etcd, term: int, record: Any) -> bool:
        self.record = record
        return True

    with mock.patch.object(Etcd, "put", put), mock.patch.object(Etcd, "renew", lambda self, term: True):
        yield


@contextlib.contextmanager
def old_ranks_kept() -> Iterator[None]:
    """A node is asked for although it has ranks of an older world, and starts the newer ones beside them."""

    def make(real: Any) -> Any:
        def handle(self: Node, now_s: float, event: Any) -> Any:
            if isinstance(event, protocol.Launch) and self.live and event.world.generation > self.generation:
                self.live = frozenset()
            return real(self, now_s, event)

        return handle

    available = property(lambda self: self.ready and self.fit and self.leaving is None)
    with _instead(Node, "handle", make), mock.patch.object(membership.Member, "available", available):
        yield


def zombie_answers() -> Any:
    """A coordinator that has slept answers beats before it looks whether its term is over."""
    return mock.patch.object(Server, "holds_term", lambda self: True)


def lease_from_welcome() -> Any:
    """A greeting is answered with a new lease, whatever world the node's ranks are of."""

    def make(real: Any) -> Any:
        def handle(self: Node, now_s: float, event: Any) -> Any:
            actions = real(self, now_s, event)
            if isinstance(event, protocol.Welcome) and not actions:
                return [acts.Lease(event.said_s + self.join_timeout_s)]
            return actions

        return handle

    return _instead(Node, "handle", make)


def not_all_down() -> Any:
    """The next world is formed as soon as one node is down."""

    def settle_if_down(self: Coordinator, now_s: float) -> Any:
        if self.phase is not Phase.STOPPING or len(self.up) == len(self.seats):
            return []
        return self._settle(now_s)

    return mock.patch.object(Coordinator, "_settle_if_down", settle_if_down)


def wrong_rank_order() -> Any:
    """The last node is told its first rank wrong."""

    def make(real: Any) -> Any:
        def shares(*args: Any) -> Any:
            worlds = real(*args)
            if len(worlds) > 2:
                worlds[-1] = msgspec.structs.replace(worlds[-1], first_rank=worlds[-2].first_rank)
            return worlds

        return shares

    return _instead(forming, "shares", make)


def restart_counts_differ() -> Any:
    def make(real: Any) -> Any:
        def launch_of(self: Coordinator, node: str) -> Any:
            world = real(self, node).world
            return protocol.Launch(msgspec.structs.replace(world, restart_count=world.restart_count + 1))

        return launch_of

    return _instead(Coordinator, "_launch_of", make)


def silence_not_noticed() -> Any:
    """Neither end counts missed beats."""

    def tick(self: Coordinator, now_s: float) -> Any:
        return [orders.Timer("tick", 0, self.settings.beat_s)]

    return mock.patch.object(Coordinator, "_tick", tick)


def incident_left_open() -> Any:
    return mock.patch.object(Coordinator, "_close_incident", lambda self, now_s, failed_again_at_s=None: [])


def spare_not_released() -> Any:
    """Only the nodes of the last world are told that the job is over."""

    def make(real: Any) -> Any:
        def finish(self: Coordinator, now_s: float, kind: Any, reason: str = "") -> Any:
            seats = dict(self.seats)
            over = protocol.Over
            return [
                action
                for action in real(self, now_s, kind, reason)
                if not (isinstance(action, orders.Send) and isinstance(action.message, over)) or action.node in seats
            ]

        return finish

    return _instead(Coordinator, "_finish", make)


def quarantine_ignored() -> Any:
    return mock.patch.object(Quarantine, "holds", lambda self, host: False)


def leaver_taken() -> Any:
    """A node that has said it leaves is taken for the next world."""
    available = property(lambda self: self.ready and self.fit and not self.busy)
    return mock.patch.object(membership.Member, "available", available)


def world_not_confirmed() -> Any:
    """Nobody waits for a lost world's leases."""
    return mock.patch.object(Coordinator, "confirmed", property(lambda self: True))


def never_gives_up() -> Any:
    """An agent without a coordinator waits for ever."""

    def make(real: Any) -> Any:
        def timer_fired(self: Node, now_s: float, timer: acts.TimerFired) -> Any:
            return [] if timer.name == "contact" else real(self, now_s, timer)

        return timer_fired

    return _instead(Node, "_timer_fired", make)


def launch_without_welcome() -> Any:
    """A node takes a launch that was meant for its last connection."""

    def make(real: Any) -> Any:
        def handle(self: Node, now_s: float, event: Any) -> Any:
            self.welcomed = True
            return real(self, now_s, event)

        return handle

    return _instead(Node, "handle", make)


def ranks_left_behind() -> Any:
    """An agent that gives up leaves its ranks running."""

    def finish_when_down(self: Node, now_s: float, finish: acts.Finish, why: str) -> Any:
        return self._finish(finish)

    return mock.patch.object(Node, "_finish_when_down", finish_when_down)


def cause_forgotten() -> Any:
    """A lost node is not noted as the cause."""

    def make(real: Any) -> Any:
        def lose(self: Coordinator, now_s: float, node: str, host: str, headline: str) -> Any:
            return real(self, now_s, node, host, "")

        return lose

    return _instead(Coordinator, "_lose", make)


def two_coordinators() -> Any:
    """A campaign is won although somebody else holds the term."""

    def make(real: Any) -> Any:
        def campaign(self: Etcd, node: str, lease: int, instead_of: Any) -> Any:
            if self.leader is not None and self.leader.node != node and self._lease != (node, lease):
                return msgspec.structs.replace(self.leader, node=node), self.record
            return real(self, node, lease, instead_of)

        return campaign

    return _instead(Etcd, "campaign", make)


def too_many_nodes() -> Any:
    return mock.patch.object(forming, "choose", lambda settings, available, previous: list(available))


def hang_ignored() -> Any:
    """A monitor's verdict leads to nothing."""
    return mock.patch.object(Node, "_hung", lambda self, now_s, event: [])


def dump_awaited() -> Any:
    """A hung world is not stopped before its stacks are written, however long that takes."""

    def make(real: Any) -> Any:
        def timer_fired(self: Node, now_s: float, timer: acts.TimerFired) -> Any:
            return [] if timer.name == "dump" else real(self, now_s, timer)

        return timer_fired

    return _instead(Node, "_timer_fired", make)


def sleep_blamed() -> Any:
    """Ranks are blamed for the time in which their machine slept."""
    return mock.patch.object(Watch, "late", lambda self, now_s, by_s: None)


def short_limit() -> Any:
    """The longest gap is the limit."""

    def make(real: Any) -> Any:
        def limit_s(self: Rules, *args: Any) -> float:
            return float(real(msgspec.structs.replace(self, safety_factor=1.0), *args))

        return limit_s

    return _instead(Rules, "limit_s", make)


def waiting_blamed() -> Any:
    """The ranks that wait in a collective are suspected, not those that they wait for."""

    def suspects(groups: Any) -> Any:
        return tuple(rank for group in groups if group.collective for rank in group.ranks)

    return mock.patch.object(causes, "suspects", suspects)


def exclusion_forgotten() -> Any:
    """A new coordinator does not know who is excluded."""
    return mock.patch.object(Quarantine, "restore", lambda self, held, now_s: None)


def excluded_until_its_next_agent() -> Any:
    """The same machine comes back under a new agent, and is taken."""

    def make(real: Any) -> Any:
        def hello(self: Coordinator, now_s: float, node: str, message: Any) -> Any:
            if node not in self.members and message.generation < 0:
                self.quarantine.lift(message.host)
            return real(self, now_s, node, message)

        return hello

    return _instead(Coordinator, "_hello", make)


def end_not_written() -> Any:
    """That a rank has asked to end the job is not taken up by a next coordinator."""

    def make(real: Any) -> Any:
        def begin(self: Coordinator, now_s: float) -> Any:
            if self.record is not None:
                self.record = msgspec.structs.replace(self.record, ending=None)
            return real(self, now_s)

        return begin

    return _instead(Coordinator, "begin", make)


def end_as_a_failure() -> Any:
    """A world that a rank has asked to end is restarted like any other."""

    def make(real: Any) -> Any:
        def settle(self: Coordinator, now_s: float) -> Any:
            self.ending = None
            return real(self, now_s)

        return settle

    return _instead(Coordinator, "_settle", make)


def progress_ignored() -> Any:
    """However often a world gets nowhere, another follows."""
    return mock.patch.object(History, "_stalled", lambda self, failure: 0)


def progress_not_seen() -> Any:
    """Every failure counts as one that got no further."""
    return mock.patch.object(History, "_stalled", lambda self, failure: self.stalled + 1)


def drained_though_killed() -> Any:
    """A node that was told to end says that its ranks ended in order, however they did."""

    def in_order(self: Node, finish: acts.Finish) -> acts.Finish:
        return acts.Finish(finish.kind, finish.reason, drained=finish.kind is causes.Kind.PREEMPTED)

    return mock.patch.object(Node, "_in_order", in_order)


def job_id_per_term() -> Any:
    """A coordinator that takes over takes the job for another one."""

    def make(real: Any) -> Any:
        def begin(self: Coordinator, now_s: float) -> Any:
            self.job_id = f"{self.node}.{self.term}"
            return real(self, now_s)

        return begin

    return _instead(Coordinator, "begin", make)


def quitter_excused() -> Any:
    """A rank that has quit by itself, and is gone after the stop, counts as one that was told to go."""
    return mock.patch.object(causes.RankExit, "failed_at_s", property(lambda self: self.at_s))


def late_leaver_kept() -> Any:
    """A rank that does not get out of its world is waited for, for ever."""
    return mock.patch.object(Node, "_kill_late", lambda self: [])


def stumble_forgotten() -> Any:
    """A collective that failed without a reason that anybody sees is none."""
    return mock.patch.object(Node, "_stumbled", lambda self, event: [])


def boundary_awaited_in_vain() -> Any:
    """A rank that is to end at a boundary, and whose world has failed it, is not told that there will be none."""
    return mock.patch.object(Node, "_misses_boundary", lambda self, rank, headline: [])


def left_before_it_leaves() -> Any:
    """A rank says that it has left its world, and is still in it."""

    def make(real: Any) -> Any:
        def leave(self: Group, rank: int) -> None:
            alive = dict(self.alive)
            real(self, rank)
            self.alive = alive

        return leave

    return _instead(Group, "_leave_world", make)


def killed_at_the_boundary() -> Any:
    """Ranks that stay, and come to no boundary within the grace, are killed like those that end."""

    def grace_is_over(self: Node) -> Any:
        return self._kill(self.live, "still there")

    return mock.patch.object(Node, "_grace_is_over", grace_is_over)


def kept_from_the_first_step_on() -> Any:
    """Ranks that wait for a new one, before the first step of their world, are ended when that dies."""

    def make(real: Any) -> Any:
        def stops(self: Node, signum: int, why: str, drain: bool = False) -> Any:
            self.stays &= self.stepped
            return real(self, signum, why, drain)

        return stops

    return _instead(Node, "_stops", make)


def planned_ends_are_tries() -> Any:
    """A world that ended as planned counts as one that came to no step."""

    def make(real: Any) -> Any:
        def stops(self: Node, signum: int, why: str, drain: bool = False) -> Any:
            self.tries += drain and self.stayed
            return real(self, signum, why, drain)

        return stops

    return _instead(Node, "_stops", make)


def memory_ignored() -> Any:
    """A world goes on from the last commit, whatever its ranks have done since."""
    return mock.patch.object(Training, "_restore", lambda self, world: self.committed[1])


def outdated_taken() -> Any:
    """Processes that have missed worlds are ranks again, with what they had."""

    def make(real: Any) -> Any:
        def run_pending(self: Node) -> Any:
            self.outdated = False
            return real(self)

        return run_pending

    return _instead(Node, "_run_pending", make)


def none() -> Any:
    """No bug at all."""
    return contextlib.nullcontext()


BUGS: dict[str, Bug] = {
    bug.__name__: bug
    for bug in (
        lease_ignored, lease_from_receipt, charged_twice, never_charged, charged_per_node, budget_ignored,
        generation_forgotten, sent_before_written, not_fenced, old_ranks_kept, not_all_down, wrong_rank_order,
        restart_counts_differ, silence_not_noticed, incident_left_open, spare_not_released, quarantine_ignored,
        leaver_taken, world_not_confirmed, never_gives_up, launch_without_welcome, ranks_left_behind, cause_forgotten,
        two_coordinators, too_many_nodes, zombie_answers, lease_from_welcome, hang_ignored, dump_awaited, sleep_blamed,
        short_limit, waiting_blamed, exclusion_forgotten, excluded_until_its_next_agent, end_not_written,
        end_as_a_failure, progress_ignored, progress_not_seen, drained_though_killed, job_id_per_term,
        quitter_excused, late_leaver_kept, stumble_forgotten, boundary_awaited_in_vain, left_before_it_leaves,
        killed_at_the_boundary, kept_from_the_first_step_on, planned_ends_are_tries, memory_ignored, outdated_taken,
    )
}  # fmt: skip


def find(bug: Bug, seeds: Iterator[int] | range) -> tuple[int, str, str] | None:
    """The first seed that finds the bug, the invariant that it breaks, and how."""
    from holdfast.simulate.simulation import run

    with bug():
        for seed in seeds:
            result = run(seed)
            if result.invariant:
                return seed, result.invariant, result.text
    return None
