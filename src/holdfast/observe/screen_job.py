"""A job as somebody watches it: its record, as far as it is written, and what its agent says of this moment."""

from __future__ import annotations

import contextlib
import socket
import statistics
from collections.abc import Callable
from datetime import datetime
from time import time as unix_s

from holdfast.agent import doorbell
from holdfast.control.incidents import Incident
from holdfast.observe import record
from holdfast.observe.find import Found
from holdfast.observe.record import IncidentNoted, Noted
from holdfast.observe.state import Rank, State

ASK_S = 0.5  # an agent that takes longer is busy with something better
YOUNG_S = 5.0  # a record is older than the line to its agent, by a moment

TRAINING, SUCCEEDED = "training", "succeeded"
STARTING, RECOVERING = "starting", "recovering"
FAILED, STOPPED, LOST = "failed", "stopped", "lost"

EXIT_CODES = {TRAINING: 0, SUCCEEDED: 0, FAILED: 1, STOPPED: 1, LOST: 1, STARTING: 3, RECOVERING: 3}


class Watched:
    """Reads on whenever it is told to look."""

    def __init__(self, found: Found) -> None:
        """Raises OSError where the record cannot be read."""
        self.found = found
        self.state = State()
        self.pid = found.pid
        self.is_lost = False  # its agent has ended without a word
        self.is_silent = False  # its agent is there, and does not answer
        self.signs: dict[int, doorbell.Sign] = {}  # of the ranks on this machine
        self._reader = record.Reader(found.record)
        self._steps: tuple[int, int, int] = (-1, 0, 0)  # a generation, its steps, and those of all
        self._stepped_s = 0.0  # when they were found to be so many
        self._told_lost_s: float | None = None  # added up once: there may be thousands of incidents
        self._zero_s: float | None = None  # of the record's clock, in seconds of the calendar

    def close(self) -> None:
        self._reader.close()

    def look(self) -> None:
        """Raises OSError."""
        self.read()
        if self.state.ended is None:
            self._ask()
            self.is_lost = self._has_gone()

    def read(self) -> bool:
        """What was written since. Raises OSError."""
        new = False
        for noted in self._reader:
            new = True
            if not self.state.lead and not isinstance(noted.what, record.JobStarted):
                self.state.lead = noted.node  # the beginning is lost; most lines are of the node that writes them
            self._take(noted)
            if noted.node == self.state.lead and (told_s := _unix(noted.time)) is not None:
                self._zero_s = told_s - noted.at_s
        return new

    def _take(self, noted: Noted) -> None:
        self.state.take(noted)
        if isinstance(noted.what, IncidentNoted):
            self._told_lost_s = None
        world = self.state.world
        if world is not None and (world.generation, world.steps, self.state.step) != self._steps:
            self._steps, self._stepped_s = (world.generation, world.steps, self.state.step), noted.at_s

    def _ask(self) -> None:
        if self.pid is None:
            return
        try:
            answer = doorbell.ask(self.pid, doorbell.Now(), ASK_S)
        except doorbell.NoAnswer:
            self.is_silent = self.pid in doorbell.find()
            if not self.is_silent:
                self.pid = None
                self.read()  # it may have told its end meanwhile
            return
        self.is_silent = False
        self.signs = {sign.rank: sign for sign in answer.signs} if isinstance(answer, doorbell.Pace) else {}
        if isinstance(answer, doorbell.Pace) and answer.progress is not None:
            self._take(Noted(answer.progress, self.now_s, "", self._name_of(self.pid), -1))

    def _name_of(self, pid: int) -> str:
        """Of the agent with this pid, as the record has it; the node that writes the record comes first."""
        nodes = sorted(self.state.nodes.values(), key=lambda node: node.name != self.state.lead)
        return next((node.name for node in nodes if node.pid == pid), self.state.lead)

    def _has_gone(self) -> bool:
        if self.pid is not None or self.state.ended is not None or self.now_s < YOUNG_S:
            return False
        lead = self.state.nodes.get(self.state.lead)
        if lead is None or not is_here(host_of(lead.name)):
            return False
        self.is_silent = lead.pid in doorbell.find()
        return not self.is_silent

    # -- how it stands ------------------------------------------------------------------------------------------------

    @property
    def run_id(self) -> str:
        return self.state.run_id or self.found.run_id

    @property
    def word(self) -> str:
        ended = self.state.ended
        if ended is not None:
            return {"succeeded": SUCCEEDED, "preempted": STOPPED}.get(ended.outcome, FAILED)
        return LOST if self.is_lost else self.state.phase

    @property
    def exit_code(self) -> int:
        return EXIT_CODES.get(self.word, 3)

    @property
    def is_over(self) -> bool:
        return self.state.ended is not None or self.is_lost

    @property
    def now_s(self) -> float:
        """On the record's clock; of a job that is over, its last moment."""
        if self.is_over or self._zero_s is None:
            return self.state.at_s
        return max(self.state.at_s, unix_s() - self._zero_s)

    @property
    def since_end_s(self) -> float:
        """How long a job has been over."""
        return max(0.0, unix_s() - self._zero_s - self.state.at_s) if self._zero_s is not None else 0.0

    @property
    def stalled_s(self) -> float:
        """For how long no rank was seen to do a step."""
        world = self.state.world
        if self.word != TRAINING or world is None or world.stepped_s is None:
            return 0.0
        return max(0.0, self.now_s - max(world.stepped_s, self._stepped_s))

    @property
    def left_s(self) -> float | None:
        if self.is_over or self.state.steps_left is None or not self.state.step_s:
            return None
        return self.state.steps_left * self.state.step_s

    @property
    def checkpoint_age_s(self) -> float | None:
        return max(0.0, self.now_s - self.state.checkpoint.at_s) if self.state.checkpoint is not None else None

    @property
    def open_incident(self) -> Incident | None:
        """The one that the job is recovering from."""
        incidents = self.state.incidents
        last = incidents[max(incidents)] if incidents else None
        done = last is None or not last.restarted or last.recovered_at_s or last.failed_again_at_s
        return None if done or self.is_over else last

    @property
    def lost_s(self) -> float:
        """What incidents have cost until now."""
        if self._told_lost_s is None:
            self._told_lost_s = self.state.lost_s
        spent_s = self._told_lost_s
        if (last := self.open_incident) is not None:
            spent_s += max(0.0, self.now_s - self.at_s(last) - last.lost_s)
        return spent_s

    def at_s(self, incident: Incident) -> float:
        """When it began. The first versions of the record do not say what its clock showed, but the calendar."""
        if self._zero_s is not None and isinstance(incident, IncidentNoted):
            told_s = _unix(incident.failed_at)
            if told_s is not None:
                return told_s - self._zero_s
        return self.state.at(incident.failed_at_s)

    def usual_s(self, of: Callable[[Rank], float]) -> float:
        """What most ranks need."""
        known = [each_s for rank in self.state.ranks.values() if (each_s := of(rank))]
        return statistics.median(known) if known else 0.0

    def step_of(self, rank: Rank) -> int:
        """Over all worlds, as far as that is known."""
        world = self.state.world
        return rank.steps + (max(0, world.base) if world is not None else 0)

    # -- nodes --------------------------------------------------------------------------------------------------------

    def nodes(self) -> list[tuple[str, str]]:
        """The name of each, and what it is: in the world, a spare, or gone."""
        return [(name, self._standing_of(name)) for name in self.state.nodes]

    def _standing_of(self, name: str) -> str:
        world, node = self.state.world, self.state.nodes[name]
        if node.ended:
            return "ended"
        if world is None:
            return "waiting"
        if name in world.nodes:
            return "in the world"
        worked = any(name in earlier.nodes for earlier in self.state.worlds)
        return "gone" if worked and node.heard_s < world.launched_s else "spare"

    @property
    def spares(self) -> list[str]:
        return [name for name, standing in self.nodes() if standing == "spare"]

    def short(self, node: str) -> str:
        """Its host alone, where that tells it from the others."""
        host = host_of(node)
        same = sum(host_of(other) == host for other in self.state.nodes)
        return host if same <= 1 else node


def host_of(node: str) -> str:
    """Of `host:pid`, as a record names a node; '' in the first versions."""
    return node.rpartition(":")[0]


def is_here(host: str) -> bool:
    """Whether that is this machine: by its name, or because its address can be had. No name: nobody else's."""
    if host in ("", socket.gethostname()):
        return True
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.suppress(OSError, UnicodeError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        if all(each.isdigit() or each in ".:abcdefABCDEF" for each in host):  # a name would be looked up
            probe.bind((host, 0))
            return True
    return False


def _unix(text: str) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        return None
