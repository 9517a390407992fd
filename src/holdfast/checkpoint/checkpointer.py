"""`holdfast.Checkpointer`: the state of a training run, saved beside it and found again."""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import os
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, MutableMapping
from concurrent.futures import Future
from typing import Any, ClassVar

import msgspec
from torch.optim.optimizer import register_optimizer_step_pre_hook

from holdfast.checkpoint import catalogue, contents, learned, randomness, settings, sharing, terms, writing
from holdfast.checkpoint.appointments import Appointments
from holdfast.checkpoint.courier import Courier, Delivery, Parcel
from holdfast.checkpoint.errors import CheckpointError
from holdfast.checkpoint.format import epoch_file, step_folder
from holdfast.checkpoint.pace import FIRST, Pace
from holdfast.checkpoint.restore import Restored, Restoring
from holdfast.checkpoint.sharded import is_sharded
from holdfast.checkpoint.snapshots import Memory, Moment, Snapshots
from holdfast.checkpoint.storage import open_storage
from holdfast.checkpoint.together import Together, join
from holdfast.wire import messages
from holdfast.wire.snapshots import RESUME
from holdfast.worker import place
from holdfast.worker.beacon import DRAIN, Phase
from holdfast.worker.saying import complain, say

log = logging.getLogger("holdfast")

Metrics = dict[str, float] | Callable[[], dict[str, float]]

EXIT_S = 600.0
HAND_OVER_S = 5.0
CLOSE_S = 5.0
_TELL = "tell:"


