"""A training loop from the inside: what is kept, which data comes next, and what is due after a step."""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import nn
from torch.utils.data import IterableDataset

from holdfast.checkpoint import contents, randomness
from holdfast.checkpoint.checkpointer import Checkpointer
from holdfast.checkpoint.contents import unwrap
from holdfast.checkpoint.restore import Restored
from holdfast.checkpoint.sharded import is_sharded
from holdfast.data.sampler import ElasticSampler
from holdfast.training import handover, health, held, policy, survival, wills
from holdfast.training.accumulation import Accumulation
from holdfast.training.batches import Batches
from holdfast.training.gradients import Accumulated, Exact, Weights
from holdfast.training.handover import Decided, Offer
from holdfast.training.progress import Progress
from holdfast.training.requests import Requests
from holdfast.training.streams import Stream
from holdfast.training.survival import Survival
from holdfast.training.units import Cut, Unit
from holdfast.wire import messages
from holdfast.wire.snapshots import STANDBY, STAYED, WILL
from holdfast.worker import groups, place

if TYPE_CHECKING:
    from holdfast.training.run import Run


class Options(msgspec.Struct, frozen=True):
    """As given to `holdfast.init`, with its defaults."""

    checkpoints: str | os.PathLike[str] | None = None
    keep: int = 3
    keep_best: int = 0
    keep_every: int = 0
    metric: str = "loss"
    mode: str = "min"
    save_epochs: int = 1
    save_steps: int | None = None
    save_minutes: float | None = None
    memory_every: int | None = None
    shared: bool = True
    health_check_steps: int = 10
    health_check_s: float = 10.0
    exact: bool = False
    leaves: int = 8
    stays: bool = False


