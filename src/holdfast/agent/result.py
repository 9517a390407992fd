"""How a job ended, for whoever started it."""

from __future__ import annotations

import msgspec

from holdfast.control.causes import EXIT_CODES, Kind, RankExit
from holdfast.control.incidents import Incident


class Result(msgspec.Struct, frozen=True):
    """How a job ended."""

    kind: Kind | None  # None is success
    reason: str
    incidents: tuple[Incident, ...]
    exits: tuple[RankExit, ...]  # of the last world
    run_dir: str | None
    drained: bool = False  # it was told to end, and did so in order

    def exit_code(self, from_cause: bool) -> int:
        if self.kind is None or (self.drained and not from_cause):
            return 0
        return EXIT_CODES[self.kind] if from_cause or self.kind is Kind.REQUESTED else 1
