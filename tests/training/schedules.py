"""A training in one folder, as a schedule of worlds and kills; and which samples its steps have used in the end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from harness import Job

ELASTIC = Path(__file__).parent / "scripts" / "elastic.py"
WAIT_S = 100.0


class World(NamedTuple):
    """One job. `ranks` 0: plain `python`, without a launcher."""

    ranks: int
    stop_after: int = 0
    kills: tuple[tuple[int, int], ...] = ()  # step and rank: one in each generation

    @property
    def flags(self) -> list[str]:
        kills = [f"{generation}:{step}:{rank}" for generation, (step, rank) in enumerate(self.kills)]
        return [f"--stop-after={self.stop_after}", f"--kill={','.join(kills)}"]


class Training:
    """The jobs that come one after the other in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.said = ""  # by the last job
        self._attempt = 0

    def run(self, world: World, *flags: str, max_restarts: int | None = None) -> int:
        """Its exit code."""
        given = ["--out", str(self.folder), f"--attempt={self._attempt}", *world.flags, *flags]
        self._attempt += 1
        return self._alone(given) if world.ranks == 0 else self._launched(world, given, max_restarts)

    def _alone(self, given: list[str]) -> int:
        environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        done = subprocess.run(
            [sys.executable, str(ELASTIC), *given],
            env=environment | {"OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
            timeout=WAIT_S,
        )
        self.said = done.stderr
        return done.returncode

    def _launched(self, world: World, given: list[str], max_restarts: int | None) -> int:
        folder = self.folder / f"job-{self._attempt}"
        folder.mkdir()
        job = Job(folder)
        try:
            restarts = len(world.kills) if max_restarts is None else max_restarts
            code = job.start(ELASTIC, *given, nproc=world.ranks, max_restarts=restarts).wait(WAIT_S)
            self.said = job.err
            assert job.leftovers() == []
            return code
        finally:
            job.end()

    # -- what it has done ---------------------------------------------------------------------------------------------

    @property
    def lines(self) -> list[dict[str, Any]]:
        found = []
        for path in sorted(self.folder.glob("used.*.jsonl")):
            # A rank that is killed may leave half a line.
            found += [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        return found

    def restored(self) -> list[int]:
        """Where each world went on, in their order."""
        found = {(line["attempt"], line["generation"]): line["restored"] for line in self.lines if "restored" in line}
        return [found[key] for key in sorted(found)]

    def committed(self) -> dict[int, list[dict[str, Any]]]:
        """For each step, what all ranks did when it was last done by a whole world."""
        done: dict[tuple[int, int, int], list[dict[str, Any]]] = {}
        for line in self.lines:
            if "step" in line:
                done.setdefault((line["step"], line["attempt"], line["generation"]), []).append(line)
        counts: dict[int, list[dict[str, Any]]] = {}
        for key in sorted(done):
            if len(done[key]) == done[key][0]["world_size"]:
                counts[key[0]] = done[key]
        return counts

    def samples(self) -> dict[int, Counter[int]]:
        """How often each sample was used, by epoch."""
        found: dict[int, Counter[int]] = {}
        for lines in self.committed().values():
            [epoch] = {line["epoch"] for line in lines}
            for line in lines:
                found.setdefault(epoch, Counter()).update(line["used"])
        return found

    def check_exactly_once(self, samples: int, epochs: int) -> None:
        steps = sorted(self.committed())
        assert steps == list(range(len(steps))), f"some steps were never done by a whole world: {steps}"
        found = self.samples()
        assert sorted(found) == list(range(epochs))
        for epoch, counts in found.items():
            wrong = {index: counts[index] for index in range(samples) if counts[index] != 1}
            assert not wrong and len(counts) == samples, f"epoch {epoch}: used not once: {wrong}"

    @property
    def digest(self) -> str:
        return (self.folder / "digest").read_text()
