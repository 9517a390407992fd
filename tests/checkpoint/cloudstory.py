"""Two ranks that save into an object store and are killed at it: `python cloudstory.py` reads lines `url point:count`.

It forks for each, before obstore has run and has threads.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import obstore  # noqa: F401  before the forks

import states
from holdfast.checkpoint import cloud, faultpoints
from holdfast.checkpoint.format import Policy
from holdfast.checkpoint.objects import Objects
from holdfast.checkpoint.storage import Storage


def connect(url: str) -> Objects:
    cloud.BACKOFF_S = 0.005
    objects = Objects(url)
    objects.bucket.small_bytes = 2048  # so that the epoch's file goes in parts, and is copied
    objects.bucket.part_bytes = 2048
    return objects


def tell(storage: Storage) -> list[int]:
    """What is done, step by step."""
    done = []
    term = states.begin(storage)
    for step, epoch in ((10, None), (20, 1), (30, None)):
        outcome = states.save(storage, step, 2, term=term, epoch=epoch, policy=Policy(last=1))[-1]
        assert outcome.verified and not outcome.note, outcome
        done.append(step)
        print(step, end=" ", flush=True)
    return done


def _be_killed(url: str, fault: str) -> None:
    os.environ[faultpoints.VARIABLE] = fault
    importlib.reload(faultpoints)
    tell(connect(url))


if __name__ == "__main__":
    for line in sys.stdin:
        if (child := os.fork()) == 0:
            code = 1
            try:
                _be_killed(*line.split())
                code = 0
            finally:
                sys.stderr.flush()
                os._exit(code)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
