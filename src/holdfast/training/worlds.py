"""The worlds that a training goes through, one after the other, and how its state gets from each into the next."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from torch import nn

from holdfast.checkpoint import randomness
from holdfast.checkpoint.checkpointer import Checkpointer
from holdfast.checkpoint.restore import Restored
from holdfast.training import handover, rebuilding, survival, wills
from holdfast.training.accumulation import Accumulation
from holdfast.training.cursors import Cursors
from holdfast.training.handover import UNFIT, Checkpoints, Decided, Offer
from holdfast.training.options import Options
from holdfast.training.requests import Requests
from holdfast.wire import messages
from holdfast.wire.snapshots import STANDBY, STAYED, WILL
from holdfast.worker import groups, kernels, place

if TYPE_CHECKING:
    from holdfast.training.run import Run


class Worlds:
    """Where ranks do not stay, one rank sees but one of them."""

    def __init__(
        self,
        run: Run,
        options: Options,
        modules: list[nn.Module],
        state: dict[str, Any],
        cursors: Cursors,
        accumulation: Accumulation,
        requests: Requests | None,
    ) -> None:
        self._run, self._options, self._modules, self._state = run, options, modules, state
        self._cursors, self._accumulation, self._requests = cursors, accumulation, requests
        self.checkpointer: Checkpointer | None = None
        self.survival = survival.begin(state, run.hooks) if options.stays else None
        self.touched = False  # something counts a step that is not done yet
        self._torn = False  # a state is being loaded
        self._carried: Offer | None = None  # what this rank brings along, while it is between two worlds

    def begin(self) -> Restored | None:
        """The first that this process is in."""
        if self.survival is None:
            if os.environ.get(STANDBY):
                groups.refuse_to_stand_by("wants holdfast.init(stays=True), and a process group")
            restored = self._enter(Offer())
            groups.settle()
            return restored
        if self.survival.stands_by:
            self.survival.stand_by()
            self._run.take_place()
        self.survival.bequeath = self._bequeath
        restored = self._enter(self._inherited())
        kernels.enough()
        groups.settle()
        self.survival.step_done()
        self._carried = None
        self.survival.announce()
        self.survival.wait_for_others_end()
        return restored

    def go_on(self) -> None:
        """This one is over. Leave it, and go on in the next one, after the last step that was done."""
        survives = self.survival
        assert survives is not None
        self._carried = self._offer()
        survives.undo()
        self.touched = False
        while True:
            assert self.checkpointer is not None
            self.checkpointer.abandon()
            survives.leave()
            try:
                survives.join()
                self._run.take_place()
                self._enter(self._offer())
                survives.step_done()
                self._carried = None
                return
            except Exception as failure:  # of this world, too
                if not survives.outlives(failure):
                    raise
                failure.__traceback__ = None

    # -- the state ----------------------------------------------------------------------------------------------------

    def _enter(self, mine: Offer) -> Restored | None:
        """Go on from the newest state that is anywhere: in the memory of another rank, in a snapshot, on storage."""
        options, self._carried = self._options, mine
        checkpointer = self.checkpointer = Checkpoints(
            mine, options.checkpoints, self._state, keep=options.keep, keep_best=options.keep_best,
            keep_every=options.keep_every, metric=options.metric, mode=options.mode, every_steps=options.save_steps,
            every_minutes=options.save_minutes, memory_every=options.memory_every, shared=options.shared,
        )  # fmt: skip
        if (requests := self._requests) is not None:
            checkpointer.stops_when(lambda: requests.stop)
        elif self.survival is not None:
            checkpointer.stops_when(self.survival.is_asked)
        if self.survival is not None:
            checkpointer.stays, checkpointer.as_it_is = self.survival.leave_at_boundary, self.survival.as_it_is
        checkpointer.rank_state = self._cursors.own_state
        checkpointer.told = self._accumulation.told
        if checkpointer.decided is not None:
            return self._take_over(checkpointer, checkpointer.decided)
        self._torn = True
        restored = checkpointer.restore()
        self._torn = False
        self._cursors.owed = None
        if restored is not None:
            self._cursors.begin(restored.step, restored.epoch, checkpointer.restored_rank_state)
        elif checkpointer.unfit:
            why = "no rank has a whole state in memory, and nothing was saved yet"
            if self.survival is not None:
                self.survival.withdraw(why)
            raise RuntimeError(f"{why}; training begins again")
        elif os.environ.get(STAYED):
            # From the beginning, and nobody else has seen to it that all have the same weights.
            handover.from_rank_zero(checkpointer.together, self._state)
        return restored

    def _take_over(self, checkpointer: Checkpoints, decided: Decided) -> Restored:
        """Ranks of the last world are here, and have its state."""
        began_s, best = time.monotonic(), decided.best
        handover.hand_over(checkpointer.together, decided, self._state, self._is_torn)
        self._carried, self._torn = best, False
        if best.term >= 0:
            checkpointer.go_on(best.term)
        self._cursors.step = best.step
        if (owed := self._cursors.owed) is not None:
            checkpointer.save_owed(best.step, owed)
        name = f"the memory of rank {decided.source}"
        if (here := place.current()) is not None:
            took_s = time.monotonic() - began_s
            here.report(messages.Restored(here.rank, here.generation, best.step, took_s, name))
        self._run.say(f"goes on from step {best.step} ({name})")
        return Restored(best.step, None, {}, name, None)

    def _is_torn(self) -> None:
        """What this rank has begins to change, and is nothing until all of the new state is there."""
        self._torn = True
        self._accumulation.lack()

    # -- what this rank has of it -------------------------------------------------------------------------------------

    def _offer(self) -> Offer:
        """If it is whole, and all of it: other ranks' shards it has not. Who cannot stay may have heard so in the very
        step in which its world has ended, from what has changed there."""
        if self._carried is not None:  # of the world that it was trained in, whichever this one is
            return UNFIT if self._torn else self._carried
        survives, mark = self.survival, self.survival.mark if self.survival is not None else None
        torn = self._torn or (survives is not None and not survives.stays) or (mark is not None and not mark.whole)
        if self.touched or torn or self.checkpointer is None or rebuilding.is_sharded(self._modules):
            self._accumulation.lack()
            return UNFIT
        self._accumulation.offer()
        done, term = self._accumulation.done, self.checkpointer.term
        return Offer(self._run.generation, self._cursors.step, done, term, self._cursors.world_size)

    def _inherited(self) -> Offer:
        """What a rank of the last world has left to this one, if it had to."""
        path = os.environ.get(WILL, "")
        if not path or (will := wills.read(path, self._state)) is None:
            return Offer()
        if will.randomness:
            randomness.put_back(will.randomness)
        return will.offer

    def _bequeath(self) -> tuple[int, int] | None:
        """A file with what this rank has, and the step that is of, if it is whole. In another thread: the training's is
        stuck, or busy, and may have gone on while this was written."""
        assert self.survival is not None
        mine = self._offer()
        if mine.step < 0:
            return None
        mark = self.survival.mark
        state, instead = ({**self._state, **mark.values}, mark.tensors) if mark is not None else (self._state, {})
        fd = wills.write(state, mine, self.survival.randomness, instead)
        if self._offer() != mine:
            os.close(fd)
            return None
        return fd, mine.step
