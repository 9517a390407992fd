"""Whatever a record says, the phases of its report add up to the wall clock, with no remainder and no overlap."""

from __future__ import annotations

from itertools import pairwise
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from holdfast.observe import record
from holdfast.observe.goodput import Goodput, Phase, divide
from holdfast.observe.record import Noted
from report.written import LEAD, Written

lengths = st.integers(0, 3_000_000).map(lambda us: us / 1e6)


def check(divided: Goodput, wall_s: float | None = None) -> None:
    spans = divided.spans
    assert all(span.us > 0 for span in spans)
    assert all(one.until_us == next_one.since_us for one, next_one in pairwise(spans))
    assert sum(round(taken_s * 1e6) for taken_s in divided.phases_s.values()) == round(divided.wall_s * 1e6)
    assert sum(span.us for span in spans) == round(divided.wall_s * 1e6)
    assert set(divided.phases_s) == {phase.value for phase in Phase}
    assert all(taken_s >= 0 for taken_s in divided.phases_s.values())
    assert 0 <= divided.ratio <= 1
    assert sum(cost.lost_s for cost in divided.costs) <= divided.wall_s + 1e-6
    assert all(0 <= (world.redone or 0) <= world.steps for world in divided.worlds)
    if wall_s is not None:
        assert round(divided.wall_s * 1e6) == round(wall_s * 1e6)


@st.composite
def jobs(draw: st.DrawFn) -> tuple[list[Noted], float]:
    """A plausible job: worlds that start, restore, train, save, hang or fail, perhaps before their first step, on one
    node or waiting for others; in the end it succeeds, gives up, or is still there. And how long it took."""
    job = Written(program=draw(st.sampled_from(["/x/train.py", ""])))
    clustered, counts = draw(st.booleans()), draw(st.booleans())
    now_s, done = draw(lengths), 0
    if clustered:
        job.note(now_s, record.NodeHello("a", -1))
        now_s += draw(lengths)
    incident: dict[str, float | None] | None = None
    worlds = draw(st.integers(0, 5))
    for generation in range(worlds):
        launched_s = now_s = now_s + draw(lengths)
        started_s = now_s = now_s + draw(lengths)
        restored_s, steps, stepped_s = draw(lengths), 0, None
        if draw(st.booleans()):
            now_s += restored_s
            took_s = draw(st.sampled_from([restored_s, restored_s * 3]))  # not all of it was after the launch
            job.note(now_s, record.CheckpointRestored(generation, 0, draw(st.integers(0, done)), took_s, "memory"))
        if draw(st.integers(0, 3)):
            stepped_s = now_s = now_s + draw(lengths)
        if incident is not None:
            job.incident(
                **incident,  # type: ignore[arg-type]
                launched_s=launched_s,
                started_s=started_s,
                recovered_s=stepped_s,
                again_s=None if stepped_s is not None else now_s,
            )
            incident = None
        job.world(generation, launched_s, started_s, *([stepped_s - draw(lengths), stepped_s] if stepped_s else []))
        base, saving_s = (draw(st.integers(0, done)) if counts else -1), 0.0
        for _ in range(draw(st.integers(0, 3)) if stepped_s is not None else 0):
            now_s, steps, saving_s = now_s + draw(lengths), steps + draw(st.integers(0, 50)), saving_s + draw(lengths)
            job.progress(now_s, generation, steps, base, saving_s)
        done = max(done, max(0, base) + steps)
        if generation == worlds - 1 and draw(st.booleans()):
            break
        failed_s = now_s - draw(lengths) if draw(st.booleans()) else now_s
        detected_s = failed_s + draw(lengths) if draw(st.booleans()) else None
        now_s = max(now_s, detected_s or 0.0) + draw(lengths)
        incident = {
            "number": generation + 1,
            "generation": generation,
            "failed_s": failed_s,
            "stopped_s": now_s,
            "detected_s": detected_s,
            "steps": steps if draw(st.booleans()) else None,
        }
        if clustered and draw(st.booleans()):
            now_s += draw(lengths)
            job.note(now_s, record.NodeHello("b", generation), "n2:9")
    if incident is not None:
        job.incident(**incident, restarted=draw(st.booleans()))  # type: ignore[arg-type]
    if draw(st.booleans()):
        job.note(now_s, record.JobSignalled("SIGTERM"))
    if worlds and draw(st.booleans()):
        now_s += draw(lengths)
        job.exits(now_s, worlds - 1, draw(st.sampled_from([0, 1, -9])))
    now_s += draw(lengths)
    if draw(st.booleans()):
        job.end(now_s, draw(st.sampled_from(["succeeded", "error", "preempted"])))
    return job.notes, max(noted.at_s for noted in job.notes)


@given(jobs())
def test_of_a_whole_job(job: tuple[list[Noted], float]) -> None:
    notes, wall_s = job
    check(divide(notes), wall_s)


@given(jobs(), st.data())
def test_of_any_part_of_one(job: tuple[list[Noted], float], data: st.DataObject) -> None:
    """Read from the middle, up to where it was torn, and with lines that were lost in between."""
    notes, _ = job
    since, until = sorted(data.draw(st.tuples(st.integers(0, len(notes)), st.integers(0, len(notes)))))
    part = [noted for noted in notes[since:until] if data.draw(st.integers(0, 9)) > 0]
    divided = divide(part)
    check(divided)
    if part:
        start_s = 0.0 if not divided.from_middle else min(noted.at_s for noted in part)
        ended = [noted.at_s for noted in part if isinstance(noted.what, record.JobEnded) and noted.node == LEAD]
        end_s = ended[0] if ended else max(noted.at_s for noted in part)
        assert divided.wall_s == max(0, round((end_s - start_s) * 1e6)) / 1e6


@given(jobs(), st.randoms(use_true_random=False))
def test_of_lines_in_any_order(job: tuple[list[Noted], float], chance: Random) -> None:
    """But for the first: those of other nodes come when they come."""
    notes, wall_s = job
    later = notes[1:]
    chance.shuffle(later)
    check(divide([notes[0], *later]), wall_s)


def test_of_times_that_cannot_be() -> None:
    """A line that is not ours must not make a report impossible."""
    for at_s in (-1e8, 1e8, 5.0):
        job = Written(clock_s=at_s).world(0, 1.0, 1.5, 2.0, at_s)
        job.incident(1, 0, at_s, -at_s, launched_s=1e300, started_s=-1e300, recovered_s=0.0)
        check(job.world(1, at_s, 0.0).end(10.0).divided())
