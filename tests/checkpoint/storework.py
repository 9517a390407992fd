"""What tests do to an object store, also in processes that are killed at it.

`python storework.py URL` reads lines `point:count`, and for each forks a process that does all of it and is killed
there. A fork, since starting an interpreter takes longer than all of the work; and from a process of its own, since one
in which obstore has run, and so has threads, must not be forked.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable

import obstore  # noqa: F401  before the forks

from holdfast.checkpoint import cloud, faultpoints
from holdfast.checkpoint.objects import Objects

KIB = 1024
LARGE = [b"a" * (40 * KIB), b"b" * (40 * KIB)]  # of two parts
PREPARED = ("d", "f", "kept", "step_0/data", "step_0/t1.manifest.json", "step_1/data", "step_1/t1.manifest.json")


def connect(url: str) -> Objects:
    """With all sizes so small that little needs to be sent, and little time between tries."""
    cloud.BACKOFF_S = 0.005
    objects = Objects(url)
    objects.bucket.small_bytes = 32 * KIB
    objects.bucket.part_bytes = 64 * KIB
    return objects


def _create(objects: Objects) -> None:
    assert objects.create("step_2/c", b"new")


def _publish(objects: Objects) -> None:
    assert objects.publish("p", LARGE)


OPERATIONS: dict[str, Callable[[Objects], object]] = {
    "write": lambda objects: objects.write("step_2/w", LARGE),
    "create": _create,
    "publish": _publish,
    "delete": lambda objects: objects.delete("d"),
    "set_aside": lambda objects: objects.set_aside("step_0/"),
    "set_file_aside": lambda objects: objects.set_aside("f"),
    "delete_folder": lambda objects: objects.delete_folder("step_1"),
}


def _work(url: str, fault: str) -> None:
    os.environ[faultpoints.VARIABLE] = fault
    importlib.reload(faultpoints)
    objects = connect(url)
    for name, operation in OPERATIONS.items():
        operation(objects)
        print(name, end=" ", flush=True)


def _race(url: str, letter: str, rounds: int) -> None:
    objects = connect(url)
    for turn in range(rounds):
        print("ready", flush=True)
        sys.stdin.readline()
        print(objects.create(f"m{turn}", letter.encode() * 10_000), flush=True)


def _be_killed(url: str) -> None:
    for line in sys.stdin:
        if (child := os.fork()) == 0:
            try:
                _work(url, line.strip())
            except BaseException as failure:
                print(failure, file=sys.stderr, flush=True)
                os._exit(1)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(status, flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        _be_killed(sys.argv[1])
    else:
        _race(sys.argv[1], sys.argv[2], int(sys.argv[3]))
