"""A rank dies, the others stay: in the same processes, after the last step that was done, with the same bits."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch

from harness import Job
from holdfast.observe import record
from holdfast.observe.goodput import divide
from holdfast.observe.state import fold
from survivors.stories import SCRIPT, STEPS, check, pids, run, same, stayed, steps

GROUPED = """
import torch, torch.distributed as dist, holdfast
class Grouped:
    def __init__(self): self.process_group = dist.group.WORLD
    def state_dict(self): return {}
    def load_state_dict(self, state): pass
dist.init_process_group("gloo")
run = holdfast.init(save_epochs=0)
run.attach(model=torch.nn.Linear(1, 1), grouped=Grouped())
"""

LOADED = """
import os, signal, sys, torch, torch.distributed as dist, holdfast
dist.init_process_group("gloo")
run = holdfast.init(save_epochs=0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters())
run.attach(model=model, optimizer=optimizer)
loader = torch.utils.data.DataLoader(torch.ones(20, 1), 2)
for x in run.batches(loader, 4) if sys.argv[1] == "stream" else loader:
    if (run.generation, run.steps_done, run.rank) == (0, 3, 1):
        os.kill(os.getpid(), signal.SIGKILL)
    model(x).mean().backward()
    optimizer.step()
    run.step()
"""

MESH = """
import torch, torch.distributed as dist, holdfast
from torch.distributed.device_mesh import init_device_mesh
dist.init_process_group("gloo")
run = holdfast.init(save_epochs=0)
run.attach(model=torch.nn.Linear(1, 1))
init_device_mesh("cpu", (2, 1))
"""


@pytest.mark.parametrize(
    "at",
    [
        pytest.param("forward", marks=pytest.mark.long),
        "backward",
        pytest.param("before step", marks=pytest.mark.long),
        "after step",
    ],
)
@pytest.mark.parametrize("how", [(), pytest.param(("--train",), marks=pytest.mark.long)], ids=["plain", "train"])
def test_a_rank_is_killed(job: Job, undisturbed: Any, at: str, how: tuple[str, ...]) -> None:
    assert run(job, [{"rank": 1, "step": 11, "at": at}], *how) == 0, job.err
    check(job, undisturbed(), {1})
    [incident] = job.incidents()
    assert incident["kind"] == "signal" and incident["rank"] == 1
    assert stayed(job) == [[], [0, 2]]
    assert job.events("ranks.signalled") == []
    check_goodput(job)


def check_goodput(job: Job) -> None:
    """Of a world with ranks that stay: the clock is divided without a rest, and no step was done again."""
    goodput = divide(record.read(job.run_dir / record.NAME))
    assert sum(span.us for span in goodput.spans) == round(goodput.wall_s * 1e6)
    assert (goodput.steps, goodput.redone, goodput.unknown) == (STEPS, 0, ())
    [cost] = goodput.costs
    assert cost.phases_s.keys() >= {"stopping", "starting"}
    assert cost.phases_s.keys() <= {"stopping", "forming the world", "starting", "restoring"}
    [first, second] = goodput.worlds
    assert first.ended_s <= second.launched_s < (second.trained_s or 0.0) < second.ended_s


def test_a_rank_is_killed_as_its_state_is_asked_for(job: Job, undisturbed: Any) -> None:
    """Which is after each step."""
    assert run(job, [{"rank": 1, "step": 11, "at": "state"}]) == 0, job.err
    check(job, undisturbed(), {1})


@pytest.mark.parametrize(
    "after_s", [0.002, pytest.param(0.0, marks=pytest.mark.long), pytest.param(0.005, marks=pytest.mark.long)]
)
def test_a_message_is_cut_off_in_its_middle(job: Job, undisturbed: Any, after_s: float) -> None:
    """Gradients of 4 MB are on their way when their rank is killed."""
    kills = [{"rank": 1, "step": 11, "at": "backward", "how": "soon", "s": after_s}]
    assert run(job, kills, "--hidden=65536") == 0, job.err
    check(job, undisturbed("--hidden=65536"), {1})


@pytest.mark.parametrize("flag", ["--buffers", pytest.param("--dropout", marks=pytest.mark.long)])
def test_what_a_forward_has_changed_is_undone(job: Job, undisturbed: Any, flag: str) -> None:
    """Buffers, which DDP sends round before each forward, and random numbers. And what else a step has changed: an
    average of weights, a plain value, an object with a state of its own."""
    assert run(job, [{"rank": 1, "step": 11, "at": "backward"}], flag, nproc=2) == 0, job.err
    assert len(pids(job, 0)) == 1
    if flag == "--buffers":
        check(job, undisturbed(flag, nproc=2), {1}, nproc=2)


def test_what_is_wrapped_around_that_which_is_attached_is_renewed_too(job: Job, undisturbed: Any) -> None:
    assert run(job, [{"rank": 1, "step": 11, "at": "backward"}], "--buffers", "--inner", nproc=2) == 0, job.err
    check(job, undisturbed("--buffers", nproc=2), {1}, nproc=2)


@pytest.mark.long
@pytest.mark.parametrize("at", ["forward", "backward"])
def test_exact_to_the_bit(job: Job, undisturbed: Any, at: str) -> None:
    kills = [{"rank": 1, "step": 11, "at": at}, {"rank": 0, "step": 19, "at": at}]
    assert run(job, kills, "--exact", "--dropout") == 0, job.err
    check(job, undisturbed("--exact", "--dropout"), {0, 1}, bits=True)


@pytest.mark.parametrize("how", ["stuck", pytest.param("gil", marks=pytest.mark.long)])
def test_one_that_does_not_get_out_is_killed_and_replaced(job: Job, undisturbed: Any, how: str) -> None:
    """It may keep all other threads of its process waiting, too."""
    kills = [
        {"rank": 2, "step": 11, "at": "after step", "how": how},
        {"rank": 1, "step": 12, "at": "forward", "after": 0},
    ]
    assert run(job, kills) == 0, job.err
    check(job, undisturbed(), {1, 2})
    [signalled] = job.events("ranks.signalled")
    assert signalled["ranks"] == [2] and "still in its world" in signalled["why"]


@pytest.mark.parametrize("how", ["stuck", "busy"])
def test_the_last_one_that_has_the_state_does_not_get_out(how: str, job: Job, undisturbed: Any) -> None:
    """It leaves it to the process that takes its place."""
    kills = [
        {"rank": 0, "step": 12, "at": "forward", "how": how},
        {"rank": 1, "step": 12, "at": "forward", "after": 0},
    ]
    assert run(job, kills, "--buffers", nproc=2) == 0, job.err
    check(job, undisturbed("--buffers", nproc=2), {0, 1}, nproc=2)
    [signalled] = job.events("ranks.signalled")
    assert signalled["ranks"] == [0] and "has left its state" in signalled["why"]


@pytest.mark.parametrize(
    "name", ["OSError", *(pytest.param(name, marks=pytest.mark.long) for name in ("ValueError", "RuntimeError"))]
)
def test_an_exception_of_the_programs_own_is_not_tried_again(job: Job, name: str) -> None:
    """The rank ends by it, and the others stay."""
    assert run(job, [{"rank": 1, "step": 11, "at": "forward", "raises": name}], "--train") == 0, job.err
    assert f"{name}: of the program's own" in job.err
    [incident] = job.incidents()
    assert (incident["kind"], incident["rank"]) == ("error", 1)
    assert [len(pids(job, rank)) for rank in range(3)] == [1, 2, 1]


@pytest.mark.parametrize("at", ["before step", pytest.param("backward", marks=pytest.mark.long)])
def test_a_group_of_the_programs_own_is_made_again_in_run_train(at: str, job: Job, undisturbed: Any) -> None:
    """Also where the end of the world is seen by run.step() alone."""
    assert run(job, [{"rank": 1, "step": 11, "at": at}], "--own", "--group", "--train") == 0, job.err
    check(job, undisturbed("--own"), {1})
    assert "do not outlive" not in job.err


def test_outside_of_it_nobody_stays_and_that_is_said(job: Job, undisturbed: Any) -> None:
    """A new rank would be alone where it is made. All go on from their last snapshot that was whole."""
    assert run(job, [{"rank": 1, "step": 11, "at": "backward"}], "--own", "--group") == 0, job.err
    assert job.leftovers() == []
    assert same(torch.load(job.folder / "weights.pt"), undisturbed("--own"), bits=False)
    assert all(len(pids(job, rank)) == 2 for rank in range(3))
    assert job.err.count("ranks do not outlive their worlds: new_group() is called outside of run.train()") == 2
    [incident] = job.incidents()
    assert "all ranks are started anew: new_group() is called outside of run.train()" in incident["action"]


@pytest.mark.long
def test_a_collective_of_the_programs_own(job: Job, undisturbed: Any) -> None:
    """With run.train it is begun again."""
    assert run(job, [{"rank": 1, "step": 11, "at": "before step"}], "--own", "--train") == 0, job.err
    check(job, undisturbed("--own"), {1})


def test_one_that_fails_outside_of_run_train_ends_its_rank_and_that_is_said(job: Job, undisturbed: Any) -> None:
    """What it was to return is missing, and nobody knows what the program does with it. Rank 1 dies while the others
    wait for it: one that hears of a death elsewhere stays."""
    kills = [
        {"rank": 1, "step": 11, "at": "forward", "how": "soon", "s": 1.0},
        {"rank": 1, "step": 11, "at": "backward", "how": "stuck"},
    ]
    assert run(job, kills, "--own") == 0, job.err
    assert job.leftovers() == []
    assert same(torch.load(job.folder / "weights.pt"), undisturbed("--own"), bits=False)
    assert (
        "its world was over: rank 1 failed: killed by SIGKILL; in run.train() this rank could have gone on" in job.err
    )


@pytest.mark.parametrize("flag", ["--stays=0", "--early"])
def test_a_program_that_cannot_stay_is_started_anew(job: Job, flag: str) -> None:
    assert run(job, [{"rank": 1, "step": 11, "at": "backward"}], flag) == 0, job.err
    assert all(len(pids(job, rank)) == 2 for rank in range(3))
    assert stayed(job) == [[], []]
    said = "ranks do not outlive their worlds: barrier() is called before run.attach(), and a new rank would be alone"
    assert (said in job.err) == (flag == "--early")
    assert len(job.incidents()) == 1


def test_what_has_a_process_group_of_its_own_is_named(job: Job) -> None:
    """And only that which does."""
    script = job.folder / "script.py"
    script.write_text(GROUPED)
    assert job.run(script, nproc=2) == 0, job.err
    said = "ranks do not outlive their worlds: a Grouped, which has a process group, cannot be given another"
    assert job.err.count(said) == 1


def test_a_mesh_of_the_programs_own_is_a_group_of_its_own(job: Job) -> None:
    script = job.folder / "script.py"
    script.write_text(MESH)
    assert job.run(script, nproc=2) == 0, job.err
    assert job.err.count("ranks do not outlive their worlds: new_group() is called outside of run.train()") == 1


@pytest.mark.parametrize(
    ("data", "said"),
    [("stream", "the data is a stream, and"), ("own", "run.step() is called without run.batches(), and")],
)
def test_with_data_of_which_a_new_rank_would_not_know_where_it_is(job: Job, data: str, said: str) -> None:
    script = job.folder / "script.py"
    script.write_text(LOADED)
    assert job.run(script, data, nproc=2, max_restarts=1) == 0, job.err
    assert stayed(job) == [[], []]
    assert job.err.count(f"ranks do not outlive their worlds: {said}") == 2, "once in each world"


def test_a_process_that_stands_by_takes_the_place_of_a_dead_one(job: Job) -> None:
    env = {"CHECKPOINT_DIR": str(job.folder / "saved")}
    flags = ("--standby=1",)
    job.start(SCRIPT, "--steps=20000", "--pace=0.02", nproc=2, max_restarts=2, flags=flags, env=env)
    job.wait_event("standby.ready")
    [standby] = job.events("standby.ready")
    assert standby["host_bytes"] > 10_000_000
    victim = job.wait_step(1, 1)["pid"]
    os.kill(victim, signal.SIGKILL)
    job.wait_event("standby.ready", times=2)  # another one is started
    job.wait_step(1, 1, generation=1)
    job.signal(signal.SIGTERM)
    assert job.wait() == 0, job.err
    assert pids(job, 1) == [victim, standby["pid"]] and len(pids(job, 0)) == 1
    assert all(done == list(range(done[0], done[-1] + 1)) for done in steps(job).values())
    assert len(job.events("standby.ready")) == 2
    notes = record.read(job.run_dir / record.NAME)
    names = [noted.what for noted in notes]
    second = next(at for at, what in enumerate(names) if isinstance(what, record.WorldStarted) and what.generation == 1)
    assert [each.pid for each in fold(notes[:second]).standing_by] == [standby["pid"]]
    assert fold(notes[: second + 1]).standing_by == []
    assert job.leftovers() == []


@pytest.mark.long
def test_those_that_go_with_their_zygote_do_not_stand_by(job: Job) -> None:
    env = {"CHECKPOINT_DIR": str(job.folder / "saved")}
    job.start(SCRIPT, "--steps=20000", "--pace=0.02", nproc=2, max_restarts=1, flags=("--standby=1",), env=env)
    job.wait_event("standby.ready")
    os.kill(job.process("holdfast zygote"), signal.SIGKILL)
    job.wait_event("standby.ended")
    for rank in (0, 1):
        job.wait_step(rank, 1, generation=1)
    job.signal(signal.SIGTERM)
    assert job.wait() == 0, job.err
    [standby, *_] = job.events("standby.ready")
    assert [ended["pid"] for ended in job.events("standby.ended")][:1] == [standby["pid"]]


def test_one_that_stood_by_and_was_killed_is_replaced(job: Job) -> None:
    env = {"CHECKPOINT_DIR": str(job.folder / "saved")}
    job.start(SCRIPT, "--steps=100000", "--pace=0.02", nproc=1, flags=("--standby=1",), env=env)
    job.wait_event("standby.ready")
    [first] = job.events("standby.ready")
    os.kill(first["pid"], signal.SIGKILL)
    job.wait_event("standby.ready", times=2)
    job.signal(signal.SIGTERM)
    assert job.wait() == 0, job.err
    assert [event["pid"] for event in job.events("standby.ended")][:1] == [first["pid"]]
    assert job.incidents() == [] and job.leftovers() == []


@pytest.mark.parametrize(
    "flag", ["--before", *(pytest.param(flag, marks=pytest.mark.long) for flag in ("--stays=0", "--early"))]
)
def test_a_program_that_cannot_stand_by(job: Job, flag: str) -> None:
    """The job trains on without."""
    env = {"CHECKPOINT_DIR": str(job.folder / "saved")}
    job.start(SCRIPT, "--steps=20000", "--pace=0.02", flag, nproc=1, flags=("--standby=1",), env=env)
    job.wait_event("standby.ended")
    job.wait_step(0, steps(job)[0][-1] + 30)
    job.signal(signal.SIGTERM)
    assert job.wait() == 0, job.err
    assert (
        "holdfast: no process stands by from now on: one ended before it was ready: holdfast: a program that stands by"
        in job.err
    )
    assert len(job.events("standby.ended")) == 1, "it is not tried again"


def test_hooks(job: Job, undisturbed: Any) -> None:
    assert run(job, [{"rank": 1, "step": 11, "at": "backward"}], "--hooks") == 0, job.err
    check(job, undisturbed(), {1})
    told = [(line["rank"], line["hook"], line["world"]) for line in job.news.seen if "hook" in line]
    for rank in (0, 2):
        assert [each[1:] for each in told if each[0] == rank] == [
            ("abort", True), ("abort again", True), ("aborted", True), ("health", True), ("rejoin", False)
        ]  # fmt: skip
    assert all(each[0] != 1 for each in told)


@pytest.mark.long
def test_one_that_says_that_it_is_not_healthy_is_replaced(job: Job, undisturbed: Any) -> None:
    assert run(job, [{"rank": 1, "step": 11, "at": "backward"}], "--hooks", "--unhealthy=2") == 0, job.err
    check(job, undisturbed(), {1, 2})
    assert "rank 2 is not healthy, by its own check, and ends" in job.err


def test_a_hook_that_raises_ends_its_rank_and_no_other(job: Job, undisturbed: Any) -> None:
    """As any error of the program's own."""
    assert run(job, [{"rank": 1, "step": 11, "at": "backward"}], "--hooks", "--raises=2") == 0, job.err
    check(job, undisturbed(), {1, 2})
    assert "LookupError: the lock was not mine" in job.err
    assert "could have gone on" not in job.err
