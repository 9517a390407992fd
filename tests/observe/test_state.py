"""How a job stands, folded up from its record."""

from __future__ import annotations

from holdfast.control.causes import Kind
from holdfast.observe import record
from holdfast.observe.record import IncidentClosed, IncidentOpened, Noted, What
from holdfast.observe.state import MAX_POINTS, State, fold

JOB = record.JobStarted("job", "id", 2, {"type": "Script", "path": "/x/train.py"}, 4711, "n1", 1000.0, "1.0", 3, (1, 2))


def noted(at_s: float, what: What, node: str = "n1:1") -> Noted:
    return Noted(what, at_s, f"at {at_s}", node, -1)


def started(*more: Noted) -> list[Noted]:
    return [
        noted(0.1, JOB),
        noted(2.0, record.WorldLaunched(0, 2, 0, local_size=2)),
        noted(2.1, record.WorldStarted(0, {0: 100, 1: 101})),
        noted(3.0, record.RankFirstStep(0, 0)),
        noted(3.1, record.RankFirstStep(0, 1)),
        *more,
    ]


def test_a_job_that_trains() -> None:
    progress = record.Progress(0, 0, 50, (50, 50), 0, (100_000, 100_000), (50_000, 90_000), 0.2, "13")
    told = record.Trained(50, "1/2", 0.25, 640.0, 150)
    state = fold(started(noted(8.0, progress), noted(8.1, told)))
    assert (state.run_id, state.program, state.lead, state.phase) == ("job", "train.py", "n1:1", "training")
    assert (state.step, state.step_s, state.loss, state.steps_left) == (50, 0.1, 0.25, 150)
    assert [(rank.pid, rank.state, rank.steps, rank.own_s) for rank in state.ranks.values()] == [
        (100, "training", 50, 0.05),
        (101, "saving", 50, 0.09),
    ]
    assert state.world is not None and (state.world.launched_s, state.world.stepped_s) == (2.0, 3.1)


def test_one_number_is_that_of_all_and_phases_nobody_knows_change_nothing() -> None:
    state = fold(started(noted(8.0, record.Progress(0, 0, 50, (50,), step_us=(100_000,), phases="3x"))))
    assert [(rank.steps, rank.step_s, rank.state) for rank in state.ranks.values()] == [
        (50, 0.1, "saving"),
        (50, 0.1, "training"),
    ]


def test_a_rank_that_is_killed_and_comes_back() -> None:
    opened = IncidentOpened(
        1, 0, Kind.SIGNAL, "killed", "restart 1 of 3", True, rank=1, failed_at_s=1010.0, stopped_at_s=1010.1
    )
    closed = IncidentClosed(
        1, 0, Kind.SIGNAL, "killed", "restart 1 of 3", True, rank=1, failed_at_s=1010.0, stopped_at_s=1010.1,
        launched_at_s=1010.2, started_at_s=1010.3, recovered_at_s=1010.5,
    )  # fmt: skip
    failing = started(noted(10.0, record.RankExited(0, 1, 101, -9)), noted(10.1, opened))
    state = fold(failing)
    assert (state.phase, state.ranks[1].state, state.ranks[0].state) == ("recovering", "failed", "training")
    again = [
        noted(10.2, record.WorldLaunched(1, 2, 1, local_size=2)),
        noted(10.5, record.RankFirstStep(1, 0)),
        noted(10.6, closed),
        noted(10.7, record.RankExited(0, 0, 100, -15)),  # of the old world, told late
    ]
    state = fold([*failing, *again])
    assert (state.phase, state.restarts, len(state.incidents)) == ("training", 1, 1)
    assert state.lost_s == 0.5 and state.worlds[0].ended_s == 10.0 and state.ranks[0].state == "training"


def test_a_world_that_goes_on_after_an_incident_trains() -> None:
    """With min-healthy the other nodes are not stopped."""
    told = {"failed_at_s": 1010.0, "stopped_at_s": 1010.1}
    opened = IncidentOpened(1, 0, Kind.LOST_NODE, "gone", "2 healthy nodes go on", False, **told)  # type: ignore[arg-type]
    closed = IncidentClosed(1, 0, Kind.LOST_NODE, "gone", "2 healthy nodes go on", False, **told)  # type: ignore[arg-type]
    state = fold(started(noted(10.1, opened), noted(10.1, closed)))
    assert (state.phase, len(state.incidents)) == ("training", 1)


