"""Marks of random generators: each says where they stand, also one that relies on an earlier one."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.checkpoint import randomness


@pytest.fixture(autouse=True)
def put_back() -> Iterator[None]:
    before = randomness.capture()
    yield
    randomness.put_back(before)


def next_ones() -> list[Any]:
    of_python = [random.random(), random.gauss(), random.gauss()]
    return [*of_python, torch.rand(()).item(), np.random.rand(), np.random.randn(), np.random.randn()]


def nothing() -> None: ...


DRAWS = {
    "nothing": nothing,
    "a word": np.random.rand,
    "a normal number": np.random.randn,
    "a pair of them": lambda: np.random.randn(2),
    "a seed": lambda: np.random.seed(3),
    "all words": lambda: np.random.rand(624),
    "a word of Python's": random.random,
    "a normal number of Python's": random.gauss,
    "a seed of Python's": lambda: random.seed(3),
}


@pytest.mark.parametrize("first", DRAWS.values(), ids=DRAWS)
@pytest.mark.parametrize("second", DRAWS.values(), ids=DRAWS)
def test_a_mark_after_another(first: Callable[[], Any], second: Callable[[], Any]) -> None:
    np.random.seed(3)
    random.seed(3)
    at_first = randomness.mark()
    first()
    then = randomness.mark(at_first)
    second()
    now = randomness.mark(then)
    expected = next_ones()
    for _ in range(2):
        randomness.go_back(now)
        assert next_ones() == expected
    randomness.go_back(now)
    assert randomness.capture() == randomness.told(now)


def test_one_that_nobody_has_drawn_from_is_not_asked_again() -> None:
    first = randomness.mark()
    np.random.rand(2)
    random.random()
    second = randomness.mark(first)
    third = randomness.mark(second)
    assert third.numpy is second.numpy is not first.numpy
    assert third.python is second.python is not first.python


def test_the_second_of_a_pair_is_asked_for() -> None:
    np.random.seed(3)
    np.random.randn()
    first = randomness.mark()
    np.random.randn()  # which moves nothing but itself
    assert randomness.mark(first).numpy[3] == 0


def test_the_second_of_a_pair_of_pythons_is_asked_for() -> None:
    random.seed(3)
    random.gauss()
    first = randomness.mark()
    random.gauss()
    assert first.python[2] is not None
    assert randomness.mark(first).python[2] is None


def test_another_generator_in_its_place() -> None:
    numpy_random: Any = np.random  # whose types do not know of these
    kept = numpy_random.get_bit_generator()
    numpy_random.set_bit_generator(np.random.MT19937(5))
    try:
        first = randomness.mark()
        expected = next_ones()
        randomness.mark(first)
        randomness.go_back(first)
        assert next_ones() == expected
    finally:
        numpy_random.set_bit_generator(kept)
