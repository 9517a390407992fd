"""The small training under those who keep processes, too, as their documents say it is written. Run by `bench.inside`
in the environment of the peers: `python -m bench.inside_peers torchft|nvrx FOLDER`, with RANK and WORLD_SIZE set."""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from bench import small

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def batches(rank: int, size: int, first: int = 0) -> Any:
    inputs, targets = small.data()
    each = small.BATCH // size
    for number in cycle(range(first, small.SAMPLES // small.BATCH)):
        at = number * small.BATCH + rank * each
        yield inputs[at : at + each], targets[at : at + each]


def torchft(folder: Path) -> None:
    """Each rank is a replica group. `LIGHTHOUSE` says where its server is."""
    from torchft import Manager, Optimizer, ProcessGroupGloo
    from torchft.ddp import PureDistributedDataParallel  # with the other one a survivor ends by an AssertionError

    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    model, log = small.model(), small.Log(folder)
    inner = small.optimizer(model)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=1,
        replica_id=f"bench_{RANK}",
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=os.environ["LIGHTHOUSE"],
        heartbeat_interval=timedelta(milliseconds=50),
        hostname="localhost",
    )
    parallel, optimizer = PureDistributedDataParallel(manager, model), Optimizer(manager, inner)
    for x, y in batches(RANK, SIZE):
        before = manager.current_step()
        optimizer.zero_grad()
        nn.functional.mse_loss(parallel(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if manager.current_step() > before:
            log.step(RANK, manager.num_participants(), manager.current_step())
        time.sleep(small.PAUSE_S)


def nvrx(folder: Path) -> None:
    from nvidia_resiliency_ext import inprocess
    from torch.nn.parallel import DistributedDataParallel

    model, log = small.model(), small.Log(folder)
    optimizer = small.optimizer(model)
    done = 0
    soon = timedelta(milliseconds=10)
    port = int(os.environ["MASTER_PORT"])  # the next one is the wrapper's
    store: Store | None = None

    def train(call: inprocess.CallWrapper = None) -> None:
        nonlocal done, store
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = store or TCPStore("localhost", port, size, is_master=rank == 0, multi_tenant=True)
        dist.init_process_group("gloo", store=PrefixStore(str(call.iteration), store), rank=rank, world_size=size)
        parallel = DistributedDataParallel(model)
        for x, y in batches(rank, size, done % (small.SAMPLES // small.BATCH)):
            optimizer.zero_grad()
            nn.functional.mse_loss(parallel(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            done += 1
            log.step(RANK, size, done)
            time.sleep(small.PAUSE_S)

    train.__annotations__["call"] = inprocess.CallWrapper  # a name is not enough for it
    inprocess.Wrapper(
        store_kwargs={"port": port + 1},
        monitor_thread_interval=soon,
        monitor_process_interval=soon,
        heartbeat_interval=soon,
        progress_watchdog_interval=soon,
        last_call_wait=timedelta(0),
    )(train)()


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"torchft": torchft, "nvrx": nvrx}[sys.argv[1]](Path(sys.argv[2]))
