"""Learned timeouts: from what was seen, over all ranks, merged, kept and loaded."""

from __future__ import annotations

import json
import math
import time
from typing import Any

import pytest

from fault_tolerance.conftest import MakeRank
from fault_tolerance.pages import Rank
from holdfast.fault_tolerance import RankMonitorClient, RankMonitorClientError
from holdfast.wire import messages
from holdfast.worker.beacon import OUTSIDE_AT

# As NVIDIA's client 0.4.1 writes it: configured values are in it too, and are not to be loaded.
THEIRS = {
    "current_timeouts": {
        "heartbeat": {"initial": 100.0, "subsequent": 10.0, "were_calculated": True},
        "section": {
            "section": {"step": 4.0, "setup": 600.0},
            "out_of_section": None,
            "calculated_sections": ["step"],
            "is_out_of_section_calculated": False,
        },
    }
}


def started() -> RankMonitorClient:
    client = RankMonitorClient()
    client.init_workload_monitoring()
    return client


class Seen:
    """Puts durations into a client that nobody has to wait for."""

    def __init__(self, client: RankMonitorClient) -> None:
        self._client = client

    def heartbeats(self, first_s: float, gap_s: float) -> None:
        self._client._first, self._client._gap = first_s, gap_s

    def section(self, name: str, took_s: float) -> None:
        with self._client.section(name):
            pass
        self._client._longest[name] = took_s

    def outside(self, took_s: float) -> None:
        self._client._outside = took_s


def test_what_was_seen_times_the_factor_is_the_limit(rank: Rank) -> None:
    client = started()
    client.send_heartbeat()
    client.send_heartbeat()
    assert 0 < client._gap <= client._first + 10
    Seen(client).heartbeats(8.0, 2.0)
    assert client.calculate_and_set_hb_timeouts()
    assert (client.hb_timeouts.initial, client.hb_timeouts.subsequent) == (40.0, 10.0)
    assert client.hb_timeouts.were_calculated
    vitals = rank.vitals()
    assert (vitals.first_limit_s, vitals.heartbeat_limit_s) == (40.0, 10.0)
    *_, poke, learned = rank.reports()
    assert isinstance(poke, messages.Poke)
    assert isinstance(learned, messages.Learned)
    assert json.loads(learned.state) == client.state_dict()


def test_a_limit_is_not_so_short_that_a_hiccup_passes_it(rank: Rank, make_rank: MakeRank) -> None:
    client = started()
    Seen(client).heartbeats(0.01, 0.01)
    client.calculate_and_set_hb_timeouts()
    assert client.hb_timeouts.subsequent == 1.0
    make_rank(hang_floor=0.2)
    client = started()
    Seen(client).heartbeats(0.01, 0.1)
    client.calculate_and_set_hb_timeouts()
    assert (client.hb_timeouts.initial, client.hb_timeouts.subsequent) == (0.2, 0.5)


def test_without_data_nothing_is_learned(rank: Rank) -> None:
    client = started()
    with pytest.raises(RankMonitorClientError, match=r"not enough data .* a first heartbeat and a second heartbeat"):
        client.calculate_and_set_hb_timeouts()
    client.send_heartbeat()
    assert client.calculate_and_set_hb_timeouts(skip_if_not_ready=True) is False
    with pytest.raises(RankMonitorClientError, match=r"not enough data .* any section"):
        client.calculate_and_set_section_timeouts(calc_out_of_section=False)
    with pytest.raises(RankMonitorClientError, match=r"not enough data .* section 'step'"):
        client.calculate_and_set_section_timeouts(["step"])
    assert not [report for report in rank.reports() if isinstance(report, messages.Learned)]
    assert client.state_dict() == {"current_timeouts": {}}


def test_sections_are_learned_as_selected(make_rank: MakeRank) -> None:
    rank = make_rank(rank_section_timeouts={"step": 100.0, "save": 200.0}, rank_out_of_section_timeout=300.0)
    client = started()
    seen = Seen(client)
    seen.section("step", 2.0)
    seen.section("new", 4.0)
    seen.outside(3.0)
    with pytest.raises(RankMonitorClientError, match="section 'save'"):
        client.calculate_and_set_section_timeouts()
    assert client.calculate_and_set_section_timeouts(["step"], calc_out_of_section=False)
    assert client.section_timeouts.section == {"step": 10.0, "save": 200.0}
    assert client.section_timeouts.out_of_section == 300.0
    assert client.section_timeouts.calculated_sections == {"step"}
    seen.section("save", 6.0)
    assert client.calculate_and_set_section_timeouts()
    assert client.section_timeouts.section == {"step": 10.0, "save": 30.0, "new": 20.0}
    assert (client.section_timeouts.out_of_section, client.section_timeouts.were_calculated) == (15.0, True)
    client.start_section("new")
    assert rank.vitals().sections[0].limit_s == 20.0
    assert rank.vitals().outside_limit_s == 15.0


