"""`make demo`: train on two ranks, kill one with kill -9, watch the job go on, and see what that cost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

TRAIN = Path(__file__).resolve().with_name("train_chars.py")
STEPS, BATCH, SAVE_EVERY = 440, 32, 50  # the batch is the script's
KILLED_RANK, KILLED_AT_STEP = 1, 215
BAR_CHARACTERS = 30
PHASES = {
    "stop": "hear of it; the rank that is left leaves the world",
    "wait": "before the new ranks may start",
    "start": "fork one rank, and tell the other its place",
    "first step": "connect, hand over the state, train one step",
}


def main() -> int:
    print("Two ranks train a small language model on the text of this repository, and save a checkpoint")
    print(f"every {SAVE_EVERY} steps. After step {KILLED_AT_STEP} rank {KILLED_RANK} is killed with kill -9. Watch")
    print("the other one stay, and hand what it has in memory to the process that takes the place.\n", flush=True)
    with tempfile.TemporaryDirectory(prefix="holdfast_demo_") as folder:
        logs = Path(folder, "logs")
        command = [sys.executable, "-m", "holdfast", "run", "--standalone", "--nproc-per-node=2", "--max-restarts=3"]
        command += ["--log-dir", str(logs), str(TRAIN), "--checkpoint-dir", str(Path(folder, "checkpoints"))]
        command += ["--text", str(copy_text(Path(folder, "text")))]
        command += ["--samples", str(STEPS * BATCH), "--save-every", str(SAVE_EVERY)]
        command += ["--kill-rank", str(KILLED_RANK), "--kill-at-step", str(KILLED_AT_STEP)]
        code, stopped = run(command)
        ended, incidents = read_records(logs)
    if stopped:
        print("demo: stopped; nothing is left of it", file=sys.stderr)
        return code or 130
    problem = check(code, ended, incidents)
    if problem is not None or ended is None:
        print(f"demo: not as planned: {problem}", file=sys.stderr)
        return code or 1
    print("\n" + "\n".join(tell(ended, incidents)), flush=True)
    return code


def copy_text(to: Path) -> Path:
    """As it is now: who edits a file meanwhile changes the data, and an epoch of other data is refused."""
    root = TRAIN.parent.parent
    files = sorted([*root.glob("README.md"), *root.glob("docs/*.md"), *root.glob("src/**/*.py")])
    to.write_text("".join(file.read_text(encoding="utf-8") for file in files), encoding="utf-8")
    return to


def run(command: list[str]) -> tuple[int, bool]:
    """Run to its end; also tells whether someone stopped it."""
    process: subprocess.Popen[bytes] | None = None
    stopped: list[int] = []

    def stop(signum: int, _: object) -> None:
        # Ctrl-C reaches holdfast without us, and a second one would make it kill the ranks at once.
        stopped.append(signum)
        if signum != signal.SIGINT and process is not None:
            process.send_signal(signum)

    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, stop)
    # One thread for each rank, which is what holdfast would choose, and say.
    process = subprocess.Popen(command, env={"OMP_NUM_THREADS": "1", **os.environ})
    return process.wait(), bool(stopped)


def read_records(logs: Path) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
    """How the job ended, and its incidents, from the run directory that holdfast left."""
    ended = None
    for file in logs.glob("*/events.jsonl"):
        for line in file.read_text(encoding="utf-8").splitlines():
            event = json.loads(line)
            if event["name"] == "job.ended":
                ended = event["data"]
    files = sorted(logs.glob("*/incidents/*.json"))
    return ended, [json.loads(file.read_text(encoding="utf-8")) for file in files]


def tell(ended: dict[str, Any], incidents: list[dict[str, Any]]) -> list[str]:
    """The story of the run in a few lines and one picture."""
    lost_s = sum(incident["lost_s"] for incident in incidents)
    share = 100 * lost_s / ended["wall_s"]
    lines = [f"{'What happened ':-<100}"]
    for incident in incidents:
        who = "" if incident["rank"] is None else f"rank {incident['rank']} "
        lines.append(f"  incident {incident['number']}    {who}{incident['headline']} after step {incident['steps']}")
    again = ended["steps"] - STEPS
    told = f"{again} since the last snapshot were done again" if again else "none had to be done again"
    lines.append(f"  steps         {ended['steps']} done for {STEPS} of training; {told}")
    lines.append(f"  time lost     {1000 * lost_s:.0f} ms of {ended['wall_s']:.1f} s, {share:.1f} %; it went to")
    totals_s = {name: sum(incident["phases_s"].get(name, 0.0) for incident in incidents) for name in PHASES}
    longest_s = max(totals_s.values()) or 1.0
    for name, spent_s in totals_s.items():
        bar = "#" * round(BAR_CHARACTERS * spent_s / longest_s)
        lines.append(f"    {name:10} {1000 * spent_s:4.0f} ms  {bar:{BAR_CHARACTERS}} {PHASES[name]}")
    lines.append("  records       deleted with the demo's own folder; those of your jobs stay")
    return lines


def check(code: int, ended: dict[str, Any] | None, incidents: list[dict[str, Any]]) -> str | None:
    """What went another way than announced, if anything did."""
    if ended is None:
        return f"holdfast run ended with code {code} and left no record of the job"
    if code != 0:
        return f"the job ended with code {code} ({ended['outcome']}): {ended['reason']}"
    if len(incidents) != 1:
        return f"there should be one incident, there are {len(incidents)}"
    if (incidents[0]["rank"], incidents[0]["steps"]) != (KILLED_RANK, KILLED_AT_STEP):
        return f"the incident was rank {incidents[0]['rank']}'s after step {incidents[0]['steps']}"
    if incidents[0]["recovered_at_s"] is None:
        return "the ranks did not all step again"
    return None


if __name__ == "__main__":
    sys.exit(main())
