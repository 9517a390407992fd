"""Which saved state a world goes on from: the newest that every rank can load, decided together and checked by all.

Every rank says what it could load. Rank 0 takes what all have in common, newest first. All try it; if any of them finds
it damaged, it is set aside and all go back to the next. So no rank ever goes on from another step than its peers.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
import torch

from holdfast.checkpoint import catalogue, shards, terms
from holdfast.checkpoint.catalogue import Found
from holdfast.checkpoint.errors import CheckpointError, Damaged
from holdfast.checkpoint.format import EPOCH_FILE, Policy, Snapshot
from holdfast.checkpoint.placing import prepare
from holdfast.checkpoint.sources import Copies, Epoch, Memory, Source, Step
from holdfast.checkpoint.storage import Storage, StorageError, open_storage
from holdfast.checkpoint.together import Together

log = logging.getLogger("holdfast")

Slots = Sequence[tuple[Snapshot, memoryview]]
Copy = Callable[[Copies, memoryview], None]


class Restored(msgspec.Struct, frozen=True):
    """What training goes on from."""

    step: int
    epoch: int | None
    metrics: dict[str, float]
    name: str  # of the checkpoint, or "memory"
    world_size: int | None  # at which it was saved


class Option(msgspec.Struct):
    """One way for this rank to load one state. Those of the same `state` are equal."""

    state: str
    step: int
    name: str
    open: Callable[[], Source]


class Verdict(msgspec.Struct, frozen=True):
    """How it went for one rank."""

    loaded: bool = False
    damaged: tuple[tuple[str, str], ...] = ()  # checkpoints, and what is wrong with each
    refused: str = ""  # why no rank can go on
    partly: bool = False  # some ranks have it, and others lack a part of it


class Restoring:
    """One attempt to go on, for one rank."""

    def __init__(
        self, storage: Storage, policy: Policy, together: Together, shared: bool, sets_aside: bool, alone: bool
    ) -> None:
        self._storage = storage
        self._policy = policy
        self._together = together
        self._shared = shared
        self._sets_aside = sets_aside  # one rank for each directory
        self._alone = alone  # on its node
        self._damaged = ""  # what is wrong with the last that was, on any rank

    def run(
        self,
        state: Mapping[str, Any],
        which: str | int | None,
        memory: Slots,
        copy: Callable[[Copies, memoryview], None],
    ) -> tuple[Source, Restored] | None:
        """None: there is nothing to go on from. Raises CheckpointError, on all ranks."""
        options: list[Option] = []
        wrong = ""
        try:
            options = self._options(which, memory, copy)
        except CheckpointError as failure:  # the others have to hear of it, too
            wrong = str(failure)
        for name in self._common(options, wrong):
            mine = [option for option in options if option.state == name]
            source, option, verdict = self._try(mine, state)
            together = self._settle(verdict)
            if together and source is not None and option is not None:
                step = source.step if source.step is not None else 0
                return source, Restored(step, source.epoch, source.metrics, option.name, source.world_size)
        if which not in (None, "latest"):
            raise CheckpointError(f"cannot restore {which}: {self._damaged or 'it is not there for every rank'}")
        if self._damaged:
            # The model may be half old and half new. Whoever starts again begins with a whole one, and knows of it.
            raise CheckpointError(
                f"no valid checkpoint is left in {self._storage.url} ({self._damaged}); start again to train from the "
                "beginning"
            )
        if options and self._sets_aside:
            log.warning(
                "holdfast: step %d is in %s, but not every rank has its part of it; training begins anew",
                options[0].step,
                self._storage.url,
            )
        return None

    # -- what there is ------------------------------------------------------------------------------------------------

    def _options(self, which: str | int | None, memory: Slots, copy: Copy) -> list[Option]:
        storage, which = _elsewhere(self._storage, which)
        if storage is not self._storage:
            self._sets_aside = False  # it is somebody else's
        if isinstance(which, str) and which.endswith(".pt") and not EPOCH_FILE.fullmatch(which):
            self._sets_aside = False
            return [Option(f"file:{which}", -1, which, _file_opener(storage, which))]
        there = catalogue.find(storage)
        for name, wrong in there.broken:
            self._damaged = f"{name}: {wrong}"
            if self._sets_aside:
                self._set_aside(name, wrong)
        options: list[Option] = []
        below = -1
        for found in reversed(catalogue.choose(which, there, self._policy)):
            if found.step is not None:
                below = found.step
            label = self._label(found.term, found.step) if not found.foreign else f"file:{found.name}"
            options.insert(0, Option(label, below, found.name, _opener(storage, found, self._alone)))
        if which in (None, "latest") and storage is self._storage:
            # Before a checkpoint of the same step, and before a file without one that the catalogue puts above that.
            options = self._in_memory(memory, there.terms, copy) + options
            options.sort(key=lambda option: -option.step)
        return options

    def _common(self, options: list[Option], wrong: str) -> list[str]:
        """The states that every rank could load, in rank 0's order. Raises CheckpointError if any rank cannot tell."""
        mine = list(dict.fromkeys(option.state for option in options))

        def decide(said: list[bytes]) -> bytes:
            answers = [msgspec.json.decode(one, type=tuple[list[str], str, str]) for one in said]
            lists, damaged, wrong = zip(*answers, strict=True)
            common = [name for name in lists[0] if all(name in some for some in lists)]
            return msgspec.json.encode((common, max(damaged), max(wrong)))

        said = self._together.agree(msgspec.json.encode((mine, self._damaged, wrong)), decide)
        common, self._damaged, wrong = msgspec.json.decode(said, type=tuple[list[str], str, str])
        if wrong:
            raise CheckpointError(wrong)
        return common

    def _in_memory(self, memory: Slots, known: Sequence[terms.Term], copy: Copy) -> list[Option]:
        """What all ranks of one earlier world on this node have left whole."""
        groups: dict[tuple[int, str, int, int], list[tuple[Snapshot, memoryview]]] = {}
        for snapshot, data in memory:
            here = snapshot.url == self._storage.url
            if here and terms.supersedes(known, snapshot.term, snapshot.step) is None:
                of = (snapshot.part, snapshot.world, snapshot.term, snapshot.step)
                groups.setdefault(of, []).append((snapshot, data))
        return [
            Option(self._label(term, step, part), step, "memory", functools.partial(Memory, group, copy))
            for (part, _, term, step), group in sorted(groups.items(), reverse=True)
            if len(group) == group[0][0].local_size
        ]

    def _label(self, term: int | None, step: int | None, part: int = 0) -> str:
        """By which ranks recognise the same state. Where each node has a directory, each has terms of its own."""
        label = f"{term}:{step}" if self._shared else f"step:{step}"
        return f"{label}+{part}" if part else label

    # -- trying -------------------------------------------------------------------------------------------------------

    def _try(self, options: list[Option], state: Mapping[str, Any]) -> tuple[Source | None, Option | None, Verdict]:
        """The first of these that can be loaded here."""
        damaged: list[tuple[str, str]] = []
        refused = ""
        for option in options:
            try:
                source = option.open()
                placing = prepare(state, source)
                lacking = placing.lacking[0] if placing.lacking else source.lacks(placing.targets)
                if lacking is not None:
                    if self._shared and option.name != "memory":
                        raise CheckpointError(f"not all of {lacking} is in it")
                    continue  # other ranks' parts, which lie where this one cannot read them
                source.read(placing.targets)
                for finish in placing.finish:
                    finish()
                _wait_for_devices(placing.targets.values())
            except Damaged as failure:
                damaged.append((option.name, str(failure)))
            except FileNotFoundError as failure:
                damaged.append((option.name, f"{failure.filename or failure} is missing"))
            except StorageError as failure:
                # It may be whole: to go back further without a word would lose what was committed.
                refused = str(failure)
            except CheckpointError as failure:
                return None, None, Verdict(False, tuple(damaged), f"{option.name}: {failure}")
            else:
                if self._together.rank == 0:
                    for note in placing.notes:
                        log.warning("holdfast: %s: %s", option.name, note)
                return source, option, Verdict(True, tuple(damaged))
        return None, None, Verdict(False, tuple(damaged), refused)

    def _settle(self, verdict: Verdict) -> bool:
        """Whether all ranks have it. What any of them found damaged is set aside, by the one whose business that is."""

        def decide(said: list[bytes]) -> bytes:
            verdicts = [msgspec.json.decode(one, type=Verdict) for one in said]
            damaged = dict(entry for one in verdicts for entry in one.damaged)
            refused = next((one.refused for one in verdicts if one.refused), "")
            loaded = all(one.loaded for one in verdicts)
            partly = not loaded and any(one.loaded for one in verdicts)
            return msgspec.json.encode(Verdict(loaded, tuple(damaged.items()), refused, partly))

        all_of_us = msgspec.json.decode(self._together.agree(msgspec.json.encode(verdict), decide), type=Verdict)
        if self._sets_aside:
            for name, wrong in all_of_us.damaged:
                self._set_aside(name, wrong)
        if all_of_us.loaded:
            return True
        if all_of_us.refused:
            raise CheckpointError(f"cannot restore {all_of_us.refused}")
        if all_of_us.partly:
            self._damaged = "not every rank could load it"
        for name, wrong in all_of_us.damaged:
            self._damaged = f"{name}: {wrong}"
        return False

    def _set_aside(self, name: str, wrong: str) -> None:
        try:
            put = self._storage.set_aside(f"{name}/" if name.startswith("step_") else name)
        except FileNotFoundError:
            return  # removed meanwhile, which comes to the same
        except StorageError as failure:
            log.warning("holdfast: %s is damaged (%s), and could not be set aside: %s", name, wrong, failure)
            return
        log.warning("holdfast: %s is damaged (%s); it was set aside as %s", name, wrong, put)


