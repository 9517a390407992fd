"""Checkpoints under `holdfast run`: ranks that are killed, jobs that fail, jobs that are stopped, all lose nothing."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.cluster import Cluster
from harness import SCRIPTS, Job

SAVES = SCRIPTS / "saves.py"
STEPS = 40


def fault(rank: int, step: int, how: str = "SIGKILL", generation: int = 0) -> str:
    return json.dumps({"rank": rank, "step": step, "how": how, "generation": generation})


def digests(news: list[dict[str, Any]]) -> dict[int, str]:
    return {line["rank"]: line["digest"] for line in news if "digest" in line}


def restored(news: list[dict[str, Any]]) -> list[tuple[int, int, str]]:
    """In each generation: all ranks the same."""
    found = {(line["generation"], line["restored"], line["name"]) for line in news if "restored" in line}
    assert len({generation for generation, _, _ in found}) == len(found), found
    return sorted(found)


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """What each rank has in the end when nothing happens."""
    job = Job(tmp_path_factory.mktemp("undisturbed"))
    try:
        assert job.run(SAVES, str(STEPS)) == 0, job.err
        assert job.leftovers() == []
        assert "goes on" not in job.err
        # Nothing was asked to be saved, and nothing went wrong.
        assert checkpoints(job.folder / "checkpoints") == []
        found = digests(job.news.seen)
        assert len(set(found.values())) == 2  # each has random numbers of its own
        return found
    finally:
        job.end()


def test_killed_ranks_lose_no_step(job: Job, undisturbed: dict[int, str]) -> None:
    """Whoever dies at whatever step, the next world goes on from the newest step in memory, and it is saved."""
    chance = random.Random(20261115)
    steps = sorted(chance.sample(range(2, STEPS - 1), 5))
    hows = ["SIGKILL", "raise", "SIGKILL", "SIGSEGV", "SIGKILL"]
    faults = [fault(chance.randrange(2), step, how, n) for n, (step, how) in enumerate(zip(steps, hows, strict=True))]
    assert job.run(SAVES, str(STEPS), *faults, max_restarts=5) == 0, job.err
    first, *later = restored(job.news.seen)
    # A copy is waited for before the optimizer steps: whoever was still in its backward may have the one before.
    assert first == (0, 0, "") and later[0] in [(1, steps[0] - lost, "memory") for lost in (0, 1)] and len(later) == 5
    # While what the last world has left is being written there is room for one, not two: who dies as the next takes its
    # place goes on from the one before, in memory or as a checkpoint. Only with steps that are shorter than a write.
    went_on = [step for _, step, _ in later]
    assert sorted(went_on) == went_on and all(map(int.__le__, went_on, steps))
    assert all(name == "memory" or (step in went_on[: n - 1] and name == f"step_{step:08d}") for n, step, name in later)
    assert digests(job.news.seen) == undisturbed
    saved = [event["step"] for event in job.events("checkpoint.persisted")]
    assert max(saved) == went_on[-1] and set(saved) <= set(went_on)  # none that came too late: a newer one was there
    assert checkpoints(job.folder / "checkpoints") == [f"step_{step:08d}" for step in sorted(saved)]
    assert "goes on from step" in job.err
    assert job.leftovers() == []


@pytest.mark.long
def test_a_job_that_failed_for_good_goes_on_where_it_was(job: Job, undisturbed: dict[int, str]) -> None:
    """By the last snapshot of its last world, or by any that was saved."""
    folder = job.folder / "checkpoints"
    assert job.run(SAVES, "1000", fault(1, 18), env={"EVERY": "5"}) == 1
    assert checkpoints(folder) == [f"step_{step:08d}" for step in (5, 10, 15, 18)]
    assert "step 18, which the ranks had left in memory, is saved: step_00000018" in job.err
    assert job.leftovers() == []

    assert run_again(job, "--resume=step:10", faults=(fault(0, 21),), max_restarts=1) == 0
    assert restored(job.news.seen) == [(0, 10, "step_00000010"), (1, 21, "memory")]
    assert digests(job.news.seen) == undisturbed
    assert run_again(job, "--resume=step:12") == 1
    assert "step:12 is not in" in job.err and "there are steps 5, 10, " in job.err
    assert job.leftovers() == []


def run_again(job: Job, *flags: str, faults: tuple[str, ...] = (), max_restarts: int = 0) -> int:
    """The same command later, in the same folder."""
    job.news.seen.clear()
    job.news._taken = 0
    env = {"EVERY": "5"}
    log_dir = str(job.folder / f"logs-{len(list(job.folder.iterdir()))}")
    return job.run(SAVES, str(STEPS), *faults, flags=flags, max_restarts=max_restarts, env=env, log_dir=log_dir)


def test_a_job_that_is_stopped_saves_and_goes_on(job: Job, undisturbed: dict[int, str]) -> None:
    job.start(SAVES, "1000000", env={"PACE_S": "0.05"}, flags=("--shutdown-timeout=60",))
    job.wait_step(0, 10)
    job.signal(signal.SIGTERM)
    assert job.wait() == 0, job.err
    last = {line["rank"]: line["step"] for line in job.news.seen if "step" in line}
    [name] = checkpoints(job.folder / "checkpoints")
    saved = int(name.removeprefix("step_"))
    # The step that is saved ends the rank before it tells of it.
    assert last == {0: saved - 1, 1: saved - 1}
    assert f"was asked to stop, and saved step {saved}" in job.err
    assert "stopped by SIGTERM; all ranks saved and ended by themselves" in job.err
    assert job.leftovers() == []
    if saved < STEPS:
        assert run_again(job) == 0
        assert restored(job.news.seen) == [(0, saved, name)]
        assert digests(job.news.seen) == undisturbed


# -- two nodes ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Cluster]:
    pair = Cluster(tmp_path)
    yield pair
    pair.end()


def run_pair(pair: Cluster, *args: str, env: dict[str, str], max_restarts: int = 0) -> list[int]:
    """Each node has a checkpoint directory of its own, as on local disks. What each ended with."""
    del pair.news.seen[:]
    pair.news._taken = 0
    for node in (0, 1):
        flags = (
            "--nnodes=2",
            f"--max-restarts={max_restarts}",
            "--rdzv-id=pair",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={pair.endpoint()}",
            f"--rdzv-conf=last_call_timeout=60,is_host={node == 0}",
            f"--local-addr={pair.addr(node)}",
        )
        own = {"CHECKPOINT_DIR": str(pair.folder / f"disk-{node}"), "GROUP_RANK": str(node), "GLOO_SOCKET_IFNAME": "lo"}
        pair.start(node, *flags, env=own | env, nproc=1, script=SAVES, args=args)
    return [pair.wait_exit(node) for node in (0, 1)]


@pytest.mark.long
def test_directories_that_nodes_do_not_share(pair: Cluster, undisturbed: dict[int, str]) -> None:
    assert run_pair(pair, "5", env={}) == [1, 1]
    assert not [line for line in pair.news.seen if "step" in line]
    for words in ("is not the same directory everywhere", "Set CHECKPOINT_DIR", "s3://", "Checkpointer(shared=False)"):
        assert words in pair.err(0) + pair.err(1)

    alone = {"SHARED": "0", "EVERY": "10"}
    assert run_pair(pair, "25", fault(1, 12), env=alone, max_restarts=1) == [0, 0]
    found = restored(pair.news.seen)
    assert found[0] == (0, 0, "") and found[1][1:] == (12, "memory")
    for node in (0, 1):
        # What its rank had left in memory, too: here the other one may have been a step further.
        assert {"step_00000010", "step_00000020"} < set(checkpoints(pair.folder / f"disk-{node}"))
    assert run_pair(pair, str(STEPS), env=alone) == [0, 0]
    assert restored(pair.news.seen) == [(0, 20, "step_00000020")]
    assert digests(pair.news.seen) == undisturbed
    assert pair.leftovers() == []
