"""What torch tells of a rank: its steps, evaluations and saves. Each test forks, as hooks are for a process's life."""

from __future__ import annotations

import contextlib
import io
import math
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as checkpoint  # as the zygote has it, so that it is wrapped
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from holdfast.agent import pages
from holdfast.agent.pages import Page
from holdfast.control import hangs
from holdfast.control.hangs import Vitals
from holdfast.worker import phases
from holdfast.worker.beacon import TRAINS, Beacon, Phase
from holdfast.worker.phases import Phases, steps_before


class Rank:
    """The rank itself, with what the agent would see of it."""

    def __init__(self, fd: int, page: Page) -> None:
        self.page = page
        self.pokes = 0
        self.first_steps = 0
        page.say_wake(math.inf)
        page.say_limits((60.0,) * 5)
        self.beacon = Beacon(fd, 0, 0, self._poked)
        Phases(self.beacon, self._stepped).install()

    def _poked(self) -> None:
        self.pokes += 1
        self.page.say_wake(time.monotonic() + 50.0)

    def _stepped(self) -> None:
        self.first_steps += 1

    def vitals(self) -> Vitals:
        vitals = self.page.read(time.monotonic(), 0)
        assert vitals is not None
        return vitals

    @property
    def phase(self) -> int:
        return self.vitals().phase


def trained(steps: int = 1, make: Any = torch.optim.SGD) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(1, 1)
    optimizer = make(model.parameters(), lr=0.01)
    step(model, optimizer, steps)
    return model, optimizer


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    def loss() -> Any:
        optimizer.zero_grad()
        value: Any = model(torch.ones(1)).square().sum()
        value.backward()
        return value

    for _ in range(steps):
        loss()
        optimizer.step(loss)


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    """A first step imports much of torch; better here than in every fork."""
    trained()


@pytest.fixture
def page() -> Iterator[tuple[int, Page]]:
    fd, [page] = pages.make(1, b"")
    yield fd, page
    os.close(fd)


def in_a_rank(page: tuple[int, Page], story: Callable[[Rank], None]) -> None:
    """Run it in a fork. What is wrong there is told here."""
    told, tell = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            story(Rank(*page))
            os._exit(0)
        except BaseException:
            os.write(tell, traceback.format_exc().encode()[-60_000:])
            os._exit(1)
    os.close(tell)
    with open(told, errors="replace") as file:
        said = file.read()
    assert os.waitpid(pid, 0)[1] == 0, said


def test_constants_that_ranks_have_a_copy_of() -> None:
    assert phases.STEPS_TO_LEARN == hangs.STEPS_TO_LEARN
    assert tuple(phase.name.lower() for phase in Phase) == hangs.PHASES


# -- steps ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "LBFGS", "RMSprop", "Adagrad"])
def test_the_steps_of_every_optimizer_are_counted(page: tuple[int, Page], name: str) -> None:
    def story(rank: Rank) -> None:
        model, optimizer = trained(3, getattr(torch.optim, name))
        assert (rank.page.steps, rank.page.base, rank.first_steps) == (3, 0, 1)
        step(model, optimizer, 4)
        vitals = rank.vitals()
        assert (vitals.steps, vitals.phase, vitals.trains) == (7, Phase.TRAINING, True)
        assert vitals.gaps_s[Phase.STARTING] > 0
        assert vitals.gaps_s[Phase.TRAINING] > 0

    in_a_rank(page, story)


def test_the_agent_is_woken_for_the_first_optimizer_and_for_enough_steps(page: tuple[int, Page]) -> None:
    """Before, a rank may be any program; after, its limit is a learned one."""

    def story(rank: Rank) -> None:
        assert not rank.vitals().trains
        model, optimizer = trained(0)
        assert (rank.vitals().trains, rank.phase, rank.pokes) == (True, Phase.STARTING, 1)
        trained(0)
        assert rank.pokes == 1
        step(model, optimizer)
        assert rank.pokes == 2  # how long a first step takes is known now
        step(model, optimizer, hangs.STEPS_TO_LEARN - 2)
        assert rank.pokes == 2
        step(model, optimizer)
        assert rank.pokes == 3
        step(model, optimizer, 100)
        assert rank.pokes == 3

    in_a_rank(page, story)


@pytest.mark.parametrize(
    ("name", "before"), [("Adam", 5), ("AdamW", 5), ("LBFGS", 0), ("SGD", 0)], ids=["Adam", "AdamW", "LBFGS", "SGD"]
)
def test_an_optimizer_that_counts_tells_how_many_it_had_done(page: tuple[int, Page], name: str, before: int) -> None:
    make = getattr(torch.optim, name)
    _, old = trained(5, make)

    def story(rank: Rank) -> None:
        model, optimizer = trained(0, make)
        optimizer.load_state_dict(old.state_dict())
        step(model, optimizer, 2)
        assert rank.page.steps == 2
        assert rank.page.base >= before
        if name != "LBFGS":  # which counts its iterations
            assert rank.page.base == before

    in_a_rank(page, story)


def test_an_optimizer_that_cannot_say_is_asked_in_vain() -> None:
    odd: list[Any] = [{}, {0: {}}, {0: {"step": "many"}}, {0: None}, None]
    for state in odd:
        assert steps_before(SimpleNamespace(state=state)) is None
    assert steps_before(object()) is None
    assert steps_before(SimpleNamespace(state={0: {"step": torch.tensor(0.0)}})) == 0


