"""Faults that a rank does to itself, at an exact step. Only a rank with HOLDFAST_CHAOS in its environment imports this.

`install` hooks the optimizer's step by torch's public hook. What is to be done stands in the file that the variable
names; it is looked at before each step, since a campaign writes to it while the job runs.
"""

from __future__ import annotations

import builtins
import ctypes
import os
import signal
import sys
import time
from typing import Any

import msgspec

from holdfast.chaos import faults
from holdfast.chaos.faults import Injected, Order, Orders
from holdfast.worker import place

VARIABLE = "HOLDFAST_CHAOS"
FOREVER_S = 1 << 30

_orders = msgspec.json.Decoder(Orders)
_installed = False


def install() -> None:
    """Twice is once."""
    global _installed
    path = os.environ.get(VARIABLE)
    if _installed or not path or "RANK" not in os.environ:
        return
    _installed = True
    inside = Inside(path)
    inside.at_start()
    place.moved.append(inside.moved)
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    register_optimizer_step_pre_hook(inside.before_step)
    register_optimizer_step_post_hook(inside.after_step)


class Inside:
    def __init__(self, path: str) -> None:
        self._path = path
        self.moved()
        self._pid = os.getpid()
        self._seen = (0, 0)
        self._read = Orders("")
        self._done = 0  # steps
        self._slow = (0.0, 0.0)  # until when, and by how much

    def moved(self) -> None:
        """To the place that it has now."""
        self._rank, self._generation = int(os.environ["RANK"]), int(os.environ.get("HOLDFAST_GENERATION", "0"))
        self._optimizer: Any = None

    def at_start(self) -> None:
        for order in self._mine():
            if order.kind == "crash-on-import" and order.generation in (None, self._generation):
                self._break_imports(order)
                return

    def before_step(self, optimizer: Any, *_: Any) -> None:
        if os.getpid() != self._pid:
            return
        if self._optimizer is None:
            self._optimizer, self._done = optimizer, _steps_of(optimizer)
        elif optimizer is self._optimizer:
            self._done += 1
        else:
            return  # a program with two counts the steps of the first
        for order in self._mine():
            right = order.kind != "crash-on-import" and order.generation in (None, self._generation)
            if right and self._done >= order.step and self._begin(order):
                self._do(order)

    def after_step(self, optimizer: Any, *_: Any) -> None:
        """Where a slow rank is slow: from a step to the next gradients, in which nobody waits for anybody."""
        if os.getpid() != self._pid or optimizer is not self._optimizer:
            return
        until_s, delay_s = self._slow
        if until_s > time.monotonic():
            time.sleep(delay_s)

    def _mine(self) -> list[Order]:
        try:
            found = os.stat(self._path)
            if (found.st_ino, found.st_mtime_ns) != self._seen:
                with open(self._path, "rb") as file:
                    self._read = _orders.decode(file.read())
                self._seen = (found.st_ino, found.st_mtime_ns)
        except (OSError, msgspec.MsgspecError):
            return []
        return [order for order in self._read.orders if self._is_mine(order)]

    def _is_mine(self, order: Order) -> bool:
        rank = order.rank if order.rank is not None else int(order.chance * int(os.environ.get("WORLD_SIZE", "1")))
        return rank == self._rank

    def _begin(self, order: Order, text: str = "") -> bool:
        if faults.claimed(self._read.folder, order.number) or not faults.claim(self._read.folder, order.number):
            return False
        at_s, told = faults.now()
        faults.append(
            self._read.folder,
            Injected(
                number=order.number, kind=order.kind, life=self._read.life, generation=self._generation, at_s=at_s,
                time=told, rank=self._rank, pid=self._pid, step=self._done, for_s=order.for_s, text=text,
            ),
        )  # fmt: skip
        return True

    def _do(self, order: Order) -> None:
        match order.kind:
            case "kill":
                os.kill(self._pid, signal.SIGKILL)
            case "segfault":
                os.kill(self._pid, signal.SIGSEGV)
            case "stop":
                os.kill(self._pid, signal.SIGSTOP)
            case "exception":
                raise RuntimeError(f"fault {order.number} of a chaos plan")
            case "out-of-memory":
                bytearray(1 << 60)
            case "slow-rank":
                self._slow = (time.monotonic() + order.for_s, order.delay_s)
            case "hang":
                while True:
                    time.sleep(FOREVER_S)
            case "hang-gil":
                while True:  # a signal ends the sleep, that which asks for stacks too
                    ctypes.PyDLL(None).sleep(FOREVER_S)
            case "hang-collective":
                _wait_for_a_peer(self._rank)

    def _break_imports(self, order: Order) -> None:
        """The next import of the program itself fails, as one does whose package was half replaced."""
        original = builtins.__import__

        def broken(name: str, globals: Any = None, *args: Any, **kwargs: Any) -> Any:
            if globals is not None and globals.get("__name__") == "__main__" and self._begin(order, name):
                builtins.__import__ = original
                raise ImportError(f"cannot import {name}: fault {order.number} of a chaos plan")
            return original(name, globals, *args, **kwargs)

        builtins.__import__ = broken


def _steps_of(optimizer: Any) -> int:
    """That it has done in all worlds, by its own count; 0 for those that do not count."""
    for state in optimizer.state.values():
        count = state.get("step") if isinstance(state, dict) else None
        return int(count) if count is not None else 0
    return 0


def _wait_for_a_peer(rank: int) -> None:
    """For a message that nobody sends. The other ranks are in the next collective by then, or come to it."""
    dist = sys.modules["torch.distributed"]
    if not dist.is_initialized() or dist.get_world_size() < 2:
        raise RuntimeError("hang-collective needs a process group of 2 or more ranks")
    peer = (rank + 1) % dist.get_world_size()
    backend = dist.get_backend()
    device = "cuda" if backend == "nccl" else "cpu"
    dist.recv(sys.modules["torch"].zeros(1, device=device), src=peer)
    while True:  # a timeout of the backend is not what was meant
        time.sleep(FOREVER_S)
