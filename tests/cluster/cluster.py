"""A real job on several nodes under test: an agent a node, the news of all their ranks, and what is left of them."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import select
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from cluster.net import Net
from holdfast import linux
from ports import free_port

TRAINS_ELASTIC = Path(__file__).parent / "scripts" / "trains_elastic.py"
HOLDFAST = (sys.executable, "-m", "holdfast", "run")
WAIT_S = 60.0

Line = dict[str, Any]


class News:
    """Lines that ranks of all nodes write to one FIFO. A thread reads them, so no rank ever waits for the test."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self._fd = os.open(path, os.O_RDWR)  # read-write, so that it is never at its end
        self.seen: list[Line] = []
        self._taken = 0
        self._marks = 0
        self._more = threading.Condition()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def wait(self, wanted: Callable[[Line], bool], wait_s: float) -> Line | None:
        """The next line that is wanted; those before it are passed over."""
        until = time.monotonic() + wait_s
        with self._more:
            while True:
                while self._taken < len(self.seen):
                    self._taken += 1
                    if wanted(self.seen[self._taken - 1]):
                        return self.seen[self._taken - 1]
                if not self._more.wait_for(lambda: self._taken < len(self.seen), until - time.monotonic()):
                    return None

    def pass_over(self) -> None:
        with self._more:
            self._taken = len(self.seen)

    def read_rest(self) -> None:
        """Wait for what is there already: a line of our own comes after it."""
        mine = self._marks + 1
        os.write(self._fd, b"null\n")
        with self._more:
            assert self._more.wait_for(lambda: self._marks >= mine, WAIT_S)

    def close(self) -> None:
        os.write(self._fd, b"\n")
        self._thread.join()
        os.close(self._fd)

    def _read(self) -> None:
        with open(self._fd, "rb", closefd=False) as lines:
            for line in iter(lines.readline, b"\n"):
                with self._more:
                    if (said := json.loads(line)) is None:
                        self._marks += 1
                    else:
                        self.seen.append(said)
                    self._more.notify_all()


class Start(NamedTuple):
    """One start of an agent. A node that was killed and is started again has another, with the same log directory."""

    process: subprocess.Popen[Any]
    out: Path
    err: Path
    older: frozenset[Path]  # run directories of earlier starts


