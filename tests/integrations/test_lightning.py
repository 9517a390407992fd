"""The callback in the real Lightning: what it says in each loop, what it learns, and what it leaves behind."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

import holdfast
from fault_tolerance.pages import Rank, a_rank
from holdfast.fault_tolerance import RankMonitorClient, RankMonitorClientError, WorkloadAction, WorkloadControlRequest
from holdfast.integrations.lightning import FaultToleranceCallback
from holdfast.wire import messages
from holdfast.worker import place

BATCHES = 20


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss: torch.Tensor = self.layer(batch).mean()
        return loss

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        self.layer(batch)

    test_step = predict_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def batches(count: int) -> DataLoader[torch.Tensor]:
    return DataLoader([torch.ones(2)] * count, batch_size=1)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def few_words() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    with a_rank(monkeypatch) as rank:
        rank.page.say_wake(0.0)
        yield rank


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place, "_current", None)
    monkeypatch.setattr(place, "_looked", True)


def trainer(folder: Path, *callbacks: Any, epochs: int = 3, **options: Any) -> Trainer:
    saves = ModelCheckpoint(dirpath=folder, save_last=True, save_top_k=1)
    return Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        callbacks=[saves, *callbacks],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def fit(trainer: Trainer, model: LightningModule | None = None, ckpt_path: str | None = None) -> None:
    trainer.fit(model or Model(), batches(BATCHES), batches(3), ckpt_path=ckpt_path)


def saved_state(folder: Path) -> dict[str, Any]:
    checkpoint = torch.load(folder / "last.ckpt", weights_only=True)
    [state] = [state for name, state in checkpoint["callbacks"].items() if "FaultTolerance" in name]
    return dict(state["current_timeouts"])


def named(reports: list[messages.Report]) -> list[str]:
    return [name for report in reports if isinstance(report, messages.Sections) for name in report.names]


def test_a_fit_is_told_in_heartbeats_and_sections_and_learned(
    rank: Rank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beats: list[int] = []
    original = RankMonitorClient.send_heartbeat
    monkeypatch.setattr(RankMonitorClient, "send_heartbeat", lambda self: beats.append(1) or original(self))  # type: ignore[func-returns-value]
    callback = FaultToleranceCallback()
    it = trainer(tmp_path, callback)
    fit(it)
    assert len(beats) == 3 * (BATCHES + 3) + 2  # and the sanity check
    reports = rank.reports()
    assert named(reports) == ["setup", "eval", "step", "checkpointing"]
    assert any(isinstance(report, messages.Learned) for report in reports)
    vitals = rank.vitals()
    assert (vitals.client_s, vitals.heartbeat_s, vitals.sections) == (0.0, 0.0, ())
    # All that was seen is short, so every limit is the floor. The start had no checkpoint to load.
    assert saved_state(tmp_path)["section"]["section"] == {"checkpointing": 30.0, "eval": 30.0, "step": 30.0}
    assert saved_state(tmp_path)["section"]["out_of_section"] == 30.0
    assert "heartbeat" not in saved_state(tmp_path)
    assert callback.client is None
    assert "save_checkpoint" not in vars(it)
    assert "remove_checkpoint" not in vars(it.strategy)


def test_what_was_learned_comes_back_with_the_checkpoint(rank: Rank, tmp_path: Path) -> None:
    fit(trainer(tmp_path, FaultToleranceCallback()))
    rank.reports()
    seen: list[Any] = []

    class Looks(FaultToleranceCallback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            assert self.client is not None
            seen.append((self.client.section_timeouts.section, rank.vitals().sections))

        @property
        def state_key(self) -> str:
            return "FaultToleranceCallback"

    fit(trainer(tmp_path, Looks(), epochs=6), ckpt_path=str(tmp_path / "last.ckpt"))
    limits, open_sections = seen[0]
    assert limits == {"checkpointing": 30.0, "eval": 30.0, "step": 30.0}
    assert open_sections == ()  # setup is open, and has no limit yet
    assert saved_state(tmp_path)["section"]["section"]["setup"] == 30.0
    assert saved_state(tmp_path)["heartbeat"] == {"initial": 30.0, "subsequent": 30.0, "were_calculated": True}


def test_nothing_is_learned_where_it_is_not_wanted(rank: Rank, tmp_path: Path) -> None:
    fit(trainer(tmp_path, FaultToleranceCallback(calculate_timeouts=False)))
    assert not any(isinstance(report, messages.Learned) for report in rank.reports())
    assert saved_state(tmp_path) == {}


def test_a_skipped_epoch_leaves_no_section_open(rank: Rank, tmp_path: Path) -> None:
    class Skips(Model):
        def on_train_batch_start(self, batch: Any, index: int) -> int | None:
            return -1 if index == 5 else None

        def on_train_epoch_start(self) -> None:
            if self.current_epoch:
                assert rank.vitals().outside_s > 0

    fit(trainer(tmp_path, FaultToleranceCallback(), num_sanity_val_steps=0), Skips())


@pytest.mark.parametrize("loop", ["validate", "test", "predict"])
def test_other_loops_are_told_too(loop: str, rank: Rank, tmp_path: Path) -> None:
    seen: list[float] = []

    class Looks(FaultToleranceCallback):
        def teardown(self, *args: Any, **kwargs: Any) -> None:
            seen.append(rank.vitals().heartbeat_s)
            super().teardown(*args, **kwargs)

    getattr(trainer(tmp_path, Looks()), loop)(Model(), batches(3), **({} if loop == "predict" else {"verbose": False}))
    assert seen[0] > 0
    assert named(rank.reports()) == ["setup", "eval"]
    assert rank.vitals().client_s == 0.0


class Breaks(Model):
    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        if index == 3:
            raise ValueError("a bad GPU")
        return super().training_step(batch, index)


def test_an_exception_may_ask_for_something(rank: Rank, tmp_path: Path) -> None:
    def policy(error: BaseException) -> WorkloadControlRequest:
        return WorkloadControlRequest(WorkloadAction.ExcludeThisNode, str(error))

    it = trainer(tmp_path, FaultToleranceCallback(exc_handling_policy=policy))
    with pytest.raises(ValueError, match="a bad GPU"):
        fit(it, Breaks())
    assert [report for report in rank.reports() if isinstance(report, messages.Control)] == [
        messages.Control(3, 7, "exclude-node", "a bad GPU")
    ]
    assert (rank.vitals().client_s, rank.vitals().sections) == (0.0, ())
    assert "save_checkpoint" not in vars(it)


@pytest.mark.usefixtures("outside")
def test_outside_it_does_nothing_and_keeps_what_it_was_given(tmp_path: Path) -> None:
    callback = FaultToleranceCallback()
    state = {"current_timeouts": {"heartbeat": {"initial": 9.0, "subsequent": 9.0, "were_calculated": True}}}
    callback.load_state_dict(state)
    fit(trainer(tmp_path, callback, epochs=1))
    assert saved_state(tmp_path) == state["current_timeouts"]


@pytest.mark.usefixtures("outside")
def test_outside_it_is_an_error_if_it_is_required(tmp_path: Path) -> None:
    with pytest.raises(RankMonitorClientError, match="no rank of holdfast run"):
        fit(trainer(tmp_path, FaultToleranceCallback(required=True)))


def fit_on_two_ranks(folder: str) -> Any:
    callback = FaultToleranceCallback(required=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit(trainer(Path(folder), callback, epochs=2, strategy="ddp", devices=2))
    return callback.state_dict()["current_timeouts"]["section"]["section"]


def test_ranks_under_holdfast_learn_the_same(tmp_path: Path) -> None:
    learned = {"checkpointing": 30.0, "eval": 30.0, "step": 30.0}
    assert holdfast.launch(fit_on_two_ranks, (str(tmp_path),), nproc=2, quiet=True) == {0: learned, 1: learned}
