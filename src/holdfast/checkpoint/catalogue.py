"""What is in a checkpoint directory, and which of it is meant. No bulk data is read for it."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator

import msgspec

from holdfast.checkpoint import commits, shards, sidecars, terms
from holdfast.checkpoint.errors import CheckpointError, Damaged
from holdfast.checkpoint.format import (
    EPOCH_FILE,
    MANIFEST,
    STEP_FOLDER,
    Manifest,
    Policy,
    epoch_file,
    index_name,
    manifest_name,
    shard_name,
    step_folder,
)  # fmt: skip
from holdfast.checkpoint.storage import Storage

PINS = ".holdfast/pins"
FORMS = '"latest", "best", "step:100", "epoch:7", a number (of a step), or the path of a checkpoint'

_STEP = re.compile(r"(?:step[:_= ]?)?(\d{1,18})", re.ASCII)
_EPOCH = re.compile(r"epoch[:_= ]?(\d{1,18})", re.ASCII)


class Found(msgspec.Struct, frozen=True):
    """A committed checkpoint. Whether its bytes are right shows when they are read."""

    kind: str  # step or epoch
    step: int | None  # None for a `.pt` that is not ours
    epoch: int | None
    term: int | None
    name: str  # its folder or file
    size_bytes: int
    world_size: int | None
    metrics: dict[str, float]
    created: str
    verified: bool  # every byte was read back after it was written
    pinned: bool
    superseded: bool  # training has gone on from before it
    foreign: bool  # a `.pt` of which nothing is known but its name


class Catalogue(msgspec.Struct, frozen=True):
    url: str
    found: tuple[Found, ...]  # newest first
    broken: tuple[tuple[str, str], ...]  # names of what should be a checkpoint, and what is wrong with each
    notes: tuple[str, ...]  # of what is left alone: a later version's, or beside a sound one in the same folder
    terms: tuple[terms.Term, ...]
    root: tuple[str, ...]  # all names in the directory,
    folders: dict[str, tuple[str, ...]]  # in each step's folder,
    sidecars: tuple[str, ...]  # and beside the epochs' files
    unread: frozenset[str] = frozenset()  # epochs' files that are left alone, as notes say


def find(storage: Storage) -> Catalogue:
    """By step, and of one step by term. A `.pt` that is not ours has no step: it stands right above the newest of our
    epochs with a lower number, or below everything if there is none, so that what training wrote since wins over it.

    Junk, links and other people's files are not looked at.
    """
    known = terms.read(storage)
    pins = frozenset(storage.names(PINS))
    beside = tuple(storage.names(sidecars.FOLDER))
    search = _Search(storage, known, pins, beside)
    root = tuple(storage.names())
    for name in root:
        step, epoch = STEP_FOLDER.fullmatch(name.removesuffix("/")), EPOCH_FILE.fullmatch(name)
        if step and name == step_folder(int(step[1])) + "/":
            search.look_at_step(int(step[1]))
        elif epoch and name == epoch_file(int(epoch[1])):
            search.look_at_epoch(int(epoch[1]))
    found = sorted(search.found, key=_order(search.found), reverse=True)
    return Catalogue(
        storage.url, tuple(found), tuple(search.broken), tuple(search.notes), known, root, search.folders, beside,
        frozenset(search.unread),
    )  # fmt: skip


def _order(found: Iterable[Found]) -> Callable[[Found], tuple[int, int, int, int]]:
    steps = {
        one.epoch: one.step for one in found if one.kind == "epoch" and one.step is not None and not one.superseded
    }

    def key(one: Found) -> tuple[int, int, int, int]:
        if one.step is not None:
            return one.step, 0, one.term or 0, one.kind == "epoch"
        assert one.epoch is not None
        below = [step for epoch, step in steps.items() if epoch is not None and epoch < one.epoch]
        return max(below, default=-1), 1, one.epoch, 0

    return key


class _Search:
    def __init__(
        self, storage: Storage, known: tuple[terms.Term, ...], pins: frozenset[str], beside: tuple[str, ...]
    ) -> None:
        self.found: list[Found] = []
        self.broken: list[tuple[str, str]] = []
        self.notes: list[str] = []
        self.unread: set[str] = set()
        self.folders: dict[str, tuple[str, ...]] = {}
        self._storage = storage
        self._terms = known
        self._pins = pins
        self._beside = frozenset(beside)
        self._sidecars = sidecars.terms_of(list(beside))

    def look_at_step(self, step: int) -> None:
        folder = step_folder(step)
        there = tuple(self._storage.names(folder))
        self.folders[folder] = there
        sound, wrong = 0, []
        for term in manifest_terms(there):
            try:
                manifest = shards.read_manifest(self._storage, step, term)
                _check_files(manifest, there)
            except Damaged as failure:
                wrong.append(str(failure))
            except FileNotFoundError:
                continue  # deleted meanwhile
            except CheckpointError as failure:
                self.notes.append(str(failure))
                sound += 1
            else:
                sound += 1
                self.found.append(self._step(manifest, frozenset(there)))
        if wrong and not sound:
            self.broken.append((folder, wrong[0]))
        else:
            self.notes += wrong

    def _step(self, manifest: Manifest, there: frozenset[str]) -> Found:
        return Found(
            "step", manifest.step, manifest.epoch, manifest.term, step_folder(manifest.step), manifest.size_bytes,
            manifest.world_size, manifest.metrics, manifest.created, commits.is_verified(manifest, set(there)),
            step_folder(manifest.step) in self._pins, self._is_superseded(manifest.term, manifest.step), False,
        )  # fmt: skip

    def look_at_epoch(self, epoch: int) -> None:
        name = epoch_file(epoch)
        try:
            size = self._storage.size(name)
            sidecar = sidecars.belonging(self._storage, epoch, self._sidecars.get(epoch, []), size)
        except Damaged as failure:
            self.broken.append((name, str(failure)))
        except FileNotFoundError:
            pass  # deleted meanwhile
        except CheckpointError as failure:
            self.notes.append(str(failure))
            self.unread.add(name)
        else:
            self.found.append(self._epoch(epoch, size, sidecar))

    def _epoch(self, epoch: int, size: int, sidecar: sidecars.Sidecar | None) -> Found:
        name = epoch_file(epoch)
        pinned = name in self._pins
        if sidecar is None:
            return Found("epoch", None, epoch, None, name, size, None, {}, "", False, pinned, False, True)
        verified = sidecars.mark_name(epoch, sidecar.term).rpartition("/")[2] in self._beside
        return Found(
            "epoch", sidecar.step, epoch, sidecar.term, name, size, sidecar.world_size, sidecar.metrics,
            sidecar.created, verified, pinned, self._is_superseded(sidecar.term, sidecar.step), False,
        )  # fmt: skip

    def _is_superseded(self, term: int, step: int) -> bool:
        return terms.supersedes(self._terms, term, step) is not None


def manifest_terms(there: Iterable[str]) -> Iterator[int]:
    for entry in sorted(there):
        match = MANIFEST.fullmatch(entry)
        if match and manifest_name(0, int(match[1])).endswith("/" + entry):
            yield int(match[1])


def _check_files(manifest: Manifest, there: Iterable[str]) -> None:
    names = set(there)
    for listed in manifest.shards:
        for make in (shard_name, index_name):
            name = make(manifest.step, manifest.term, listed.rank)
            if name.rpartition("/")[2] not in names:
                raise Damaged(f"{name} is missing")


# -- which is meant ----------------------------------------------------------------------------------------------------


def choose(which: str | int | None, catalogue: Catalogue, policy: Policy) -> list[Found]:
    """Candidates, the best first; the others are for when it turns out to be damaged. Empty if there is nothing at all
    and nothing certain was asked for. What is superseded is only chosen by its own name or number."""
    if which is None or which == "latest":
        return [found for found in catalogue.found if not found.superseded]
    if which == "best":
        return _best(catalogue, policy)
    text = _inside(str(which), catalogue.url)
    if (match := EPOCH_FILE.fullmatch(text) or _EPOCH.fullmatch(text)) is not None:
        number = int(match[1])
        candidates = [found for found in catalogue.found if found.epoch == number]
        candidates.sort(key=lambda found: found.kind != "epoch")
    elif (match := STEP_FOLDER.fullmatch(text) or _STEP.fullmatch(text)) is not None:
        number = int(match[1])
        candidates = [found for found in catalogue.found if found.step == number]
        candidates.sort(key=lambda found: found.kind != "step")
    else:
        raise CheckpointError(f"{which!r} names no checkpoint; {FORMS} is meant")
    if not candidates:
        raise CheckpointError(f"{which} is not in {catalogue.url}; {_there(catalogue)}")
    return sorted(candidates, key=lambda found: found.superseded)


def metric(found: Found, policy: Policy) -> float | None:
    value = found.metrics.get(policy.metric)
    return value if value is not None and math.isfinite(value) else None


def _best(catalogue: Catalogue, policy: Policy) -> list[Found]:
    on_the_line = [found for found in catalogue.found if not found.superseded]
    valued = [(value, found) for found in on_the_line if (value := metric(found, policy)) is not None]
    if on_the_line and not valued:
        names = sorted({name for found in on_the_line for name in found.metrics})
        known = f"they have {', '.join(names)}" if names else "they have no metrics at all"
        raise CheckpointError(f"no checkpoint in {catalogue.url} has the metric {policy.metric!r}; {known}")
    # Of equals the newer: sorting is stable, and these are newest first.
    valued.sort(key=lambda pair: pair[0], reverse=policy.mode == "max")
    return [found for _, found in valued]


def _inside(text: str, url: str) -> str:
    """A name, or the last part of a path that leads into this directory."""
    folder, slash, name = text.rstrip("/").rpartition("/")
    if not slash:
        return name
    if "://" in url:
        same = folder == url.rstrip("/")
    else:
        same = os.path.realpath(folder.removeprefix("file://") or "/") == os.path.realpath(url)
    if not same:
        raise CheckpointError(f"{text} is not in {url}")
    return name


def _there(catalogue: Catalogue) -> str:
    epochs = sorted({found.epoch for found in catalogue.found if found.kind == "epoch" and found.epoch is not None})
    steps = sorted({found.step for found in catalogue.found if found.kind == "step" and found.step is not None})
    said = [f"{word} {_listed(some)}" for word, some in (("epochs", epochs), ("steps", steps)) if some]
    return f"there are {' and '.join(said)}" if said else "there is no checkpoint at all"


def _listed(numbers: Iterable[int]) -> str:
    found = list(numbers)
    return ", ".join(map(str, found if len(found) <= 8 else [*found[:2], "...", *found[-5:]]))
