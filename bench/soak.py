"""No false alarm: hours of steps that vary a hundredfold, evaluations, saves, an overloaded machine, paused processes.

The floor of the limit is 3 s, a tenth of the default, and a job that was found hung is over: it has no restarts. Ranks
are paused for up to 1.8 s, the agent for up to 10 s. The seed says what happens when; how fast the machine is, it does
not. Prints a line a minute, and a table at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.launchers import versions
from holdfast import linux

FLOOR_S = 3.0
PAUSE_S = 1.8
AGENT_PAUSE_S = 10.0
BURN_S = 10.0

SCRIPT = """
import os, random, sys, time
import torch, torch.distributed as dist

dist.init_process_group("gloo")
rank, draw = dist.get_rank(), random.Random(int(sys.argv[1]))
until_s = time.time() + float(sys.argv[2])
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.AdamW(model.parameters())
gone_on = torch.ones(1)

class Slow:
    def __init__(self, by_s): self.by_s = by_s
    def write(self, data): time.sleep(self.by_s); self.by_s = 0.0; return len(data)
    def flush(self): pass

while gone_on.item():
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
    time.sleep(0.005 * 100 ** draw.random())
    if draw.random() < 0.005:
        model.eval()
        time.sleep(draw.uniform(0, 6))
        model.train()
    if draw.random() < 0.005:
        torch.save(model.state_dict(), Slow(draw.uniform(0, 6)))
    gone_on[0] = float(time.time() < until_s)
    dist.all_reduce(gone_on, op=dist.ReduceOp.MIN)
dist.destroy_process_group()
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="holdfast-soak-") as folder:
        return soak(Path(folder), args.hours * 3600, args.ranks, random.Random(args.seed))


def soak(folder: Path, for_s: float, ranks: int, draw: random.Random) -> int:
    script = folder / "trains.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "holdfast", "run", f"--nproc-per-node={ranks}", f"--hang-floor={FLOOR_S:g}"]
    command += ["--max-restarts=0", f"--log-dir={folder / 'logs'}", str(script), str(draw.random())[2:10], str(for_s)]
    print(f"{versions()}; {os.cpu_count()} CPUs; {' '.join(command[1:])}", flush=True)
    job = subprocess.Popen(command)
    pauses = agent_pauses = burns = 0
    paused_s = 0.0
    told_s = begun_s = time.monotonic()
    while job.poll() is None:
        if not wait(job, draw.uniform(3.0, 8.0)):
            break
        pids = [pid for pid in linux.descendants(job.pid) if "[holdfast rank" in title(pid)]
        what = draw.random()
        if what < 0.1:
            burns += 1
            burn(BURN_S)
        elif what < 0.2:
            agent_pauses += 1
            pause(job.pid, draw.uniform(0.5, AGENT_PAUSE_S))
        elif pids:
            pauses += 1
            length_s = draw.uniform(0.1, PAUSE_S)
            paused_s += length_s
            pause(draw.choice(pids), length_s)
        if time.monotonic() - told_s > 60:
            told_s = time.monotonic()
            print(f"{(told_s - begun_s) / 60:.0f} min: {pauses} pauses, {burns} overloads", flush=True)
    code = job.wait()
    return tell(folder, code, time.monotonic() - begun_s, pauses, paused_s, agent_pauses, burns)


def wait(job: subprocess.Popen[bytes], for_s: float) -> bool:
    try:
        job.wait(for_s)
    except subprocess.TimeoutExpired:
        return True
    return False


def title(pid: int) -> str:
    try:
        return linux.read(f"/proc/{pid}/cmdline")
    except OSError:
        return ""


def pause(pid: int, for_s: float) -> None:
    linux.signal_all([pid], signal.SIGSTOP)
    time.sleep(for_s)
    linux.signal_all([pid], signal.SIGCONT)


def burn(for_s: float) -> None:
    """Three times as many busy processes as there are CPUs."""
    program = f"import time\nend = time.monotonic() + {for_s}\nwhile time.monotonic() < end: pass"
    burners = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(3 * (os.cpu_count() or 1))]
    for burner in burners:
        burner.wait()


def tell(folder: Path, code: int, took_s: float, pauses: int, paused_s: float, agent_pauses: int, burns: int) -> int:
    events = [json.loads(line) for path in folder.glob("logs/*/events.jsonl") for line in path.read_text().splitlines()]
    alarms = [event for event in events if event["name"] == "rank.hung"]
    ended: dict[str, object] = next((event["data"] for event in events if event["name"] == "job.ended"), {})
    print("| what | how much |\n|---|---|")
    for what, much in (
        ("time", f"{took_s / 60:.0f} min"),
        ("steps", ended.get("steps")),
        ("pauses of a rank", f"{pauses}, {paused_s:.0f} s in all"),
        ("pauses of the agent", agent_pauses),
        ("overloads of 10 s", burns),
        ("false alarms", len(alarms)),
        ("exit code", code),
    ):
        print(f"| {what} | {much} |")
    for alarm in alarms:
        print(alarm["data"])
    return 1 if alarms or code else 0


if __name__ == "__main__":
    sys.exit(main())
