"""What was done to the job: `faults.jsonl`, one line for each fault, with the moment before it was done.

What a rank does to itself it notes first, as it may not come to it afterwards. What is done from outside is noted when
it has been done: a signal to a process that is gone, or a link that cannot be cut, is no fault.
"""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime

import msgspec

NAME = "faults.jsonl"


class Injected(msgspec.Struct, frozen=True, omit_defaults=True):
    """`at_s` is the monotonic clock of this machine, as in incidents. A world is known by its job's life and its
    generation: a job that was killed and started again begins to count anew."""

    number: int
    kind: str
    life: int
    generation: int
    at_s: float
    time: str
    rank: int | None = None
    node: int | None = None
    pid: int | None = None
    step: int | None = None  # that were done
    for_s: float = 0.0
    file: str = ""  # that was damaged
    committed: int | None = None  # the step of that checkpoint, or of the newest
    text: str = ""


class Order(msgspec.Struct, frozen=True):
    """A fault for a rank to do to itself."""

    number: int
    kind: str
    rank: int | None  # None: the one that `chance` stands for
    step: int = 0  # not before so many are done
    chance: float = 0.0
    generation: int | None = None
    for_s: float = 0.0
    delay_s: float = 0.0


class Orders(msgspec.Struct, frozen=True):
    """What `HOLDFAST_CHAOS` names: a file that is replaced when there is something new."""

    folder: str
    life: int = 0
    orders: tuple[Order, ...] = ()


_lines = msgspec.json.Decoder(Injected)


def now() -> tuple[float, str]:
    told = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return time.monotonic(), told


def append(folder: str, injected: Injected) -> None:
    """Whole or not at all, however many write."""
    fd = os.open(os.path.join(folder, NAME), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        os.write(fd, msgspec.json.encode(injected) + b"\n")
    finally:
        os.close(fd)


def claim(folder: str, number: int) -> bool:
    """Whether it is ours to do: an order stands for all worlds to come, and is done once."""
    try:
        fd = os.open(os.path.join(folder, "done", str(number)), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC)
    except FileExistsError:
        return False
    os.close(fd)
    return True


def claimed(folder: str, number: int) -> bool:
    return os.path.exists(os.path.join(folder, "done", str(number)))


def read(folder: str) -> list[Injected]:
    """In the order in which they were done. Raises OSError where there is no such file."""
    with open(os.path.join(folder, NAME), "rb") as file:
        found = []
        for line in file:
            try:
                found.append(_lines.decode(line))
            except msgspec.MsgspecError:
                continue  # the last one may be torn
    return sorted(found, key=lambda injected: injected.at_s)


def write_orders(path: str, orders: Orders) -> None:
    with open(path + ".part", "wb") as file:
        file.write(msgspec.json.encode(orders))
    os.replace(path + ".part", path)
