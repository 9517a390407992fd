"""A task in a job of Slurm, on its node: `python -m holdfast.workflow.slurm.task FOLDER prepare|live|both`.

Which one it is SLURM_PROCID says. Its /tmp is on the node; what others have to know is in the workflow's folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import msgspec

from holdfast.workflow import lives
from holdfast.workflow.deciding import Ended, Event, Prepared, Progressed
from holdfast.workflow.lives import Life
from holdfast.workflow.living import Known, Living
from holdfast.workflow.record import load_submitted, write
from holdfast.workflow.slurm.job import BOTH, PREPARE
from holdfast.workflow.slurm.letters import Letter, Post
from holdfast.workflow.slurm.places import ALLOCATION, Allocation, Places

LOOK_S = 5.0  # for a letter that was lost
ORDER_S, PERHAPS_S = 3.0, 0.2
KILLED = (128 + signal.SIGTERM, 128 + signal.SIGKILL)


def main() -> int:
    folder, phase = Path(sys.argv[1]), sys.argv[2]
    allocation = msgspec.json.decode(os.environ.pop(ALLOCATION), type=Allocation)
    return asyncio.run(_Task(Places(folder), allocation, int(os.environ["SLURM_PROCID"])).run(phase))


class _Task:
    def __init__(self, places: Places, allocation: Allocation, at: int) -> None:
        member = allocation.given.members[at]
        self._name, self._attempt = member.task, member.attempt + allocation.restart
        self._places, self._post = places, Post(places.folder)
        self._shared = places.life(self._name, self._attempt)
        self._own = _scratch() / _unique(places.folder) / self._name
        self._life = Life(self._own / str(self._attempt), lives.can_be_private(), self._shared)
        known = Known(allocation.hosts, {"HOLDFAST_NODE": allocation.nodes[at]})
        submitted = load_submitted(places.folder)
        self._living = Living(
            submitted, places.folder, self._name, self._attempt, self._life, lambda: known, self._tell, self._say
        )
        self._ordered, self._told = False, asyncio.Event()  # by Slurm, to end
        self._stopping: asyncio.Task[None] | None = None

    async def run(self, phase: str) -> int:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._end_by_slurm)
        if phase in (PREPARE, BOTH) and (failed := await self._prepare()):
            return failed
        return 0 if phase == PREPARE or self._ordered else await self._live()

    async def _prepare(self) -> int:
        if self._own.exists():  # what a life that was killed has left on this node
            await asyncio.to_thread(shutil.rmtree, self._own)
        if failed := await asyncio.to_thread(self._living.prepare):
            self._end(Ended(self._name, self._attempt, None, failed))
            return 1
        write(self._shared / "prepared", b"")
        self._tell(Prepared(self._name, self._attempt))
        return 0

    async def _live(self) -> int:
        listening = await self._post.listen(self._shared / "address", lambda letter: self._look())
        looking = asyncio.create_task(self._look_often())
        if self._look():
            ended = Ended(self._name, self._attempt, 143, "stopped before it began")
        else:
            ended = await self._living.live()
        if self._stopping is None and not self._ordered:
            # Slurm tells all processes of a step to end, one after the other, and this one may be the last to hear it.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ORDER_S if ended.code in KILLED else PERHAPS_S):
                    await self._told.wait()
        looking.cancel()
        listening.close()
        if not self._ordered:  # else Slurm knows what comes next
            self._end(ended)
        await asyncio.to_thread(self._clean_up)
        return 0

    def _clean_up(self) -> None:
        """Whatever it has left on this node, and folders that nobody else has something in."""
        shutil.rmtree(self._own)
        for folder in (self._own.parent, self._own.parent.parent):
            try:
                folder.rmdir()
            except OSError:
                return

    # -- it is told to end --------------------------------------------------------------------------------------------

    def _end_by_slurm(self) -> None:
        """By scancel, a preemption or a limit. Slurm has told all that it has started, too, and kills in the end."""
        self._ordered = True
        self._told.set()

    def _look(self) -> bool:
        """Whether it was told to end."""
        if (self._shared / "drain").exists():
            self._ordered = True
            self._stop()
        elif (stop := self._shared / "stop").exists():
            self._stop(float(stop.read_text()))
        return self._stopping is not None

    async def _look_often(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self._look()

    def _stop(self, patience_s: float = 0.0) -> None:
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._living.stop(patience_s))

    # -- what it tells ------------------------------------------------------------------------------------------------

    def _tell(self, event: Event) -> None:
        if isinstance(event, Progressed):
            write(self._shared / "checkpoint", event.at.encode())
        assert isinstance(event, Letter)
        self._post.send(event, self._places.runner)

    def _end(self, ended: Ended) -> None:
        write(self._shared / "ended.json", msgspec.json.encode(ended))
        self._tell(ended)

    def _say(self, text: str) -> None:
        print(text, flush=True)


def _unique(folder: Path) -> str:
    """Another folder of workflows may have one of the same name."""
    return f"{folder.name}-{hashlib.sha256(os.fsencode(folder)).hexdigest()[:8]}"


def _scratch() -> Path:
    """On this node, and fast."""
    return Path(os.environ.get("SLURM_TMPDIR") or tempfile.gettempdir(), f"holdfast-{os.getuid()}")


if __name__ == "__main__":
    sys.exit(main())
