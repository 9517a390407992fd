"""Tasks on a Slurm cluster, as the runner sees them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from holdfast.workflow.deciding import (
    Action,
    Cancel,
    Ended,
    Event,
    Placed,
    Prepare,
    Prepared,
    Progressed,
    Requeued,
    Stop,
)
from holdfast.workflow.record import Record, write
from holdfast.workflow.runner import Works
from holdfast.workflow.slurm import commands, letters
from holdfast.workflow.slurm.commands import Job
from holdfast.workflow.slurm.places import Given, Member, Places, read_text
from holdfast.workflow.slurm.requests import SCRIPT, excluded, options
from holdfast.workflow.standing import ALIVE, STOPPING

LOOK_S = 2.0  # at the folder, for letters that were lost
ASK_S = 10.0  # Slurm, which has many to answer
ASK_SOON_S = 0.5  # when it is about to have news
SOON = 60  # times
RETRY_S = 5.0


class Slurm:
    nodes = None  # it gives them out itself

    def __init__(
        self, folder: Path, record: Record, works: Works, tell: Callable[[Event], None], say: Callable[[str], None]
    ) -> None:
        self._record, self._works = record, works
        self._tell, self._say = tell, say
        self._places = Places(folder)
        self._post = letters.Post(folder)
        self._jobs: list[Given] = self._places.given()
        self._said = ""
        self._canceled: set[int] = set()  # jobs, by this
        self._over: set[int] = set()  # jobs, as Slurm has said
        self._soon = 0  # how often it is asked before long
        self._news = asyncio.Event()

    def find_again(self) -> None:
        self._works.add(self._watch())
        for given in self._jobs:
            if self._alive(given) and self._places.id(given.number) is None:
                self._works.add(self._submit(given))
        alive = [(name, task) for name, task in self._record.standing.tasks.items() if task.state in ALIVE]
        # The runner was killed before it had even written their job down. Those that began together do so again.
        self.do([Prepare(name, task.attempt, "", ()) for name, task in alive if self._job_of(name) is None])
        for name, task in self._record.standing.tasks.items():
            if task.state == STOPPING:
                self.do([Stop(name, task.attempt, task.why)])

    def do(self, actions: Sequence[Action]) -> None:
        begin: dict[str, list[Member]] = {}
        for action in actions:
            match action:
                case Prepare(name, attempt):
                    begin.setdefault(self._group_of(name), []).append(Member(name, attempt))
                case Stop(name, attempt, _, patience_s):
                    self._stop(name, attempt, patience_s)
        for group, members in begin.items():
            given = self._places.add(group, tuple(members))
            self._jobs.append(given)
            self._works.add(self._submit(given))

    # -- jobs ---------------------------------------------------------------------------------------------------------

    async def _submit(self, given: Given) -> None:
        """Once: an earlier runner may have done it, and been killed before it could say so."""
        while self._alive(given):
            try:
                job = await asyncio.to_thread(self._submit_once, given)
            except commands.Failed as failure:
                if not failure.passing:
                    self._give_up(given, str(failure))
                    return
                self._complain(f"{failure}; it is tried again")
                await asyncio.sleep(RETRY_S)
            else:
                self._places.claim(given.number, job)
                return

    def _submit_once(self, given: Given) -> int:
        name = f"{self._record.id}.{given.number}"
        for job in commands.jobs().values():
            if job.name == name and not job.over:
                return job.id
        folder = self._places.job(given.number)
        group = next(group for group in self._record.workflow.groups if group.name == given.group)
        tasks = [task for task in group.tasks if any(task.name == member.task for member in given.members)]
        partition = self._record.submitted.sbatch.get("SBATCH_PARTITION", "")
        leave_out = excluded(tasks, self._record.standing, commands.nodes(partition))
        script = folder / "job.sh"
        inner = [sys.executable, "-m", "holdfast.workflow.slurm.job", str(self._places.folder), str(given.number)]
        write(script, SCRIPT.format(command=shlex.join(inner)).encode())
        asked = [f"--job-name={name}", f"--output={folder}/out", *options(tasks, leave_out)]
        return commands.submit(asked, str(script), self._record.submitted.sbatch)

    def _give_up(self, given: Given, text: str) -> None:
        for member in given.members:
            self._tell(Ended(member.task, self._attempt(member.task), None, text, blames=False))

    def _stop(self, name: str, attempt: int, patience_s: float) -> None:
        """By a letter, or, where it still waits in the queue, by taking it out of that."""
        life = self._places.life(name, attempt)
        life.mkdir(parents=True, exist_ok=True)
        write(life / "stop", f"{patience_s:g}".encode())
        self._post.send(Stop(name, attempt, ""), life / "address")
        if (given := self._job_of(name)) is None:
            return
        if self._places.id(given.number) in self._over:
            self._tell(Ended(name, attempt, 143, "stopped"))
        elif not (life / "node").exists():
            self._works.add(self._cancel(given))

    async def _cancel(self, given: Given) -> None:
        """A job none of whose tasks has begun."""
        job = self._places.id(given.number)
        if job is None or job in self._canceled or not all(self._is_stopping(member.task) for member in given.members):
            return
        self._canceled.add(job)
        try:
            await asyncio.to_thread(commands.cancel, job)
            await self._look()
        except commands.Failed as failure:
            self._canceled.discard(job)
            self._complain(str(failure))

    # -- what happens -------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        listening = await self._post.listen(self._places.runner, self._got)
        loop = asyncio.get_running_loop()
        asked_s = 0.0
        try:
            while True:
                self._see_files()
                if loop.time() >= asked_s + (ASK_SOON_S if self._soon else ASK_S):
                    self._soon = max(0, self._soon - 1)
                    asked_s = loop.time()
                    await self._ask()
                self._news.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._news.wait(), ASK_SOON_S if self._soon else LOOK_S)
        finally:
            listening.close()

    def _got(self, letter: letters.Letter) -> None:
        if isinstance(letter, letters.Ask):
            self._soon = SOON
            self._news.set()
        elif not isinstance(letter, Stop) and letter.task in self._record.standing.tasks:
            self._tell(letter)

    async def _ask(self) -> None:
        try:
            await self._look()
        except commands.Failed as failure:
            self._complain(str(failure))
        else:
            self._said = ""

    async def _look(self) -> None:
        """Into Slurm's queue. A job that was submitted after the question is not in the answer, and yet not gone."""
        asked = {self._places.id(given.number) for given in self._jobs}
        jobs = await asyncio.to_thread(commands.jobs)
        self._see_jobs({number: jobs.get(number) for number in asked if number is not None})

    def _see_files(self) -> None:
        for given in self._jobs:
            if self._alive(given):
                self._see_lives(given)

    def _see_lives(self, given: Given) -> list[str]:
        """Those that are alive and have not said that they ended. Who ended first is told first."""
        restarts = self._places.restarts(given.number)
        ends: list[tuple[int, Ended]] = []
        silent: list[str] = []
        for member in given.members:
            self._see_life(member, restarts)
            if self._record.standing.tasks[member.task].state in ALIVE:
                if (ended := self._places.ended(member.task, member.attempt + restarts)) is None:
                    silent.append(member.task)
                else:
                    ends.append((self._places.ended_at_ns(member.task, member.attempt + restarts), ended))
        for _, ended in sorted(ends, key=lambda end: end[0]):
            self._tell(ended)
        return silent

    def _see_life(self, member: Member, restarts: int) -> None:
        """All that is written of it, and not known yet."""
        name, task = member.task, self._record.standing.tasks[member.task]
        for attempt in range(task.attempt, member.attempt + restarts):
            self._tell(Requeued(name, attempt, "Slurm has begun its job anew"))
        attempt = max(task.attempt, member.attempt + restarts)
        life = self._places.life(name, attempt)
        if (node := read_text(life / "node")) and node != task.node:
            self._tell(Placed(name, attempt, node))
        if (life / "prepared").exists():
            self._tell(Prepared(name, attempt))
        if (at := read_text(life / "checkpoint")) and at > task.checkpoint_at:
            self._tell(Progressed(name, attempt, at))

    def _see_jobs(self, jobs: dict[int, Job | None]) -> None:
        """Those that are over, and whose tasks have not said so."""
        for given in self._jobs:
            number = self._places.id(given.number)
            if number is None or number not in jobs or not self._alive(given):
                continue
            job = jobs[number]
            if job is None or job.over:
                self._soon = 0
                self._over.add(number)
                self._is_over(given, job)

    def _is_over(self, given: Given, job: Job | None) -> None:
        state = job.state if job is not None else "gone from its queue"
        for member in given.members:
            self._places.refresh(member.task, self._attempt(member.task))
        silent = self._see_lives(given)
        for name in silent:
            if self._is_stopping(name):
                self._tell(Ended(name, self._attempt(name), 143, "stopped"))
            elif state == "CANCELLED":
                self._tell(Cancel(given.group))
            else:
                blames = state in ("NODE_FAIL", "BOOT_FAIL")
                self._tell(Ended(name, self._attempt(name), None, f"its job in Slurm is {state}", blames))

    def _complain(self, text: str) -> None:
        """Once, however often it is tried."""
        if text != self._said:
            self._say(text)
            self._said = text

    # -- how it stands ------------------------------------------------------------------------------------------------

    def _alive(self, given: Given) -> bool:
        """Whether it is the job of some life."""
        return any(
            self._record.standing.tasks[member.task].state in ALIVE and self._job_of(member.task) is given
            for member in given.members
        )

    def _job_of(self, name: str) -> Given | None:
        """The last that has it, if that is of its present life: its first in this job, or one since Slurm began it
        anew."""
        attempt = self._attempt(name)
        for given in reversed(self._jobs):
            for member in given.members:
                if member.task == name:
                    later = attempt - member.attempt
                    began_anew = self._places.restarts(given.number) if later > 0 else 0
                    return given if later in range(began_anew + 1) else None
        return None

    def _is_stopping(self, name: str) -> bool:
        return self._record.standing.tasks[name].state == STOPPING

    def _attempt(self, name: str) -> int:
        return self._record.standing.tasks[name].attempt

    def _group_of(self, name: str) -> str:
        return next(
            group.name for group in self._record.workflow.groups if any(task.name == name for task in group.tasks)
        )


def environment() -> dict[str, str]:
    """What sbatch would read of ours: a partition, an account, a limit of time."""
    return {name: value for name, value in os.environ.items() if name.startswith("SBATCH_")}
