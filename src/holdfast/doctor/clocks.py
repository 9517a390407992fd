"""The clocks: how this machine's run, what it costs to read them, and how another machine's run beside them."""

from __future__ import annotations

import contextlib
import time
from typing import NamedTuple

from holdfast import linux
from holdfast.doctor.finding import Asked, Finding, combine, fail, ok, warn

APART_S = 0.2
BAD_RATE = 0.01  # then a limit of 3 s on one node is one of 3.03 s on another, and nothing can be measured any more
ODD_RATE = 0.001  # twice what NTP may do to a clock that it corrects
SLOW_READ_S = 2e-6
READS = 2000
TRIES = 50

_SOURCE = "/sys/devices/system/clocksource/clocksource0/current_clocksource"


class Moment(NamedTuple):
    raw_s: float  # untouched by NTP
    monotonic_s: float
    wall_s: float
    doubt_s: float  # how long it took to read them all


def clock(asked: Asked) -> Finding:
    first = look()
    time.sleep(APART_S)
    second = look()
    passed_s = second.monotonic_s - first.monotonic_s
    doubt = (first.doubt_s + second.doubt_s) / APART_S
    raw = (second.raw_s - first.raw_s) / passed_s - 1 if passed_s > 0 else -1.0
    wall = (second.wall_s - first.wall_s) / passed_s - 1 if passed_s > 0 else -1.0
    return combine(
        [
            judge_rate(raw, doubt, "the hardware's clock", "the monotonic one", "raw_rate"),
            judge_rate(wall, doubt, "the wall clock", "the monotonic one", "wall_rate"),
            ok("all clocks run alike"),
            _judge_cost(),
        ]
    )


def judge_rate(rate: float, doubt: float, which: str, beside: str, figure: str) -> Finding:
    """`rate` is 0 where both run alike; `doubt` is what the measurement itself can be wrong by."""
    figures = {figure: round(rate, 6)}
    text = f"{which} runs {abs(rate):.2%} {'faster' if rate > 0 else 'slower'} than {beside}"
    if abs(rate) > BAD_RATE + doubt:
        cure = "timeouts mean nothing here: see its clocksource, chrony or ntpd, the hypervisor"
        return fail(text, cure, **figures)
    if abs(rate) > ODD_RATE + doubt:
        return warn(text, "see chrony or ntpd: is it being corrected at the moment?", **figures)
    return ok("", **figures)


def look() -> Moment:
    """All clocks at one moment: of some tries that in which no other process came between."""
    best: Moment | None = None
    for _ in range(TRIES):
        raw_s = time.clock_gettime(time.CLOCK_MONOTONIC_RAW)
        monotonic_s = time.clock_gettime(time.CLOCK_MONOTONIC)
        wall_s = time.clock_gettime(time.CLOCK_REALTIME)
        doubt_s = max(0.0, time.clock_gettime(time.CLOCK_MONOTONIC_RAW) - raw_s)
        if best is None or doubt_s < best.doubt_s:
            best = Moment(raw_s, monotonic_s, wall_s, doubt_s)
    assert best is not None
    return best


def _judge_cost() -> Finding:
    """A kernel that distrusts its processor's counter asks a chip on the board, a hundred times slower."""
    cost_s = min(_reads_s() for _ in range(5)) / READS
    source = ""
    with contextlib.suppress(OSError):
        source = linux.read(_SOURCE).strip()
    figures: dict[str, float | str] = {"read_s": round(cost_s, 9), "source": source}
    if cost_s > SLOW_READ_S:
        cure = "the kernel distrusts tsc, see dmesg; every step and every event reads the clock"
        return warn(f"to read the clock takes {cost_s * 1e6:.1f} µs ({source or 'source unknown'})", cure, **figures)
    return ok(f"read in {cost_s * 1e9:.0f} ns ({source or 'source unknown'})", **figures)


def _reads_s() -> float:
    began_s = time.perf_counter()
    for _ in range(READS):
        time.monotonic()
    return time.perf_counter() - began_s
