"""What runs in a job of Slurm, on its first node: `python -m holdfast.workflow.slurm.job FOLDER NUMBER`.

It knows all that it needs, so that Slurm may begin it anew at any time, and nobody else has to be there. When its time
is nearly over (SIGUSR1), its tasks are asked to end, their checkpoints are uploaded, and it puts itself into the queue
again. Two steps of srun make the barrier: none runs before all are prepared.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

import msgspec

from holdfast.workflow.deciding import Ended, Placed, Requeued, Stop
from holdfast.workflow.record import load, load_submitted, write
from holdfast.workflow.slurm import commands
from holdfast.workflow.slurm.letters import Ask, Letter, Post
from holdfast.workflow.slurm.places import ALLOCATION, Allocation, Given, Places

PREPARE, LIVE, BOTH = "prepare", "live", "both"
REQUEUE_TRIES = 10
REQUEUE_WAIT_S = 3.0


def main() -> int:
    folder, number = Path(sys.argv[1]), int(sys.argv[2])
    job, restart = int(os.environ["SLURM_JOB_ID"]), int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    places = Places(folder)
    given = places.read(number)
    if not places.claim(number, job):
        print(f"job {number} of {folder.name} is job {places.id(number)} of Slurm; this one ends")
        return 0
    if restart and _lead_has_ended(places, given, restart):
        print("the lead had ended before; nothing is left to do")
        return 0
    write(places.job(number) / "restarts", str(restart).encode())
    return asyncio.run(_Job(places, given, job, restart).run())


def _lead_has_ended(places: Places, given: Given, restart: int) -> bool:
    submitted = load_submitted(places.folder)
    lead = next(group for group in submitted.workflow.groups if group.name == given.group).lead.name
    first = next((member.attempt for member in given.members if member.task == lead), None)
    return first is not None and any(places.ended(lead, first + at) is not None for at in range(restart))


class _Job:
    def __init__(self, places: Places, given: Given, job: int, restart: int) -> None:
        self._places, self._given, self._job, self._restart = places, given, job, restart
        self._post = Post(places.folder)
        self._draining = False
        self._ending = asyncio.Event()
        self._attempts = {member.task: member.attempt + restart for member in given.members}

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, self._drain)
        loop.add_signal_handler(signal.SIGTERM, self._end)
        allocation = self._allocation()
        self._announce(allocation)
        submitted = load_submitted(self._places.folder)
        group = next(group for group in submitted.workflow.groups if group.name == self._given.group)
        for phase in (PREPARE, LIVE) if group.barrier else (BOTH,):
            failed = await self._srun(phase, allocation)
            if failed or self._draining or self._ending.is_set():
                break
        if self._draining and not self._ending.is_set():
            return await self._requeue()
        if not self._ending.is_set():
            self._end_the_rest("it was ended, and has not said how")
        return 0

    def _allocation(self) -> Allocation:
        nodes = commands.places(os.environ["SLURM_JOB_NODELIST"])
        hosts = {name: at.node for name, at in load(self._places.folder).standing.tasks.items() if at.node}
        mine = dict(zip(self._attempts, nodes, strict=False))
        hosts |= {name: address for name, (_, address) in mine.items()}
        return Allocation(self._given, self._restart, tuple(name for name, _ in nodes), hosts)

    def _announce(self, allocation: Allocation) -> None:
        why = f"Slurm has begun job {self._job} anew"
        for (name, attempt), node in zip(self._attempts.items(), allocation.nodes, strict=False):
            life = self._places.life(name, attempt)
            life.mkdir(parents=True, exist_ok=True)
            write(life / "node", node.encode())
            if self._restart:
                self._tell(Requeued(name, attempt - 1, why))
            self._tell(Placed(name, attempt, node))

    async def _srun(self, phase: str, allocation: Allocation) -> bool:
        """Whether it failed."""
        environment = {**os.environ, ALLOCATION: msgspec.json.encode(allocation).decode()}
        command = [
            *("srun", "--kill-on-bad-exit=0", "--wait=0", "--mpi=none", "--label"),
            *(f"--nodes={len(self._attempts)}", f"--ntasks={len(self._attempts)}"),
            *((f"--cpus-per-task={cpus}",) if (cpus := os.environ.get("SLURM_CPUS_PER_TASK")) else ()),
            *(sys.executable, "-m", "holdfast.workflow.slurm.task", str(self._places.folder), phase),
        ]
        step = await asyncio.create_subprocess_exec(*command, env=environment, start_new_session=True)
        return await step.wait() != 0

    # -- ends ---------------------------------------------------------------------------------------------------------

    def _drain(self) -> None:
        """By a letter to each: srun would hand a signal on to all that they have started, too."""
        self._draining = True
        for name, attempt in self._attempts.items():
            life = self._places.life(name, attempt)
            (life / "drain").touch()
            self._post.send(Stop(name, attempt, "its time is nearly over"), life / "address")

    def _end(self) -> None:
        """By scancel, a preemption or a limit. Slurm tells the tasks itself."""
        self._ending.set()
        self._tell(Ask())

    async def _requeue(self) -> int:
        print(f"job {self._job} puts itself into the queue again", flush=True)
        why = ""
        for _ in range(REQUEUE_TRIES):
            try:
                await asyncio.to_thread(commands.requeue, self._job)
            except commands.Failed as failure:
                why = str(failure)
                if not failure.passing:
                    break
                await asyncio.sleep(REQUEUE_WAIT_S)
            else:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._ending.wait(), commands.WAIT_S)  # by Slurm, which begins it anew
                return 0
        self._end_the_rest(f"its time was over, and it could not be requeued: {why}")
        return 1

    def _end_the_rest(self, text: str) -> None:
        """Those that were killed before they could say how they ended."""
        for name, attempt in self._attempts.items():
            if self._places.ended(name, attempt) is None:
                ended = Ended(name, attempt, None, text, blames=False)
                write(self._places.life(name, attempt) / "ended.json", msgspec.json.encode(ended))
                self._tell(ended)

    def _tell(self, letter: Letter) -> None:
        self._post.send(letter, self._places.runner)


if __name__ == "__main__":
    sys.exit(main())
