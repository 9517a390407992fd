"""The record of a job: what is written can be read again, from any place, in whatever state it was left."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import fields

from holdfast.agent.records import Records
from holdfast.agent.rundir import RunDirectory
from holdfast.control.causes import Kind
from holdfast.control.incidents import Incident
from holdfast.observe import record
from holdfast.observe.events import Event, EventLog
from holdfast.observe.record import IncidentOpened, Noted, RankExited, Reader, WorldLaunched


def log(path: Path | None, *sinks: Any, node: str = "n1", said: list[str] | None = None) -> EventLog:
    complaints = said if said is not None else []
    return EventLog(str(path) if path is not None else None, list(sinks), complaints.append, node)


def exits(notes: list[Noted]) -> list[int]:
    return [noted.what.rank for noted in notes if isinstance(noted.what, RankExited)]


def incident(number: int = 1) -> IncidentOpened:
    return IncidentOpened(number, 0, Kind.SIGNAL, "killed by SIGKILL", "restart 1 of 3", True, phases={"stop": 0.1})


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / record.NAME
    events = log(path)
    events.emit(WorldLaunched(0, 2, 0))
    events.emit(RankExited(0, 1, 4711, -9))
    events.emit(incident())
    events.close()
    launched, exited, opened = record.read(path)
    assert (launched.what, launched.node, launched.seq) == (WorldLaunched(0, 2, 0), "n1", 0)
    assert exited.what == RankExited(0, 1, 4711, -9) and 0 <= launched.at_s <= exited.at_s
    assert opened.what == incident() and opened.seq == 2
    first = json.loads(path.read_text().splitlines()[0])
    assert list(first) == ["v", "node", "seq", "name", "at_s", "time", "data"] and first["v"] == record.VERSION


def test_every_type_has_a_name_of_its_own() -> None:
    assert len(record.TYPES) == len(set(record.TYPES.values())) and "" not in record.TYPES


def test_the_document_has_every_type_with_all_its_fields() -> None:
    text = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
    rows = {
        name: row
        for row in re.findall(r"(?m)^\| `\w+\.?\w*`.*\|$", text.partition("## Events")[2].partition("\n## ")[0])
        for name in re.findall(r"`([\w.]+)`", row.split("|")[1])
    }
    assert sorted(rows) == sorted(record.TYPES)
    for name, kind in record.TYPES.items():
        if not issubclass(kind, Incident):  # whose file is described elsewhere
            missing = [field.encode_name for field in fields(kind) if f"`{field.encode_name}`" not in rows[name]]
            assert missing == [], name


def test_a_reader_that_starts_in_the_middle_loses_one_line_at_most(tmp_path: Path) -> None:
    path = tmp_path / record.NAME
    events = log(path)
    for rank in range(50):
        events.emit(RankExited(0, rank, 1, 0))
    size = path.stat().st_size
    starts = [0, *(len(line) for line in path.read_bytes().splitlines(keepends=True))]
    edges = {sum(starts[: at + 1]) for at in range(50)}
    for offset in range(0, size, 7):
        found = exits(list(Reader(path, offset)))
        whole = sum(edge >= offset for edge in edges)
        assert found == list(range(50 - whole, 50)), offset


def test_a_torn_last_line_is_read_once_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / record.NAME
    events = log(path)
    events.emit(RankExited(0, 0, 1, 0))
    line = path.read_bytes().replace(b'"rank":0', b'"rank":1')
    reader = Reader(path)
    assert exits(list(reader)) == [0]
    with open(path, "ab") as file:
        file.write(line[:20])
        file.flush()
        assert list(reader) == []
        file.write(line[20:])
    assert exits(list(reader)) == [1] and reader.passed_over == 0


def test_lines_that_are_none_are_passed_over_and_counted(tmp_path: Path) -> None:
    path = tmp_path / record.NAME
    events = log(path)
    events.emit(RankExited(0, 0, 1, 0))
    with open(path, "ab") as file:
        file.write(b'{"v":1,"name":"rank.exi\n\xff\xfe\n\n[1]\n{"name":"rank.exited","data":{"rank":"x"}}\n')
        file.write(b'{"v":9,"node":"n","seq":1,"name":"of.tomorrow","at_s":1,"time":"","data":{}}\n')
        file.write(b"x" * (record.MAX_LINE_BYTES + record.PIECE_BYTES) + b"\n")
    events.emit(RankExited(0, 2, 1, 0))
    reader = Reader(path)
    assert exits(list(reader)) == [0, 2] and reader.passed_over >= 5


def test_an_old_version_and_a_newer_one_are_read_as_far_as_they_are_known(tmp_path: Path) -> None:
    path = tmp_path / record.NAME
    old = {
        "name": "rank.exited",
        "at_s": 1.5,
        "time": "then",
        "data": {"generation": 0, "rank": 3, "pid": 1, "status": 0},
    }
    new = {"v": 2, **old, "data": {**old["data"], "rank": 4, "color": "red"}, "more": [1]}  # type: ignore[dict-item]
    path.write_text(json.dumps(old) + "\n" + json.dumps(new) + "\n")
    first, second = record.read(path)
    assert (first.what, first.node, first.seq, first.at_s) == (RankExited(0, 3, 1, 0), "", -1, 1.5)
    assert second.what == RankExited(0, 4, 1, 0)


def test_a_full_disk_is_told_of_once_and_a_line_that_was_cut_off_takes_no_other_with_it(tmp_path: Path) -> None:
    said: list[str] = []
    full = log(Path("/dev/full"), said=said)
    for _ in range(3):
        full.emit(RankExited(0, 0, 1, 0))
    assert said == ["cannot write events.jsonl: No space left on device; training goes on without it"]
    path = tmp_path / record.NAME
    events = log(path, said=said)
    events.emit(RankExited(0, 0, 1, 0))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 30, before[1]))
        events.emit(RankExited(0, 1, 1, 0))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    events.emit(RankExited(0, 2, 1, 0))
    reader = Reader(path)
    assert exits(list(reader)) == [0, 2] and reader.passed_over == 1


WRITES = """
import sys
from holdfast.observe.events import EventLog
from holdfast.observe.record import RankExited
log = EventLog(sys.argv[1], [], print, "n1")
rank = 0
while True:
    log.emit(RankExited(0, rank, 1, 0))
    rank += 1
    if rank == 100:
        print("ready", flush=True)