def test_a_child_of_the_rank_does_not_count(page: tuple[int, Page]) -> None:
    def story(rank: Rank) -> None:
        model, optimizer = trained(2)
        if (pid := os.fork()) == 0:
            with contextlib.suppress(BaseException):
                step(model, optimizer, 5)
                trained(5)
                model.eval()
                torch.save({}, io.BytesIO())
            os._exit(0)
        os.waitpid(pid, 0)
        assert (rank.page.steps, rank.phase) == (2, Phase.TRAINING)

    in_a_rank(page, story)


# -- evaluations and saves --------------------------------------------------------------------------------------------


def test_an_evaluation_lasts_until_the_next_step(page: tuple[int, Page]) -> None:
    def story(rank: Rank) -> None:
        torch.nn.Linear(1, 1).eval()  # a frozen part of the model, say: the first step has its own limit
        assert rank.phase == Phase.STARTING
        model, optimizer = trained()
        assert model.eval() is model
        assert not model.training
        assert rank.phase == Phase.EVALUATING
        model.train()
        assert rank.phase == Phase.EVALUATING
        step(model, optimizer)
        assert rank.phase == Phase.TRAINING
        assert rank.vitals().gaps_s[Phase.EVALUATING] > 0

    in_a_rank(page, story)


def test_every_batch_of_models_that_are_evaluated_is_a_sign_of_life(page: tuple[int, Page]) -> None:
    def story(rank: Rank) -> None:
        model, _ = trained()
        model.eval()
        first_s = rank.vitals().alive_s
        model.eval()
        assert rank.vitals().alive_s > first_s

    in_a_rank(page, story)


class Disk(io.BytesIO):
    """Notes what its rank is at while it is written to."""

    def __init__(self, rank: Rank, fails: bool = False) -> None:
        super().__init__()
        self._rank, self._fails = rank, fails
        self.phases: set[int] = set()

    def write(self, data: Any) -> int:
        self.phases.add(self._rank.phase)
        if self._fails:
            raise OSError("planned")
        return super().write(data)


def test_a_save_is_a_phase_of_its_own(page: tuple[int, Page]) -> None:
    def story(rank: Rank) -> None:
        early = Disk(rank)
        torch.save({"a": torch.ones(2)}, early)
        assert early.phases == {Phase.STARTING}
        model, _ = trained()
        disk = Disk(rank)
        torch.save(model.state_dict(), disk)
        assert (disk.phases, rank.phase) == ({Phase.SAVING}, Phase.TRAINING)
        assert rank.vitals().gaps_s[Phase.SAVING] > 0
        disk.seek(0)
        assert torch.load(disk).keys() == model.state_dict().keys()
        model.eval()
        torch.save(model.state_dict(), Disk(rank))
        assert rank.phase == Phase.EVALUATING

    in_a_rank(page, story)


def test_a_save_that_fails_is_over(page: tuple[int, Page]) -> None:
    def story(rank: Rank) -> None:
        model, _ = trained()
        disk = Disk(rank, fails=True)
        with pytest.raises((OSError, RuntimeError)):
            torch.save(model.state_dict(), disk)
        assert (disk.phases, rank.phase) == ({Phase.SAVING}, Phase.TRAINING)

    in_a_rank(page, story)


def test_a_save_in_the_background_holds_up_nobody(page: tuple[int, Page]) -> None:
    def story(rank: Rank) -> None:
        model, _ = trained()
        disk = Disk(rank)
        thread = threading.Thread(target=torch.save, args=(model.state_dict(), disk))
        thread.start()
        thread.join()
        assert (disk.phases, rank.phase) == ({Phase.TRAINING}, Phase.TRAINING)

    in_a_rank(page, story)


def test_distributed_checkpoints_are_saves(page: tuple[int, Page], tmp_path: Any) -> None:
    def story(rank: Rank) -> None:
        model, _ = trained()
        seen: list[int] = []

        class Writer(FileSystemWriter):
            def prepare_local_plan(self, plan: Any) -> Any:
                seen.append(rank.phase)
                return super().prepare_local_plan(plan)

        vars(checkpoint)["save"](model.state_dict(), storage_writer=Writer(str(tmp_path)), no_dist=True)
        assert (seen, rank.phase) == ([Phase.SAVING], Phase.TRAINING)

    in_a_rank(page, story)


def test_hooks_say_nothing_of_a_rank_that_is_ending(page: tuple[int, Page]) -> None:
    def story(rank: Rank) -> None:
        model, _ = trained()
        rank.beacon.enter(Phase.ENDING)
        model.eval()
        torch.save({}, io.BytesIO())
        assert rank.phase == Phase.ENDING

    in_a_rank(page, story)


def test_what_is_wrapped_looks_like_itself(page: tuple[int, Page]) -> None:
    before = (torch.save.__doc__, torch.nn.Module.eval.__doc__, torch.optim.Optimizer.__init__.__doc__)

    def story(rank: Rank) -> None:
        assert (torch.save.__doc__, torch.nn.Module.eval.__doc__, torch.optim.Optimizer.__init__.__doc__) == before
        assert (torch.save.__name__, torch.nn.Module.eval.__qualname__) == ("save", "Module.eval")
        assert rank.beacon.words[TRAINS] == 0

    in_a_rank(page, story)
