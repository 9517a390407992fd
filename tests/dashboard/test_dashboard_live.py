"""What watchers of a growing record are told, and that it adds up."""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dashboard import fake_agent
from dashboard.conftest import Open, Page
from dashboard.fake_agent import answering, folded, told
from dashboard.made_records import LEAD, Made, typical
from holdfast.control.causes import Kind
from holdfast.dashboard import live as lives
from holdfast.dashboard.live import Live
from holdfast.dashboard.serving import follow
from holdfast.observe import metrics, record, state

NODES = [LEAD, "gpu-a2:4101"]


@pytest.fixture
def made(tmp_path: Path) -> Made:
    made = Made(tmp_path / "job_ab")
    made.start(NODES, 2)
    made.launch(0, NODES, 2, 1.0)
    return made


class Watcher:
    """What a page does with what it is told."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self.lists: dict[str, list[Any]] = {"paces": [], "losses": []}
        self.maps: dict[str, dict[int, Any]] = {"ranks": {}, "worlds": {}, "incidents": {}}
        self.head: dict[str, Any] = {}
        snapshot = json.loads(live.snapshot()[0])
        self.id = snapshot.pop("id")
        self.take(snapshot)

    def catch_up(self) -> None:
        number = self._live.follow(self.id)
        assert number is not None
        for name, _, change in self._live.after(number, 0.0) or ():
            self.id = name
            self.take(json.loads(change))

    def take(self, change: dict[str, Any]) -> None:
        self.head = change.get("head", self.head)
        if "all_ranks" in change:
            self.maps["ranks"] = {row[0]: row for row in change["all_ranks"]}
        for name, rows in self.maps.items():
            rows.update({row[0]: row for row in change.get(name, ())})
        for name in self.lists:
            if name in change:
                anew, points = change[name]
                self.lists[name] = points if anew else self.lists[name] + points

    def knows(self) -> object:
        return self.lists, self.maps, {**self.head, "now_s": 0}


def test_changes_add_up_to_the_whole(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever came early and heard of every change knows what somebody who comes now is told."""
    monkeypatch.setattr(state, "MAX_POINTS", 20)  # so that curves lose points on the way
    live = Live(str(made.run_dir))
    live.update()
    early = Watcher(live)
    chance = random.Random(7)
    generation = 0
    for at in range(120):
        at_s = 10.0 + at
        match chance.choice(["progress", "trained", "incident", "exit", "hang", "straggler", "save", "nothing"]):
            case "progress":
                made.progress(generation, NODES, 2, at_s, at, 0)
            case "trained":
                made.add(record.Trained(at, "1", 1.0 / (at + 1)), at_s)
            case "incident":
                made.incident(generation, generation, at_s, chance.choice(list(Kind)))
                generation += 1
                made.launch(generation, chance.choice([NODES, NODES[:1]]), 2, at_s + 0.5)
            case "exit":
                made.add(record.RankExited(generation, chance.randrange(4), 1, chance.choice([0, -9])), at_s)
            case "hang":
                made.add(record.RankHung(generation, chance.randrange(4), "no step", 30.0), at_s)
            case "straggler":
                made.add(record.StragglerFound(generation, chance.randrange(4), 1.0, 0.5, 9.0, 3), at_s)
            case "save":
                made.add(record.CheckpointSaved(at, f"step-{at}"), at_s)
        live.update()
        early.catch_up()
    assert generation > 3 and len(early.lists["losses"]) > 5
    assert early.knows() == Watcher(live).knows()
    fresh = Live(str(made.run_dir))
    fresh.update()
    assert early.maps == Watcher(fresh).maps, "and what one who reads the record anew is told"
    for name in ("worlds", "incidents"):
        assert list(early.maps[name]) == list(Watcher(fresh).maps[name]) == sorted(early.maps[name])
    assert early.head["lost_s"] == pytest.approx(fresh.state.lost_s, abs=0.01)


def test_a_torn_line_waits_for_its_end(made: Made) -> None:
    live = Live(str(made.run_dir))
    live.update()
    line = b'{"v":1,"node":"%b","seq":9,"name":"trained","at_s":9.0,"time":"","data":{"step":77}}\n' % LEAD.encode()
    with open(made.run_dir / record.NAME, "ab", buffering=0) as file:
        file.write(line[:50])
        live.update()
        assert live.state.step == 0
        file.write(line[50:])
        live.update()
        assert live.state.step == 77


