"""An ordinary torchrun script that hangs on order. Nothing in it knows of Holdfast, but for the generation it is in.

`hangs.py STEPS [FAULT ...]`, a fault being JSON: {"rank": 1, "step": 8, "how": "sleep", "generations": [0]}. Step -1 is
before the process group exists, step 0 before the first optimizer step. `how` is the name of a function below. With
ALONE, ranks need nobody: there are no collectives. PACE_S is between two steps.
"""

from __future__ import annotations

import atexit
import ctypes
import io
import json
import os
import queue
import signal
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

RANK = int(os.environ["RANK"])
GENERATION = int(os.environ.get("HOLDFAST_GENERATION", "0"))
STATE = os.path.join(os.environ["STATE"], f"step-{RANK}" if "ALONE" in os.environ else "step")
PACE_S = float(os.environ.get("PACE_S", "0"))
LONG_S = 600
KEPT: list[object] = []  # torch 2.13 can deadlock when a model is freed right after its last collective


def tell(**news: object) -> None:
    line = json.dumps({"rank": RANK, "generation": GENERATION, "pid": os.getpid(), **news}) + "\n"
    with open(os.environ["NEWS"], "a") as fifo:
        fifo.write(line)


# -- ways to hang -----------------------------------------------------------------------------------------------------


def busy(_: Any) -> None:
    while True:
        pass


def sleep(_: Any) -> None:
    time.sleep(LONG_S)


def hold_the_gil(_: Any) -> None:
    """In a system call that goes on after a signal; C's sleep would not."""
    empty, _end = os.pipe()
    ctypes.PyDLL(None).read(empty, ctypes.create_string_buffer(1), 1)


def skip_a_collective(_: Any) -> None:
    """The others all-reduce once more than this rank, which waits for something else."""
    queue.Queue[None]().get()


def cross(_: Any) -> None:
    """Both wait, each for the other to come to its collective."""
    dist.all_reduce(torch.ones(1), group=KEPT[-1])


class Blocked(Dataset[int]):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        return self.read()

    def read(self) -> int:
        time.sleep(LONG_S)
        return 0


def load_data(_: Any) -> None:
    next(iter(DataLoader(Blocked())))


def load_data_in_a_worker(_: Any) -> None:
    next(iter(DataLoader(Blocked(), num_workers=1)))


def evaluate(model: Any) -> None:
    model.eval()


def evaluate_for_ever(model: Any) -> None:
    model.eval()
    time.sleep(LONG_S)


def save(model: Any) -> None:
    torch.save(model.state_dict(), io.BytesIO())


class BrokenDisk(io.BytesIO):
    def write(self, _: object) -> int:
        time.sleep(LONG_S)
        return 0


def save_to_a_broken_disk(model: Any) -> None:
    torch.save(model.state_dict(), BrokenDisk())


class SlowDisk(io.BytesIO):
    """Its first write takes as long as hangs do here."""

    slept = False

    def write(self, data: Any) -> int:
        if not self.slept:
            self.slept = True
            time.sleep(3)
        return super().write(data)


def pause_in_a_save(model: Any) -> None:
    torch.save(model.state_dict(), SlowDisk())


def sleep_at_exit(_: Any) -> None:
    atexit.register(sleep, None)


def pause(_: Any) -> None:
    """Not for ever: a rank that was only slow."""
    time.sleep(3)


def sleep_deaf(_: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(LONG_S)


def stop_itself(_: Any) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def leave_at_once(_: Any) -> None:
    """Without the second that an interpreter's end may take on a busy machine."""
    os._exit(0)


def exit_5(_: Any) -> None:
    sys.exit(5)


def killed(_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# -- training ---------------------------------------------------------------------------------------------------------


def suffer(step: int, model: Any = None) -> None:
    for fault in map(json.loads, sys.argv[2:]):
        if fault["rank"] in (RANK, "all") and fault["step"] == step and GENERATION in fault["generations"]:
            tell(fault=fault["how"])
            globals()[fault["how"]](model)


def saved_step() -> int:
    if not os.path.exists(STATE):
        return 0
    with open(STATE) as file:
        return int(file.read())


def save_step(step: int) -> None:
    with open(STATE + ".part", "w") as file:
        file.write(str(step))
    os.replace(STATE + ".part", STATE)


def main() -> None:
    steps, alone = int(sys.argv[1]), "ALONE" in os.environ
    suffer(-1)
    model: Any = torch.nn.Linear(4, 1)
    done = torch.tensor([saved_step() if RANK == 0 or alone else 0])
    if not alone:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
        dist.broadcast(done, 0)
        KEPT.append(dist.new_group())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    KEPT.insert(0, model)
    suffer(0, model)
    # Where all is done, the last step is done again: with a bare collective right before the end, torch 2.13 now and
    # then aborts at exit ("terminate called without an active exception"), the more often the busier the machine is.
    for step in range(min(int(done), steps - 1) + 1, steps + 1):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if RANK == 0 or alone:
            save_step(step)
        tell(step=step)
        suffer(step, model)
        model.train()
        time.sleep(PACE_S)
    if not alone:
        dist.destroy_process_group()
    suffer(steps + 1, model)
    tell(done=True)


main()
