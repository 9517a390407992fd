"""A script that is watched by what it says about itself: `watched.py STORY`, a story being a function below.

In the first world rank 1 does what its story is about; other ranks, and all in later worlds, are good. With several
stories, `STORY+STORY`, each world has the next, and all are good in the one after the last.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from holdfast.fault_tolerance import (
    RankMonitorClient,
    RankMonitorClientError,
    WorkloadAction,
    WorkloadControlRequest,
)
from holdfast.worker.beacon import BASE, STEPS

RANK = int(os.environ["RANK"])
GENERATION = int(os.environ["HOLDFAST_GENERATION"])
STORIES = sys.argv[1].split("+")
BAD = RANK == 1 and len(STORIES) > GENERATION
LONG_S = 600
LIMIT_S = 1.0  # as the test sets them

client = RankMonitorClient()


def tell(**news: object) -> None:
    line = json.dumps({"rank": RANK, "generation": GENERATION, "pid": os.getpid(), **news}) + "\n"
    with open(os.environ["NEWS"], "a") as fifo:
        fifo.write(line)


def good(for_s: float = 0.3) -> None:
    """Heartbeats, and a section that is left again."""
    if not client.is_initialized:
        client.init_workload_monitoring()
    until_s = time.monotonic() + for_s
    while time.monotonic() < until_s:
        with client.section("data"):
            client.send_heartbeat()
            time.sleep(0.02)


def no_more_heartbeats() -> None:
    good()
    if BAD:
        time.sleep(LONG_S)


def no_first_heartbeat() -> None:
    if BAD:
        client.init_workload_monitoring()
        time.sleep(LONG_S)
    good()


def stays_in_a_section() -> None:
    good()
    if BAD:
        with client.section("data"):
            while True:
                client.send_heartbeat()
                time.sleep(0.05)


def stays_in_an_outer_section() -> None:
    """The inner ones are opened later, and are fine."""
    good()
    if BAD:
        with client.section("outer"):
            while True:
                with client.section("data"):
                    client.send_heartbeat()
                    time.sleep(0.05)


def stays_outside() -> None:
    good()
    if BAD:
        time.sleep(LONG_S)


def ends_all_sections() -> None:
    client.init_workload_monitoring()
    client.start_section("outer")
    client.start_section("data")
    client.end_all_sections()
    time.sleep(2 * LIMIT_S)


def is_not_held_to_limits() -> None:
    """Each rank in another way, while rank 0 is held to all of them."""
    [good_for_long, shuts_down_in_time, never_begins, finishes_early, ends_slowly][RANK]()


def good_for_long() -> None:
    good(3 * LIMIT_S)


def shuts_down_in_time() -> None:
    client.init_workload_monitoring()
    client.start_section("data")
    client.send_heartbeat()
    client.shutdown_workload_monitoring()
    time.sleep(2 * LIMIT_S)


def never_begins() -> None:
    time.sleep(2 * LIMIT_S)


def finishes_early() -> None:
    good()  # and ends without a word


def ends_slowly() -> None:
    """A script that is over sends no heartbeats, and its end may take longer than they may be apart."""
    good()
    client.start_section("data")
    atexit.register(time.sleep, 2 * LIMIT_S)


def dies_before_the_first_heartbeat() -> None:
    """Later worlds must be watched as well as the first: the third one hangs."""
    if RANK == 1 and GENERATION < 2:
        client.init_workload_monitoring()
        os._exit(3)
    good()
    if RANK == 1 and GENERATION == 2:
        time.sleep(LONG_S)


def learns() -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    client.init_workload_monitoring()
    tell(found=timeouts())
    if GENERATION == 0:
        for _ in range(3):
            client.send_heartbeat()
            with client.section("data"):
                time.sleep(0.01 + 0.05 * RANK)
        assert client.calculate_and_set_hb_timeouts()
        assert client.calculate_and_set_section_timeouts()
        tell(learned=timeouts())
        dist.barrier()
        if RANK == 1:
            os._exit(3)
        dist.barrier()
    dist.destroy_process_group()


def timeouts() -> dict[str, Any]:
    beats, sections = client.hb_timeouts, client.section_timeouts
    return {
        "heartbeat": [beats.initial, beats.subsequent],
        "section": sections.section,
        "outside": sections.out_of_section,
        "state": client.state_dict(),
    }


# -- requests ---------------------------------------------------------------------------------------------------------


def ask(action: str) -> None:
    client.send_workload_control_request(WorkloadControlRequest(WorkloadAction[action], "the disk is on fire"))


def asks(action: str, then: str) -> None:
    """What follows a request may differ by world: THEN+THEN."""
    follows = then.split("+")
    if RANK != 1 or len(follows) <= GENERATION:
        good(LONG_S if GENERATION == 0 and action != "Continue" else 0.3)
        return
    good()
    ask(action)
    if follows[GENERATION] == "raise":
        raise ValueError("planned")
    if follows[GENERATION] == "wait":
        time.sleep(LONG_S)


# -- writes where it must not -----------------------------------------------------------------------------------------


def scribbles(*by_rank: str) -> None:
    """Rank 0 is good, each other rank fills its page with a byte of its own."""
    good()
    if RANK:
        scribble(0, 32, int(by_rank[RANK - 1]))  # the rank's fields, but not the agent's
        try:
            client.send_heartbeat()
        except RankMonitorClientError as failure:
            tell(refused=str(failure))
        time.sleep(4 * LIMIT_S)


def scribbles_and_dies() -> None:
    """In the first world over all, in the second over what counts its steps; the third and the fourth resume."""
    import torch

    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.Adam([weight])
    if GENERATION > 1:
        done = {"step": torch.tensor(100.0 * GENERATION), "exp_avg": torch.zeros(1), "exp_avg_sq": torch.zeros(1)}
        optimizer.load_state_dict({"state": {0: done}, "param_groups": optimizer.state_dict()["param_groups"]})
    for _ in range(5):
        weight.grad = torch.ones(1)
        optimizer.step()
    if RANK == 1 and GENERATION < 4:
        if GENERATION == 0:
            scribble(0, 32)
        elif GENERATION == 1:
            scribble(STEPS, 1)
            scribble(BASE, 1)
        os._exit(3)
    if GENERATION < 4:
        time.sleep(LONG_S)


def scribble(first: int, fields: int, byte: int = 0xFF) -> None:
    [line] = [line for line in Path("/proc/self/maps").read_text().splitlines() if "holdfast-beacon" in line]
    ctypes.memset(int(line.partition("-")[0], 16) + 8 * first, byte, 8 * fields)


globals()[STORIES[min(GENERATION, len(STORIES) - 1)]](*sys.argv[2:])
if STORIES != ["is_not_held_to_limits"]:
    client.shutdown_workload_monitoring()