class Cluster:
    """Starts `holdfast run` on the nodes of a Net or, without one, on addresses of the loopback device.

    Node i has its own flags, output and log directory; all share the folder for state and for Holdfast's secret. Set
    `program` to compare with another launcher.
    """

    def __init__(self, folder: Path, net: Net | None = None) -> None:
        self.folder = folder
        self.net = net
        self.mark = uuid.uuid4().hex
        self.program: tuple[str, ...] = HOLDFAST
        self.port = 29400 if net is not None else free_port()
        self.news = News(folder / "news")
        self._loopback = f"127.{random.randrange(1, 255)}.{random.randrange(1, 255)}"
        self._starts: dict[int, list[Start]] = {}
        (folder / "home").mkdir()

    def addr(self, i: int) -> str:
        return self.net.addr(i) if self.net is not None else f"{self._loopback}.{i + 1}"

    def endpoint(self, i: int = 0) -> str:
        """Where the nodes may meet, for `--rdzv-endpoint`."""
        return f"{self.addr(i)}:{self.port}"

    # -- start, and wait for something ----------------------------------------------------------------------------

    def command(
        self, i: int, *flags: str, nproc: int | str = 2, script: str | Path = TRAINS_ELASTIC, args: tuple[str, ...] = ()
    ) -> list[str]:
        """What node i would be started with next."""
        log_dir = str(self._log_dir(i))
        return [*self.program, f"--nproc-per-node={nproc}", "--log-dir", log_dir, *flags, str(script), *args]

    def start(
        self,
        i: int,
        *flags: str,
        env: dict[str, str] | None = None,
        nproc: int | str = 2,
        script: str | Path = TRAINS_ELASTIC,
        args: tuple[str, ...] = (),
    ) -> subprocess.Popen[Any]:
        name = self._next(i)
        command = self.command(i, *flags, nproc=nproc, script=script, args=args)
        out, err = self.folder / f"out-{name}", self.folder / f"err-{name}"
        older = frozenset(self._log_dir(i).iterdir())
        with open(out, "wb") as to_out, open(err, "wb") as to_err:
            popen = {"stdout": to_out, "stderr": to_err, "cwd": self.folder, "env": self._environment(i) | (env or {})}
            process = self._exec(i, command, popen)
        start = Start(process, out, err, older)
        self._starts.setdefault(i, []).append(start)
        return process

    def call(self, i: int, command: list[str]) -> subprocess.CompletedProcess[str]:
        """Run a program on a node, to its end."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": self._environment(i)}
        with self._exec(i, command, pipes) as process:
            out, err = process.communicate(timeout=WAIT_S)
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def hold(self) -> None:
        """Let ranks train on beyond their last step, until `release`."""
        (self.folder / "hold").touch()

    def release(self) -> None:
        (self.folder / "hold").unlink()

    def wait_step(
        self,
        node: int | None = None,
        world_size: int | None = None,
        generation: int | None = None,
        restart_count: int | None = None,
        min_step: int | None = None,
        run_id: str | None = None,
        timeout_s: float = WAIT_S,
    ) -> Line:
        """The next news of a step like this; those before it are passed over. `pass_over` asks for one from now on."""
        asked: Line = {"node": node, "world_size": world_size, "generation": generation}
        asked |= {"restart_count": restart_count, "run_id": run_id}
        exact = {key: value for key, value in asked.items() if value is not None}

        def wanted(line: Line) -> bool:
            right = "step" in line and line["step"] >= (min_step or 0)
            return right and all(line[key] == value for key, value in exact.items())

        until = time.monotonic() + timeout_s
        while (left_s := until - time.monotonic()) > 0:
            nobody = not self.processes()  # asked before the news are read: there may be last words
            if (line := self.news.wait(wanted, 0.1 if nobody else min(left_s, 1.0))) is not None:
                return line
            if nobody:
                break
        asked["min_step"] = min_step
        why = f"within {timeout_s:.1f} s" if left_s <= 0 else "and nobody is left who could make one"
        raise AssertionError(f"no step like {asked} {why}\n{self._state()}")

    def wait_world(
        self, world_size: int, generation: int | None = None, run_id: str | None = None, timeout_s: float = WAIT_S
    ) -> dict[int, Line]:
        """Wait until every rank of one world of that size has stepped; returns the news of each, by rank."""
        until = time.monotonic() + timeout_s
        worlds: dict[tuple[int, int], dict[int, Line]] = {}
        while True:
            left_s = until - time.monotonic()
            line = self.wait_step(world_size=world_size, generation=generation, run_id=run_id, timeout_s=left_s)
            world = worlds.setdefault((line["generation"], line["restart_count"]), {})
            world[line["rank"]] = line
            if len(world) == world_size:
                return world

    def wait_said(self, i: int, text: str, timeout_s: float = WAIT_S) -> None:
        """Wait until a node's agent has told this to whoever sits there."""
        until = time.monotonic() + timeout_s
        while text not in self.err(i):
            if time.monotonic() > until or self.process(i).poll() is not None:
                assert text in self.err(i), f"node {i} did not say {text!r}\n{self._state()}"
            time.sleep(0.02)

    def wait_ready(self, i: int, timeout_s: float = WAIT_S) -> None:
        """Wait until a node could start its ranks: their processes are forked ahead as soon as torch is there."""
        until = time.monotonic() + timeout_s
        while "holdfast parked" not in self.processes(i).values():
            assert time.monotonic() < until, f"node {i} has no process for a rank\n{self._state()}"
            time.sleep(0.05)

    def pass_over(self) -> None:
        """Forget the news so far: what is waited for next must happen from now on."""
        self.news.pass_over()

    def wait_exit(self, i: int, timeout_s: float = WAIT_S) -> int:
        """The exit code of a node's agent."""
        try:
            code = int(self.process(i).wait(timeout_s))
        except subprocess.TimeoutExpired:
            raise AssertionError(f"node {i} still runs after {timeout_s} s\n{self._state()}") from None
        self.news.read_rest()
        return code

    # -- faults ---------------------------------------------------------------------------------------------------

    def kill_node(self, i: int) -> None:
        """SIGKILL to all of a node, the agent first. Its kernel still closes connections; cut the net first, and not
        even that: a node that lost its power."""
        self.kill_agent(i)
        while found := self.processes(i):
            _kill(found)
        self.process(i).wait(WAIT_S)

    def kill_agent(self, i: int) -> None:
        self.process(i).kill()

    def stop_agent(self, i: int) -> None:
        self.process(i).send_signal(signal.SIGSTOP)

    def cont_agent(self, i: int) -> None:
        self.process(i).send_signal(signal.SIGCONT)

    def signal_agent(self, i: int, signum: int) -> None:
        self.process(i).send_signal(signum)

    # -- what is known --------------------------------------------------------------------------------------------

    def process(self, i: int) -> subprocess.Popen[Any]:
        return self._starts[i][-1].process

    def out(self, i: int) -> str:
        return self._starts[i][-1].out.read_text(errors="replace")

    def err(self, i: int) -> str:
        return self._starts[i][-1].err.read_text(errors="replace")

    def run_dir(self, i: int) -> Path:
        [path] = set(self._log_dir(i).iterdir()) - self._starts[i][-1].older
        return path

    def events(self, i: int, name: str | None = None) -> list[Line]:
        """What this node itself has recorded."""
        lines = [json.loads(line) for line in (self.run_dir(i) / "events.jsonl").read_text().splitlines()]
        return [line["data"] for line in lines if name in (None, line["name"]) and line["node"] == lines[0]["node"]]

    def incidents(self, i: int) -> list[Line]:
        return [json.loads(path.read_text()) for path in sorted((self.run_dir(i) / "incidents").glob("*.json"))]

    def processes(self, i: int | None = None) -> dict[int, str]:
        """Every live process of a node, or of all, by the mark in its environment, with its command line."""
        marks = [f"HOLDFAST_TEST={self.mark}-{node}".encode() for node in (self._starts if i is None else [i])]
        found: dict[int, str] = {}
        for pid in linux.bearers(*marks):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                found[pid] = linux.read(f"/proc/{pid}/cmdline").replace("\0", " ").strip()
        return found

    def leftovers(self, within_s: float = 5.0) -> list[str]:
        """What is still alive of all nodes after so long: nothing, one hopes."""
        until = time.monotonic() + within_s
        while found := self.processes():
            left_s = until - time.monotonic()
            if left_s <= 0:
                return sorted(found.values())
            _wait_for_exit(next(iter(found)), left_s)
        return []

    def end(self) -> None:
        """Whatever the test did, leave nothing behind. Agents go first: they would see their ranks fail."""
        for start in itertools.chain.from_iterable(self._starts.values()):
            start.process.kill()
        while found := self.processes():
            _kill(found)
        for start in itertools.chain.from_iterable(self._starts.values()):
            start.process.wait(WAIT_S)
        self.news.close()

    # -- how it is done -------------------------------------------------------------------------------------------

    def _next(self, i: int) -> str:
        """`2` for the first start of node 2, `2.1` for the next."""
        times = len(self._starts.get(i, []))
        return f"{i}.{times}" if times else f"{i}"

    def _log_dir(self, i: int) -> Path:
        path = self.folder / f"logs-{i}"
        path.mkdir(exist_ok=True)
        return path

    def _exec(self, i: int, command: list[str], popen: dict[str, Any]) -> subprocess.Popen[Any]:
        if self.net is not None:
            return self.net.exec(i, command, **popen)
        return subprocess.Popen(command, **popen)

    def _environment(self, i: int) -> dict[str, str]:
        others = ("PET_", "TORCHELASTIC_", "HOLDFAST_", "XDG_")
        kept = {key: value for key, value in os.environ.items() if not key.startswith(others)}
        home = self.folder / "home"
        return kept | {
            "HOME": str(home),
            "XDG_CONFIG_HOME": str(home / ".config"),
            "HOLDFAST_TEST": f"{self.mark}-{i}",
            "NODE": str(i),
            "NEWS": str(self.folder / "news"),
            "STATE": str(self.folder / "step"),
            "HOLD": str(self.folder / "hold"),
            "OMP_NUM_THREADS": "1",
        }

    def _state(self) -> str:
        """What a person needs to see why a wait was in vain."""
        said = [f"the last news were {self.news.seen[-5:]}"]
        for i in sorted(self._starts):
            said.append(f"-- node {i}, exit code {self.process(i).poll()}, stderr:\n{self.err(i)[-3000:]}")
        return "\n".join(said)


MakeCluster = Callable[..., Cluster]  # the fixture `cluster`: with a Net or without


def _kill(pids: dict[int, str]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for pid in pids:
        _wait_for_exit(pid, WAIT_S)


def _wait_for_exit(pid: int, wait_s: float) -> None:
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    select.select([fd], [], [], wait_s)
    os.close(fd)
