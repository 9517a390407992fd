"""One life of a task, from its inputs to its last upload, on whatever machine it is."""

from __future__ import annotations

import asyncio
import datetime
import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from holdfast.checkpoint.errors import CheckpointError
from holdfast.workflow import templates, transfers
from holdfast.workflow.deciding import Ended, Event, Progressed
from holdfast.workflow.lives import Life
from holdfast.workflow.record import Submitted
from holdfast.workflow.spec import Task

GRACE_S = 10.0
RETRY_S = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0)  # of transfers that fail; the last again and again


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
    ) -> None:
        """`folder`: of the workflow, which all of its machines see."""
        self._submitted, self._folder = submitted, folder
        self._task: Task = submitted.workflow.task(name)
        self._attempt, self._life = attempt, life
        self._known, self._tell, self._say = known, tell, say
        self._uploads: list[transfers.Upload] | None = None
        self._shell: subprocess.Popen[bytes] | None = None
        self._begun = asyncio.Event()

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
            transfers.fetch(url, life.path(f"/tmp/.holdfast/inputs/{at}"), given.regex)
        tokens = self._tokens(self._known())
        for file in task.files:
            if file.contents is not None:
                life.put(file.path, templates.fill(life.text(file.contents), tokens).encode())
            else:
                assert file.local is not None
                life.put(file.path, Path(file.local).read_bytes())

    async def live(self) -> Ended:
        """From its start, or from wherever an earlier runner has left it, to its last upload."""
        life = self._life
        if life.code() is None:
            if not life.has_begun:
                await asyncio.to_thread(self._start)
            self._begun.set()
            uploading = asyncio.create_task(self._upload_often())
            await _until_gone(life)
            if self._shell is not None:
                self._shell.wait()
            uploading.cancel()
            await asyncio.gather(uploading, return_exceptions=True)
        self._begun.set()
        code, text = life.code(), ""
        if code is None or not life.private:
            await asyncio.to_thread(life.sweep)
        if code is None:
            text = "all of it was killed"
        await self._upload_checkpoints()
        if failed := await self._upload_output():
            code, text = None, f"its output could not be uploaded: {failed}"
        return Ended(self._task.name, self._attempt, code, text)

    def _start(self) -> None:
        known = self._known()
        tokens = self._tokens(known)
        command = [templates.fill(self._life.text(text), tokens) for text in (*self._task.command, *self._task.args)]
        given = {name: templates.fill(value, tokens) for name, value in self._task.environment.items()}
        ours = {
            "HOLDFAST_WORKFLOW_ID": self._submitted.id,
            "HOLDFAST_TASK": self._task.name,
            "HOLDFAST_ATTEMPT": str(self._attempt),
        }
        self._shell = self._life.start(command, {**os.environ, **ours, **known.environment, **given})

    async def stop(self) -> None:
        """Told once it lives; what it does within the grace is its own."""
        await self._begun.wait()
        self._life.ask()
        await asyncio.sleep(GRACE_S)
        self._life.kill()

    def _tokens(self, known: Known) -> dict[str, str]:
        tokens = {f"host:{name}": address for name, address in known.hosts.items()}
        tokens |= {"workflow_id": self._submitted.id, "uuid": self._submitted.id, "output": self._life.own("output")}
        for at, given in enumerate(self._task.inputs):
            tokens[f"input:{at}"] = self._life.own(f"inputs/{at}")
            if given.task:
                tokens[f"input:{given.task}"] = tokens[f"input:{at}"]
        return tokens

    # -- transfers ----------------------------------------------------------------------------------------------------

    async def _upload_often(self) -> None:
        await asyncio.gather(*(self._upload_one(at) for at in range(len(self._task.checkpoints))))

    async def _upload_one(self, at: int) -> None:
        failed = 0
        while True:
            wait_s = RETRY_S[min(failed, len(RETRY_S)) - 1] if failed else self._task.checkpoints[at].frequency_s
            await asyncio.sleep(wait_s)
            failed = 0 if await self._upload(at, last=False) else failed + 1

    async def _upload_checkpoints(self) -> None:
        """Whoever comes next begins with this, so it is worth some time."""
        for at in range(len(self._task.checkpoints)):
            for wait_s in RETRY_S:
                if await self._upload(at, last=True):
                    break
                await asyncio.sleep(wait_s)

    async def _upload(self, at: int, last: bool) -> bool:
        given = self._task.checkpoints[at]
        try:
            if self._uploads is None:
                self._uploads = self._open_uploads()
            done = await asyncio.to_thread(self._uploads[at].run, last)
        except (OSError, CheckpointError) as failure:
            self._say(f"{self._task.name}: {given.path} could not be uploaded, and is tried again: {failure}")
            return False
        if done.files:
            now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            self._tell(Progressed(self._task.name, self._attempt, now))
        return True

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
        failed = ""
        for url, regex in places:
            for wait_s in RETRY_S:
                try:
                    await asyncio.to_thread(_upload_once, output, url, regex)
                    break
                except (OSError, CheckpointError) as failure:
                    failed = str(failure)
                    self._say(f"{name}: its output could not be uploaded, and is tried again: {failed}")
                    await asyncio.sleep(wait_s)
            else:
                return failed
        return ""

    def _output_url(self, task: str) -> str:
        """Where others find what it has made."""
        return f"file://{self._folder}/outputs/{task}"


def _upload_once(folder: Path, url: str, regex: str) -> None:
    transfers.Upload(folder, url, regex).run(writers_gone=True)


async def _until_gone(life: Life) -> None:
    """Its shell."""
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
