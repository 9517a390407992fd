"""A campaign: one fault after the other as each comes due, each waited for until the job trains again."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from holdfast.chaos import faults
from holdfast.chaos.disk import NotHere
from holdfast.chaos.faults import Injected
from holdfast.chaos.hands import Hands, Mend
from holdfast.chaos.job import CHAOS, Job
from holdfast.chaos.kinds import KINDS, Answer, Hand
from holdfast.chaos.plan import Due
from holdfast.observe import record

ENDED = "ended.json"
LAST = "last"  # a file that is there once the job has come through the last fault
TICK_S = 0.02
LOOK_S = 0.1  # between two questions to an agent
STEPS_APART = 50  # a fault by time leaves so many before one at a step: two in one world are no measure of either
# What an agent does not find by itself in a step: signals to a rank come from outside unless a step is named.
_AT_A_STEP = (Hand.RANK, Hand.PROCESS)

Say = Callable[[str], None]


class Ended(msgspec.Struct, frozen=True):
    """How a campaign came to its end, as far as the job's record does not say."""

    code: int | None  # None: it had to be killed
    planned: int
    seed: int
    wall_s: float
    began_s: float
    passed_over: tuple[str, ...] = ()  # faults that could not be done, and why
    unanswered: tuple[int, ...] = ()
    leftovers: tuple[str, ...] = ()
    digest: str = ""


class Active(msgspec.Struct):
    """The fault that the campaign waits for."""

    due: Due
    since_s: float
    life: int
    generation: int
    injected: Injected | None = None
    mend: Mend | None = None


