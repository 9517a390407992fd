"""`holdfast.init()` and the health check, on real ranks with a real store."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch._C._distributed_c10d import TCPStore

import holdfast

# Some ranks stay away from the second check, or come to it when the others have given up.
SCRIPT = """
import os, sys
import torch.distributed as dist
import holdfast

away, late = [int(rank) for rank in sys.argv[1].split(",") if rank], sys.argv[2] == "late"
run = holdfast.init()
dist.init_process_group("gloo")
store = dist.distributed_c10d._get_default_store()
run.health_check()
try:
    if run.rank not in away:
        run.health_check(timeout_s=3.0 if away else 20.0)
        print(run.rank, "passed", flush=True)
    elif late:
        store.wait(["told"])
        run.health_check()
except holdfast.HealthCheckFailed as failed:
    print(run.rank, failed, failed.missing, flush=True)
if store.add("told by", 1) == run.world_size - len(away):
    store.set("told", "yes")
if late or not away:
    run.health_check()
    if run.rank == 0:
        names = ["count", "verdict", *map(str, range(run.world_size))]
        print("left", [name for name in names if store.check([f"holdfast/health/1/{name}"])], flush=True)
os._exit(0)
"""


def ranks(tmp_path: Path, *args: str, size: int = 3) -> list[str]:
    """Ranks as torchrun would start them: the store is not theirs."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(size)}
    env |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), *args],
            env={**env, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    said: list[str] = []
    for process in processes:
        out, error = process.communicate(timeout=60)
        assert process.returncode == 0, error
        said += out.splitlines()
    return sorted(said)


def test_all_ranks_pass_and_nothing_is_left_in_the_store(tmp_path: Path) -> None:
    assert ranks(tmp_path, "", "never") == ["0 passed", "1 passed", "2 passed", "left []"]


def test_the_ranks_that_did_not_come_are_named(tmp_path: Path) -> None:
    assert ranks(tmp_path, "1,2", "never") == ["0 ranks 1 and 2 did not come to the health check within 3 s (1, 2)"]


def test_who_is_too_late_hears_the_same_and_the_next_check_is_a_new_one(tmp_path: Path) -> None:
    assert ranks(tmp_path, "2", "late") == [
        "0 rank 2 did not come to the health check within 3 s (2,)",
        "1 rank 2 did not come to the health check within 3 s (2,)",
        "2 rank 2 came too late to the health check (2,)",
        "left []",
    ]


def test_a_process_alone_is_a_run_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    run = holdfast.init()
    assert (run.rank, run.world_size, run.generation) == (0, 1, 0)
    run.health_check()


def test_several_ranks_without_a_group_are_told_to_make_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="call init_process_group"):
        holdfast.init().health_check()


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan"), float("inf"), True])
def test_a_time_that_is_none_is_refused(timeout_s: float) -> None:
    with pytest.raises(ValueError, match="timeout_s="):
        holdfast.init().health_check(timeout_s)
