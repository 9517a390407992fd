"""Snapshots on their way to storage: one at a time, in a thread, with all ranks or with none."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from concurrent.futures import Future
from queue import SimpleQueue

import msgspec

from holdfast.checkpoint.together import Together
from holdfast.checkpoint.writing import Desk


class Delivery(msgspec.Struct, frozen=True):
    """How a save ended, on all ranks the same."""

    step: int
    saved: bool
    text: str = ""
    name: str = ""


class Parcel:
    """A save on its way."""

    def __init__(self, number: int, slot: int, step: int, copied: Future[None]) -> None:
        self.number, self.slot, self.step, self.copied = number, slot, step, copied
        self.handed_over = threading.Event()  # the writer has it, or never will
        self.delivery: Future[Delivery] = Future()


class Courier:
    """One save is on its way, and at most one waits behind it: more would be a queue that grows with a slow disk."""

    def __init__(self, desk: Desk, together: Together) -> None:
        self._desk = desk
        self._line = together.about("saves", own_line=True)
        self._aside = together.about("saves")  # the same, for the thread that trains
        self._number = 0
        self._sent: deque[Parcel] = deque()
        self._parcels: SimpleQueue[Parcel | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def slots(self) -> set[int]:
        """Which may not be filled meanwhile."""
        while self._sent and self._sent[0].delivery.done():
            self._sent.popleft()
        return {parcel.slot for parcel in self._sent}

    def decline(self) -> None:
        """This rank cannot take part in the save that all ranks are about to make."""
        self._aside.vote(f"go/{self._number}", False)
        self._number += 1

    def send(self, slot: int, step: int, copied: Future[None]) -> Parcel:
        """Have a slot saved once it is complete."""
        parcel = Parcel(self._number, slot, step, copied)
        self._number += 1
        self._sent.append(parcel)
        self._parcels.put(parcel)
        if self._thread is None:  # one that the interpreter does not wait for: it may wait for a rank that is dead
            self._thread = threading.Thread(target=self._serve, name="holdfast-courier", daemon=True)
            self._thread.start()
        return parcel

    def close(self, failed: bool, wait_s: float) -> None:
        """End the thread. A rank that has failed does not wait for the others' answers."""
        self._parcels.put(None)
        if self._thread is not None:
            if failed and self._aside.size > 1:
                with contextlib.suppress(RuntimeError):  # a store that is gone has woken it already
                    self._line.leave(self._aside)
            self._thread.join(wait_s)

    def _serve(self) -> None:
        while (parcel := self._parcels.get()) is not None:
            try:
                delivery = self._deliver(parcel)
            except BaseException as failure:  # a store that is gone
                delivery = Delivery(parcel.step, False, f"{type(failure).__name__}: {failure}")
            parcel.handed_over.set()
            parcel.delivery.set_result(delivery)

    def _deliver(self, parcel: Parcel) -> Delivery:
        name, step = f"go/{parcel.number}", parcel.step
        failure = parcel.copied.exception()
        self._line.vote(name, failure is None)
        if not self._line.verdict(name, failure is None):
            if failure is not None:
                return Delivery(step, False, f"it could not be copied: {failure}")
            return Delivery(step, False, "skipped: another rank is still writing the one before")
        text, saved_as = self._write(parcel)
        said = self._line.agree(msgspec.json.encode((text, saved_as)), _worst)
        text, saved_as = msgspec.json.decode(said, type=tuple[str, str])
        return Delivery(step, not text, text, saved_as)

    def _write(self, parcel: Parcel) -> tuple[str, str]:
        """What went wrong, and the name it has."""
        try:
            self._desk.save(parcel.slot, parcel.step)
            parcel.handed_over.set()
            answer = self._desk.receive()
        except OSError as failure:
            return f"no process can write it: {failure}", ""
        if answer is None:
            return "the process that writes it was killed", ""
        return ("", answer.name) if answer.ok else (answer.text, "")


def _worst(said: list[bytes]) -> bytes:
    answers = [msgspec.json.decode(one, type=tuple[str, str]) for one in said]
    return msgspec.json.encode(next((answer for answer in answers if answer[0]), answers[0]))