def _wait_for_devices(targets: Iterable[torch.Tensor]) -> None:
    """What is loaded may be used in any stream, and the memory that it came from be filled anew."""
    for device in {target.device for target in targets}:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()


def _opener(storage: Storage, found: Found, alone: bool) -> Callable[[], Source]:
    if found.kind == "step":
        return lambda: Step(shards.open_step(storage, found), alone)

    def open_epoch() -> Source:
        from holdfast.checkpoint import epochs

        return Epoch(epochs.open_epoch(storage, found))

    return open_epoch


def _file_opener(storage: Storage, name: str) -> Callable[[], Source]:
    def open_file() -> Source:
        from holdfast.checkpoint import epochs

        return Epoch(epochs.open_file(storage, name))

    return open_file


def _elsewhere(storage: Storage, which: str | int | None) -> tuple[Storage, str | int | None]:
    """A path to a checkpoint in another directory names both."""
    if not isinstance(which, str) or "/" not in which:
        return storage, which
    folder, _, name = which.rstrip("/").rpartition("/")
    if "://" not in folder:
        folder = os.path.abspath(folder or "/")
        if "://" not in storage.url and folder == os.path.abspath(storage.url):
            return storage, name
    elif folder == storage.url.rstrip("/"):
        return storage, name
    return open_storage(folder), name
