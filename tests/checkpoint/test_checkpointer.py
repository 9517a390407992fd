"""A process alone saves and goes on: everything comes back, nothing waits for a slow disk, and damage is found."""

from __future__ import annotations

import errno
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import syscalls
import torch
from desks import last_writer, wait_for_end
from torch import nn
from trainings import Training, draws, frozen, seed_all

import holdfast
from fault_tolerance.pages import a_rank
from holdfast.checkpoint import sources
from holdfast.checkpoint.folder import Folder
from holdfast.checkpoint.format import Policy
from holdfast.checkpoint.restore import Restoring
from holdfast.checkpoint.together import Together
from holdfast.worker.beacon import GAPS, Phase
from states import same

SCRIPT = Path(__file__).parent / "scripts" / "trains_alone.py"
WAIT_S = 60.0

Make = Callable[..., holdfast.Checkpointer]


@pytest.fixture
def folder() -> Iterator[Path]:
    """One on which fsync is free: what a disk does is tested elsewhere."""
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="holdfast-test-", dir=base) as path:
        yield Path(path) / "checkpoints"


@pytest.fixture
def make(folder: Path) -> Iterator[Make]:
    """A checkpointer of that folder. One after the other is like one process after the other: none has another's
    memory."""
    made: list[holdfast.Checkpointer] = []
    writers: list[int] = []

    def make(state: Any = None, directory: Any = folder, **options: Any) -> holdfast.Checkpointer:
        options = {"memory_every": 0, **options}
        made.append(holdfast.Checkpointer(directory, state, **options))
        writers.append(last_writer())
        return made[-1]

    yield make
    for checkpointer in made:
        checkpointer.close()
    for writer in writers:
        wait_for_end(writer)


