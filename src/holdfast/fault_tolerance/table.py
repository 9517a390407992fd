"""Which section has which place in the rank's page. Kept for the rank's life, whatever client asks."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from weakref import WeakKeyDictionary

from holdfast.fault_tolerance.timeouts import RankMonitorClientError, check_name
from holdfast.wire import messages
from holdfast.worker.beacon import KNOWN, MAX_SECTIONS, SECTIONS
from holdfast.worker.place import Place

NAMES_IN_A_MESSAGE = 1000
# A datagram holds 200 KB, and a thousand names of 200 characters can be four times that.
CHARS_IN_A_MESSAGE = 30_000

_tables: WeakKeyDictionary[Place, dict[str, int]] = WeakKeyDictionary()
_adding = threading.Lock()


def of(place: Place) -> dict[str, int]:
    """From a name to the position of its time in the page; its limit is next to it."""
    return _tables.setdefault(place, {})


def add(place: Place, names: Iterable[str]) -> None:
    """The agent knows a name before its section can be open."""
    table = of(place)
    with _adding:
        new = [check_name(name) for name in dict.fromkeys(names) if name not in table]
        if len(table) + len(new) > MAX_SECTIONS:
            raise RankMonitorClientError(f"more than {MAX_SECTIONS} different sections; give sections fixed names")
        for part in _parts(new):
            first = len(table)
            place.report(messages.Sections(place.rank, place.generation, first, tuple(part)))
            place.beacon.words[KNOWN] = first + len(part)
            table.update({name: SECTIONS + 2 * slot for slot, name in enumerate(part, first)})


def tell_again(place: Place) -> None:
    """To the agent of another world."""
    with _adding:
        slot = 0
        for part in _parts(list(of(place))):
            place.report(messages.Sections(place.rank, place.generation, slot, tuple(part)))
            slot += len(part)
        place.beacon.words[KNOWN] = slot


def _parts(names: list[str]) -> Iterable[list[str]]:
    part: list[str] = []
    chars = 0
    for name in names:
        chars += len(name)
        if part and (len(part) == NAMES_IN_A_MESSAGE or chars > CHARS_IN_A_MESSAGE):
            yield part
            part, chars = [], len(name)
        part.append(name)
    if part:
        yield part
