"""Verdicts on records that are written by hand: one that holds, and each way in which it does not."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from holdfast.chaos import verdict
from holdfast.chaos.conductor import Ended
from holdfast.chaos.faults import Injected
from holdfast.chaos.invariants import Record
from holdfast.chaos.verdict import Campaign, Verdict, Weights
from holdfast.control.causes import Kind
from holdfast.observe import record
from holdfast.observe.record import What
from report.written import taken_over

CLOCK_S = 1000.0
NODE = "here:1"


class Story:
    """A job of two ranks, told event by event; each takes a tenth of a second."""

    def __init__(self, life: int = 0) -> None:
        self.life = life
        self.notes: list[record.Noted] = []
        self.faults: list[Injected] = []
        self.incidents = 0
        self.tell(record.JobStarted("job", "n", 2, {}, 1, clock_s=CLOCK_S + 100 * life))

    @property
    def now_s(self) -> float:
        return CLOCK_S + 100 * self.life + 0.1 * len(self.notes)

    def tell(self, what: What) -> Story:
        self.notes.append(record.Noted(what, 0.1 * len(self.notes), "", NODE, len(self.notes)))
        return self

    def world(self, generation: int, restarts: int, restored: int | None = None, source: str = "memory") -> Story:
        self.tell(record.WorldLaunched(generation, 2, restarts))
        if restored is not None:
            self.tell(record.CheckpointRestored(generation, 0, restored, 0.01, source))
        self.tell(record.RankFirstStep(generation, 0))
        return self.tell(record.Progress(generation, 0, 10, (10, 10)))

    def fault(self, kind: str, generation: int, rank: int | None = 1, **more: Any) -> Story:
        number = len(self.faults) + 1
        self.faults.append(Injected(number, kind, self.life, generation, self.now_s, "", rank=rank, **more))
        return self

    def incident(self, generation: int, kind: Kind, rank: int | None = 1, again: bool = True) -> Story:
        self.incidents += 1
        told: dict[str, Any] = {
            "number": self.incidents, "generation": generation, "kind": kind, "headline": "it failed",
            "action": "restart", "restarted": again, "rank": rank, "failed_at_s": self.now_s,
        }  # fmt: skip
        self.tell(record.IncidentOpened(**told))
        if again:
            self.tell(record.IncidentClosed(**told, recovered_at_s=self.now_s + 0.4))
        return self

    def end(self, outcome: str = "succeeded") -> Story:
        return self.tell(record.JobEnded(outcome, "", 20, 2.0, 0.5))

    @property
    def record(self) -> Record:
        return Record(self.life, 0, self.notes)


def judge(*stories: Story, ended: Ended | None = None, weights: Weights | None = None) -> Verdict:
    faults = [fault for story in stories for fault in story.faults]
    ended = ended or Ended(0, len(faults), 0, 10.0, CLOCK_S)
    records = tuple(story.record for story in stories)
    return verdict.judge(Campaign(records, tuple(faults), ended, weights or Weights("step 20 abc", "step 20 abc")))


def broken(found: Verdict) -> dict[str, tuple[str, ...]]:
    assert found.held == all(check.held for check in found.checks)
    return {check.name: check.wrong for check in found.checks if not check.held}


ANSWERS = "every fault has its one incident, with the right cause"
OTHERS = "no incident but those of the faults"
GENERATIONS = "generations count up by one"
ORDER = "no world steps after a later one"
ENDED = "each world that ended has one incident"
COUNTED = "restarts are counted once"
KEPT = "no committed checkpoint is lost"
WEIGHTS = "final weights are those of the undisturbed twin"
SUCCESS = "the job has succeeded"


def killed_once() -> Story:
    return Story().world(0, 0).fault("kill", 0).incident(0, Kind.SIGNAL).world(1, 1).end()


def test_a_job_that_came_through() -> None:
    found = judge(killed_once())
    assert broken(found) == {}
    [row] = found.rows
    assert (row.kind, row.faults, row.right) == ("kill", 1, 1)
    assert row.p50_s == row.max_s == pytest.approx(0.5)
    assert "everything held: 1 faults" in verdict.text(found)


def test_a_fault_without_an_incident() -> None:
    story = Story().world(0, 0).fault("kill", 0).end()
    assert broken(judge(story)) == {ANSWERS: ("fault 1 (kill) has no incident in generation 0 of life 0",)}
    assert "BROKEN" in verdict.text(judge(story))


def test_a_wrong_cause() -> None:
    story = Story().world(0, 0).fault("kill", 0).incident(0, Kind.BACKEND).world(1, 1).end()
    [wrong] = broken(judge(story))[ANSWERS]
    assert wrong == "fault 1 (kill) is told as backend (rank 1: it failed), and signal is right"


def test_another_rank_is_blamed() -> None:
    story = Story().world(0, 0).fault("kill", 0).incident(0, Kind.SIGNAL, rank=0).world(1, 1).end()
    assert broken(judge(story))[ANSWERS] == ("fault 1 (kill) is blamed on rank 0, and rank 1 was struck",)


def test_of_a_hang_in_a_collective_nobody_need_be_blamed() -> None:
    story = Story().world(0, 0).fault("hang-collective", 0).incident(0, Kind.HANG, rank=None).world(1, 1).end()
    assert broken(judge(story)) == {}


def test_two_faults_in_one_world() -> None:
    story = Story().world(0, 0).fault("kill", 0).fault("kill", 0).incident(0, Kind.SIGNAL).world(1, 1).end()
    [wrong] = broken(judge(story))[ANSWERS]
    assert wrong == "fault 2 (kill) came when fault 1 had ended generation 0 already"


def test_an_incident_that_no_fault_explains() -> None:
    story = killed_once()
    story.notes.pop()
    story.incident(1, Kind.HANG).world(2, 2).end()
    assert broken(judge(story)) == {OTHERS: ("life 0, incident 2: rank 1: it failed",)}


def test_a_slow_rank_that_ends_its_world() -> None:
    story = Story().world(0, 0).fault("slow-rank", 0).incident(0, Kind.HANG).world(1, 1).end()
    [wrong] = broken(judge(story))[ANSWERS]
    assert wrong == "fault 1 (slow-rank) ended its world, incident 1: hang: it failed"
    assert broken(judge(Story().world(0, 0).fault("slow-rank", 0).end())) == {}


def test_a_slow_rank_is_not_to_blame_for_a_kill_in_the_same_world() -> None:
    story = Story().world(0, 0).fault("slow-rank", 0).fault("kill", 0).incident(0, Kind.SIGNAL).world(1, 1).end()
    assert broken(judge(story)) == {}


def slowed(own_us: tuple[int, ...], looks: int, for_s: float = 100.0, nodes: int = 1) -> Story:
    """Rank 1 is slow from some moment on; what each rank needed for itself in each look after that."""
    story = Story().tell(record.WorldLaunched(0, 2, 0, group_size=nodes)).fault("slow-rank", 0, for_s=for_s)
    story.tell(record.RankFirstStep(0, 0))
    for look in range(looks):
        story.tell(record.Progress(0, 0, 10 + look, (10 + look,), own_us=own_us))
    return story


def test_a_slow_rank_that_nobody_names() -> None:
    # Of five looks the first has steps from before, and the last may have come with the end.
    [wrong] = broken(judge(slowed((20_000, 70_000), 5).end()))[ANSWERS]
    assert wrong == "fault 1 (slow-rank) slowed rank 1 in 3 looks in a row, and the record does not name it"
    named = slowed((20_000, 70_000), 5).tell(record.StragglerFound(0, 1, 0.07, 0.02, 3.5, 3)).end()
    assert broken(judge(named)) == {}
    other = slowed((20_000, 70_000), 5).tell(record.StragglerFound(0, 0, 0.07, 0.02, 3.5, 3)).end()
    assert list(broken(judge(other))) == [ANSWERS]


@pytest.mark.parametrize(
    "story",
    [
        slowed((20_000, 70_000), 4),
        slowed((20_000, 70_000), 20, for_s=0.35),
        slowed((20_000, 21_000), 20),
        slowed((), 20),
        slowed((20_000, 70_000), 20, nodes=2),
    ],
    ids=["few looks", "too short", "hardly slower", "not measured", "several nodes"],
)
def test_a_slow_rank_that_nobody_need_have_seen(story: Story) -> None:
    assert broken(judge(story.end())) == {}


def writer_lost(*later: What, pid: int = 7, steps: int = 60) -> Story:
    story = Story().world(0, 0).tell(record.WriterStarted(7)).fault("writer-loss", 0, rank=None, pid=pid)
    for what in later:
        story.tell(what)
    for step in range(steps):
        story.tell(record.Progress(0, 0, 20 + step, (20 + step,)))
    return story.end()


def test_the_end_of_a_writer_is_told() -> None:
    assert broken(judge(writer_lost(record.WriterEnded(7, -9)))) == {}
    [wrong] = broken(judge(writer_lost(record.WriterEnded(8, -9))))[ANSWERS]
    assert wrong == "fault 1 (writer-loss) killed process 7, and the record has no writer.ended of it"
    assert broken(judge(writer_lost(steps=20))) == {}  # the record goes on for too short


def test_a_generation_that_repeats_and_one_that_is_left_out() -> None:
    story = Story().world(0, 0).fault("kill", 0).incident(0, Kind.SIGNAL).world(0, 1).end("signal")
    assert broken(judge(story))[GENERATIONS] == ("life 0, node 0: generation 0 follows 0",)
    story = Story().world(0, 0).fault("kill", 0).incident(0, Kind.SIGNAL).world(2, 1).end()
    assert broken(judge(story))[GENERATIONS] == ("life 0, node 0: generation 2 follows 0",)


def test_a_world_that_steps_after_a_later_one() -> None:
    story = killed_once()
    story.tell(record.Progress(0, 0, 12, (12, 12)))
    [wrong] = broken(judge(story))[ORDER]
    assert wrong.startswith("life 0, node 0: generation 0 steps after 1 has")


def test_a_world_without_an_incident_and_one_with_two() -> None:
    story = Story().world(0, 0).world(1, 0).end()
    assert broken(judge(story)) == {ENDED: ("life 0: generation 0 ended without an incident",)}
    story = Story().world(0, 0).fault("kill", 0).incident(0, Kind.SIGNAL).incident(0, Kind.SIGNAL).world(1, 1).end()
    assert broken(judge(story))[ENDED] == ("life 0: generation 0 has incidents 1, 2",)


@pytest.mark.parametrize("counted", [0, 2])
def test_a_restart_that_is_not_counted_or_twice(counted: int) -> None:
    story = Story().world(0, 0).fault("kill", 0).incident(0, Kind.SIGNAL).world(1, counted).end()
    [wrong] = broken(judge(story))[COUNTED]
    assert wrong == f"life 0, node 0: {counted} restarts are counted from generation 0 to 1"


def test_a_lost_node_need_not_be_counted() -> None:
    story = Story().world(0, 0).fault("node-loss", 0, rank=None, node=1)
    assert broken(judge(story.incident(0, Kind.LOST_NODE, rank=None).world(1, 0).end())) == {}


def test_a_restore_from_before_what_was_committed() -> None:
    story = Story().world(0, 0).tell(record.CheckpointSaved(9, "step_9")).fault("kill", 0)
    story.incident(0, Kind.SIGNAL).world(1, 1, restored=5).end()
    [wrong] = broken(judge(story))[KEPT]
    assert wrong == "life 0, generation 1, rank 0: goes on from step 5, though 9 was committed"


def test_a_world_that_begins_anew_though_something_was_committed() -> None:
    story = Story().world(0, 0).tell(record.CheckpointSaved(9, "step_9")).fault("kill", 0)
    story.incident(0, Kind.SIGNAL).world(1, 1).end()
    assert broken(judge(story)) == {KEPT: ("life 0, generation 1: goes on from step 0, though 9 was committed",)}


def two_lives(second: int, source: str, kind: str = "bit-flip") -> tuple[Story, Story]:
    first = Story().world(0, 0).tell(record.CheckpointSaved(5, "step_5")).tell(record.CheckpointSaved(9, "step_9"))
    damage: dict[str, Any] = {"file": "step_9", "committed": 9} if kind != "job-loss" else {}
    first.fault(kind, 0, rank=None, **damage)
    return first, Story(1).world(0, 0, restored=second, source=source).end()


def test_a_damaged_checkpoint_is_passed_over() -> None:
    found = judge(*two_lives(5, "step_5"))
    assert broken(found) == {}
    assert found.rows[0].right == 1
    assert found.rows[0].p50_s is not None


def test_a_damaged_checkpoint_that_is_taken() -> None:
    [wrong] = broken(judge(*two_lives(9, "step_9")))[ANSWERS]
    assert wrong.endswith("step_9 was damaged, and the next life went on from step_9")


def test_a_damaged_checkpoint_that_takes_the_one_before_with_it() -> None:
    [wrong] = broken(judge(*two_lives(0, "")))[KEPT]
    assert wrong == "life 1, generation 0, rank 0: goes on from step 0, though 5 was committed"


def test_a_job_that_is_lost_goes_on_from_the_newest() -> None:
    assert broken(judge(*two_lives(9, "step_9", "job-loss"))) == {}
    assert list(broken(judge(*two_lives(5, "step_5", "job-loss")))) == [KEPT]


def test_a_job_that_is_lost_and_does_not_come_back() -> None:
    first, second = two_lives(9, "step_9", "job-loss")
    second.notes = second.notes[:1]
    found = broken(judge(first, second, ended=Ended(1, 1, 0, 10.0, CLOCK_S)))
    assert found[ANSWERS] == ("fault 1 (job-loss) was followed by no life in which a rank stepped",)
    assert found[SUCCESS] == ("exit code 1; no word of an end in its record",)


def test_weights_that_differ() -> None:
    assert list(broken(judge(killed_once(), weights=Weights("step 20 abc", "step 20 abd")))) == [WEIGHTS]
    assert list(broken(judge(killed_once(), weights=Weights("", "step 20 abc")))) == [WEIGHTS]
    assert list(broken(judge(killed_once(), weights=Weights("", "")))) == [WEIGHTS]


def test_what_the_campaign_itself_has_seen() -> None:
    ended = Ended(0, 3, 0, 10.0, CLOCK_S, passed_over=("stop: no",), unanswered=(1,), leftovers=("process 7: x",))
    found = broken(judge(killed_once(), ended=ended))
    assert set(found) == {"every fault of the plan was done", ANSWERS, "no process is left"}
    assert list(broken(judge(killed_once(), ended=msgspec.structs.replace(ended, code=None)))[SUCCESS]) == [
        "it did not end by itself and was killed"
    ]


def test_percentiles_are_values_that_were_there() -> None:
    times = [float(number) for number in range(1, 101)]
    assert [verdict.percentile(times, part) for part in (0.5, 0.9, 0.99, 1.0)] == [50.0, 90.0, 99.0, 100.0]
    assert verdict.percentile([3.0], 0.5) == verdict.percentile([3.0], 0.99) == 3.0


def test_what_was_before_a_record_began_is_counted_by_the_one_before_it() -> None:
    """A coordinator that came back has the job's whole history; it trained for 4 s of the 10 s since."""
    campaign = Campaign((Record(0, 0, taken_over().notes),), (), Ended(0, 0, 0, 10.0, CLOCK_S))
    assert verdict.judge(campaign).goodput == pytest.approx(0.4)
