"""Trees: every value comes back as it was, what cannot be saved is named, and no tree can do harm."""

from __future__ import annotations

import math
import random
from collections import Counter, OrderedDict, defaultdict
from typing import Any

import msgspec
import numpy
import pytest
import torch

from holdfast.checkpoint import tree
from holdfast.checkpoint.errors import CheckpointError, Damaged


def there_and_back(value: Any) -> Any:
    node, tensors = tree.flatten(value, "state")
    return tree.unflatten(msgspec.json.decode(msgspec.json.encode(node)), tensors)


@pytest.mark.parametrize(
    "value",
    [
        None, True, False, 0, -1, 2**63 - 1, -(2**63), 2**63, -(2**63) - 1, 2**64 - 1, 10**300, 0.1, -0.0, 1e16, 5e-324,
        1.7976931348623157e308, math.inf, -math.inf, "", "a/b%c", "schön \U0001f600", b"", bytes(range(256)), 1 + 2j,
        complex(math.inf, -0.0), [], (), {}, set(), [[], ()], (1, 2, (3,)), [2**70, 1],
        {1: "a", "1": "b", None: 2, (1, 2): 3},
        {True: 1, 2.5: 2}, OrderedDict(b=1, a=2), Counter({5: 1, 30: 2}), {1, "a", None}, torch.float32, torch.bfloat16,
        torch.Size([1, 2]), torch.Size([]), torch.device("cpu"), torch.device("cuda", 1), [None, True, 1, "x"],
    ],
    ids=lambda value: type(value).__name__,  # a set has no order, and each process its own
)  # fmt: skip
def test_plain_values_come_back(value: Any) -> None:
    again = there_and_back(value)
    assert again == value
    assert type(again) is type(value)
    if not isinstance(value, set):  # which may show the same in two ways
        assert repr(again) == repr(value)


def test_nan_comes_back() -> None:
    assert math.isnan(there_and_back([math.nan])[0])


def test_tensors_are_referred_to_by_their_path() -> None:
    weight, average = torch.randn(3, 2), torch.randn(3)
    value = {"model": {"layer.weight": weight, "a/b%": average}, "state": {0: {"exp_avg": average}}, "list": [weight]}
    node, tensors = tree.flatten(value, "x")
    assert list(tensors) == ["x/model/layer.weight", "x/model/a%2Fb%25", "x/state/0/exp_avg", "x/list/0"]
    assert tensors["x/model/layer.weight"] is weight
    assert tree.tensor_keys(node) == list(tensors)
    assert tree.unflatten(node, tensors)["model"]["a/b%"] is average
    assert tree.join("x/model", "a/b%") == "x/model/a%2Fb%25"
    assert tree.parts("x/model/a%2Fb%25") == ["x", "model", "a/b%"]


def test_keys_that_read_the_same_are_told_apart() -> None:
    value = {0: torch.zeros(1), "0": torch.ones(1), "0%": torch.full((1,), 2.0)}
    node, tensors = tree.flatten(value, "x")
    assert len(tensors) == 3
    again = tree.unflatten(node, tensors)
    assert {key: float(tensor) for key, tensor in again.items()} == {0: 0.0, "0": 1.0, "0%": 2.0}


@pytest.mark.parametrize("kind", ["float64", "float16", "int8", "uint16", "uint64", "bool", "complex64", ">f4"])
def test_arrays_come_back_and_are_copies(kind: str) -> None:
    array = numpy.arange(12).reshape(3, 4)[:, ::-1].astype(kind)
    node, tensors = tree.flatten({"a": array, "scalar": array[0, 0]}, "x")
    before = array.copy()
    array[...] = 0
    again = tree.unflatten(node, tensors)
    assert again["a"].dtype == numpy.dtype(kind).newbyteorder("=")
    assert (again["a"] == before).all()
    assert again["scalar"] == before[0, 0]
    assert type(again["scalar"]) in (int, float, bool, complex)


def test_a_subclass_of_a_number_comes_back_as_the_number() -> None:
    assert type(there_and_back(numpy.float64(0.1))) is float
    assert type(there_and_back(defaultdict(int, a=1))) is dict


def test_randomness_comes_back() -> None:
    states = (random.getstate(), numpy.random.get_state(), torch.get_rng_state())
    again = there_and_back(states)
    assert again[0] == states[0]
    assert (again[1][1] == states[1][1]).all()  # type: ignore[index]
    assert torch.equal(again[2], states[2])


def test_modules_keep_the_versions_of_their_state() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    state = model.state_dict()
    again = there_and_back(state)
    assert type(again) is OrderedDict
    assert again._metadata == state._metadata  # type: ignore[attr-defined]
    model.load_state_dict(again)


def schedulers(optimizer: torch.optim.Optimizer) -> list[Any]:
    schedules = torch.optim.lr_scheduler
    return [
        schedules.MultiStepLR(optimizer, [2, 4, 4]),
        schedules.OneCycleLR(optimizer, 0.1, total_steps=10),
        schedules.CyclicLR(optimizer, 0.1, 0.2),
        schedules.ReduceLROnPlateau(optimizer),
        schedules.LambdaLR(optimizer, lambda step: 0.5),
        schedules.CosineAnnealingWarmRestarts(optimizer, 3),
        schedules.SequentialLR(
            optimizer, [schedules.ConstantLR(optimizer), schedules.ExponentialLR(optimizer, 0.9)], milestones=[2]
        ),
    ]


