"""How a job stands: its record, folded up. Every view of a job, on a page, in a terminal or as metrics, is of this.

A node's lines may come late: to a coordinator that takes over they are told again from the beginning. Of two lines that
say the same kind of thing, the one that was written later holds.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable

import msgspec

from holdfast.control.incidents import Incident
from holdfast.observe import record
from holdfast.observe.record import Noted

PHASES = ("starting", "training", "evaluating", "saving", "ending")
DIGITS = {str(digit): phase for digit, phase in enumerate(PHASES)}
MAX_POINTS = 2_000  # of a curve; a longer one loses every second point


class Rank(msgspec.Struct):
    """A rank of the newest world."""

    rank: int
    node: str
    pid: int = 0
    state: str = "starting"  # one of PHASES, or exited, failed, hung
    steps: int = 0
    step_s: float = 0.0
    own_s: float = 0.0
    section_s: float = 0.0
    straggles: bool = False
    slow_by: str = ""  # of one that straggles: step or section
    text: str = ""  # why it failed


class World(msgspec.Struct):
    """One generation. Times are those of the record."""

    generation: int
    size: int
    restarts: int
    launched_s: float
    nodes: list[str]
    started_s: float | None = None  # all processes were there
    stepped_s: float | None = None  # all ranks of the node that writes the record had stepped
    ended_s: float | None = None
    base: int = -1  # steps that were done before it; -1: unknown
    steps: int = 0


class Node(msgspec.Struct):
    name: str
    nproc: int
    pid: int
    heard_s: float
    ended: bool = False


class Standby(msgspec.Struct):
    """A process that waits to be a rank, and the memory it takes for that."""

    node: str
    local_rank: int
    pid: int
    host_bytes: int
    gpu_bytes: int


class Point(msgspec.Struct, array_like=True):
    at_s: float
    step: int
    value: float


class Saved(msgspec.Struct):
    step: int
    at_s: float
    name: str
    bytes: int
    seconds: float


class State(msgspec.Struct):
    run_id: str = ""
    program: str = ""
    version: str = ""
    lead: str = ""  # the node whose record this is
    started: str = ""
    clock_s: float = 0.0
    max_restarts: int = 0
    at_s: float = 0.0  # of the newest line
    step: int = 0
    step_s: float = 0.0
    loss: float | None = None
    epoch: str = ""
    samples_per_s: float = 0.0
    steps_left: int | None = None
    progressed_s: float = 0.0  # when any rank was last seen to have stepped
    nodes: dict[str, Node] = {}
    worlds: list[World] = []
    ranks: dict[int, Rank] = {}
    standbys: list[Standby] = []
    incidents: dict[int, Incident] = {}
    checkpoint: Saved | None = None
    checkpoint_failures: int = 0
    paces: list[Point] = []  # steps, and what one took
    losses: list[Point] = []
    said: list[str] = []  # by the coordinator, the last few
    faults: int = 0
    ended: record.JobEnded | None = None
    _worlds_saving_s: float = 0.0  # of those that are over
    _world_saving_s: float = 0.0
    _step_s: float = 0.0  # when the line was written that `step` is from
    _trained_s: float = 0.0  # and the one that the loss is from

    @property
    def world(self) -> World | None:
        return self.worlds[-1] if self.worlds else None

    @property
    def phase(self) -> str:
        """In a word."""
        if self.ended is not None:
            return self.ended.outcome
        if self.world is None:
            return "starting"
        if self.world.ended_s is not None:
            return "recovering"
        return "training" if self.world.stepped_s is not None else "starting"

    @property
    def restarts(self) -> int:
        return max((world.restarts for world in self.worlds), default=0)

    @property
    def lost_s(self) -> float:
        return sum(incident.lost_s for incident in self.incidents.values())

    @property
    def saving_s(self) -> float:
        """So long saves have held the job up."""
        return self._worlds_saving_s + self._world_saving_s

    @property
    def stragglers(self) -> list[int]:
        return [rank.rank for rank in self.ranks.values() if rank.straggles]

    @property
    def standing_by(self) -> list[Standby]:
        """Those that can take a rank's place: a node that is not in the world may be gone, and its own with it."""
        nodes = self.world.nodes if self.world is not None and self.ended is None else []
        return [standby for standby in self.standbys if standby.node in nodes]

    @property
    def standby_bytes(self) -> tuple[int, int]:
        """What they take of the machines' memory, and of the GPUs'."""
        waiting = self.standing_by
        return sum(each.host_bytes for each in waiting), sum(each.gpu_bytes for each in waiting)

    def at(self, monotonic_s: float) -> float:
        """A time of the leading node's clock, as the record counts."""
        return monotonic_s - self.clock_s

    # -- what happened ------------------------------------------------------------------------------------------------

    def take(self, noted: Noted) -> None:
        self.at_s = max(self.at_s, noted.at_s)
        if (node := self.nodes.get(noted.node)) is not None:
            node.heard_s = max(node.heard_s, noted.at_s)
        match noted.what:
            case record.JobStarted() as job:
                self._job_started(noted, job)
            case record.JobEnded() as ended:
                if noted.node in self.nodes:
                    self.nodes[noted.node].ended = True
                self.standbys = [each for each in self.standbys if each.node != noted.node]
                if noted.node == self.lead:
                    self.ended = ended
            case record.WorldLaunched() as launched:
                self._launched(noted, launched)
            case record.WorldStarted(generation=generation, pids=pids):
                for number, pid in pids.items():
                    if (rank := self._rank(generation, number)) is not None:
                        rank.pid = pid
                self._stands_by_no_more(noted.node, pids.values())
                if (world := self._seen_by(noted.node, generation)) is not None:
                    world.started_s = noted.at_s
            case record.RankFirstStep(generation=generation, rank=number):
                if (rank := self._rank(generation, number)) is not None:
                    rank.state = "training"
                if (world := self._seen_by(noted.node, generation)) is not None:
                    world.stepped_s = noted.at_s
            case record.RankExited(generation=generation, rank=number, status=status):
                if (rank := self._rank(generation, number)) is not None:
                    rank.state = "exited" if status == 0 else "failed"
                    rank.text = rank.text or (f"status {status}" if status else "")
            case record.RankRaised(generation=generation, rank=number, error=error):
                if (rank := self._rank(generation, number)) is not None:
                    rank.state, rank.text = "failed", error
            case record.RankHung(generation=generation, rank=number, what=what):
                if (rank := self._rank(generation, number)) is not None:
                    rank.state, rank.text = "hung", what
            case record.StandbyReady(local_rank=place, pid=pid, host_bytes=host, gpu_bytes=gpu):
                others = [each for each in self.standbys if (each.node, each.local_rank) != (noted.node, place)]
                self.standbys = [*others, Standby(noted.node, place, pid, host, gpu)]
            case record.StandbyEnded(pid=pid):
                self._stands_by_no_more(noted.node, (pid,))
            case record.Progress() as progress:
                self._progressed(noted, progress)
            case record.Trained() as trained:
                self._trained(noted, trained)
            case record.StragglerFound(generation=generation, rank=number, by=by):
                if (rank := self._rank(generation, number)) is not None:
                    rank.straggles, rank.slow_by = True, by
            case record.StragglerGone(generation=generation, rank=number):
                if (rank := self._rank(generation, number)) is not None:
                    rank.straggles = False
            case record.IncidentOpened() | record.IncidentClosed() as incident:
                if noted.node == self.lead:  # the others have it too, on their own clocks
                    self._incident(incident)
            case record.CheckpointSaved(step=step, checkpoint=name, bytes=size, seconds=seconds):
                self._saved(Saved(step, noted.at_s, name, size, seconds))
            case record.CheckpointPersisted(step=step, checkpoint=name, bytes=size, seconds=seconds, committed=True):
                self._saved(Saved(step, noted.at_s, name, size, seconds))
            case record.CheckpointFailed():
                self.checkpoint_failures += 1
            case record.CheckpointRestored(generation=generation, step=step):
                if (world := self._world(generation)) is not None:
                    world.base = step
            case record.CoordinatorSaid(text=text):
                self.said = [*self.said[-9:], text]
            case record.NodeExamined(fit=False, failed=failed):
                self.said = [*self.said[-9:], f"{noted.node} stays out: {failed[0] if failed else 'it is not fit'}"]
            case record.FaultInjected():
                self.faults += 1

    def _job_started(self, noted: Noted, job: record.JobStarted) -> None:
        self.nodes[noted.node] = Node(noted.node, job.nproc, job.pid, noted.at_s)
        if self.run_id == "":
            self.run_id, self.version, self.lead, self.started = job.run_id, job.version, noted.node, noted.time
            self.clock_s, self.max_restarts, self.program = job.clock_s, job.max_restarts, _name(job.program)

    def _launched(self, noted: Noted, launched: record.WorldLaunched) -> None:
        world = self._world(launched.generation)
        if world is None:
            if self.worlds and launched.generation < self.worlds[-1].generation:
                return  # told late
            world = World(launched.generation, launched.size, launched.restarts, noted.at_s, [])
            if self.worlds and self.worlds[-1].ended_s is None:
                self.worlds[-1].ended_s = noted.at_s
            self.worlds.append(world)
            self.ranks = {}
            self._worlds_saving_s += self._world_saving_s
            self._world_saving_s = 0.0
        world.nodes.append(noted.node)
        for number in range(launched.first_rank, launched.first_rank + launched.local_size):
            self.ranks[number] = Rank(number, noted.node)

    def _progressed(self, noted: Noted, progress: record.Progress) -> None:
        world = self._world(progress.generation)
        if world is None:
            return
        if max(progress.steps, default=0) > world.steps:
            self.progressed_s = max(self.progressed_s, noted.at_s)
        world.base = progress.base if progress.base >= 0 else world.base
        world.steps = max(world.steps, *progress.steps, 0)
        self._world_saving_s = max(self._world_saving_s, progress.saving_s)
        self._stepped(noted.at_s, max(0, world.base) + world.steps)
        for at in range(max(len(progress.steps), len(progress.phases))):
            if (rank := self._rank(progress.generation, progress.first_rank + at)) is None:
                continue
            rank.steps = max(rank.steps, _get(progress.steps, at))
            rank.step_s = _get(progress.step_us, at) / 1e6 or rank.step_s
            rank.own_s = _get(progress.own_us, at) / 1e6 or rank.own_s
            rank.section_s = _get(progress.section_us or (), at) / 1e6 or rank.section_s
            if rank.state in PHASES:
                rank.state = DIGITS.get(progress.phases[at : at + 1], rank.state)
        taken = [each_us / 1e6 for each_us in progress.step_us if each_us]
        if taken and noted.node == self.lead:
            self.step_s = max(taken)
            self.paces = _with(self.paces, Point(noted.at_s, self.step, self.step_s))

    def _trained(self, noted: Noted, trained: record.Trained) -> None:
        self._stepped(noted.at_s, trained.step)
        self.progressed_s = max(self.progressed_s, noted.at_s)
        if trained.loss is not None:
            self.losses = _with(self.losses, Point(noted.at_s, trained.step, trained.loss))
        if noted.at_s < self._trained_s:
            return
        self._trained_s = noted.at_s
        self.epoch, self.samples_per_s, self.steps_left = trained.epoch, trained.samples_per_s, trained.steps_left
        if trained.loss is not None:
            self.loss = trained.loss

    def _stepped(self, at_s: float, step: int) -> None:
        if at_s >= self._step_s:
            self._step_s, self.step = at_s, step

    def _saved(self, saved: Saved) -> None:
        if self.checkpoint is None or saved.at_s >= self.checkpoint.at_s:
            self.checkpoint = saved

    def _stands_by_no_more(self, node: str, pids: Collection[int]) -> None:
        """It has ended, or is a rank now."""
        self.standbys = [each for each in self.standbys if each.node != node or each.pid not in pids]

    def _incident(self, incident: record.IncidentNoted) -> None:
        """One without a restart ends the job, which is told next, or the world goes on: with min-healthy."""
        self.incidents[incident.number] = incident
        world = self._world(incident.generation)
        if world is not None and incident.restarted:
            world.ended_s = max(0.0, self.at(incident.failed_at_s))

    def _world(self, generation: int) -> World | None:
        for world in reversed(self.worlds):
            if world.generation <= generation:
                return world if world.generation == generation else None
        return None

    def _seen_by(self, node: str, generation: int) -> World | None:
        """A world whose times that node tells: the leading one does, unless it only stands by."""
        world = self._world(generation)
        return world if world is not None and (node == self.lead or self.lead not in world.nodes) else None

    def _rank(self, generation: int, rank: int) -> Rank | None:
        world = self.world
        return self.ranks.get(rank) if world is not None and world.generation == generation else None


def fold(notes: Iterable[Noted]) -> State:
    state = State()
    for noted in notes:
        state.take(noted)
    return state


def _with(points: list[Point], point: Point) -> list[Point]:
    """By order of time."""
    kept = points if len(points) < MAX_POINTS else points[::2]
    at = bisect_right(kept, point.at_s, key=lambda each: each.at_s)
    return [*kept[:at], point, *kept[at:]]


def _get(values: tuple[int, ...], at: int) -> int:
    if len(values) == 1:
        return values[0]  # of all
    return values[at] if at < len(values) else 0


def _name(program: object) -> str:
    """Of a script, a module or a command, as the agent has it."""
    if not isinstance(program, dict):
        return ""
    found = program.get("path") or program.get("name") or next(iter(program.get("argv") or ()), "")
    return str(found).rsplit("/", 1)[-1]
