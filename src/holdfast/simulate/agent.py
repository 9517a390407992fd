"""A simulated agent: the real `Node`, in a shell that finds its coordinator, or becomes it, and has simulated ranks."""

from __future__ import annotations

import math
from collections import deque
from operator import lt
from typing import TYPE_CHECKING, Any, cast

import msgspec

from holdfast.control import acts, protocol
from holdfast.control import node as machine
from holdfast.control.causes import RankExit
from holdfast.control.hangs import LATE_S, Hang, Mode, Watch
from holdfast.control.staying import LEAST_S, LEAVE_S, TRIES
from holdfast.control.worlds import World
from holdfast.simulate import observed as seen
from holdfast.simulate.invariants import NEARLY_S
from holdfast.simulate.ledgers import Leader
from holdfast.simulate.network import Wire
from holdfast.simulate.processes import Host, Process
from holdfast.simulate.ranks import Group, Held
from holdfast.simulate.server import QUIET, Server
from holdfast.wire.messages import Raised

if TYPE_CHECKING:
    from holdfast.control.membership import Record
    from holdfast.simulate.simulation import Simulation

FIRST_PAUSE_S = 0.02
LAST_PAUSE_S = 1.0
CONNECT_S = 3.0
TOGETHER_S = 0.01  # deadlines that are so close are looked at together

NOTED = (acts.Exited, acts.HelpersLost, acts.StopRequested, acts.KeeperLost, acts.Hung, acts.Dumped, acts.Asked)


