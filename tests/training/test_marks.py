"""What a step that is not done has changed, and is put back."""

from __future__ import annotations

from typing import Any

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
    assert large.too_large == "'large', a Counter" and large.values == {}


def test_what_steps_and_what_is_our_own_is_left_alone() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    state = {"optimizer": optimizer, "scheduler": scheduler, "scaler": torch.amp.GradScaler("cpu"), "data": Counter()}
    assert Mark(state, [model]).values == {}
