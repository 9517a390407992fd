"""A training loop from the inside: what is kept, which data comes next, and what is due after a step."""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import IterableDataset

from holdfast.checkpoint.checkpointer import Checkpointer
from holdfast.checkpoint.contents import unwrap
from holdfast.checkpoint.restore import Restored
from holdfast.data.sampler import ElasticSampler
from holdfast.training import health, held, policy
from holdfast.training.accumulation import Accumulation
from holdfast.training.batches import Batches
from holdfast.training.cursors import Cursors
from holdfast.training.gradients import Accumulated, Exact, Weights
from holdfast.training.marks import OWN
from holdfast.training.options import Options
from holdfast.training.progress import Progress
from holdfast.training.requests import Requests
from holdfast.training.streams import Stream
from holdfast.training.survival import Survival, WorldOver
from holdfast.training.units import Cut, Unit
from holdfast.training.worlds import Worlds
from holdfast.wire import messages
from holdfast.worker import place
from holdfast.worker.saying import is_quiet

if TYPE_CHECKING:
    from holdfast.training.run import Run


class Loop:
    """Behind `Run`. One thread's, the training's."""

    def __init__(self, run: Run, options: Options) -> None:
        self.modules: list[nn.Module] = []
        self.state: dict[str, Any] = {}
        self._run = run
        self._options = options
        self._worlds: Worlds | None = None
        self._cursors = Cursors()
        self._weights: Weights | None = None
        self._exact: Exact | None = None
        self._accumulation = Accumulation(self._ask)
        self._active: list[Batches | Stream] = []
        self._fed = False  # some data has come from here
        self._losses: list[tuple[float, Any]] = []  # of the step's units so far
        self._units = 0  # of it, so far
        self._progress: Progress | None = None
        self._requests = Requests() if place.current() is None else None
        self._warned = False
        if options.exact:
            # Sums over threads are cut at other places for another number of them.
            torch.set_num_threads(1)
            torch.use_deterministic_algorithms(True)  # what has no such way is refused by torch, in its own words

    @property
    def cursors(self) -> Cursors:
        return self._cursors

    # -- what is kept -------------------------------------------------------------------------------------------------

    def attach(self, state: dict[str, Any]) -> Restored | None:
        if self._worlds is not None:
            raise RuntimeError("attach() was called before; name all that is to be kept in one call")
        if taken := state.keys() & OWN:
            raise ValueError(f"{taken.pop()!r} is a name of Holdfast's own; call it something else")
        self.modules = [value for value in state.values() if isinstance(value, nn.Module)]
        for value in state.values():
            held.hold(value, self._step_ends)
        own = {"data": self._cursors, "progress": self._cursors.progress, "accumulation": self._accumulation}
        self.state = {**state, **own}
        run, options = self._run, self._options
        self._worlds = Worlds(run, options, self.modules, self.state, self._cursors, self._accumulation, self._requests)
        restored = self._worlds.begin()
        self._begin_progress()
        return restored

    def _begin_progress(self) -> None:
        if self._run.rank_zero:
            self._progress = Progress(self._run.generation, tell=_tell, quiet=is_quiet())
        else:
            self._progress = None

    @property
    def _checkpointer(self) -> Checkpointer | None:
        return self._worlds.checkpointer if self._worlds is not None else None

    @property
    def _survival(self) -> Survival | None:
        return self._worlds.survival if self._worlds is not None else None

    def _step_ends(self) -> bool:
        """Whether this is the time to step what counts steps."""
        worlds = self._worlds
        survival = worlds.survival if worlds is not None else None
        if survival is not None and survival.doomed:
            return False
        for batches in self._active:
            if batches.unit is not None and not batches.served:
                return False
        if worlds is not None and not worlds.touched:
            if survival is not None and not survival.may_step():
                return False
            worlds.touched = True
        return True

    # -- from one world to the next -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def beginning_again(self) -> Iterator[None]:
        """In a program that does so after each end of a world: what it makes of that world it makes again."""
        survival = self._survival
        if survival is None:
            yield
            return
        survival.begins_again = True
        try:
            yield
        finally:
            survival.begins_again = False

    def _withdraw(self, why: str) -> None:
        if self._survival is not None:
            self._survival.withdraw(why)

    def outlives(self, failure: Exception) -> bool:
        return self._survival is not None and self._survival.outlives(failure)

    def begin_again(self) -> None:
        """As `go_on`, for a program that asks for its data anew."""
        self._active = []
        self._cursors.begin_again()
        self.go_on()

    def go_on(self) -> None:
        """The world is over. Leave it, and go on in the next one, after the last step that was done."""
        assert self._worlds is not None
        if any(isinstance(batches, Stream) for batches in self._active):
            raise RuntimeError("the world is over, and a stream of data cannot be gone on with in another one")
        self._losses, self._units = [], 0
        self._worlds.go_on()
        self._begin_progress()
        for batches in self._active:
            self._move(batches)

    def _move(self, batches: Batches | Stream) -> None:
        """This rank's part of the data, in the world as it is now."""
        assert isinstance(batches, Batches)
        rank, world_size = self._run.rank, self._run.world_size
        cut = batches.cut._replace(rank=rank, world_size=world_size)
        if batches.per_rank:
            cut = cut._replace(batch_size=batches.per_rank * world_size)
            self._rescale(batches.per_rank, batches.rule)
        batches.sampler.move(cut.batch_size, rank, world_size)
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
        if per_rank:
            batches.per_rank, batches.rule = batch_size, rule
        self._fed = True
        self._active.append(batches)
        return self._through(batches)

    def _stream(self, source: Any, batch_size: int, epochs: int, options: dict[str, Any]) -> Stream:
        each = max(1, batch_size // self._run.world_size)
        stream = Stream(source, each, epochs, self._run.world_size, self._cursors.stream_state(), options)
        self._cursors.streams.append(stream)
        self._run.say(stream.promise)
        self._fed = True
        self._withdraw(
            "the data is a stream, and a new rank would not know where the others are in it; give a dataset by index"
        )
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
        worlds = self._worlds
        if worlds is None or worlds.checkpointer is None:
            raise RuntimeError("call run.attach(model=..., optimizer=...) before run.step()")
        survival = worlds.survival
        if survival is None:
            self._step(worlds, worlds.checkpointer, loss, metrics)
            return
        if not survival.doomed:
            try:
                self._step(worlds, worlds.checkpointer, loss, metrics)
            except Exception as failure:
                if not survival.outlives(failure):
                    raise
                failure.__traceback__ = None
        if survival.over:
            if survival.begins_again:
                raise WorldOver("the world is over, and run.train() begins again in the next one")
            self.go_on()

    def _step(self, worlds: Worlds, checkpointer: Checkpointer, loss: Any, metrics: dict[str, Any]) -> None:
        """In a step of a millisecond each line here is to be seen: what is seldom needed is found when it is."""
        waiting = [batches for batches in self._active if batches.unit is not None]  # of a step that is not done yet
        if not self._fed:
            self._fed = True
            self._withdraw(
                "run.step() is called without run.batches(), and a new rank's data would begin anew; take it from there"
            )
        if loss is not None:
            weight = waiting[-1].unit.weight if waiting and waiting[-1].unit is not None else 1.0
            self._losses.append((weight, loss.detach() if isinstance(loss, torch.Tensor) else loss))
        self._units += 1
        samples = 0
        for batches in waiting:
            if not batches.served:
                self._part(waiting[-1])
                return  # of several units of a step this was not the last
            samples += batches.samples
        losses, self._losses = self._losses, []
        said = functools.partial(_metrics, losses, metrics)
        self._cursors.step = step = self._cursors.step + 1
        ended, at_end = None, False
        for batches in waiting:
            if batches.commit():
                at_end = True
                if batches is waiting[0]:  # of several datasets the first says what an epoch is
                    ended = batches.epoch
        at_end = at_end and not any(map(len, waiting))
        options, survival = self._options, worlds.survival
        saves = ended is not None and options.save_epochs > 0 and ended % options.save_epochs == 0
        self._accumulation.step_done()
        if survival is not None:
            self._cursors.owed = {"epoch": ended, "metrics": said()} if saves else None
            survival.step_done()
        worlds.touched = False
        if survival is not None and survival.over:
            return
        if self._progress is not None and (self._progress.step(samples) or at_end):
            self._say_progress(self._progress, waiting, said)
        if options.health_check_steps and step % options.health_check_steps == 0 and self._run.world_size > 1:
            health.check(options.health_check_s, self._run.world_size)
        checkpointer.step(step, epoch=ended if saves else None, metrics=said)
        if self._units > 1 and self._run.rank_zero:
            self._accumulation.learn(self._units)
        self._units = 0

    def _say_progress(
        self, progress: Progress, waiting: list[Batches | Stream], said: Callable[[], dict[str, float]]
    ) -> None:
        first = waiting[0] if waiting else None
        epoch = f"{min(first.epoch + 1, first.epochs)}/{first.epochs}" if first is not None else "-"
        left = max(map(len, waiting)) if waiting else None
        if left and any(isinstance(batches, Stream) for batches in waiting):
            left = None  # those are epochs
        progress.say(self._cursors.step, epoch, said().get("loss"), left)

    def _part(self, batches: Batches | Stream) -> None:
        """Of a long step, a part is done."""
        unit, step, checkpointer = batches.unit, self._cursors.step, self._checkpointer
        if isinstance(unit, Unit) and checkpointer is not None and self._accumulation.keeps(unit):
            self._accumulation.keep(unit, batches.samples, lambda part: checkpointer.part(step, part))

    def close(self) -> None:
        if self._checkpointer is not None:
            self._checkpointer.close()
        if self._requests is not None:
            self._requests.close()


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
