"""The workflow's runner on one machine: does what is decided, and tells what happens.

It writes down how the workflow stands before it does anything about it. A runner that is started again reads that,
looks at what there is, and goes on: a life that was to begin begins, one that runs is waited for, one that has ended is
told.
"""

from __future__ import annotations

import asyncio
import datetime
import os
import subprocess
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec

from holdfast.checkpoint.errors import CheckpointError
from holdfast.workflow import deciding, templates, transfers
from holdfast.workflow.deciding import Action, Begin, Ended, Event, Prepare, Prepared, Progressed, Stop, Tick
from holdfast.workflow.lives import Life
from holdfast.workflow.spec import Task, Workflow
from holdfast.workflow.standing import PREPARING, RUNNING, STOPPING, Node, Standing

GRACE_S = 10.0
RETRY_S = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0)  # of transfers that fail; the last again and again


class Submitted(msgspec.Struct, frozen=True):
    """What was asked for: `workflow.json`, which never changes."""

    id: str
    workflow: Workflow
    nodes: tuple[Node, ...]
    private: bool
    at: str


class Record(msgspec.Struct):
    """All of a workflow. How it stands is in `standing.json`."""

    submitted: Submitted
    standing: Standing

    @property
    def id(self) -> str:
        return self.submitted.id

    @property
    def workflow(self) -> Workflow:
        return self.submitted.workflow

    @property
    def nodes(self) -> tuple[Node, ...]:
        return self.submitted.nodes


