"""The longest gaps that hang detection has seen, so that a job that starts anew knows at once what is normal."""

from __future__ import annotations

from typing import Any

from holdfast.worker import place
from holdfast.worker.beacon import GAPS, Phase

_PHASES = len(Phase) - 1


def capture() -> list[float]:
    here = place.current()
    return [here.beacon.times[GAPS + phase] for phase in range(_PHASES)] if here is not None else []


def put_back(gaps: Any) -> None:
    here = place.current()
    if here is None or not isinstance(gaps, list) or len(gaps) != _PHASES:
        return
    for phase, gap_s in enumerate(gaps):
        if isinstance(gap_s, float) and here.beacon.times[GAPS + phase] < gap_s < 1e6:
            here.beacon.times[GAPS + phase] = gap_s
    here.beacon.poke()
