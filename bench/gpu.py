"""On a GPU: from a rank's process start to its first matmul, forked and cold; and recovery of NCCL training."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.launchers import table

MATMUL = """
import os, signal, sys, time
import torch
a = torch.randn(2048, 2048, device="cuda")
(a @ a).sum().item()
start_ticks = int(open("/proc/self/stat").read().rpartition(")")[2].split()[19])
took_s = time.clock_gettime(time.CLOCK_BOOTTIME) - start_ticks / os.sysconf("SC_CLK_TCK")
with open(sys.argv[1], "a") as file:
    file.write(f"{took_s}\\n")
if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) < int(sys.argv[2]):
    os.kill(os.getpid(), signal.SIGKILL)
"""

TRAIN = """
import os, signal, sys
import torch
import torch.distributed as dist
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1024, 1024).cuda())
optimizer = torch.optim.AdamW(model.parameters())
for step in range(20):
    model(torch.randn(64, 1024, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
torch.cuda.synchronize()
if int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < int(sys.argv[2]):
    os.kill(os.getpid(), signal.SIGKILL)
dist.destroy_process_group()
"""


def run(script: str, restarts: int, *flags: str) -> tuple[list[float], list[float]]:
    """Seconds from process start to the first matmul, and seconds from each kill to the next step."""
    with tempfile.TemporaryDirectory() as folder:
        path, times = Path(folder, "script.py"), Path(folder, "times")
        path.write_text(script)
        times.touch()
        command = [sys.executable, "-m", "holdfast", "run", f"--max-restarts={restarts}", f"--log-dir={folder}/logs"]
        done = subprocess.run([*command, *flags, str(path), str(times), str(restarts)], capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(f"{flags} failed:\n{done.stderr[-3000:]}")
        incidents = sorted(Path(folder, "logs").glob("*/incidents/*.json"))
        lost = [json.loads(incident.read_text()) for incident in incidents]
        return [float(line) for line in times.read_text().split()], [i["lost_s"] for i in lost if i["recovered_at_s"]]


def cold(runs: int) -> list[float]:
    """The same script as a plain Python process."""
    with tempfile.TemporaryDirectory() as folder:
        path, times = Path(folder, "script.py"), Path(folder, "times")
        path.write_text(MATMUL)
        for _ in range(runs):
            subprocess.run([sys.executable, str(path), str(times), "0"], check=True, env=dict(os.environ))
        return [float(line) for line in times.read_text().split()]


def main() -> None:
    import torch  # for its version alone; this process touches no GPU

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    device = subprocess.run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True)
    where = f"{device.stdout.strip()}, torch {torch.__version__}, Python {sys.version.split()[0]}"
    forked, _ = run(MATMUL, args.runs)
    plain = cold(args.runs)
    _, warm_train = run(TRAIN, args.runs)
    _, cold_train = run(TRAIN, args.runs, "--cold-start")
    rows = [
        ["python script.py: process start to first matmul", *figures(plain)],
        ["holdfast run: fork from the zygote to first matmul", *figures(forked)],
        ["holdfast run: SIGKILL to next step, NCCL, 1 rank", *figures(warm_train)],
    ]
    if cold_train:
        rows.append(["holdfast run --cold-start: the same", *figures(cold_train)])
    print(f"{where}\n")
    print(table(["what", "runs", "median", "worst"], rows))


def figures(times_s: list[float]) -> list[str]:
    return [f"{len(times_s)}", f"{statistics.median(times_s):.2f} s", f"{max(times_s):.2f} s"]


if __name__ == "__main__":
    main()
