"""Tasks on this machine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from holdfast.workflow.beside import HERE, Beside, place_of
from holdfast.workflow.deciding import Action, Begin, Ended, Event, Prepare, Prepared, Stop
from holdfast.workflow.lives import Life
from holdfast.workflow.living import Known, Living
from holdfast.workflow.record import Record
from holdfast.workflow.runner import Works
from holdfast.workflow.standing import PREPARING, RUNNING, STOPPING


class Local:
    def __init__(
        self, folder: Path, record: Record, works: Works, tell: Callable[[Event], None], say: Callable[[str], None]
    ) -> None:
        self._folder, self._record, self._works = folder, record, works
        self._tell = tell
        self._loop, self._say_here = asyncio.get_running_loop(), say
        self._beside = Beside()
        self._lives: dict[tuple[str, int], Living] = {}  # those that have begun
        self.nodes = record.submitted.nodes
        self._hosts = {name: _address(at) for at, name in enumerate(record.standing.tasks)}

    def find_again(self) -> None:
        for name, task in self._record.standing.tasks.items():
            if task.state == PREPARING:
                self._works.add(self._prepare(name, task.attempt))
            elif task.state == STOPPING and self._life(name, task.attempt).forbid():
                self._tell(Ended(name, task.attempt, 143, "stopped before it began"))
            elif task.state in (RUNNING, STOPPING):
                self._begin(name, task.attempt)
                if task.state == STOPPING:
                    self._works.add(self._stop(name, task.attempt))

    def do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Prepare(name, attempt):
                    self._works.add(self._prepare(name, attempt))
                case Begin(name, attempt):
                    self._begin(name, attempt)
                case Stop(name, attempt, _, patience_s):
                    self._works.add(self._stop(name, attempt, patience_s))

    def _begin(self, name: str, attempt: int) -> None:
        living = self._lives[name, attempt] = self._living(name, attempt)
        self._works.add(self._live(living, name, attempt))

    async def _prepare(self, name: str, attempt: int) -> None:
        urls = [given.url for given in self._record.workflow.task(name).inputs if given.url]
        place = place_of(urls[0]) if urls else HERE
        if failed := await self._beside.run(place, self._living(name, attempt).prepare):
            self._tell(Ended(name, attempt, None, failed))
        else:
            self._tell(Prepared(name, attempt))

    async def _live(self, living: Living, name: str, attempt: int) -> None:
        self._tell(await living.live())
        del self._lives[name, attempt]

    async def _stop(self, name: str, attempt: int, patience_s: float = 0.0) -> None:
        if (living := self._lives.get((name, attempt))) is None:
            self._tell(Ended(name, attempt, 143, "stopped before it began"))
        else:
            await living.stop(patience_s)

    def _say(self, text: str) -> None:
        """From any thread."""
        self._loop.call_soon_threadsafe(self._say_here, text)

    def _living(self, name: str, attempt: int) -> Living:
        submitted = self._record.submitted
        life = self._life(name, attempt)
        known = lambda: self._known(name)  # noqa: E731
        return Living(submitted, self._folder, name, attempt, life, known, self._tell, self._say, self._beside)

    def _life(self, name: str, attempt: int) -> Life:
        return Life(self._folder / "tasks" / name / str(attempt), self._record.submitted.private)

    def _known(self, name: str) -> Known:
        stands = self._record.standing.tasks[name]
        environment = {"HOLDFAST_NODE": stands.node}
        if any(node.gpus for node in self.nodes):
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(stands.gpus)
        return Known(self._hosts, environment)


def _address(at: int) -> str:
    """Each task has one of its own, in all of its lives."""
    return f"127.{1 + at // 62500}.{at // 250 % 250}.{2 + at % 250}"