def test_schedulers_can_be_saved() -> None:
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1, momentum=0.9)
    for schedule in schedulers(optimizer):
        again = there_and_back(schedule.state_dict())
        assert repr(again) == repr(schedule.state_dict())
        schedule.load_state_dict(again)


@pytest.mark.parametrize("name", ["SGD", "AdamW", "LBFGS", "Adafactor", "Rprop"])
def test_optimizers_can_be_saved(name: str) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer: Any = getattr(torch.optim, name)(model.parameters(), lr=0.1)

    def closure() -> torch.Tensor:
        loss: torch.Tensor = model(torch.ones(1, 2)).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(closure)
    again = there_and_back(optimizer.state_dict())
    assert repr(again) == repr(optimizer.state_dict())
    optimizer.load_state_dict(again)


class Foo:
    pass


def ring() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"param_groups": [{"foo": Foo()}]}, "x/param_groups/0/foo: a Foo cannot be saved; give it state_dict()"),
        ({"f": len}, "x/f: a builtin_function_or_method cannot be saved"),
        (ring(), "nested more than 100 deep; does it contain itself?"),
        ({torch.zeros(1): 1}, "x: a tensor as the key of a dict"),
        ({"a": "\ud800"}, "is no Unicode text"),
        ({"\ud800": torch.zeros(1)}, "is no Unicode text"),
        ({"a": 10**5000}, "x/a: an integer of 16610 bits"),
        ({"a": numpy.array([Foo()])}, "x/a: a numpy array of object cannot be saved"),
        ({"a": numpy.array(["x"])}, "x/a: a numpy array of <U1 cannot be saved"),
        ({"a": numpy.longdouble(1)}, "cannot be saved"),
        ({"a": torch.Generator()}, "x/a: a Generator cannot be saved"),
    ],
)
def test_what_cannot_be_saved_is_named(value: Any, says: str) -> None:
    with pytest.raises(CheckpointError) as raised:
        tree.flatten(value, "x")
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


def deep(depth: int) -> Any:
    node: Any = None
    for _ in range(depth):
        node = {"l": [node]}
    return node


HOSTILE: list[Any] = [
    [], [1], {}, {"": 1}, {"q": 1}, {"t": 1}, {"t": "missing"}, {"t": None}, {"t": ["a"]}, {"n": "missing"}, {"n": {}},
    {"d": 1}, {"d": {"a": 1}}, {"d": [1]}, {"d": [["a"]]}, {"d": [["a", 1, 2]]}, {"d": [[{"l": []}, 1]]},
    {"d": [["a", 1], ["a", 2]]}, {"d": [[{"d": []}, 1]]}, {"o": None},
    {"o": [], "m": {"t": "missing"}}, {"o": [], "x": 1},
    {"d": [], "m": 1}, {"l": {}}, {"l": "abc"}, {"u": 5}, {"s": [{"l": []}]}, {"s": 1}, {"k": [[1]]}, {"f": "1"},
    {"f": ["nan"]}, {"i": "0x10"}, {"i": "1" * 5000}, {"i": 5}, {"i": "\u0661"}, {"b": "@@"}, {"b": 5}, {"b": "a"},
    {"b": None},
    {"c": [1]}, {"c": ["a", "b"]}, {"c": 1}, {"y": "save"}, {"y": "os"}, {"y": "__class__"},
    {"y": "nn.Module"}, {"y": 5},
    {"z": [-1]}, {"z": ["a"]}, {"z": [True]}, {"z": [2**70]}, {"z": 5}, {"v": "os.system"}, {"v": ""},
    {"v": 7}, {"v": None},
    {"t": "x", "d": []}, deep(150), deep(20_000), {"d": [[deep(300), 1]]}, {1: 2}, {None: []}, {("t",): "x"},
]  # fmt: skip


@pytest.mark.parametrize("node", HOSTILE, ids=lambda node: repr(node)[:40] if node and "l" not in node else None)
def test_a_tree_of_somebody_else_is_refused(node: Any) -> None:
    with pytest.raises(Damaged):
        tree.unflatten(node, {"x": torch.zeros(1)})


def test_any_tree_is_read_or_refused() -> None:
    """Random ones of all tags: whatever comes, it is a value or Damaged."""
    chance = random.Random(7)
    tags = "tdoklusfibcnyzvmqx"

    def node(depth: int) -> Any:
        kind = chance.randrange(9 if depth else 5)
        if kind < 5:
            return [None, 5, "x", 2.5, "float32"][kind]
        if kind < 7:
            return [node(depth - 1) for _ in range(chance.randrange(3))]
        return {chance.choice(tags): node(depth - 1) for _ in range(chance.randrange(1, 3))}

    read = 0
    for _ in range(20_000):
        try:
            tree.unflatten(node(5), {"x": torch.zeros(1, dtype=torch.bfloat16)})
            read += 1
        except Damaged as refused:
            assert "\n" not in str(refused)
    assert read > 1000
