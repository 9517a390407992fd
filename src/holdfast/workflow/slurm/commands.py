"""Slurm's programs, and what they answer."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence

import msgspec

from holdfast.workflow.standing import Node

WAIT_S = 60.0
_PASSING = re.compile(r"contact|connect|timed out|time out|communication|temporar|zero bytes|try again", re.IGNORECASE)
OVER = (
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"),
    *("REVOKED", "TIMEOUT"),
)


class Failed(Exception):
    """A command that did not work. One line."""

    def __init__(self, text: str, passing: bool) -> None:
        super().__init__(text)
        self.passing = passing  # the controller does not answer, for now


class Job(msgspec.Struct, frozen=True):
    id: int
    name: str
    state: str
    reason: str

    @property
    def over(self) -> bool:
        return self.state in OVER


def submit(options: Sequence[str], script: str, environment: Mapping[str, str]) -> int:
    """Its number."""
    said = _run(["sbatch", "--parsable", *options, script], environment)
    return int(said.split(";")[0])


def check(options: Sequence[str], script: str, environment: Mapping[str, str]) -> None:
    """Whether such a job could ever run."""
    _run(["sbatch", "--test-only", *options, script], environment)


def jobs() -> dict[int, Job]:
    """The user's, and for a while those that are over."""
    said = _run(["squeue", "--noheader", "--me", "--states=all", "--format=%i|%T|%r|%j"])
    rows = (line.split("|", 3) for line in said.splitlines() if line.count("|") >= 3)
    found = (Job(int(number), name, state, reason) for number, state, reason, name in rows if number.isdigit())
    return {job.id: job for job in found}


def cancel(job: int) -> None:
    _run(["scancel", str(job)])


def requeue(job: int) -> None:
    _run(["scontrol", "requeue", str(job)])


def places(nodelist: str) -> list[tuple[str, str]]:
    """Names and addresses of the nodes of a list, in the order in which srun counts them."""
    names = _run(["scontrol", "show", "hostnames", nodelist]).split()
    said = _run(["scontrol", "--oneliner", "show", "node", nodelist])
    known = dict(re.findall(r"NodeName=(\S+) .*?NodeAddr=(\S+)", said))
    return [(name, known.get(name, name)) for name in names]


def nodes(partition: str) -> tuple[Node, ...]:
    """Those that a job could have, whoever has them now."""
    only = [f"--partition={partition}"] if partition else []
    said = _run(["sinfo", "--noheader", "--Node", "--format=%N|%c|%m|%d|%T|%G", *only])
    found: dict[str, Node] = {}
    for line in said.splitlines():
        name, cpus, memory, disk, state, gres = line.split("|", 5)
        if state.rstrip("*~#!%$@^-+").startswith(("down", "drain", "fail", "unknown", "inval")):
            continue
        gpus = sum(int(count) for count in re.findall(r"\bgpu(?::[^:,(]+)?:(\d+)", gres))
        mib = 1024 * 1024
        found[name] = Node(name, float(cpus), tuple(map(str, range(gpus))), int(memory) * mib, int(disk) * mib)
    if not found:
        raise Failed(f"sinfo: no node is up in partition {partition}" if partition else "sinfo: no node is up", False)
    return tuple(found.values())


def _run(command: list[str], environment: Mapping[str, str] | None = None) -> str:
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **environment} if environment is not None else None,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            check=False,
        )
    except FileNotFoundError:
        raise Failed(f"there is no program {command[0]}: this is not a machine of a Slurm cluster", False) from None
    except subprocess.TimeoutExpired:
        raise Failed(f"{command[0]} has not answered in {WAIT_S:.0f} s", True) from None
    if done.returncode != 0:
        lines = [line for line in done.stderr.strip().splitlines() if line] or [f"exit code {done.returncode}"]
        text = lines[-1].removeprefix(f"{command[0]}: ").removeprefix("error: ")
        raise Failed(f"{command[0]}: {text}", bool(_PASSING.search(done.stderr)))
    return done.stdout