def test_lines_that_come_late_turn_nothing_back() -> None:
    """A coordinator that takes over is told of everything again by the other nodes."""
    there = "n2:1"
    now = [
        noted(20.0, record.WorldLaunched(1, 4, 1, local_size=2)),
        noted(20.1, record.WorldLaunched(1, 4, 1, first_rank=2, local_size=2), there),
        noted(29.0, record.Progress(1, 2, 89, (39, 39), 50, (100_000,)), there),
        noted(30.0, record.Progress(1, 0, 90, (40, 40), 50, (100_000,))),
        noted(30.5, record.Trained(91, "2", 0.5, 640.0, 9)),
        noted(31.0, record.CheckpointSaved(90, "step-90")),
        noted(31.5, record.CheckpointPersisted(91, "step-91", committed=True), there),
    ]
    late = [
        noted(8.0, record.Progress(0, 2, 40, (40, 40), 0), there),
        noted(8.5, record.Trained(41, "1", 2.5, 320.0, 59), there),
        noted(9.0, record.CheckpointSaved(40, "step-40"), there),
        noted(9.5, record.CheckpointPersisted(41, "step-41", committed=True), there),
        noted(25.0, record.Progress(1, 2, 70, (20, 20), 50), there),
    ]
    before = [*started(), noted(0.2, record.JobStarted("job", "id2", 2, None, 5, "n2", 0.0), there)]
    state = fold([*before, *now, *late])
    right = fold(sorted([*before, *late, *now], key=lambda each: each.at_s))
    assert (state.step, state.loss, state.epoch, state.steps_left, state.progressed_s) == (91, 0.5, "2", 9, 30.5)
    assert state.checkpoint is not None and state.checkpoint.step == 91
    assert state.losses == right.losses and [point.step for point in state.losses] == [41, 91]
    assert state.paces == right.paces and state.nodes == right.nodes and state.ranks == right.ranks


def test_other_nodes_add_their_ranks_and_not_their_view_of_incidents() -> None:
    there = "n2:1"
    opened = IncidentOpened(1, 0, Kind.LOST_NODE, "gone", "restart", True, failed_at_s=77.0)
    state = fold(
        started(
            noted(0.2, record.JobStarted("job", "id2", 2, None, 5, "n2", 0.0), there),
            noted(2.1, record.WorldLaunched(0, 4, 0, first_rank=2, local_size=2), there),
            noted(9.0, record.Progress(0, 2, 9, (9, 8), step_us=(100_000, 100_000)), there),
            noted(9.5, opened, there),
        )
    )
    assert sorted(state.ranks) == [0, 1, 2, 3] and state.ranks[3].steps == 8 and state.ranks[2].node == there
    assert list(state.nodes) == ["n1:1", there] and state.incidents == {} and state.nodes[there].heard_s == 9.5


def test_the_end() -> None:
    state = fold(started(noted(9.0, record.JobEnded("hang", "why", 5, 9.0, 1.0))))
    assert state.phase == "hang" and state.ended is not None and state.ended.reason == "why"


def test_a_record_that_begins_in_the_middle_is_shown_as_far_as_it_goes() -> None:
    for begin in range(6):
        state = fold(started(noted(8.0, record.Progress(0, 0, 50, (50, 50))))[begin:])
        assert state.phase in ("starting", "training")


def test_curves_stay_short() -> None:
    state = State()
    for step in range(5 * MAX_POINTS):
        state.take(noted(float(step), record.Trained(step, loss=1.0)))
    assert len(state.losses) <= MAX_POINTS + 1 and state.losses[-1].step == 5 * MAX_POINTS - 1
    assert [point.step for point in state.losses] == sorted({point.step for point in state.losses})


def test_stragglers_come_and_go() -> None:
    found = record.StragglerFound(0, 1, 0.2, 0.1, 2.0, 3)
    state = fold(started(noted(9.0, found)))
    assert state.stragglers == [1]
    state.take(noted(9.1, record.StragglerGone(0, 1)))
    assert state.stragglers == []


def test_processes_that_stand_by() -> None:
    there = "n2:1"
    state = fold(
        started(
            noted(0.2, record.JobStarted("job", "id2", 2, None, 5, "n2", 0.0), there),
            noted(2.1, record.WorldLaunched(0, 4, 0, first_rank=2, local_size=2), there),
            noted(5.0, record.StandbyReady(0, 200, 1_000, 10)),
            noted(5.1, record.StandbyReady(1, 201, 1_000, 20)),
            noted(5.2, record.StandbyReady(0, 200, 4_000), there),
        )
    )
    assert (len(state.standing_by), state.standby_bytes) == (3, (6_000, 30))
    state.take(noted(6.0, record.StandbyEnded(1, 201)))
    state.take(noted(10.0, record.WorldLaunched(1, 2, 1, local_size=2, stayed=(0, 1))))
    assert [each.pid for each in state.standing_by] == [200], "the other node may be gone"
    state.take(noted(10.1, record.WorldStarted(1, {0: 100, 1: 200})))
    assert state.standing_by == [], "it is a rank now"
    state.take(noted(10.2, record.WorldLaunched(1, 2, 1, first_rank=2, local_size=2), there))
    assert state.standby_bytes == (4_000, 0), "another node's process may have the same number"
    state.take(noted(12.0, record.StandbyReady(0, 300, 1_000, 10)))
    state.take(noted(13.0, record.StandbyReady(0, 301, 2_000, 10)))
    assert state.standby_bytes == (6_000, 10), "one for a local rank"
    state.take(noted(14.0, record.JobEnded("succeeded", "", 5, 9.0, 1.0)))
    assert state.standing_by == []
