"""How a rank outlives its world: it leaves what is broken, and goes on in the next one with what it has in memory.

A step that cannot be completed is let run to its end, so that no exception shows up in the program: what its backward
raises is kept here, and nothing that counts (optimizer, scheduler, scaler) is stepped. `run.step()` then finds that the
world is over.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from holdfast import linux
from holdfast.checkpoint import randomness, together
from holdfast.training import attached, health, rebuilding, warming
from holdfast.training.beside import Beside
from holdfast.training.marks import Mark
from holdfast.training.stuck import Watch
from holdfast.wire import messages
from holdfast.wire.snapshots import STANDBY
from holdfast.worker import contexts, errors, groups, handles, place
from holdfast.worker.beacon import STEPS
from holdfast.worker.place import Place
from holdfast.worker.saying import complain, say
from holdfast.worker.seat import Seat

Hooks = dict[str, list[Callable[[], Any]]]
LAST_S = 0.2

_active: Survival | None = None


def begin(state: MutableMapping[str, Any], hooks: Hooks) -> Survival | None:
    """None: this process is no rank of an agent's, or has no group to get out of, or cannot."""
    global _active
    here = place.current()
    if here is None or here.seat is None or not dist.is_available() or not dist.is_initialized():
        return None
    modules = rebuilding.held(state.values())
    others = [value for value in state.values() if not isinstance(value, nn.Module)]
    why = rebuilding.hinders(modules, others) or attached.left_out(state.values())
    if not why and (called := groups.early()):
        why = f"{called}() is called before run.attach(), and a new rank would be alone there; call it after that"
    if why and os.environ.get(STANDBY):
        groups.refuse_to_stand_by(f"cannot take a rank's place: {why}")
    if why:
        here.report(messages.Stays(here.rank, here.generation, stays=False, why=why))
        if here.rank == 0:
            say(f"ranks do not outlive their worlds: {why}")
        return None
    _active = Survival(here, here.seat, state, hooks)
    return _active


class WorldOver(RuntimeError):
    """Raised through a function that is begun again then."""


