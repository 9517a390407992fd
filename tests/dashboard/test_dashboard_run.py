"""`holdfast run --dashboard`: the page of a real job, from its start to its end."""

from __future__ import annotations

import json
import re
from http.client import HTTPConnection
from typing import Any

from harness import TRAINS, Job


def state_of(port: int) -> dict[str, Any]:
    line = HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        line.request("GET", "/state")
        found: dict[str, Any] = json.loads(line.getresponse().read())
        return found
    finally:
        line.close()


def test_a_job_shows_itself_while_it_runs(job: Job) -> None:
    hold = job.folder / "hold"
    hold.touch()
    flags = ("--dashboard", "0", "--rdzv-id", "shown")
    job.start(TRAINS, "1", nproc=1, flags=flags, env={"HOLD": str(hold), "PACE_S": "0.01"})
    while (found := re.search(r"the job's page is http://127\.0\.0\.1:(\d+)/\n", job.err)) is None:
        job.news.wait(lambda line: "step" in line)
    pid, seen = 0, dict[str, Any]()
    while (
        seen.get("head", {}).get("phase") != "training" or seen["head"]["standing"] != "here" or not seen["all_ranks"]
    ):
        pid = job.news.wait(lambda line: "step" in line)["pid"]
        seen = state_of(int(found[1]))
    assert (seen["head"]["run_id"], seen["head"]["program"], seen["head"]["size"]) == ("shown", "trains.py", 1)
    [[rank, _, its_pid, state, *_]] = seen["all_ranks"]
    assert (rank, its_pid, state) == (0, pid, "training")
    assert any("holdfast.dashboard" in text for text in job.processes().values())
    hold.unlink()
    assert job.wait() == 0
    assert job.leftovers() == []
