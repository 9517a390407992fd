"""A rank that leaves snapshots in memory, without a training: `keeps.py [MODE]`.

In the first world each rank fills its slots with steps 5 and 6, tells so, and "trains" until something happens to it.
A later world ends at once. Modes: "drains" saves step 7 and ends when it is asked to, "deaf" says that it would and
does not, "fails" has rank 1 fail then, "saves" saves step 7, 8, ... again and again, "child" has a child try to attach.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "checkpoint"))

from desks import a_snapshot, fill

from holdfast.checkpoint import writing
from holdfast.checkpoint.slots import Slot
from holdfast.worker import place

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
GENERATION = int(os.environ["HOLDFAST_GENERATION"])
MODE = sys.argv[1] if len(sys.argv) > 1 else ""
URL = os.path.join(os.environ["STATE"], "checkpoints")
CHILD = "from holdfast.checkpoint import writing; print(writing.attach() is not None)"


def tell(**news: object) -> None:
    line = json.dumps({"rank": RANK, "generation": GENERATION, "pid": os.getpid(), **news}) + "\n"
    with open(os.environ["NEWS"], "a") as fifo:
        fifo.write(line)


def main() -> None:
    desk = writing.attach()
    assert desk is not None and len(desk.slots) == 2 * int(os.environ["LOCAL_WORLD_SIZE"])
    slots = [Slot(fd) for fd in desk.slots]
    found = [head.step for slot in slots if (head := slot.peek()) is not None]
    env = os.environ
    tell(own=desk.own, world=desk.world, job=env["HOLDFAST_JOB_ID"], resume=env["HOLDFAST_RESUME"], found=found)
    if GENERATION > 0:
        return

    def keep(step: int) -> int:
        index = desk.own[step % 2]
        fill(slots[index], a_snapshot(URL, step, RANK, tuple(range(SIZE)), desk.world, GENERATION + 1))
        return index

    def save(step: int) -> None:
        desk.save(keep(step), step)
        saved = desk.receive()
        tell(saved=step if saved is not None and saved.ok else None)

    for step in (5, 6):
        keep(step)
    here = place.current()
    if MODE in ("drains", "deaf", "fails"):
        assert here is not None
        here.beacon.drains()
    if MODE == "child":
        tell(child=subprocess.check_output([sys.executable, "-c", CHILD], text=True).strip())
    tell(step=6)
    step = 6
    while True:
        time.sleep(0.01)  # a step
        if MODE == "saves":
            step += 1
            save(step)
            tell(step=step)
        if here is not None and here.beacon.drain_requested:
            if MODE == "drains":
                save(7)
                sys.exit(0)
            if MODE == "fails" and RANK == 1:
                sys.exit(3)


main()