def test_nothing_new_is_not_told(made: Made) -> None:
    live = Live(str(made.run_dir))
    live.update()
    watcher = Watcher(live)
    live.update()
    number = live.follow(watcher.id)
    assert number is not None and live.after(number, 0.0) == []


def test_who_was_away_too_long_begins_anew(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lives, "KEPT", 3)
    live = Live(str(made.run_dir))
    live.update()
    watcher = Watcher(live)
    slow = live.follow(watcher.id)
    assert slow is not None
    for step in range(1, 6):
        made.add(record.Trained(step), 10.0 + step)
        live.update()
    assert live.follow(watcher.id) is None
    assert live.after(slow, 0.0) is None
    for never in ("", "-", "x-1", f"{watcher.id}0000", f"{watcher.id.partition('-')[0]}-x", "-1", "٣-٣"):
        assert live.follow(never) is None


def test_a_job_whose_agent_is_gone_does_not_look_alive(tmp_path: Path) -> None:
    here = Made(tmp_path / "here", lead=f"{socket.gethostname()}:{os.getpid()}")
    here.start([f"{socket.gethostname()}:{os.getpid()}"], 1, pid=os.getpid())
    live = Live(str(here.run_dir))
    live.update()
    live.update()
    assert json.loads(live.snapshot()[0])["head"]["phase"] == "gone"
    there = Made(tmp_path / "there")
    there.start([LEAD], 1)
    live = Live(str(there.run_dir))
    live.update()
    live.update()
    assert json.loads(live.snapshot()[0])["head"]["phase"] == "starting", "of another machine nothing is known"


def test_metrics_know_that_the_agent_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lives, "STAND_S", 0.0)
    monkeypatch.setattr(fake_agent, "HERE", here := f"{socket.gethostname()}:{os.getpid()}")
    folded(tmp_path, os.getpid(), (here,))
    live = Live(str(tmp_path))
    assert live.measure(lambda _, there_s, is_gone: (there_s, is_gone)) == (None, False)

    def measured() -> tuple[bool, float]:
        text = live.measure(metrics.render)
        [wall_s] = [line.rpartition(" ")[2] for line in text.splitlines() if line.startswith("holdfast_wall_seconds_")]
        return f'holdfast_up{{run_id="{live.state.run_id}"}} 1' in text, float(wall_s)

    with answering(told(tmp_path)):
        live.update()
        live.update()
        up, wall_s = measured()
        assert up
    live.update()
    gone, frozen_s = measured()
    assert not gone and frozen_s == wall_s
    live.update()
    assert measured() == (False, wall_s), "it does not run on"


def test_who_comes_to_a_quiet_job_is_told_what_time_it_is(tmp_path: Path) -> None:
    folded(tmp_path, os.getpid())
    live = Live(str(tmp_path))
    with answering(told(tmp_path)):
        live.update()
        live.update()
        first = json.loads(live.snapshot()[0])
        live.state.clock_s -= 60.0  # so much later
        again = json.loads(live.snapshot()[0])
    assert again["id"] == first["id"] and again["head"]["now_s"] - first["head"]["now_s"] == pytest.approx(60.0, abs=5)


def test_a_record_that_cannot_be_read_for_a_while_is_said_once(made: Made) -> None:
    live = Live(str(made.run_dir))
    live.update()
    good, live._reader = live._reader, record.Reader("/proc/self/mem")  # of which the first page is none
    said: list[str] = []
    looks = iter(range(4))

    def ends() -> bool:
        at = next(looks, None)
        if at == 3:
            made.add(record.JobEnded("succeeded", "", 10, 30.0, 0.0), 30.0)
            live._reader = good
        return at is None

    follow(live, ends, True, said.append)
    assert said == ["cannot read the record: Input/output error; the page shows what it knows, and tries on"]
    assert next(looks, None) is None and live.state.ended is not None


# -- over the wire ----------------------------------------------------------------------------------------------------


