"""One life of a task, from its inputs to its last upload, on whatever machine it is."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import functools
import itertools
import os
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path

import msgspec

from holdfast import verdict
from holdfast.checkpoint.errors import CheckpointError
from holdfast.checkpoint.storage import StorageError
from holdfast.workflow import templates, transfers
from holdfast.workflow.beside import HERE, Beside, place_of
from holdfast.workflow.deciding import Ended, Event, Progressed
from holdfast.workflow.lives import Life
from holdfast.workflow.record import Submitted
from holdfast.workflow.spec import Task

GRACE_S = 10.0
ASK_S = 0.1  # then again: what has just begun may not have heard it
RETRY_S = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0)  # of transfers that fail; the last again and again
LAST_S = 600.0  # for what a life leaves to the next
INPUT_S = 120.0  # then another node may do better


class Known(msgspec.Struct, frozen=True):
    """What a task is told of where it runs."""

    hosts: Mapping[str, str]  # the address of each task
    environment: Mapping[str, str]


class Living:
    """`known` is asked for when it is needed: an address may not be there before."""

    def __init__(
        self,
        submitted: Submitted,
        folder: Path,
        name: str,
        attempt: int,
        life: Life,
        known: Callable[[], Known],
        tell: Callable[[Event], None],
        say: Callable[[str], None],
        beside: Beside | None = None,
    ) -> None:
        """`folder`: of the workflow, which all of its machines see. `beside`: of all lives of this process."""
        self._submitted, self._folder = submitted, folder
        self._task: Task = submitted.workflow.task(name)
        self._attempt, self._life = attempt, life
        self._known, self._tell, self._say = known, tell, say
        self._uploads: list[transfers.Upload] | None = None
        self._shell: subprocess.Popen[bytes] | None = None
        self._beside = beside or Beside()
        self._begun, self._over = asyncio.Event(), asyncio.Event()
        self._failing: dict[str, float] = {}  # transfers, and since when

    # -- its phases ---------------------------------------------------------------------------------------------------

    def prepare(self) -> str:
        """Its folder, with inputs and files. Returns what went wrong, or ''."""
        try:
            self._fill()
        except (OSError, CheckpointError) as failure:
            return f"it could not be prepared: {failure}"
        return ""

    def _fill(self) -> None:
        life, task = self._life, self._task
        life.make()
        for at, given in enumerate(task.inputs):
            url = given.url or self._output_url(given.task)
            self._fetch(url, life.path(f"/tmp/.holdfast/inputs/{at}"), given.regex)
        tokens = self._tokens(self._known())
        for file in task.files:
            if file.contents is not None:
                life.put(file.path, templates.fill(life.text(file.contents), tokens).encode())
            else:
                assert file.local is not None
                life.put(file.path, Path(file.local).read_bytes())

    def _fetch(self, url: str, into: Path, regex: str) -> None:
        """In a thread. A store that is down for a while is no reason to try it from another node."""
        end_s = time.monotonic() + INPUT_S
        for wait_s in _waits_s():
            try:
                transfers.fetch(url, into, regex)
            except StorageError as failure:
                if not transfers.may_pass(failure) or time.monotonic() + wait_s > end_s:
                    raise
                self._fails(f"{url} could not be fetched", failure)
                time.sleep(wait_s)
            else:
                self._works(f"{url} could not be fetched", "it is fetched")
                return

    async def live(self) -> Ended:
        """From its start, or from wherever an earlier runner has left it, to its last upload."""
        life = self._life
        if life.code() is None:
            try:
                if not life.has_begun:
                    await self._beside.run(HERE, self._start)
            except OSError as failure:
                self._begun.set()
                self._over.set()
                return Ended(self._task.name, self._attempt, None, f"it could not be started: {failure}")
            self._begun.set()
            await self._until_over()
        self._begun.set()
        self._over.set()
        code, text = life.code(), ""
        if code is None or not life.private:
            await self._beside.sweep(life.folder)
        if code is None:
            text = "all of it was killed"
        for at in range(len(self._task.checkpoints)):
            await self._retry(functools.partial(self._upload, at, last=True))
        if failed := await self._upload_output():
            code, text = None, f"its output could not be uploaded: {failed}"
        return Ended(self._task.name, self._attempt, code, text, verdict.read(life.path("/tmp/.holdfast/verdict")))

    async def _until_over(self) -> None:
        """An upload that is under way comes to its end: a second one beside it would spoil both."""
        async with asyncio.TaskGroup() as group:
            for at in range(len(self._task.checkpoints)):
                group.create_task(self._upload_often(at))
            await _until_gone(self._life)
            if self._shell is not None:
                self._shell.wait()
            self._over.set()

    def _start(self) -> None:
        known = self._known()
        tokens = self._tokens(known)
        command = [templates.fill(self._life.text(text), tokens) for text in (*self._task.command, *self._task.args)]
        given = {name: templates.fill(value, tokens) for name, value in self._task.environment.items()}
        ours = {
            "HOLDFAST_WORKFLOW_ID": self._submitted.id,
            "HOLDFAST_TASK": self._task.name,
            "HOLDFAST_ATTEMPT": str(self._attempt),
            verdict.VARIABLE: self._life.own("verdict"),
        }
        self._shell = self._life.start(command, {**os.environ, **ours, **known.environment, **given})

    async def stop(self, patience_s: float = 0.0) -> None:
        """Told once it lives, and has not ended by itself; what it does within the grace is its own."""
        await self._begun.wait()
        await self._over_within(patience_s)
        end_s = time.monotonic() + GRACE_S
        wait_s = ASK_S
        while not self._over.is_set():
            if (left_s := end_s - time.monotonic()) > 0:
                self._life.ask()
            else:
                self._life.kill()
            await self._over_within(min(wait_s, left_s) if left_s > 0 else GRACE_S)
            wait_s *= 2

    async def _over_within(self, wait_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._over.wait()
        return self._over.is_set()

    def _tokens(self, known: Known) -> dict[str, str]:
        tokens = {f"host:{name}": address for name, address in known.hosts.items()}
        tokens |= {"workflow_id": self._submitted.id, "uuid": self._submitted.id, "output": self._life.own("output")}
        for at, given in enumerate(self._task.inputs):
            tokens[f"input:{at}"] = self._life.own(f"inputs/{at}")
            if given.task:
                tokens[f"input:{given.task}"] = tokens[f"input:{at}"]
        return tokens

    # -- transfers ----------------------------------------------------------------------------------------------------

    async def _upload_often(self, at: int) -> None:
        waits_s = _waits_s()
        wait_s = self._task.checkpoints[at].frequency_s
        while not await self._over_within(wait_s):
            if await self._upload(at, last=False):
                wait_s = next(waits_s)
            else:
                waits_s, wait_s = _waits_s(), self._task.checkpoints[at].frequency_s

    async def _retry(self, work: Callable[[], Awaitable[str]]) -> str:
        """Whoever comes next begins with this, so it is worth some time. What went wrong, or ''."""
        end_s = time.monotonic() + LAST_S
        for wait_s in _waits_s():
            if not (failed := await work()):
                return ""
            if time.monotonic() + wait_s > end_s:
                break
            await asyncio.sleep(wait_s)
        self._say(f"{self._task.name}: given up after {LAST_S:g} s; what it has made is in {self._life.folder}")
        return failed

    async def _upload(self, at: int, last: bool) -> str:
        """What went wrong, or ''."""
        given = self._task.checkpoints[at]
        what = f"{given.path} could not be uploaded"
        try:
            if self._uploads is None:
                self._uploads = self._open_uploads()
            done = await self._beside.run(place_of(given.url), self._uploads[at].run, last)
        except (OSError, CheckpointError) as failure:
            self._fails(what, failure)
            return str(failure)
        if not done.left_out:  # a file that is being written is not asked for, and nothing is known then
            self._works(what, "it is uploaded")
        if done.files:
            now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            self._tell(Progressed(self._task.name, self._attempt, now))
        return ""

    def _fails(self, what: str, failure: Exception) -> None:
        """Told once, however often it is tried."""
        if what not in self._failing:
            self._failing[what] = time.monotonic()
            self._say(f"{self._task.name}: {what}, and is tried again: {failure}")

    def _works(self, what: str, now: str) -> None:
        if (since_s := self._failing.pop(what, None)) is not None:
            self._say(f"{self._task.name}: {what}; after {time.monotonic() - since_s:.0f} s {now}")

    def _open_uploads(self) -> list[transfers.Upload]:
        return [
            transfers.Upload(self._life.path(given.path), f"{given.url}/{os.path.basename(given.path)}", given.regex)
            for given in self._task.checkpoints
        ]

    async def _upload_output(self) -> str:
        """What went wrong, or ''."""
        output = self._life.path("/tmp/.holdfast/output")
        name = self._task.name
        places = [(given.url, given.regex) for given in self._task.outputs]
        if any(name in group.after for group in self._submitted.workflow.groups):
            places.append((self._output_url(name), ""))
        for url, regex in places:
            if failed := await self._retry(functools.partial(self._upload_once, output, url, regex)):
                return failed
        return ""

    async def _upload_once(self, output: Path, url: str, regex: str) -> str:
        what = "its output could not be uploaded"
        try:
            await self._beside.run(place_of(url), lambda: transfers.Upload(output, url, regex).run(writers_gone=True))
        except (OSError, CheckpointError) as failure:
            self._fails(what, failure)
            return str(failure)
        self._works(what, "it is uploaded")
        return ""

    def _output_url(self, task: str) -> str:
        """Where others find what it has made."""
        return f"file://{self._folder}/outputs/{task}"


def _waits_s() -> Iterator[float]:
    return itertools.chain(RETRY_S, itertools.repeat(RETRY_S[-1]))


async def _until_gone(life: Life) -> None:
    """Its shell."""
    life.settle()
    if (pid := life.pid()) is None:
        return
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    gone = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(fd, gone.set)
    try:
        if life.pid() is not None:  # that number is still its own
            await gone.wait()
    finally:
        loop.remove_reader(fd)
        os.close(fd)