def test_what_is_still_open_counts_for_as_long_as_it_takes(rank: Rank) -> None:
    client = started()
    Seen(client).section("step", 0.001)
    client.start_section("step")
    client._opened["step"] -= 7.0
    client.calculate_and_set_section_timeouts(["step"], calc_out_of_section=False)
    assert client.section_timeouts.section["step"] == pytest.approx(35.0, abs=1)
    client.end_all_sections()
    client._times[OUTSIDE_AT] = time.monotonic() - 9.0
    client.calculate_and_set_section_timeouts([], calc_out_of_section=True)
    assert client.section_timeouts.out_of_section == pytest.approx(45.0, abs=1)


def test_learned_merges_with_learned_by_the_mean(rank: Rank) -> None:
    client = started()
    Seen(client).heartbeats(8.0, 2.0)
    client.calculate_and_set_hb_timeouts()
    Seen(client).heartbeats(8.0, 4.0)
    client.calculate_and_set_hb_timeouts()
    assert (client.hb_timeouts.initial, client.hb_timeouts.subsequent) == (40.0, 15.0)


def test_a_merged_limit_is_never_below_what_was_seen(make_rank: MakeRank) -> None:
    make_rank(safety_factor=1.0)
    client = started()
    client.load_state_dict(THEIRS)
    Seen(client).heartbeats(200.0, 50.0)
    client.calculate_and_set_hb_timeouts()
    assert (client.hb_timeouts.initial, client.hb_timeouts.subsequent) == (200.0, 50.0)


# -- state ------------------------------------------------------------------------------------------------------------


def test_learned_beats_configured_and_survives_a_restart(make_rank: MakeRank) -> None:
    config = {"rank_heartbeat_timeout": 500.0, "rank_section_timeouts": {"step": 7.0}}
    make_rank(**config)
    client = started()
    Seen(client).heartbeats(8.0, 2.0)
    client.calculate_and_set_hb_timeouts()
    rank = make_rank(learned=json.dumps(client.state_dict()), **config)
    again = started()
    assert again.hb_timeouts == client.hb_timeouts
    assert rank.vitals().heartbeat_limit_s == 10.0
    assert again.state_dict() == client.state_dict()
    assert again.section_timeouts.section == {"step": 7.0}


@pytest.mark.parametrize("after", [False, True])
def test_a_state_of_the_other_client_is_loaded_before_or_after_init(after: bool, make_rank: MakeRank) -> None:
    rank = make_rank(rank_section_timeouts={"setup": 77.0})
    client = RankMonitorClient()
    if after:
        client.init_workload_monitoring()
    client.load_state_dict(THEIRS)
    if not after:
        client.init_workload_monitoring()
    assert client.hb_timeouts.subsequent == rank.vitals().heartbeat_limit_s == 10.0
    assert client.section_timeouts.section == {"setup": 77.0, "step": 4.0}
    assert client.section_timeouts.calculated_sections == {"step"}
    assert client.state_dict()["current_timeouts"]["section"]["section"] == {"step": 4.0}
    assert json.loads(json.dumps(client.state_dict())) == client.state_dict()


def test_what_was_learned_is_kept_over_a_second_init(rank: Rank) -> None:
    client = started()
    Seen(client).heartbeats(8.0, 2.0)
    client.calculate_and_set_hb_timeouts()
    client.shutdown_workload_monitoring()
    client.init_workload_monitoring()
    assert client.hb_timeouts.subsequent == 10.0


def test_a_corrupt_page_is_told_before_anything_is_loaded(rank: Rank) -> None:
    client = started()
    rank.place.beacon.words[0] = 0
    with pytest.raises(RankMonitorClientError, match="corrupt"):
        client.load_state_dict(THEIRS)
    assert client.state_dict() == {"current_timeouts": {}}


def heartbeat(**values: Any) -> dict[str, Any]:
    return {"current_timeouts": {"heartbeat": {"initial": 5.0, "subsequent": 5.0, "were_calculated": True, **values}}}


def section(**values: Any) -> dict[str, Any]:
    whole = {"section": {"a": 5.0}, "calculated_sections": ["a"], "out_of_section": 5.0}
    return {"current_timeouts": {"section": {**whole, "is_out_of_section_calculated": True, **values}}}


@pytest.mark.parametrize(
    "state",
    [
        None,
        [],
        "text",
        {"other": 1},
        {"current_timeouts": None},
        {"current_timeouts": {"heartbeat": []}},
        *(heartbeat(initial=value) for value in (None, -1.0, 0.0, math.nan, math.inf, True, "5", 10**400)),
        *(section(section={"a": value}) for value in (None, -1.0, 0.0, math.nan, math.inf, True, "5")),
        *(section(out_of_section=value) for value in (None, -1.0, math.nan)),
        section(section={}),
        section(section=[]),
        section(calculated_sections=3),
        section(calculated_sections=[3]),
        section(calculated_sections=[""], section={"": 5.0}),
    ],
    ids=lambda state: repr(state)[:60],
)
def test_a_state_that_is_none_is_refused_and_changes_nothing(state: Any, rank: Rank) -> None:
    client = started()
    client.load_state_dict(heartbeat())
    with pytest.raises(RankMonitorClientError) as error:
        client.load_state_dict(state)
    assert "\n" not in str(error.value)
    assert client.state_dict() == heartbeat()
    assert rank.vitals().heartbeat_limit_s == 5.0