class Loop:
    """Behind `Run`. One thread's, the training's."""

    def __init__(self, run: Run, options: Options) -> None:
        self.modules: list[nn.Module] = []
        self.state: dict[str, Any] = {}
        self._run = run
        self._options = options
        self._checkpointer: Checkpointer | None = None
        self._cursors = Cursors()
        self._weights: Weights | None = None
        self._exact: Exact | None = None
        self._accumulation = Accumulation(self._ask)
        self._active: list[Batches | Stream] = []
        self._losses: list[tuple[float, Any]] = []  # of the step's units so far
        self._units = 0  # of it, so far
        self._last: Callable[[], dict[str, float]] = dict
        self._progress = Progress(run.generation, tell=_tell) if run.rank_zero else None
        self._requests = Requests() if place.current() is None else None
        self._warned = False
        self._survival: Survival | None = None
        self._touched = False  # something counts a step that is not done yet
        self._torn = False  # a state is being loaded
        if options.exact:
            # Sums over threads are cut at other places for another number of them.
            torch.set_num_threads(1)
            torch.use_deterministic_algorithms(True)  # what has no such way is refused by torch, in its own words

    @property
    def cursors(self) -> Cursors:
        return self._cursors

    # -- what is kept -------------------------------------------------------------------------------------------------

    def attach(self, state: dict[str, Any]) -> Restored | None:
        if self._checkpointer is not None:
            raise RuntimeError("attach() was called before; name all that is to be kept in one call")
        if taken := {"data", "progress", "accumulation"} & state.keys():
            raise ValueError(f"{taken.pop()!r} is a name of Holdfast's own; call it something else")
        self.modules = [value for value in state.values() if isinstance(value, nn.Module)]
        for value in state.values():
            held.hold(value, self._step_ends)
        own = {"data": self._cursors, "progress": self._cursors.progress, "accumulation": self._accumulation}
        self.state = {**state, **own}
        if self._options.stays:
            self._survival = survival.begin(self.modules, self._run.hooks)
        if self._survival is None and os.environ.get(STANDBY):
            groups.refuse_to_stand_by("wants holdfast.init(stays=True), and modules that can stay")
        if self._survival is not None and self._survival.stands_by:
            self._survival.stand_by()
            self._run.take_place()
            self._progress = Progress(self._run.generation, tell=_tell) if self._run.rank_zero else None
        restored = self._begin_world(self._inherit())
        groups.settle()
        if self._survival is not None:
            self._survival.announce()
            self._survival.wait_for_others_end()
        return restored

    def _inherit(self) -> Offer:
        """What a rank of the last world has left to this one, if it had to."""
        if self._survival is None:
            return Offer()
        self._survival.bequeath = self._bequeath
        path = os.environ.get(WILL, "")
        if not path or (will := wills.read(path, self.state)) is None:
            return Offer()
        if will.randomness:
            randomness.put_back(will.randomness)
        return will.offer

    def _bequeath(self) -> int | None:
        """A file with what this rank has, if it is whole. In another thread: the training's is stuck."""
        assert self._survival is not None
        mine = self._offer()
        if mine == Offer():
            return None
        self._survival.undo()
        return wills.write(self.state, mine, self._survival.randomness)

    def _begin_world(self, mine: Offer) -> Restored | None:
        """Go on from the newest state that is anywhere: in the memory of another rank, in a snapshot, on storage."""
        options = self._options
        checkpointer = self._checkpointer = Checkpointer(
            options.checkpoints, self.state, keep=options.keep, keep_best=options.keep_best,
            keep_every=options.keep_every, metric=options.metric, mode=options.mode, every_steps=options.save_steps,
            every_minutes=options.save_minutes, memory_every=options.memory_every, shared=options.shared,
        )  # fmt: skip
        checkpointer.stops_when(self._is_to_stop)
        if self._survival is not None:
            checkpointer.stays = self._survival.leave_at_boundary
        checkpointer.rank_state = self._cursors.own_state
        checkpointer.told = self._accumulation.told
        if (decided := handover.agree(checkpointer.together, mine)) is not None:
            return self._take_over(decided)
        self._torn = True
        restored = checkpointer.restore()
        self._torn = False
        if restored is not None:
            self._cursors.begin(restored.step, restored.epoch, checkpointer.restored_rank_state)
        elif os.environ.get(STAYED):
            # From the beginning, and nobody else has seen to it that all have the same weights.
            handover.from_rank_zero(checkpointer.together, self.state)
        return restored

    def _is_to_stop(self) -> bool:
        if self._requests is not None:
            return self._requests.stop
        return self._survival is not None and self._survival.asked

    def _take_over(self, decided: Decided) -> Restored:
        """Ranks of the last world are here, and have its state."""
        assert self._checkpointer is not None
        began_s, best = time.monotonic(), decided.best
        self._torn = self._run.rank in decided.lack
        handover.hand_over(self._checkpointer.together, decided, self.state)
        self._torn = False
        if best.term >= 0:
            self._checkpointer.go_on(best.term)
        self._cursors.step = best.step
        name = f"the memory of rank {decided.source}"
        if (here := place.current()) is not None:
            took_s = time.monotonic() - began_s
            here.report(messages.Restored(here.rank, here.generation, best.step, took_s, name))
        self._run.say(f"goes on from step {best.step} ({name})")
        return Restored(best.step, None, {}, name, None)

    def _step_ends(self) -> bool:
        """Whether this is the time to step what counts steps."""
        if self._survival is not None and self._survival.doomed:
            return False
        ends = all(batches.served for batches in self._waiting)
        self._touched = self._touched or ends
        return ends

    # -- from one world to the next -----------------------------------------------------------------------------------

    def outlives(self, failure: Exception) -> bool:
        return self._survival is not None and self._survival.outlives(failure)

    def begin_again(self) -> None:
        """As `go_on`, for a program that asks for its data anew."""
        self._active = []
        self._cursors.begin_again()
        self.go_on()

    def go_on(self) -> None:
        """The world is over. Leave it, and go on in the next one, after the last step that was done."""
        survives = self._survival
        assert survives is not None and self._checkpointer is not None
        if any(isinstance(batches, Stream) for batches in self._active):
            raise RuntimeError("the world is over, and a stream of data cannot be gone on with in another one")
        mine = self._offer()
        survives.undo()
        self._losses, self._units, self._touched = [], 0, False
        while True:
            self._checkpointer.abandon()
            survives.leave()
            try:
                survives.join()
                self._run.take_place()
                self._progress = Progress(self._run.generation, tell=_tell) if self._run.rank_zero else None
                self._begin_world(mine)
                break
            except Exception as failure:  # of this world, too
                if not survives.outlives(failure):
                    raise
                failure.__traceback__ = None
            mine = Offer() if self._torn else mine
        for batches in self._active:
            self._move(batches)

    def _offer(self) -> Offer:
        """What this rank has, if it is whole, and all of it: other ranks' shards it has not."""
        assert self._checkpointer is not None
        if self._touched or any(map(is_sharded, contents.collect(self.state).tensors.values())):
            return Offer()
        return Offer(self._run.generation, self._cursors.step, self._checkpointer.term)

    def _move(self, batches: Batches | Stream) -> None:
        """This rank's part of the data, in the world as it is now."""
        assert isinstance(batches, Batches)
        cut = batches.cut._replace(rank=self._run.rank, world_size=self._run.world_size)
        done = self._weigh(self._options.exact, cut, batches.sampler)
        batches.move(cut, done)

    # -- the data -----------------------------------------------------------------------------------------------------

    def batches(
        self,
        dataset: Any,
        batch_size: int,
        epochs: int,
        seed: int,
        shuffle: bool,
        micro_batch_size: int | None,
        elastic: tuple[bool, str],
        options: dict[str, Any],
    ) -> Iterator[Any]:
        if self._checkpointer is None:
            raise RuntimeError("call run.attach(model=..., optimizer=...) before run.batches()")
        run, exact = self._run, self._options.exact
        per_rank, rule = elastic
        if _is_stream(dataset):
            if exact or per_rank or micro_batch_size is not None:
                raise ValueError(
                    "exact=True, per_rank and micro_batch_size want a dataset with samples by index; a stream has no "
                    "order to go by"
                )
            return self._through(self._stream(dataset, batch_size, epochs, options))
        if rule not in policy.RULES:
            raise ValueError(f"lr_rule={rule!r}: one of {', '.join(policy.RULES)} is meant")
        if self._active and (exact or micro_batch_size is not None):
            raise ValueError("with exact=True or micro_batch_size a step is cut by one dataset; there is one already")
        if exact and (per_rank or micro_batch_size is not None):
            raise ValueError("exact=True cuts each global batch by itself; give batch_size alone")
        size = batch_size * run.world_size if per_rank else batch_size
        sampler = ElasticSampler(dataset, size, seed=seed, shuffle=shuffle, rank=run.rank, world_size=run.world_size)
        self._cursors.adopt(sampler)
        if per_rank:
            self._rescale(batch_size, rule)
        cut = Cut(size, run.rank, run.world_size, micro_batch_size, self._options.leaves if exact else None)
        done = self._weigh(exact, cut, sampler)
        batches = Batches(dataset, sampler, cut, epochs, self._begin_unit, exact, options, done)
        self._active.append(batches)
        return self._through(batches)

    def _stream(self, source: Any, batch_size: int, epochs: int, options: dict[str, Any]) -> Stream:
        each = max(1, batch_size // self._run.world_size)
        stream = Stream(source, each, epochs, self._run.world_size, self._cursors.stream_state(), options)
        self._cursors.streams.append(stream)
        self._run.say(stream.promise)
        self._active.append(stream)
        return stream

    def _through(self, batches: Batches | Stream) -> Iterator[Any]:
        try:
            for batch in batches:
                yield batch
                if batches.served and not self._warned:
                    self._warned = True
                    warnings.warn(
                        "run.step() was not called after a step: nothing is saved, and a restart begins where this "
                        "run did",
                        stacklevel=2,
                    )
        finally:
            self._active = [other for other in self._active if other is not batches]
            if self._progress is not None:
                self._progress.end()

    def _weigh(self, exact: bool, cut: Cut, sampler: ElasticSampler) -> int:
        """How many samples of the first step are in its gradients already."""
        if self._weights is not None:
            self._weights.close()
        sums: Exact | Accumulated | None = None
        if exact:
            sums = self._exact = Exact(self.modules, sampler.order.seed)
        elif cut.micro_batch_size is not None:
            sums = Accumulated(self.modules, self._accumulation.keeps)
        self._weights = Weights(self.modules, sums)
        if sums is None:
            return 0
        samples = min(cut.batch_size, sampler.order.size - sampler.position)
        done = self._accumulation.go_on(sums, cut, self._cursors.step, samples)
        if done:
            self._run.say(f"{done} of the {samples} samples of step {self._cursors.step + 1} are in its gradients")
        return done

    def _ask(self, what: str) -> None:
        if self._checkpointer is not None:
            self._checkpointer.ask(what)

    def _begin_unit(self, cut: Cut, unit: Unit, samples: int) -> None:
        assert self._weights is not None
        if self._exact is not None:
            self._exact.step = self._cursors.step
            self._exact.count = cut.leaf_count(samples)
        self._weights.begin(unit)

    def _rescale(self, per_rank: int, rule: str) -> None:
        """The learning rate for the world as it is now, if it was set for another."""
        before, now = self._cursors.world_size, self._run.world_size
        self._cursors.world_size = now
        if before in (0, now):
            return
        factor = policy.scale(rule, before, now)
        rates = (0.0, 0.0)
        for value in map(unwrap, self.state.values()):
            if isinstance(value, torch.optim.Optimizer):
                rates = value.param_groups[0]["lr"], value.param_groups[0]["lr"] * factor
                for group in value.param_groups:
                    for name in ("lr", "initial_lr"):
                        if name in group:
                            group[name] *= factor
            elif hasattr(value, "base_lrs"):
                value.base_lrs = [rate * factor for rate in value.base_lrs]
        self._run.say(policy.told(rule, per_rank, before, now, rates))

    # -- steps --------------------------------------------------------------------------------------------------------

    def step(self, loss: Any, metrics: dict[str, Any]) -> None:
        if self._checkpointer is None:
            raise RuntimeError("call run.attach(model=..., optimizer=...) before run.step()")
        if self._survival is None:
            self._step(self._checkpointer, loss, metrics)
            return
        if not self._survival.doomed:
            try:
                self._step(self._checkpointer, loss, metrics)
            except Exception as failure:
                if not self._survival.outlives(failure):
                    raise
                failure.__traceback__ = None
        if self._survival.over:
            self.go_on()

    def _step(self, checkpointer: Checkpointer, loss: Any, metrics: dict[str, Any]) -> None:
        waiting = self._waiting
        if loss is not None:
            weight = waiting[-1].unit.weight if waiting and waiting[-1].unit is not None else 1.0
            self._losses.append((weight, loss.detach() if isinstance(loss, torch.Tensor) else loss))
        self._units += 1
        if any(not batches.served for batches in waiting):
            self._part(waiting[-1])
            return  # of several units of a step this was not the last
        losses, self._losses = self._losses, []
        self._last = lambda: _metrics(losses, metrics)
        self._cursors.step += 1
        ended, samples, left = None, 0, 0
        for batches in waiting:
            if batches.served:
                samples += batches.samples
                if batches.commit() and batches is waiting[0]:  # of several datasets the first says what an epoch is
                    ended = batches.epoch
                left = max(left, len(batches))
        step, options = self._cursors.step, self._options
        self._touched = False
        if self._survival is not None:
            self._survival.step_done()
            if self._survival.over:
                return
        if self._progress is not None:
            first = waiting[0] if waiting else None
            epoch = f"{min(first.epoch + 1, first.epochs)}/{first.epochs}" if first is not None else "-"
            ends_unseen = any(isinstance(batches, Stream) for batches in waiting) and left  # those are epochs
            steps_left = left if waiting and not ends_unseen else None
            self._progress.step(step, epoch, lambda: self._last().get("loss"), samples, steps_left)
        if options.health_check_steps and step % options.health_check_steps == 0 and self._run.world_size > 1:
            health.check(options.health_check_s, self._run.world_size)
        saves = ended is not None and options.save_epochs > 0 and ended % options.save_epochs == 0
        checkpointer.step(step, epoch=ended if saves else None, metrics=self._last)
        if self._run.rank_zero and self._units > 1:
            self._accumulation.step_done(self._units)
        self._units = 0

    def _part(self, batches: Batches | Stream) -> None:
        """Of a long step, a part is done."""
        unit, step, checkpointer = batches.unit, self._cursors.step, self._checkpointer
        if isinstance(unit, Unit) and checkpointer is not None and self._accumulation.keeps(unit):
            self._accumulation.keep(unit, batches.samples, lambda part: checkpointer.part(step, part))

    @property
    def _waiting(self) -> list[Batches | Stream]:
        """Whose samples are of a step that is not done yet."""
        return [batches for batches in self._active if batches.unit is not None]

    def close(self) -> None:
        if self._checkpointer is not None:
            self._checkpointer.close()
        if self._requests is not None:
            self._requests.close()


class Cursors:
    """Where the data of a training stands: a few numbers for each dataset, in the order in which they are asked for."""

    def __init__(self) -> None:
        self.step = 0
        self.world_size = 0  # that the learning rate is meant for; 0 where that does not matter
        self.progress = _Progress(self)
        self.streams: list[Stream] = []
        self._own: list[Any] = []
        self._epochs_of_streams: list[int] = []
        self._epoch = 0
        self._samplers: list[ElasticSampler] = []
        self._saved: list[Mapping[str, Any]] = []

    def begin(self, step: int, epoch: int | None, own: Any = None) -> None:
        """Where a checkpoint was saved. One that others made says nothing of data, but perhaps how many epochs are
        done. `own`: what this rank had for itself."""
        self.step = step
        self._epoch = epoch or 0
        self._own = own if isinstance(own, list) else []

    def begin_again(self) -> None:
        """Whoever asks next for a sampler is the first to do so, and goes on from where that was."""
        self._own = self.own_state()
        state, self._samplers, self.streams = self.state_dict(), [], []
        self.load_state_dict(state)

    def own_state(self) -> list[Any]:
        return [stream.state_dict() for stream in self.streams] + self._own[len(self.streams) :]

    def stream_state(self) -> Any:
        """Of the next stream, if there was one. With another number of ranks only its epoch is known."""
        at = len(self.streams)
        if at < len(self._own):
            return self._own[at]
        if at < len(self._epochs_of_streams):
            return Stream.begins(self._epochs_of_streams[at])
        return Stream.begins(self._epoch) if self._epoch and not self._saved else None

    @property
    def epochs(self) -> int:
        if self._samplers:
            return self._samplers[0].epoch
        if self.streams or self._epochs_of_streams:
            return self.streams[0].epoch if self.streams else self._epochs_of_streams[0]
        return int(self._saved[0]["epoch"]) if self._saved else self._epoch

    def adopt(self, sampler: ElasticSampler) -> None:
        """The next one. It goes on from what was saved of it."""
        if len(self._samplers) < len(self._saved):
            sampler.load_state_dict(self._saved[len(self._samplers)])
        elif self._epoch and not self._saved:
            sampler.load_state_dict({**sampler.state_dict(), "epoch": self._epoch})
        self._samplers.append(sampler)

    def state_dict(self) -> dict[str, Any]:
        states: list[Mapping[str, Any]] = [sampler.state_dict() for sampler in self._samplers]
        streams = [stream.epoch for stream in self.streams]
        return {
            "samplers": states + list(self._saved[len(states) :]),
            "streams": streams + self._epochs_of_streams[len(streams) :],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._saved, self._epochs_of_streams = list(state["samplers"]), list(state.get("streams", ()))
        for sampler, saved in zip(self._samplers, self._saved, strict=False):
            sampler.load_state_dict(saved)


class _Progress:
    def __init__(self, cursors: Cursors) -> None:
        self._cursors = cursors

    def state_dict(self) -> dict[str, int]:
        return {"step": self._cursors.step, "world_size": self._cursors.world_size}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._cursors.step, self._cursors.world_size = state["step"], state["world_size"]


def _is_stream(data: Any) -> bool:
    """An iterable dataset may know its length, and has torch's `__getitem__`, which is of no use."""
    has_samples = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    return isinstance(data, IterableDataset) or not has_samples


def _tell(step: int, epoch: str, loss: float | None, samples_per_s: float, left: int | None) -> None:
    """For the record."""
    if (here := place.current()) is not None:
        told = None if loss is None or not math.isfinite(loss) else loss
        here.report(messages.Trained(here.rank, here.generation, step, epoch, told, samples_per_s, left))


def _metrics(losses: list[tuple[float, Any]], others: dict[str, Any]) -> dict[str, float]:
    """Numbers, which on a GPU means to wait for the step."""
    found = {name: float(value) for name, value in others.items()}
    if losses:
        whole = sum(weight for weight, _ in losses)
        means = [(weight / whole if whole else 1 / len(losses), float(loss)) for weight, loss in losses]
        found["loss"] = sum(weight * loss for weight, loss in means)
    return found
