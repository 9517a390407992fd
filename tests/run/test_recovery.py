"""Ranks that die at every moment there is, and the job that comes back."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest

import holdfast
from harness import TRAINS, Job
from holdfast import linux


def fault(rank: int, step: int, how: str, generations: tuple[int, ...] = (0,)) -> str:
    return json.dumps({"rank": rank, "step": step, "how": how, "generations": generations})


def causes(job: Job) -> list[tuple[Any, ...]]:
    return [(incident["kind"], incident["rank"], incident["headline"]) for incident in job.incidents()]


def test_a_killed_rank_comes_back(job: Job) -> None:
    assert job.run(TRAINS, "20", fault(1, 5, "SIGKILL"), max_restarts=3) == 0
    assert (job.folder / "step").read_text() == "20"
    assert causes(job) == [("signal", 1, "killed by SIGKILL")]
    [incident] = job.incidents()
    assert incident["steps"] >= 5
    assert incident["action"] == "restart 1 of 3"
    assert list(incident["phases_s"]) == ["stop", "wait", "start", "first step"]
    assert sum(incident["phases_s"].values()) == pytest.approx(incident["lost_s"])
    assert "rank 1: killed by SIGKILL at step" in job.err
    assert "back after" in job.err
    assert "1 incident" in job.err
    assert job.leftovers() == []


def test_kills_at_random_moments_cost_one_restart_each(job: Job) -> None:
    chance = random.Random(20261115)
    kills = 10
    job.start(TRAINS, "1000000", max_restarts=kills, env={"PACE_S": "0.001"}, flags=("--exit-code-from-cause",))
    for generation in range(kills):
        first = job.wait_step(0, 1, generation)
        job.wait_step(0, first["step"] + chance.randrange(30), generation)
        victim = chance.choice(["rank 0", "rank 1", "both"])
        pids = {f"rank {r}": pid for r, pid in rank_pids(job, generation).items()}
        # Of two, the second may be gone already, ended by the agent.
        linux.signal_all(pids.values() if victim == "both" else [pids[victim]], signal.SIGKILL)
    job.wait_step(1, 1, kills)
    job.signal(signal.SIGTERM)
    assert job.wait() == 87
    assert [incident["kind"] for incident in job.incidents()] == ["signal"] * kills
    assert [launch["restarts"] for launch in job.events("world.launched")] == list(range(kills + 1))
    assert job.leftovers() == []


def rank_pids(job: Job, generation: int) -> dict[int, int]:
    [started] = [event for event in job.events("world.started") if event["generation"] == generation]
    return {int(rank): pid for rank, pid in started["pids"].items()}


@pytest.mark.long
def test_twenty_restarts_with_skewed_ranks_spend_twenty(job: Job) -> None:
    """Stock torchrun reads a dead peer's address from its reused store here, and burns restarts on it."""
    faults = [fault(generation % 2, generation + 2, "SIGKILL", (generation,)) for generation in range(20)]
    assert job.run(TRAINS, "40", *faults, max_restarts=20, env={"SKEW_S": "0.1"}) == 0
    assert len(job.incidents()) == 20
    assert {incident["kind"] for incident in job.incidents()} == {"signal"}
    assert len(job.events("world.launched")) == 21


HEADLINES = {
    "raise": "ValueError: planned at rank 1",
    "exit 3": "exited with code 3",
    "os._exit 4": "exited with code 4",
    "segfault": "killed by SIGSEGV",
    "SIGABRT": "killed by SIGABRT",
}


def test_whatever_ends_a_rank_is_named_and_restarted(job: Job) -> None:
    """In each of these ways: before the process group exists, before the first step, and after some. Two early ends in
    a row would be a loop, and wait. At last a rank fails when the others are done."""
    ways = [how for how in HEADLINES for _ in range(4)]
    # A world resumes where the last one was, so each time it is a later step.
    steps = [(-1, 3 + g, 0, 3 + g)[g % 4] for g in range(len(ways))]
    faults = [fault(1, step, how, (g,)) for g, (step, how) in enumerate(zip(steps, ways, strict=True))]
    faults.append(fault(1, 26, "exit 9", (len(ways),)))
    assert job.run(TRAINS, "25", *faults, max_restarts=len(faults)) == 0
    expected = [("signal" if HEADLINES[how].startswith("killed") else "error", 1, HEADLINES[how]) for how in ways]
    assert causes(job) == [*expected, ("error", 1, "exited with code 9")]
    for incident in (each for each in job.incidents() if each["headline"] == "killed by SIGSEGV"):
        assert any("Segmentation fault" in line for line in incident["stderr_tail"])
        assert any("in strike" in line for line in incident["stderr_tail"])
    assert job.leftovers() == []


def test_a_rank_that_left_is_blamed_though_its_peer_is_gone_first(job: Job) -> None:
    assert job.run(TRAINS, "9", fault(1, 4, "exit slowly 3"), max_restarts=1) == 0
    exited = [event["rank"] for event in job.events("rank.exited") if event["generation"] == 0]
    assert exited == [0, 1], "or this test shows nothing"
    assert causes(job) == [("error", 1, "exited with code 3")]


def test_a_python_error_is_told_with_its_traceback_and_its_followers(job: Job) -> None:
    assert job.run(TRAINS, "9", fault(1, 4, "raise"), max_restarts=0, flags=("--reschedule-exit-code=75",)) == 1
    [incident] = job.incidents()
    assert 'raise ValueError(f"planned at rank {RANK}")' in incident["traceback"]
    assert str(Path(holdfast.__file__).parent) not in incident["traceback"]
    assert "the job failed: rank 1: ValueError: planned at rank 1" in job.err
    assert "trains.py" in job.err
    assert "--max-restarts is 0" in job.err
    assert str(job.run_dir) in job.err


