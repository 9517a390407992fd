"""Records that no job wrote: of any size, with any text in them."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import msgspec

from holdfast.control.causes import Kind
from holdfast.control.incidents import Follower
from holdfast.control.stacks import Group
from holdfast.observe import record

LEAD = "gpu-a1:4100"
HOSTILE = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"


class Made:
    """A record in a run directory of its own, written line by line."""

    def __init__(self, run_dir: Path, run_id: str = "llama-small", lead: str = LEAD, elapsed_s: float = 0.0) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self.run_dir = run_dir
        self.clock_s = time.monotonic() - elapsed_s  # what it showed when the record began
        self.began = time.time() - elapsed_s
        self._run_id, self._lead = run_id, lead
        self._seqs: dict[str, int] = {}
        self._file = open(run_dir / record.NAME, "ab", buffering=1 << 20)  # noqa: SIM115 - for as long as the test
        self.flushes = True  # after each line, as an agent does

    def add(self, what: record.What, at_s: float, node: str | None = None) -> None:
        node = self._lead if node is None else node
        seq = self._seqs[node] = self._seqs.get(node, -1) + 1
        told = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(self.began + at_s))
        line = {"v": 1, "node": node, "seq": seq, "name": what.NAME, "at_s": at_s, "time": told, "data": what}
        self._file.write(msgspec.json.encode(line) + b"\n")
        if self.flushes:
            self._file.flush()

    def start(self, nodes: list[str], each: int, pid: int = 4100, max_restarts: int = 100) -> None:
        for at, node in enumerate(nodes):
            number = pid if node == self._lead else 4100 + at
            began = record.JobStarted(
                self._run_id, node, each, {"path": "/home/you/train.py"}, number, node.rpartition(":")[0], self.clock_s,
                "0.8.0", max_restarts, (1, len(nodes)),
            )  # fmt: skip
            self.add(began, 0.0, node)

    def launch(self, generation: int, nodes: list[str], each: int, at_s: float, starts: bool = True) -> None:
        size = len(nodes) * each
        for at, node in enumerate(nodes):
            first = at * each
            launched = record.WorldLaunched(generation, size, generation, first, at, len(nodes), "10.0.0.1:29500", each)
            self.add(launched, at_s, node)
            if starts:
                pids = {rank: 20_000 + rank for rank in range(first, first + each)}
                self.add(record.WorldStarted(generation, pids), at_s + 0.03, node)
                for rank in range(first, first + each):
                    self.add(record.RankFirstStep(generation, rank), at_s + 0.08, node)

    def progress(self, generation: int, nodes: list[str], each: int, at_s: float, step: int, base: int) -> None:
        for at, node in enumerate(nodes):
            pace = tuple(
                round(205_000 + 11_000 * math.sin(rank + at_s) ** 4) for rank in range(at * each, at * each + each)
            )
            self.add(
                record.Progress(
                    generation, at * each, step, (step - base,) * each, base, pace, tuple(us - 20_000 for us in pace),
                    phases="1" * each,
                ),
                at_s,
                node,
            )  # fmt: skip

    def incident(self, number: int, generation: int, at_s: float, kind: Kind = Kind.SIGNAL, **more: Any) -> None:
        """Opened and closed again."""
        failed_s = self.clock_s + at_s
        given: dict[str, Any] = {
            "headline": "killed by SIGKILL",
            "action": f"restart {number + 1} of 10",
            "restarted": True,
            "rank": number % 8,
            "node": "gpu-a1",
            "pid": 20_000 + number % 8,
            "status": -9,
            "steps": 40,
            "uptime_s": 12.5,
            "failed_at_s": failed_s,
            "stopped_at_s": failed_s + 0.011,
            "failed_at": time.strftime("%Y-%m-%dT%H:%M:%S.120Z", time.gmtime(self.began + at_s)),
            **more,
        }
        self.add(record.IncidentOpened(number=number, generation=generation, kind=kind, **given), at_s + 0.011)
        stopped_s = given["stopped_at_s"]
        if given["restarted"]:
            given |= {"launched_at_s": stopped_s + 0.001, "started_at_s": stopped_s + 0.024}
            given["recovered_at_s"] = stopped_s + 0.061
        self.add(record.IncidentClosed(number=number, generation=generation, kind=kind, **given), at_s + 0.08)

    def flush(self) -> None:
        self.flushes = True
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def large(run_dir: Path, ranks: int = 1000, incidents: int = 10_000) -> Made:
    """As large as the page has to bear."""
    each = 8
    made = Made(run_dir, "a-large-one", elapsed_s=86_400.0)
    made.flushes = False
    nodes = [LEAD, *(f"gpu-{at:03}:{4100 + at}" for at in range(1, ranks // each))]
    made.start(nodes, each)
    tail = tuple(f"[rank3]: line {at} of what it said last" for at in range(10))
    for number in range(incidents):
        at_s = 8.0 * number + 1.0
        made.add(record.WorldLaunched(number, ranks, number, 0, 0, 1, "", 0), at_s)
        made.incident(number, number, at_s + 7.5, rank=number % ranks, stderr_tail=tail)
    made.launch(incidents, nodes, each, 8.0 * incidents + 1.0)
    made.progress(incidents, nodes, each, 8.0 * incidents + 5.0, 90_000, 89_990)
    for at in range(2000):
        made.add(record.Trained(at * 45, "1", 2.0 / (1 + at / 100)), 40.0 * at)
    made.flush()
    return made


TRACEBACK = """\
Traceback (most recent call last):
  File "/home/you/train.py", line 88, in <module>
    main()
  File "/home/you/train.py", line 61, in main
    batch = next(batches)
  File "/home/you/data.py", line 41, in read
    raise OSError(5, "Input/output error", path)
