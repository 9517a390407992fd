"""The script of bench.hangs, the same for holdfast and for NVIDIA's launcher: only the import of the client differs.

`train FOLDER client|none`: steps for ever; a rank that finds the file `hang` takes it away and hangs. `calls`: how long
the client's calls take.
"""

from __future__ import annotations

import json
import os
import sys
import time
import timeit
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def client() -> Any:
    if "HOLDFAST_GENERATION" in os.environ:
        from holdfast.fault_tolerance import RankMonitorClient

        return RankMonitorClient()
    from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient as Theirs

    return Theirs()


def train(folder: Path, monitored: bool) -> None:
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.randn(32, 64)
    monitor = client() if monitored else None
    if monitor is not None:
        monitor.init_workload_monitoring()
    log = os.open(folder / f"steps-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for step in range(10_000_000):
        model(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if monitor is not None:
            monitor.send_heartbeat()
        os.write(log, b"%d %d %d\n" % (step, time.monotonic_ns(), os.getpid()))
        if rank == 1 and (folder / "hang").exists():
            os.unlink(folder / "hang")
            time.sleep(1e6)
        time.sleep(0.01)


def calls(folder: Path) -> None:
    """Microseconds a call, the best of five."""
    dist.init_process_group("gloo")
    monitor = client()
    monitor.init_workload_monitoring()
    ours = "HOLDFAST_GENERATION" in os.environ
    number = 100_000 if ours else 2_000

    def pair() -> None:
        monitor.start_section("step")
        monitor.end_section("step")

    def best_us(call: Any) -> float:
        return min(timeit.repeat(call, number=number, repeat=5)) / number * 1e6

    found = {"heartbeat": best_us(monitor.send_heartbeat), "section pair": best_us(pair)}
    if ours:
        from torch.optim.optimizer import _global_optimizer_post_hooks

        weights = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(weights.parameters())
        [hook] = _global_optimizer_post_hooks.values()
        hook(optimizer, (), {})  # the first step is reported
        found["step hook"] = best_us(lambda: hook(optimizer, (), {}))
    (folder / "calls.json").write_text(json.dumps(found))
    monitor.shutdown_workload_monitoring()


if sys.argv[1] == "train":
    train(Path(sys.argv[2]), sys.argv[3] == "client")
else:
    calls(Path(sys.argv[2]))
