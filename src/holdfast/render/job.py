"""A `holdfast run` command as a scheduler has to know it, with what every rendered file adds to it."""

from __future__ import annotations

import msgspec

# Between the request to save and SIGKILL, where the command does not say. Its own default, 30 s, suits a person at a
# terminal; a scheduler that warns can wait for a large state.
SHUTDOWN_S = 90
# What comes after that: SIGKILL is waited for (10 s), and the agents take leave of each other.
LEAVE_S = 30


class Job(msgspec.Struct, frozen=True):
    """What is to be run, and on how much."""

    command: tuple[str, ...]  # the flags and the script of `holdfast run`, as they were given
    min_nodes: int = 1
    max_nodes: int = 1
    spares: int = 0
    gpus: int = 0  # of each node
    shutdown_s: int | None = None  # as given
    says_cause: bool = False  # --exit-code-from-cause was given
    several: bool = False  # nodes have to find each other
    at_first: bool = False  # they meet at the first of them, by c10d; else at the etcd that the command names
    has_id: bool = False  # the command names the job
    needs_secret: bool = False  # the command brings none, and does not do without

    @property
    def most_nodes(self) -> int:
        return self.max_nodes + self.spares

    @property
    def can_lose(self) -> int:
        """How many of these it goes on without."""
        return self.most_nodes - self.min_nodes

    @property
    def leaves_s(self) -> int:
        """How long it takes at most from a signal to the end of the last process."""
        return (SHUTDOWN_S if self.shutdown_s is None else self.shutdown_s) + LEAVE_S

    @property
    def added(self) -> tuple[str, ...]:
        """A drained job exits with 0, as one that is finished does, unless the code says the cause. Who is to start it
        again has to tell these apart."""
        added = () if self.says_cause else ("--exit-code-from-cause",)
        return (*added, f"--shutdown-timeout={SHUTDOWN_S}") if self.shutdown_s is None else added
