"""Of the states that ranks have left, the one that the next world gets."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from holdfast.agent.will import Will


@pytest.fixture
def will() -> Iterator[Will]:
    made = Will()
    yield made
    made.forget()


@pytest.fixture
def file() -> Iterator[Callable[[str], int]]:
    """Of a rank, which this process is here."""
    made: list[int] = []

    def make(text: str) -> int:
        made.append(os.memfd_create("of a rank"))
        os.write(made[-1], text.encode())
        return made[-1]

    yield make
    for fd in made:
        os.close(fd)


def text(will: Will) -> str:
    """What a rank of the next world reads."""
    if not will.path:
        return ""
    with open(will.path) as file:
        return file.read()


def test_it_is_there_when_the_rank_is_gone(will: Will) -> None:
    fd = os.memfd_create("of a rank")
    os.write(fd, b"state")
    will.keep(os.getpid(), fd, 3, 7)
    os.close(fd)
    assert text(will) == "state"


@pytest.mark.parametrize("order", [(7, 8), (8, 7)])
def test_the_newest_is_kept(order: tuple[int, int], will: Will, file: Callable[[str], int]) -> None:
    """Whichever came first."""
    for step in order:
        will.keep(os.getpid(), file(str(step)), 3, step)
    assert text(will) == "8"


def test_that_of_a_later_world_is_newer(will: Will, file: Callable[[str], int]) -> None:
    """Also where that has got no further: the earlier one is forgotten when a later world has stepped."""
    will.keep(os.getpid(), file("early"), 3, 7)
    will.keep(os.getpid(), file("late"), 4, 7)
    assert text(will) == "late"


def test_one_that_cannot_be_opened_takes_nothing_away(will: Will, file: Callable[[str], int]) -> None:
    will.keep(os.getpid(), file("7"), 3, 7)
    will.keep(os.getpid(), 1 << 20, 3, 8)
    assert text(will) == "7"


def test_it_is_kept_until_a_later_world_has_stepped(will: Will, file: Callable[[str], int]) -> None:
    """One that fails before has nothing else to give to its successor."""
    will.keep(os.getpid(), file("7"), 3, 7)
    will.world_over(3, stepped=True)
    assert text(will) == "7", "that is the world whose will it is"
    will.world_over(4, stepped=False)
    assert text(will) == "7"
    will.world_over(5, stepped=True)
    assert will.path == ""


def test_no_file_is_left_open(will: Will, file: Callable[[str], int]) -> None:
    fds = [file(str(step)) for step in range(5)]
    before = set(os.listdir("/proc/self/fd"))
    for step, fd in enumerate(fds):
        will.keep(os.getpid(), fd, step, step)
    will.forget()
    assert set(os.listdir("/proc/self/fd")) == before
