"""On a GPU: from a rank's process start to its first matmul and first training step, and recovery of NCCL training."""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.launchers import table

# Writes lines `what seconds` to a file; kills itself with SIGKILL until it has been restarted often enough.
SCRIPT = """
import os, signal, sys, time
import torch
import torch.distributed as dist

def note(what, seconds):
    with open(sys.argv[1], "a") as file:
        file.write(f"{what} {seconds}\\n")

def since_start():
    ticks = int(open("/proc/self/stat").read().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")

a = torch.randn(2048, 2048, device="cuda")
(a @ a).sum().item()
note("matmul", since_start())
if "RANK" in os.environ:
    dist.init_process_group("nccl")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1024, 1024).cuda())
else:
    model = torch.nn.Linear(1024, 1024).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(20):
    model(torch.randn(64, 1024, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.cuda.synchronize()
    if step == 0:
        note("step", since_start())
        note("stepped", time.monotonic())
if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) < int(sys.argv[2]):
    note("killed", time.monotonic())
    os.kill(os.getpid(), signal.SIGKILL)
if dist.is_initialized():
    dist.destroy_process_group()
"""


class Notes:
    """What the script noted, over all its lives."""

    def __init__(self, text: str) -> None:
        self._lines = [(what, float(seconds)) for what, seconds in map(str.split, text.splitlines())]

    def all(self, what: str) -> list[float]:
        return [seconds for noted, seconds in self._lines if noted == what]

    def recoveries(self) -> list[float]:
        """From each kill to the next step."""
        return [back - dead for dead, back in zip(self.all("killed"), self.all("stepped")[1:], strict=False)]


def run(runs: int, *command: str, restarts: int = 0) -> Notes:
    with tempfile.TemporaryDirectory() as folder:
        path, notes = Path(folder, "script.py"), Path(folder, "notes")
        path.write_text(SCRIPT)
        for _ in range(runs):
            argv = [sys.executable, *command, str(path), str(notes), str(restarts)]
            done = subprocess.run(argv, capture_output=True, text=True)
            if done.returncode != 0:
                raise SystemExit(f"{' '.join(argv)} failed:\n{done.stderr[-3000:]}")
        return Notes(notes.read_text())


def main() -> None:
    import torch  # for its version alone; this process touches no GPU

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    device = subprocess.run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True)
    print(f"{device.stdout.strip()}, torch {torch.__version__}, Python {sys.version.split()[0]}\n")
    budget = f"--max-restarts={runs}"
    cold = run(runs)
    forked = run(runs, "-m", "holdfast", "run")  # first worlds only: later ones are forked ahead and wait
    warm = run(1, "-m", "holdfast", "run", budget, restarts=runs)
    peer = run(1, "-m", "torch.distributed.run", "--standalone", budget, restarts=runs)
    rows = [
        ["a cold process: start to first matmul", *figures(cold.all("matmul"))],
        ["holdfast run: fork from the zygote to first matmul", *figures(forked.all("matmul"))],
        ["a cold process: start to first AdamW step", *figures(cold.all("step"))],
        ["holdfast run: fork to first AdamW step, NCCL", *figures(forked.all("step"))],
        ["torchrun: SIGKILL to next step, NCCL", *figures(peer.recoveries())],
        ["holdfast run: SIGKILL to next step, NCCL", *figures(warm.recoveries())],
    ]
    print(table(["what", "runs", "median", "worst"], rows))


def figures(times_s: list[float]) -> list[str]:
    return [f"{len(times_s)}", f"{statistics.median(times_s):.2f} s", f"{max(times_s):.2f} s"]


if __name__ == "__main__":
    main()
