"""One seed, from its first event to its last."""

from __future__ import annotations

import msgspec

from holdfast.control import acts
from holdfast.control.causes import Kind
from holdfast.control.hangs import LATE_S, UNSEEN_FLOORS, Mode
from holdfast.control.node import DUMP_S
from holdfast.control.staying import STUMBLE_S
from holdfast.simulate import observed as seen
from holdfast.simulate import scenario as scenarios
from holdfast.simulate.agent import Agent
from holdfast.simulate.faults import Faults
from holdfast.simulate.invariants import Checker, Violation
from holdfast.simulate.ledgers import Etcd, File
from holdfast.simulate.network import Network
from holdfast.simulate.processes import Host
from holdfast.simulate.ranks import Group, Training
from holdfast.simulate.timeline import Timeline


class Result(msgspec.Struct, frozen=True):
    seed: int
    digest: str
    virtual_s: float
    calls: int
    worlds: int
    faults: dict[str, int]
    outcome: str
    nodes: int
    invariant: str = ""  # the violated one
    text: str = ""
    notes: tuple[tuple[float, str, str], ...] = ()


class Simulation:
    def __init__(self, seed: int, nodes: int | None = None, keep_all: bool = False) -> None:
        self.seed = seed
        self.scenario = scenarios.draw(seed, nodes)
        settings = self.scenario.settings
        self.timeline = Timeline(seed, keep_all)
        self.network = Network(self.timeline)
        self.network.hostile = self.scenario.hostile
        self.checker = Checker(settings, self.scenario.program.stays)
        self.hosts = [Host(self.timeline, index, self.scenario.drift) for index in range(len(self.scenario.machines))]
        self.file = File(self.timeline)
        self.etcd = Etcd(self.timeline, self.network) if settings.elected else None
        self.listening: Agent | None = None  # the agent that has the endpoint
        self.agents: list[Agent] = []  # those that are there
        self.agents_by_id: dict[str, Agent] = {}
        self.ends: list[tuple[str, Kind | None, str]] = []
        self.training = Training(self)
        self.faults = Faults(self)
        self.calm = False
        self.to_come = 0  # agents that start later

    def endpoint(self) -> Agent | None:
        return self.listening if self.listening is not None and self.listening.alive else None

    def start_agent(self, host: Host) -> None:
        host.down = False
        agent = Agent(self, host)
        self.agents.append(agent)
        self.agents_by_id[agent.node_id] = agent
        agent.start()

    def start_agent_later(self, delay_s: float, host: Host) -> None:
        self.to_come += 1
        self.timeline.after(delay_s, self._come, host)

    def _come(self, host: Host) -> None:
        self.to_come -= 1
        if host.frozen and not host.down:
            self.start_agent_later(0.5, host)
            return
        if self.scenario.settings.alone and host.agent is not None:
            return  # without a ledger that is another job
        if self.checker.ended is None and (host.agent is None or not host.agent.alive or host.agent.frozen):
            self.start_agent(host)

    def finished(self, agent: Agent, finish: acts.Finish) -> None:
        now_s = self.timeline.now_s
        self.ends.append((agent.node_id, finish.kind, finish.reason))
        self.checker.saw(now_s, seen.Finished(agent.node_id, finish.kind, finish.reason, agent.live_ranks()))
        ends = agent.group.ends if agent.group is not None else {}
        if finish.drained and (not ends or any(ends.values()) or agent.machine.stop_signal is None):
            raise Violation("drains", f"{agent.node_id} says that all ranks ended in order, but they did {ends}")
        if finish.kind is None and not self.training.complete and not self.checker.is_spare(agent.node_id):
            raise Violation("the end", f"{agent.node_id} finished with success, but the training has not")

    def hung(self, group: Group, rank: int) -> None:
        self.timeline.note("fault", f"rank {rank} of generation {group.world.generation} hangs")
        self.checker.saw(self.timeline.now_s, seen.Hung(group.world.generation, rank))
        if self.scenario.hang_rules.mode is Mode.RESTART:
            self._watch_over(group, rank, self.timeline.now_s)

    def _watch_over(self, group: Group, rank: int, since_s: float) -> None:
        """A rank that hangs must be gone in time, as long as its agent lives, runs, and has a coordinator."""
        agent, now_s, rules = group.agent, self.timeline.now_s, self.scenario.hang_rules
        if rank not in group.alive or rank in group.stuck or not agent.alive or agent.finished is not None:
            return
        if agent.frozen or agent.host.frozen or not agent.machine.contact:
            since_s = now_s
        since_s = max(since_s, agent.host.disturbed_s, agent.contact_s)
        limit_s = rules.first_s or 0.0
        if group.started:
            limit_s = rules.limit_s(group.phase, agent.watch.gaps_s, agent.watch.learned, True)
        found_s = min(since_s + limit_s * 1.01 + LATE_S, max(since_s, group.found_s))
        due_s = found_s + DUMP_S + self.scenario.grace_s + 1.0
        if due_s < now_s:
            text = f"rank {rank} of generation {group.world.generation} hangs on {agent.node_id} since {since_s:.1f} s"
            raise Violation("hangs", f"{text}, and its limit was {limit_s:.1f} s")
        self.timeline.at(min(due_s, now_s + DUMP_S) + 0.001, self._watch_over, group, rank, since_s)

    def waits(self, group: Group, rank: int) -> None:
        """Its world has failed it, and it says so. Where it is to end at a boundary, none comes any more."""
        self.timeline.after(STUMBLE_S, self._is_told, group, rank)

    def _is_told(self, group: Group, rank: int) -> None:
        agent = group.agent
        if not agent.alive or agent.finished is not None or rank not in group.alive or rank in group.stuck:
            return
        if agent.frozen or agent.host.frozen or self.timeline.now_s - agent.host.disturbed_s < STUMBLE_S:
            self.waits(group, rank)
        elif rank in group.asked - group.leaves and rank not in group.signalled:
            text = f"rank {rank} of generation {group.world.generation} on {agent.node_id}"
            raise Violation("stumbles", f"{text} waits for a boundary that cannot come")

    def left(self, agent: Agent) -> None:
        self.agents.remove(agent)

    def _over(self) -> bool:
        return not self.agents and not self.to_come and (self.calm or self.checker.ended is not None)

    def run(self) -> Result:
        scenario, timeline = self.scenario, self.timeline
        invariant = text = ""
        try:
            for host, machine in zip(self.hosts, scenario.machines, strict=True):
                self.start_agent_later(machine.comes_at_s, host)
            self.faults.schedule()
            timeline.at(scenario.calm_at_s, self.faults.mend_everything)
            timeline.run(self._deadline_s(), self._over)
            if not self._over():
                who = ", ".join(agent.node_id for agent in self.agents[:8])
                raise Violation("liveness", f"{who} still there {self._deadline_s() - scenario.calm_at_s:.0f} s on")
            self.checker.at_end()
        except Violation as violation:
            invariant, text = violation.invariant, violation.text
        notes = tuple((at_s, who, render(what)) for at_s, who, what in timeline.notes) if invariant else ()
        return Result(
            seed=self.seed,
            digest=timeline.digest,
            virtual_s=timeline.now_s,
            calls=timeline.calls,
            worlds=len(self.checker.worlds),
            faults=self.faults.counts,
            outcome=self._outcome(),
            nodes=len(self.hosts),
            invariant=invariant,
            text=text,
            notes=notes,
        )

    def _deadline_s(self) -> float:
        """When a job that nothing disturbs any more must be over: it may need to wait for each of its timeouts in turn,
        back off, and do all of its steps again."""
        scenario, settings = self.scenario, self.scenario.settings
        program = scenario.program
        waits_s = 4 * settings.join_timeout_s + 10 * settings.node_timeout_s + scenario.close_timeout_s
        worlds_s = 10 * (program.start_s + scenario.grace_s + program.backend_timeout_s)
        hangs_s = 4 * UNSEEN_FLOORS * scenario.hang_rules.floor_s if scenario.hang_rules.mode is Mode.RESTART else 0.0
        return scenario.calm_at_s + waits_s + worlds_s + hangs_s + 2 * program.steps * program.step_s + 120.0

    def _outcome(self) -> str:
        ended = self.checker.ended
        if ended is not None:
            return "success" if ended.kind is None else ended.kind.value
        kinds = {kind for _, kind, _ in self.ends}
        return "success" if None in kinds else "no word of a coordinator"


def run(seed: int, nodes: int | None = None) -> Result:
    return Simulation(seed, nodes).run()


def render(what: object) -> str:
    if isinstance(what, tuple):
        return " ".join(render(part) for part in what)
    if isinstance(what, str):
        return what
    if isinstance(what, msgspec.Struct):
        parts = []
        for name in what.__struct_fields__:
            value = getattr(what, name)
            if value not in ("", None, (), False) and name not in ("run_id", "version", "traceback", "stderr_tail"):
                parts.append(f"{name}={value:.3f}" if isinstance(value, float) else f"{name}={render(value)}")
        return f"{type(what).__name__}({', '.join(parts)})"
    return str(what)
