"""Jobs as their records tell of them, for metrics."""

from __future__ import annotations

from holdfast.control.causes import Kind
from holdfast.observe import record
from holdfast.observe.events import iso
from holdfast.observe.record import Noted, What
from holdfast.observe.state import State

CLOCK_S = 5_000.0  # what the first node's monotonic clock showed at the start
NODES = ("n1", "n2")


class Told:
    """A job of two nodes with two ranks each, that began at that time of the wall clock. It has trained since."""

    def __init__(self, run_id: str, began_s: float) -> None:
        self.began_s = began_s
        self.state = State()
        for node in NODES:
            self.note(
                0.0,
                record.JobStarted(
                    run_id, node, 2, {"path": "/x/train.py"}, 7, clock_s=CLOCK_S, version="0.1.0", max_restarts=9
                ),
                node,
            )
        self.launch(1.0, 0)
        self.progress(10.0, 0, 50)

    def note(self, at_s: float, what: What, node: str = "n1") -> None:
        self.state.take(Noted(what, at_s, iso(self.began_s + at_s), node, 0))

    def launch(self, at_s: float, generation: int) -> None:
        for at, node in enumerate(NODES):
            launched = record.WorldLaunched(generation, 4, generation, 2 * at, at, 2, local_size=2)
            self.note(at_s, launched, node)
            self.note(at_s + 0.5, record.WorldStarted(generation, {2 * at: 100, 2 * at + 1: 101}), node)
            self.note(at_s + 1.0, record.RankFirstStep(generation, 2 * at), node)

    def progress(self, at_s: float, generation: int, steps: int, saving_s: float = 0.25) -> None:
        for at, node in enumerate(NODES):
            progress = record.Progress(
                generation=generation,
                first_rank=2 * at,
                step=steps,
                steps=(steps, steps),
                base=0,
                step_us=(500_000, 250_000),
                own_us=(125_000, 62_500 * (1 + at)),
                saving_s=saving_s,
                phases="11",
                section_us=(31_250, 15_625),
            )
            self.note(at_s, progress, node)

    def fail(self, at_s: float, generation: int, kind: Kind = Kind.HANG) -> None:
        """Noticed after 2 s, stopped after 1, launched after 0.5, started after 0.25, and it steps 4 s later."""
        failed_s = CLOCK_S + at_s
        incident = record.IncidentClosed(
            number=generation,
            generation=generation,
            kind=kind,
            headline="no step",
            action="restart",
            restarted=True,
            failed_at_s=failed_s,
            detected_at_s=failed_s + 2,
            stopped_at_s=failed_s + 3,
            launched_at_s=failed_s + 3.5,
            started_at_s=failed_s + 3.75,
            recovered_at_s=failed_s + 7.75,
        )
        self.launch(at_s + 3.5, generation + 1)
        for node in NODES:
            self.note(at_s + 7.75, incident, node)

    def save(self, at_s: float, step: int) -> None:
        self.note(at_s, record.CheckpointSaved(step, f"step-{step}", 4096, 1.5, True))

    def train(self, at_s: float, step: int, loss: float | None) -> None:
        self.note(at_s, record.Trained(step, "2/5", loss, 640.0, 900))

    def end(self, at_s: float, outcome: str) -> None:
        self.note(at_s, record.JobEnded(outcome, "", 100, at_s, 7.75))


def full(run_id: str, began_s: float) -> Told:
    """One of which everything is known."""
    told = Told(run_id, began_s)
    told.save(20.0, 40)
    told.note(25.0, record.CheckpointFailed(45, "no space left on device"))
    told.fail(30.0, 0)
    told.progress(50.0, 1, 60)
    told.train(55.0, 61, 0.75)
    told.note(56.0, record.StragglerFound(1, 3, 0.5, 0.125, 6.0, 3), "n2")
    told.note(56.5, record.StandbyReady(0, 300, 4096, 1024))
    told.note(57.0, record.FaultInjected(1, "kill"))
    return told
