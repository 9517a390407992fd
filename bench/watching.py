"""A thousand ranks watched by one process: its share of a core. Another process writes their beacons, as ranks do."""

from __future__ import annotations

import asyncio
import os
import resource
import sys
import time

from bench.launchers import table
from holdfast.agent import pages
from holdfast.agent.watching import Watching
from holdfast.control.hangs import Hang, Rules, Watch
from holdfast.worker.beacon import Beacon

RANKS = 1000
STEP_S = 0.1


def write_beacons(fd: int) -> None:
    """All ranks step every 0.1 s, a little apart from each other."""
    beacons = [Beacon(fd, slot, generation=0) for slot in range(RANKS)]
    while os.getppid() != 1:
        begun_s = time.monotonic()
        for slot, beacon in enumerate(beacons):
            beacon.step_done()
            if slot % 100 == 99:
                time.sleep(STEP_S / 20)
        time.sleep(max(0.0, begun_s + STEP_S - time.monotonic()))


def measure(floor_s: float, for_s: float) -> list[str]:
    fd, areas = pages.make(RANKS, b"")
    writer = os.fork()
    if writer == 0:
        write_beacons(fd)
        os._exit(0)
    try:
        return asyncio.run(watch(areas, floor_s, for_s))
    finally:
        os.kill(writer, 9)
        os.waitpid(writer, 0)
        os.close(fd)


async def watch(areas: list[pages.Page], floor_s: float, for_s: float) -> list[str]:
    hangs: list[Hang] = []
    await asyncio.sleep(2.0)
    watching = Watching(
        asyncio.get_running_loop(),
        Watch(Rules(floor_s=floor_s)),
        lambda hang, _: hangs.append(hang),
        lambda rank, why: sys.exit(why),
    )
    watching.begin(0, 0, areas, cold=False)
    await asyncio.sleep(1.0)
    before, begun_s = cpu_s(), time.monotonic()
    await asyncio.sleep(for_s)
    used_s, took_s = cpu_s() - before, time.monotonic() - begun_s
    watching.end()
    if hangs:
        raise SystemExit(f"false alarms: {hangs[:3]}")
    return [f"{floor_s:g} s", f"{took_s:.0f} s", f"{100 * used_s / took_s:.3f} %"]


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    print(f"{RANKS} ranks, each a step every {STEP_S:g} s, watched by one process")
    rows = [measure(30.0, 65.0), measure(1.0, 20.0)]
    print(table(["limit", "watched for", "of a core"], rows))


if __name__ == "__main__":
    main()
