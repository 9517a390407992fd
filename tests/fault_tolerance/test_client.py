"""What a client leaves in the rank's page, what it tells the agent, and what it refuses."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from fault_tolerance.conftest import MakeRank
from fault_tolerance.pages import GENERATION, Rank
from holdfast.agent.pages import Corrupt
from holdfast.fault_tolerance import (
    RankMonitorClient,
    RankMonitorClientError,
    WorkloadAction,
    WorkloadControlRequest,
)
from holdfast.wire import messages
from holdfast.worker import beacon


def started() -> RankMonitorClient:
    client = RankMonitorClient()
    client.init_workload_monitoring()
    return client


def refused(call: Callable[[], Any], *words: str) -> None:
    with pytest.raises(RankMonitorClientError) as error:
        call()
    text = str(error.value)
    assert "\n" not in text
    for word in words:
        assert word in text


# -- heartbeats -------------------------------------------------------------------------------------------------------


def test_a_heartbeat_is_a_time_in_the_page(make_rank: MakeRank) -> None:
    rank = make_rank(initial_rank_heartbeat_timeout=60.0, rank_heartbeat_timeout=20.0)
    client = started()
    before = rank.vitals()
    assert (before.first_limit_s, before.heartbeat_limit_s, before.heartbeat_s) == (60.0, 20.0, 0.0)
    assert time.monotonic() - before.client_s < 10
    client.send_heartbeat()
    assert rank.vitals().heartbeat_s >= before.client_s
    assert (client.hb_timeouts.initial, client.hb_timeouts.subsequent, client.hb_timeouts.were_calculated) == (
        60,
        20,
        False,
    )


def test_the_agent_is_woken_only_if_it_would_look_too_late(make_rank: MakeRank) -> None:
    rank = make_rank(initial_rank_heartbeat_timeout=60.0, rank_heartbeat_timeout=20.0)
    client = started()
    assert rank.pokes() == 1
    rank.page.say_wake(time.monotonic() + 60)
    client.send_heartbeat()
    assert rank.pokes() == 1  # twenty seconds are less than sixty
    rank.page.say_wake(time.monotonic() + 20)
    client.send_heartbeat()
    assert rank.pokes() == 0


def test_without_limits_nobody_is_woken(rank: Rank) -> None:
    client = started()
    client.send_heartbeat()
    with client.section("data"):
        client.send_heartbeat()
    assert [type(report) for report in rank.reports()] == [messages.Sections]


# -- sections ---------------------------------------------------------------------------------------------------------


def test_every_open_section_is_seen_with_its_limit(make_rank: MakeRank) -> None:
    rank = make_rank(rank_section_timeouts={"step": 5.0, "save": 50.0, "free": None}, rank_out_of_section_timeout=9.0)
    client = started()
    assert rank.reports()[0] == messages.Sections(3, GENERATION, 0, ("step", "save", "free"))
    outside = rank.vitals()
    assert (outside.outside_limit_s, outside.outside_s) == (9.0, outside.client_s)
    for name in ("save", "free", "step"):
        client.start_section(name)
    assert {(s.slot, s.limit_s) for s in rank.vitals().sections} == {(0, 5.0), (1, 50.0)}
    assert rank.vitals().outside_s == 0.0
    client.end_section("save")  # not the last one that was opened
    assert {s.slot for s in rank.vitals().sections} == {0}
    client.end_all_sections()
    assert rank.vitals().sections == ()
    assert rank.vitals().outside_s > outside.outside_s
    client.end_all_sections()


def test_opening_and_closing_wake_the_agent_for_a_nearer_deadline(make_rank: MakeRank) -> None:
    rank = make_rank(rank_section_timeouts={"step": 5.0}, rank_out_of_section_timeout=9.0)
    client = started()
    rank.reports()
    rank.page.say_wake(time.monotonic() + 9)
    client.start_section("step")
    assert rank.pokes() == 1
    client.end_section("step")
    assert rank.pokes() == 0
    rank.page.say_wake(math.inf)
    client.start_section("step")
    client.end_section("step")
    assert rank.pokes() == 2


def test_how_long_closed_sections_took_is_in_the_page(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    client = started()
    clock = iter([100.0, 101.0, 103.0, 107.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    client.start_section("step")
    client.start_section("forward")
    assert rank.page.paces[-1] == 0.0
    client.end_section("forward")
    assert rank.page.paces[-1] == 2.0
    client.end_section("step")
    assert rank.page.paces[-1] == 9.0


def test_a_name_is_told_before_its_section_is_first_open(rank: Rank) -> None:
    client = started()
    client.start_section("a")
    client.end_section("a")
    client.start_section("b")
    client.start_section("a")
    assert rank.reports() == [
        messages.Sections(3, GENERATION, 0, ("a",)),
        messages.Sections(3, GENERATION, 1, ("b",)),
    ]


def test_ten_thousand_sections(make_rank: MakeRank) -> None:
    names = {f"section-{number:05}": 5.0 for number in range(10_000)}
    rank = make_rank(rank_section_timeouts=names)
    client = started()
    told = [report for report in rank.reports() if isinstance(report, messages.Sections)]
    assert [name for report in told for name in report.names] == list(names)
    assert max(len(report.names) for report in told) <= 1000
    rank.page.say_wake(time.monotonic())  # nobody would take ten thousand pokes from this socket
    for name in names:
        client.start_section(name)
    assert len(rank.vitals().sections) == 10_000
    client.end_all_sections()
    assert rank.vitals().sections == ()
    assert client.calculate_and_set_section_timeouts()
    [learned] = [report for report in rank.reports() if isinstance(report, messages.Learned)]
    assert len(learned.state) < 190_000
    again = make_rank(learned=learned.state)
    other = started()
    assert other.state_dict() == client.state_dict()
    assert len(other.section_timeouts.calculated_sections) == 10_000
    again.reports()


def test_long_names_are_told_in_messages_that_can_be_sent(make_rank: MakeRank) -> None:
    names = {f"{number:04}" + "\N{GREEK SMALL LETTER LAMDA}" * 196: 5.0 for number in range(1000)}
    rank = make_rank(rank_section_timeouts=names)
    started()
    told = [report for report in rank.reports() if isinstance(report, messages.Sections)]
    assert [name for report in told for name in report.names] == list(names)


def test_more_sections_than_the_page_holds_are_refused(rank: Rank) -> None:
    client = started()
    client._index.update({f"s{number}": beacon.SECTIONS for number in range(beacon.MAX_SECTIONS)})
    refused(lambda: client.start_section("one more"), "more than 16384 different sections")


def test_two_threads_never_leave_an_open_section_unseen(make_rank: MakeRank) -> None:
    rank = make_rank(rank_section_timeouts={"a": 9.0, "b": 9.0, "stays": 9.0})
    client = started()
    rank.page.say_wake(time.monotonic())
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=_open_and_close, args=(client, name)) for name in ("a", "b")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert rank.vitals().outside_s > 0
    client.start_section("stays")
    assert [section.slot for section in rank.vitals().sections] == [2]


def _open_and_close(client: RankMonitorClient, name: str) -> None:
    for _ in range(20_000):
        client.start_section(name)
        client.end_section(name)


# -- what is refused --------------------------------------------------------------------------------------------------


def test_a_section_is_opened_once_and_closed_once(rank: Rank) -> None:
    client = started()
    refused(lambda: client.end_section("a"), "section 'a' is not open")
    client.start_section("a")
    refused(lambda: client.start_section("a"), "section 'a' is open already")
    client.end_section("a")
    refused(lambda: client.end_section("a"), "section 'a' is not open")


@pytest.mark.parametrize("name", ["", "x" * 201, None, 3, ["a"], b"a", "\ud800"], ids=repr)
def test_a_name_that_is_none_is_refused(name: Any, rank: Rank) -> None:
    client = started()
    refused(lambda: client.start_section(name), "section ")
    refused(lambda: client.end_section(name), "section ")
    assert rank.vitals().outside_s > 0


CALLS: dict[str, Callable[[RankMonitorClient], Any]] = {
    "send_heartbeat": lambda client: client.send_heartbeat(),
    "start_section": lambda client: client.start_section("a"),
    "end_section": lambda client: client.end_section("a"),
    "end_all_sections": lambda client: client.end_all_sections(),
    "section": lambda client: client.section("a").__enter__(),
    "calculate_and_set_hb_timeouts": lambda client: client.calculate_and_set_hb_timeouts(),
    "calculate_and_set_section_timeouts": lambda client: client.calculate_and_set_section_timeouts(),
}


@pytest.mark.parametrize("call", CALLS)
def test_calls_before_init_and_after_shutdown_are_refused(call: str, rank: Rank) -> None:
    client = RankMonitorClient()
    refused(lambda: CALLS[call](client), "init_workload_monitoring() has not been called")
    client.init_workload_monitoring()
    client.shutdown_workload_monitoring()
    refused(lambda: CALLS[call](client), "shutdown_workload_monitoring() has been called")


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("word", [beacon.MAGIC, beacon.END])
def test_a_corrupt_page_is_an_error_in_the_caller(call: str, word: int, rank: Rank) -> None:
    client = started()
    rank.place.beacon.words[word] = 42
    refused(lambda: CALLS[call](client), "the beacon page is corrupt")
    with pytest.raises(Corrupt):
        rank.vitals()
    client.shutdown_workload_monitoring()


def test_a_client_is_initialized_once(rank: Rank) -> None:
    client = started()
    refused(client.init_workload_monitoring, "initialized already")
    refused(RankMonitorClient().init_workload_monitoring, "another client")
    client.shutdown_workload_monitoring()
    client.shutdown_workload_monitoring()
    assert not client.is_initialized
    started()


def test_after_shutdown_nothing_is_left_to_be_held_to(make_rank: MakeRank) -> None:
    rank = make_rank(rank_section_timeouts={"a": 1.0}, rank_out_of_section_timeout=1.0, rank_heartbeat_timeout=1.0)
    client = started()
    client.send_heartbeat()
    client.start_section("a")
    client.shutdown_workload_monitoring()
    vitals = rank.vitals()
    assert (vitals.client_s, vitals.heartbeat_s, vitals.outside_s, vitals.sections) == (0.0, 0.0, 0.0, ())
    client.init_workload_monitoring()
    client.start_section("a")
    assert [section.slot for section in rank.vitals().sections] == [0]


def test_a_client_that_nobody_has_any_more_holds_nobody_to_anything(rank: Rank) -> None:
    client = started()
    client.send_heartbeat()
    del client
    assert (rank.vitals().client_s, rank.vitals().heartbeat_s) == (0.0, 0.0)
    started()


def test_threads_that_name_sections_at_once_get_different_ones(rank: Rank) -> None:
    client = started()
    threads = [threading.Thread(target=_name, args=(client, letter)) for letter in "abcd"]
    for thread in threads:
        thread.start()
    told: list[str] = []
    slots: list[int] = []
    while len(told) < 400:
        for report in rank.reports():
            assert isinstance(report, messages.Sections)
            told += report.names
            slots.append(report.slot)
    for thread in threads:
        thread.join()
    assert slots == list(range(400))
    assert {name: beacon.SECTIONS + 2 * slot for slot, name in enumerate(told)} == client._index


def _name(client: RankMonitorClient, letter: str) -> None:
    for number in range(100):
        with client.section(f"{letter}{number}"):
            pass


def test_a_child_of_the_rank_is_not_the_rank(rank: Rank) -> None:
    client = started()
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        try:
            client.send_heartbeat()
        except RankMonitorClientError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    assert b"this is a child of the rank" in os.read(reader, 1000)
    os.close(reader)
    assert rank.vitals().heartbeat_s == 0.0
    client.send_heartbeat()


# -- outside of holdfast run ------------------------------------------------------------------------------------------


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast.worker import place

    monkeypatch.setattr(place, "_current", None)
    monkeypatch.setattr(place, "_looked", True)


@pytest.mark.usefixtures("outside")
def test_outside_it_is_an_error() -> None:
    refused(RankMonitorClient().init_workload_monitoring, "no rank of holdfast run", "required=False")
    request = WorkloadControlRequest(WorkloadAction.ShutdownWorkload, "no")
    refused(lambda: RankMonitorClient().send_workload_control_request(request), "no rank of holdfast run")


@pytest.mark.usefixtures("outside")
def test_outside_it_does_nothing_if_it_is_not_required() -> None:
    client = RankMonitorClient(required=False)
    for call in CALLS.values():
        assert not call(client)
    client.init_workload_monitoring()
    assert client.is_initialized
    for call in CALLS.values():
        assert not call(client)
    with client.section("a"):
        client.end_all_sections()
    client.send_workload_control_request(WorkloadControlRequest(WorkloadAction.ShutdownWorkload, "no"))
    assert client.state_dict() == {"current_timeouts": {}}
    client.shutdown_workload_monitoring()
    assert not client.is_initialized


def test_importing_the_package_imports_neither_torch_nor_the_agent() -> None:
    script = "import sys, holdfast.fault_tolerance; print(*sys.modules)"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    imported = set(ended.stdout.split())
    assert "holdfast.fault_tolerance" in imported
    assert not {name for name in imported if name in ("torch", "asyncio") or name.startswith("holdfast.agent")}


# -- requests ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("action", "word"),
    [
        (WorkloadAction.Continue, "continue"),
        (WorkloadAction.ExcludeThisNode, "exclude-node"),
        (WorkloadAction.ShutdownWorkload, "shutdown"),
    ],
)
def test_a_request_goes_to_the_agent_at_once(action: WorkloadAction, word: str, rank: Rank) -> None:
    RankMonitorClient().send_workload_control_request(WorkloadControlRequest(action, "bad \ud800 GPU"))
    assert rank.reports() == [messages.Control(3, GENERATION, word, "bad ? GPU")]


@pytest.mark.parametrize(
    "request_",
    [
        None,
        "shutdown",
        WorkloadAction.Continue,
        WorkloadControlRequest("shutdown"),  # type: ignore[arg-type]
        WorkloadControlRequest(WorkloadAction.Continue, 3),  # type: ignore[arg-type]
    ],
)
def test_a_request_that_is_none_is_refused(request_: Any, rank: Rank) -> None:
    refused(lambda: RankMonitorClient().send_workload_control_request(request_), "a ")
    assert rank.reports() == []


def test_a_request_that_reaches_nobody_is_an_error(rank: Rank) -> None:
    rank._agent.close()
    request = WorkloadControlRequest(WorkloadAction.ShutdownWorkload, "no")
    refused(lambda: RankMonitorClient().send_workload_control_request(request), "did not reach the agent")


def test_the_configuration_that_the_agent_left_must_be_readable(make_rank: MakeRank) -> None:
    make_rank(learned=json.dumps({"current_timeouts": {"heartbeat": 3}}))
    refused(RankMonitorClient().init_workload_monitoring, "'heartbeat' is no dict")
