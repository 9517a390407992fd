"""What a step that is not done has changed, and is put back."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from holdfast.training import marks
from holdfast.training.marks import Mark


class Counter:
    def __init__(self, size: int = 1) -> None:
        self.counts = torch.zeros(size)
        self.loads = 0

    def state_dict(self) -> dict[str, Any]:
        return {"counts": self.counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.counts = state["counts"]
        self.loads += 1


def test_buffers_also_where_another_tensor_is_there_now() -> None:
    model: Any = nn.BatchNorm1d(2)
    model.register_buffer("seen", torch.zeros(1))
    model.register_buffer("none", None)
    mark = Mark({"model": model}, [model])
    for step in range(3):
        model(torch.randn(4, 2))
        model.seen = model.seen + 1
        kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        mark.take()
        model(torch.randn(4, 2))
        model.seen, model.none = model.seen + 1, torch.ones(1)
        assert torch.equal(mark.tensors[model.seen.data_ptr()], kept["seen"]), "for a will"
        mark.put_back()
        assert model.none is None and model.seen == step + 1
        assert all(map(torch.equal, model.state_dict().values(), kept.values()))


def test_an_average_is_put_back_and_what_is_frozen_is_not_copied() -> None:
    model, frozen = nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False)
    average = AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": model, "frozen": frozen, "average": average, "optimizer": optimizer}
    mark = Mark(state, [model, frozen, average])
    average.update_parameters(model)
    assert not mark.whole, "the first time that it changes it has no copy yet"
    mark.take()
    copied = set(mark.tensors)
    assert {parameter.data_ptr() for parameter in average.module.parameters()} <= copied
    assert not {parameter.data_ptr() for parameter in [*model.parameters(), *frozen.parameters()]} & copied
    before = [parameter.clone() for parameter in average.module.parameters()]
    nn.init.ones_(model.weight)
    average.update_parameters(model)
    assert mark.whole
    mark.put_back()
    assert all(map(torch.equal, average.module.parameters(), before)) and average.n_averaged == 1
    nn.init.zeros_(frozen.weight)  # as a state that comes from another rank
    mark.take()
    assert mark.whole and frozen.weight.data_ptr() not in mark.tensors, "that was no step"


def test_plain_values_in_the_same_objects() -> None:
    history, seen, long = [1, [2]], {"a": 1}, list(range(marks.LARGEST + 1))
    state: dict[str, Any] = {"tokens": 3, "history": history, "seen": seen, "long": long, "mean": torch.ones(2)}
    mean, mark = state["mean"], Mark(state, [])
    state["tokens"] += 1
    history.append(3)
    history[1].append(3)  # type: ignore[attr-defined]
    seen["b"] = 2
    long.append(0)
    mean += 1
    assert mark.values["history"] == [1, [2]] and mark.values["tokens"] == 3
    mark.put_back()
    assert state["tokens"] == 3 and state["history"] is history == [1, [2]] and state["seen"] is seen == {"a": 1}
    assert len(long) == marks.LARGEST + 1 and state["mean"] is mean and mean.tolist() == [1, 1]
    state["later"] = 5
    mark.take()
    state["later"] = 6
    mark.put_back()
    assert state["later"] == 5


def test_an_object_with_a_state_is_loaded_only_if_it_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    changed, same = Counter(), Counter()
    mark = Mark({"changed": changed, "same": same}, [])
    changed.counts += 1
    mark.put_back()
    assert changed.counts == 0 and (changed.loads, same.loads) == (1, 0) and not mark.too_large
    monkeypatch.setattr(marks, "LARGEST_BYTES", 100)
    large = Mark({"large": Counter(100)}, [])
    said = "the state of 'large', a Counter, is too large to be put back; attach modules and optimizers themselves"
    assert large.too_large == said and large.values == {}


def test_a_long_list_that_grows() -> None:
    """Of which a step costs what it adds."""
    losses: list[Any] = [(step, 0.5) for step in range(marks.LARGEST)]
    state: dict[str, Any] = {"losses": losses}
    mark = Mark(state, [])
    for step in range(3):
        losses.append(float(step))
        mark.take()
    kept = list(losses)
    losses += [3.0, 4.0]
    assert mark.values == {"losses": kept} and mark.whole, "for a will"
    mark.put_back()
    assert state["losses"] is losses == kept
    state["losses"] = [1.0]
    mark.put_back()
    assert state["losses"] is losses == kept
    losses[5] = "another"
    assert not mark.whole
    mark.put_back()
    assert mark.too_large.startswith("'losses', a list of 1003 entries of which some were changed, is too large")


@pytest.mark.parametrize(
    "change",
    [lambda window: window.append(window.pop(0)), lambda window: window.pop(), lambda window: window.append([1])],
)
def test_one_that_does_not_only_grow_is_too_large(change: Any) -> None:
    window = list(range(marks.LARGEST + 2))
    mark = Mark({"window": window}, [])
    assert not mark.too_large
    change(window)
    mark.take()
    assert mark.too_large.startswith("'window', a list of ") and "that does not only grow" in mark.too_large
    assert mark.values == {} and mark.whole


@pytest.mark.parametrize(
    "value", ["a" * 2000, b"a" * 2000, tuple(range(2000)), np.arange(3000.0)], ids=["text", "bytes", "tuple", "array"]
)
def test_what_is_long_and_cannot_change_or_is_copied_at_once(value: Any) -> None:
    state, before = {"value": value}, copy.deepcopy(value)
    mark = Mark(state, [])
    if isinstance(value, np.ndarray):
        value += 1
    else:
        state["value"] = value[1:]
    assert np.array_equal(mark.values["value"], before) and not mark.too_large
    mark.put_back()
    assert state["value"] is value and np.array_equal(value, before)


@pytest.mark.parametrize("value", [dict.fromkeys(range(2000)), set(range(2000)), tuple([[]] * 2000)])
def test_other_large_values_are_named(value: Any) -> None:
    mark = Mark({"seen": value}, [])
    name = type(value).__name__
    said = f"'seen', a {name} of 2000 entries, is too large to be put back; keep it in a tensor, or in an object with"
    assert mark.too_large.startswith(said) and mark.values == {}


def test_what_steps_and_what_is_our_own_is_left_alone() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    state = {"optimizer": optimizer, "scheduler": scheduler, "scaler": torch.amp.GradScaler("cpu"), "data": Counter()}
    assert Mark(state, [model]).values == {}
