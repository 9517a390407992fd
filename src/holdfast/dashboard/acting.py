"""What the page can do to a job: drain it, or kill a rank. Only on this machine, and only through the job's own agent.

A pid in a record may be anybody's by now. So a process is held first, then proven, and the signal goes to
what is held.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from holdfast import linux
from holdfast.agent import doorbell
from holdfast.observe.record import Progress
from holdfast.observe.state import State

ASK_S = 2.0
MAX_DEPTH = 16  # of a rank below its agent


class Refused(Exception):
    """Why nothing was done."""


class Agent:
    """The agent that writes this record."""

    def __init__(self, run_dir: str) -> None:
        self._run_dir = run_dir

    def standing(self, state: State) -> str:
        """'here', 'gone', or 'elsewhere' where this machine cannot tell."""
        try:
            self._lead(state)
        except Refused:
            host, _, _ = state.lead.rpartition(":")
            return "gone" if host == socket.gethostname() else "elsewhere"
        return "here"

    def progress(self, state: State) -> Progress | None:
        """How far its ranks are at this moment, which the record says only every few seconds."""
        with contextlib.suppress(Refused, doorbell.NoAnswer):
            answer = doorbell.ask(self._lead(state), doorbell.Now(), ASK_S)
            return answer.progress if isinstance(answer, doorbell.Pace) else None
        return None

    def drain(self, state: State) -> str:
        """SIGTERM, which `holdfast run` takes as the wish for an orderly end."""
        with _held(self._lead(state), "the agent") as fd:
            pid = self._lead(state)
            signal.pidfd_send_signal(fd, signal.SIGTERM)
        return f"the agent (pid {pid}) was asked to stop: its ranks save where they can, and end"

    def kill(self, state: State, number: int) -> str:
        rank = state.ranks.get(number)
        if rank is None:
            raise Refused(f"there is no rank {number}; see the grid")
        if rank.pid == 0 or rank.state in ("exited", "failed"):
            raise Refused(f"rank {number} has no process now")
        agent = self._agent_of(state, rank.node)
        with _held(rank.pid, f"rank {number}") as fd:
            if agent not in _above(rank.pid):
                raise Refused(f"pid {rank.pid} is not rank {number} any more")
            signal.pidfd_send_signal(fd, signal.SIGKILL)
        return f"rank {number} (pid {rank.pid}) was sent SIGKILL"

    def _lead(self, state: State) -> int:
        """Its pid, proven: it answers for this job, and keeps this very record."""
        node = state.nodes.get(state.lead)
        if node is None or state.ended is not None:
            raise Refused("the job has ended" if node is not None else "no job has begun in this record")
        job = _job(node.pid)
        if job is None or job.run_id != state.run_id or not self._is_ours(job):
            raise Refused("the job's agent is not on this machine, or has ended")
        return node.pid

    def _agent_of(self, state: State, name: str) -> int:
        """Of a node on this machine. Containers number their processes alike, so the host's name has to be the same as
        that of the agent which is proven to be here."""
        lead = self._lead(state)
        if name == state.lead:
            return lead
        node = state.nodes.get(name)
        if node is None or name.rpartition(":")[0] != state.lead.rpartition(":")[0]:
            raise Refused(f"it runs on {name}; open the page on that machine")
        job = _job(node.pid)
        if job is None or job.run_id != state.run_id:
            raise Refused(f"its agent, {name}, does not answer")
        return node.pid

    def _is_ours(self, job: doorbell.Job) -> bool:
        with contextlib.suppress(OSError):
            # The agent may have been given a path that holds where it was started.
            return os.path.samefile(os.path.join(f"/proc/{job.pid}/cwd", job.run_dir), self._run_dir)
        return False


def _job(pid: int) -> doorbell.Job | None:
    with contextlib.suppress(doorbell.NoAnswer):
        answer = doorbell.ask(pid, doorbell.Who(), ASK_S)
        return answer if isinstance(answer, doorbell.Job) and answer.pid == pid else None
    return None


def _above(pid: int) -> list[int]:
    found: list[int] = []
    while len(found) < MAX_DEPTH and (pid := linux.parent(pid)) > 1:
        found.append(pid)
    return found


@contextmanager
def _held(pid: int, who: str) -> Iterator[int]:
    """Should it end and its number go to another, the signal goes to nobody."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        raise Refused(f"{who} (pid {pid}) is gone") from None
    try:
        yield fd
    except ProcessLookupError:
        raise Refused(f"{who} (pid {pid}) has just ended") from None
    except PermissionError:
        raise Refused(f"{who} (pid {pid}) is another user's") from None
    finally:
        os.close(fd)
