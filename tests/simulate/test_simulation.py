"""Whole jobs on virtual time: the same seed is the same run, and every run keeps the invariants."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from holdfast.cli.simulate import main
from holdfast.simulate.campaign import run_many
from holdfast.simulate.simulation import Simulation, run

DIGESTS = "from holdfast.simulate.simulation import run; print([run(seed).digest for seed in range({}, {})])"
SEEDS = 400
PART = 200


@pytest.mark.parametrize("first", range(0, SEEDS, PART))
def test_no_seed_breaks_an_invariant_and_every_kind_of_fault_is_injected(first: int) -> None:
    summary = run_many(range(first, first + PART), None, jobs=1)
    assert [(result.seed, result.invariant, result.text) for result in summary.failed] == []
    assert summary.worlds > PART
    assert summary.outcomes["success"] > PART / 2
    elected = next(seed for seed in range(PART) if Simulation(seed).etcd is not None)
    assert set(Simulation(elected).faults.kinds) - set(summary.faults) <= {"lift"}


def test_sixteen_nodes() -> None:
    summary = run_many(range(20), 16, jobs=1)
    assert [(result.seed, result.invariant, result.text) for result in summary.failed] == []


def test_a_seed_is_the_same_run_whatever_the_hash_seed() -> None:
    def digests(hash_seed: str) -> str:
        env = {**os.environ, "PYTHONHASHSEED": hash_seed}
        script = [sys.executable, "-c", DIGESTS.format(40, 70)]
        return subprocess.run(script, env=env, check=True, capture_output=True, text=True).stdout

    assert digests("1") == digests("2") == f"{[run(seed).digest for seed in range(40, 70)]}\n"


def test_keeping_the_timeline_changes_nothing() -> None:
    assert Simulation(7, keep_all=True).run().digest == run(7).digest


def test_two_seeds_are_two_runs() -> None:
    assert run(1).digest != run(2).digest


def test_a_seed_is_replayed_with_its_timeline(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seed", "11"]) == 0
    shown = capsys.readouterr().out
    assert "Launch(world=World(" in shown
    assert run(11).digest in shown.splitlines()[-1]


def test_many_seeds_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "6", "--first", "30", "--jobs", "2"]) == 0
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith("6 seeds, 0 failed;")


def test_a_failing_seed_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    from holdfast.simulate.bugs import BUGS

    with BUGS["charged_twice"]():
        assert main(["--seeds", "10", "--jobs", "1"]) == 1
    shown = capsys.readouterr().out
    assert "breaks: restarts: " in shown
    assert "holdfast simulate --seed " in shown
