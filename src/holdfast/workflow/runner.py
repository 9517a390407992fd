"""Who runs a workflow: has a backend do what is decided, and decides from what that tells.

It writes down how the workflow stands before anything is done about it. A runner that is started again reads that, and
its backend looks at what there is: a life that was to begin begins, one that runs is waited for, one that has ended is
told.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Protocol

from holdfast.workflow import deciding
from holdfast.workflow.deciding import Action, Cancel, Event, Tick
from holdfast.workflow.record import Record, save
from holdfast.workflow.standing import Node


class Left(Exception):
    """The runner was told to leave what it has not done yet. One line."""


class Backend(Protocol):
    """Where tasks run. Methods are called in the runner's loop."""

    @property
    def nodes(self) -> tuple[Node, ...] | None:
        """To be given out; None if it does so itself."""

    def find_again(self) -> None:
        """See to what an earlier runner has left."""

    def do(self, actions: Sequence[Action]) -> None:
        """What was decided at once."""


class Works:
    """What goes on beside the loop. A mistake of ours in it ends the runner, not the tasks: another may do better."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def add(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and isinstance(failure := task.exception(), Exception):
            self.end(failure)

    def end(self, failure: Exception) -> None:
        if not self.failed.done():
            self.failed.set_exception(failure)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.failed.cancel()


class Runner:
    def __init__(self, folder: Path, record: Record, changed: Callable[[], None]) -> None:
        self._folder, self._record, self._changed = folder, record, changed
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._interrupted = False
        self._moved = time.time() - time.monotonic()  # times in the record are the wall's, which a restart knows

    def tell(self, event: Event) -> None:
        self._events.put_nowait(event)

    def cancel(self) -> None:
        self.tell(Cancel())

    def interrupt(self, works: Works) -> None:
        """From a terminal. Who does so again does not want to wait for last checkpoints."""
        if self._interrupted:
            resume = f"holdfast workflow resume {self._record.id}"
            works.end(Left(f"{self._record.id} is left as it is, some of it still ending; see to that with: {resume}"))
        self._interrupted = True
        self.cancel()

    async def run(self, backend: Backend, works: Works) -> int:
        works.failed.add_done_callback(lambda _: self.tell(Tick()))
        backend.find_again()
        self.tell(Tick())
        try:
            while not deciding.is_over(self._record.standing):
                events = await self._next()
                if works.failed.done():
                    works.failed.result()
                self._decide(events, backend)
        finally:
            await works.close()
        return deciding.exit_code(self._record.workflow, self._record.standing)

    async def _next(self) -> list[Event]:
        """All that has happened."""
        now_s = self._now_s()
        due_s = deciding.next_s(self._record.workflow, self._record.standing, now_s)
        try:
            events = [await asyncio.wait_for(self._events.get(), None if due_s is None else due_s - now_s)]
        except TimeoutError:
            return [Tick()]
        while not self._events.empty():
            events.append(self._events.get_nowait())
        return events

    def _decide(self, events: Sequence[Event], backend: Backend) -> None:
        before = self._record.standing
        stands, actions = deciding.decide(self._record.workflow, before, self._now_s(), events, backend.nodes)
        if stands != before:
            self._record.standing = stands
            save(self._folder, stands)
            self._changed()
        backend.do(actions)

    def _now_s(self) -> float:
        return time.monotonic() + self._moved
