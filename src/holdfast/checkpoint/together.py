"""How the ranks of a world come to the same answer: through its store, without a collective.

A store works with any backend, needs no GPU, can be asked from a thread, and is never behind a collective that waits
for somebody. Every rank asks the same questions in the same order, so a number is name enough for a question.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from holdfast.checkpoint.errors import CheckpointError

FOREVER = timedelta(days=30)  # who waits is ended from outside when the world fails
_PREFIX = "holdfast/checkpoint"

_numbers = itertools.count()  # of those that speak together, alike on all ranks


def begin_world() -> None:
    """Another world has another store, in which nobody has said anything yet."""
    global _numbers
    _numbers = itertools.count()


class Left(Exception):
    """This rank is ending."""


class Together:
    """All ranks, or this process alone."""

    def __init__(self, rank: int, size: int, store: Any = None, name: str | None = None) -> None:
        self.rank = rank
        self.size = size
        self._store = store
        self._name = name if name is not None else f"{_PREFIX}/{next(_numbers)}"
        self._questions = itertools.count()
        self._waits_for: list[str] = []
        self._left = False

    def agree(self, said: bytes, decide: Callable[[list[bytes]], bytes]) -> bytes:
        """Rank 0 decides over what all ranks say; everybody gets its answer."""
        if self.size == 1:
            return decide([said])
        name = f"{self._name}/q{next(self._questions)}"
        store = self._store
        if self.rank != 0:
            store.set(f"{name}/{self.rank}", said)
            self._wait([f"{name}/answer"])
            answer = store.get(f"{name}/answer")
            if store.add(f"{name}/heard", 1) == self.size - 1:
                self._forget(name)
            return bytes(answer)
        keys = [f"{name}/{rank}" for rank in range(1, self.size)]
        self._wait(keys)
        answer = decide([said, *(bytes(value) for value in store.multi_get(keys))])
        store.set(f"{name}/answer", answer)
        return answer

    def tell(self, said: bytes) -> bytes:
        """What rank 0 says."""
        return self.agree(said, lambda all_said: all_said[0])

    def post(self, name: str, said: bytes) -> None:
        """For one rank that fetches it."""
        self._store.set(f"{self._name}/{name}", said)

    def fetch(self, name: str) -> bytes:
        """Once somebody has posted it."""
        self._wait([f"{self._name}/{name}"])
        said = bytes(self._store.get(f"{self._name}/{name}"))
        self._store.delete_key(f"{self._name}/{name}")
        return said

    def vote(self, name: str, yes: bool) -> None:
        """Say whether this rank can, and go on. Whoever is last counts."""
        if self.size == 1:
            return
        prefix = f"{self._name}/{name}"
        if yes:
            self._store.add(f"{prefix}/yes", 1)
        if self._store.add(f"{prefix}/votes", 1) == self.size:
            passed = self._store.add(f"{prefix}/yes", 0) == self.size
            self._store.set(f"{prefix}/verdict", b"1" if passed else b"0")

    def verdict(self, name: str, yes: bool) -> bool:
        """Whether all have voted yes. Waits for the last."""
        if self.size == 1:
            return yes
        prefix = f"{self._name}/{name}"
        self._wait([f"{prefix}/verdict"])
        passed = bytes(self._store.get(f"{prefix}/verdict")) == b"1"
        if self._store.add(f"{prefix}/heard", 1) == self.size:
            for key in ("yes", "votes", "verdict", "heard"):
                self._store.delete_key(f"{prefix}/{key}")
        return passed

    def _wait(self, keys: list[str]) -> None:
        self._waits_for = keys
        if self._left:
            raise Left
        self._store.wait(keys, FOREVER)
        if self._left:
            raise Left

    def leave(self, line: Together) -> None:
        """Wake whoever waits here, by another line: a thread that is still inside of torch when the interpreter goes
        brings the whole process down. To be called by one that has failed: what it was asked has no answer now."""
        self._left = True
        for key in self._waits_for:
            if not line._store.check([key]):
                line._store.set(key, b"left")

    def about(self, name: str, own_line: bool = False) -> Together:
        """The same ranks, on another subject. On a line of its own who waits holds up no other; it is opened when it
        is used, and few are: torch looks up the names of both ends of each."""
        store = _Line(self._store) if own_line and self.size > 1 else self._store
        return Together(self.rank, self.size, store, f"{self._name}/{name}")

    @property
    def line(self) -> tuple[Any, str]:
        return self._store, self._name

    def _forget(self, name: str) -> None:
        for rank in range(1, self.size):
            self._store.delete_key(f"{name}/{rank}")
        for key in ("answer", "heard"):
            self._store.delete_key(f"{name}/{key}")


class _Line:
    """A second connection to a store."""

    def __init__(self, store: Any) -> None:
        self._first = store
        self._again: Any = None

    def __getattr__(self, name: str) -> Any:
        if self._again is None:
            self._again = _another(self._first)
        return getattr(self._again, name)


def join() -> Together:
    """The ranks of this process's world. Every rank must come here, and as often."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        from torch.distributed.distributed_c10d import _get_default_store

        return Together(dist.get_rank(), dist.get_world_size(), _get_default_store())
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size > 1:
        raise CheckpointError(f"one of {size} ranks cannot save alone; call init_process_group() before Checkpointer()")
    return Together(0, 1)


def _another(store: Any) -> Any:
    if hasattr(store, "clone"):
        return store.clone()
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    if isinstance(store, PrefixStore):  # a torch that cannot clone: connect as it did
        return PrefixStore(store.prefix, _another(store.underlying_store))  # type: ignore[attr-defined]
    if isinstance(store, TCPStore):
        return TCPStore(store.host, store.port, is_master=False, wait_for_workers=False)
    return store