class Runner:
    def __init__(self, folder: Path, record: Record, changed: Callable[[Standing], None], say: Callable[[str], None]):
        self._folder, self._record = folder, record
        self._changed, self._say = changed, say
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._works: set[asyncio.Task[None]] = set()
        self._failed: BaseException | None = None
        self._begun: dict[tuple[str, int], asyncio.Event] = {}
        self._shells: list[subprocess.Popen[bytes]] = []
        self._uploads: dict[tuple[str, int], list[transfers.Upload]] = {}
        self._moved = time.time() - time.monotonic()  # times in the record are the wall's, which a restart knows

    # -- the loop -----------------------------------------------------------------------------------------------------

    async def run(self) -> int:
        self._find_again()
        self._events.put_nowait(Tick())
        while not deciding.is_over(self._record.standing):
            events = [await self._next()]
            while not self._events.empty():
                events.append(self._events.get_nowait())
            if self._failed is not None:
                raise self._failed
            self._decide(events)
        for work in self._works:
            work.cancel()
        await asyncio.gather(*self._works, return_exceptions=True)
        return deciding.exit_code(self._record.workflow, self._record.standing)

    def cancel(self) -> None:
        self._events.put_nowait(deciding.Cancel())

    async def _next(self) -> Event:
        now_s = self._now_s()
        due_s = deciding.next_s(self._record.workflow, self._record.standing, now_s)
        try:
            wait_s = None if due_s is None else due_s - now_s
            return await asyncio.wait_for(self._events.get(), wait_s)
        except TimeoutError:
            return Tick()

    def _decide(self, events: list[Event]) -> None:
        """What several lead to is written down once."""
        record, before = self._record, self._record.standing
        due: list[Action] = []
        for event in events:
            stands, actions = deciding.decide(record.workflow, record.standing, self._now_s(), event, record.nodes)
            record.standing = stands
            due += actions
        if record.standing != before:
            save(self._folder, record.standing)
            self._changed(record.standing)
        for action in due:
            self._do(action)

    def _now_s(self) -> float:
        return time.monotonic() + self._moved

    def _find_again(self) -> None:
        """What an earlier runner has left."""
        for name, task in self._record.standing.tasks.items():
            if task.state == PREPARING:
                self._do(Prepare(name, task.attempt, task.node, task.gpus))
            elif task.state == STOPPING and self._life(name, task.attempt).forbid():
                self._tell(Ended(name, task.attempt, 143, "stopped before it began"))
            elif task.state in (RUNNING, STOPPING):
                self._begun[name, task.attempt] = asyncio.Event()
                self._work(self._live(self._task(name), task.attempt))
                if task.state == STOPPING:
                    self._do(Stop(name, task.attempt, task.why))

    # -- actions ------------------------------------------------------------------------------------------------------

    def _do(self, action: Action) -> None:
        match action:
            case Prepare(name, attempt):
                self._work(self._prepare(self._task(name), attempt))
            case Begin(name, attempt):
                self._begun[name, attempt] = asyncio.Event()
                self._work(self._live(self._task(name), attempt))
            case Stop(name, attempt):
                self._work(self._stop(name, attempt))

    def _work(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._works.add(task)
        task.add_done_callback(self._worked)

    def _worked(self, task: asyncio.Task[None]) -> None:
        self._works.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._failed = task.exception()  # a mistake of ours; tasks go on, and another runner may do better
            self._events.put_nowait(Tick())

    async def _prepare(self, task: Task, attempt: int) -> None:
        life = self._life(task.name, attempt)
        try:
            await asyncio.to_thread(self._fill, task, life)
        except (OSError, CheckpointError) as failure:
            self._tell(Ended(task.name, attempt, None, f"it could not be prepared: {failure}"))
        else:
            self._tell(Prepared(task.name, attempt))

    def _fill(self, task: Task, life: Life) -> None:
        life.make()
        known = self._known(task, life)
        for at, given in enumerate(task.inputs):
            url = given.url or self._output_url(given.task)
            transfers.fetch(url, life.path(f"/tmp/.holdfast/inputs/{at}"), given.regex)
        for file in task.files:
            if file.contents is not None:
                life.put(file.path, templates.fill(life.text(file.contents), known).encode())
            else:
                assert file.local is not None
                life.put(file.path, Path(file.local).read_bytes())

    async def _live(self, task: Task, attempt: int) -> None:
        """Through a life, also one that another runner has begun."""
        life = self._life(task.name, attempt)
        if life.code() is None:
            if not life.has_begun:
                known = self._known(task, life)
                command = [templates.fill(life.text(text), known) for text in (*task.command, *task.args)]
                environment = self._environment(task, attempt, known)
                self._shells.append(await asyncio.to_thread(life.start, command, environment))
            self._begun[task.name, attempt].set()
            uploading = asyncio.create_task(self._upload_often(task, attempt))
            await self._ended(life)
            self._reap()
            uploading.cancel()
            await asyncio.gather(uploading, return_exceptions=True)
        self._begun[task.name, attempt].set()
        code, text = life.code(), ""
        if code is None or not life.private:
            await asyncio.to_thread(life.sweep)
        if code is None:
            text = "all of it was killed"
        await self._upload_checkpoints(task, attempt)
        if failed := await self._upload_output(task, attempt):
            code, text = None, f"its output could not be uploaded: {failed}"
        self._tell(Ended(task.name, attempt, code, text))

    def _reap(self) -> None:
        self._shells = [shell for shell in self._shells if shell.poll() is None]

    async def _ended(self, life: Life) -> None:
        """Until its shell is gone."""
        try:
            fd = os.pidfd_open(life.pid() or 0)
        except (ProcessLookupError, OSError):
            return
        gone = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(fd, gone.set)
        try:
            await gone.wait()
        finally:
            loop.remove_reader(fd)
            os.close(fd)

    async def _stop(self, name: str, attempt: int) -> None:
        life = self._life(name, attempt)
        if (begun := self._begun.get((name, attempt))) is None:
            self._tell(Ended(name, attempt, 143, "stopped before it began"))
            return
        await begun.wait()
        life.ask()
        await asyncio.sleep(GRACE_S)
        life.kill()

    # -- transfers ----------------------------------------------------------------------------------------------------

    async def _upload_often(self, task: Task, attempt: int) -> None:
        await asyncio.gather(*(self._upload_one(task, attempt, at) for at in range(len(task.checkpoints))))

    async def _upload_one(self, task: Task, attempt: int, at: int) -> None:
        failed = 0
        while True:
            wait_s = RETRY_S[min(failed, len(RETRY_S)) - 1] if failed else task.checkpoints[at].frequency_s
            await asyncio.sleep(wait_s)
            failed = 0 if await self._upload(task, attempt, at, last=False) else failed + 1

    async def _upload_checkpoints(self, task: Task, attempt: int) -> None:
        """Whoever comes next begins with this, so it is worth some time."""
        for at in range(len(task.checkpoints)):
            for wait_s in RETRY_S:
                if await self._upload(task, attempt, at, last=True):
                    break
                await asyncio.sleep(wait_s)

    async def _upload_output(self, task: Task, attempt: int) -> str:
        """What went wrong, or ''."""
        output = self._life(task.name, attempt).path("/tmp/.holdfast/output")
        places = [(given.url, given.regex) for given in task.outputs]
        if any(task.name in group.after for group in self._record.workflow.groups):
            places.append((self._output_url(task.name), ""))
        failed = ""
        for url, regex in places:
            for wait_s in RETRY_S:
                try:
                    await asyncio.to_thread(_upload_once, output, url, regex)
                    break
                except (OSError, CheckpointError) as failure:
                    failed = str(failure)
                    self._say(f"{task.name}: its output could not be uploaded, and is tried again: {failed}")
                    await asyncio.sleep(wait_s)
            else:
                return failed
        return ""

    def _output_url(self, task: str) -> str:
        """Where others find what it has made."""
        return f"file://{self._folder}/outputs/{task}"

    async def _upload(self, task: Task, attempt: int, at: int, last: bool) -> bool:
        uploads = self._uploads.setdefault((task.name, attempt), self._uploads_of(task, attempt))
        try:
            done = await asyncio.to_thread(uploads[at].run, last)
        except (OSError, CheckpointError) as failure:
            self._say(f"{task.name}: {task.checkpoints[at].path} could not be uploaded, and is tried again: {failure}")
            return False
        if done.files:
            now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            self._tell(Progressed(task.name, attempt, now))
        return True

    def _uploads_of(self, task: Task, attempt: int) -> list[transfers.Upload]:
        life = self._life(task.name, attempt)
        return [
            transfers.Upload(life.path(given.path), f"{given.url}/{os.path.basename(given.path)}", given.regex)
            for given in task.checkpoints
        ]

    # -- what a task is told ------------------------------------------------------------------------------------------

    def _known(self, task: Task, life: Life) -> dict[str, str]:
        """What tokens stand for. Each task has an address of its own, in all of its lives."""
        known = {"workflow_id": self._record.id, "uuid": self._record.id, "output": life.own("output")}
        for at, name in enumerate(self._record.standing.tasks):
            known[f"host:{name}"] = f"127.{1 + at // 62500}.{at // 250 % 250}.{2 + at % 250}"
        for at, given in enumerate(task.inputs):
            known[f"input:{at}"] = life.own(f"inputs/{at}")
            if given.task:
                known[f"input:{given.task}"] = known[f"input:{at}"]
        return known

    def _environment(self, task: Task, attempt: int, known: dict[str, str]) -> dict[str, str]:
        stands = self._record.standing.tasks[task.name]
        given = {name: templates.fill(value, known) for name, value in task.environment.items()}
        ours = {
            "HOLDFAST_WORKFLOW_ID": self._record.id,
            "HOLDFAST_TASK": task.name,
            "HOLDFAST_ATTEMPT": str(attempt),
            "HOLDFAST_NODE": stands.node,
        }
        if any(node.gpus for node in self._record.nodes):
            ours["CUDA_VISIBLE_DEVICES"] = ",".join(stands.gpus)
        return {**os.environ, **ours, **given}

    def _task(self, name: str) -> Task:
        return self._record.workflow.task(name)

    def _life(self, name: str, attempt: int) -> Life:
        return Life(self._folder / "tasks" / name / str(attempt), self._record.submitted.private)

    def _tell(self, event: Event) -> None:
        self._events.put_nowait(event)


def _upload_once(folder: Path, url: str, regex: str) -> None:
    transfers.Upload(folder, url, regex).run(writers_gone=True)


def save(folder: Path, what: Submitted | Standing) -> None:
    """Whole or not at all, and on disk: what follows is done because of it."""
    path = folder / ("standing.json" if isinstance(what, Standing) else "workflow.json")
    with open(path.with_suffix(".part"), "wb") as file:
        file.write(msgspec.json.encode(what))
        file.flush()
        os.fsync(file.fileno())
    os.replace(path.with_suffix(".part"), path)


def load(folder: Path) -> Record:
    submitted = msgspec.json.decode((folder / "workflow.json").read_bytes(), type=Submitted)
    standing = msgspec.json.decode((folder / "standing.json").read_bytes(), type=Standing)
    return Record(submitted, standing)
