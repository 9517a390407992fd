"""When a conductor strikes, and how it ends: on a clock of its own, with a job that only says how it is."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.chaos import campaign, faults, plan
from holdfast.chaos.conductor import Conductor, Ended
from holdfast.chaos.faults import Injected
from holdfast.chaos.hands import Hands
from holdfast.chaos.kinds import Answer
from holdfast.chaos.network import NetworkError
from holdfast.chaos.plan import Due, Fault, Plan
from holdfast.control.causes import Kind
from holdfast.observe import record
from holdfast.observe.record import What
from holdfast.observe.state import State

BEGAN_S = 1000.0
STARTS_S = 2.0  # from a start to the first step
STEPS_PER_S = 10


class Clock:
    def __init__(self) -> None:
        self.now_s = BEGAN_S

    def read(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class Training:
    """A job of one rank that steps at a pace, and comes through whatever ends its world. Its record is the real one."""

    def __init__(self, clock: Clock, steps: int) -> None:
        self._clock, self._steps = clock, steps
        self.life, self.run_dir, self.digest = -1, "", ""
        self.state = State()
        self.kills = 0
        self._before = 0  # steps of earlier worlds
        self._generation = -1
        self._steps_from_s = 0.0
        self._lines = 0

    @property
    def lead(self) -> Training:
        return self

    @property
    def step(self) -> int:
        return self._before + max(0, int((self._clock.now_s - self._steps_from_s) * STEPS_PER_S))

    @property
    def code(self) -> int | None:
        return 0 if self.step >= self._steps else None

    def begin(self) -> None:
        self.life += 1
        self._tell(record.JobStarted("job", "n", 1, {}, 1, clock_s=BEGAN_S))
        self._launch()

    def _launch(self) -> None:
        self._generation += 1
        self._steps_from_s = self._clock.now_s + STARTS_S
        self._tell(record.WorldLaunched(self._generation, 1, self._generation, local_size=1))

    def take(self) -> None:
        world = self.state.world
        if world is not None and world.stepped_s is None and self._clock.now_s > self._steps_from_s:
            self._tell(record.RankFirstStep(self._generation, 0))
            if self._generation > 0:
                self._tell(record.IncidentClosed(**self._incident(), recovered_at_s=self._clock.now_s))

    def progress(self) -> record.Progress | None:
        done = self.step - self._before
        return record.Progress(self._generation, 0, self.step, (done,), base=self._before) if done else None

    def fail(self) -> None:
        self._before = self.step
        self._launch()
        self._tell(record.IncidentOpened(**self._incident()))

    def kill(self) -> None:
        self.kills += 1

    def leftovers(self) -> list[str]:
        return []

    def _incident(self) -> dict[str, Any]:
        return {
            "number": self._generation, "generation": self._generation - 1, "kind": Kind.SIGNAL, "headline": "",
            "action": "restart", "restarted": True, "rank": 0, "failed_at_s": self._clock.now_s,
        }  # fmt: skip

    def _tell(self, what: What) -> None:
        self._lines += 1
        self.state.take(record.Noted(what, self._clock.now_s - BEGAN_S, "", "n", self._lines))


class Strikes:
    """Notes each fault as hands do, and when and where it was done."""

    def __init__(self, folder: Path, clock: Clock, job: Training, mend: Callable[[], None] | None) -> None:
        self._folder, self._clock, self._job, self._mend = str(folder), clock, job, mend
        self.done: list[tuple[str, float, int]] = []  # the kind, seconds after the first step, the step

    def tell_ranks(self) -> None: ...

    def strike(self, due: Due, step: int, spare_number: int) -> Callable[[], None] | None:
        world = self._job.state.world
        assert world is not None
        now_s = self._clock.now_s
        injected = Injected(due.number, due.kind.name, self._job.life, world.generation, now_s, "", step=step)
        faults.append(self._folder, injected)
        self.done.append((due.kind.name, now_s - BEGAN_S - STARTS_S, step))
        if due.kind.answer is Answer.INCIDENT:
            self._job.fail()
        return self._mend if due.kind.lasts else None


class Run:
    def __init__(self, folder: Path, *planned: Fault, steps: int, mend: Callable[[], None] | None = None) -> None:
        clock = Clock()
        self.job = Training(clock, steps)
        hands = Strikes(folder, clock, self.job, mend)
        self.done = hands.done
        self.said: list[str] = []
        job: Any = self.job
        struck: Any = hands
        self.dues = plan.draw(Plan(fault=planned), seed=3)
        self._conductor = Conductor(
            folder, job, struck, self.dues, 60.0, self.said.append, clock=clock.read, sleep=clock.sleep
        )

    def end(self) -> Ended:
        return self._conductor.run(3)


def test_a_fault_by_time_comes_so_long_after_the_first_step(tmp_path: Path) -> None:
    run = Run(tmp_path, Fault("kill", at_s=7.0), Fault("kill", at_s=3.0), steps=200)
    ended = run.end()
    assert (ended.code, ended.passed_over, ended.unanswered) == (0, (), ())
    assert [at_s for _, at_s, _ in run.done] == pytest.approx([3.0, 7.0], abs=0.5)
    assert (tmp_path / "last").exists()


def test_a_fault_by_time_waits_for_the_job_to_come_through_the_one_before(tmp_path: Path) -> None:
    run = Run(tmp_path, Fault("kill", at_s=3.0), Fault("kill", at_s=3.1), steps=200)
    run.end()
    [first_s, second_s] = [at_s for _, at_s, _ in run.done]
    assert second_s > first_s + STARTS_S


def test_a_fault_at_a_step_that_no_rank_does_to_itself(tmp_path: Path) -> None:
    run = Run(tmp_path, Fault("writer-loss", at_step=120), Fault("slow-disk", at_step=40, for_s=1.0), steps=200)
    assert run.end().code == 0
    assert [kind for kind, _, _ in run.done] == ["slow-disk", "writer-loss"]
    assert [step for _, _, step in run.done] == pytest.approx([40, 120], abs=3)


def test_faults_at_a_rate_come_after_gaps_as_chance_has_them(tmp_path: Path) -> None:
    run = Run(tmp_path, Fault("kill", rate_per_hour=720, count=20), steps=3000)
    assert run.end().code == 0
    assert len(run.done) == 20
    began = [0.0, *(at_s + STARTS_S for _, at_s, _ in run.done)]  # since when it trained undisturbed
    gaps = [at_s - free_s for (_, at_s, _), free_s in zip(run.done, began, strict=False)]
    assert gaps == pytest.approx([due.gap_s for due in run.dues], abs=0.5)
    assert len({round(gap_s) for gap_s in gaps}) > 5


def test_what_the_job_did_not_live_to_see_is_passed_over(tmp_path: Path) -> None:
    ended = Run(tmp_path, Fault("kill", at_s=500.0), Fault("writer-loss", at_step=900), steps=100).end()
    assert ended.passed_over == ("kill: the job had ended", "writer-loss at step 900: the job had ended")


@pytest.mark.parametrize("for_s", [1.0, 1000.0], ids=["while the job trains", "after its end"])
def test_a_fault_that_cannot_be_mended_is_tried_once_and_the_job_is_killed(for_s: float, tmp_path: Path) -> None:
    tried = []

    def mend() -> None:
        tried.append(1)
        raise NetworkError("no such device")

    run = Run(tmp_path, Fault("slow-disk", at_s=1.0, for_s=for_s), steps=200, mend=mend)
    with pytest.raises(NetworkError, match="no such device"):
        run.end()
    assert (len(tried), run.job.kills) == (1, 1)


def test_a_line_that_cannot_be_read_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / faults.NAME).write_bytes(b'{"number":9,"kind":"ki\n')
    ended = Run(tmp_path, Fault("kill", at_s=1.0), steps=200).end()
    assert (ended.code, ended.passed_over, ended.unanswered) == (0, (), ())


def test_a_process_that_is_gone_before_its_signal_was_not_struck(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is tried again, and counts once."""
    [due] = plan.draw(Plan(fault=(Fault(kind="kill", at_s=1.0),)), seed=1)
    hands: Any = Hands.__new__(Hands)
    hands._folder, hands._job = tmp_path, Training(Clock(), 10)
    hands._job.begin()
    gone = subprocess.Popen(["true"])
    gone.wait()
    monkeypatch.setattr(Hands, "_pid_of", lambda self, rank: gone.pid)
    with pytest.raises(ProcessLookupError):
        hands.strike(due, 3, 99)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_gone_is_told_in_a_line(tmp_path: Path) -> None:
    planned = Plan(fault=(Fault(kind="kill", at_s=1.0),))
    with pytest.raises(campaign.Failed, match=r"the campaign was ended: .*gone.*: No such file or directory; "):
        campaign.run(tmp_path / "gone", __file__, planned, 1, ["train.py"], True, lambda text: None)
