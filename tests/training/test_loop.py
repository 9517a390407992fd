"""What a script says to a run, and what it gets: batches, steps, errors, and where it was when it starts again."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from schedules import Training, World
from torch import nn

import holdfast
from holdfast.data import DataChanged
from holdfast.training.requests import SIGNALS

ALONE = Path(__file__).parent / "scripts" / "alone.py"

Start = Callable[..., holdfast.Run]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """A run in this process. The one before ends, as it would with its process."""
    begun: list[holdfast.Run] = []

    def start(**options: Any) -> holdfast.Run:
        for run in begun:
            run.close()
        begun.append(holdfast.init(checkpoints=tmp_path / "checkpoints", **options))
        return begun[-1]

    yield start
    for run in begun:
        run.close()


class Parts:
    """What is attached."""

    def __init__(self) -> None:
        torch.manual_seed(2)
        self.model = nn.Sequential(nn.Linear(1, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)

    @property
    def named(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def learn(self, batch: torch.Tensor) -> torch.Tensor:
        loss = torch.as_tensor(self.model(batch.float().unsqueeze(1) / 100).square().mean())
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


def numbers(count: int) -> torch.Tensor:
    """A dataset whose samples are their own indices."""
    return torch.arange(count)


def attached(run: holdfast.Run) -> Parts:
    parts = Parts()
    run.attach(**parts.named)
    return parts


def train(run: holdfast.Run, parts: Parts, steps: int | None = None, **options: Any) -> list[list[int]]:
    """The batches of so many steps."""
    found: list[list[int]] = []
    for batch in run.batches(numbers(23), 5, **{"epochs": 3, **options}):
        found.append(batch.tolist())
        run.step(loss=parts.learn(batch))
        if len(found) == steps:
            break
    return found


# -- steps -------------------------------------------------------------------------------------------------------------


def test_a_script_that_never_calls_step_gets_all_batches_and_one_warning(start: Start, tmp_path: Path) -> None:
    run = start()
    attached(run)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = [batch.tolist() for batch in run.batches(numbers(23), 5, epochs=3)]
    assert [len(batch) for batch in found] == [5, 5, 5, 5, 3] * 3
    for epoch in range(3):
        assert sorted(chain(*found[5 * epoch : 5 * epoch + 5])) == list(range(23))
    [warning] = [one for one in caught if "run.step()" in str(one.message)]
    assert "nothing is saved" in str(warning.message)
    again = start()
    assert again.attach(**Parts().named) is None


def test_steps_without_batches_are_counted_and_saved(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    """As in a script with a loader of its own."""
    run = start(save_steps=2)
    attached(run)
    for _ in range(4):
        run.step(loss=0.5, accuracy=0.25)
    assert run.steps_done == 4
    assert "samples/s" not in capsys.readouterr().err  # no end is known, so none of them is the last
    again = start()
    restored = again.attach(**Parts().named)
    assert restored is not None and restored.step in (2, 4) and restored.metrics == {"loss": 0.5, "accuracy": 0.25}
    assert again.steps_done == restored.step


def test_mistakes_are_told_in_one_line(start: Start) -> None:
    run = start()
    errors: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (RuntimeError, "before run.batches()", lambda: run.batches(numbers(3), 1)),
        (RuntimeError, "before run.step()", run.step),
        (ValueError, "'data' is a name of Holdfast's own", lambda: run.attach(data=1)),
        (ValueError, "'progress' is a name of Holdfast's own", lambda: run.attach(progress=1)),
    ]
    check_errors(errors)
    attached(run)
    errors = [
        (RuntimeError, "attach() was called before", lambda: run.attach(more=1)),
        (ValueError, "lr_rule='cubic': one of none, linear, sqrt", lambda: run.batches(numbers(3), 1, lr_rule="cubic")),
        (ValueError, "nothing to train on", lambda: run.batches(numbers(0), 1)),
        (ValueError, "batch_size is that of all ranks together", lambda: run.batches(numbers(3), 0)),
    ]
    check_errors(errors)


def check_errors(errors: list[tuple[type[Exception], str, Callable[[], Any]]]) -> None:
    for kind, text, call in errors:
        with pytest.raises(kind, match=re.escape(text)) as raised:
            call()
        assert "\n" not in str(raised.value)


def test_exact_mode_cuts_batches_by_itself(start: Start) -> None:
    threads = torch.get_num_threads()
    try:
        run = start(exact=True)
        attached(run)
        for options in ({"micro_batch_size": 2}, {"per_rank": True}):
            with pytest.raises(ValueError, match="give batch_size alone"):
                run.batches(numbers(3), 1, **options)
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(False)


def test_evaluating_leaves_modules_as_they_were(start: Start) -> None:
    run = start()
    parts = attached(run)
    frozen = parts.model[1].eval()
    with run.evaluating():
        assert not any(part.training for part in parts.model.modules()) and not torch.is_grad_enabled()
    assert torch.is_grad_enabled()
    assert [part.training for part in parts.model.modules()] == [True, True, False, True] and not frozen.training
    with pytest.raises(ZeroDivisionError), run.evaluating():
        _ = 1 / 0
    assert parts.model.training and torch.is_grad_enabled()


@pytest.mark.parametrize("micro", [None, 2])
def test_schedulers_and_scalers_act_once_a_step(start: Start, micro: int | None) -> None:
    """Where a step has several batches, what a script does after each of them is done after the last."""
    run = start()
    parts = Parts()
    scheduler = torch.optim.lr_scheduler.LambdaLR(parts.optimizer, lambda step: 0.5**step)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    run.attach(**parts.named, scheduler=scheduler, scaler=scaler)
    for batch in run.batches(numbers(12), 6, micro_batch_size=micro):
        loss = parts.model(batch.float().unsqueeze(1) / 100).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(parts.optimizer)
        scaler.step(parts.optimizer)
        scaler.update()
        parts.optimizer.zero_grad()
        scheduler.step()
        run.step(loss=loss)
    assert (run.steps_done, scheduler.last_epoch, scaler.get_scale()) == (2, 2, 8.0)
    assert parts.optimizer.param_groups[0]["lr"] == 0.05 / 4
    assert not any(map(callable, scheduler.state_dict().values()))


# -- several datasets --------------------------------------------------------------------------------------------------


def both(run: holdfast.Run, parts: Parts, steps: int | None = None) -> list[tuple[list[int], list[int]]]:
    """A second dataset is used in every other step."""
    found: list[tuple[list[int], list[int]]] = []
    second = run.batches(numbers(6), 2, epochs=100, seed=8)
    for batch in run.batches(numbers(12), 3, epochs=2, seed=7):
        other = next(second) if run.steps_done % 2 else torch.empty(0)
        found.append((batch.tolist(), other.tolist()))
        run.step(loss=parts.learn(batch))
        if len(found) == steps:
            break
    return found


def test_several_datasets_advance_and_resume_together(start: Start, tmp_path: Path) -> None:
    run = start(save_epochs=0)
    whole = both(run, attached(run))
    assert len(whole) == run.steps_done == 8
    assert sorted(chain(*(first for first, _ in whole[:4]))) == list(range(12))
    assert [len(second) for _, second in whole] == [0, 2] * 4
    assert sorted(chain(*(second for _, second in whole[:6]))) == list(range(6))
    for steps in (3, 2):  # it ends in the middle, twice
        run = start(save_steps=1, save_epochs=0)
        parts = attached(run)
        before = run.steps_done
        assert both(run, parts, steps) == whole[before : before + steps]
        checkpointer = run._training._checkpointer
        assert checkpointer is not None
        checkpointer.wait()
        checkpointer.save(run.steps_done, blocking=True)
    run = start()
    assert run.attach(**Parts().named) is not None and run.steps_done == 5
    assert both(run, Parts()) == whole[5:]


def test_epochs_are_those_of_the_first_dataset(start: Start, tmp_path: Path) -> None:
    run = start()
    parts = attached(run)
    for batch, _ in zip(run.batches(numbers(12), 3), run.batches(numbers(6), 3, epochs=9), strict=False):
        run.step(loss=parts.learn(batch))
    assert (run.steps_done, run.epochs_done) == (4, 1)
    run.close()
    assert [path.name for path in (tmp_path / "checkpoints").glob("*.pt")] == ["checkpoint_epoch_1.pt"]


# -- going on ----------------------------------------------------------------------------------------------------------


def test_a_training_goes_on_from_a_file_of_an_epoch(start: Start, tmp_path: Path) -> None:
    run = start(save_epochs=0)
    whole = train(run, parts := attached(run))
    expected = [value.clone() for value in parts.model.state_dict().values()]
    run = start()
    assert train(run, attached(run), steps=7) == whole[:7]
    run = start()
    parts = Parts()
    restored = run.attach(**parts.named)
    assert restored is not None
    assert (restored.name, restored.step, restored.epoch) == ("checkpoint_epoch_1.pt", 5, 1)
    assert train(run, parts) == whole[5:]
    assert all(map(torch.equal, expected, parts.model.state_dict().values()))
    run = start()
    assert train(run, attached(run)) == []  # all is done


def test_a_training_goes_on_from_the_folder_of_a_step(start: Start) -> None:
    run = start(save_epochs=0)
    whole = train(run, attached(run))
    run = start(save_steps=7, save_epochs=0)
    assert train(run, attached(run), steps=8) == whole[:8]
    run = start()
    restored = run.attach(**Parts().named)
    assert restored is not None and (restored.name, restored.step) == ("step_00000007", 7)
    assert (run.steps_done, run.epochs_done) == (7, 1)  # known before the data is asked for
    assert train(run, Parts()) == whole[7:]
    assert run.epochs_done == 3


def test_a_training_goes_on_from_other_peoples_files(start: Start, tmp_path: Path) -> None:
    """They say how many epochs are done, and nothing else of the data."""
    run = start(save_epochs=0)
    whole = train(run, parts := attached(run))
    (tmp_path / "checkpoints").mkdir(exist_ok=True)
    state = {"epoch": 2, "model_state_dict": parts.model.state_dict()}
    torch.save(
        {**state, "optimizer_state_dict": parts.optimizer.state_dict()},
        tmp_path / "checkpoints" / "checkpoint_epoch_2.pt",
    )
    run = start()
    again = Parts()
    restored = run.attach(**again.named)
    assert restored is not None and (restored.epoch, restored.step) == (2, 0)
    assert all(map(torch.equal, parts.model.state_dict().values(), again.model.state_dict().values()))
    assert run.epochs_done == 2
    assert train(run, again) == whole[10:]


def test_another_dataset_than_that_of_the_save_is_refused(start: Start) -> None:
    run = start()
    train(run, attached(run), steps=5)
    run = start()
    attached(run)
    changed = numbers(23)
    changed[-1] = 99
    with pytest.raises(DataChanged) as raised:
        run.batches(changed, 5)
    assert len(re.findall(r"Tensor\[23\]-[0-9a-f]{16}", str(raised.value))) == 2
    run = start()
    attached(run)
    with pytest.raises(DataChanged, match="it had 23 samples and now has 24"):
        run.batches(numbers(24), 5)


@pytest.mark.long
def test_each_ranks_batch_is_kept_and_the_learning_rate_scaled(tmp_path: Path) -> None:
    training = Training(tmp_path)
    flags = ("--samples=53", "--batch=4", "--epochs=1", "--per-rank", "--plain", "--save-steps=1")
    assert training.run(World(2, stop_after=2), *flags) == 0, training.said
    assert training.run(World(0, stop_after=5), *flags, "--lr-rule=linear") == 0, training.said
    assert "2 to 1 ranks: global batch 8 to 4, learning rate 0.02 to 0.01 (linear)" in training.said
    assert training.run(World(2), *flags, "--lr-rule=sqrt") == 0, training.said
    assert "1 to 2 ranks: global batch 4 to 8, learning rate 0.01 to 0.0141421 (sqrt)" in training.said
    rates = {line["attempt"]: line["lr"] for line in training.lines if "lr" in line}
    assert rates == pytest.approx({0: 0.02, 1: 0.01, 2: 0.01 * 2**0.5})
    training.check_exactly_once(53, epochs=1)
    sizes = [sum(len(line["used"]) for line in lines) for _, lines in sorted(training.committed().items())]
    assert sizes == [8, 8, 4, 4, 4, 8, 8, 8, 1]


# -- requests to stop --------------------------------------------------------------------------------------------------


def alone(folder: Path, limit: int, signum: int | None) -> tuple[int, int, int, str]:
    """Where it began, the last step it told of, its exit code, and what it said."""
    process = subprocess.Popen(
        [sys.executable, str(ALONE), str(limit)],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stderr is not None
    began = last = -1
    for line in process.stdout:
        word, number = line.split()
        if word == "begins":
            began = int(number)
        elif word == "step":
            last = int(number)
            if signum is not None and last == began + 3:
                process.send_signal(signum)
    said = process.stderr.read()
    process.stderr.close()
    process.stdout.close()
    return began, last, process.wait(60), said


@pytest.mark.long
def test_a_signal_ends_a_training_without_a_launcher_with_a_save(tmp_path: Path) -> None:
    at = 0
    for signum in SIGNALS:
        began, last, code, said = alone(tmp_path, 0, signum)
        assert (began, code) == (at, 0), said
        at = last + 1  # the step that is saved ends the process before it tells of it
        assert f"was asked to stop, and saved step {at}" in said
        assert (tmp_path / "checkpoints" / f"step_{at:08d}").is_dir()
    assert alone(tmp_path, at + 4, None)[:3] == (at, at + 4, 0)


def test_handlers_are_taken_away_when_nobody_looks_any_more(start: Start) -> None:
    def own(signum: int, frame: Any) -> None: ...

    before = [signal.signal(SIGNALS[0], signal.SIG_DFL), signal.signal(SIGNALS[1], own)]
    try:
        run = start()
        attached(run)
        assert signal.getsignal(SIGNALS[0]) is not signal.SIG_DFL and signal.getsignal(SIGNALS[1]) is own
        run.close()
        assert signal.getsignal(SIGNALS[0]) is signal.SIG_DFL and signal.getsignal(SIGNALS[1]) is own
    finally:
        for signum, handler in zip(SIGNALS, before, strict=True):
            signal.signal(signum, handler)


def test_plain_values_are_kept_and_found_in_the_runs_state(tmp_path: Path) -> None:
    script = """
        import sys, torch, holdfast
        run = holdfast.init(checkpoints=sys.argv[1], save_steps=1)
        model = torch.nn.Linear(1, 1)
        run.attach(model=model, best=0.5)
        print(run.state["best"], flush=True)
        for x in run.batches(torch.ones(2, 1), 1):
            run.state["best"] += 1
            run.step()
        run.close()
    """
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(script))
    found = [
        subprocess.run([sys.executable, path, tmp_path / "saved"], capture_output=True, text=True, timeout=60).stdout
        for _ in range(2)
    ]
    assert found == ["0.5\n", "2.5\n"]
