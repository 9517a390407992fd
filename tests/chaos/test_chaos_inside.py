"""Faults in a rank, without a launcher: a process with the variables of a rank, an optimizer, and orders in a file."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from holdfast import linux
from holdfast.chaos import faults
from holdfast.chaos.faults import Order, Orders

WAIT_S = 60.0
OUTERMOST = 'File "<string>", line 1 in <module>\n'  # of a fork
STEPS = """
import faulthandler, os, signal, sys
faulthandler.register(signal.SIGUSR1, file=open(os.environ["DUMPS"], "w"), all_threads=False)
from holdfast.chaos import inside
inside.install()
inside.install()
import torch
if meeting := os.environ.get("MEETING"):
    torch.distributed.init_process_group("gloo", f"file://{meeting}", rank=int(os.environ["RANK"]), world_size=2)
weights = torch.nn.Parameter(torch.zeros(2))
optimizer = getattr(torch.optim, sys.argv[1])([weights], lr=0.1)
for step in range(6):
    weights.sum().backward()
    optimizer.step()
    print(step + 1, flush=True)
if meeting:
    open(os.environ["HELD"]).read()  # it stays a peer that is there
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


def start(
    folder: Path,
    *orders: Order,
    rank: int = 0,
    generation: int = 0,
    optimizer: str = "Adam",
    env: dict[str, str] | None = None,
) -> Any:
    (folder / "done").mkdir(exist_ok=True)
    (folder / "steps.py").write_text(STEPS)
    path = str(folder / "orders.json")
    faults.write_orders(path, Orders(str(folder), 4, orders))
    own = {"HOLDFAST_CHAOS": path, "RANK": str(rank), "HOLDFAST_GENERATION": str(generation), "WORLD_SIZE": "2"}
    own |= {"DUMPS": str(folder / "dumps"), **(env or {})}
    process = FORKS.Process(target=be_rank, args=(str(folder), optimizer, own))
    process.start()
    return process


def run(folder: Path, *orders: Order, **options: Any) -> Done:
    process = start(folder, *orders, **options)
    process.join(WAIT_S)
    return Done(process.exitcode, (folder / "out").read_text(), (folder / "err").read_text())


@contextmanager
def struck(folder: Path, order: Order, **options: Any) -> Iterator[Any]:
    """A rank that has followed its order, and is killed in the end."""
    process = start(folder, order, **options)
    try:
        wait_for(lambda: (folder / faults.NAME).exists(), process)
        yield process
    finally:
        process.kill()
        process.join(WAIT_S)
    assert process.exitcode == -signal.SIGKILL  # until then it was there
    [noted] = faults.read(str(folder))
    assert (noted.kind, noted.rank, noted.step, noted.pid) == (order.kind, order.rank, order.step, process.pid)
    assert (folder / "out").read_text().split() == [str(step + 1) for step in range(order.step)]


def wait_for(what: Callable[[], bool], process: Any) -> None:
    until_s = time.monotonic() + WAIT_S
    while not what():
        assert process.is_alive() and time.monotonic() < until_s
        process.join(0.01)


def calls(folder: Path, process: Any) -> list[str]:
    """The functions that its main thread is in, innermost first, by such a handler as `holdfast stacks` asks."""
    dumps = folder / "dumps"
    before = len(dumps.read_text())
    os.kill(process.pid, signal.SIGUSR1)
    wait_for(lambda: dumps.read_text()[before:].endswith(OUTERMOST), process)
    return [line.rpartition(" in ")[2] for line in dumps.read_text()[before:].splitlines()[1:]]


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


@pytest.mark.parametrize("kind", ["hang", "hang-gil"])
def test_a_hang_outlasts_signals_that_ask_where_it_is(kind: str, tmp_path: Path) -> None:
    with struck(tmp_path, Order(1, kind, 0, step=2)) as process:
        while calls(tmp_path, process)[0] != "_do":
            pass  # it is about to
        assert [calls(tmp_path, process)[0] for _ in range(5)] == ["_do"] * 5


def test_a_wait_for_a_message_that_nobody_sends(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "held")
    env = {"MEETING": str(tmp_path / "meeting"), "HELD": str(tmp_path / "held")}
    (tmp_path / "peer").mkdir()
    peer = start(tmp_path / "peer", rank=0, env=env)
    try:
        with struck(tmp_path, Order(1, "hang-collective", 1, step=2), rank=1, env=env) as process:
            while "recv" not in (there := calls(tmp_path, process)):
                pass
            assert "_wait_for_a_peer" in there
    finally:
        peer.kill()
        peer.join(WAIT_S)


def test_a_collective_needs_a_peer(tmp_path: Path) -> None:
    done = run(tmp_path, Order(1, "hang-collective", 0))
    assert done.err.splitlines()[-1] == "RuntimeError: hang-collective needs a process group of 2 or more ranks"


def test_a_rank_that_is_stopped_is_there(tmp_path: Path) -> None:
    with struck(tmp_path, Order(1, "stop", 0, step=2)) as process:
        wait_for(lambda: linux.state(process.pid) == "T", process)


def test_a_slow_rank_does_all_of_its_steps(tmp_path: Path) -> None:
    """Each of the four that are left is followed by the delay."""
    done = run(tmp_path, Order(1, "slow-rank", 0, step=2, for_s=60.0, delay_s=0.1))
    [noted] = faults.read(str(tmp_path))
    assert time.monotonic() - noted.at_s > 4 * 0.1
    assert (noted.step, noted.for_s) == (2, 60.0)
    assert (done.code, done.out.split()) == (0, ["1", "2", "3", "4", "5", "6"])


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
