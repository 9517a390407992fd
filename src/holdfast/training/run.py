"""`holdfast.init()`: the run that this process is a rank of."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from holdfast.training import health
from holdfast.worker import place
from holdfast.worker.beacon import PHASE, Phase
from holdfast.worker.saying import say

if TYPE_CHECKING:
    from holdfast.checkpoint.restore import Restored
    from holdfast.training.loop import Loop


T = TypeVar("T")
F = TypeVar("F", bound=Callable[[], Any])
MOMENTS = ("abort", "aborted", "health", "rejoin")


class Run:
    """One life of a rank. The same under `holdfast run`, under torchrun, and in a process alone."""

    def __init__(self, **options: Any) -> None:
        here = place.current()
        self._beacon = here.beacon if here is not None else None
        self.take_place()
        self._options = options
        if options.get("exact"):
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before cuBLAS is first used, or it refuses
        self._loop: Loop | None = None
        self.hooks: dict[str, list[Callable[[], Any]]] = {moment: [] for moment in MOMENTS}

    def take_place(self) -> None:
        """In the world as it is now."""
        here = place.current()
        self.rank = here.rank if here is not None else int(os.environ.get("RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.generation = (
            here.generation if here is not None else int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        )

    @property
    def rank_zero(self) -> bool:
        """For what one rank does for all: logs, files."""
        return self.rank == 0

    @property
    def steps_done(self) -> int:
        """Of the whole training, whatever was restarted in between."""
        return self._training.cursors.step

    @property
    def epochs_done(self) -> int:
        """Whole ones, of the dataset that was first given to `batches`."""
        return self._training.cursors.epochs

    # -- training -----------------------------------------------------------------------------------------------------

    def attach(self, **state: Any) -> Restored | None:
        """What to keep: modules, optimizers, anything else with `state_dict`, tensors, plain values. Restores the
        newest valid state, and returns what that is; None if training begins at its beginning."""
        return self._training.attach(state)

    @property
    def state(self) -> dict[str, Any]:
        """What was attached. Plain values are here as they were restored; set one here to have it saved."""
        return self._training.state

    def batches(
        self,
        dataset: Any,
        batch_size: int,
        *,
        epochs: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        micro_batch_size: int | None = None,
        per_rank: bool = False,
        lr_rule: str = "linear",
        **loader: Any,
    ) -> Iterator[Any]:
        """This rank's part of each global batch, from the sample where training was to the end of the last epoch.

        `batch_size` is that of all ranks together, at any number of them; with `per_rank` it is each rank's, and the
        learning rate is scaled by `lr_rule` ("linear", "sqrt" or "none") when their number changes. With
        `micro_batch_size`, a step has several batches, and the optimizer steps with the last. Whatever else is given
        goes to torch's DataLoader: `num_workers`, `collate_fn`, `pin_memory`.
        """
        return self._training.batches(
            dataset, batch_size, epochs, seed, shuffle, micro_batch_size, (per_rank, lr_rule), loader
        )

    def step(self, loss: Any = None, **metrics: Any) -> None:
        """A step is done: its samples are used, and what is due happens: a snapshot, a checkpoint, a health check, a
        line of progress; on a request to stop, a save and an orderly end."""
        self._training.step(loss, metrics)

    def train(self, function: Callable[[], T]) -> T:
        """Call it, and again after each end of a world that this rank outlives: with the same objects, in a new world,
        after the last step that was done. What is attached, is so before. Also as a decorator."""
        with self._training.beginning_again():
            while True:
                try:
                    return function()
                except Exception as failure:
                    if not self._training.outlives(failure):
                        raise
                    failure.__traceback__ = None  # which keeps the world's connections open
                self._training.begin_again()

    def on(self, moment: str) -> Callable[[F], F]:
        """`@run.on("abort")`: a function to be called when this rank goes from one world to the next. "abort": it
        leaves this one, whose collectives have failed; "aborted": its process groups are aborted, and still there;
        "health": whether it may stay; "rejoin": it has a place in the next world, and no group yet. In the thread that
        trains. All that were given for a moment are called, in order. One that raises ends the rank."""
        if moment not in MOMENTS:
            raise ValueError(f"on({moment!r}): one of {', '.join(MOMENTS)} is meant")

        def register(function: F) -> F:
            self.hooks[moment].append(function)
            return function

        return register

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """While a model is tried out: modules in eval mode, no gradients, and hang detection knows of it."""
        import torch

        beacon = self._beacon
        before = beacon.words[PHASE] if beacon is not None else Phase.TRAINING
        if beacon is not None:
            beacon.enter(Phase.EVALUATING)
        modules = [module for module in self._training.modules if module.training]
        frozen = [part for module in modules for part in module.modules() if not part.training]  # by the script
        try:
            for module in modules:
                module.eval()
            with torch.no_grad():
                yield
        finally:
            for module in modules:
                module.train()
            for part in frozen:
                part.training = False
            if beacon is not None:
                beacon.leave(Phase.EVALUATING, before)

    def health_check(self, timeout_s: float = 10.0) -> None:
        """Wait until every rank has come here too. Every rank must call it. Raises HealthCheckFailed, on all ranks that
        come, and says who is missing."""
        health.check(timeout_s, self.world_size)

    def close(self) -> None:
        """Wait for what is being saved. Happens by itself when the process ends."""
        if self._loop is not None:
            self._loop.close()

    def say(self, text: str) -> None:
        """On one rank for all."""
        if self.rank_zero:
            say(text)

    @property
    def _training(self) -> Loop:
        if self._loop is None:
            from holdfast.training.loop import Loop
            from holdfast.training.options import Options

            self._loop = Loop(self, Options(**self._options))
        return self._loop


def init(
    *,
    checkpoints: str | os.PathLike[str] | None = None,
    keep: int = 3,
    keep_best: int = 0,
    keep_every: int = 0,
    metric: str = "loss",
    mode: str = "min",
    save_epochs: int = 1,
    save_steps: int | None = None,
    save_minutes: float | None = None,
    memory_every: int | None = None,
    shared: bool = True,
    health_check_steps: int = 10,
    health_check_s: float = 10.0,
    exact: bool = False,
    leaves: int = 8,
    stays: bool = True,
) -> Run:
    """Call it once on every rank, with the same arguments.

    `checkpoints` is a directory or `s3://` and the like; without, $CHECKPOINT_DIR, or `checkpoints`. A checkpoint is
    saved every `save_epochs` epochs, and every `save_steps` steps or `save_minutes` minutes where given; 0 epochs for
    none. All ranks meet every `health_check_steps` steps, and wait `health_check_s` seconds for each other; 0 for
    never. With `exact` the final weights are the same bits at any number of ranks, after any interruptions. With
    `stays`, a rank whose world is over because of another one is a rank of the next, in the same process.
    """
    options = dict(locals())
    return Run(**options)
