"""A transformer, sharded with FSDP2, that survives whatever happens to its processes, its nodes and its files.

    python train_pytorch_fsdp_elastic.py
    torchrun --nproc_per_node=2 train_pytorch_fsdp_elastic.py
    holdfast run --nproc-per-node=2 --max-restarts=3 train_pytorch_fsdp_elastic.py

A checkpoint after each epoch, `checkpoint_epoch_N.pt`, of which the last 3 are kept. Every start goes on at the exact
sample where the newest checkpoint, or what a killed rank left in memory, was made, with as many ranks as there are now.
On GPUs with NCCL where there is one for each rank, else on the CPU with gloo.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset

import holdfast

BLOCKS, WIDTH, HEADS, CONTEXT, VOCABULARY = 3, 32, 4, 16, 64
SAMPLES, HELD_OUT, NOISE = 1024, 128, 0.1


class Chains(Dataset[Tensor]):
    """Sequences in which each token follows from the one before, most of the time. There is something to learn, and the
    best loss is known: 0.73."""

    def __init__(self, samples: int, seed: int) -> None:
        chance = torch.Generator().manual_seed(seed)
        follows = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(0))
        tokens = [torch.randint(VOCABULARY, (samples,), generator=chance)]
        for _ in range(CONTEXT):
            stray = torch.randint(VOCABULARY, (samples,), generator=chance)
            strays = torch.rand(samples, generator=chance) < NOISE
            tokens.append(torch.where(strays, stray, follows[tokens[-1]]))
        self.tokens = torch.stack(tokens, dim=1)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Tensor:
        return self.tokens[index]


class Block(nn.Module):
    """Attention to what came before, then a small MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(2, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, dim=2))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """Log-probabilities of the next token, at every position."""

    def __init__(self, activation_checkpointing: bool) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self._recomputes = activation_checkpointing

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            # Activations of a block are computed again in the backward, not kept: less memory, a third more time.
            x = checkpoint(block, x, use_reentrant=False) if self._recomputes else block(x)
        return F.log_softmax(self.head(x), dim=2)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.nll_loss(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small transformer with FSDP2.")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32, help="of all ranks together, at any number of them")
    parser.add_argument("--micro-batch-size", type=int, help="of a rank; a step then accumulates several of them")
    parser.add_argument("--activation-checkpointing", action="store_true", help="recompute blocks in the backward")
    parser.add_argument("--checkpoint-dir", default=os.environ.get("CHECKPOINT_DIR", "checkpoints"), help="or s3://...")
    parser.add_argument("--keep", type=int, default=3, help="so many of the last checkpoints")
    parser.add_argument("--save-every-epochs", type=int, default=1)
    parser.add_argument("--save-every-steps", type=int)
    parser.add_argument("--save-every-minutes", type=float)
    parser.add_argument("--health-check-every", type=int, default=10, metavar="STEPS", help="0 for never")
    parser.add_argument("--health-check-timeout", type=float, default=10.0, metavar="SECONDS")
    parser.add_argument("--workers", type=int, default=0, help="processes that load data, for each rank")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def set_up() -> torch.device:
    """The process group, and where this rank computes."""
    local_rank, local_size = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    on_gpu = torch.cuda.device_count() >= local_size  # NCCL wants a GPU for each rank
    if on_gpu:
        torch.cuda.set_device(local_rank)
    backend = "nccl" if on_gpu else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:  # plain python: a world of one, which nobody has to find
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    return torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")


def main() -> nn.Module:
    args = parse_args()
    device = set_up()
    run = holdfast.init(
        checkpoints=args.checkpoint_dir, keep=args.keep, save_epochs=args.save_every_epochs,
        save_steps=args.save_every_steps, save_minutes=args.save_every_minutes,
        health_check_steps=args.health_check_every, health_check_s=args.health_check_timeout,
    )  # fmt: skip

    torch.manual_seed(args.seed)
    model = Transformer(args.activation_checkpointing).to(device)
    mesh = init_device_mesh(device.type, (run.world_size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    run.attach(model=model, optimizer=optimizer)  # says what training goes on from

    held_out = Chains(HELD_OUT, seed=args.seed + 1).tokens.to(device)
    data = run.batches(
        Chains(SAMPLES, args.seed), args.batch_size, micro_batch_size=args.micro_batch_size, epochs=args.epochs,
        seed=args.seed, num_workers=args.workers, pin_memory=device.type == "cuda",
    )  # fmt: skip
    epoch = run.epochs_done
    for tokens in data:
        loss = loss_of(model, tokens.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.step(loss=loss)  # a snapshot, a checkpoint, a health check, an orderly end: what is due
        if run.epochs_done > epoch:
            epoch = run.epochs_done
            with run.evaluating():
                held_out_loss = loss_of(model, held_out)
            if run.rank_zero:
                losses = f"loss {loss.item():.4f}   held out {held_out_loss.item():.4f}"
                print(f"epoch {epoch}/{args.epochs}   step {run.steps_done}   {losses}", flush=True)
    run.close()  # waits for what is still being written
    dist.destroy_process_group()
    return model


if __name__ == "__main__":
    kept = main()  # torch 2.13 can deadlock when a model is freed right after its last collective on gloo
