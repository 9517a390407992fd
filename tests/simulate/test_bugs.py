"""Each planted bug is found. Most break nearly any seed; the windows are where the rarer ones do.

When the machines or the scenarios change, a rare bug may move to other seeds; `find(BUGS[name], range(6000))` tells to
which.
"""

from __future__ import annotations

import pytest

from holdfast.simulate.bugs import BUGS, find, none

WINDOW = 150
FIRST = {
    "lease_ignored": 80,
    "lease_from_receipt": 3150,
    "lease_from_welcome": 1300,
    "zombie_answers": 400,
    "leaver_taken": 55,
    "never_gives_up": 130,
    "ranks_left_behind": 60,
    "hang_ignored": 30,
    "waiting_blamed": 30,
    "sleep_blamed": 200,
    "end_not_written": 70,
    "launch_without_welcome": 3540,
    "dump_awaited": 165,
    "outdated_taken": 700,
    "planned_ends_are_tries": 200,
    "boundary_awaited_in_vain": 800,
}


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str) -> None:
    first = FIRST.get(name, 0)
    assert find(BUGS[name], range(first, first + WINDOW)) is not None


def test_without_a_bug_nothing_is_found() -> None:
    for first in FIRST.values():
        assert find(none, range(first, first + 5)) is None
