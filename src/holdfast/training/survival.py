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
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from holdfast import linux
from holdfast.checkpoint import randomness, together
from holdfast.training import health, rebuilding, warming
from holdfast.training.beside import Beside
from holdfast.wire import messages
from holdfast.wire.snapshots import STANDBY
from holdfast.worker import errors, groups, place
from holdfast.worker.beacon import STEPS
from holdfast.worker.place import Place
from holdfast.worker.saying import complain, say
from holdfast.worker.seat import Seat

Hooks = dict[str, list[Callable[[], Any]]]
IDLE_S = 0.01
BUSY = 12  # looks at a rank that is late, after which its state has to leave without it even if it does something
LAST_S = 0.2

_active: Survival | None = None


def begin(state: Collection[Any], hooks: Hooks) -> Survival | None:
    """None: this process is no rank of an agent's, or has no group to get out of, or cannot."""
    global _active
    here = place.current()
    if here is None or here.seat is None or not dist.is_available() or not dist.is_initialized():
        return None
    modules = [value for value in state if isinstance(value, nn.Module)]
    why = ""
    if found := rebuilding.hinders(modules, (value for value in state if not isinstance(value, nn.Module))):
        why = f"{found} cannot be given another process group"
    elif called := groups.early():
        why = f"{called}() is called before run.attach(), and a new rank would be alone there; call it after that"
    if why and os.environ.get(STANDBY):
        groups.refuse_to_stand_by(f"cannot take a rank's place: {why}")
    if why:
        if here.rank == 0:
            say(f"ranks do not outlive their worlds: {why}")
        return None
    _active = Survival(here, here.seat, state, hooks)
    return _active


class WorldOver(RuntimeError):
    """Raised through a function that is begun again then."""


class Survival:
    def __init__(self, here: Place, seat: Seat, state: Collection[Any], hooks: Hooks) -> None:
        modules = [value for value in state if isinstance(value, nn.Module)]
        self._place, self._seat, self._state, self._modules = here, seat, state, modules
        self.hooks = hooks
        self._made = groups.made()
        self.begins_again = False  # the program does, after each end of a world
        self._stays = True
        groups.on_own_group(self._own_group)
        self.doomed = False  # the step that is being done cannot be completed
        self._mark: Mark | None = None
        self._beside = Beside()
        self.bequeath: Callable[[], int | None] = lambda: None
        self._main = time.pthread_getcpuclockid(threading.get_ident())
        self._worked_s = 0.0
        self._late = 0
        self._will = -1  # the file, if one had to be left in this world
        self._left = -1  # the newest world that was left
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
        if self._will >= 0:  # of an earlier world, which was left after all
            os.close(self._will)
            self._will = -1
        self._late, self._worked_s = 0, time.clock_gettime(self._main)
        groups.abort()

    def _is_late(self) -> None:
        """The training's thread is stuck if it has done nothing since it was last looked at, with all that it could
        wait for gone: then it will not leave, and its state has to without it. So it does if that is in a long step."""
        self._late += 1
        before_s, self._worked_s = self._worked_s, time.clock_gettime(self._main)
        if self._late == 1:
            groups.abort(store=True)
        elif self._will < 0 and (self._worked_s - before_s < IDLE_S or self._late >= BUSY):
            here, generation = self._place, self._place.generation
            if (fd := self.bequeath()) is None:
                return
            self._will = fd
            if self._left < generation:  # else it has come to its end meanwhile
                here.report(messages.Bequeathed(here.rank, generation, fd))  # and is ended now

    # In the training's:

    def announce(self) -> None:
        """From here on this rank is worth to be kept."""
        here = self._place
        if self._stays:
            here.report(messages.Stays(here.rank, here.generation, rebuilding.is_sharded(self._modules)))

    def _own_group(self, called: str) -> None:
        """A group that the program has made for itself goes with its world. Who begins again makes another one."""
        if self.begins_again or not self._stays:
            return
        self._stays = False
        here = self._place
        here.report(messages.Stays(here.rank, here.generation, stays=False))
        if here.rank == 0:
            say(f"ranks do not outlive their worlds: {called}() is called outside of run.train(); call it in there")

    def wait_for_others_end(self) -> None:
        self._place.wait_for_others_end()

    @property
    def stands_by(self) -> bool:
        """Whether this process has no rank yet."""
        return bool(os.environ.get(STANDBY))

    def stand_by(self) -> None:
        """Until there is a place for this process."""
        warming.warm(self._modules, self._state)
        rebuilding.release(self._modules)
        groups.leave()
        device = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self._place.report(messages.StandsBy(_resident_bytes(), torch.cuda.memory_reserved() + 1 if device else 0))
        self._join(self._seat.next_place())

    @property
    def over(self) -> bool:
        """Whether the world is."""
        return self.doomed or bool(self._seat.over)

    @property
    def asked(self) -> bool:
        """Whether all ranks are to leave the world after the same step."""
        return bool(self._seat.asked)

    def leave_at_boundary(self) -> None:
        self._seat.leave_at_boundary()

    def outlives(self, failure: Exception) -> bool:
        """Whether this is the end of the world and not the program's own mistake. Waits to be told."""
        if isinstance(failure, WorldOver):
            return True
        if not isinstance(failure, (RuntimeError, OSError)):
            return False
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
        self._left = self._place.generation
        self._call("abort")
        groups.abort()
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
        self.announce()

    def _join(self, place_in_it: tuple[messages.ForkWorker, list[int]]) -> None:
        self._place.move(*place_in_it)
        together.begin_world()
        health.begin_world()
        assert self._made is not None
        groups.join(self._made)
        rebuilding.renew(self._modules)
        self._beside.begin_world()
        self.doomed = False

    # -- steps --------------------------------------------------------------------------------------------------------

    def step_done(self) -> None:
        """All is as it should be after a step; what the next one changes before its optimizer steps can be undone."""
        if self._mark is None:
            self._mark = Mark(self._modules)
        self._mark.take()
        self._beside.step()

    def undo(self) -> None:
        if self._mark is not None:
            self._mark.put_back()

    @property
    def randomness(self) -> dict[str, Any]:
        """As it was after the last step."""
        return randomness.told(self._mark.randomness) if self._mark is not None else {}

    @property
    def buffers(self) -> dict[int, torch.Tensor]:
        """As they were then, by where they are."""
        return self._mark.buffers if self._mark is not None else {}


def _resident_bytes() -> int:
    pages = int(linux.read("/proc/self/statm").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class Mark:
    """Random generators, and modules' buffers: what a forward changes."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._buffers = [buffer for module in modules for buffer in module.buffers()]
        self._kept = [buffer.detach().clone() for buffer in self._buffers]
        self.randomness = randomness.mark()

    def take(self) -> None:
        self.randomness = randomness.mark()
        if self._buffers:
            torch._foreach_copy_(self._kept, self._buffers)

    @property
    def buffers(self) -> dict[int, torch.Tensor]:
        return {buffer.data_ptr(): kept for buffer, kept in zip(self._buffers, self._kept, strict=True)}

    def put_back(self) -> None:
        randomness.go_back(self.randomness)
        with torch.no_grad():
            for buffer, kept in zip(self._buffers, self._kept, strict=True):
                buffer.copy_(kept)


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
