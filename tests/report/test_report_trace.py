"""The trace: what Perfetto needs of an event, and that rows never overlap themselves."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

from holdfast.observe import record, trace
from holdfast.observe.goodput import divide
from report.written import OTHER, Written, killed, taken_over


def traced(job: Written) -> list[dict[str, Any]]:
    found = json.loads(trace.encode(job.notes, divide(job.notes)))
    events: list[dict[str, Any]] = found["traceEvents"]
    return events


def row(events: list[dict[str, Any]], process: str, thread: str) -> list[dict[str, Any]]:
    """The stretches of a row that is named so."""
    names = {(each["name"], each["pid"], each["tid"]): each["args"]["name"] for each in events if each["ph"] == "M"}
    [pid] = [pid for (kind, pid, _), name in names.items() if kind == "process_name" and name == process]
    [tid] = [tid for (kind, of, tid), name in names.items() if kind == "thread_name" and of == pid and name == thread]
    own = [each for each in events if each["ph"] == "X" and (each["pid"], each["tid"]) == (pid, tid)]
    return sorted(own, key=lambda each: (each["ts"], -each["dur"]))


def test_the_wall_clock_is_one_row_without_a_gap() -> None:
    found = row(traced(killed(base=10)), "job r1", "wall clock")
    assert [each["name"] for each in found][:2] == ["first start", "training"]
    assert all(one["ts"] + one["dur"] == after["ts"] for one, after in pairwise(found))
    assert sum(each["dur"] for each in found) == 10_000_000
    assert {each["args"].get("incident") for each in found if each["name"] == "redone work"} == {1}


def test_it_begins_with_the_job_also_where_the_record_does_not() -> None:
    events = traced(taken_over())
    wall = row(events, "job r1", "wall clock")
    assert (wall[0]["ts"], sum(each["dur"] for each in wall)) == (0, 110_000_000)
    assert [each["ts"] for each in row(events, "job r1", "incidents")] == [40_000_000, 95_000_000]
    assert row(events, f"node {OTHER}", "rank 0")[0]["ts"] == 2_000_000


def test_worlds_and_incidents_have_rows() -> None:
    events = traced(killed())
    assert [each["name"] for each in row(events, "job r1", "worlds")] == ["generation 0", "generation 1"]
    [incident] = row(events, "job r1", "incidents")
    assert (incident["name"], incident["ts"], incident["dur"]) == ("1: rank 1: killed by SIGKILL", 5_000_000, 1_000_000)


def test_a_rank_starts_and_trains_in_each_of_its_worlds() -> None:
    events = traced(killed().note(5.8, record.CheckpointRestored(1, 1, 10, 0.2, "memory")))
    found = row(events, "node n1:7", "rank 1")
    names = [each["name"] for each in found]
    assert names == ["generation 0", "starting", "training", "generation 1", "starting", "restoring", "training"]
    for outer, inner in pairwise(found):
        ends = outer["ts"] + outer["dur"], inner["ts"] + inner["dur"]
        assert inner["ts"] >= ends[0] or ends[1] <= ends[0]  # beside it, or in it


def test_nodes_are_processes_of_their_own() -> None:
    job = killed().note(1.0, record.WorldLaunched(0, 4, 0, first_rank=2, local_size=2), "n2:9")
    events = traced(job.note(2.0, record.RankFirstStep(0, 3), "n2:9"))
    assert row(events, "node n2:9", "rank 3")[0]["name"] == "generation 0"


def test_saves_overlap_so_they_have_ids() -> None:
    job = killed().note(3.0, record.CheckpointSaved(10, "a", 1, 1.5)).note(3.5, record.CheckpointSaved(20, "b", 1, 1.5))
    saves = [each for each in traced(job) if each.get("cat") == "checkpoint"]
    assert [(each["ph"], each["id"], each["ts"]) for each in saves] == [
        ("b", 1, 1_500_000),
        ("e", 1, 3_000_000),
        ("b", 2, 2_000_000),
        ("e", 2, 3_500_000),
    ]


def test_every_event_has_what_the_format_asks_for() -> None:
    job = killed().note(3.0, record.Trained(10, "1/2", 0.5, 9.0, 3)).note(-2.0, record.RankExited(0, 5, 1, 0), "n9:1")
    job.note(3.0, record.RankHung(0, 1, "x", 1.0)).note(3.0, record.FaultInjected(1, "kill"))
    events = traced(job)
    for each in events:
        assert {"ph", "pid", "tid", "name"} <= set(each)
        assert each["ph"] == "M" or each["ts"] >= 0
        assert each["ph"] != "X" or each["dur"] >= 0
    assert {"M", "X", "C", "i"} <= {each["ph"] for each in events}
    assert {each["name"] for each in events if each["ph"] == "C"} == {"step", "loss"}
