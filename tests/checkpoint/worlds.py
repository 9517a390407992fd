"""Ranks of a world as real processes, forked from one that has imported torch, and what they do in tests.

A store in a file stands in for one by TCP: torch looks up names for each connection of the latter, and that can take
seconds where many are made.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import holdfast
from holdfast.checkpoint.slots import Slot

WAIT_S = 100.0
PRELOAD = ["torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint"]
KEPT: list[object] = []  # torch 2.13 can deadlock when a model is freed right after its last collective

Work = Callable[..., Any]


def run(size: int, work: Work, *args: Any, port: int = 0) -> list[Any]:
    """What `work(rank, size, *args)` returns on each rank. Raises AssertionError with all that went wrong. With a port
    rank 0 has the store, as where nobody else does."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, "holdfast.checkpoint.checkpointer"])
    with tempfile.TemporaryDirectory(prefix="holdfast-test-") as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(size)]
        store = f"tcp://127.0.0.1:{port}" if port else f"file://{folder}/store"
        ranks = [
            context.Process(target=_rank, args=(rank, size, store, pipes[rank][1], work, args)) for rank in range(size)
        ]
        try:
            for process, (_, theirs) in zip(ranks, pipes, strict=True):
                process.start()
                theirs.close()
            answers = [_answer(ours) for ours, _ in pipes]
        finally:
            for process in ranks:
                process.join(10)
                process.kill()
                process.join()
    wrong = [f"rank {rank} of {size}:\n{text}" for rank, (ok, text) in enumerate(answers) if not ok]
    assert not wrong, "\n".join(wrong)
    return [answer for _, answer in answers]


def _answer(pipe: Any) -> tuple[bool, Any]:
    if not pipe.poll(WAIT_S):
        return False, f"no answer within {WAIT_S:g} s"
    try:
        ok, answer = pipe.recv()
    except EOFError:
        return False, "it ended without an answer"
    return ok, answer


