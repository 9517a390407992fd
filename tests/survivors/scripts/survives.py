"""A training whose ranks outlive their worlds. `--kills` is a list of who dies, where, and in which step."""

from __future__ import annotations

import argparse
import builtins
import ctypes
import hashlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import TensorDataset

import holdfast
from holdfast.checkpoint import faultpoints
from holdfast.checkpoint.writing import Desk
from holdfast.training import handover
from holdfast.worker import contexts

WIDTH = 8
STATE = Path(os.environ["STATE"])


class Kills:
    """Each comes once, in whichever world gets that far."""

    def __init__(self, planned: list[dict[str, Any]]) -> None:
        self._planned = planned
        self.step = 0

    def planned_at(self, where: str) -> bool:
        return any(kill["at"] == where for kill in self._planned)

    def at(self, point: str) -> None:
        for number, kill in enumerate(self._planned):
            early = int(os.environ["HOLDFAST_GENERATION"]) < kill.get("generation", 0)
            here = kill["at"] == point and kill["rank"] == int(os.environ["RANK"])
            if here and not early and self.step >= kill.get("step", 0):
                try:
                    os.close(os.open(STATE / f"killed.{number}", os.O_CREAT | os.O_EXCL))
                except FileExistsError:
                    continue
                awaited = kill.get("until", f"killed.{kill.get('after', number)}")
                while not (STATE / awaited).exists():
                    time.sleep(0.005)
                if (name := kill.get("raises")) is not None:
                    raise getattr(builtins, name)("of the program's own")
                if kill.get("how") == "waits":  # and goes on
                    return
                if kill.get("how") == "stuck":
                    time.sleep(60)
                if kill.get("how") == "gil":
                    ctypes.PyDLL(None).sleep(60)
                if kill.get("how") == "busy":
                    until_s = time.monotonic() + 60
                    while time.monotonic() < until_s:
                        torch.ones(100) @ torch.ones(100)
                if kill.get("how") == "soon":  # in what comes next
                    threading.Timer(kill["s"], os.kill, (os.getpid(), signal.SIGKILL)).start()
                    return
                os.kill(os.getpid(), signal.SIGKILL)


def watch(kills: Kills) -> None:
    """What Holdfast itself does: each effect of a copy into memory, a save that the writer was asked for, and a piece
    of a state that was sent to several."""
    faultpoints.passed = kills.at

    def then(owner: type, name: str, where: str) -> None:
        call = getattr(owner, name)

        def called(*args: Any) -> None:
            call(*args)
            kills.at(where)

        setattr(owner, name, called)

    then(Desk, "save", "handed over")
    then(handover.Broadcast, "send", "sent")
    if kills.planned_at("sent"):
        handover.CHUNK_BYTES = 1024  # so that there is more than one


class Watched:
    """A part of the state that is asked for when it is saved or handed over, and told when it is loaded."""

    def __init__(self, kills: Kills) -> None:
        self._kills = kills

    def state_dict(self) -> dict[str, int]:
        self._kills.at("state")
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._kills.at("load")


