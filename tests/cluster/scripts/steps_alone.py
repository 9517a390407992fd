"""Ranks that need nobody: each tells of its steps until HOLD is gone. For jobs that do without some of their nodes."""

from __future__ import annotations

import json
import os
import time

ABOUT = {
    "node": int(os.environ["NODE"]),
    "rank": int(os.environ["RANK"]),
    "world_size": int(os.environ["WORLD_SIZE"]),
    "restart_count": int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
    "generation": int(os.environ["HOLDFAST_GENERATION"]),
    "run_id": os.environ["TORCHELASTIC_RUN_ID"],
    "pid": os.getpid(),
}
step = 0
while os.path.exists(os.environ["HOLD"]):
    step += 1
    with open(os.environ["NEWS"], "a") as fifo:
        fifo.write(json.dumps({**ABOUT, "step": step}) + "\n")
    time.sleep(0.02)
