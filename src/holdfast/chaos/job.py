"""The job that is broken: its agents as child processes, their records as they grow, and their lives, one by one."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO

import msgspec

from holdfast import linux
from holdfast.agent import doorbell
from holdfast.observe import record
from holdfast.observe.state import State

LIVES = "lives.jsonl"
MARK = "HOLDFAST_CHAOS_MARK"
CHAOS = "chaos"  # stands for a node in lines of faults
DIGEST = "final weights: "  # a line of the program's output that begins so is its own word on its weights
MAX_OUTPUT_BYTES = 4 << 20  # of each stream; the older half goes
END_S = 10.0
ASK_S = 2.0
_CLONE_NEWNET = 0x40000000

Command = Callable[[int, str], list[str]]  # of a node, with the folder for its logs
Namespace = Callable[[int], str]  # of a node's network; '' where it has none of its own


class Lived(msgspec.Struct, frozen=True):
    """One agent's life, and where its record is."""

    life: int
    node: int
    run_dir: str


class Output:
    """What a program prints, kept to a size. A campaign runs for hours, and prints as long."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.digest = ""

    def follow(self, stream: IO[bytes]) -> threading.Thread:
        """Who reads it, up to its end."""
        reader = threading.Thread(target=self._read, args=(stream,), daemon=True, name="holdfast-output")
        reader.start()
        return reader

    def _read(self, stream: IO[bytes]) -> None:
        with stream, open(self._path, "ab", buffering=0) as file:
            for line in stream:
                text = line.decode(errors="replace")
                if text.startswith(DIGEST):
                    self.digest = text.removeprefix(DIGEST).strip()
                if file.tell() > MAX_OUTPUT_BYTES:
                    self._halve()
                with contextlib.suppress(OSError):
                    file.write(line)

    def _halve(self) -> None:
        kept = self._path.read_bytes()[-MAX_OUTPUT_BYTES // 2 :]
        self._path.write_bytes(kept[kept.find(b"\n") + 1 :])


class Agent:
    """One `holdfast run`, in one of its lives."""

    def __init__(
        self, argv: Sequence[str], env: Mapping[str, str], log_dir: Path, out: Output, err: Output, namespace: str = ""
    ) -> None:
        log_dir.mkdir(parents=True, exist_ok=True)
        self._log_dir = log_dir
        self._namespace = namespace
        self._older = set(os.listdir(log_dir))
        self._reader: record.Reader | None = None
        self.others_s = 0.0  # when a line of another node last came into its record
        self.run_dir = ""
        self.state = State()
        self.writer: int | None = None  # its pid
        # It dies with the campaign, also with one that is killed; its janitor sees that, and ends all that is below it.
        self.process = subprocess.Popen(
            argv,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=partial(linux.die_with_parent, os.getpid()),
        )
        assert self.process.stdout is not None and self.process.stderr is not None
        self._outputs = (out.follow(self.process.stdout), err.follow(self.process.stderr))

    def take(self) -> None:
        """What is new in its record."""
        if self._reader is None and not self._find():
            return
        assert self._reader is not None
        for noted in self._reader:
            self.state.take(noted)
            if noted.node not in (self.state.lead, CHAOS):
                self.others_s = time.monotonic()
            match noted.what:
                case record.WriterStarted(pid=pid):
                    self.writer = pid
                case record.WriterEnded():
                    self.writer = None

    def _find(self) -> bool:
        for name in set(os.listdir(self._log_dir)) - self._older:
            with contextlib.suppress(OSError):
                self._reader = record.Reader(self._log_dir / name / record.NAME)
                self.run_dir = str(self._log_dir / name)
                return True
        return False

    def progress(self) -> record.Progress | None:
        """How far its ranks are in this moment."""
        if not self._namespace:
            return _ask(self.process.pid)
        # Doorbells are heard in their own network alone, and a thread that went there stays there.
        found: list[record.Progress | None] = []
        thread = threading.Thread(target=lambda: found.append(_ask(self.process.pid, self._namespace)))
        thread.start()
        thread.join()
        return found[0] if found else None

    @property
    def code(self) -> int | None:
        return self.process.poll()

    def kill(self) -> None:
        """With all that came of it, as when a machine goes down."""
        below = list(linux.descendants(self.process.pid))
        linux.signal_all([self.process.pid, *below], signal.SIGKILL)
        self.process.wait()
        for pid in below:
            linux.end(pid, END_S)
        for reader in self._outputs:
            reader.join(END_S)  # its last words; a process that got away may still hold the stream

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()


class Job:
    """All agents of it. A life begins with the command, and ends with the last of them."""

    def __init__(
        self,
        folder: Path,
        command: Command,
        env: Mapping[str, str],
        nodes: int = 1,
        namespace: Namespace = lambda node: "",
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._command = command
        self.mark = f"{os.getpid()}-{time.monotonic_ns()}"
        self._env = {**env, MARK: self.mark}
        self._nodes, self._namespace = nodes, namespace
        self._out, self._err = Output(folder / "out"), Output(folder / "err")
        self._told: set[str] = set()
        self.agents: list[Agent] = []
        self.life = -1

    def begin(self) -> None:
        self.life += 1
        for agent in self.agents:
            agent.close()
        self.agents = []
        for node in range(self._nodes):
            self.agents.append(self._start(node))

    def start_node(self, node: int) -> None:
        self.agents[node].close()
        self.agents[node] = self._start(node)

    def _start(self, node: int) -> Agent:
        log_dir = self.folder / "logs" / str(node)
        argv = [sys.executable, "-m", "holdfast", "run", *self._command(node, str(log_dir))]
        if namespace := self._namespace(node):
            argv = ["nsenter", f"--net={namespace}", *argv]
        return Agent(argv, self._env, log_dir, self._out, self._err, namespace)

    def take(self) -> None:
        for node, agent in enumerate(self.agents):
            agent.take()
            if agent.run_dir and agent.run_dir not in self._told:
                self._told.add(agent.run_dir)
                with open(self.folder / LIVES, "ab") as file:
                    where = os.path.relpath(agent.run_dir, self.folder)  # so that a campaign can be moved
                    file.write(msgspec.json.encode(Lived(self.life, node, where)) + b"\n")

    @property
    def lead(self) -> Agent:
        return self.agents[0]

    @property
    def state(self) -> State:
        return self.lead.state

    @property
    def digest(self) -> str:
        return self._out.digest

    def pid_of(self, rank: int) -> int:
        """0: it has no process now."""
        for agent in self.agents:
            if (found := agent.state.ranks.get(rank)) is not None and found.pid:
                return found.pid
        return 0

    @property
    def code(self) -> int | None:
        """The first that is not 0; None while any agent runs."""
        codes = [agent.code for agent in self.agents]
        if any(code is None for code in codes):
            return None
        return next((code for code in codes if code), 0)

    def kill(self) -> None:
        with contextlib.ExitStack() as undo:  # all of them, whatever fails
            for agent in self.agents:
                undo.callback(agent.kill)

    def leftovers(self) -> list[str]:
        """What of it is still there a moment after its end."""
        until_s = time.monotonic() + END_S
        while found := _marked(f"{MARK}={self.mark}".encode()):
            if time.monotonic() > until_s:
                return [f"process {pid}: {text}" for pid, text in found.items()]
            time.sleep(0.05)
        return []


def _ask(pid: int, namespace: str = "") -> record.Progress | None:
    try:
        if namespace:
            with open(namespace) as file:
                if ctypes.CDLL(None).setns(file.fileno(), _CLONE_NEWNET) != 0:
                    return None
        answer = doorbell.ask(pid, doorbell.Now(), ASK_S)
    except (doorbell.NoAnswer, OSError):
        return None
    return answer.progress if isinstance(answer, doorbell.Pace) else None


def _marked(mark: bytes) -> dict[int, str]:
    found: dict[int, str] = {}
    for pid in linux.bearers(mark):
        with contextlib.suppress(OSError):
            found[pid] = linux.read(f"/proc/{pid}/cmdline").replace("\0", " ").strip()
    return found


def lives(folder: Path) -> list[Lived]:
    """Run directories are relative to the job's folder. Raises OSError."""
    decoder = msgspec.json.Decoder(Lived)
    return [decoder.decode(line) for line in (folder / LIVES).read_bytes().splitlines() if line]
