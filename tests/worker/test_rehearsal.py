"""A parked process has trained a little of nothing, and its rank cannot tell."""

from __future__ import annotations

import subprocess
import sys

from holdfast.worker import rehearsal

CODE = """
import os, sys, warnings
import torch, torch._dynamo
from holdfast.worker import rehearsal
rehearsal.ACCELERATORS = tuple(sys.argv[1:])
def seen():
    return len(os.listdir("/proc/self/task")), torch.get_num_threads(), list(warnings.filters), torch.is_grad_enabled()
torch.set_num_threads(3)
made = []
init = torch.optim.AdamW.__init__
def counted(*args, **kwargs):
    made.append(1)
    init(*args, **kwargs)
torch.optim.AdamW.__init__ = counted
before = seen()
rehearsal.rehearse()
assert seen() == before, (before, seen())
torch.set_num_interop_threads(2)  # which torch refuses once it has begun to work in parallel
print(len(made))
"""


def rehearsed(*accelerators: str) -> str:
    command = [sys.executable, "-c", CODE, *accelerators]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stderr == ""
    return done.stdout.strip()


def test_nothing_is_left_of_it() -> None:
    assert rehearsed("/nowhere") == "1"


def test_not_beside_a_gpu() -> None:
    assert rehearsed("/nowhere", "/dev/null") == "0"


def test_it_trains() -> None:
    rehearsal._train()  # and raises nothing, which `rehearse` would keep to itself