class Survival:
    def __init__(self, here: Place, seat: Seat, state: MutableMapping[str, Any], hooks: Hooks) -> None:
        modules = rebuilding.held(state.values())
        self._place, self._seat, self._state, self._modules = here, seat, state, modules
        self.hooks = hooks
        sharded = rebuilding.is_sharded(modules)
        stepped = (nn.Module, torch.optim.Optimizer)
        others = {name: value for name, value in state.items() if not isinstance(value, stepped)} if sharded else {}
        self._fits_any_size = not handles.are_kept(default=not sharded) and (
            not sharded or rebuilding.fits_any_size(modules, others)
        )
        self._made = groups.made()
        self._queues = self._made is not None and "nccl" in (self._made.backend or "cuda:nccl")
        self.begins_again = False  # the program does, after each end of a world
        self.stays = True
        groups.on_own_group(self._own_group)
        rebuilding.on_shards(self._own_group)
        attached.watch(state.values(), self.withdraw)
        self.doomed = False  # the step that is being done cannot be completed
        self._mark: Mark | None = None
        self._beside = Beside()
        self.bequeath: Callable[[], tuple[int, int] | None] = lambda: None  # a file, and the step that is in it
        self._watch = Watch()
        self._gave_up = False  # what it has is left to others, and this process ends
        self._left = -1  # the newest world that was left
        self._leaves = threading.Lock()  # a rank leaves its world, or its state; not both
        self._joins = False  # the next world's group is being made
        seat.watch(here.generation, self._over, self._is_late)
        torch.autograd.backward = _kept(torch.autograd.backward)
        for part in rebuilding.wrapped(modules):
            if hasattr(part, "_sync_buffers"):
                part._sync_buffers = _kept(part._sync_buffers)  # type: ignore[method-assign]
            if hasattr(part, "_pre_forward"):
                part._pre_forward = _again_without_gradients(part._pre_forward)  # type: ignore[method-assign]

    # In the seat's thread:

    def _over(self, steps: int) -> None:
        """What one rank has done, the others can do, too: all that it takes is on its way. Else that step, of which
        somebody may have heard, would be done again."""
        until_s = time.monotonic() + LAST_S
        words = self._place.beacon.words
        while words[STEPS] < steps and not self.doomed and time.monotonic() < until_s:
            time.sleep(LAST_S / 100)
        self._watch.begin()
        groups.abort(store=self._joins)  # who makes a group waits at the store for somebody who may never come

    def _is_late(self) -> None:
        """The training's thread is stuck if it does nothing, with all that it could wait for gone: then it will not
        leave, and its state has to without it. So it does if that is in a long step."""
        look = self._watch.look(collectives=not self._joins)
        if look.late:
            groups.abort(store=True)
        if look.stuck and not self._gave_up:
            here, generation = self._place, self._place.generation
            will = self.bequeath()
            if will is None and not rebuilding.is_sharded(self._modules):
                return
            fd, step = will or (messages.NO_FILE, -1)  # of shards the last snapshot is the agent's already
            with self._leaves:
                if self._left < generation:
                    self._gave_up = True
                    here.report(messages.Bequeathed(here.rank, generation, fd, step))  # and is ended now
                elif will is not None:  # it has come to its end meanwhile
                    os.close(fd)

    # In the training's:

    def announce(self) -> None:
        """From here on this rank is worth to be kept."""
        here = self._place
        if self.stays:
            gpu = contexts.in_use(self._modules)
            here.report(messages.Stays(here.rank, here.generation, self.as_it_is, gpu=gpu))

    @property
    def as_it_is(self) -> bool:
        """Whether this process can be no other rank, and its world no other size."""
        return not self._fits_any_size

    def _own_group(self, called: str) -> None:
        """A group that the program has made for itself goes with its world. Who begins again makes another one."""
        if not self.begins_again:
            instead = "in there" if called in groups.GROUPS else "before run.attach(), and attach it"
            self.withdraw(f"{called}() is called outside of run.train(); call it {instead}")

    def withdraw(self, why: str) -> None:
        """This rank does not stay, after all. All ranks come here, and one says so."""
        if not self.stays:
            return
        self.stays = False
        here = self._place
        here.report(messages.Stays(here.rank, here.generation, stays=False, why=why))
        if here.rank == 0:
            say(f"ranks do not outlive their worlds: {why}")

    def wait_for_others_end(self) -> None:
        self._place.wait_for_others_end()

    @property
    def stands_by(self) -> bool:
        """Whether this process has no rank yet."""
        return bool(os.environ.get(STANDBY))

    def stand_by(self) -> None:
        """Until there is a place for this process."""
        warming.warm(self._modules, self._state.values(), self._queues)
        rebuilding.release(self._modules)
        groups.leave()
        device = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self._place.report(messages.StandsBy(_resident_bytes(), torch.cuda.memory_reserved() + 1 if device else 0))
        self._join(self._seat.next_place())

    @property
    def over(self) -> bool:
        """Whether the world is."""
        return self.doomed or bool(self._seat.over)

    def is_asked(self) -> bool:
        """Whether all ranks are to leave the world after the same step."""
        return bool(self._seat.asked)

    def leave_at_boundary(self) -> None:
        self._seat.leave_at_boundary()

    def may_step(self) -> bool:
        """Whether what counts steps may do so now. With NCCL a backward has returned before its gradients are there:
        what waits behind a collective that nobody ends would run on half of them as soon as that is aborted."""
        if self._queues and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.current_stream().synchronize()
            self.doomed = bool(self._seat.over)
        return not self.doomed

    def outlives(self, failure: Exception) -> bool:
        """Whether this is the end of the world and not the program's own mistake. Waits to be told."""
        if isinstance(failure, WorldOver):
            return True
        if not isinstance(failure, (RuntimeError, OSError)):
            return False
        # In a world that is over, what fails next need not tell of it in words that are known: what was aborted leaves
        # half of everything behind. So a mistake of the program's own may be taken for that. Its step is done again,
        # as it would have been anyway, and in a world that is well the same mistake ends the rank.
        if not self._seat.over:
            if not errors.describe(failure).distributed:
                return False
            headline = f"{type(failure).__name__}: {str(failure).splitlines()[0][:300]}"
            here = self._place
            here.report(messages.Stumbled(here.rank, here.generation, time.monotonic(), headline))
            self._seat.wait_until_over()
        self.doomed = True
        return True

    # -- between two worlds -------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """This world, for good."""
        with self._leaves:
            if not self._gave_up:
                self._left = self._place.generation
        if self._gave_up:
            threading.Event().wait()  # its state is somebody else's already, and its end on its way
        self._call("abort")
        groups.abort()
        groups.wait_for_gpu()
        self._call("aborted")
        if not self._call("health"):
            complain(f"rank {self._place.rank} is not healthy, by its own check, and ends")
            raise SystemExit(1)
        here = self._place
        self._seat.left()
        here.report(messages.Left(here.rank, here.generation, time.monotonic(), self._beside.possible))
        rebuilding.release(self._modules)  # while the next world is being formed
        groups.leave()

    def _call(self, moment: str) -> bool:
        answers = [call() for call in self.hooks[moment]]
        return all(answer is not False for answer in answers)

    def join(self) -> None:
        """The next one, as soon as there is a place in it."""
        place_in_it = self._seat.next_place()
        self._call("rejoin")
        self._join(place_in_it)

    def _join(self, place_in_it: tuple[messages.ForkWorker, list[int]]) -> None:
        self._place.move(*place_in_it)
        if self._left >= 0:
            self.announce()  # what it has is worth to be kept, too, if the new rank dies before it is there
        together.begin_world()
        health.begin_world()
        assert self._made is not None
        self._joins = True
        try:
            groups.join(self._made, lambda: self._seat.over)
        finally:
            self._joins = False
        optimizers = [value for value in self._state.values() if isinstance(value, torch.optim.Optimizer)]
        if rebuilding.renew(self._modules, optimizers):
            self._mark = None  # of shards that were others
        self._beside.begin_world()
        self.doomed = False

    # -- steps --------------------------------------------------------------------------------------------------------

    def step_done(self) -> None:
        """All is as it should be after a step; what the next one changes before its optimizer steps can be undone."""
        if self._mark is None:
            self._mark = Mark(self._state, self._modules)
            large = self._mark.too_large
        else:
            large = self._mark.take()
        if large:
            self.withdraw(large)
        if not self._beside.looked:
            self._beside.step()

    def undo(self) -> None:
        if self._mark is not None:
            self._mark.put_back()

    @property
    def randomness(self) -> dict[str, Any]:
        """As it was after the last step."""
        return randomness.told(self._mark.randomness) if self._mark is not None else {}

    @property
    def mark(self) -> Mark | None:
        """Of what else a step changes."""
        return self._mark


def _resident_bytes() -> int:
    pages = int(linux.read("/proc/self/statm").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _kept(call: Callable[..., Any], instead: Callable[..., Any] = lambda *_, **__: None) -> Callable[..., Any]:
    """What it raises because the world is over is not raised: the step is doomed, and goes on to its end."""

    @functools.wraps(call)
    def kept(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except Exception as failure:
            if _active is None or not _active.outlives(failure):
                raise
            failure.__traceback__ = None  # by which it would keep the group, and its connections, open
            with contextlib.suppress(AttributeError):
                failure.__context__ = failure.__cause__ = None
        return instead(*args, **kwargs)

    return kept


def _again_without_gradients(call: Callable[..., Any]) -> Callable[..., Any]:
    """What DDP does before a forward: in the second of a world, and where gradients are wanted, all ranks agree on
    its buckets. Then it moves the inputs to their device, and that has to be done."""
    return _kept(call, torch.no_grad()(call))