class Counts(nn.Module):
    """By a buffer that is another tensor after each forward."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + 1
        return x


class Tally:
    def __init__(self) -> None:
        self.counts = [0, 0]

    def add(self, samples: int) -> None:
        self.counts[0] += 1
        self.counts[1] += samples

    def state_dict(self) -> dict[str, Any]:
        return {"counts": self.counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.counts = state["counts"]


def say(run: holdfast.Run, **more: Any) -> None:
    line = {"rank": run.rank, "generation": run.generation, "pid": os.getpid(), "world_size": run.world_size, **more}
    line |= {"node": int(os.environ.get("NODE", "0")), "run_id": os.environ["TORCHELASTIC_RUN_ID"]}
    line |= {"restart_count": int(os.environ["TORCHELASTIC_RESTART_COUNT"])}
    with open(os.environ["NEWS"], "w") as news:
        news.write(json.dumps(line) + "\n")


def digest(model: nn.Module) -> str:
    made = hashlib.sha256()
    for value in model.state_dict().values():
        made.update(value.numpy().tobytes())
    return made.hexdigest()


def _then(output: torch.Tensor, call: Callable[[], None]) -> None:
    """As its backward begins."""
    if output.requires_grad:
        output.register_hook(lambda _: call())  # type: ignore[no-untyped-call]


def sharded(model: nn.Sequential) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    return model


def add_hooks(run: holdfast.Run, unhealthy: int, raises: int) -> None:
    for moment, name in [("abort", "abort"), ("abort", "abort again"), ("aborted", "aborted"), ("rejoin", "rejoin")]:
        run.on(moment)(lambda name=name: say(run, hook=name, world=dist.is_initialized()))

    @run.on("health")
    def healthy() -> bool:
        say(run, hook="health", world=dist.is_initialized())
        return run.rank != unhealthy

    @run.on("aborted")
    def lets_go() -> None:
        if run.rank == raises:
            raise LookupError("the lock was not mine")


def flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=json.loads, default=[])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--pace", type=float, default=0.0)
    parser.add_argument("--buffers", action="store_true", help="and all else that a step changes besides weights")
    parser.add_argument("--dropout", action="store_true")
    parser.add_argument("--hidden", type=int, default=32, help="neurons: of many, a message has megabytes")
    parser.add_argument("--train", action="store_true", help="by run.train")
    parser.add_argument("--own", action="store_true", help="a collective of its own in each step")
    parser.add_argument("--group", action="store_true", help="that is in a group of its own")
    parser.add_argument("--before", action="store_true", help="and that was made before run.attach()")
    parser.add_argument("--early", action="store_true", help="a collective of its own before run.attach()")
    parser.add_argument("--per-rank", action="store_true")
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--stays", type=int, default=1)
    parser.add_argument("--fsdp", action="store_true")
    parser.add_argument("--inner", action="store_true", help="attached is what is in DDP, not DDP")
    parser.add_argument("--memory-every", type=int, default=2, help="steps; 0: nothing is copied but what is saved")
    parser.add_argument("--hooks", action="store_true")
    parser.add_argument("--unhealthy", type=int, default=-1, help="the rank")
    parser.add_argument("--save-epochs", type=int, default=0)
    parser.add_argument("--gpu", type=int, default=-1, help="that the model is said to be on")
    parser.add_argument("--raises", type=int, default=-1, help="the rank whose hook does")
    return parser.parse_args()


def network(args: argparse.Namespace) -> tuple[nn.Sequential, nn.Linear]:
    """With its first layer, in which a forward begins and a backward ends."""
    torch.manual_seed(0)
    first = nn.Linear(WIDTH, args.hidden)
    layers: list[nn.Module] = [Counts()] if args.buffers else []
    layers += [first, nn.GELU()]
    layers += [nn.BatchNorm1d(args.hidden)] if args.buffers else []
    layers += [nn.Dropout(0.2)] if args.dropout else []
    return nn.Sequential(*layers, nn.Linear(args.hidden, WIDTH)), first


def watch_step(kills: Kills, first: nn.Linear, fsdp: bool) -> None:
    """What the program does itself."""
    first.register_forward_hook(lambda *_: kills.at("forward"))
    if fsdp:  # a gradient of a shard is there after its reduction only
        first.register_forward_hook(lambda *given: _then(given[-1], lambda: kills.at("backward")))
    else:
        first.weight.register_hook(lambda _: kills.at("backward"))  # type: ignore[no-untyped-call]
    register_optimizer_step_pre_hook(lambda *_: kills.at("before step"))
    register_optimizer_step_post_hook(lambda *_: kills.at("after step"))


def main() -> nn.Module:
    args = flags()
    kills = Kills(args.kills)
    kills.at("import")
    watch(kills)
    if args.gpu >= 0:
        contexts.in_use = lambda modules: int(args.gpu)

    dist.init_process_group("gloo")
    if args.early:
        dist.barrier()
    before = dist.new_group() if args.before else None
    plain, first = network(args)
    model: nn.Module = sharded(plain) if args.fsdp else DistributedDataParallel(plain)
    average, tally = AveragedModel(plain if args.buffers else nn.Identity()), Tally()
    others = {"average": average, "tally": tally, "tokens": 0} if args.buffers else {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
    data = torch.randn(args.steps * 16, WIDTH)
    dataset = TensorDataset(data, data.roll(1, dims=1).sin(), torch.arange(len(data)))
    run = holdfast.init(
        save_epochs=args.save_epochs, save_steps=10, health_check_steps=5, exact=args.exact, stays=bool(args.stays),
        memory_every=args.memory_every,
    )  # fmt: skip
    run.attach(
        model=plain if args.inner else model, optimizer=optimizer, scheduler=scheduler, watched=Watched(kills), **others
    )
    if args.hooks:
        add_hooks(run, args.unhealthy, args.raises)
    torch.manual_seed(run.rank)  # for dropout
    watch_step(kills, first, args.fsdp)

    def train() -> None:
        group = dist.new_group() if args.group else before
        for x, y, used in run.batches(dataset, 16, epochs=1, shuffle=False, per_rank=args.per_rank):
            kills.step = run.steps_done + 1
            if args.buffers:
                tally.add(len(x))
                run.state["tokens"] += len(x)
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            if args.own:
                dist.all_reduce(torch.ones(1), group=group)
            optimizer.step()
            scheduler.step()
            if args.buffers:
                average.update_parameters(plain)
            done = {"rate": optimizer.param_groups[0]["lr"], "ranks": run.world_size}
            run.step(loss=loss)
            if run.steps_done == kills.step:  # else this one could not be done
                done |= {"used": used.tolist(), "weights": digest(plain)} if args.per_rank else {}
                say(run, step=run.steps_done, **done)
            time.sleep(args.pace)

    if args.train:
        run.train(train)
    else:
        train()
    if args.fsdp:
        whole = {name: value.full_tensor() for name, value in plain.state_dict().items()}
        if run.rank_zero:
            torch.save(whole, STATE / "weights.pt")
    elif run.rank_zero:
        state: list[Any] = [plain.state_dict(), optimizer.state_dict(), scheduler.state_dict()]
        state += [average.state_dict(), tally.counts, run.state["tokens"]] if args.buffers else []
        torch.save(state, STATE / "weights.pt")
    run.close()
    dist.destroy_process_group()
    return model


if __name__ == "__main__":
    kept = main()  # torch 2.13 can deadlock when a model is freed right after its last collective on gloo
    sys.exit(0)
