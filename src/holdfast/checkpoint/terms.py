"""Terms: who may write to a checkpoint directory, and which of what is there is still on the line of history.

Whoever starts to train takes the next number. A term says from which step it went on, and so which of the earlier
terms' checkpoints training has left behind: those after that step. They are *superseded*, whenever they are committed;
a process of an earlier world that comes back late can change nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from holdfast.checkpoint import faultpoints, sealed
from holdfast.checkpoint.errors import CheckpointError, Damaged, Fenced
from holdfast.checkpoint.format import MANIFEST, STEP_FOLDER, seal
from holdfast.checkpoint.storage import Storage

FOLDER = ".holdfast/terms"
NAME = re.compile(r"(\d{6,18})\.json", re.ASCII)
POINTS = ("term.before", "term.after")

_MAX_BYTES = 64 * 1024
_TRIES = 1000  # each lost one is somebody else's gain
_NOBODY = 1 << 62  # a step that nothing comes after


class Term(msgspec.Struct, frozen=True):
    number: int
    job: str
    generation: int
    restored: int | None  # the step that training goes on from; None: from the beginning
    world_size: int
    at: str  # wall clock, for people


def read(storage: Storage) -> tuple[Term, ...]:
    """All, in order. One that cannot be read keeps its number, and supersedes nothing: better to find too much than
    to take a good checkpoint for an abandoned one."""
    return tuple(_read(storage, number) for number in _numbers(storage))


def begin(storage: Storage, job: str, generation: int, restored: int | None, world_size: int) -> Term:
    """Raises Fenced if a later world of this job has begun to write here."""
    for _ in range(_TRIES):
        terms = read(storage)
        if terms and terms[-1].job == job and terms[-1].generation > generation:
            raise Fenced(
                f"{told(terms[-1])}; this one is of generation {generation} and must not write to {storage.url}"
            )
        # Somebody may have removed our notes and left the checkpoints. Their numbers must not come again.
        number = (terms[-1].number if terms else _highest_used(storage)) + 1
        term = Term(number, job, generation, restored, world_size, sealed.now())
        faultpoints.passed("term.before")
        if storage.create(_name(number), seal(term)):
            faultpoints.passed("term.after")
            return term
    raise CheckpointError(f"others take one term after another in {storage.url}; one job a directory is meant")


def supersedes(terms: Iterable[Term], term: int, step: int) -> Term | None:
    """The first later term that went on from before this step, or from the beginning."""
    for later in terms:
        if later.number > term and (later.restored is None or later.restored < step):
            return later
    return None


def told(term: Term) -> str:
    return f"a later world (term {term.number}, generation {term.generation}) writes here now"


def forget(storage: Storage, before: int, keep: int = 8) -> None:
    """Terms that supersede nothing any more, since no checkpoint is older. The newest few stay: they fence."""
    for number in _numbers(storage)[:-keep]:
        if number < before:
            storage.delete(_name(number))


def _numbers(storage: Storage) -> list[int]:
    matches = (NAME.fullmatch(name) for name in storage.names(FOLDER))
    return sorted(int(found[1]) for found in matches if found and _name(int(found[1])).endswith(found[0]))


def _name(number: int) -> str:
    return f"{FOLDER}/{number:06d}.json"


def _read(storage: Storage, number: int) -> Term:
    try:
        term = sealed.read(storage, _name(number), Term, _MAX_BYTES)
        if term.number == number:
            return term
    except (Damaged, FileNotFoundError):
        pass
    return Term(number, "", -1, _NOBODY, 0, "")


def _highest_used(storage: Storage) -> int:
    highest = 0
    for folder in storage.names():
        if STEP_FOLDER.fullmatch(folder.removesuffix("/")):
            matches = (MANIFEST.fullmatch(name) for name in storage.names(folder))
            highest = max([highest, *(int(found[1]) for found in matches if found)])
    return highest
