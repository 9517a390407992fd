"""On a GPU: two ranks, one is killed, and the other stays. From SIGKILL to the next step on both, with a state of 4 to
5 GB: a language model in bfloat16 with AdamW.

Both ranks are on one GPU, where NCCL refuses to be, and gloo would need seconds for 1.6 GB of gradients, so these are
not sent: both ranks have the same batch, and of each bucket one word goes through gloo. Their weights are compared
every few steps, bit for bit: a state that was handed over wrong would show. This file is the script, too.

`--nccl`: by NCCL all the same, with gradients that are sent. Each rank tells it that it is on a machine of its own, so
that they meet by sockets; that is slow, so the model is smaller. What NCCL does when a peer dies is the same."""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from bench.launchers import table, versions
from bench.survivors import measure
from bench.training import Decoder, Shape

OWN = Path(__file__).resolve()
BUCKET_MB = 400
SMALLER = "1024 8 16384 4 256"
COMPARED = 10  # steps from one comparison to the next
_cuda: Any = torch.cuda


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="of each")
    parser.add_argument("--pause", type=float, default=3.0, help="seconds between two kills, and a random part of one")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--nccl", action="store_true")
    args = parser.parse_args()
    if args.nccl:
        os.environ |= {"BACKEND": "nccl", "SHAPE": os.environ.get("SHAPE", SMALLER), "NCCL_SOCKET_IFNAME": "lo"}
    print(f"{_cuda.get_device_name()}, {versions()}")
    print(f"`{' '.join(['python -m bench.survivors_gpu', *sys.argv[1:]])}`\n", flush=True)
    rows = []
    kinds: tuple[tuple[str, list[str], float], ...] = (
        ("forked from the zygote", [], 0.7),
        ("standby", ["--standby=2"], 0.25),
    )
    for (name, flags, asked_s), snapshots in itertools.product(kinds, (True, False)):
        os.environ["MEMORY_EVERY"] = "" if snapshots else "0"
        with tempfile.TemporaryDirectory() as where:
            os.environ["SUMS"] = where
            measured = measure(name, 2, flags, args.kills, args.seed, OWN, args.pause)
            compared = same_weights(Path(where))
            size = float(Path(where, "size").read_text()) / 1e9
        times_s = sorted(ms / 1e3 for ms in measured.times_ms)
        median_s = statistics.median(times_s)
        row = [
            name,
            "as they come" if snapshots else "none",
            f"{size:.2f} GB",
            str(len(times_s)),
            f"{median_s:.2f} s",
            f"{times_s[int(0.9 * (len(times_s) - 1))]:.2f} s",
            f"{times_s[-1]:.2f} s",
        ]
        row += [str(measured.lost), str(compared), f"{asked_s} s", "met" if median_s <= asked_s else "not met"]
        print(" ".join(row), file=sys.stderr, flush=True)
        rows.append(row)
    columns = [
        "the new process",
        "snapshots",
        "state",
        "kills",
        "median",
        "90 %",
        "worst",
        "lost",
        "compared",
        "asked",
        "",
    ]
    print(table(columns, rows))


def same_weights(folder: Path) -> int:
    """How many pairs were compared."""
    sums = [dict(line.split() for line in Path(folder, f"sums.{rank}").read_text().splitlines()) for rank in (0, 1)]
    both = sums[0].keys() & sums[1].keys()
    for step in both:
        if sums[0][step] != sums[1][step]:
            raise SystemExit(f"after step {step} the two ranks differ")
    return len(both)


# -- the script -------------------------------------------------------------------------------------------------------


def train(folder: Path) -> None:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import TensorDataset

    import holdfast
    from bench import small

    shape = Shape(*map(int, os.environ.get("SHAPE", "2048 14 49152 4 256").split()))
    torch.use_deterministic_algorithms(True)
    backend = os.environ.get("BACKEND", "gloo")
    os.environ["NCCL_HOSTID"] = str(os.getpid())
    dist.init_process_group(backend)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_default_dtype(torch.bfloat16)
    with device:
        model = DistributedDataParallel(Decoder(shape), bucket_cap_mb=BUCKET_MB)
    if backend == "gloo":
        model.register_comm_hook(None, one_word)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    every = os.environ["MEMORY_EVERY"]
    run = holdfast.init(save_epochs=0, health_check_steps=0, memory_every=int(every) if every else None)
    run.attach(model=model, optimizer=optimizer)
    log = small.Log(folder)
    for _ in run.batches(TensorDataset(torch.zeros(1 << 20)), 2, epochs=1_000_000, shuffle=False):
        before, generation = run.steps_done, run.generation
        chance = torch.Generator().manual_seed(before)
        tokens = torch.randint(shape.vocabulary, (shape.batch, shape.sequence), generator=chance)
        loss = model(tokens.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()
        run.step()
        if run.steps_done > before:
            log.step(run.rank, generation, run.steps_done)
            if run.steps_done % COMPARED == 0:
                note(run.rank, run.steps_done, model, optimizer)


def note(rank: int, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    moments = [each for one in optimizer.state.values() for each in one.values() if each.dtype == torch.bfloat16]
    tensors = [*model.parameters(), *moments]
    words = torch.stack([tensor.detach().view(torch.int16).sum(dtype=torch.int64) for tensor in tensors])
    with open(Path(os.environ["SUMS"], f"sums.{rank}"), "a") as file:
        file.write(f"{step} {':'.join(map(str, words.tolist()))}\n")
    Path(os.environ["SUMS"], "size").write_text(str(sum(each.numel() * each.element_size() for each in tensors)))


def one_word(_, bucket):  # type: ignore[no-untyped-def]  # DDP wants its annotations as types, not as words
    torch.distributed.all_reduce(torch.zeros(1))
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


if __name__ == "__main__":
    if len(sys.argv) == 2 and os.path.isdir(sys.argv[1]):
        train(Path(sys.argv[1]))
    else:
        main()
