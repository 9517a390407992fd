"""What a record has to tell of a fault that only slows a job or costs it a helper. Pure.

A fault that was too short to be seen need not be told of. So each check first asks the record whether it was seen.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.chaos.faults import Injected
from holdfast.chaos.invariants import Record
from holdfast.chaos.kinds import KINDS
from holdfast.control import stragglers
from holdfast.observe import record

NOTICED_S = 5.0  # so long after a process was killed, a record that goes on has told of its end


def untold(fault: Injected, records: Sequence[Record]) -> str:
    """What is wrong: the event that must be there, and is not. '' where nothing is."""
    told = KINDS[fault.kind].told
    ours = [each for each in records if each.life == fault.life]
    if told == record.WriterEnded.NAME:
        return _without_its_end(fault, ours)
    if told == record.StragglerFound.NAME:
        return _without_its_name(fault, ours)
    return ""


def _without_its_end(fault: Injected, records: Sequence[Record]) -> str:
    """Its agent is told of the end by the kernel. The writer is the first node's."""
    for each in records:
        if each.node != 0:
            continue
        goes_on = any(each.clock_s + noted.at_s > fault.at_s + NOTICED_S for noted in each.own)
        ends = [noted.what.pid for noted in each.own if isinstance(noted.what, record.WriterEnded)]
        if goes_on and fault.pid not in ends:
            return f"killed process {fault.pid}, and the record has no {record.WriterEnded.NAME} of it"
    return ""


def _without_its_name(fault: Injected, records: Sequence[Record]) -> str:
    """By the job's own rule on the paces in its record. Only of a world on one node: of the others' paces a node has
    what is usual there, at another time."""
    for each in records:
        notes = [noted for noted in each.own if getattr(noted.what, "generation", None) == fault.generation]
        if any(isinstance(noted.what, record.WorldLaunched) and noted.what.group_size > 1 for noted in notes):
            continue
        if any(isinstance(noted.what, record.StragglerFound) and noted.what.rank == fault.rank for noted in notes):
            continue
        looks = [(each.clock_s + noted.at_s, noted.what) for noted in notes if isinstance(noted.what, record.Progress)]
        # The last look at a world may have come with its end, when nobody is called slow any more.
        while_slow = [look for at_s, look in looks[:-1] if fault.at_s < at_s < fault.at_s + fault.for_s]
        if _is_seen(fault, while_slow[1:]):  # the first has steps of before
            return f"slowed rank {fault.rank} in {stragglers.WINDOWS} looks in a row, and the record does not name it"
    return ""


def _is_seen(fault: Injected, looks: Sequence[record.Progress]) -> bool:
    seen = stragglers.Stragglers()
    for look in looks:
        window = stragglers.window({look.first_rank + at: each_us / 1e6 for at, each_us in enumerate(look.own_us)})
        if window is not None and any(found.rank == fault.rank for found in seen.hear("", window)):
            return True
    return False
