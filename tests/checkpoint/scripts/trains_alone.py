"""A script without a launcher: `trains_alone.py STEPS [kill]`. It snapshots each step, and saves every tenth.

With "kill" it ends itself by SIGKILL in the middle of an epoch, after a step whose snapshot is complete. It prints its
writer's pid, the step that is the newest in memory then, and the sum that belongs to it.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from desks import last_writer
from torch.utils.data import DataLoader, TensorDataset

import holdfast


def main() -> None:
    steps, kills = int(sys.argv[1]), "kill" in sys.argv
    x = torch.zeros(50_000, requires_grad=True)
    optimizer = torch.optim.SGD([x], lr=0.1, momentum=0.9)
    state: dict[str, Any] = {"x": x, "optimizer": optimizer, "sum": 0.0}
    checkpointer = holdfast.Checkpointer(state=state, every_steps=10, memory_every=1, keep=0)
    restored = checkpointer.restore()
    step = restored.step if restored is not None else 0
    data = TensorDataset(torch.arange(80.0))
    while step < steps:
        for (batch,) in DataLoader(data, batch_size=4, num_workers=2):  # by fork
            optimizer.zero_grad()
            (x[:4] * batch).sum().backward()
            optimizer.step()  # waits until the snapshot before it is complete
            if kills and step == 27:
                print(last_writer(), step, state["sum"], flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            step += 1
            state["sum"] += float(x.detach().sum())
            checkpointer.step(step)
            if step == 25:
                checkpointer.wait()  # these steps are short: both slots could still be on their way to disk at 27
            if step == steps:
                break
    print(last_writer(), step, state["sum"])


main()
