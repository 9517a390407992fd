"""Everything that goes wrong, drawn from the seed: when, to whom, and when it is mended."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import TYPE_CHECKING

from holdfast.control import acts
from holdfast.control.hangs import Mode
from holdfast.control.membership import Policy
from holdfast.simulate import observed as seen
from holdfast.simulate.network import ETCD
from holdfast.simulate.processes import Host

if TYPE_CHECKING:
    from holdfast.simulate.agent import Agent
    from holdfast.simulate.simulation import Simulation


class Faults:
    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self.timeline = sim.timeline
        self.random = sim.timeline.random
        self.counts: dict[str, int] = {}
        self.kinds: dict[str, tuple[float, Callable[[], bool]]] = {
            "rank failure": (4.0, self._rank_failure),
            "agent crash": (3.0, self._agent_crash),
            "machine crash": (1.5, self._machine_crash),
            "agent freeze": (2.0, self._agent_freeze),
            "machine freeze": (1.5, self._machine_freeze),
            "zombie": (0.7, self._zombie),
            "cut": (2.0, self._cut),
            "one-way cut": (1.5, self._one_way_cut),
            "partition": (1.5, self._partition),
            "isolated world": (1.0, self._isolated_world),
            "flap": (0.7, self._flap),
            "noise": (1.5, self._noise),
            "delay spike": (1.0, self._delay_spike),
            "clock jump": (0.7, self._clock_jump),
            "terminate": (1.0, self._terminate),
            "terminate all": (0.15, self._terminate_all),
            "helper loss": (1.0, self._helper_loss),
            "keeper loss": (0.7, self._keeper_loss),
            "lift": (0.5, self._lift),
            "hang": (3.0, self._hang),
            "request": (0.6, self._request),
            "timeouts": (0.3, self._timeouts),
            "peek": (0.3, self._peek),
            "join storm": (0.5, self._join_storm),
        }
        if sim.scenario.program.stays:
            self.kinds |= {"failed start": (2.0, self._failed_start)}
        if sim.etcd is not None:
            self.kinds |= {
                "etcd leader change": (1.5, self._etcd_leader_change),
                "etcd lease lost": (1.0, self._etcd_lease_lost),
                "etcd cut off": (1.0, self._etcd_cut_off),
            }

    def schedule(self) -> None:
        names = list(self.kinds)
        weights = [weight for weight, _ in self.kinds.values()]
        # Faults that fall together find more than the same ones far apart.
        moments = [self.random.uniform(0.5, self.sim.scenario.calm_at_s) for _ in range(3)]
        for _ in range(self.sim.scenario.faults):
            at_s = self.random.uniform(0.1, self.sim.scenario.calm_at_s)
            if self.random.random() < 0.5:
                at_s = self.random.choice(moments) + self.random.uniform(0.0, 3.0)
            [name] = self.random.choices(names, weights)
            self.timeline.at(at_s, self._inject, name)
        if self.sim.scenario.isolated:
            self.timeline.at(self.random.uniform(5.0, 25.0), self._inject, "isolated world")

    def _inject(self, name: str) -> None:
        if self.sim.calm:
            return
        mark = len(self.timeline.notes)
        if self.kinds[name][1]():
            self.counts[name] = self.counts.get(name, 0) + 1
            if len(self.timeline.notes) == mark:
                self.timeline.note("fault", name)

    def mend_everything(self) -> None:
        """From here on nothing goes wrong any more, and enough nodes are there."""
        sim = self.sim
        sim.calm = True
        self.timeline.note("fault", "none from here on: everything is mended")
        sim.network.heal_all()
        if sim.etcd is not None:
            sim.etcd.away = 0
        for host in sim.hosts:
            self._thaw(host)
        if sim.checker.ended is None:
            needed = sim.scenario.settings.min_nodes
            for host in sim.hosts[: max(needed, self.random.randint(needed, len(sim.hosts)))]:
                if host.agent is None or not host.agent.alive:
                    sim.start_agent_later(self.random.uniform(0.0, 2.0), host)

    # -- whom ---------------------------------------------------------------------------------------------------------

    def _some_agent(self) -> Agent | None:
        agents = [agent for agent in self.sim.agents if agent.finished is None]
        coordinators = [agent for agent in agents if agent.server is not None]
        if coordinators and self.random.random() < 0.25:
            return self.random.choice(coordinators)
        return self.random.choice(agents) if agents else None

    def _duration_s(self) -> float:
        """Short against the timeouts, about as long, or longer."""
        settings = self.sim.scenario.settings
        scale_s = self.random.choice((0.5, settings.node_timeout_s, settings.node_timeout_s, settings.join_timeout_s))
        return scale_s * self.random.uniform(0.3, 1.7)

    def _note(self, text: str) -> None:
        self.timeline.note("fault", text)

    # -- processes and machines ---------------------------------------------------------------------------------------

    def _rank_failure(self) -> bool:
        agents = [agent for agent in self.sim.agents if agent.group is not None and agent.group.endable]
        if not agents:
            return False
        group = self.random.choice(agents).group
        assert group is not None
        rank = self.random.choice(list(group.alive))
        kind = self.random.choice(("exception", "signal", "oom", "cuda oom", "exit", "backend"))
        self._note(f"rank {rank} of generation {group.world.generation} fails: {kind}")
        match kind:
            case "exception":
                group.raise_in(rank, f"ValueError: {self.random.randint(0, 3)}")
            case "signal":
                group.end(rank, -self.random.choice((signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGTERM)))
            case "oom":
                group.end(rank, -signal.SIGKILL, None, True)
            case "cuda oom":
                group.raise_in(rank, "OutOfMemoryError", out_of_memory=True)
            case "exit":
                group.leave(rank, 3)
            case "backend":
                group.raise_in(rank, "NCCL error", distributed=True)
        return True

    def _failed_start(self) -> bool:
        """A rank dies, and the one that takes its place does before its first step, while the others wait for it."""
        agents = [agent for agent in self.sim.agents if agent.group is not None and agent.group.endable]
        if not agents:
            return False
        agent = self.random.choice(agents)
        assert agent.group is not None
        agent.fails_next = True
        self._note(f"a new rank of {agent.node_id} will fail at its start")
        agent.group.end(self.random.choice(list(agent.group.alive)), -signal.SIGKILL)
        return True

    def _come_back(self, host: Host) -> None:
        if self.random.random() < 0.75:
            self.sim.start_agent_later(self._duration_s() * 0.5, host)

    def _agent_crash(self) -> bool:
        agent = self._some_agent()
        if agent is None:
            return False
        self._note(f"{agent.node_id} is killed")
        agent.kill(quietly=False)
        self._come_back(agent.host)
        return True

    def _machine_crash(self) -> bool:
        agent = self._some_agent()
        if agent is None:
            return False
        self._note(f"the machine of {agent.node_id} loses power")
        agent.host.down, agent.host.frozen = True, False
        for other in [other for other in self.sim.agents if other.host is agent.host]:
            other.kill(quietly=True)
        self._come_back(agent.host)
        return True

    def _agent_freeze(self) -> bool:
        agent = self._some_agent()
        if agent is None or agent.frozen:
            return False
        duration_s = self._duration_s()
        self._note(f"{agent.node_id} is stopped for {duration_s:.1f} s")
        self._stop(agent)
        self.timeline.after(duration_s, self._thaw, agent.host)
        return True

    def _stop(self, agent: Agent) -> None:
        """At once, or right after its next beat."""
        if agent.wire is not None and self.random.random() < 0.4:
            agent.stops_after_beat = True
        else:
            agent.frozen = True

    def _machine_freeze(self) -> bool:
        agent = self._some_agent()
        if agent is None or agent.host.frozen:
            return False
        duration_s = self._duration_s()
        self._note(f"the machine of {agent.node_id} freezes for {duration_s:.1f} s")
        agent.host.freeze()
        self.timeline.after(duration_s, self._thaw, agent.host)
        return True

    def _thaw(self, host: Host) -> None:
        thawed = [agent for agent in self.sim.agents if agent.host is host and (agent.frozen or host.frozen)]
        if thawed:
            host.disturbed_s = self.timeline.now_s
        if host.frozen:
            host.thaw()
        for agent in self.sim.agents:
            if agent.host is host:
                agent.stops_after_beat = False
        for agent in thawed:
            agent.frozen = False
            self._note(f"{agent.node_id} goes on")
            agent.resume()

    def _zombie(self) -> bool:
        """An agent is stopped, another is started beside it, and then the first one goes on."""
        agent = self._some_agent()
        if agent is None or agent.host.index == 0 or agent.frozen:
            return False
        self._note(f"{agent.node_id} is stopped, and another started there")
        agent.frozen = True
        self.sim.start_agent_later(self.random.uniform(0.1, 3.0), agent.host)
        self.timeline.after(self._duration_s() + 1.0, self._thaw, agent.host)
        return True

    def _flap(self) -> bool:
        agent = self._some_agent()
        if agent is None or agent.host.index == 0:
            return False
        self._note(f"{agent.host.name} comes and goes")
        at_s = 0.0
        for _ in range(self.random.randint(3, 8)):
            self.timeline.after(at_s, self._kill_at, agent.host)
            self.sim.start_agent_later(at_s + 0.2, agent.host)
            at_s += self.random.uniform(2.0, 6.0)
        return True

    def _kill_at(self, host: Host) -> None:
        if not self.sim.calm and host.agent is not None:
            host.agent.kill(quietly=False)

    def _join_storm(self) -> bool:
        self._note("all hosts without an agent get one")
        for host in self.sim.hosts:
            if host.agent is None or not host.agent.alive:
                self.sim.start_agent_later(self.random.uniform(0.0, 0.1), host)
        return True

    def _clock_jump(self) -> bool:
        """Forward, as a clock does that is set right after its machine slept. Not under a coordinator: how long leases
        must be waited for is measured by its clock alone, which no lease survives being wrong about."""
        agent = self._some_agent()
        if agent is None or agent.server is not None:
            return False
        by_s = self._duration_s()
        self._note(f"the clock of {agent.host.name} jumps by {by_s:.1f} s")
        agent.host.jump(by_s)
        return True

    def _terminate(self) -> bool:
        agent = self._some_agent()
        if agent is None:
            return False
        agent.post(agent.feed, acts.StopRequested(self.random.choice((signal.SIGTERM, signal.SIGTERM, signal.SIGINT))))
        if self.random.random() < 0.2:
            self.timeline.after(0.5, agent.post, agent.feed, acts.StopRequested(signal.SIGTERM))
        self._come_back(agent.host)
        return True

    def _terminate_all(self) -> bool:
        for agent in list(self.sim.agents):
            delay_s = self.random.uniform(0.0, 0.2)
            self.timeline.after(delay_s, agent.post, agent.feed, acts.StopRequested(signal.SIGTERM))
        return True

    def _helper_loss(self) -> bool:
        agent = self._some_agent()
        if agent is None:
            return False
        self._note(f"the zygote of {agent.node_id} is killed")
        agent.post(agent.lose_helpers)
        return True

    def _keeper_loss(self) -> bool:
        groups = [agent.group for agent in self.sim.agents if agent.group is not None]
        found = [group for group in groups if group.alive and group.world.group_rank == 0]
        if not found:
            return False
        group = self.random.choice(found)
        group.agent.post(group.agent.feed, acts.KeeperLost(group.world.generation))
        return True

    def _lift(self) -> bool:
        for agent in self.sim.agents:
            if agent.server is not None and not agent.frozen and not agent.host.frozen:
                for host in self.sim.hosts:
                    if agent.server.coordinator.quarantine.holds(host.name):
                        agent.server.lift(host.name)
                        self.sim.checker.saw(self.timeline.now_s, seen.TakenBack(host.name))
                        return True
        return False

    # -- hangs and requests -------------------------------------------------------------------------------------------

    def _hang(self) -> bool:
        """A rank hangs, and with it all others: now, or when its world starts, or at its very end. Where nobody looks
        for hangs, others must be there whose collectives time out."""
        scenario = self.sim.scenario
        watched = scenario.hang_rules.mode is Mode.RESTART
        found = [agent for agent in self.sim.agents if agent.group is not None and agent.group.endable]
        if not watched:
            alone = scenario.settings.policy is Policy.MIN_HEALTHY
            found = [agent for agent in found if not alone and self._has_peers(agent)]
        if not found:
            return False
        agent = self.random.choice(found)
        group = agent.group
        assert group is not None
        when = self.random.choice(("now", "now", "now", "start", "end")) if watched else "now"
        if when == "now":
            group.hang(self.random.choice(list(group.alive)))
        elif when == "end":
            group.hangs_at = "end"
        else:
            agent.hangs_next = "start" if scenario.hang_rules.first_s and self.random.random() < 0.5 else "first step"
        if self.random.random() < 0.2:
            self._cut()
        return True

    def _has_peers(self, agent: Agent) -> bool:
        assert agent.group is not None
        world = agent.group.ensemble
        return world is not None and agent.group.world.size > 1 and not any(group.hung for group in world.groups)

    def _request(self) -> bool:
        """A rank asks for something; now and then it is the last that is heard of its node."""
        found = [agent for agent in self.sim.agents if agent.group is not None and agent.group.alive]
        if not found:
            return False
        agent = self.random.choice(found)
        group = agent.group
        assert group is not None
        rank = self.random.choice(list(group.alive))
        [action] = self.random.choices(("continue", "exclude-node", "shutdown"), (1, 3, 1))
        agent.post(agent.feed, acts.Asked(group.world.generation, rank, action, "ECC errors"))
        if self.random.random() < 0.3:
            self.timeline.after(self.random.uniform(0.0, 0.05), agent.kill, self.random.random() < 0.3)
            self._come_back(agent.host)
        return True

    def _timeouts(self) -> bool:
        agent = self._some_agent()
        if agent is None:
            return False
        agent.post(agent.feed, acts.Learned(f'{{"heartbeat": {self.random.randint(1, 99)}}}'))
        return True

    def _peek(self) -> bool:
        agent = self._some_agent()
        if agent is None:
            return False
        agent.post(agent.feed, acts.PeekAsked(self.random.randint(1, 99)))
        return True

    # -- the network --------------------------------------------------------------------------------------------------

    def _sever(self, pairs: list[tuple[str, str]], text: str, duration_s: float = 0.0) -> bool:
        if not pairs:
            return False
        duration_s = duration_s or self._duration_s()
        self._note(f"{text} for {duration_s:.1f} s")
        self.sim.network.cut(pairs)
        self.timeline.after(duration_s, self._heal, pairs)
        return True

    def _heal(self, pairs: list[tuple[str, str]]) -> None:
        if not self.sim.calm:
            self.timeline.note("fault", "healed")
            self.sim.network.heal(pairs)

    def _two(self) -> tuple[str, str] | None:
        if len(self.sim.hosts) < 2:
            return None
        one, other = self.random.sample(self.sim.hosts, 2)
        return one.name, other.name

    def _cut(self) -> bool:
        agent = self._some_agent()
        if agent is None:
            return False
        name = agent.host.name
        others = [host.name for host in self.sim.hosts if host.name != name]
        pairs = [pair for other in others for pair in ((name, other), (other, name))]
        return self._sever(pairs, f"{name} is cut off")

    def _one_way_cut(self) -> bool:
        two = self._two()
        return two is not None and self._sever([two], f"nothing gets from {two[0]} to {two[1]}")

    def _partition(self) -> bool:
        hosts = [host.name for host in self.sim.hosts]
        if len(hosts) < 2:
            return False
        self.random.shuffle(hosts)
        at = self.random.randint(1, len(hosts) - 1)
        here, there = hosts[:at], hosts[at:]
        if self.sim.etcd is not None and self.random.random() < 0.5:
            here.append(ETCD)
        pairs = [pair for one in here for other in there for pair in ((one, other), (other, one))]
        return self._sever(pairs, f"{' '.join(here)} and {' '.join(there)} are parted")

    def _isolated_world(self) -> bool:
        """The coordinator and the whole world lose each other for longer than a lease, while the ranks go on."""
        running = [agent for agent in self.sim.agents if agent.group is not None and agent.group.alive]
        if not running:
            return False
        duration_s = self.sim.scenario.settings.join_timeout_s * self.random.uniform(1.0, 3.0)
        if self.random.random() < 0.5:
            inside = [agent.host.name for agent in running]
            outside = [host.name for host in self.sim.hosts if host.name not in inside]
            pairs = [pair for one in inside for other in outside for pair in ((one, other), (other, one))]
            return self._sever(pairs, f"{' '.join(inside)} and all others are parted", duration_s)
        self._note(f"the agents of the world are stopped for {duration_s:.1f} s")
        for agent in running:
            self._stop(agent)
            self.timeline.after(duration_s, self._thaw, agent.host)
        return True

    def _noise(self) -> bool:
        self.sim.network.noise = self.random.uniform(0.005, 0.1)
        self.timeline.after(self._duration_s(), self._quiet)
        return True

    def _quiet(self) -> None:
        self.sim.network.noise = 0.0

    def _delay_spike(self) -> bool:
        self.sim.network.spike_s = self.random.uniform(0.1, 3.0)
        self.timeline.after(self._duration_s(), self._no_spike)
        return True

    def _no_spike(self) -> None:
        self.sim.network.spike_s = 0.0

    # -- etcd ---------------------------------------------------------------------------------------------------------

    def _etcd_leader_change(self) -> bool:
        etcd = self.sim.etcd
        assert etcd is not None
        etcd.away += 1
        self.timeline.after(self.random.choice((0.5, 2.0, 10.0)) * self.random.uniform(0.5, 1.5), self._etcd_back)
        return True

    def _etcd_back(self) -> None:
        assert self.sim.etcd is not None
        self.sim.etcd.away = max(0, self.sim.etcd.away - 1)

    def _etcd_lease_lost(self) -> bool:
        assert self.sim.etcd is not None
        self.sim.etcd.lose_lease()
        return True

    def _etcd_cut_off(self) -> bool:
        agent = self._some_agent()
        if agent is None:
            return False
        name = agent.host.name
        pairs = [(name, ETCD), (ETCD, name)]
        if self.random.random() < 0.3:
            pairs = pairs[:1] if self.random.random() < 0.5 else pairs[1:]
        return self._sever(pairs, f"{name} is cut off from etcd")
