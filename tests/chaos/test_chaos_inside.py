"""Faults in a rank, without a launcher: a process with the variables of a rank, an optimizer, and orders in a file."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from holdfast.chaos import faults
from holdfast.chaos.faults import Order, Orders

STEPS = """
import sys
from holdfast.chaos import inside
inside.install()
inside.install()
import torch
weights = torch.nn.Parameter(torch.zeros(2))
optimizer = getattr(torch.optim, sys.argv[1])([weights], lr=0.1)
for step in range(6):
    weights.sum().backward()
    optimizer.step()
    print(step + 1, flush=True)
"""

# As ranks are: forks of a process that has torch. Seven imports of it would take longer than all else here.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["torch._dynamo"])


class Done(NamedTuple):
    code: int | None  # or minus the signal
    out: str
    err: str


def be_rank(folder: str, optimizer: str, env: dict[str, str]) -> None:
    for fd, name in ((1, "out"), (2, "err")):
        with open(os.path.join(folder, name), "wb") as file:
            os.dup2(file.fileno(), fd)
    os.environ.update(env)
    script = os.path.join(folder, "steps.py")
    sys.argv = [script, optimizer]
    runpy.run_path(script, run_name="__main__")


def run(folder: Path, *orders: Order, rank: int = 0, generation: int = 0, optimizer: str = "Adam") -> Done:
    (folder / "done").mkdir(exist_ok=True)
    (folder / "steps.py").write_text(STEPS)
    path = str(folder / "orders.json")
    faults.write_orders(path, Orders(str(folder), 4, orders))
    env = {"HOLDFAST_CHAOS": path, "RANK": str(rank), "HOLDFAST_GENERATION": str(generation), "WORLD_SIZE": "2"}
    process = FORKS.Process(target=be_rank, args=(str(folder), optimizer, env))
    process.start()
    process.join(60)
    return Done(process.exitcode, (folder / "out").read_text(), (folder / "err").read_text())


def test_a_rank_strikes_itself_at_the_step_and_once(tmp_path: Path) -> None:
    order = Order(7, "exception", 1, step=3)
    done = run(tmp_path, order, rank=1, generation=2, optimizer="SGD")
    assert done.out.split() == ["1", "2", "3"]
    assert "RuntimeError: fault 7 of a chaos plan" in done.err
    [noted] = faults.read(str(tmp_path))
    assert (noted.number, noted.kind, noted.life, noted.generation) == (7, "exception", 4, 2)
    assert (noted.rank, noted.step) == (1, 3)
    again = run(tmp_path, order, rank=1, generation=3, optimizer="SGD")
    assert again.code == 0
    assert len(faults.read(str(tmp_path))) == 1


def test_orders_for_others_are_left_alone(tmp_path: Path) -> None:
    others = [Order(1, "kill", 1), Order(2, "kill", None, chance=0.9), Order(3, "kill", 0, generation=5)]
    assert run(tmp_path, *others).out.split() == ["1", "2", "3", "4", "5", "6"]
    assert not (tmp_path / faults.NAME).exists()


@pytest.mark.parametrize(("kind", "signum"), [("kill", signal.SIGKILL), ("segfault", signal.SIGSEGV)])
def test_by_a_signal(kind: str, signum: int, tmp_path: Path) -> None:
    done = run(tmp_path, Order(1, kind, None, step=2, chance=0.2))
    assert done.code == -signum
    assert done.out.split() == ["1", "2"]


def test_out_of_memory_is_a_real_one(tmp_path: Path) -> None:
    assert run(tmp_path, Order(1, "out-of-memory", 0)).err.splitlines()[-1] == "MemoryError"


def test_an_import_of_the_program_fails(tmp_path: Path) -> None:
    done = run(tmp_path, Order(1, "crash-on-import", 0))
    assert done.out == ""
    assert done.err.splitlines()[-1] == "ImportError: cannot import torch: fault 1 of a chaos plan"
    assert run(tmp_path, Order(1, "crash-on-import", 0)).code == 0


def test_nothing_is_imported_where_nobody_asks() -> None:
    """Neither by a launcher nor by what a rank imports."""
    program = (
        "import sys, holdfast.cli.run, holdfast.worker.bootstrap; print([n for n in sys.modules if '.chaos' in n])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr
