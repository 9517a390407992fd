"""Our events in torchelastic's form, for those who collect them with `--event-log-handler=console`."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from typing import Any

from holdfast.observe.events import Event

HANDLERS = ("null", "console", "dynamic_rendezvous")


class ConsoleSink:
    """One JSON line per worker start and end, and per end of the job, named `torchelastic.worker.status.*`."""

    def __init__(self, run_id: str, role: str, write: Callable[[bytes], None]) -> None:
        self._run_id = run_id
        self._role = role
        self._write = write
        self._restarts = 0

    def __call__(self, event: Event) -> None:
        data = event.data
        match event.name:
            case "world.launched":
                self._restarts = data["restarts"]
            case "world.started":
                for rank, pid in data["pids"].items():
                    self._record("STARTED", "WORKER", event, rank, pid)
            case "rank.exited":
                state = "SUCCEEDED" if data["status"] == 0 else "FAILED"
                self._record(state, "WORKER", event, data["rank"], data["pid"])
            case "job.ended":
                state = "SUCCEEDED" if data["outcome"] == "succeeded" else "FAILED"
                self._record(state, "AGENT", event, None, None, data["reason"] or None)

    def _record(
        self, state: str, source: str, event: Event, rank: int | None, pid: int | None, error: str | None = None
    ) -> None:
        metadata: dict[str, Any] = {
            "run_id": self._run_id,
            "global_rank": rank,
            "group_rank": 0,
            "worker_id": None if pid is None else str(pid),
            "role": self._role,
            "hostname": socket.gethostname(),
            "state": state,
            "total_run_time": int(event.at_s),
            "rdzv_backend": "holdfast",
            "raw_error": error,
            "agent_restarts": self._restarts,
        }
        record = {
            "name": f"torchelastic.worker.status.{state}",
            "source": source,
            "timestamp": 0,
            "metadata": metadata,
        }
        self._write(json.dumps(record).encode() + b"\n")
