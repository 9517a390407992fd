"""The writer's hold on slots: which are being read, and what becomes of what is in them.

How checkpoints are made is imported when the first one is: a writer has to listen before its owner can be killed.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from holdfast.checkpoint.errors import CheckpointError
from holdfast.checkpoint.format import Snapshot
from holdfast.checkpoint.slots import Head, Slot
from holdfast.checkpoint.storage import Storage, open_storage
from holdfast.wire.snapshots import Persisted

if TYPE_CHECKING:
    from holdfast.checkpoint.persist import Outcome

Held = dict[int, tuple[Snapshot, memoryview]]  # by slot


class Reading:
    """`take`, the holds and `release` are for one thread; the writes are for any."""

    def __init__(self) -> None:
        self._slots: dict[int, Slot] = {}
        self._holds: Counter[int] = Counter()  # a lock is the process's, so it counts by itself who needs it
        self._storages: dict[str, Storage] = {}
        self._opening = threading.Lock()
        self._mapping: dict[int, threading.Lock] = {}  # a slot maps its memory anew when it has grown

    def take(self, first: int, fds: Sequence[int]) -> None:
        for index, fd in enumerate(fds, first):
            self._slots[index], self._mapping[index] = Slot(fd), threading.Lock()

    def _peek(self, slot: int) -> Head | None:
        with self._mapping[slot]:
            return self._slots[slot].peek()

    def _load(self, slot: int) -> tuple[Snapshot, memoryview] | None:
        with self._mapping[slot]:
            return self._slots[slot].load()

    # -- holds --------------------------------------------------------------------------------------------------------

    def hold(self, slot: int, step: int) -> str:
        """Keep others from filling it. Returns why it cannot be, or ''."""
        found = self._slots.get(slot)
        if found is None:
            return f"there is no slot {slot}"
        if self._holds[slot] == 0 and not found.lock():
            return "its memory is being filled"
        self._holds[slot] += 1
        head = self._peek(slot)
        if head is None or not head.complete or head.step != step:
            self.release([slot])
            return f"step {step} is not in memory any more"
        return ""

    def hold_all(self, world: str | None) -> list[int]:
        """All that are complete, of one world or of any."""
        held: list[int] = []
        for index in self._slots:
            head = self._peek(index)
            if head is None or not head.complete or (world is not None and head.world != world):
                continue
            if not self.hold(index, head.step):
                held.append(index)
        return held

    def release(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._holds[slot] -= 1
            if self._holds[slot] == 0:
                self._slots[slot].unlock()

    # -- writes -------------------------------------------------------------------------------------------------------

    def write(self, slot: int, step: int) -> tuple[int, Outcome]:
        """The part of a checkpoint that is in a held slot, and whose it is. Raises CheckpointError."""
        loaded = self._load(slot)
        if loaded is None or loaded[0].step != step:
            raise CheckpointError(f"step {step} in memory is damaged")
        snapshot, data = loaded
        from holdfast.checkpoint import persist

        return snapshot.rank, persist.persist(self._storage(snapshot.url), snapshot, data)

    def choose(self, slots: Sequence[int], ranks: range | None) -> list[tuple[int, Held]]:
        """What of it there is to write: the newest step that is whole here. Where other nodes have to add theirs, the
        one before it too: they may have died just before they had the newest."""
        whole = self._whole(slots, ranks)
        alone = ranks is not None and all(
            set(snapshot.ranks) <= set(ranks) for _, parts in whole[:1] for snapshot, _ in parts.values()
        )
        return whole[:1] if alone else whole

    def write_newest(self, token: int, candidates: Sequence[tuple[int, Held]]) -> Persisted:
        """The first that becomes a checkpoint; none of those that are older than one that is there."""
        last = Persisted(token, None)
        for step, parts in candidates:
            storage = self._storage(next(iter(parts.values()))[0].url)
            if _has(storage, step):
                break
            try:
                written = self._write_parts(token, step, storage, parts)
            except CheckpointError:
                if _has(storage, step):  # by now: others have gone on, and cleared away what nobody needs
                    break
                raise
            if written.committed:
                return written
            if last.step is None:
                last = written
        return last

    def _whole(self, slots: Sequence[int], ranks: range | None) -> list[tuple[int, Held]]:
        groups: dict[tuple[str, str, int, int], Held] = {}
        for slot in slots:
            if (loaded := self._load(slot)) is not None and not loaded[0].part:
                snapshot = loaded[0]
                group = groups.setdefault((snapshot.url, snapshot.world, snapshot.term, snapshot.step), {})
                group[slot] = loaded
        whole: list[tuple[int, Held]] = []
        for (_, _, _, step), parts in groups.items():
            snapshots = [snapshot for snapshot, _ in parts.values()]
            wanted = {rank for rank in snapshots[0].ranks if ranks is None or rank in ranks}
            if ranks is None or wanted <= {snapshot.rank for snapshot in snapshots}:
                whole.append((step, parts))
        return sorted(whole, key=lambda found: found[0], reverse=True)

    def _write_parts(self, token: int, step: int, storage: Storage, parts: Held) -> Persisted:
        """All ranks' parts side by side, as they would have done."""
        from holdfast.checkpoint import persist

        outcomes: list[Outcome] = []
        failures: list[Exception] = []

        def write(snapshot: Snapshot, data: memoryview) -> None:
            try:
                outcomes.append(persist.persist(storage, snapshot, data))
            except Exception as failure:  # told below, in the thread that is asked
                failures.append(failure)

        threads = [threading.Thread(target=write, args=part, daemon=True) for part in parts.values()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        committed = next((outcome for outcome in outcomes if outcome.committed), outcomes[0])
        return Persisted(
            token,
            step,
            committed=committed.committed,
            name=committed.name,
            bytes=sum(outcome.bytes for outcome in outcomes),
            seconds=max(outcome.seconds for outcome in outcomes),
            text=committed.note,
        )

    def _storage(self, url: str) -> Storage:
        with self._opening:
            if url not in self._storages:
                self._storages[url] = open_storage(url)
            return self._storages[url]


def _has(storage: Storage, step: int) -> bool:
    """Or a newer one."""
    from holdfast.checkpoint import persist

    newest = persist.newest_step(storage)
    return newest is not None and newest >= step
