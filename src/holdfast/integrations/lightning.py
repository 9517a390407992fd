"""Lightning's loops told to the rank monitor: a heartbeat a batch, sections, and timeouts kept in the checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from holdfast.fault_tolerance import RankMonitorClient, WorkloadControlRequest

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
elif "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
    from pytorch_lightning import Callback  # both may be installed, and their classes are not the same
else:
    try:
        from lightning.pytorch import Callback
    except ImportError:
        try:
            from pytorch_lightning import Callback
        except ImportError:
            raise ImportError("there is no Lightning; pip install 'holdfast[lightning]'") from None

SETUP, STEP, EVAL, CHECKPOINT = "setup", "step", "eval", "checkpointing"
MIN_BATCHES = 16  # before the time of a step says anything

Policy = Callable[[BaseException], WorkloadControlRequest | None]


class FaultToleranceCallback(Callback):
    """Sections: `setup` until the first batch, `step` and `eval` a batch, `checkpointing` a save. Each may be given a
    limit by its name. With `calculate_timeouts` limits are learned as soon as enough was seen, and never below the hang
    floor. Outside of `holdfast run` it does nothing, unless it is `required`.

    `exc_handling_policy` is asked when training ends in an exception, and may ask the job for something.
    """

    def __init__(
        self,
        calculate_timeouts: bool = True,
        *,
        required: bool = False,
        exc_handling_policy: Policy | None = None,
    ) -> None:
        self.calculate_timeouts = calculate_timeouts
        self._required = required
        self._policy = exc_handling_policy
        self._client: RankMonitorClient | None = None  # made in the rank: a trainer may be pickled on its way there
        self._state: dict[str, Any] = {}
        self._restore: Callable[[], None] = _nothing
        self._forget()

    @property
    def client(self) -> RankMonitorClient | None:
        """The script's own sections and heartbeats may go here too. None while no loop runs."""
        return self._client

    def _forget(self) -> None:
        self._open: set[str] = set()
        self._batches = self._evals = self._epochs = 0
        self._fits = self._resumed = self._saved = self._save_is_new = False

    # -- life ---------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._end()
        self._forget()
        self._fits = stage == "fit"
        client = RankMonitorClient(required=self._required)
        if self._state and self.calculate_timeouts:
            client.load_state_dict(self._state)
        client.init_workload_monitoring()
        assert client.cfg is not None
        client.floor_s = client.cfg.hang_floor
        self._client = client
        self._restore = self._wrap(trainer)
        self._enter(SETUP)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        client = self._client
        self._end()
        if self._policy is not None and client is not None and (request := self._policy(exception)) is not None:
            client.send_workload_control_request(request)

    def _end(self) -> None:
        self._restore()
        self._restore = _nothing
        if self._client is not None:
            self._state = self._client.state_dict()
            self._client.shutdown_workload_monitoring()
            self._client = None

    def state_dict(self) -> dict[str, Any]:
        return self._client.state_dict() if self._client is not None else self._state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.calculate_timeouts:
            self._state = state_dict
            if self._client is not None:
                self._client.load_state_dict(state_dict)

    # -- batches ------------------------------------------------------------------------------------------------------

    def on_train_batch_start(self, *_: Any, **__: Any) -> None:
        self._leave(SETUP)
        self._enter(STEP)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any, **__: Any) -> None:
        self._batches += 1
        self._beat(STEP)
        if self._save_is_new:
            self._learn(trainer)

    def on_validation_batch_start(self, *_: Any, **__: Any) -> None:
        self._leave(SETUP)
        self._enter(EVAL)

    def on_validation_batch_end(self, *_: Any, **__: Any) -> None:
        self._evals += 1
        self._beat(EVAL)

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start
    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def _beat(self, section: str) -> None:
        self._leave(section)
        if self._client is not None:
            self._client.send_heartbeat()

    # -- learning: where all ranks are at the same point --------------------------------------------------------------

    def on_load_checkpoint(self, *_: Any, **__: Any) -> None:
        self._resumed = True

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._learn(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._leave(STEP)  # a batch that was skipped has a beginning and no end
        self._epochs += 1
        self._learn(trainer)

    def _learn(self, trainer: Trainer) -> None:
        if self._client is None or not self.calculate_timeouts or not self._fits:
            return
        self._save_is_new = False
        if self._batches < MIN_BATCHES:
            return
        sections = [STEP, *([EVAL] if self._evals else []), *([CHECKPOINT] if self._saved else [])]
        if self._resumed:
            sections.append(SETUP)  # a start without a checkpoint to load says nothing about one with it
        # Between batches comes all that is slow and rare: new epochs, the start of a validation, saves.
        whole = self._epochs > 1 and self._saved and (bool(self._evals) or not trainer.enable_validation)
        self._client.calculate_and_set_section_timeouts(sections, calc_out_of_section=whole, skip_if_not_ready=True)
        if whole and self._resumed:
            self._client.calculate_and_set_hb_timeouts(skip_if_not_ready=True)

    # -- sections -----------------------------------------------------------------------------------------------------

    def _enter(self, section: str) -> None:
        if self._client is not None:
            self._leave(section)
            self._client.start_section(section)
            self._open.add(section)

    def _leave(self, section: str) -> None:
        if section in self._open:
            self._open.discard(section)
            if self._client is not None:
                self._client.end_section(section)

    def _wrap(self, trainer: Trainer) -> Callable[[], None]:
        """Lightning has no hook for the end of a save. Returns what undoes it."""
        undo = [_replace(trainer, "save_checkpoint", self._saving)]
        undo.append(_replace(trainer.strategy, "remove_checkpoint", self._saving))

        def restore() -> None:
            for one in undo:
                one()

        return restore

    def _saving(self, save: Callable[..., Any]) -> Callable[..., Any]:
        def saved(*args: Any, **kwargs: Any) -> Any:
            if CHECKPOINT in self._open:
                return save(*args, **kwargs)
            self._enter(CHECKPOINT)
            try:
                return save(*args, **kwargs)
            finally:
                self._leave(CHECKPOINT)
                self._saved = self._save_is_new = True

        return saved


def _replace(owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[], None]:
    original, own = getattr(owner, name), name in vars(owner)
    wrapped = wrap(original)
    setattr(owner, name, wrapped)

    def undo() -> None:
        if vars(owner).get(name) is not wrapped:
            return  # wrapped again by another, who calls this one
        if own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)

    return undo


def _nothing() -> None:
    """There is nothing to undo."""
