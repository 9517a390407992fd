"""At which step all ranks do the same thing, when only one of them knows that it is time.

A rank cannot ask at every step: that would cost a round trip each. So a thread of every rank listens. Whoever wants
something says so; rank 0 names a step a little ahead; every rank answers whether it can still keep that, and if one has
passed it already the step is moved. A rank that comes to the step before all have answered waits there, a moment. In
all other steps it says where it is, and then sees that nothing is planned; who plans says that first, and then looks
where it is. So one of the two sees the other.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import msgspec

from holdfast.checkpoint.together import FOREVER, Together

CLOSE_S = 5.0
_NEVER = 1 << 62  # where a rank is that has left


class Plan(msgspec.Struct, frozen=True):
    what: str
    step: int


class Appointments:
    """`at` is called by the thread that trains, at every step. The rest is the listeners' business."""

    def __init__(self, together: Together) -> None:
        self._rank, self._size = together.rank, together.size
        self._changed = threading.Condition()
        self._position = -1
        self._quiet = True  # nothing is named, and nothing settled that is still to come
        self._plan: Plan | None = None  # named, and not yet settled
        self._number = 0  # of the plan that is listened for
        self._due: dict[int, list[str]] = {}
        self._asked: set[str] = set()
        self._over = False
        self._store, self._name = together.about("plans").line
        self._threads: list[threading.Thread] = []
        _all.add(self)
        if self._size > 1:
            self._spawn(self._listen, together.about("plans", own_line=True).line[0])
            if self._rank == 0:
                self._spawn(self._call, together.about("plans", own_line=True).line[0])

    def ask(self, what: str) -> None:
        """Have all ranks do this at a coming step. Asking again before it came is the same request."""
        with self._changed:
            if what in self._asked or self._over:
                return
            self._asked.add(what)
            if self._size == 1:
                self._quiet = False
                self._due.setdefault(self._position + 1, []).append(what)
                return
        self._want(what)

    def at(self, step: int) -> list[str]:
        """What is due at the end of this step."""
        self._position = step
        if self._quiet:
            return []
        with self._changed:
            while self._plan is not None and self._plan.step <= step and not self._over:
                self._changed.wait()
            due = [what for at in sorted(self._due) if at <= step for what in self._due.pop(at)]
            self._asked.difference_update(due)
            self._quiet = self._plan is None and not self._due
            return due

    def close(self, wait_s: float = CLOSE_S) -> None:
        """Leave. A thread that waited for the store while the interpreter goes would end the process badly."""
        with self._changed:
            if self._over or self._size == 1:
                return
            self._over = True
            number = self._number
        with contextlib.suppress(RuntimeError):  # the store may be gone, and with it all who would hear of this
            self._store.add(f"{self._name}/gone", 1)
            self._store.set(f"{self._name}/answer/{number}/{self._rank}", str(_NEVER))
            self._store.set(f"{self._name}/to/{self._rank}/{number}", b"")
            if self._rank == 0:
                self._want("")
        for thread in self._threads:
            thread.join(wait_s)

    def _want(self, what: str) -> None:
        self._store.set(f"{self._name}/want/{self._store.add(f'{self._name}/wants', 1)}", what)

    # -- the threads --------------------------------------------------------------------------------------------------

    def _spawn(self, work: Callable[[Any, str], None], store: Any) -> None:
        def run() -> None:
            try:
                work(store, self._name)
            except BaseException:  # the store is gone, and with it the world
                with self._changed:
                    self._over = True
                    self._changed.notify_all()

        thread = threading.Thread(target=run, name="holdfast-appointments", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _call(self, store: Any, name: str) -> None:
        """Rank 0: make a plan of each wish, and move it until all can keep it."""
        number = 0
        for wish in itertools.count(1):
            store.wait([f"{name}/want/{wish}"], FOREVER)
            what = bytes(store.get(f"{name}/want/{wish}")).decode()
            store.delete_key(f"{name}/want/{wish}")
            ahead, kept = 1, False
            position = self._position
            while not kept:
                if store.add(f"{name}/gone", 0):
                    return  # the world is coming to its end
                step = position + ahead
                positions = self._try(store, name, number, Plan(what, step))
                kept = max(positions) < step
                store.set(f"{name}/verdict/{number}", b"1" if kept else b"0")
                number += 1
                ahead *= 2
                position = max(*positions, self._position)

    def _try(self, store: Any, name: str, number: int, plan: Plan) -> list[int]:
        """Where all ranks are. Who answers has heard how the plan before ended, so that one can be forgotten."""
        text = msgspec.json.encode(plan)
        ranks = range(self._size)
        store.multi_set([f"{name}/to/{rank}/{number}" for rank in ranks], [text] * self._size)
        answers = [f"{name}/answer/{number}/{rank}" for rank in ranks]
        store.wait(answers, FOREVER)
        positions = [int(answer) for answer in store.multi_get(answers)]
        for key in [*answers, *(f"{name}/to/{rank}/{number}" for rank in ranks)]:
            store.delete_key(key)
        if number:
            store.delete_key(f"{name}/verdict/{number - 1}")
        return positions

    def _listen(self, store: Any, name: str) -> None:
        for number in itertools.count():
            with self._changed:
                if self._over:
                    return
                self._number = number
            store.wait([key := f"{name}/to/{self._rank}/{number}"], FOREVER)
            if self._over:
                return
            plan = msgspec.json.decode(bytes(store.get(key)), type=Plan)
            with self._changed:
                self._quiet = False
                self._plan = plan
                self._asked.add(plan.what)
                position = self._position
            store.set(f"{name}/answer/{number}/{self._rank}", str(position))
            store.wait([f"{name}/verdict/{number}"], FOREVER)
            kept = bytes(store.get(f"{name}/verdict/{number}")) == b"1"
            with self._changed:
                if kept:
                    self._due.setdefault(plan.step, []).append(plan.what)
                self._plan = None
                self._changed.notify_all()

    def _forget(self) -> None:
        """A child of the rank trains nothing, and has none of its threads."""
        self._changed = threading.Condition()
        self._plan, self._due, self._threads, self._over = None, {}, [], True


_all: weakref.WeakSet[Appointments] = weakref.WeakSet()


def _forget_all() -> None:
    for each in list(_all):
        each._forget()


os.register_at_fork(after_in_child=_forget_all)
