"""Train a small language model, a transformer, on this repository's own text, character by character.

    holdfast run --standalone --nproc-per-node=2 --max-restarts=3 examples/train_chars.py
    torchrun --standalone --nproc-per-node=2 examples/train_chars.py
    python examples/train_chars.py

Nothing in here knows the launcher. Whatever is killed, the next start goes on at the exact sample where the newest
checkpoint, or what the ranks left in memory, was made, with as many ranks as there are then.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

import holdfast

LAYERS, WIDTH, HEADS, CONTEXT = 2, 96, 4, 64
BATCH = 32  # sequences, of all ranks together
PEAK_RATE, WARMUP_STEPS = 4e-3, 20
# Newline and printable ASCII. It is the same for any text, so a trained model can read any text.
ALPHABET = "\n" + "".join(map(chr, range(32, 127)))


def encode(text: str) -> Tensor:
    """A token for each character: its place in the alphabet. Whatever is not ASCII is read as a question mark."""
    codes = torch.frombuffer(bytearray(text, "ascii", "replace"), dtype=torch.uint8).long()
    return (codes - 31).clamp(0, len(ALPHABET) - 1)


def decode(tokens: list[int]) -> str:
    return "".join(ALPHABET[token] for token in tokens)


def read_text(files: list[Path]) -> str:
    root = Path(__file__).resolve().parent.parent
    ours = sorted([*root.glob("README.md"), *root.glob("docs/*.md"), *root.glob("src/**/*.py")])
    text = "".join(file.read_text(encoding="utf-8") for file in files or ours)
    if len(text) <= CONTEXT:
        sys.exit(f"train_chars: {len(text)} characters are no text to train on; name files with --text")
    return text


def windows(tokens: Tensor, samples: int) -> TensorDataset:
    """Sequences, evenly spread over the text: CONTEXT tokens, and for each of them the one that follows."""
    starts = torch.arange(samples) * (len(tokens) - CONTEXT) // samples
    rows = tokens.unfold(0, CONTEXT + 1, 1)[starts]
    return TensorDataset(rows[:, :-1], rows[:, 1:])


class CharModel(nn.Module):
    """Logits for the next character, at every position."""

    def __init__(self) -> None:
        super().__init__()
        self.characters = nn.Embedding(len(ALPHABET), WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, len(ALPHABET))

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        x = self.characters(tokens) + self.positions.weight[: tokens.shape[1]]
        logits: Tensor = self.head(self.layers(x, mask=mask, is_causal=True))
        return logits


def write(model: nn.Module, prompt: str, size: int, device: torch.device) -> str:
    """What the model makes of the prompt, so many characters of it."""
    chance = torch.Generator().manual_seed(0)
    tokens: list[int] = encode(prompt).tolist()
    for _ in range(size):
        logits = model(torch.tensor([tokens[-CONTEXT:]], device=device))[0, -1].cpu()
        tokens.append(int(torch.multinomial(F.softmax(logits / 0.6, dim=0), 1, generator=chance)))
    return decode(tokens)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small character-level transformer.")
    parser.add_argument("--text", type=Path, nargs="+", default=[], help="files to train on, not this repository's own")
    parser.add_argument("--samples", type=int, default=440 * BATCH, help="sequences of the text in an epoch")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--save-every", type=int, default=50, metavar="STEPS")
    parser.add_argument("--checkpoint-dir", help="or s3://...; else $CHECKPOINT_DIR, else checkpoints")
    parser.add_argument("--exact", action="store_true", help="the same bits at any number of ranks, after any kills")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kill-rank", type=int, metavar="RANK", help="sabotage: this rank kills itself (SIGKILL)")
    parser.add_argument("--kill-at-step", type=int, metavar="STEP", help="after this step, in the first world only")
    return parser.parse_args()


def main() -> nn.Module:
    args = parse_args()
    local_rank, local_size = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    on_gpu = torch.cuda.device_count() >= local_size  # NCCL wants a GPU for each rank
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    if "RANK" in os.environ:  # else it runs alone
        dist.init_process_group("nccl" if on_gpu else "gloo")

    run = holdfast.init(checkpoints=args.checkpoint_dir, save_steps=args.save_every, exact=args.exact)
    torch.manual_seed(args.seed)
    tokens = encode(read_text(args.text))
    dataset = windows(tokens, args.samples)
    model = CharModel().to(device)
    trained = DistributedDataParallel(model) if dist.is_initialized() else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, weight_decay=0.01)
    steps = args.epochs * math.ceil(args.samples / BATCH)
    # Up in a line, down in a cosine to a tenth.
    scheduler = LambdaLR(
        optimizer, lambda n: min(1, (n + 1) / WARMUP_STEPS) * (0.55 + 0.45 * math.cos(math.pi * n / steps))
    )
    restored = run.attach(model=trained, optimizer=optimizer, scheduler=scheduler, first_loss=0.0, last_loss=0.0)
    if run.rank_zero and restored is None:
        size, where = sum(p.numel() for p in model.parameters()), f"{run.world_size} x {device.type}"
        print(f"training begins: {size:,} parameters, {len(tokens):,} characters, {where}", flush=True)

    for inputs, targets in run.batches(dataset, BATCH, epochs=args.epochs, seed=args.seed):
        if (run.generation, run.rank, run.steps_done) == (0, args.kill_rank, args.kill_at_step):
            os.kill(os.getpid(), signal.SIGKILL)
        loss = F.cross_entropy(trained(inputs.to(device)).flatten(0, 1), targets.to(device).flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        scheduler.step()
        run.state["last_loss"] = loss.item()
        if run.steps_done == 0:
            run.state["first_loss"] = loss.item()
        run.step(loss=loss)

    run.close()  # waits for what is still being written
    if run.rank_zero:
        with run.evaluating():
            lines = write(model, "def ", 200, device).rstrip().splitlines()
        first, last = run.state["first_loss"], run.state["last_loss"]
        print(f"loss {first:.2f} at the beginning, {last:.2f} at the end. The model writes:")
        print("\n".join(f"    | {line}" for line in lines), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()
    return trained


if __name__ == "__main__":
    kept = main()  # torch 2.13 can deadlock when a model is freed right after its last collective on gloo
