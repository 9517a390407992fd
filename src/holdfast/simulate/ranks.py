"""Simulated ranks: they start, step together while all of them can, commit, fail, and end when told to, or not."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterable
from typing import TYPE_CHECKING

from holdfast.control.hangs import ENDING, STARTING, STEPS_TO_LEARN, TRAINING, Mode, Vitals
from holdfast.control.membership import Policy
from holdfast.control.stacks import Group as Place
from holdfast.control.worlds import World
from holdfast.simulate import observed as seen
from holdfast.wire.messages import Leaving, Raised

if TYPE_CHECKING:
    from holdfast.simulate.agent import Agent
    from holdfast.simulate.simulation import Simulation


LAST_S = 0.2  # a step that all have come to the end of but one is waited for by that one for so long

Held = tuple[int, int]  # a state: the generation in which it was made, and its step


class Group:
    """The ranks of one world on one node."""

    def __init__(self, agent: Agent, world: World, held: dict[int, Held | None], will: Held | None = None) -> None:
        self.agent = agent
        self.world = world
        self.held = held  # ranks that were in an earlier world, and what they have of it
        self.will = will  # what a rank that could not leave the last one had
        self.alive: dict[int, bool] = dict.fromkeys(range(world.first_rank, world.first_rank + world.local_size), True)
        self.stuck: dict[int, bool] = {}
        self.hung: dict[int, bool] = {}  # alive, and doing nothing
        self.hangs_at: str = ""  # what one of them will not get through: start, first step, or end
        self.announced: set[int] = set()  # ranks that can stay
        self.heard: set[int] = set()  # those of them of which their agent knows: it may have been stopped
        self.fails_at_start = False  # a rank that is new does
        self.leave_s: dict[int, float] = {}  # when those that are to leave at once were told so, on the host's clock
        self.willed: set[int] = set()  # ranks that could not, and have left their state
        self.planned = False  # all are to leave at a boundary
        self.ending: set[int] = set()  # ranks that were told to end
        self.started = False
        self.started_s = math.inf  # on the host's clock
        self.phase = STARTING
        self.found_s = math.inf  # when it was first found to hang, in real time
        self.slept_s = agent.host.slept_s  # how long its machine had slept by then
        self.told_s = -1.0  # since when it was silent when it was last found to, on the host's clock
        self.sign_s = agent.host.clock_s()  # the last sign of life, on the host's clock
        self.gaps_s = [0.0, 0.0, 0.0, 0.0]
        self.ensemble: Ensemble | None = None
        self.steps = 0
        self.asked: set[int] = set()  # ranks that are to end at a boundary
        self.left: dict[int, Leaving] = {}  # ranks that have called `sys.exit`, and may not be gone yet
        self.raised: set[int] = set()  # ranks that have raised, likewise
        self.ends: dict[int, int] = {}  # how those that have ended did
        self.leaves: set[int] = set()  # those of them that stay
        self.stumbled: set[int] = set()  # ranks that wait to be told what has become of their world
        self.signalled: dict[int, int] = {}

    @property
    def whole(self) -> bool:
        return len(self.alive) == self.world.local_size

    @property
    def leased(self) -> bool:
        return self.agent.host.clock_s() <= self.agent.lease_until_s

    @property
    def endable(self) -> int:
        return len(self.alive) - len(self.stuck)

    def start(self) -> None:
        if self.hangs_at == "start":
            self.hang(next(iter(self.alive), -1))
            return
        if self.whole and self.agent.alive:
            if self.fails_at_start and (new := [rank for rank in self.alive if rank not in self.held]):
                self.raise_in(new[0], "ValueError: at the start")
                return
            self.started, self.started_s = True, self.agent.host.clock_s()
            self._sign(STARTING)
            if self.hangs_at == "first step":
                self.hang(next(iter(self.alive)))
            self.agent.post(self.agent.rank_started, self)
            self.announce(list(self.alive))
            self.agent.sim.training.started(self)

    def announce(self, ranks: Iterable[int]) -> None:
        """Who has a state, from an earlier world or because it has begun, is worth to be kept."""
        for rank in ranks:
            if self.agent.sim.scenario.program.stays and rank not in self.announced:
                self.announced.add(rank)
                self.agent.post(self.agent.rank_stays, self, rank)

    def has(self, rank: int) -> Held | None:
        """The state in its memory."""
        if self.ensemble is not None and self.ensemble.base >= 0:
            return self.world.generation, self.ensemble.base + self.steps
        return self.held.get(rank)

    # -- signs of life ------------------------------------------------------------------------------------------------

    def hang(self, rank: int) -> None:
        if rank in self.alive and rank not in self.hung:
            self.hung[rank] = True
            self.agent.sim.hung(self, rank)

    def awake(self) -> list[int]:
        return [rank for rank in self.alive if rank not in self.hung]

    def vitals(self) -> Vitals | None:
        if not self.started:
            return None
        starting, training, evaluating, saving = self.gaps_s
        return Vitals(self.phase, self.sign_s, self.steps, True, (starting, training, evaluating, saving))

    def places(self) -> tuple[Place, ...]:
        """What a look at the stacks of its ranks shows."""
        stuck = tuple(rank for rank in self.alive if rank in self.hung)
        others = tuple(self.awake())
        found = [Place(stuck, len(stuck), "data.py:41 read", frames=("data.py:41 read",))] if stuck else []
        if others:
            found.append(Place(others, len(others), "all_reduce", collective=True, frames=("all_reduce",)))
        return tuple(found)

    def step(self, steps: int) -> None:
        now_s = self.agent.host.clock_s()
        self.steps = steps
        self.gaps_s[self.phase] = max(self.gaps_s[self.phase], now_s - self.sign_s)
        self._sign(TRAINING)

    def complete(self) -> None:
        self._sign(ENDING)
        if self.hangs_at == "end":
            self.hang(next(iter(self.alive), -1))

    def _sign(self, phase: int) -> None:
        """A rank pokes its agent where its deadline has come closer."""
        sooner = phase != self.phase or self.steps in (0, STEPS_TO_LEARN)
        host = self.agent.host
        self.phase, self.sign_s, self.slept_s = phase, host.clock_s(), host.slept_s
        if sooner and self.agent.watch.rules.mode is not Mode.OFF:
            self.agent.post(self.agent.look, self)

    # -- ends ---------------------------------------------------------------------------------------------------------

    def signal(self, ranks: tuple[int, ...], signum: int, drain: bool = False) -> None:
        timeline, program = self.agent.timeline, self.agent.sim.scenario.program
        if drain and program.drains and (self.started or self.world.stayed):
            self.asked.update(rank for rank in ranks if rank in self.alive)
            self.agent.sim.training.asked(self)
            for rank in self.stumbled.intersection(ranks):
                self.agent.sim.waits(self, rank)
            return
        for rank in ranks:
            if rank not in self.alive or rank in self.stuck:
                continue
            if timeline.chance(program.stuck):
                self.stuck[rank] = True
            elif signum == signal.SIGKILL:
                timeline.after(timeline.random.uniform(0.001, 0.05), self.end, rank, -signum)
            elif rank not in self.signalled:
                self.signalled[rank] = signum
                if not timeline.chance(0.7 if rank in self.hung else program.deaf):
                    status = -signum if timeline.chance(0.9) or rank in self.left else 0
                    timeline.after(timeline.random.expovariate(4.0), self.end, rank, status)

    def leave_world(self, ranks: tuple[int, ...], boundary: bool) -> None:
        """They stay, those that get out of what they are in."""
        timeline, program = self.agent.timeline, self.agent.sim.scenario.program
        if boundary:
            self.planned = True
            self.asked.update(rank for rank in ranks if rank in self.alive)
            self.leaves |= self.asked
            self.agent.sim.training.asked(self)
            return
        timeline.after(timeline.random.uniform(0.0, LAST_S), self.agent.sim.training.aborted, self)
        for rank in ranks:
            self.leave_s[rank] = self.agent.host.clock_s()
            if rank in self.alive and rank not in self.hung and not timeline.chance(program.deaf):
                timeline.after(timeline.random.expovariate(10.0), self._leave_world, rank)
            elif timeline.chance(0.5):
                late_s = timeline.random.uniform(1.0, 6.0)
                timeline.after(late_s, self.agent.post, self.agent.rank_bequeathed, self, rank)

    def _leave_world(self, rank: int) -> None:
        if rank not in self.alive or rank in self.stuck or rank in self.left:
            return
        if self.agent.host.frozen and not self.agent.host.down:
            self.agent.timeline.after(0.2, self._leave_world, rank)
            return
        del self.alive[rank]
        self.agent.stayers[rank - self.world.first_rank] = self.has(rank)
        self.agent.post(self.agent.rank_left, self, rank)
        self.agent.sim.training.rank_ended(self, rank, -1)

    def end(
        self, rank: int, status: int, raised: Raised | None = None, oom: bool = False, silent: bool = False
    ) -> None:
        if rank not in self.alive or rank in self.stuck:
            return
        if (
            self.agent.host.frozen and not self.agent.host.down
        ):  # a process of a stopped machine ends when that runs again
            self.agent.timeline.after(0.2, self.end, rank, status, raised, oom, silent)
            return
        del self.alive[rank]
        self.ends[rank] = status
        agent = self.agent
        at_s = agent.host.clock_s()
        if not silent:
            reaped_s = agent.timeline.random.uniform(0.0005, 0.01)
            told_first = status != 0 and agent.timeline.chance(0.7)  # by its lifeline
            agent.timeline.after(
                reaped_s, agent.post, agent.rank_exited, self, rank, status, at_s, raised, oom, not told_first
            )
            if told_first:
                gone_s = reaped_s + agent.timeline.random.expovariate(20.0)
                agent.timeline.after(gone_s, agent.post, agent.rank_gone, self, rank)
        agent.sim.training.rank_ended(self, rank, status)

    def raise_in(self, rank: int, headline: str, distributed: bool = False, out_of_memory: bool = False) -> None:
        if rank in self.left:
            return  # its program is over
        self.raised.add(rank)
        generation, at_s = self.world.generation, self.agent.host.clock_s()
        where = "torch/distributed.py:1" if distributed else "train.py:7"
        self.end(rank, 1, Raised(rank, generation, at_s, headline, "", where, distributed, out_of_memory))

    def leave(self, rank: int, code: int) -> None:
        """By `sys.exit`: the sockets close at once, and the process is gone later, perhaps after its peers are."""
        if rank not in self.alive or rank in self.stuck or rank in self.left or rank in self.raised:
            return
        self.left[rank] = Leaving(rank, self.world.generation, self.agent.host.clock_s(), code)
        self.agent.sim.training.rank_left(self, rank, code)
        self.agent.timeline.after(self.agent.timeline.random.uniform(0.0, 1.0), self.end, rank, code)

    def kill_all(self, silent: bool) -> None:
        for rank in list(self.alive):
            self.end(rank, -signal.SIGKILL, silent=silent)


class Ensemble:
    """All ranks of one generation, wherever they are."""

    def __init__(self, generation: int, size: int) -> None:
        self.generation = generation
        self.size = size
        self.groups: list[Group] = []
        self.steps = 0
        self.base = -1  # the step it was restored to
        self.began = False
        self.broken = False
        self.complete = False
        self.drained = False  # it has come to a boundary at which all were to end
        self.former = False  # of a job that has ended; it may run on until its leases are over
        self.stalled_s = 0.0


class Training:
    """The program, on all nodes, and the storage for its checkpoints."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self.timeline = sim.timeline
        self.program = sim.scenario.program
        self.worlds: dict[int, Ensemble] = {}
        self.committed = (-1, 0)  # generation and step of the newest commit
        self.steps = 0
        self.complete = False
        settings = sim.scenario.settings
        # Ranks that stay need all others for a step, as those of DDP do; they have another world instead.
        without = settings.policy is Policy.MIN_HEALTHY and not self.program.stays
        self._needed = settings.min_nodes if without else 0
        # Nothing is charged then, and a program that always raises after some steps would take its time to the end.
        self._fails_for_free = settings.policy is Policy.MIN_HEALTHY and self.program.stays

    def begin_another_job(self) -> None:
        """Under the same name, so with the checkpoints of the last one, but perhaps with its generations again."""
        for world in self.worlds.values():
            world.former = True
        self.worlds = {}
        self.committed = (-1, self.committed[1])

    def join(self, group: Group) -> None:
        generation = group.world.generation
        world = self.worlds.get(generation)
        if world is None:
            world = self.worlds[generation] = Ensemble(generation, group.world.group_size)
        group.ensemble = world
        world.groups.append(group)
        group.announce(group.held)
        start_s = self.program.start_s if len(group.held) < group.world.local_size else self.program.start_s / 10
        self.timeline.after(start_s * self.timeline.random.uniform(0.5, 1.5), group.start)

    def started(self, group: Group) -> None:
        world = group.ensemble
        assert world is not None
        if not world.began and len(world.groups) == world.size and all(each.started for each in world.groups):
            world.began = True
            self.timeline.after(self.program.step_s, self._step, world)
        elif world.size > 1:
            self.timeline.after(self.program.backend_timeout_s, self._give_up_waiting, world, group)

    def _give_up_waiting(self, world: Ensemble, group: Group) -> None:
        """The other nodes never came to the store."""
        if not world.began and group.whole and (awake := group.awake()):
            self._breaks(group, awake[0], "timed out waiting for clients")

    def _step(self, world: Ensemble) -> None:
        groups = self._together(world) if self._needed else world.groups
        if world.broken or world.complete or world.drained or not any(group.alive for group in world.groups):
            return
        step_s = self.program.step_s
        if not self._can_step(groups):
            # Ranks without a lease wait for one in peace; it is their peers, inside a collective, that time out.
            if any(group.leased for group in world.groups):
                world.stalled_s += step_s
            if world.stalled_s > self.program.backend_timeout_s:
                world.stalled_s = 0.0
                self._fail_somewhere(world.groups)
            self.timeline.after(step_s, self._step, world)
            return
        world.stalled_s = 0.0
        self._do_step(world, groups)
        if not world.complete and not world.broken:
            self.timeline.after(step_s * (0.8 + 0.4 * self.timeline.random.random()), self._step, world)

    def _together(self, world: Ensemble) -> list[Group]:
        """With min-healthy: some ranks that can reach each other. In a split, those of either side."""
        network = self.sim.network
        able = [group for group in world.groups if self._is_able(group)]
        if not able or not network.cuts:
            return able
        one = self.timeline.random.choice(able).agent.host
        return [group for group in able if network.connected(one, group.agent.host)]

    def _is_able(self, group: Group) -> bool:
        return group.whole and not group.stuck and not group.hung and not group.agent.host.frozen and group.leased

    def _can_step(self, groups: list[Group]) -> bool:
        if len(groups) < self._needed:
            return False
        if not all(self._is_able(group) for group in groups):
            return False
        network = self.sim.network
        if not network.cuts:
            return True
        hosts = [group.agent.host for group in groups]
        return all(network.connected(one, other) for one in hosts for other in hosts)

    def _do_step(self, world: Ensemble, groups: list[Group]) -> None:
        if world.former:
            return
        checker, now_s, program = self.sim.checker, self.timeline.now_s, self.program
        if world.base < 0:
            world.base = self._restore(world)
            held = max(self._offers(world), default=(-1, 0))
            checker.saw(now_s, seen.Restored(world.generation, world.base, held[1]))
        if 0 <= program.fails_at <= world.steps and not (self.sim.calm and self._fails_for_free):
            group = groups[-1]
            group.raise_in(next(iter(group.alive)), "KeyError: 'labels'")
            return
        step = world.base + world.steps + 1
        if step <= program.steps:
            world.steps += 1
            self.steps += 1
            checker.saw(now_s, seen.Stepped(world.generation, step))
            for group in groups:
                group.step(world.steps)
                if world.steps == 1:
                    for rank in group.alive:
                        agent = group.agent
                        agent.post(agent.rank_stepped, group, rank, agent.host.clock_s())
        if (step % program.commit_every == 0 or step >= program.steps) and world.generation >= self.committed[0]:
            self.committed = (world.generation, min(step, program.steps))
            checker.saw(now_s, seen.Committed(*self.committed))
        if step >= program.steps:
            self._complete(world, groups)

    def _offers(self, world: Ensemble) -> list[Held]:
        """What living ranks have in memory, and the wills of those that could not leave."""
        alive = [group.held.get(rank) for group in world.groups for rank in group.alive]
        new = [group for group in world.groups if any(rank not in group.held for rank in group.alive)]
        return [held for held in (*alive, *(group.will for group in new)) if held is not None]

    def _restore(self, world: Ensemble) -> int:
        """The step that a world goes on from."""
        offers = self._offers(world)
        return max(offers)[1] if offers else self.committed[1]

    def _complete(self, world: Ensemble, groups: list[Group]) -> None:
        world.complete = self.complete = True
        self.timeline.note("training", f"generation {world.generation} has done all steps")
        for group in world.groups:
            if group in groups:
                group.complete()
                for rank in group.awake():
                    self.timeline.after(self.timeline.random.uniform(0.0, 0.5), group.end, rank, 0)
            else:
                self.timeline.after(self.program.backend_timeout_s, self._peer_fails, group)

    # -- planned ends -------------------------------------------------------------------------------------------------

    def asked(self, group: Group) -> None:
        """Ranks end at a boundary once all have heard of it. Some never get there."""
        world = group.ensemble
        assert world is not None
        heard = all(each.asked >= set(each.alive) for each in world.groups)
        if heard and len(world.groups) == world.size and not self.timeline.chance(self.program.never_drains):
            self.timeline.after(self.timeline.random.uniform(0.0, 2.0) * self.program.step_s, self._boundary, world)

    def _boundary(self, world: Ensemble) -> None:
        if world.drained or world.broken or world.complete or world.former or not self._can_step(world.groups):
            return
        world.drained = True
        self.timeline.note("training", f"generation {world.generation} ends at a boundary")
        step = max(0, world.base) + world.steps
        ends = any(rank not in group.leaves for group in world.groups for rank in group.alive)  # else nothing is saved
        if ends and world.steps and world.generation >= self.committed[0] and step > self.committed[1]:
            self.committed = (world.generation, step)
            self.sim.checker.saw(self.timeline.now_s, seen.Committed(*self.committed))
        for group in world.groups:
            for rank in group.awake():
                end = (group._leave_world, rank) if rank in group.leaves else (group.end, rank, 0)
                self.timeline.after(self.timeline.random.uniform(0.0, 0.5), *end)

    def _fail_somewhere(self, groups: list[Group]) -> None:
        group = self.timeline.random.choice(groups)
        if (awake := group.awake()) and not group.agent.host.frozen:
            self._breaks(group, awake[0], "collective timed out")

    def rank_ended(self, group: Group, rank: int, status: int) -> None:
        world = group.ensemble
        assert world is not None
        if (world.complete or world.drained) and status == 0:
            return
        if world.drained and rank in group.leaves:
            return
        self._break(world, group)

    def aborted(self, group: Group) -> None:
        """Who is to leave at once takes its connections down, and from then on no step of that world can be done."""
        world = group.ensemble
        assert world is not None
        if not (world.complete or world.drained):
            self._break(world, group)

    def _break(self, world: Ensemble, group: Group) -> None:
        if self._needed or world.broken:
            return
        world.broken = True
        # Their peers find out, each in its own time; some only when their collective times out.
        for other in world.groups:
            if other is not group:
                soon = self.timeline.chance(0.7) and not group.agent.host.down
                delay_s = self.timeline.random.expovariate(2.0) if soon else self.program.backend_timeout_s
                self.timeline.after(delay_s, self._peer_fails, other)
        self.timeline.after(self.program.backend_timeout_s, self._peer_fails, group)

    def rank_left(self, group: Group, rank: int, code: int) -> None:
        world = group.ensemble
        assert world is not None
        if world.began and not (world.broken or world.complete or world.drained or self._needed):
            self.sim.checker.saw(self.timeline.now_s, seen.Quit(world.generation, rank))
            self.timeline.after(self.timeline.random.expovariate(4.0), self._peer_fails, group)
        self.rank_ended(group, rank, code)

    def _peer_fails(self, group: Group) -> None:
        awake = [rank for rank in group.awake() if rank not in group.left]
        if awake and not group.agent.host.frozen:
            self._breaks(group, awake[0], "connection closed by peer")

    def _breaks(self, group: Group, rank: int, text: str) -> None:
        """A collective fails in a rank, which ends by that, or says so."""
        if rank not in group.announced:
            group.raise_in(rank, text, distributed=True)
            return
        assert group.ensemble is not None
        self._break(group.ensemble, group)
        group.agent.post(group.agent.rank_stumbled, group, rank, text)
        group.stumbled.add(rank)
        self.sim.waits(group, rank)