def test_the_same_error_three_times_before_the_first_step_is_a_bug(job: Job) -> None:
    script = job.folder / "broken.py"
    script.write_text("import no_such_module\n")
    assert job.run(script, max_restarts=50, flags=("--reschedule-exit-code=75",)) == 1
    assert len(job.events("world.launched")) == 3
    assert "bug in the program" in job.err
    assert "ModuleNotFoundError: No module named 'no_such_module'" in job.err


def test_retry_same_error_spends_the_whole_budget(job: Job) -> None:
    script = job.folder / "broken.py"
    script.write_text("raise ValueError('always')\n")
    assert job.run(script, max_restarts=3, nproc=1, flags=("--retry-same-error",)) == 1
    assert len(job.events("world.launched")) == 4


def test_exit_codes_do_not_count_as_the_same_error(job: Job) -> None:
    script = job.folder / "exits.py"
    script.write_text("import sys\nsys.exit(5)\n")
    assert job.run(script, max_restarts=3, nproc=1) == 1
    assert len(job.events("world.launched")) == 4


def test_a_rank_that_ignores_sigterm_is_killed_after_the_shutdown_timeout(job: Job) -> None:
    job.start(TRAINS, "6", fault(0, 3, "deafen"), max_restarts=1, flags=("--shutdown-timeout=1",))
    job.news.wait(lambda line: "deaf" in line)
    os.kill(rank_pids(job, 0)[1], signal.SIGKILL)
    assert job.wait() == 0
    [incident] = job.incidents()
    assert incident["rank"] == 1
    assert 1.0 <= incident["phases_s"]["stop"] < 25.0  # by default it is 30
    assert [sent["signal"] for sent in job.events("ranks.signalled")] == ["SIGTERM", "SIGKILL"]


@pytest.mark.parametrize("then", ["SIGKILL", "exit 0"])
def test_a_grandchild_does_not_outlive_its_world(job: Job, then: str) -> None:
    faults = [fault(1, 2, "leave"), fault(1, 3, then)]
    job.start(TRAINS, "1000000" if then == "SIGKILL" else "3", *faults, max_restarts=1, env={"PACE_S": "0.01"})
    grandchild = job.news.wait(lambda line: "left" in line)["left"]
    if then == "SIGKILL":
        for _ in range(1000):  # half a second is a matter of the machine; the next world's end is not waited for
            job.news.wait(lambda line: line.get("generation") == 1 and "step" in line)
            if grandchild not in job.processes():
                break
        assert grandchild not in job.processes()
        job.signal(signal.SIGTERM)
    job.wait()
    assert job.leftovers() == []


def test_a_killed_helper_is_replaced(job: Job) -> None:
    hold = job.folder / "hold"
    hold.touch()
    helpers = ["holdfast retired zygote", "holdfast janitor", "holdfast store", "holdfast zygote"]
    env = {"PACE_S": "0.003", "HOLD": str(hold)}
    job.start(TRAINS, "1", fault(1, 1, "leave"), max_restarts=len(helpers), env=env)
    job.wait_event("zygote.grown")  # from then on there is a retired one, for as long as its ranks live
    for generation, helper in enumerate(helpers, 1):
        os.kill(job.process(helper), signal.SIGKILL)
        job.wait_step(0, 1, generation)
    hold.unlink()
    assert job.wait() == 0
    assert [kind for kind, _, _ in causes(job)] == ["launcher"] * len(helpers)
    assert job.leftovers() == []


def test_the_next_world_is_forked_ahead_and_a_killed_one_of_it_does_no_harm(job: Job) -> None:
    job.start(TRAINS, "1000000", max_restarts=1, env={"PACE_S": "0.005"})
    job.wait_event("zygote.grown")
    while len(parked := parked_pids(job)) < 3:
        job.news.wait(lambda line: "step" in line)
    os.kill(victim := parked.pop(), signal.SIGKILL)
    while os.path.exists(f"/proc/{victim}"):  # until then it could still be given work, and take it to its grave
        job.news.wait(lambda line: "step" in line)
    os.kill(rank_pids(job, 0)[1], signal.SIGKILL)
    job.wait_step(1, 5, generation=1)
    assert set(rank_pids(job, 1).values()) == parked
    assert [kind for kind, _, _ in causes(job)] == ["signal"]
    job.signal(signal.SIGTERM)
    job.wait()
    assert job.leftovers() == []


def parked_pids(job: Job) -> set[int]:
    """Those of the newest zygote: an old one that retires ends its own."""
    zygote = job.process("holdfast zygote")
    return {pid for pid in linux.children(zygote) if job.processes().get(pid) == "holdfast parked"}


def test_nothing_is_left_of_a_killed_agent(job: Job) -> None:
    job.start(SHARES_MEMORY, nproc=2)
    blocks = {job.news.wait(lambda line: "shared" in line)["shared"] for _ in range(2)}
    assert blocks <= set(os.listdir("/dev/shm"))
    assert len(job.processes()) > 5
    os.kill(job.pid, signal.SIGKILL)
    assert job.leftovers() == []
    assert blocks & set(os.listdir("/dev/shm")) == set()


SHARES_MEMORY = TRAINS.parent / "shares_memory.py"
