"""An ordinary torchrun script: DDP on gloo, a counter for a checkpoint, and faults on order.

`trains.py STEPS [FAULT ...]`, a fault being JSON: {"rank": 1, "step": 5, "how": "SIGKILL", "generations": [0]}.
Step -1 is before the process group exists, step 0 before the first optimizer step. `how` is a signal's name,
"raise", "exit N", "exit slowly N" (its sockets close, and it is gone after its peers), "os._exit N", "deafen" (ignore
SIGTERM and sleep) or "leave" (start a process that outlives us).
HOLD, if given, is a file that keeps the job training for as long as it exists, beyond its steps.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

RANK = int(os.environ["RANK"])
GENERATION = int(os.environ.get("HOLDFAST_GENERATION", "0"))
KEPT: list[object] = []  # torch 2.13 can deadlock when a model is freed right after its last collective
STATE = os.path.join(os.environ["STATE"], "step")


def tell(**news: object) -> None:
    line = json.dumps({"rank": RANK, "generation": GENERATION, "pid": os.getpid(), **news}) + "\n"
    with open(os.environ["NEWS"], "a") as fifo:
        fifo.write(line)


def saved_step() -> int:
    if not os.path.exists(STATE):
        return 0
    with open(STATE) as file:
        return int(file.read())


def is_held() -> bool:
    """Rank 0 says so for all: each looking by itself, some might see the file and some not."""
    told = torch.tensor([int(os.path.exists(os.environ["HOLD"]))])
    dist.broadcast(told, 0)
    return bool(told)


def suffer(step: int) -> None:
    for fault in map(json.loads, sys.argv[2:]):
        if (fault["rank"], fault["step"]) == (RANK, step) and GENERATION in fault.get("generations", [0]):
            tell(fault=fault["how"])
            strike(fault["how"])


def strike(how: str) -> None:
    word, _, number = how.partition(" ")
    if word == "raise":
        raise ValueError(f"planned at rank {RANK}")
    if word == "exit" and number.startswith("slowly"):
        atexit.register(close_and_wait)
        sys.exit(int(number.split()[1]))
    if word == "exit":
        sys.exit(int(number))
    if word == "os._exit":
        os._exit(int(number))
    if word == "segfault":
        ctypes.string_at(0)
    if word == "deafen":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        tell(deaf=True)
        while True:
            time.sleep(60)
    if word == "leave":
        child = subprocess.Popen(["sleep", "300"], start_new_session=True, stdin=subprocess.DEVNULL)
        tell(left=child.pid)
        return
    os.kill(os.getpid(), signal.Signals[word])


def close_and_wait() -> None:
    """As an interpreter does that has much to take apart: the peers see that we are gone long before we are."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{fd}").startswith("socket:") and is_tcp(fd):
                os.close(fd)
    until_s = time.monotonic() + 30.0
    while peers() and time.monotonic() < until_s:
        time.sleep(0.01)


def peers() -> list[int]:
    """The other ranks of this world, here."""
    from holdfast import linux

    found = []
    for pid in linux.children(os.getppid()):
        with contextlib.suppress(OSError):
            title = linux.read(f"/proc/{pid}/cmdline")
            if pid != os.getpid() and "holdfast rank" in title and f"generation {GENERATION}]" in title:
                found.append(pid)
    return found


def is_tcp(fd: int) -> bool:
    with socket.socket(fileno=os.dup(fd)) as copy:
        return copy.family in (socket.AF_INET, socket.AF_INET6)


def main() -> None:
    steps = int(sys.argv[1])
    suffer(-1)
    if skew := float(os.environ.get("SKEW_S", "0")):
        time.sleep(skew * RANK)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    KEPT.append(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    done = torch.tensor([saved_step() if RANK == 0 else 0])
    dist.broadcast(done, 0)
    suffer(0)
    held = "HOLD" in os.environ
    # Where all is done, the last step is done again: with a bare collective right before the end, torch 2.13 now and
    # then aborts at exit ("terminate called without an active exception").
    step = int(done) if held else min(int(done), steps - 1)
    while step < steps or held:
        held = held and is_held()
        step += 1
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if RANK == 0:
            with open(STATE + ".part", "w") as file:
                file.write(str(step))
            os.replace(STATE + ".part", STATE)
        tell(step=step)
        suffer(step)
        time.sleep(float(os.environ.get("PACE_S", "0")))
    dist.destroy_process_group()
    suffer(steps + 1)
    tell(done=True)


main()