class Conductor:
    def __init__(
        self,
        folder: Path,
        job: Job,
        hands: Hands,
        dues: Sequence[Due],
        limit_s: float,
        say: Say,
        stopped: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._folder, self._job, self._hands, self._say = folder, job, hands, say
        self._limit_s, self._stopped = limit_s, stopped
        self._clock, self._sleep = clock, sleep
        self._planned = len(dues)
        self._waiting = list(dues)
        self._armed: list[Due] = []
        self._active: Active | None = None
        self._spare = len(dues) + 1  # numbers for what a fault needs before it
        self._noted = 0  # bytes of faults.jsonl
        self._seen: dict[int, Injected] = {}
        self._progress: record.Progress | None = None
        self._looked_s = 0.0
        self._furthest = -1  # where the optimizer counts
        self._began_s: float | None = None  # the first step
        self._free_s = 0.0  # since when the job trains undisturbed
        self._alive_s = 0.0  # when it was last seen to get further
        self._was_at = (-1, -1, -1)
        self._records: dict[int, tuple[str, float]] = {}  # by life: the folder of the record, and its clock
        self._refused_s: float | None = None  # since when the next fault cannot be done
        self._passed_over: list[str] = []
        self._unanswered: list[int] = []

    def run(self, seed: int) -> Ended:
        start_s = self._alive_s = self._clock()
        self._arm_steps()
        with contextlib.ExitStack() as undo:  # all of it, whatever fails
            undo.callback(self._job.kill)
            undo.callback(self._mend)
            self._job.begin()
            self._hands.tell_ranks()
            while self._job.code is None and not self._stopped():
                self._tick(self._clock())
                if self._clock() - self._alive_s > 2 * self._limit_s:
                    self._say(f"the job has not trained for {2 * self._limit_s:g} s; it is killed")
                    break
                self._sleep(TICK_S)
            self._job.take()
            self._read_faults()
            code = self._job.code
        left = [due for due in [*self._armed, *self._waiting] if due.number not in self._seen]
        passed_over = [*self._passed_over, *(f"{due.what}: the job had ended" for due in left)]
        return Ended(
            code, self._planned, seed, self._clock() - start_s, start_s, tuple(passed_over),
            tuple(self._unanswered), tuple(self._job.leftovers()), self._job.digest,
        )  # fmt: skip

    def _mend(self) -> None:
        """What the fault has broken. It is not tried again: what fails once has failed half way."""
        if self._active is not None and self._active.mend is not None:
            mend, self._active.mend = self._active.mend, None
            mend()

    def _arm_steps(self) -> None:
        """What a rank does to itself at a step, it is told before it starts."""
        for due in [due for due in self._waiting if due.at_step is not None and due.kind.hand in _AT_A_STEP]:
            if due.kind.name == "crash-on-import" and due.generation is None:
                continue  # there is no world to start at that step, unless one is ended
            self._waiting.remove(due)
            self._armed.append(due)
            self._hands.arm(due, due.rank, due.at_step or 0)

    # -- what happens in a moment -------------------------------------------------------------------------------------

    def _tick(self, now_s: float) -> None:
        self._job.take()
        if (lead := self._job.lead).run_dir and lead.state.clock_s:
            self._records[self._job.life] = (lead.run_dir, lead.state.clock_s)
        self._read_faults()
        if now_s - self._looked_s > LOOK_S:
            self._looked_s = now_s
            self._progress = self._job.lead.progress()
            if self._trains() and self._began_s is None:
                self._began_s = self._free_s = now_s
            if self._trains() and (reached := self._reached()) != self._was_at:
                self._was_at, self._alive_s = reached, now_s
        if self._active is None:
            self._take_armed()
        if self._active is not None:
            self._wait_for(self._active, now_s)
        elif self._began_s is not None and self._settled() and (due := self._next(now_s)) is not None:
            self._strike(due, now_s)
        if not self._waiting and not self._armed and self._active is None:
            (self._folder / LAST).touch()

    def _take_armed(self) -> None:
        """A rank has done what it was told for a step: that is waited for as any other."""
        for due in [due for due in self._armed if due.number in self._seen]:
            self._armed.remove(due)
            injected = self._seen[due.number]
            self._active = Active(due, injected.at_s, injected.life, injected.generation, injected)
            self._furthest = injected.step if injected.step is not None else -1
            self._progress = None

    def _next(self, now_s: float) -> Due | None:
        assert self._began_s is not None and self._progress is not None
        if any(due.at_step - STEPS_APART <= self._progress.step for due in self._armed if due.at_step is not None):
            return None
        for due in self._waiting:
            if due.at_step is not None and self._progress.step >= due.at_step:
                return due
            if due.at_s is not None and now_s - self._began_s >= due.at_s:
                return due
        first = next((due for due in self._waiting if due.gap_s is not None), None)
        return first if first is not None and now_s - self._free_s >= (first.gap_s or 0.0) else None

    def _strike(self, due: Due, now_s: float) -> None:
        assert self._progress is not None
        step, generation = self._progress.step, self._progress.generation
        self._furthest = step if self._progress.base >= 0 else -1
        active = Active(due, now_s, self._job.life, generation)
        try:
            active.mend = self._hands.strike(due, step, self._spare)
        except (NotHere, OSError) as why:
            self._not_yet(due, why, now_s)
            return
        self._waiting.remove(due)
        self._refused_s = None
        self._spare += due.kind.name == "crash-on-import"
        self._active = active
        self._progress = None

    def _not_yet(self, due: Due, why: Exception, now_s: float) -> None:
        """What a fault needs may still come: a writer that is started again, a second checkpoint."""
        self._progress = None  # look again first
        self._refused_s = self._refused_s if self._refused_s is not None else now_s
        if now_s - self._refused_s > self._limit_s:
            self._waiting.remove(due)
            self._refused_s, self._free_s = None, now_s
            self._pass_over(due, str(why))

    def _pass_over(self, due: Due, why: str) -> None:
        self._passed_over.append(f"{due.what}: {why}")
        self._say(f"fault {due.number} ({due.what}) is passed over: {why}")

    def _wait_for(self, active: Active, now_s: float) -> None:
        due = active.due
        active.injected = active.injected or self._seen.get(due.number)
        if active.mend is not None and now_s - active.since_s >= due.for_s:
            self._mend()
        if active.injected is not None and active.mend is None and self._is_over(active, now_s):
            self._say(self._told(active, now_s))
        elif now_s - active.since_s > self._limit_s + due.for_s:
            self._give_up(active)
            if not self._settled():
                return
        else:
            return
        self._active, self._free_s = None, now_s

    def _give_up(self, active: Active) -> None:
        due = active.due
        if active.injected is None:
            if self._hands.withdraw(due.number):
                why = f"the rank has not done it within {self._limit_s:g} s; is it let in, and is there an optimizer?"
                self._pass_over(due, why)
        elif due.number not in self._unanswered:
            self._unanswered.append(due.number)
            self._say(f"fault {due.number} ({due.what}): the job has not come through in {self._limit_s:g} s")

    def _is_over(self, active: Active, now_s: float) -> bool:
        assert active.injected is not None
        lasted = now_s - active.injected.at_s >= (active.due.for_s if active.due.kind.lasts else 0.0)
        if not self._settled() or not lasted:
            return False
        match active.due.kind.answer:
            case Answer.INCIDENT:
                return any(each.generation == active.injected.generation for each in self._job.state.incidents.values())
            case Answer.LIFE:
                return self._job.life > active.injected.life
            case Answer.NOTHING:
                return True

    def _told(self, active: Active, now_s: float) -> str:
        assert active.injected is not None
        injected, done = active.injected, sum(number <= self._planned for number in self._seen)
        whom = f" of rank {injected.rank}" if injected.rank is not None else ""
        came = f"trains again after {now_s - injected.at_s:.1f} s"
        if active.due.kind.answer is Answer.NOTHING:
            came = "trains on"
        return f"{done} of {self._planned}: {injected.kind}{whom} at step {injected.step}; {came}"

    # -- how the job is -----------------------------------------------------------------------------------------------

    def _trains(self) -> bool:
        world = self._job.state.world
        if self._progress is None or world is None or self._progress.generation != world.generation:
            return False
        return self._job.state.phase == "training" and min(self._progress.steps, default=0) > 0

    def _reached(self) -> tuple[int, int, int]:
        assert self._progress is not None
        return self._job.life, self._progress.generation, self._progress.step

    def _settled(self) -> bool:
        """It trains, is further than ever, and nothing of the last fault is open."""
        if not self._trains() or self._progress is None:
            return False
        incidents = self._job.state.incidents.values()
        if any(each.restarted and each.recovered_at_s is None and each.failed_again_at_s is None for each in incidents):
            return False
        return self._progress.base < 0 or self._progress.step > self._furthest

    def _read_faults(self) -> None:
        """What ranks have noted, too; and put it into the job's own record, where its views look."""
        path = self._folder / faults.NAME
        with contextlib.suppress(OSError), open(path, "rb") as file:
            file.seek(self._noted)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._noted += len(line)
                try:
                    injected = msgspec.json.decode(line, type=Injected)
                except msgspec.MsgspecError:
                    continue  # a rank that was killed may have left half of one
                self._seen[injected.number] = injected
                self._record(injected)

    def _record(self, injected: Injected) -> None:
        if injected.life not in self._records:
            return
        run_dir, clock_s = self._records[injected.life]
        struck = KINDS[injected.kind].what if injected.kind in KINDS else ""
        what = record.FaultInjected(
            injected.number, injected.kind, injected.rank, "", injected.step, injected.text or struck
        )
        line = {
            "v": record.VERSION, "node": CHAOS, "seq": injected.number, "name": what.NAME,
            "at_s": round(injected.at_s - clock_s, 6), "time": injected.time, "data": what,
        }  # fmt: skip
        with contextlib.suppress(OSError):
            fd = os.open(os.path.join(run_dir, record.NAME), os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            try:
                os.write(fd, msgspec.json.encode(line) + b"\n")
            finally:
                os.close(fd)