OSError: [Errno 5] Input/output error: '/mnt/tokens/shard-0117.bin'
"""


def typical(run_dir: Path, pid: int = 4100, lead: str = LEAD) -> Made:
    """A job of 32 ranks on four nodes that has seen something: what the documents show."""
    nodes, each = [lead, "gpu-a2:4101", "gpu-a3:4102", "gpu-a4:4103"], 8
    minutes = 52
    made = Made(run_dir, lead=lead, elapsed_s=60.0 * minutes)
    made.start(nodes, each, pid, max_restarts=10)
    troubles: dict[float, tuple[Kind, dict[str, Any]]] = {
        372.0: (Kind.SIGNAL, {"rank": 13, "node": "gpu-a2", "pid": 20_013}),
        1011.0: (
            Kind.HANG,
            {
                "rank": 21, "node": "gpu-a3", "pid": 20_021, "status": None, "headline": "no step for 34 s, limit 30 s",
                "detected_at_s": made.clock_s + 1045.2, "stopped_at_s": made.clock_s + 1046.0, "suspects": (21,),
                "groups": (
                    Group(tuple(r for r in range(32) if r != 21), 31, "all_reduce", True, (
                        "torch/distributed/distributed_c10d.py:3125 all_reduce", "train.py:74 main")),
                    Group((21,), 1, "data.py:41 read", False, (
                        "data.py:41 read", "data.py:19 batches", "train.py:61 main", "train.py:88 <module>"), "gpu-a3"),
                ),
            },
        ),
        1502.0: (
            Kind.ERROR,
            {
                "rank": 4, "headline": TRACEBACK.splitlines()[-1], "status": 1,
                "traceback": TRACEBACK, "followers": (Follower(0, "Connection closed by peer", "gpu-a1"),),
                "stderr_tail": ("W tokens: retry 1 of 3", "W tokens: retry 2 of 3", "W tokens: retry 3 of 3"),
            },
        ),
        2196.0: (Kind.LOST_NODE, {"rank": None, "pid": None, "status": None, "headline": "gpu-a4 is silent for 3 s"}),
        2650.0: (Kind.OUT_OF_MEMORY, {"rank": 30, "headline": "killed by the kernel: out of memory (SIGKILL)"}),
    }  # fmt: skip
    step, generation = 0, 0
    made.launch(0, nodes, each, 2.0)
    base, times = 0, sorted(troubles)
    for at in range(1, minutes * 6):
        at_s = 10.0 * at
        if times and at_s > times[0]:
            kind, more = troubles[failed_s := times.pop(0)]
            made.incident(generation, generation, failed_s, kind, **more)
            generation, step = generation + 1, step - 12
            base = step
            made.launch(generation, nodes, each, at_s - 2.0)
        step += 47
        made.progress(generation, nodes, each, at_s, step, base)
        loss = 2.1 + 8.3 * math.exp(-step / 2600) + 0.06 * math.sin(step * 1.7) * math.exp(-step / 9000)
        made.add(record.Trained(step, "1.4", round(loss, 4), 152.4, 60_000 - step), at_s)
        if at % 30 == 0:
            made.add(record.CheckpointSaved(step, f"step-{step}", 4_810_000_000, 3.4, True), at_s)
    made.add(record.StragglerFound(generation, 27, 0.31, 0.19, 7.2, 3), 60.0 * minutes - 20, "gpu-a4:4103")
    made.add(record.CoordinatorSaid("node gpu-a4 is back and joins the next world"), 2230.0)
    return made
