"""Virtual time: one heap of calls, one source of chance, and a digest of everything that happened."""

from __future__ import annotations

import hashlib
import heapq
import random
import struct
from collections import deque
from collections.abc import Callable
from typing import Any

KEPT = 400  # of the last happenings, to be shown with a violation

_pack = struct.Struct("<dI").pack


class Timeline:
    """Calls come in the order of their time, and among equals in the order in which they were asked for."""

    def __init__(self, seed: int, keep_all: bool = False) -> None:
        self.random = random.Random(seed)
        self.now_s = 0.0
        self.calls = 0
        self.notes: deque[tuple[float, str, object]] = deque(maxlen=None if keep_all else KEPT)
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._asked = 0
        self._digest = hashlib.blake2b(digest_size=8)

    def at(self, when_s: float, call: Callable[..., None], *args: Any) -> None:
        self._asked += 1
        heapq.heappush(self._heap, (when_s if when_s > self.now_s else self.now_s, self._asked, call, args))

    def after(self, delay_s: float, call: Callable[..., None], *args: Any) -> None:
        self.at(self.now_s + delay_s, call, *args)

    def run(self, until_s: float, over: Callable[[], bool]) -> None:
        heap, digest = self._heap, self._digest
        while heap and heap[0][0] <= until_s:
            when_s, asked, call, args = heapq.heappop(heap)
            self.now_s = when_s
            self.calls += 1
            digest.update(_pack(when_s, asked & 0xFFFFFFFF))
            call(*args)
            if over():
                return

    def note(self, who: str, what: object) -> None:
        """Something that a reader of the timeline wants to see: text, or a value that is rendered only for reading."""
        self.notes.append((self.now_s, who, what))
        self._digest.update(who.encode())
        self._digest.update(type(what).__name__.encode() if not isinstance(what, str) else what.encode())

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability
