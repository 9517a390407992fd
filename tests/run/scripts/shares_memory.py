"""A rank with a shared memory block, data loader workers and a child in a session of its own; it never ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from multiprocessing import shared_memory

import torch
from torch.utils.data import DataLoader, TensorDataset

block = shared_memory.SharedMemory(create=True, size=1 << 20)
child = subprocess.Popen(["sleep", "300"], start_new_session=True)
loader = iter(DataLoader(TensorDataset(torch.arange(100.0)), num_workers=2))
next(loader)
with open(os.environ["NEWS"], "a") as fifo:
    told = {"rank": int(os.environ["RANK"]), "generation": 0, "pid": os.getpid(), "shared": block.name}
    fifo.write(json.dumps(told) + "\n")
signal.pause()
