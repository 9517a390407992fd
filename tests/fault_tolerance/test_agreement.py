"""Real ranks that agree on limits, keep them over a restart, and are held to them."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch.distributed as dist

import holdfast
from holdfast.agent.launch import JobFailed
from holdfast.fault_tolerance import FaultToleranceConfig, RankMonitorClient, RankMonitorClientError
from holdfast.fault_tolerance.agreement import Ask, Seen, agree
from holdfast.fault_tolerance.timeouts import Learned


def begin() -> tuple[int, RankMonitorClient]:
    dist.init_process_group("gloo")
    client = RankMonitorClient()
    client.init_workload_monitoring()
    return dist.get_rank(), client


def see(client: RankMonitorClient, **sections: float) -> None:
    for name, took_s in sections.items():
        with client.section(name):
            pass
        client._longest[name] = took_s


def attempt(call: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return call(*args, **kwargs)
    except RankMonitorClientError as error:
        return str(error)


def learn() -> list[Any]:
    """What each rank gets, where they have seen different things."""
    rank, client = begin()
    said: list[Any] = []
    # Nobody has had a second heartbeat, and rank 0 not even a first.
    if rank:
        client.send_heartbeat()
    said.append(attempt(client.calculate_and_set_hb_timeouts))
    said.append(attempt(client.calculate_and_set_hb_timeouts, skip_if_not_ready=True))
    # Some have all of it.
    client._first, client._gap = (0.0, 0.0) if rank == 0 else (10.0 * rank, 2.0 * rank)
    said.append(attempt(client.calculate_and_set_hb_timeouts))
    # Each knows a section of its own, and only one rank has loaded anything.
    if rank == 1:
        state = {"section": {"old": 11.0}, "calculated_sections": ["old"]}
        client.load_state_dict({"current_timeouts": {"section": state}})
    see(client, common=1.0 + rank, **{f"only{rank}": 3.0 + rank})
    client._outside = 4.0 + rank
    said.append(attempt(client.calculate_and_set_section_timeouts, ["common"]))
    said.append(attempt(client.calculate_and_set_section_timeouts))
    # They ask for different things.
    said.append(attempt(client.calculate_and_set_section_timeouts, [f"only{rank}"]))
    said.append(client.state_dict()["current_timeouts"])
    dist.destroy_process_group()
    return said


def test_ranks_that_have_seen_different_things_agree() -> None:
    results = holdfast.launch(learn, nproc=3, quiet=True)
    assert results[0] == results[1] == results[2]
    *answers, state = results[0]
    assert answers[0].startswith("not enough data for timeouts: no rank has had a second heartbeat;")
    assert answers[1:5] == [False, True, True, True]
    assert answers[5] == "the ranks ask for different timeouts; call it with the same on every rank"
    assert state["heartbeat"] == {"initial": 100.0, "subsequent": 20.0, "were_calculated": True}
    assert state["section"]["section"] == {"common": 15.0, "old": 11.0, "only0": 15.0, "only1": 20.0, "only2": 25.0}
    assert state["section"]["out_of_section"] == 30.0


def learn_once_and_die() -> Any:
    rank, client = begin()
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        client._first, client._gap = 10.0, 4.0 + rank
        client.calculate_and_set_hb_timeouts()
        dist.barrier()
        raise RuntimeError("the first life is over")
    return client.hb_timeouts.initial, client.hb_timeouts.subsequent, client.hb_timeouts.were_calculated


def test_what_was_learned_survives_a_restart() -> None:
    results = holdfast.launch(learn_once_and_die, nproc=2, max_restarts=1, quiet=True)
    assert results == {0: (50.0, 25.0, True), 1: (50.0, 25.0, True)}


def stay_too_long() -> None:
    """In the first world in an inner section, in the second in an outer one, while inner ones come and go."""
    rank, client = begin()
    if rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        client.start_section("around")
        client.start_section("inner")
        time.sleep(100)
    if rank == 1:
        client.start_section("outer")
        for _ in range(10_000):
            with client.section("within"):
                time.sleep(0.01)
    dist.barrier()


def test_any_open_section_that_passes_its_limit_is_a_hang() -> None:
    limits = {"around": 50.0, "inner": 1.0, "outer": 1.0, "within": 50.0}
    ft = FaultToleranceConfig(rank_section_timeouts=limits)
    with pytest.raises(JobFailed, match="section 'outer' open for") as failure:
        holdfast.launch(stay_too_long, nproc=2, max_restarts=1, quiet=True, ft=ft)
    inner, outer = failure.value.result.incidents
    assert inner.headline.startswith("section 'inner' open for")
    assert outer.headline.startswith("section 'outer' open for")


# -- without processes ------------------------------------------------------------------------------------------------


def test_a_rank_alone_agrees_with_itself() -> None:
    seen = Seen(1.0, 2.0, 3.0, {"a": 4.0})
    learned = Learned((5.0, 6.0), {"b": 7.0}, 8.0)
    together = agree(Ask(sections=True), seen, learned, (1, list, lambda value: [value]))
    assert (together.seen.first, together.seen.gap, together.seen.outside) == (1.0, 2.0, 3.0)
    assert together.seen.sections == {"a": 4.0, "b": 0.0}
    assert (together.learned, together.needed) == (learned, ("a",))
