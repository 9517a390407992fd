"""Fingerprints: another dataset has another one, the same has the same in any process, and reading disturbs nothing."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from holdfast.checkpoint import randomness
from holdfast.data import fingerprint


class Data:
    """Samples by a function of their index."""

    def __init__(self, size: int, sample: Callable[[int], Any]) -> None:
        self.size = size
        self.sample = sample
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, at: int) -> Any:
        self.read.append(at)
        return self.sample(at)


class Named(Data):
    def __init__(self, name: Any) -> None:
        super().__init__(3, lambda at: at)
        self.fingerprint = name


class Bare:
    pass


KINDS: dict[str, Callable[[int], Any]] = {
    "number": lambda at: at,
    "float": lambda at: at + 0.5,
    "boolean": lambda at: bool(at),
    "text": lambda at: f"sample {at}",
    "bytes": lambda at: b"%d" % at,
    "tensor": lambda at: torch.full((2, 3), at),
    "tensor of another type": lambda at: torch.full((2, 3), at, dtype=torch.int32),
    "tensor of another shape": lambda at: torch.full((3, 2), at),
    "half tensor": lambda at: torch.full((2, 3), at, dtype=torch.bfloat16),
    "tensor without dimensions": lambda at: torch.tensor(at),
    "tensor that is a view": lambda at: torch.arange(12).reshape(3, 4).t() + at,
    "array": lambda at: numpy.full((2, 3), at),
    "numpy number": lambda at: numpy.float64(at),
    "tuple": lambda at: (at, "label"),
    "nested": lambda at: [[at], "label"],
    "dict": lambda at: {"x": torch.tensor([at]), "y": at},
}


def of(sample: Callable[[int], Any], size: int = 100) -> str:
    return fingerprint.of(Data(size, sample))


def test_every_kind_of_content_counts() -> None:
    seen = [of(sample) for sample in KINDS.values()]
    assert seen == [of(sample) for sample in KINDS.values()]
    assert len(set(seen)) == len(KINDS)
    assert all(text.startswith("Data[100]-") for text in seen)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_that_changed_is_noticed(kind: str) -> None:
    sample = KINDS[kind]
    for probe, other in ((0, 7), (50, 0), (99, 0)):
        changed = [sample(at) for at in range(100)]
        changed[probe] = sample(other)
        assert of(changed.__getitem__) != of(sample)


def test_a_few_samples_are_read_and_no_more() -> None:
    data = Data(10**9, lambda at: at)
    fingerprint.of(data)
    assert data.read == [0, 500_000_000, 999_999_999] * 2
    assert of(lambda at: at, 1) != of(lambda at: at, 2) != of(lambda at: at, 3)
    assert of(lambda at: at, 0) == "Data[0]"


def test_it_is_the_same_in_another_process() -> None:
    script = "import test_fingerprint as t\nprint('\\n'.join(t.of(sample) for sample in t.KINDS.values()))"
    env = {**os.environ, "PYTHONHASHSEED": "77", "PYTHONPATH": str(Path(__file__).parent)}
    out = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True).stdout
    assert out.splitlines() == [of(sample) for sample in KINDS.values()]


def test_a_dataset_may_know_better() -> None:
    assert fingerprint.of(Named("corpus v3")) == "corpus v3"
    assert fingerprint.of(Named(lambda: "corpus v4")) == "corpus v4"
    assert fingerprint.of(Named(None)).startswith("Named[3]-")


@pytest.mark.parametrize(
    "draw",
    [
        random.random,
        numpy.random.rand,
        lambda: torch.rand(2),
        lambda: int(torch.rand(()) < 2),  # which it cannot be seen from
        random.Random(5).random,
        numpy.random.default_rng(5).random,
    ],
)
def test_samples_that_are_augmented_at_random_do_not_count(draw: Callable[[], Any]) -> None:
    before = randomness.capture()
    assert of(lambda at: (at, draw())) == "Data[100]"
    assert randomness.capture() == before


def test_a_dataset_that_cannot_be_read_has_its_type_and_length() -> None:
    def fails(at: int) -> int:
        random.random()
        raise OSError("the disk is gone")

    before = randomness.capture()
    assert of(fails) == "Data[100]"
    assert randomness.capture() == before
    assert fingerprint.of(Bare()) == "Bare"
    assert fingerprint.of([1, 2]) != fingerprint.of([1, 3])


def test_what_nobody_knows_counts_by_its_type() -> None:
    assert of(lambda at: Bare()) == of(lambda at: Bare()) != of(lambda at: {at})
    assert of(lambda at: {at}) == of(lambda at: {at + 1})
    assert of(lambda at: numpy.array([Bare()])) == of(lambda at: numpy.array([None]))
    assert of(lambda at: torch.empty(at, device="meta")) == of(lambda at: torch.empty(at, device="meta"))
    assert of(lambda at: torch.eye(3).to_sparse()) == of(lambda at: torch.eye(3).to_sparse())


def test_a_sample_that_contains_itself_has_an_end() -> None:
    loop: list[Any] = []
    loop.append(loop)
    assert of(lambda at: loop) == of(lambda at: loop)


def test_parts_do_not_run_together() -> None:
    assert of(lambda at: ["ab", "c"]) != of(lambda at: ["a", "bc"])
    assert of(lambda at: [["a"], "b"]) != of(lambda at: [["a", "b"]])
    assert of(lambda at: 1) != of(lambda at: "1") != of(lambda at: b"1")
    assert of(lambda at: {"a": 1}) != of(lambda at: [("a", 1)])