class Agent(Process):
    def __init__(self, sim: Simulation, host: Host) -> None:
        super().__init__(host)
        host.agents += 1
        host.agent = self
        self.sim = sim
        self.settings = sim.scenario.settings
        self.node_id = f"{host.name}.{host.agents}"
        self.may_write = True
        self.stops_after_beat = False  # so that the answer lies in its buffer for as long as it is stopped
        self.finished: acts.Finish | None = None
        self.server: Server | None = None
        self.group: Group | None = None
        self.groups: list[Group] = []
        self.contact_s = 0.0  # when it last found a coordinator, or heard of a shorter limit, in real time
        self.hangs_next = ""  # what a rank of its next world will not get through
        self.fails_next = False  # a rank that is new in its next world fails at its start
        self.stayers: dict[int, Held | None] = {}  # processes that have left their world, by local rank
        self.will: Held | None = None
        self._idle = 0  # worlds in a row that had some of those, and came to no step
        self.watch = Watch(sim.scenario.hang_rules)
        self._wake_s = math.inf  # when it looks at its ranks next
        alone = self.settings.alone
        self.lease_until_s = math.inf if alone else -math.inf
        self.wire: Wire | None = None
        self._calling: Wire | None = None
        self._pause_s = FIRST_PAUSE_S
        self._events: deque[acts.Event] = deque()
        self._feeding = False
        self._helpers = 0
        self._campaigns = 0
        self._looks = 0  # one at a time
        self._leader: Leader | None = None  # whom etcd named last
        self._store_port = 20000 + 100 * host.index + host.agents
        scenario, kind = sim.scenario, sim.scenario.machines[host.index]
        hello = protocol.Hello(
            version=protocol.VERSION,
            node=self.node_id,
            host=host.name,
            addr=f"10.0.0.{host.index}",
            local_size=kind.local_size,
            store_port=self._store_port,
            role=kind.role,
            order=kind.order,
        )
        self.machine = machine.Node(
            hello,
            scenario.grace_s,
            math.inf if alone else self.settings.join_timeout_s,
            scenario.close_timeout_s,
            self.settings.beat_s,
            scenario.hang_rules.mode,
            scenario.hang_signal,
        )

    def start(self) -> None:
        self.timeline.note(self.node_id, "starts")
        self._execute(self.machine.begin())
        self._look_for_coordinator(0)

    # -- finding the coordinator --------------------------------------------------------------------------------------

    def _look_for_coordinator(self, look: int) -> None:
        if look != self._looks or self.finished is not None or self.server is not None or self.wire is not None:
            return
        sim = self.sim
        if sim.etcd is not None:
            etcd = sim.etcd
            etcd.call(self, etcd.look, lambda leader: self._etcd_says(look, leader))
            return
        if self.host.index == 0 and sim.endpoint() is None:
            record, renewed = sim.file.find(self.settings)
            if renewed:
                assert record is not None
                sim.checker.saw(self.timeline.now_s, seen.Renewed(record.history.spent))
            sim.listening = self
            self._coordinate(0 if record is None else record.term + 1, record)
            return
        self._call(sim.hosts[0], lambda: holder.server if (holder := sim.endpoint()) is not None else None)

    def _etcd_says(self, look: int, leader: object) -> None:
        if look != self._looks or self.finished is not None:
            return
        if not isinstance(leader, Leader):
            self._campaign(None)
            return
        there = self.sim.agents_by_id[leader.node]

        def find() -> Server | None:
            return there.server if there.alive and there.server is not None else None

        self._leader = leader
        self._call(there.host, find)

    def _campaign(self, instead_of: Leader | None) -> None:
        etcd = self.sim.etcd
        assert etcd is not None
        self._campaigns += 1
        lease = self._campaigns
        etcd.call(self, lambda: etcd.campaign(self.node_id, lease, instead_of), self._campaigned)

    def _campaigned(self, won: object) -> None:
        if self.finished is not None or self.server is not None:
            return
        if won is None:
            self._look_again()
            return
        leader, record = cast("tuple[Leader, Record | None]", won)
        self._coordinate(leader.term, record)

    def _coordinate(self, term: int, record: Any) -> None:
        self.server = Server(self, term, record, self.sim.etcd if self.sim.etcd is not None else self.sim.file)
        self.server.begin()
        self.feed(acts.Contact())

    def deposed(self) -> None:
        self.server = None
        self.feed(acts.ContactLost())
        self._look_again()

    def _call(self, there: Host, find: Any) -> None:
        self._calling = wire = self.sim.network.connect(self, self.host, there, find)
        self.after(CONNECT_S, self._called_in_vain, wire)

    def _called_in_vain(self, wire: Wire) -> None:
        if self._calling is wire:
            self._calling = None
            wire.close()
            self._look_again()

    def _look_again(self) -> None:
        random = self.timeline.random
        self._looks += 1
        self.after(self._pause_s * random.uniform(0.5, 1.0), self._look_for_coordinator, self._looks)
        self._pause_s = min(self._pause_s * 2, LAST_PAUSE_S)

    def opened(self, wire: Wire) -> None:
        if wire is not self._calling:
            wire.close()
            return
        self._calling, self.wire = None, wire
        self._pause_s = FIRST_PAUSE_S
        self.feed(acts.Contact())

    def received(self, wire: Wire, message: object) -> None:
        if wire is self.wire:
            if not isinstance(message, QUIET):
                self.timeline.note(self.node_id, ("hears", message))
            self.feed(message)

    def closed(self, wire: Wire) -> None:
        if wire is self._calling:
            self._calling = None
            if wire.refused and self.sim.etcd is not None:
                self._campaign(self._leader)
            else:
                self._look_again()
        elif wire is self.wire:
            self.wire = None
            self.timeline.note(self.node_id, "lost its connection")
            self.feed(acts.ContactLost())
            self._look_again()

    def lose_local_contact(self) -> None:
        """The coordinator in this process and this node have lost sight of each other, as in a pause of the ledger."""
        if self.server is not None:
            self.feed(acts.ContactLost())
            self.after(FIRST_PAUSE_S, self._local_contact)

    def _local_contact(self) -> None:
        if self.server is not None and not self.server.closed_down:
            self.feed(acts.Contact())

    # -- the machine --------------------------------------------------------------------------------------------------

    def feed(self, event: Any) -> None:
        self._events.append(event)
        if self._feeding:
            return
        self._feeding = True
        while self._events and self.alive:
            event = self._events.popleft()
            if isinstance(event, acts.Contact):
                self.contact_s = self.timeline.now_s
            if isinstance(event, NOTED):
                self.timeline.note(self.node_id, event)
            self._execute(self.machine.handle(self.host.clock_s(), event))
        self._feeding = False

    def _execute(self, actions: list[acts.Action]) -> None:
        for action in actions:
            if not self.alive or self.finished is not None:
                return
            self._do(action)

    def _do(self, action: acts.Action) -> None:
        match action:
            case acts.Tell(message=message):
                self._tell(message)
            case acts.Timer(name=name, key=key, after_s=after_s):
                self.after(after_s, self.feed, acts.TimerFired(name, key))
            case acts.Lease(until_s=until_s):
                self.lease_until_s = until_s
            case acts.Run(world=world, outdated=outdated):
                self.timeline.note(self.node_id, action)
                self.sim.checker.saw(self.timeline.now_s, seen.Ran(self.node_id, world, self.live_ranks()))
                self.group = self._take_along(world, outdated)
                self.group.hangs_at, self.hangs_next = self.hangs_next, ""
                self._wake_s = math.inf
                self.watch.begin(self.host.clock_s())
                self.look(self.group)
                self.groups = [group for group in self.groups if group.alive] + [self.group]
                self.sim.training.join(self.group)
            case acts.Signal(ranks=ranks, signum=signum, drain=drain):
                self.timeline.note(self.node_id, action)
                if self.group is not None:
                    self._justify(self.group, ranks)
                    self.group.signal(ranks, signum, drain)
            case acts.Leave(ranks=ranks, boundary=boundary):
                self.timeline.note(self.node_id, action)
                if self.group is not None:
                    self.group.leave_world(ranks, boundary)
            case acts.PrepareHelpers():
                self._helpers += 1
                delay_s = self.timeline.random.uniform(0.3, 2.5)
                self.after(delay_s, self._helpers_ready, self._helpers)
            case acts.DumpStacks():
                self._dump_stacks(action)
            case acts.Agree(heard=heard):
                before_s = self.watch.limits_s()
                self.watch.agree(heard.gaps_s, heard.trained)
                sooner = any(map(lt, self.watch.limits_s(), before_s))
                if sooner and self.group is not None:
                    # A limit that others have learned counts from when it is known here; nobody may be late by it.
                    self.watch.late(self.host.clock_s(), math.inf)
                    self.contact_s = self.timeline.now_s
                    self.look(self.group, self._wake_s)
            case acts.HangUp(why=why):
                self.timeline.note(self.node_id, f"hangs up: {why}")
                if self.wire is not None:
                    wire, self.wire = self.wire, None
                    wire.close()
                    self.feed(acts.ContactLost())
                    self._look_again()
                else:
                    self.lose_local_contact()
            case acts.Finish():
                self._finish(action)

    # -- ranks that stay ----------------------------------------------------------------------------------------------

    def _take_along(self, world: World, outdated: bool) -> Group:
        """Processes of the last world, and what was left to this one."""
        if (last := self.group) is not None and (not last.held or last.steps):
            self._idle = 0
        elif last is not None and not last.planned:
            self._idle += 1
        if outdated:
            self.stayers, self.will = {}, None
        held = {world.first_rank + local: has for local, has in self.stayers.items() if local < world.local_size}
        group = Group(self, world, held, self.will)
        self.stayers, self.will = {}, None
        group.fails_at_start, self.fails_next = self.fails_next, False
        return group

    def _justify(self, group: Group, ranks: tuple[int, ...]) -> None:
        """Tell the checker whom of those that could stay we end, and why."""
        now_s, machine = self.host.clock_s(), self.machine
        idle = bool(group.held) and not group.steps
        for rank in ranks:
            ends, why = rank in group.ending, ""
            group.ending.add(rank)
            if ends or rank not in group.alive or rank not in group.heard:
                continue
            if machine.over is not None or machine.stop_signal is not None:
                why = "its node ends"
            elif rank in group.willed:
                why = "its state is left"
            elif now_s - group.leave_s.get(rank, math.inf) > LEAVE_S - NEARLY_S:
                why = "late"
            elif idle and self._idle + (not group.planned) >= TRIES:
                why = "tries"
            elif idle and now_s - group.started_s > LEAST_S - NEARLY_S:
                why = "no step"
            self.sim.checker.saw(self.timeline.now_s, seen.Discarded(self.node_id, group.world.generation, rank, why))

    def _tell(self, message: Any) -> None:
        fields = message.__struct_fields__
        if "store_port" in fields:
            message = msgspec.structs.replace(message, store_port=self._store_port)
        elif isinstance(message, protocol.Beat):
            same = self.group is not None and self.group.world.generation == message.generation
            steps = self.group.steps if self.group is not None and same else message.steps
            message = msgspec.structs.replace(
                message, steps=steps, gaps_s=self.watch.gaps_s, trained=self.watch.learned
            )
        if self.server is not None:
            self.server.receive(self.node_id, message)
        elif self.wire is not None:
            self.wire.send(message)
            if self.stops_after_beat and isinstance(message, protocol.Beat):
                self.frozen, self.stops_after_beat = True, False

    def _helpers_ready(self, number: int) -> None:
        if number == self._helpers:
            self.feed(acts.HelpersReady())

    # -- hangs --------------------------------------------------------------------------------------------------------

    def look(self, group: Group, due_s: float | None = None) -> None:
        """A deadline has come, or a rank has poked."""
        if group is not self.group or not group.alive or (due_s is not None and due_s != self._wake_s):
            return
        if self.watch.rules.mode is Mode.OFF:
            return
        now_s = self.host.clock_s()
        # A rank that has poked was alive then. If that is long ago, it is this agent that has slept.
        self.watch.late(now_s, now_s - (group.sign_s if due_s is None else self._wake_s))
        rank = next((rank for rank in group.alive if rank in group.hung), next(iter(group.alive)))
        verdict = self.watch.look(now_s, rank, group.vitals())
        self._wake_s = verdict if isinstance(verdict, float) else now_s + verdict.limit_s
        if self._wake_s < math.inf:
            self.after(self._wake_s - now_s + TOGETHER_S, self.look, group, self._wake_s)
        if isinstance(verdict, Hang):
            self._report(group, verdict, now_s)
            self.feed(acts.Hung(group.world.generation, verdict, verdict.headline(now_s)))

    def _report(self, group: Group, hang: Hang, now_s: float) -> None:
        """Tell the checker what the ranks really did."""
        if self.machine.contact:
            group.found_s = min(group.found_s, self.timeline.now_s)
        rules = self.watch.rules
        least_s = max(rules.floor_s, rules.safety_factor * group.gaps_s[hang.phase]) if hang.phase in range(4) else 0.0
        if hang.phase == 0 and rules.first_s is not None:
            least_s = rules.first_s
        awake_s = math.inf
        told, group.told_s = group.told_s == hang.since_s, hang.since_s  # again, as nobody could act on it
        if self.host.resumed_s > hang.since_s + hang.limit_s + LATE_S + 0.2 and not told:
            awake_s = now_s - group.sign_s - (self.host.slept_s - group.slept_s)
        self.sim.checker.saw(
            self.timeline.now_s,
            seen.FoundHung(
                self.node_id, group.world.generation, hang.rank, now_s - group.sign_s, awake_s, hang.limit_s, least_s
            ),
        )

    def _dump_stacks(self, wanted: acts.DumpStacks) -> None:
        """Most dumps take a moment, some longer than anybody waits, and some never end."""
        random = self.timeline.random
        if random.random() < 0.05:
            return
        delay_s = random.uniform(0.005, 0.3) if random.random() < 0.85 else random.uniform(0.3, 8.0)
        group = self.group
        places = group.places() if group is not None and group.world.generation == wanted.generation else ()
        self.after(delay_s, self.feed, acts.Dumped(wanted.generation, places, wanted.show))

    # -- what happens to it -------------------------------------------------------------------------------------------

    def rank_started(self, group: Group) -> None:
        self.feed(acts.Started(group.world.generation))

    def rank_stepped(self, group: Group, rank: int, at_s: float) -> None:
        self.feed(acts.Stepped(rank, group.world.generation, at_s))

    def rank_stays(self, group: Group, rank: int) -> None:
        group.heard.add(rank)
        self.feed(acts.Stays(group.world.generation, rank))

    def rank_stumbled(self, group: Group, rank: int, text: str) -> None:
        self.feed(acts.Stumbled(group.world.generation, rank, self.host.clock_s(), text))

    def rank_left(self, group: Group, rank: int) -> None:
        base = max(0, group.ensemble.base) if group.ensemble is not None else 0
        self.feed(acts.Left(group.world.generation, rank, group.steps, base))

    def rank_bequeathed(self, group: Group, rank: int) -> None:
        if group is self.group and rank in group.alive and (has := group.has(rank)) is not None:
            self.will = has
            group.willed.add(rank)
            self.feed(acts.Bequeathed(group.world.generation, rank))

    def rank_gone(self, group: Group, rank: int) -> None:
        self.feed(acts.Gone(group.world.generation, rank))

    def rank_exited(
        self, group: Group, rank: int, status: int, at_s: float, raised: Raised | None, oom: bool, gone: bool
    ) -> None:
        base = max(0, group.ensemble.base) if group.ensemble is not None else 0
        asked = rank in group.asked
        left = group.left.get(rank) if status != 0 else None
        exit = RankExit(
            rank, 1000 + rank, status, at_s, group.steps, raised, left, oom_killed=oom, base=base, drained=asked
        )
        self.feed(acts.Exited(group.world.generation, exit, gone))

    def lose_helpers(self) -> None:
        """The zygote is killed, and its ranks die with it."""
        self._helpers += 1
        steps = self.group.steps if self.group is not None and self.group.alive else None
        if self.group is not None:
            self.group.kill_all(silent=True)
        self.stayers, self.will = {}, None
        self.feed(acts.HelpersLost("the zygote was killed", steps))

    def live_ranks(self) -> int:
        """Those that could be ended."""
        return sum(group.endable for group in self.groups)

    def _finish(self, finish: acts.Finish) -> None:
        self.finished = finish
        self.timeline.note(self.node_id, finish)
        self.sim.finished(self, finish)
        if self.server is not None:
            self.server.close(self._leave)
        else:
            self._leave()

    def _leave(self) -> None:
        self.kill(quietly=False)

    def kill(self, quietly: bool) -> None:
        """The process ends. Its kernel closes its connections, unless the machine is gone too."""
        if not self.alive:
            return
        self.die()
        server, self.server = self.server, None
        wires = [self.wire, self._calling]
        if server is not None:
            server.closed_down = True
            wires += list(server.nodes.values())
        for wire in wires:
            if wire is not None:
                if quietly:
                    wire.vanish()
                else:
                    wire.close()
        self.wire = self._calling = None
        for group in self.groups:
            delay_s = 0.0 if quietly else self.timeline.random.uniform(0.01, 0.5)
            self.timeline.after(delay_s, group.kill_all, True)
        self.sim.left(self)