def there(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def flip(path: Path, at: int) -> None:
    """One bit. Files are read-only where that is kept: a new one takes its name."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.unlink()
    path.write_bytes(content)


def weights(folder: Path, value: float, steps: list[int], make: Make) -> None:
    """Checkpoints of one tensor, whose value a step determines."""
    state = {"x": torch.zeros(1000)}
    saving = make(state, keep=0)
    for step in steps:
        state["x"].fill_(value + step)
        saving.save(step, blocking=True)
    saving.close()


# -- what comes back ---------------------------------------------------------------------------------------------------


class Sampler:
    """Anything with these two methods."""

    def __init__(self) -> None:
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "order": torch.arange(self.position)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert torch.equal(state["order"], torch.arange(state["position"]))
        self.position = state["position"]


def test_training_goes_on_as_if_nothing_had_happened(make: Make) -> None:
    plain: dict[Any, Any] = {"nested": [1, (2.5, None, float("inf")), {"deep": b"\0\xff"}], 7: "seven", "big": 1 << 80}
    training = Training(1)
    sampler = Sampler()
    training.state |= {"sampler": sampler, "plain": plain, "tensor": torch.arange(6.0).reshape(2, 3).t()}
    training.state["array"] = numpy.arange(4, dtype=numpy.int16)
    for step in range(1, 6):
        training.step(step)
    sampler.position = 40
    draws()  # leaves half a pair of gausses in each generator
    first = make(training.state)
    assert first.restore() is None
    assert first.save(5)
    assert first.save(6, epoch=1, metrics={"loss": 0.25})
    assert first.wait() == 6
    expected = [frozen(training.state[name]) for name in ("model", "optimizer", "scheduler", "scaler")]
    after = [draws(), [training.step(step) for step in range(6, 9)], draws()]
    in_the_end = frozen(training.model)

    second = make()
    for step, which, name in ((6, "epoch:1", "checkpoint_epoch_1.pt"), (5, "step:5", "step_00000005")):
        again = Training(2)
        sampler = Sampler()
        again.state |= {"sampler": sampler, "plain": None, "tensor": torch.zeros(3, 2), "array": 0}
        second.state = again.state
        restored = second.restore(which)
        assert restored is not None
        assert (restored.step, restored.name, restored.world_size) == (step, name, 1)
        assert same([frozen(again.state[name]) for name in ("model", "optimizer", "scheduler", "scaler")], expected)
        assert again.optimizer.param_groups[0]["lr"] == training.scheduler.base_lrs[0] * 0.25
        assert sampler.position == 40
        assert again.state["plain"] == plain and again.state["plain"] is not plain
        assert torch.equal(again.state["tensor"], training.state["tensor"])
        assert again.state["array"].dtype == numpy.int16 and again.state["array"].tolist() == [0, 1, 2, 3]
        assert [draws(), [again.step(step) for step in range(6, 9)], draws()] == after
        assert same(frozen(again.model), in_the_end)


def test_what_is_saved_is_of_the_moment_of_the_save(make: Make) -> None:
    """The copy runs beside forward and backward. What these change is not in it, nor is what the next step changes."""
    seed_all(3)
    model = nn.Sequential(nn.Linear(1500, 1500), nn.BatchNorm1d(1500))
    twice = nn.Sequential(model[1], model[1])  # the same buffers under two names
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    own = torch.zeros(300_000)
    values = {"list": [0]}
    state = {"model": model, "twice": twice, "optimizer": optimizer, "own": own, "values": values}
    saving = make(state, keep=0)
    expected = {}
    for step in (1, 2, 3):
        model(torch.randn(4, 1500)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        expected[step] = {name: frozen(value) for name, value in state.items()}
        assert saving.save(step)
        own.add_(1)
        values["list"].append(step)
        model(torch.randn(4, 1500)).square().mean().backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.5
        assert saving.wait() == step
    restoring = make(state)
    for step, saved in sorted(expected.items(), reverse=True):
        assert restoring.restore(step) is not None
        assert same({name: frozen(value) for name, value in state.items()}, saved)


def test_gradients_that_were_not_stepped_with_come_back(make: Make) -> None:
    def prepare(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, holdfast.GradientAccumulation]:
        torch.manual_seed(seed)
        model = nn.Linear(3, 2)
        return model, torch.optim.SGD(model.parameters(), lr=0.1), holdfast.GradientAccumulation(model)

    def micro_batch(model: nn.Module, number: int) -> None:
        model(torch.full((4, 3), float(number))).square().mean().backward()

    model, optimizer, accumulation = prepare(1)
    for number in (1, 2, 3):
        micro_batch(model, number)
        accumulation.position = number
    saving = make({"model": model, "accumulation": accumulation})
    saving.save(10, blocking=True)
    micro_batch(model, 4)
    optimizer.step()

    again, optimizer, accumulation = prepare(2)
    assert make({"model": again, "accumulation": accumulation}).restore() is not None
    assert accumulation.position == 3
    micro_batch(again, 4)
    optimizer.step()
    assert same(frozen(again), frozen(model))


def test_learned_gaps_come_back_and_a_rank_that_steps_is_asked_to_end(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"x": 1}
    with a_rank(monkeypatch) as rank:
        rank.place.beacon.times[GAPS + Phase.TRAINING] = 12.5
        rank.place.beacon.times[GAPS + Phase.SAVING] = 3.0
        saving = make(state, memory_every=1)
        saving.save(1, blocking=True)
        assert rank.page.drains is None  # it would never look
        saving.step(2)
        assert rank.page.drains
        rank.page.drain()
        with pytest.raises(SystemExit) as exit_:
            saving.step(3)
        assert exit_.value.code == 0
        saving.close()
        assert rank.page.drains is False
    with a_rank(monkeypatch) as rank:
        rank.place.beacon.times[GAPS + Phase.SAVING] = 60.0
        restored = make(state).restore()
        assert restored is not None and restored.step == 3
        times = rank.place.beacon.times
        assert [times[GAPS + phase] for phase in (Phase.TRAINING, Phase.SAVING)] == [12.5, 60.0]


# -- epochs, steps, and which is meant ---------------------------------------------------------------------------------


def test_epochs_are_files_that_torch_opens_and_the_last_three_stay(
    make: Make, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHECKPOINT_DIR", str(folder))
    training = Training(1)
    losses = {1: 0.4, 2: 0.9, 3: 0.2, 4: float("nan"), 5: 0.3}
    saving = make(training.state, None, mode="min")
    weights = {}
    for epoch, loss in losses.items():
        training.step(epoch)
        weights[epoch] = frozen(training.model)
        assert saving.save(10 * epoch, epoch=epoch, metrics={"loss": loss, "lr": 1.0}, blocking=True)
    files = ["checkpoint_epoch_3.pt", "checkpoint_epoch_4.pt", "checkpoint_epoch_5.pt"]
    assert there(folder) == files
    with pytest.raises(holdfast.CheckpointError, match=r"checkpoint_epoch_5\.pt is there already"):
        saving.save(60, epoch=5, blocking=True)

    opened = torch.load(folder / files[2])
    assert {"epoch", "model_state_dict", "optimizer_state_dict", "loss"} <= opened.keys()
    assert (opened["epoch"], opened["loss"]) == (5, 0.3)
    plain = Training(7)
    plain.model.load_state_dict(opened["model_state_dict"])
    plain.optimizer.load_state_dict(opened["optimizer_state_dict"])
    assert same(frozen(plain.model), weights[5])
    assert same(frozen(plain.optimizer), frozen(training.optimizer))

    def epoch_restored(which: Any = None) -> int | None:
        again = Training(2)
        restoring = make(again.state, None)
        restored = restoring.restore(which)
        restoring.close()
        assert restored is not None and restored.step == 10 * (restored.epoch or 0)
        assert same(frozen(again.model), weights[restored.epoch or 0])
        return restored.epoch

    assert epoch_restored() == 5
    (folder / files[2]).unlink()
    assert epoch_restored() == 4
    assert epoch_restored("latest") == 4
    assert epoch_restored(folder / files[1]) == 4
    monkeypatch.chdir(folder.parent)
    assert epoch_restored(f"{folder.name}/{files[1]}") == 4
    monkeypatch.setenv("HOLDFAST_RESUME", "best")
    assert epoch_restored() == 3
    monkeypatch.delenv("HOLDFAST_RESUME")
    assert epoch_restored() == 3  # training went on from there, so 4 is of another history
    assert epoch_restored("epoch:4") == 4
    elsewhere = make(training.state, folder.parent / "elsewhere")
    restored = elsewhere.restore(folder / files[0])
    assert restored is not None and restored.epoch == 3
    with pytest.raises(holdfast.CheckpointError, match=r"epoch:9 is not in .*there are epochs 3, 4"):
        make(training.state).restore("epoch:9")


def test_steps_are_saved_when_they_are_due(make: Make, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    state = {"x": torch.zeros(10)}
    by_steps = make(state, every_steps=3, keep=0)
    for step in range(1, 8):
        by_steps.step(step, metrics={"loss": float(step)})
        by_steps.wait()
    assert there(folder) == ["step_00000003", "step_00000006"]
    by_steps.close()
    by_minutes = make(state, every_minutes=1e-9, memory_every=0)
    restored = by_minutes.restore()
    assert restored is not None and (restored.step, restored.metrics) == (6, {"loss": 6.0})
    assert capfd.readouterr().err == "holdfast: goes on from step 6 (step_00000006)\n"
    for step in (7, 8):
        by_minutes.step(step)
        assert by_minutes.wait() == step
    by_minutes.close()
    rarely = make(state, every_minutes=1000.0)
    rarely.restore()
    rarely.step(9)
    assert rarely.wait() is None
    rarely.close()
    # How often a snapshot in memory may be taken is measured, and told.
    measuring = make(state, memory_every=None)
    assert measuring.memory_every is None
    step = 10
    while measuring.memory_every is None:
        measuring.step(step)
        step += 1
    assert measuring.memory_every >= 1
    assert "a snapshot in memory every" in capfd.readouterr().err


def test_a_process_goes_back_to_its_own_memory(make: Make, folder: Path) -> None:
    """As one does that finds its loss to be no number any more."""
    state = {"x": torch.zeros(1000)}
    saving = make(state, memory_every=2)
    for step in range(1, 6):
        state["x"].fill_(step)
        saving.step(step)
    restored = saving.restore()
    assert restored is not None and (restored.step, restored.name) == (4, "memory")
    assert state["x"].eq(4).all()
    assert there(folder) == []


def plain_file(model: nn.Module, optimizer: torch.optim.Optimizer, epoch: int) -> dict[str, Any]:
    """What tutorials save."""
    return {
        "epoch": epoch,
        "model_state_dict": model.state_dict(),
        "optimizer_state_dict": optimizer.state_dict(),
        "loss": 0.5,
    }


def test_other_peoples_files_are_read(make: Make, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder.mkdir()
    training, wrapped = Training(1), Training(2)
    for one in (training, wrapped):
        one.step(1)
    torch.save(plain_file(training.model, training.optimizer, 3), folder / "checkpoint_epoch_3.pt")
    torch.save(plain_file(nn.DataParallel(wrapped.model), wrapped.optimizer, 4), folder / "checkpoint_epoch_4.pt")
    osmo = folder.parent / "snapshot.pt"
    torch.save({"MODEL_STATE": nn.DataParallel(training.model).state_dict(), "EPOCHS_RUN": 6}, osmo)

    again = Training(3)
    restoring = make(again.state)
    restored = restoring.restore()
    assert restored is not None
    assert (restored.epoch, restored.step, restored.metrics) == (4, 0, {"loss": 0.5})
    assert same([frozen(again.model), frozen(again.optimizer)], [frozen(wrapped.model), frozen(wrapped.optimizer)])
    assert "it has no 'scheduler', which stays as it is" in caplog.text
    assert make(again.state).restore("epoch:3") is not None
    assert same(frozen(again.model), frozen(training.model))
    assert make(again.state).restore() is not None  # of two that are nobody's the newer
    assert same(frozen(again.model), frozen(wrapped.model))
    for which in (osmo, f"{folder}/../snapshot.pt"):
        restored = make({"model": nn.DataParallel(again.model)}).restore(which)
        assert restored is not None and restored.epoch == 6
        assert same(frozen(again.model), frozen(training.model))
    with pytest.raises(holdfast.CheckpointError, match=r"cannot restore .*/none\.pt: .*is missing"):
        make(again.state).restore(folder / "none.pt")
    osmo.write_bytes(osmo.read_bytes()[:-100])
    with pytest.raises(holdfast.CheckpointError, match=r"cannot restore .*/snapshot\.pt: snapshot\.pt"):
        make(again.state).restore(osmo)
    assert sorted(path.name for path in folder.parent.iterdir()) == ["checkpoints", "snapshot.pt"]
    assert there(folder) == ["checkpoint_epoch_3.pt", "checkpoint_epoch_4.pt"]


# -- what is refused ---------------------------------------------------------------------------------------------------


class Deaf(Sampler):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise ValueError("I am\ndeaf")


def test_another_model_is_refused_and_nothing_is_set_aside(make: Make, folder: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer, "x": torch.zeros(3), "sampler": Sampler()}
    make(state).save(1, blocking=True)
    wide = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2))
    of_wide = torch.optim.Adam([{"params": wide[0].parameters()}, {"params": wide[1].parameters()}])
    for other, wrong in [
        ({"model": wide}, r"model/0\.weight was saved with shape \(3, 4\), and is now of shape \(5, 4\)"),
        ({"model": nn.Linear(4, 3)}, r"saved of another model: it has no model/bias, model/weight"),
        ({"model": nn.Sequential(nn.Linear(4, 3))}, r"another model: the model has no model/1\.bias, model/1\.weight"),
        ({"x": torch.zeros(4)}, r"x was saved with shape \(3,\), and is now of shape \(4,\)"),
        ({"optimizer": of_wide}, r"optimizer: its load_state_dict refused: ValueError: .*parameter group"),
        ({"sampler": Deaf()}, r"sampler: its load_state_dict refused: ValueError: I am deaf"),
    ]:
        with pytest.raises(holdfast.CheckpointError, match=r"cannot restore step_00000001: .*" + wrong):
            make(other).restore()
    assert there(folder) == ["step_00000001"]


@pytest.mark.parametrize(
    ("options", "error", "wrong"),
    [
        ({"keep": -1}, ValueError, r"keep=-1: a number from 0 on"),
        ({"keep": "3"}, TypeError, r"keep='3': a whole number"),
        ({"keep_best": 1.5}, TypeError, r"keep_best=1.5: a whole number"),
        ({"mode": "least"}, ValueError, r"mode='least': min or max"),
        ({"every_steps": 0}, ValueError, r"every_steps=0: at least 1"),
        ({"every_minutes": 0}, ValueError, r"every_minutes=0: a number of minutes above 0"),
        ({"every_minutes": float("nan")}, ValueError, r"every_minutes=nan"),
        ({"memory_every": -1}, ValueError, r"memory_every=-1"),
        ({"state": {1: 2}}, holdfast.CheckpointError, r"state: 1 is no name"),
        ({"state": {"": 2}}, holdfast.CheckpointError, r"state: '' is no name"),
        ({"state": {"model": nn.Linear}}, holdfast.CheckpointError, r"state\['model'\] is a class"),
    ],
)
def test_bad_arguments_are_refused_before_anything_starts(
    folder: Path, options: dict[str, Any], error: type[Exception], wrong: str
) -> None:
    before = last_writer() if folder.exists() else None
    with pytest.raises(error, match=wrong):
        holdfast.Checkpointer(folder, **options)
    assert not folder.exists() and before is None


def test_bad_saves_are_refused_and_the_next_one_works(make: Make, folder: Path) -> None:
    state: dict[str, Any] = {"x": 1}
    saving = make(state)
    for step, options, error, wrong in [
        (-1, {}, ValueError, r"step=-1: a number from 0 on"),
        (1.0, {}, TypeError, r"step=1.0: a whole number"),
        (True, {}, TypeError, r"step=True: a whole number"),
        (1, {"epoch": -2}, ValueError, r"epoch=-2: a number from 0 on"),
        (1, {"metrics": {"loss": "low"}}, ValueError, r"low"),
    ]:
        with pytest.raises(error, match=wrong):
            saving.save(step, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="step=-1"):
        saving.step(-1)
    for value in (lambda: 0, object(), {"deep": [Sampler]}):
        state["bad"] = value
        with pytest.raises(holdfast.CheckpointError, match=r"^bad.*cannot be saved"):
            saving.save(1)
    with pytest.raises(holdfast.CheckpointError, match=r"bad/deep/0: a "):
        saving.save(1)
    state["bad"] = torch.zeros(3).to_sparse()
    with pytest.raises(holdfast.CheckpointError, match=r"bad: .*layout.*cannot be saved"):
        saving.save(1)
    del state["bad"]
    second: Any = numpy.int64(2)
    loss: Any = torch.tensor(0.5)
    assert saving.save(second, metrics={"loss": loss}, blocking=True)
    restored = make(state).restore()
    assert restored is not None and (restored.step, restored.metrics) == (2, {"loss": 0.5})
    saving.close()
    saving.close()
    with pytest.raises(holdfast.CheckpointError, match="closed"):
        saving.save(3)
    assert there(folder) == ["step_00000002"]


def test_one_of_several_ranks_cannot_save_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(holdfast.CheckpointError, match=r"call init_process_group\(\) before Checkpointer\(\)"):
        holdfast.Checkpointer(folder, {})


# -- damage ------------------------------------------------------------------------------------------------------------


def test_a_flipped_bit_is_found_and_the_one_before_is_restored(
    make: Make, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights(folder, 0.0, [1, 2, 3], make)
    flip(folder / "step_00000003" / "t000001.00000.bin", 777)
    state = {"x": torch.full((1000,), -1.0)}
    restored = make(state).restore()
    assert restored is not None and restored.step == 2
    assert state["x"].eq(2).all()
    assert there(folder) == ["damaged_step_00000003", "step_00000001", "step_00000002"]
    assert "step_00000003 is damaged" in caplog.text and "set aside as damaged_step_00000003" in caplog.text

    manifest = folder / "step_00000002" / "t000001.manifest.json"
    flip(manifest, 20)
    with pytest.raises(holdfast.CheckpointError, match=r"cannot restore step:2|step:2 is not in"):
        make(state).restore("step:2")
    restored = make(state).restore()
    assert restored is not None and restored.step == 1


@pytest.mark.parametrize("file", ["t000001.00000.bin", "t000001.00000.json", "t000001.manifest.json"])
def test_where_all_is_damaged_nobody_begins_anew_without_a_word(make: Make, folder: Path, file: str) -> None:
    weights(folder, 0.0, [1], make)
    flip(folder / "step_00000001" / file, 10)
    state = {"x": torch.full((1000,), -1.0)}
    with pytest.raises(
        holdfast.CheckpointError, match=r"no valid checkpoint is left in .*step_00000001.*; start again"
    ):
        make(state).restore()
    assert there(folder) == ["damaged_step_00000001"]
    assert make(state).restore() is None


def test_the_one_that_was_asked_for_is_not_replaced_by_another(make: Make, folder: Path) -> None:
    weights(folder, 0.0, [1, 2], make)
    flip(folder / "step_00000001" / "t000001.00000.bin", 10)
    state = {"x": torch.full((1000,), -1.0)}
    elsewhere = make(state, folder.parent / "elsewhere")
    wrong = r"cannot restore .*step_00000001: step_00000001: .* are not what was written"
    with pytest.raises(holdfast.CheckpointError, match=wrong):
        elsewhere.restore(folder / "step_00000001")
    assert there(folder) == ["step_00000001", "step_00000002"]  # it is for those who train there to set it aside
    with pytest.raises(holdfast.CheckpointError, match=r"cannot restore step:1: step_00000001: .*not what was written"):
        make(state).restore("step:1")
    assert there(folder) == ["damaged_step_00000001", "step_00000002"]


def test_a_read_that_fails_is_no_damage(make: Make, folder: Path) -> None:
    """A disk that answers with an error may be well again tomorrow; to go back further would lose what is on it."""
    if not syscalls.is_possible():
        pytest.skip("no system call can be made to fail here")
    weights(folder, 0.0, [1, 2], make)
    state = {"x": torch.full((1000,), -1.0)}
    restoring = Restoring(Folder(str(folder)), Policy(), Together(0, 1), shared=True, sets_aside=True, alone=True)
    found = syscalls.with_failing({"preadv2": errno.EIO}, lambda: restoring.run(state, None, [], lambda *_: None))
    assert "Input/output error" in found
    assert there(folder) == ["step_00000001", "step_00000002"]
    restored = make(state).restore()
    assert restored is not None and restored.step == 2


# -- slow disks, and processes that are killed -------------------------------------------------------------------------


def test_a_slow_disk_is_never_waited_for(make: Make, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = {"x": torch.zeros(100_000)}
    saving = make(state, keep=0)
    saving.save(1, blocking=True)
    writer = last_writer()
    os.kill(writer, signal.SIGSTOP)
    try:
        for step, taken in ((2, True), (3, True), (4, False), (5, False)):
            state["x"].fill_(step)
            assert saving.save(step) is taken
        saving.step(6)
    finally:
        os.kill(writer, signal.SIGCONT)
    said = [record.message for record in caplog.records]
    skipped = "holdfast: step_{:08d} is skipped: the one before is still being written"
    assert said == [skipped.format(4), skipped.format(5)]
    assert saving.wait() == 3
    state["x"].fill_(7)
    assert saving.save(7) and saving.wait() == 7
    assert there(folder) == [f"step_{step:08d}" for step in (1, 2, 3, 7)]
    restoring = make(state)
    for step in (7, 3, 2):
        assert restoring.restore(step) is not None
        assert state["x"].eq(step).all()


def test_a_killed_writer_costs_what_it_was_writing(make: Make, folder: Path) -> None:
    saving = make({"x": 1}, keep=0)
    os.kill(last_writer(), signal.SIGKILL)
    wait_for_end(last_writer())
    saving.save(1)
    assert saving.wait() == 1
    os.kill(last_writer(), signal.SIGSTOP)
    saving.save(2)
    assert saving._parcels[-1].handed_over.wait(WAIT_S)  # else another one would get it
    os.kill(last_writer(), signal.SIGKILL)
    with pytest.raises(holdfast.CheckpointError, match=r"step 2 was not saved: the process that writes it was killed"):
        saving.wait()
    saving.save(3)
    assert saving.wait() == 3
    assert there(folder) == ["step_00000001", "step_00000003"]


def test_a_failed_save_is_told_once_and_the_next_one_works(
    make: Make, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saving = make({"x": 1})
    saving.save(1, blocking=True)
    hidden = folder.rename(folder.parent / "hidden")
    folder.write_text("in the way")
    caplog.set_level(logging.WARNING)
    with pytest.raises(holdfast.CheckpointError, match=r"step 2 was not saved: "):
        saving.save(2, blocking=True)
    assert [record.message.partition(":")[2][:23] for record in caplog.records] == [" step 2 was not saved: "]
    assert saving.wait() is None
    folder.unlink()
    hidden.rename(folder)
    assert saving.save(3, blocking=True)
    assert there(folder) == ["step_00000001", "step_00000003"]


@pytest.mark.long
def test_a_process_with_workers_is_killed_and_its_last_snapshot_is_saved(make: Make, folder: Path) -> None:
    """Its data loader forks while copies and saves are on their way, and has workers open when it is killed."""
    environment = {**os.environ, "CHECKPOINT_DIR": str(folder), "OMP_NUM_THREADS": "1"}
    first = subprocess.run(
        [sys.executable, str(SCRIPT), "30", "kill"], env=environment, capture_output=True, text=True, timeout=WAIT_S
    )
    assert first.returncode == -signal.SIGKILL, first.stderr
    pid, killed_after, expected = first.stdout.split()
    wait_for_end(int(pid))
    assert f"its last snapshot, of step {killed_after}, was saved as step_{int(killed_after):08d}" in first.stderr
    state: dict[str, Any] = {"x": torch.zeros(50_000), "sum": 0.0}
    restored = make(state).restore()
    assert restored is not None and restored.step == int(killed_after)
    assert state["sum"] == float(expected)
    again = subprocess.run(
        [sys.executable, str(SCRIPT), "40"], env=environment, capture_output=True, text=True, timeout=WAIT_S
    )
    assert (again.returncode, again.stdout.split()[1]) == (0, "40"), again.stderr
    assert f"goes on from step {killed_after}" in again.stderr
    assert there(folder)[-1] == "step_00000040"  # it left without a word, and what it had saved was waited for


def test_a_wrappers_name_is_left_out() -> None:
    """A state under a wrapper's names is the same state; one that only begins like one is not."""
    assert sources._without_wrapper({"module._orig_mod.a": 1}) == {"a": 1}
    assert sources._without_wrapper({"module.a": 1, "b": 2}) == {"module.a": 1, "b": 2}
    assert sources._without_wrapper({}) == {}
