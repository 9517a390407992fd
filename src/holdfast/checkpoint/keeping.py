"""What is deleted from a checkpoint directory, and what never is.

Damaged checkpoints, other people's files and what may still be written stay. Whatever is deleted stops being a
checkpoint first: a step loses its manifest before its bytes, and an epoch's file goes before what is known of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import msgspec

from holdfast.checkpoint import catalogue, faultpoints, sidecars, terms
from holdfast.checkpoint.catalogue import PINS, Catalogue, Found
from holdfast.checkpoint.errors import CheckpointError
from holdfast.checkpoint.format import EPOCH_FILE, STEP_FOLDER, Policy
from holdfast.checkpoint.storage import Storage
from holdfast.control import retention
from holdfast.control.retention import Kept

POINTS = ("remove.before", "remove.between", "remove.after")

_OURS = re.compile(r"t(\d{6,18})\.(?:manifest\.json|\d{5,9}\.(?:bin|json|verified))", re.ASCII)


class Removed(msgspec.Struct, frozen=True):
    name: str
    reason: str


def apply(storage: Storage, policy: Policy) -> list[Removed]:
    """Delete what no rule keeps, and what unfinished saves have left."""
    there = catalogue.find(storage)
    goes = list(_to_remove(there, policy))
    for found, _ in goes:
        remove(storage, found, there)
    removed = [Removed(found.name, reason) for found, reason in goes]
    gone = {(found.name, found.term) for found, _ in goes}
    left = [found for found in there.found if (found.name, found.term) not in gone]
    removed += _remove_leftovers(storage, there, left)
    _remove_sidecars(storage, there, left)
    in_use = [found.term for found in left if found.term is not None]
    terms.forget(storage, min(in_use, default=0))
    storage.sweep()
    return removed


def _to_remove(there: Catalogue, policy: Policy) -> Iterator[tuple[Found, str]]:
    files = {(found.term, found.step): found.name for found in there.found if found.kind == "epoch" and found.verified}
    for kind in ("step", "epoch"):
        some = [found for found in there.found if found.kind == kind and not found.foreign]
        judged = [found for found in some if kind == "epoch" or (found.term, found.step) not in files]
        verdicts = retention.decide(
            [_kept(found, policy) for found in judged], policy.last, policy.best, policy.mode == "max", policy.every
        )
        for found, verdict in zip(judged, verdicts, strict=True):
            if not verdict.keep:
                yield found, verdict.reason
        for found in some:
            if found not in judged and not found.pinned:
                yield found, f"it is in {files[found.term, found.step]}"


def _kept(found: Found, policy: Policy) -> Kept:
    number = found.step if found.kind == "step" else found.epoch
    assert number is not None
    value = catalogue.metric(found, policy)
    return Kept(found.name, number, value, found.verified, found.pinned, found.superseded)


# -- one checkpoint ---------------------------------------------------------------------------------------------------


def remove(storage: Storage, found: Found, there: Catalogue) -> None:
    faultpoints.passed("remove.before")
    if found.kind == "epoch":
        assert found.epoch is not None
        storage.delete(found.name)
        faultpoints.passed("remove.between")
        if found.term is not None:
            storage.delete(sidecars.name(found.epoch, found.term))
            storage.delete(sidecars.mark_name(found.epoch, found.term))
    else:
        assert found.term is not None and found.step is not None
        _remove_term(storage, found.step, found.term, there)
    faultpoints.passed("remove.after")


def _remove_term(storage: Storage, step: int, term: int, there: Catalogue) -> None:
    """One term's files in a step's folder. The folder itself only where nobody can be about to write into it."""
    folder = next(name for name in there.folders if _step(name) == step)
    names = there.folders[folder]
    mine = [name for name in names if (match := _OURS.fullmatch(name)) and int(match[1]) == term]
    if len(mine) == len(names) and step <= _sure(there.found):
        storage.delete_folder(folder)
        return
    for name in sorted(mine, key=lambda name: (not name.endswith(".manifest.json"), not name.endswith(".json"), name)):
        storage.delete(f"{folder}/{name}")
        faultpoints.passed("remove.between")


def _sure(found: Iterable[Found]) -> int:
    """The newest step on the line that was verified. Writers go forward, so nobody writes a step before it
    any more, and none writes that one again."""
    steps = (one.step for one in found if one.verified and not one.superseded and one.step is not None)
    return max(steps, default=-1)


def _step(folder: str) -> int:
    match = STEP_FOLDER.fullmatch(folder)
    assert match
    return int(match[1])


# -- what unfinished saves have left ----------------------------------------------------------------------------------


def _remove_leftovers(storage: Storage, there: Catalogue, left: list[Found]) -> list[Removed]:
    """Shards without a manifest that nobody will finish: a later step is sure, or training went on without them."""
    sure = _sure(left)
    removed = []
    for folder, names in there.folders.items():
        if any(name.startswith(f"damaged_{folder}") for name in there.root):
            continue  # on an object store the bytes of what was set aside stay here
        step = _step(folder)
        ours = {int(match[1]) for name in names if (match := _OURS.fullmatch(name))}
        for term in sorted(ours - set(catalogue.manifest_terms(names))):
            if step < sure or terms.supersedes(there.terms, term, step) is not None:
                _remove_term(storage, step, term, there)
                removed.append(Removed(f"{folder}/t{term:06d}", "it was never finished"))
        if step < sure and not storage.names(folder):
            storage.delete_folder(folder)
    return removed


def _remove_sidecars(storage: Storage, there: Catalogue, left: list[Found]) -> None:
    """Of files that are gone, or that another term has made. One whose file cannot be told apart stays."""
    sure = _sure(left)
    owners = {found.epoch: found.term for found in left if found.kind == "epoch"}
    for name in there.sidecars:
        match = sidecars.NAME.fullmatch(name)
        if match is None:
            continue
        epoch, term = int(match[1]), int(match[2])
        unclear = epoch not in owners and any(_is_file_of(entry, epoch) for entry in there.root)
        if unclear or owners.get(epoch) == term or (epoch in owners and owners[epoch] is None):
            continue
        try:
            step = sidecars.read(storage, epoch, term).step
        except (CheckpointError, FileNotFoundError):
            step = -1
        if step < sure or terms.supersedes(there.terms, term, step) is not None:
            storage.delete(f"{sidecars.FOLDER}/{name}")


def _is_file_of(entry: str, epoch: int) -> bool:
    match = EPOCH_FILE.fullmatch(entry)
    return match is not None and int(match[1]) == epoch


# -- what people say --------------------------------------------------------------------------------------------------


def pin(storage: Storage, found: Found) -> None:
    storage.create(f"{PINS}/{found.name}", b"kept until it is unpinned\n")


def unpin(storage: Storage, found: Found) -> None:
    storage.delete(f"{PINS}/{found.name}")
