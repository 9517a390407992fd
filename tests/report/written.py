"""Records written by hand: a job of two ranks on one node unless told otherwise, in seconds of its own clock."""

from __future__ import annotations

import msgspec

from holdfast.control.causes import Kind
from holdfast.observe import record
from holdfast.observe.events import iso
from holdfast.observe.goodput import Goodput, Phase, divide
from holdfast.observe.record import Noted, What

CLOCK_S = 5_000.0  # what the leading node's monotonic clock showed at the start
BEGAN_S = 1_800_000_000.0
LEAD = "n1:7"
OTHER, OTHERS_CLOCK_S = "n2:9", 700.0  # what its clock showed at the record's zero


class Written:
    def __init__(self, clock_s: float = CLOCK_S, program: str = "/x/train.py", run_id: str = "r1") -> None:
        self.notes: list[Noted] = []
        self.clock_s = clock_s
        self.note(0.0, record.JobStarted(run_id, "id", 2, {"path": program}, 7, clock_s=clock_s, version="9.9"))

    def note(self, at_s: float, what: What, node: str = LEAD) -> Written:
        self.notes.append(Noted(what, at_s, iso(BEGAN_S + at_s), node, len(self.notes)))
        return self

    def world(self, generation: int, launched_s: float, started_s: float, *firsts_s: float) -> Written:
        self.note(launched_s, record.WorldLaunched(generation, 2, generation, local_size=2))
        self.note(started_s, record.WorldStarted(generation, {0: 100, 1: 101}))
        for rank, at_s in enumerate(firsts_s):
            self.note(at_s, record.RankFirstStep(generation, rank))
        return self

    def progress(
        self, at_s: float, generation: int, steps: int, base: int = -1, saving_s: float = 0.0, node: str = LEAD
    ) -> Written:
        taken = record.Progress(generation, 0, max(0, base) + steps, (steps, steps), base, saving_s=saving_s)
        return self.note(at_s, taken, node)

    def incident(
        self,
        number: int,
        generation: int,
        failed_s: float,
        stopped_s: float,
        *,
        detected_s: float | None = None,
        launched_s: float | None = None,
        started_s: float | None = None,
        recovered_s: float | None = None,
        again_s: float | None = None,
        restarted: bool = True,
        steps: int | None = 0,
        headline: str = "killed by SIGKILL",
        node: str = "",
    ) -> Written:
        """Opened when the world is down, and closed when the next one steps or fails."""

        def on_clock(at_s: float | None) -> float | None:
            return None if at_s is None else at_s + CLOCK_S

        def noted(kind: type[record.IncidentNoted], whole: bool) -> record.IncidentNoted:
            return kind(
                number=number,
                generation=generation,
                kind=Kind.HANG if detected_s is not None else Kind.SIGNAL,
                headline=headline,
                action="restart 1 of 9" if restarted else "no restarts left",
                restarted=restarted,
                rank=1,
                node=node,
                steps=steps,
                failed_at_s=failed_s + CLOCK_S,
                stopped_at_s=stopped_s + CLOCK_S,
                detected_at_s=on_clock(detected_s),
                launched_at_s=on_clock(launched_s) if whole else None,
                started_at_s=on_clock(started_s) if whole else None,
                recovered_at_s=on_clock(recovered_s) if whole else None,
                failed_again_at_s=on_clock(again_s) if whole else None,
                failed_at=iso(BEGAN_S + failed_s),
            )

        self.note(stopped_s, noted(record.IncidentOpened, whole=False))
        closed_s = recovered_s if recovered_s is not None else again_s
        if closed_s is not None or not restarted:
            self.note(closed_s if closed_s is not None else stopped_s, noted(record.IncidentClosed, whole=True))
        return self

    def back(
        self, number: int, generation: int, failed_s: float, stopped_s: float, launched_s: float, back_s: float
    ) -> Written:
        """An incident that was recovered from."""
        times = (number, generation, failed_s, stopped_s)
        return self.incident(*times, launched_s=launched_s, started_s=launched_s, recovered_s=back_s)

    def exits(self, at_s: float, generation: int, status: int = 0) -> Written:
        for rank in (0, 1):
            self.note(at_s, record.RankExited(generation, rank, 100 + rank, status))
        return self

    def end(self, at_s: float, outcome: str = "succeeded") -> Written:
        return self.note(at_s, record.JobEnded(outcome, "", 0, at_s, 0.0))

    def divided(self) -> Goodput:
        return divide(self.notes)


def spent(goodput: Goodput) -> dict[Phase, float]:
    """What took any time, in milliseconds of a second's precision that a test can name."""
    return {Phase(name): round(taken_s, 3) for name, taken_s in goodput.phases_s.items() if taken_s}


def killed(*, base: int = -1) -> Written:
    """Ten seconds: starts until 2, is killed at 5 with 30 steps done, is back at 6 and ends at 9.5."""
    job = Written().world(0, 1.0, 1.5, 1.9, 2.0).progress(4.0, 0, 20, base if base < 0 else 0)
    job.incident(1, 0, 5.0, 5.1, launched_s=5.3, started_s=5.5, recovered_s=6.0, steps=30)
    job.world(1, 5.3, 5.5, 5.9, 6.0).progress(8.0, 1, 21, base)
    return job.progress(9.5, 1, 36, base).exits(9.5, 1).end(10.0)


def taken_over() -> Written:
    """The coordinator's node is lost five seconds before another takes its place, when the job has run for 95 s."""
    job = Written().note(-100.0, record.JobStarted("r1", "b", 2, {}, 9, clock_s=OTHERS_CLOCK_S - 100.0), OTHER)
    before = Written().world(0, -98.0, -97.0, -95.0, -95.0).progress(-61.0, 0, 30)
    before.back(1, 0, failed_s=-60.0, stopped_s=-59.5, launched_s=-59.0, back_s=-57.0)
    before.world(1, -59.0, -58.0, -57.0, -57.0)
    for noted in before.notes[1:]:
        what = noted.what
        if isinstance(what, record.IncidentNoted):
            what = moved(what, OTHERS_CLOCK_S - CLOCK_S)
        job.note(noted.at_s, what, OTHER)
    job.back(2, 1, failed_s=-5.0, stopped_s=-4.0, launched_s=3.0, back_s=5.0)
    return job.world(2, 3.0, 4.0, 5.0, 5.0).exits(9.0, 2).end(10.0)


def moved(what: record.IncidentNoted, by_s: float) -> record.IncidentNoted:
    times = {name: getattr(what, name) for name in what.__struct_fields__ if name.endswith("_at_s")}
    return msgspec.structs.replace(what, **{name: at_s + by_s for name, at_s in times.items() if at_s is not None})