class Stream:
    """One watcher's line to a page."""

    def __init__(self, page: Page, since: str = "", last: str = "") -> None:
        self._socket = socket.create_connection(("127.0.0.1", page.port), timeout=30)
        more = f"Last-Event-ID: {last}\r\n" if last else ""
        self._socket.sendall(f"GET /events?since={since} HTTP/1.1\r\nHost: localhost\r\n{more}\r\n".encode())
        self._file = self._socket.makefile("rb")
        assert self._file.readline() == b"HTTP/1.1 200 OK\r\n"
        while self._file.readline().strip():
            pass
        assert self.next() == {"retry": "1000"}

    def next(self) -> dict[str, str]:
        found: dict[str, str] = {}
        while line := self._file.readline().decode().rstrip("\n"):
            name, _, value = line.partition(": ")
            found[name] = value
        return found

    def close(self) -> None:
        self._file.close()
        self._socket.close()


def id_of(page: Page) -> str:
    return str(json.loads(page.ask("/state")[1])["id"])


def test_a_watcher_goes_on_where_it_was(made: Made, open_page: Open) -> None:
    page = open_page(made.run_dir)
    stream = Stream(page, since=id_of(page))
    made.add(record.Trained(5), 20.0)
    first = stream.next()
    assert json.loads(first["data"])["head"]["step"] == 5
    stream.close()
    made.add(record.Trained(6), 21.0)
    stream = Stream(page, since="long-ago", last=first["id"])
    assert json.loads(stream.next()["data"])["head"]["step"] == 6
    stream.close()
    assert Stream(page, since="another-1").next()["event"] == "anew"


def test_fifty_watchers_hear_the_same(made: Made, open_page: Open) -> None:
    page = open_page(made.run_dir)
    since = id_of(page)
    streams = [Stream(page, since=since) for _ in range(50)]
    deaf = Stream(page, since=since)  # it never reads, and nobody waits for it
    for step in range(1, 4):
        made.add(record.Trained(step), 20.0 + step)
        heard = {json.dumps(stream.next()) for stream in streams}
        assert len(heard) == 1
        assert json.loads(json.loads(heard.pop())["data"])["head"]["step"] == step
    for stream in [*streams, deaf]:
        stream.close()


def test_the_agents_page_ends_with_the_job(made: Made, open_page: Open) -> None:
    page = open_page(made.run_dir, "--parent", str(os.getpid()), command=("holdfast.dashboard",))
    stream = Stream(page, since=id_of(page))
    made.add(record.JobEnded("succeeded", "", 10, 30.0, 0.0), 30.0)
    assert json.loads(stream.next()["data"])["head"]["phase"] == "succeeded", "watchers hear of it first"
    assert stream.next()["event"] == "bye"
    assert page.process.wait(30) == 0


def test_the_agents_page_ends_with_the_agent(made: Made) -> None:
    start = (
        "import os, subprocess, sys\n"
        "page = subprocess.Popen([sys.executable, '-m', 'holdfast.dashboard', sys.argv[1], '--listen', '0',"
        " '--parent', str(os.getpid())], stderr=subprocess.PIPE)\n"
        "page.stderr.readline(); print(page.pid, flush=True); os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", start, str(made.run_dir)], stdout=subprocess.PIPE, timeout=60)
    with contextlib.suppress(ProcessLookupError):
        fd = os.pidfd_open(int(done.stdout))
        assert select.select([fd], [], [], 30)[0], "the page has outlived its agent"
        os.close(fd)


def test_a_page_by_hand_stays_after_the_end(tmp_path: Path, open_page: Open) -> None:
    made = typical(tmp_path / "job_ab")
    made.add(record.JobEnded("succeeded", "", 10, 3130.0, 0.0), 3130.0)
    page = open_page(made.run_dir)
    found = json.loads(page.ask("/state")[1])
    assert found["head"]["ended"] == ["succeeded", "", 3130.0]
    assert [row[0] for row in found["incidents"]] == [0, 1, 2, 3, 4]
    hang = json.loads(page.ask("/incident/1")[1])
    assert hang["suspects"] == [21] and hang["groups"][1]["frames"][0] == "data.py:41 read"
    assert [name for name, _ in hang["phases_s"]] == ["detect", "stop", "wait", "start", "first step"]
    assert page.process.poll() is None