def _rank(rank: int, size: int, store: str, pipe: Any, work: Work, args: tuple[Any, ...]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    try:
        answer = True, work(rank, size, *args)
    except BaseException:
        answer = False, traceback.format_exc()
    pipe.send(answer)
    pipe.close()
    if answer[0]:
        dist.destroy_process_group()
    else:
        sys.stderr.flush()
        os._exit(1)  # the others may wait for this one


# -- a state of any shapes ---------------------------------------------------------------------------------------------


def shapes(seed: int) -> Iterator[tuple[int, ...]]:
    """Fewer rows than ranks, rows that no number of ranks divides, one row, and one dimension."""
    dice = random.Random(seed)
    yield from [(1,), (2, 3), (7, 5), (8, 4)]
    for _ in range(6):
        yield tuple(dice.randrange(1, 14) for _ in range(dice.randrange(1, 4)))


class Bag(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.bag = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in shapes(11)])
        self.brief = nn.Linear(3, 5, bias=False, dtype=torch.bfloat16)  # 5 rows of two bytes
        self.norm = nn.BatchNorm1d(3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        total = self.norm(inputs).square().mean()
        for number, parameter in enumerate(self.bag, 1):
            total = total + (parameter * parameter).sum() * number * inputs.mean()
        return total + self.brief(inputs.to(torch.bfloat16)).float().sum()  # type: ignore[no-any-return]


class Scalar(nn.Module):
    """FSDP takes no parameters without a dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.zeros(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.value * inputs.mean()


def ddp(module: nn.Module) -> nn.Module:
    wrapped = DistributedDataParallel(module)
    KEPT.append(wrapped)
    return wrapped


def fsdp(module: nn.Module) -> nn.Module:
    if isinstance(module, Bag):
        fully_shard(module.brief)  # it wants one type in a group
    fully_shard(module)
    return module


def a_state(seed: int) -> dict[str, Any]:
    models = {"model": ddp(Bag(seed)), "extra": ddp(Scalar()), "sharded": fsdp(Bag(seed + 1))}
    state: dict[str, Any] = dict(models)
    for name, model in models.items():
        optimizer = "optimizer" if name == "model" else f"{name}_optimizer"
        state[optimizer] = torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=name == "sharded")
    return state


def train(state: dict[str, Any], rank: int, step: int) -> None:
    for model in (value for value in state.values() if isinstance(value, nn.Module)):
        seed = torch.Generator().manual_seed(100 * step + rank)  # so that buffers differ from rank to rank
        model(torch.randn(4, 3, generator=seed)).backward()
    for optimizer in (value for value in state.values() if isinstance(value, torch.optim.Optimizer)):
        optimizer.step()
        optimizer.zero_grad()


def whole(value: Any) -> Any:
    """With full tensors in place of sharded ones, and without wrappers. All ranks call it."""
    if isinstance(value, DistributedDataParallel):
        value = value.module
    if hasattr(value, "state_dict"):
        value = value.state_dict()
    if isinstance(value, DTensor):
        return value.full_tensor().detach().clone()
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    return [whole(item) for item in value] if isinstance(value, list) else value


# -- what ranks do -----------------------------------------------------------------------------------------------------


def save(rank: int, size: int, folder: Path) -> None:
    """Steps 1, 2 and 3, and the epoch's file of step 4; beside them what they must be."""
    state = a_state(1)
    checkpointer = holdfast.Checkpointer(folder / "checkpoints", state, keep=0)
    assert checkpointer.restore() is None
    for step in (1, 2, 3, 4):
        train(state, rank, step)
        epoch = 1 if step == 4 else None
        assert checkpointer.save(step, epoch=epoch, metrics={"loss": 1.0 / step})
        expected = {name: whole(value) for name, value in state.items()}
        if rank == 0:
            torch.save(expected, folder / f"expected-{step}.pt")
        train(state, rank, 10 + step)  # beside the copy
        assert checkpointer.wait() == step
    checkpointer.close()


def restore(rank: int, size: int, folder: Path) -> list[Any]:
    """Each checkpoint, into states that have trained and that have not, sharded and not."""
    from states import same

    checkpointer = holdfast.Checkpointer(folder / "checkpoints", {}, memory_every=0)
    names = []

    def check(which: str, step: int, state: dict[str, Any], names_in_it: dict[str, str] | None = None) -> None:
        checkpointer.state = state
        restored = checkpointer.restore(which)
        assert restored is not None and restored.step == step and restored.world_size == 4
        expected = torch.load(folder / f"expected-{step}.pt")
        for name, value in state.items():
            found = whole(value)
            assert same(found, expected[name]), f"{which} at {size} ranks: {name} is {found}, not {expected[name]}"
        names.append(restored.name)

    fresh = a_state(50)
    check("epoch:1", 4, fresh)
    check("step:3", 3, fresh)
    trained = a_state(60)
    train(trained, rank, 99)
    check("step:2", 2, trained)
    # What was saved sharded goes into what is not, and the other way round.
    check("step:1", 1, {"model": fsdp(Bag(70)), "sharded": ddp(Bag(80))})
    check("epoch:1", 4, {"model": fsdp(Bag(70)), "sharded": Bag(80)})
    checkpointer.close()
    return names


def restore_latest(rank: int, size: int, folder: Path) -> tuple[int, bool]:
    """Only what is sharded, so that each rank reads its own part."""
    from states import same

    model = fsdp(Bag(50))
    checkpointer = holdfast.Checkpointer(folder / "checkpoints", {"sharded": model}, memory_every=0)
    restored = checkpointer.restore()
    assert restored is not None
    expected = torch.load(folder / f"expected-{restored.step}.pt")["sharded"]
    found = restored.step, same(whole(model), expected)
    checkpointer.close()
    return found


def accumulate(rank: int, size: int, folder: Path) -> None:
    """Gradients of two micro-batches that only this rank has seen; saved, and back in another model."""
    model = ddp(nn.Linear(3, 2))
    accumulation = holdfast.GradientAccumulation(model)
    for number in (1, 2):
        with model.no_sync():  # type: ignore[operator]
            model(torch.full((2, 3), number + 10.0 * rank)).sum().backward()
        accumulation.position = number
    sums = {name: _summed(parameter) for name, parameter in model.named_parameters()}
    state = {"model": model, "accumulation": accumulation}
    checkpointer = holdfast.Checkpointer(folder / "checkpoints", state)
    checkpointer.save(1, blocking=True)
    again = ddp(nn.Linear(3, 2))
    checkpointer.state = {"model": again, "accumulation": holdfast.GradientAccumulation(again)}
    for which in ("latest", "step:1"):  # from memory, and from disk
        assert checkpointer.restore(which) is not None
        assert {name: _summed(parameter) for name, parameter in again.named_parameters()} == sums
    checkpointer.close()


def _summed(parameter: nn.Parameter) -> list[float]:
    assert parameter.grad is not None
    total = parameter.grad.clone()
    dist.all_reduce(total)
    return total.flatten().tolist()


@contextlib.contextmanager
def _held(slots: list[Slot]) -> Iterator[None]:
    """As a writer holds what it reads: locks are a process's."""
    ready, told = os.pipe()
    over, say_over = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(say_over)
        assert all(slot.lock() for slot in slots)
        os.write(told, b"1")
        os.read(over, 1)
        os._exit(0)
    os.read(ready, 1)
    yield
    os.close(say_over)
    os.waitpid(child, 0)
    for fd in (ready, told, over):
        os.close(fd)


def keep_together(rank: int, size: int, folder: Path) -> list[tuple[int, str]]:
    """One rank has no memory free, or a writer that does not write. All skip, and none waits for it."""
    from desks import last_writer

    x = torch.zeros(10)
    model = ddp(nn.Linear(3, 2))
    accumulation = holdfast.GradientAccumulation(model)
    accumulation.position = 1
    state: dict[str, Any] = {"x": x, "accumulation": accumulation}
    checkpointer = holdfast.Checkpointer(folder / "checkpoints", state, memory_every=0, keep=0)
    ends = []

    def save(step: int) -> bool:
        model(torch.ones(1, 3)).sum().backward()  # a collective: it deadlocks where a rank waits elsewhere
        return checkpointer.save(step)

    def wait(step: int) -> None:
        try:
            assert checkpointer.wait() == step
            ends.append((step, "saved"))
        except holdfast.CheckpointError as failure:
            ends.append((step, str(failure).partition(": ")[2]))

    assert save(1)
    wait(1)
    with _held(checkpointer._snapshots._slots if rank == 1 else []):
        state["new"] = torch.zeros(3)  # so that the ranks have to agree on what it is
        assert save(2) is (rank == 0)
        wait(2) if rank == 0 else ends.append((2, "declined"))
    assert save(3)
    wait(3)
    writer = last_writer()
    if rank == 1:
        os.kill(writer, signal.SIGSTOP)
    taken = [save(step) for step in (4, 5, 6, 7)]
    assert taken == [True, True, False, False]
    dist.barrier()
    if rank == 1:
        os.kill(writer, signal.SIGCONT)
    wait(5)
    assert save(8)
    wait(8)
    checkpointer.close()
    return ends


def differ(rank: int, size: int, folder: Path) -> str:
    checkpointer = holdfast.Checkpointer(folder / "checkpoints", {"x": torch.zeros(3 + rank)})
    try:
        checkpointer.save(1)
    except holdfast.CheckpointError as failure:
        return str(failure)
    finally:
        checkpointer.close()
    return ""


def save_in_time(rank: int, size: int, folder: Path) -> tuple[list[int], int]:
    """By the clock of one rank, at the same steps on all. Then rank 0 ends, and its store with it, before the others
    have heard what became of the last save."""
    x = torch.zeros(10)
    checkpointer = holdfast.Checkpointer(folder / "checkpoints", {"x": x}, every_minutes=1e-6, memory_every=0, keep=0)
    saved: list[int] = []
    step = 0
    while len(saved) < 3:
        step += 1
        x.fill_(step)
        dist.all_reduce(torch.zeros(1))
        checkpointer.step(step)
        if (done := checkpointer.wait()) is not None:
            saved.append(done)
    pid = [os.getpid()]
    dist.broadcast_object_list(pid, 0)
    if rank == 0:
        checkpointer.save(step + 1)
    else:
        fd = os.pidfd_open(pid[0])
        checkpointer.save(step + 1)
        assert select.select([fd], [], [], WAIT_S)[0]
        checkpointer.close()
    return saved, step + 1


def use_own_disks(rank: int, size: int, folder: Path) -> str:
    """As on two nodes without a shared filesystem."""
    from states import same

    own = folder / f"disk-{rank}"

    def train_and_save(state: dict[str, Any]) -> dict[int, Any]:
        checkpointer = holdfast.Checkpointer(own, state, keep=0, shared=False, memory_every=0)
        expected = {}
        for step in (1, 2, 3):
            train(state, rank, step)
            checkpointer.save(step, blocking=True)
            expected[step] = {name: whole(value) for name, value in state.items()}
        checkpointer.close()
        return expected

    def restored(which: str | None = None) -> int | None:
        state = {name: value for name, value in a_state(9).items() if "sharded" in name or name == "model"}
        checkpointer = holdfast.Checkpointer(own, state, shared=False, memory_every=0)
        try:
            found = checkpointer.restore(which)
        finally:
            checkpointer.close()
        if found is None:
            return None
        if rank == 0:  # the others' buffers are their own
            assert same({name: whole(value) for name, value in state.items()}, expected[found.step])
        else:
            KEPT.append({name: whole(value) for name, value in state.items()})
        return found.step

    first = a_state(1)
    expected = train_and_save({name: value for name, value in first.items() if "sharded" in name or name == "model"})
    assert restored() == 3
    dist.barrier()
    if rank == 1:
        shutil.rmtree(own / "step_00000003")
    dist.barrier()
    assert restored() == 2
    for which in ("step:3", "epoch:1"):  # who has it fails with who has not
        try:
            restored(which)
        except holdfast.CheckpointError as failure:
            assert f"{which} is not in" in str(failure)
        else:
            raise AssertionError(f"{which} was restored")
    dist.barrier()
    if rank == 1:
        shutil.rmtree(own)
    dist.barrier()
    assert restored() is None
    try:
        holdfast.Checkpointer(own, {})
    except holdfast.CheckpointError as failure:
        return str(failure)
    return ""