"""


def test_whoever_is_killed_while_it_writes_leaves_all_lines_but_one(tmp_path: Path) -> None:
    path = tmp_path / record.NAME
    writer = subprocess.Popen([sys.executable, "-c", WRITES, str(path)], stdout=subprocess.PIPE)
    assert writer.stdout is not None and writer.stdout.readline() == b"ready\n"
    writer.kill()
    writer.wait()
    writer.stdout.close()
    reader = Reader(path)
    found = exits(list(reader))
    assert found == list(range(len(found))) and len(found) >= 100 and reader.passed_over == 0


def test_an_incident_is_on_the_disk_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    go_on = threading.Event()

    def slow(fd: int) -> None:
        go_on.wait(30)
        synced.append(fd)

    monkeypatch.setattr(os, "fdatasync", slow)
    events = log(tmp_path / record.NAME)
    events.emit(RankExited(0, 0, 1, 0))
    events.emit(incident())
    events.sync()
    assert synced == [], "a slow disk holds nobody up"
    go_on.set()
    events.close()
    assert len(synced) == 2, "and at the end all of it is there"


def test_what_is_written_while_the_disk_is_busy_is_synced_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / record.NAME
    begun, go_on = threading.Semaphore(0), threading.Semaphore(0)
    seen: list[int] = []

    def slow(fd: int) -> None:
        seen.append(len(record.read(path)))
        begun.release()
        assert go_on.acquire(timeout=30)

    monkeypatch.setattr(os, "fdatasync", slow)
    events = log(path)
    events.emit(incident(1))
    events.sync()
    assert begun.acquire(timeout=30)
    for number in (2, 3):
        events.emit(incident(number))
        events.sync()
    go_on.release()
    assert begun.acquire(timeout=30), "it goes on by itself"
    assert seen == [1, 3]
    go_on.release(2)
    events.close()
    assert seen == [1, 3, 3]


def test_an_incident_asks_for_a_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[list[str]] = []

    def note(fd: int) -> None:
        synced.append([noted.what.NAME for noted in record.read(f"/proc/self/fd/{fd}")])

    monkeypatch.setattr(os, "fdatasync", note)
    run_dir = RunDirectory(str(tmp_path), "job")
    records = Records(run_dir, [], lambda *lines: None, lambda *lines: None)
    records.opened(Incident(1, 0, Kind.SIGNAL, "killed", "restart 1 of 3", True))
    assert records.events._syncing is not None
    records.events._syncing.join(30)
    assert synced == [["incident.opened"]]


def test_a_sink_gets_plain_values_and_one_that_fails_is_left_out(tmp_path: Path) -> None:
    got: list[Event] = []
    said: list[str] = []

    def bad(event: Event) -> None:
        raise RuntimeError("no")

    events = log(None, got.append, bad, said=said)
    events.emit(WorldLaunched(0, 2, 0))
    events.emit(RankExited(0, 1, 4711, -9))
    assert [event.name for event in got] == ["world.launched", "rank.exited"]
    assert got[1].data == {"generation": 0, "rank": 1, "pid": 4711, "status": -9}
    assert len(said) == 1 and "gets no more events: RuntimeError('no')" in said[0]


def test_lines_of_another_node_are_moved_to_this_ones_clock(tmp_path: Path) -> None:
    here, there = log(tmp_path / "here", node="n1"), log(tmp_path / "there", node="n2")
    there.emit(RankExited(0, 5, 1, 0))
    there.emit(RankExited(0, 6, 1, 0))
    here.emit(RankExited(0, 0, 1, 0))
    lines = list(there.since(0))
    assert [seq for seq, _ in lines] == [1]
    here.merge([line for _, line in there.since(-1)] + [b"nothing"], 100.0)
    mine, first, second = record.read(tmp_path / "here")
    assert (first.node, first.seq, second.seq) == ("n2", 0, 1) and 100.0 <= first.at_s < 160.0 and mine.at_s < 60.0
    assert list(here.since(-1)) == [(0, (tmp_path / "here").read_bytes().splitlines(keepends=True)[0])]


def test_an_event_costs_microseconds(tmp_path: Path) -> None:
    """The budget is 5 us on an idle machine, where bench/events.py measures it; here, that it is of this order."""
    events = log(tmp_path / record.NAME)
    began_s = time.process_time()
    for rank in range(2000):
        events.emit(RankExited(0, rank, 1, 0))
    assert (time.process_time() - began_s) / 2000 < 100e-6