class Checkpointer:
    """Saves and restores `state`: a dict of modules, optimizers, anything else with `state_dict` and `load_state_dict`,
    tensors and plain values. Every rank makes one, with the same arguments, and calls the same methods."""

    _with_agent: ClassVar[weakref.ref[Checkpointer] | None] = None
    _kept: ClassVar[Memory | None] = None  # while this process is between two worlds

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        state: MutableMapping[str, Any] | None = None,
        *,
        keep: int = 3,
        keep_best: int = 0,
        keep_every: int = 0,
        metric: str = "loss",
        mode: str = "min",
        every_steps: int | None = None,
        every_minutes: float | None = None,
        memory_every: int | None = None,
        shared: bool = True,
    ) -> None:
        self.state = state if state is not None else {}
        contents.check(self.state)
        self._policy = settings.policy(keep, keep_best, keep_every, metric, mode)
        self._every_steps = settings.steps("every_steps", every_steps)
        self._every_s = settings.minutes("every_minutes", every_minutes)
        self._memory_every = settings.steps("memory_every", memory_every, least=0)
        self._chooses_pace = memory_every is None
        self.directory = settings.directory(directory)
        self._storage = open_storage(self.directory)
        self._together = together = join()
        self._shared = shared or "://" in self.directory
        if self._shared and "://" not in self.directory and not settings.on_one_node():
            sharing.check(self._storage, together)
        if Checkpointer._with_agent is not None and Checkpointer._with_agent() is not None:
            raise CheckpointError(
                "there is a Checkpointer already, and its memory is this rank's; close() that one first"
            )
        kept = Checkpointer._kept
        desk = writing.attach(slots=kept is None)
        try:
            has_agent = self._has_agent = self._all_have(desk is not None)
        except Exception:  # another rank is gone
            if desk is not None:
                desk.close()
            raise
        Checkpointer._with_agent = weakref.ref(self) if has_agent else None
        if desk is not None and not has_agent:
            desk.close()
        self._desk = desk if desk is not None and has_agent else writing.start_own(together.size == 1)
        self._memory = self._memory_for(kept if has_agent else None)
        Checkpointer._kept = None
        local_rank = self._desk.own[0] // 2 if has_agent else None
        self._position = settings.position(together.rank, together.size, local_rank)
        self._generation = settings.generation()
        world = self._desk.world if has_agent else together.tell(self._desk.world.encode()).decode()
        self._snapshots = Snapshots(
            self._memory, world, self._position, together, self._storage.url, self._shared, self._policy
        )
        self._courier = Courier(self._desk, together)
        self._appointments: Appointments | None = None  # once there are steps
        self._pace = Pace()
        self._told_pace = False
        self._term: int | None = None
        self._parcels: deque[Parcel] = deque()
        self._last: Delivery | None = None
        self._started = 0  # steps since this process began
        self._step_at_s: float | None = None
        self._saved_at_s = time.monotonic()
        self.rank_state: Callable[[], Any] | None = None  # plain values that this rank alone has, to be saved too
        self.restored_rank_state: Any = None  # what it had, if there were as many ranks then
        self._stops_when: Callable[[], bool] | None = None
        self.stays: Callable[[], None] | None = None  # instead of ending, where that is asked for
        self.as_it_is = False  # those who stay do so only in a world of the same size
        self.told: Callable[[str], None] | None = None
        self._pid = os.getpid()
        here = place.current()
        self._beacon = here.beacon if here is not None else None
        self._hook = register_optimizer_step_pre_hook(self._before_step)
        self._closed = False
        atexit.register(self._at_exit)

    def _memory_for(self, kept: Memory | None) -> Memory:
        if kept is None:
            if Checkpointer._kept is not None:
                Checkpointer._kept.close()
            return Memory(self._desk)
        kept.move(self._desk)
        return kept

    def _all_have(self, desk: bool) -> bool:
        """Whether each rank has a desk from its agent."""
        return self._together.agree(b"1" if desk else b"0", min) == b"1"

    # -- what users call ----------------------------------------------------------------------------------------------

    def restore(self, which: str | int | os.PathLike[str] | None = None) -> Restored | None:
        """Go on from the newest state that every rank can load, or from the one that is meant: "best", "step:100",
        "epoch:7", a path. None if there is nothing to go on from."""
        self._check_open()
        began_s = time.monotonic()
        which = os.fspath(which) if isinstance(which, os.PathLike) else which
        which = which if which is not None else os.environ.get(RESUME) or None
        sets_aside = self._position.local_rank == 0 and (self._together.rank == 0 or not self._shared)
        alone = self._position.local_size == 1
        restoring = Restoring(self._storage, self._policy, self._together, self._shared, sets_aside, alone)
        with _without_collection():
            memory = self._snapshots.left_by_others()
            found = restoring.run(self.state, which, memory, self._snapshots.restore)
        if found is None:
            return None
        source, restored = found
        own = source.own(self._together.rank)
        if own is not None:
            randomness.put_back(own["rng"])
            self.restored_rank_state = own.get("rank") if restored.world_size == self._together.size else None
        learned.put_back((own or source.own(0) or {}).get("gaps"))
        self._begin_term(restored.step)
        if (here := place.current()) is not None:
            took_s = time.monotonic() - began_s
            here.report(messages.Restored(here.rank, here.generation, restored.step, took_s, restored.name))
        if self._together.rank == 0:
            epoch = f", epoch {restored.epoch}" if restored.epoch is not None else ""
            say(f"goes on from step {restored.step}{epoch} ({restored.name})")
        return restored

    def go_on(self, term: int) -> None:
        """With a state that a rank of the last world has brought along: the same history, to which nothing was added
        since."""
        self._term = term

    @property
    def term(self) -> int:
        """-1: none has begun."""
        return self._term if self._term is not None else -1

    @property
    def together(self) -> Together:
        return self._together

    def abandon(self) -> None:
        """The world is over, and what was under way with it. What is in memory stays there."""
        self._parcels.clear()
        self._let_go(failed=True, wait_s=0.0, keeps=self._has_agent)  # its threads end by themselves, or with the store

    def step(self, step: int, *, epoch: int | None = None, metrics: Metrics | None = None) -> None:
        """Say that a step is done; what is due then happens by itself. On a request to stop it saves, and exits.
        `epoch`: with this step an epoch has ended, and is saved. Metrics may be a function, which is asked when they
        are needed."""
        if self._closed or self._appointments is None:
            self._begin_steps()
        assert self._appointments is not None
        step = settings.count("step", step)
        now_s = time.monotonic()
        if self._step_at_s is not None:
            self._pace.steps_s.append(now_s - self._step_at_s)
        self._step_at_s = now_s
        self._started += 1
        if (cost_s := self._snapshots.cost()) is not None:
            self._look_at_cost(cost_s)
        # What this rank alone knows to be due: all ranks will do it at the same step.
        if (self._beacon is not None and self._beacon.words[DRAIN]) or (self._stops_when and self._stops_when()):
            self._appointments.ask("stop")
        if self._every_s is not None and now_s - self._saved_at_s >= self._every_s and self._together.rank == 0:
            self._saved_at_s = now_s
            self._appointments.ask("save")
        saves = epoch is not None or (self._every_steps is not None and step % self._every_steps == 0)
        for due in self._appointments.at(step):
            if due == "stop":
                self._stop(step, epoch, metrics)
                return
            if due == "save":
                saves = True
            elif due.startswith(_TELL):
                assert self.told is not None
                self.told(due.removeprefix(_TELL))
            else:
                self._set_pace(int(due))
        if saves:
            self._save(step, epoch, metrics, sure=epoch is not None)  # of steps some may be skipped, of epochs none is
        elif self._is_snapshot_due(step):
            self._take(Moment(step, None, settings.metrics(metrics), self._own_term(), self._generation))

    def part(self, step: int, part: int) -> None:
        """Keep, in memory, that the step after this one is done in part. All ranks say so, with the same numbers."""
        if self._memory_every != 0:
            self._take(Moment(step, None, {}, self._own_term(), self._generation, part=part))

    def ask(self, what: str) -> None:
        """Have `told` called with this on all ranks, after the same step. One that asks is enough."""
        if self._appointments is not None:
            self._appointments.ask(_TELL + what)

    def stops_when(self, asked: Callable[[], bool]) -> None:
        """Ask this at every step whether all ranks are to save and end; one rank that is asked to is enough."""
        self._stops_when = asked

    def save(
        self,
        step: int,
        *,
        epoch: int | None = None,
        metrics: Metrics | None = None,
        blocking: bool = False,
    ) -> bool:
        """Save the state as it is now: after a step, or, with `epoch`, at an epoch's end as `checkpoint_epoch_N.pt`.
        Returns while it is copied and written. False if it is skipped because the one before is still being written."""
        self._check_open()
        step = settings.count("step", step)
        epoch = settings.count("epoch", epoch) if epoch is not None else None
        saves = self._save(step, epoch, metrics, sure=blocking)
        if blocking:
            self.wait()
        return saves

    def _save(self, step: int, epoch: int | None, metrics: Metrics | None, sure: bool) -> bool:
        """`sure`: if the ones before are still being written, they are waited for."""
        file = epoch_file(epoch) if epoch is not None else ""
        moment = Moment(step, epoch, settings.metrics(metrics), self._own_term(), self._generation, file)
        if sure and self._parcels:
            self._finish()
        self._hear()
        taken = self._take(moment, sure)
        if taken is None:
            self._courier.decline()
            if self._together.rank == 0:
                log.warning("holdfast: %s is skipped: the one before is still being written", file or step_folder(step))
            return False
        self._saved_at_s = time.monotonic()
        self._parcels.append(self._courier.send(taken[0], step, taken[1]))
        return True

    def wait(self) -> int | None:
        """Wait until what was saved is on storage; returns the step. Raises CheckpointError if the last save failed."""
        self._finish()
        last, self._last = self._last, None
        if last is None:
            return None
        if not last.saved:
            raise CheckpointError(f"step {last.step} was not saved: {last.text}")
        return last.step

    def close(self) -> None:
        """Wait for what was saved, and let go of memory and processes."""
        self._finish()
        self._let_go()

    def _check_open(self) -> None:
        if self._closed:
            raise CheckpointError("this Checkpointer is closed; make another one")

    def _let_go(self, failed: bool = False, wait_s: float = CLOSE_S, keeps: bool = False) -> None:
        if not self._closed:
            self._closed = True
            atexit.unregister(self._at_exit)
            self._hook.remove()
            if self._beacon is not None:
                self._beacon.drains_no_more()
            self._courier.close(failed, wait_s)
            if self._appointments is not None:
                self._appointments.close(wait_s)
            if keeps:
                self._memory.leave()
                Checkpointer._kept = self._memory
            else:
                self._memory.close()
            self._desk.close(failed)
            Checkpointer._with_agent = None

    @property
    def memory_every(self) -> int | None:
        """Steps between two snapshots in memory; 0 for none, None while it is being measured."""
        return self._memory_every

    # -- snapshots ----------------------------------------------------------------------------------------------------

    def _is_snapshot_due(self, step: int) -> bool:
        if self._memory_every is None:
            return self._started % 2 == 0 and self._started <= 2 * FIRST
        return self._memory_every > 0 and step % self._memory_every == 0

    def _take(self, moment: Moment, sure: bool = False) -> tuple[int, Future[None]] | None:
        mine = self.rank_state() if self.rank_state is not None else None
        with self._waiting() if sure else contextlib.nullcontext():
            return self._snapshots.take(self.state, moment, self._courier.slots, mine, sure)

    def _before_step(self, *_: Any) -> None:
        if os.getpid() == self._pid:
            self._snapshots.before_step()

    def _begin_steps(self) -> None:
        self._check_open()
        self._appointments = Appointments(self._together)
        if self._beacon is not None:
            self._beacon.drains()

    def _look_at_cost(self, cost_s: float) -> None:
        assert self._appointments is not None
        self._pace.snapshot(cost_s)
        every = self._pace.choose(self._memory_every) if self._chooses_pace and self._together.rank == 0 else None
        if every is not None:
            self._appointments.ask(str(every))

    def _set_pace(self, every: int) -> None:
        self._memory_every = every
        if self._together.rank == 0 and not self._told_pace:
            self._told_pace = True
            cost = 100 * self._pace.snapshot_s / max(1e-9, every * self._pace.step_s)
            say(
                f"a snapshot in memory every {every} steps: {1e3 * self._pace.snapshot_s:.1f} ms each, {cost:.2f} % of "
                "the time"
            )

    # -- terms --------------------------------------------------------------------------------------------------------

    def _own_term(self) -> int:
        if self._term is None:
            self._begin_term(None)
            if self._together.rank == 0:
                self._warn_of_others()
        assert self._term is not None
        return self._term

    def _warn_of_others(self) -> None:
        """Training began at its beginning, where there was something to go on from."""
        with contextlib.suppress(CheckpointError):
            left = [found for found in catalogue.find(self._storage).found if found.step is not None]
            if left and all(found.superseded for found in left):
                log.warning(
                    "holdfast: %s has checkpoints up to step %d, and nobody called restore(): they are superseded by "
                    "this training",
                    self._storage.url,
                    max(found.step or 0 for found in left),
                )

    def _begin_term(self, restored: int | None) -> None:
        """From here on, what others wrote after that step is not of this history. One for each directory."""
        together, leader = self._together, 0 if self._shared else self._position.local_ranks[0]
        number, wrong = 0, ""
        if together.rank == leader:
            try:
                number = terms.begin(self._storage, settings.job(), self._generation, restored, together.size).number
            except CheckpointError as failure:
                wrong = str(failure)

        def decide(said: list[bytes]) -> bytes:
            answers = [msgspec.json.decode(one, type=tuple[int, str]) for one in said]
            return msgspec.json.encode(([n for n, _ in answers], next((w for _, w in answers if w), "")))

        said = together.agree(msgspec.json.encode((number, wrong)), decide)
        numbers, wrong = msgspec.json.decode(said, type=tuple[list[int], str])
        if wrong:
            raise CheckpointError(wrong)
        self._term = numbers[leader]

    # -- the end ------------------------------------------------------------------------------------------------------

    def _stop(self, step: int, epoch: int | None, metrics: Metrics | None) -> None:
        """All ranks are here, after the same step. If none of them ends, nothing is saved: they take it along. Shards
        they cannot, into a world of another size, and neither can who cannot be in one."""
        ends = self.stays is None or (self._beacon is not None and self._beacon.drain_requested)
        wants = b"2" if ends else b"1" if self.as_it_is or self._has_shards else b"0"
        if (wanted := self._together.agree(wants, max)) != b"0":
            why = "was asked to stop" if wanted == b"2" else "goes on in another world"
            self._save_and_end(step, epoch, metrics, ends, why)
        if self.stays is not None:
            self.stays()

    @property
    def _has_shards(self) -> bool:
        return any(map(is_sharded, contents.collect(self.state).tensors.values()))

    def _save_and_end(self, step: int, epoch: int | None, metrics: Metrics | None, ends: bool, why: str) -> None:
        try:
            self.save(step, epoch=epoch, metrics=metrics, blocking=True)
        except CheckpointError as failure:
            complain(f"stops after step {step} without a save: {failure}")
            if ends:
                raise SystemExit(1) from None
        else:
            if self._together.rank == 0:
                say(f"{why}, and saved step {step}")
            with contextlib.suppress(RuntimeError):  # nobody takes the store away before all know that it is saved
                self._together.agree(b"", lambda _: b"")
            if ends:
                raise SystemExit(0)

    def _finish(self) -> None:
        """Wait for what is on its way."""
        with self._waiting():
            for parcel in self._parcels:
                parcel.delivery.result()
        self._hear()

    def _waiting(self) -> contextlib.AbstractContextManager[None]:
        """A rank that waits for its disk is not hung."""
        return self._beacon.within(Phase.SAVING) if self._beacon is not None else contextlib.nullcontext()

    def _hear(self) -> None:
        """Take note of how earlier saves ended."""
        while self._parcels and self._parcels[0].delivery.done():
            self._last = self._parcels.popleft().delivery.result()
            if not self._last.saved and self._together.rank == 0:
                log.warning("holdfast: step %d was not saved: %s", self._last.step, self._last.text)

    def _at_exit(self) -> None:
        """What is on its way is waited for, but not by a rank that has failed: that has to be seen to have ended. It
        sees to it that the writer has what it was to write; an agent waits for that."""
        if os.getpid() != self._pid or self._closed:
            return
        failed = getattr(sys, "last_value", None) is not None or self._place_failed
        until_s = time.monotonic() + (HAND_OVER_S if failed else EXIT_S)
        for parcel in self._parcels:
            left_s = max(0.0, until_s - time.monotonic())
            if failed and self._has_agent:
                parcel.handed_over.wait(left_s)
            else:
                with contextlib.suppress(TimeoutError):
                    parcel.delivery.result(left_s)
        self._hear()
        self._let_go(failed or bool(self._parcels))

    @property
    def _place_failed(self) -> bool:
        here = place.current()
        return here is not None and here.failed


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """An index has thousands of objects, none of them garbage; to look for some among all of torch's takes longer than
    to read it."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
