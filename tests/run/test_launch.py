"""`holdfast.launch`: results by rank, errors by rank, and the three things a caller can replace."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.agent.logs import Destination
from holdfast.control.restarts import Failure, GiveUp, History, Restart
from holdfast.observe.events import Event


def add_up(offset: int) -> int:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor([dist.get_rank() + offset])
    dist.all_reduce(total)
    dist.barrier()
    dist.destroy_process_group()
    return int(total)


def fail_on_odd_ranks() -> None:
    rank = int(os.environ["RANK"])
    if rank % 2:
        raise ValueError(f"rank {rank} is odd")


def fail_until(restart: int) -> int:
    count = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if count < restart:
        os._exit(17)
    return count


def return_a_lock() -> object:
    return threading.Lock()


def test_a_closure_works_and_arguments_may_be_named_and_who_leaves_early_returns_nothing() -> None:
    factor = 3

    def triple(number: int) -> int:
        if os.environ["RANK"] == "1":
            raise SystemExit(0)
        return factor * number

    assert holdfast.launch(triple, kwargs={"number": 5}, nproc=2) == {0: 15, 1: None}


def test_a_command_runs_too() -> None:
    assert holdfast.launch(["/bin/sh", "-c", "exit 0"], nproc=2) == {0: None, 1: None}


def test_every_failed_rank_is_named() -> None:
    with pytest.raises(holdfast.JobFailed) as failure:
        holdfast.launch(fail_on_odd_ranks, nproc=2, quiet=True)
    assert list(failure.value.errors) == [1]
    assert "ValueError: rank 1 is odd" in failure.value.errors[1]
    assert "ValueError: rank 1 is odd" in str(failure.value)
    assert failure.value.result.incidents[0].rank == 1


def test_what_cannot_be_sent_back_is_an_error() -> None:
    with pytest.raises(holdfast.JobFailed, match="rank 0 returned a lock that cannot be sent back"):
        holdfast.launch(return_a_lock, quiet=True)


def test_the_restart_decision_can_be_replaced() -> None:
    asked: list[Failure] = []

    def decide(history: History, failure: Failure) -> Restart | GiveUp:
        asked.append(failure)
        return Restart("once more") if len(asked) < 2 else GiveUp("enough")

    with pytest.raises(holdfast.JobFailed, match="enough"):
        holdfast.launch(fail_until, (9,), max_restarts=100, decide=decide, quiet=True)
    assert [failure.headline for failure in asked] == ["exited with code 17"] * 2


def test_a_failed_rank_is_restarted_and_events_can_be_heard_and_logs_placed() -> None:
    heard: list[Event] = []
    placed: list[tuple[int, int]] = []

    class Nowhere:
        def place(self, generation: int, local_rank: int) -> Destination:
            placed.append((generation, local_rank))
            return Destination(stdout_console=False, stderr_console=False)

    options: dict[str, Any] = {"logs": Nowhere(), "on_event": heard.append, "quiet": True}
    assert holdfast.launch(fail_until, (2,), nproc=2, max_restarts=2, **options) == {0: 2, 1: 2}
    assert [event.name for event in heard][:2] == ["job.started", "world.launched"]
    assert heard[-1].name == "job.ended"
    assert placed == [(generation, rank) for generation in range(3) for rank in range(2)]


def test_results_come_back_by_rank_and_it_runs_in_threads_and_twice_at_once() -> None:
    results: list[dict[int, int]] = []
    threads = [
        threading.Thread(target=lambda n=n: results.append(holdfast.launch(add_up, (n,), nproc=3, quiet=True)))
        for n in (0, 100)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results, key=lambda result: result[0]) == [{0: 3, 1: 3, 2: 3}, {0: 303, 1: 303, 2: 303}]


def test_an_interrupt_lets_ranks_end_in_peace(tmp_path: Path) -> None:
    script = tmp_path / "interrupted.py"
    script.write_text(
        "import signal, sys, time\n"
        "import holdfast\n"
        "def save(*_):\n"
        "    time.sleep(0.5)\n"
        "    print('saved', flush=True)\n"
        "    sys.exit(0)\n"
        "def train():\n"
        "    signal.signal(signal.SIGINT, save)\n"
        "    print('training', flush=True)\n"
        "    signal.pause()\n"
        "if __name__ == '__main__':\n"
        "    holdfast.launch(train, nproc=1)\n"
    )
    command = [sys.executable, "-u", str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "training\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert out == "saved\n"
    assert "JobFailed: stopped by SIGINT" in err


@pytest.mark.parametrize(
    "wrong", [{"nproc": 0}, {"max_restarts": -1}, {"shutdown_timeout_s": -1.0}, {"numa_binding": "moon"}]
)
def test_values_that_cannot_be_meant_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}="):
        holdfast.launch(fail_on_odd_ranks, **wrong)


def test_a_script_without_the_guard_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "unguarded.py"
    script.write_text("import holdfast\ndef one():\n    return 1\nholdfast.launch(one, nproc=1)\n")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "put the call under if __name__ == '__main__'" in done.stderr
