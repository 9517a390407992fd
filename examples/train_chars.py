"""Train a small character-level transformer on this repository's own text, with checkpoints.

    holdfast run --standalone --nproc-per-node=2 examples/train_chars.py
    torchrun --standalone --nproc-per-node=2 examples/train_chars.py
    python examples/train_chars.py

Nothing in here knows the launcher. It saves a checkpoint every so many steps, holdfast keeps newer snapshots in memory,
and the script begins from the newest that it finds.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import holdfast

LAYERS, WIDTH, HEADS, CONTEXT = 2, 96, 4, 64
BATCH = 16  # sequences for each rank
PEAK_RATE, WARMUP_STEPS = 4e-3, 20
# Newline and printable ASCII. A fixed alphabet: a checkpoint fits even when the text has changed since.
ALPHABET = "\n" + "".join(map(chr, range(32, 127)))


class CharModel(nn.Module):
    """Logits for the next character, at every position."""

    def __init__(self) -> None:
        super().__init__()
        self.characters = nn.Embedding(len(ALPHABET), WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, LAYERS, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, len(ALPHABET))

    def forward(self, text: Tensor) -> Tensor:
        size = text.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(size, device=text.device)
        x = self.characters(text) + self.positions.weight[:size]
        logits: Tensor = self.head(self.layers(x, mask=mask, is_causal=True))
        return logits


def read_text() -> Tensor:
    """The repository's documents and sources as indices into the alphabet."""
    root = Path(__file__).resolve().parent.parent
    files = sorted([*root.glob("README.md"), *root.glob("docs/*.md"), *root.glob("src/**/*.py")])
    text = "".join(file.read_text(encoding="utf-8") for file in files)
    if len(text) <= CONTEXT:
        sys.exit(f"train_chars: no text to train on in {root}: it wants README.md, docs/*.md and src/**/*.py")
    indices = bytes(max(0, ALPHABET.find(chr(byte))) for byte in range(256))
    return torch.frombuffer(bytearray(text.encode("ascii", "replace").translate(indices)), dtype=torch.uint8).long()


def batch_of(text: Tensor, seed: int, rank: int, step: int) -> tuple[Tensor, Tensor]:
    """The same batch for the same step, whichever world asks for it: a step done twice is done alike."""
    chance = torch.Generator().manual_seed(hash((seed, rank, step)) & 0xFFFFFFFF)
    starts = torch.randint(len(text) - CONTEXT, (BATCH, 1), generator=chance)
    rows = text[starts + torch.arange(CONTEXT + 1)]
    return rows[:, :-1], rows[:, 1:]


def learning_rate(step: int, steps: int) -> float:
    """Up in a line, down in a cosine to a tenth."""
    warm = min(1.0, step / WARMUP_STEPS)
    return PEAK_RATE * warm * (0.55 + 0.45 * math.cos(math.pi * step / max(1, steps)))


@torch.no_grad()
def sample(model: nn.Module, prompt: str, size: int, seed: int, device: torch.device) -> str:
    chance = torch.Generator().manual_seed(seed)
    text = [ALPHABET.index(character) for character in prompt]
    for _ in range(size):
        logits = model(torch.tensor([text[-CONTEXT:]], device=device))[0, -1].cpu()
        text.append(int(torch.multinomial(F.softmax(logits / 0.6, dim=0), 1, generator=chance)))
    return "".join(ALPHABET[i] for i in text)


class Progress:
    """One live line on a terminal, a line every so often elsewhere."""

    def __init__(self, steps: int, tokens_per_step: int) -> None:
        self._steps = steps
        self._tokens_per_step = tokens_per_step
        self._live = sys.stdout.isatty()
        self._since_s, self._since_step = time.monotonic(), -1
        generation = os.environ.get("HOLDFAST_GENERATION")
        self._world = "" if generation is None else f"   world {generation}"

    def show(self, step: int, loss: float) -> None:
        now_s = time.monotonic()
        done = step - self._since_step
        due = now_s - self._since_s >= 0.1 if self._live else step % 20 == 0
        if self._since_step < 0:  # the first step of a world is not typical: it is not timed
            speed, due = "", True
        else:
            speed = f"{done * self._tokens_per_step / max(now_s - self._since_s, 1e-9):8,.0f} tokens/s"
        if due or step == self._steps:
            self._since_s, self._since_step = now_s, step
            self._write(f"step {step:4}/{self._steps}   loss {loss:5.3f}   {speed:17}{self._world}")

    def _write(self, line: str) -> None:
        sys.stdout.write(f"\r\x1b[K{line}" if self._live else f"{line}\n")
        sys.stdout.flush()

    def end(self) -> None:
        if self._live and self._since_step >= 0:
            sys.stdout.write("\n")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small character-level transformer.")
    parser.add_argument("--steps", type=int, default=440)
    parser.add_argument("--save-every", type=int, default=50, metavar="STEPS")
    parser.add_argument("--checkpoint-dir", type=Path, default=Path(os.environ.get("CHECKPOINT_DIR", "checkpoints")))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kill-rank", type=int, metavar="RANK", help="sabotage: this rank kills itself (SIGKILL)")
    parser.add_argument("--kill-at-step", type=int, metavar="STEP", help="after this step, in the first world only")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local_rank, local_size = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    first_world = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    on_gpu = torch.cuda.device_count() >= local_size  # NCCL wants a GPU for each rank
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if on_gpu else "gloo")

    torch.manual_seed(args.seed)
    text = read_text()
    model = CharModel().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, weight_decay=0.01)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "first_loss": math.nan, "last_loss": math.nan}
    checkpointer = holdfast.Checkpointer(args.checkpoint_dir, state, every_steps=args.save_every)
    restored = checkpointer.restore()  # it says what training goes on from
    step = restored.step if restored else 0
    if rank == 0 and restored is None:
        size = sum(p.numel() for p in model.parameters())
        where = f"{world_size} x {device.type}"
        print(f"training begins: {size:,} parameters, {len(text):,} characters, {where}", flush=True)

    trained = DistributedDataParallel(model) if dist.is_initialized() else model
    progress = Progress(args.steps, BATCH * CONTEXT * world_size)
    while step < args.steps:
        if first_world and rank == args.kill_rank and step == args.kill_at_step:
            os.kill(os.getpid(), signal.SIGKILL)
        inputs, targets = (part.to(device) for part in batch_of(text, args.seed, rank, step))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step + 1, args.steps)
        loss = F.cross_entropy(trained(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        step += 1
        state["last_loss"] = loss.item()
        if step == 1:
            state["first_loss"] = state["last_loss"]
        if rank == 0:
            progress.show(step, state["last_loss"])
        checkpointer.step(step)
    checkpointer.save(step, blocking=True)
    if rank == 0:
        progress.end()
        first, last = state["first_loss"], state["last_loss"]
        print(f"loss {first:.2f} at the beginning, {last:.2f} at the end. The model writes:")
        written = sample(model, "def ", 200, args.seed, device)
        print("".join(f"    | {line}\n" for line in written.rstrip().splitlines()), end="", flush=True)
    checkpointer.close()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
