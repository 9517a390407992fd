"""How faults are done from outside: signals to processes of the job, damage to its files, the loss of its nodes."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from holdfast import linux
from holdfast.chaos import disk, faults
from holdfast.chaos.disk import NotHere
from holdfast.chaos.faults import Injected, Order, Orders
from holdfast.chaos.job import Job
from holdfast.chaos.kinds import Hand
from holdfast.chaos.plan import Due

SIGNALS = {"kill": signal.SIGKILL, "segfault": signal.SIGSEGV, "stop": signal.SIGSTOP}
Mend = Callable[[], None]


class Links(Protocol):
    """The network between the nodes."""

    @property
    def addresses(self) -> list[str]: ...

    def namespace(self, node: int) -> str: ...

    def cut(self, node: int) -> None: ...

    def delay(self, node: int, delay_s: float) -> None: ...

    def lose(self, node: int, part: float) -> None: ...

    def heal(self, node: int) -> None: ...


class Etcd(Protocol):
    @property
    def endpoints(self) -> str: ...

    def kill_leader(self) -> str:
        """What was killed."""

    def mend(self) -> None: ...


class Hands:
    """Of one campaign. Each method does a fault, notes it with the moment before it was done, and returns how it is
    mended. What could not be done is no fault, so it raises and nothing is noted."""

    def __init__(
        self, folder: Path, job: Job, checkpoints: Path, links: Links | None = None, etcd: Etcd | None = None
    ) -> None:
        self._folder, self._job, self._checkpoints = folder, job, checkpoints
        self._links, self._etcd = links, etcd
        self._orders: list[Order] = []
        self._path = str(folder / "orders.json")
        (folder / "done").mkdir()
        self.tell_ranks()

    def tell_ranks(self) -> None:
        """What is theirs to do, and in which life of the job they are."""
        self._orders = [order for order in self._orders if not faults.claimed(str(self._folder), order.number)]
        orders = Orders(str(self._folder), max(0, self._job.life), tuple(self._orders))
        faults.write_orders(self._path, orders)

    def arm(self, due: Due, rank: int | None, step: int = 0) -> None:
        """For the rank itself to do, when it is there."""
        order = Order(
            due.number, due.kind.name, rank, step, due.chance, due.generation, due.for_s, due.delay_s
        )  # fmt: skip
        self._orders.append(order)
        self.tell_ranks()

    def withdraw(self, number: int) -> bool:
        """An order that nobody has followed. False: there is none."""
        before = len(self._orders)
        self._orders = [order for order in self._orders if order.number != number]
        self.tell_ranks()
        return len(self._orders) < before

    def strike(self, due: Due, step: int, spare_number: int) -> Mend | None:
        """Raises NotHere."""
        match due.kind.hand:
            case Hand.RANK:
                self._rank(due, step, spare_number)
            case Hand.PROCESS:
                self._process(due, step)
            case Hand.WRITER:
                return self._writer(due, step)
            case Hand.DISK if due.kind.name == "full-disk":
                return self._full_disk(due, step)
            case Hand.DISK | Hand.NODE:
                self._loss(due, step)
            case Hand.LINK:
                return self._link(due, step)
            case Hand.ETCD:
                return self._leader(due, step)
        return None

    # -- each of them -------------------------------------------------------------------------------------------------

    def _rank(self, due: Due, step: int, spare_number: int) -> None:
        size = self._size
        rank = due.struck(size)
        if due.kind.name != "crash-on-import":
            self.arm(due, rank)
            return
        # A program is imported when a world starts: one is made to.
        pid, when = self._pid_of(rank), faults.now()
        self.arm(msgspec.structs.replace(due, generation=None), rank)
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            self.withdraw(due.number)
            raise
        self._note(due, step, when, number=spare_number, kind="kill", rank=rank, pid=pid, text="so that a world starts")

    def _process(self, due: Due, step: int) -> None:
        rank = due.struck(self._size)
        pid = self._pid_of(rank)
        when = faults.now()
        os.kill(pid, SIGNALS[due.kind.name])
        self._note(due, step, when, rank=rank, pid=pid)

    def _writer(self, due: Due, step: int) -> Mend | None:
        pid = self._job.lead.writer
        if pid is None or not self._is_ours(pid):
            raise NotHere("nobody writes checkpoints")
        when = faults.now()
        os.kill(pid, signal.SIGKILL if due.kind.name == "writer-loss" else signal.SIGSTOP)
        self._note(due, step, when, pid=pid, for_s=due.for_s if due.kind.lasts else 0.0)
        if due.kind.name == "writer-loss":
            return None
        return lambda: linux.signal_all([pid], signal.SIGCONT)

    def _full_disk(self, due: Due, step: int) -> Mend:
        when = faults.now()
        text = disk.fill(self._checkpoints)
        self._note(due, step, when, for_s=due.for_s, text=text)
        return lambda: disk.free(self._checkpoints)

    def _loss(self, due: Due, step: int) -> None:
        if due.kind.name in ("node-loss", "coordinator-loss"):
            self._lose_node(due, step)
            return
        when, before = faults.now(), {"generation": self._generation, "life": self._job.life}
        if due.kind.name != "job-loss" and self._count_saved() < 2:
            raise NotHere(f"there are fewer than 2 checkpoints in {self._checkpoints}")
        self._job.kill()
        try:
            if due.kind.name == "job-loss":
                self._note(due, step, when, **before)
            else:
                done = disk.damage(self._checkpoints, due.kind.name, due.chance)
                text = f"{done.file}: {done.text}"
                self._note(due, step, when, **before, file=done.name, committed=done.step, text=text)
        finally:  # a job that was killed is started again, whether or not its files could be damaged
            self._job.begin()
            self.tell_ranks()

    def _lose_node(self, due: Due, step: int) -> None:
        node = self._node(due, first=1) if due.kind.name == "node-loss" else self._coordinator
        agent, when = self._job.agents[node], faults.now()
        if agent.code is not None:
            raise NotHere(f"node {node} has ended")
        agent.kill()
        self._note(
            due, step, when, node=node, pid=agent.process.pid
        )  # by the record of its old life, if it is the first
        self._job.start_node(node)

    def _link(self, due: Due, step: int) -> Mend:
        if self._links is None:
            raise NotHere("the nodes have no network of their own")
        links, node, when = self._links, self._node(due, first=1), faults.now()
        if due.kind.name == "link-cut":
            links.cut(node)
        elif due.kind.name == "link-delay":
            links.delay(node, due.delay_s)
        else:
            links.lose(node, due.part)
        self._note(due, step, when, node=node, for_s=due.for_s)
        return lambda: links.heal(node)

    def _leader(self, due: Due, step: int) -> Mend:
        if self._etcd is None:
            raise NotHere("the campaign has no etcd")
        when = faults.now()
        text = self._etcd.kill_leader()
        self._note(due, step, when, text=text)
        return self._etcd.mend

    # -- what they need -----------------------------------------------------------------------------------------------

    def _note(self, due: Due, step: int, when: tuple[float, str], **more: object) -> None:
        at_s, told = when
        plain: dict[str, object] = {
            "number": due.number, "kind": due.kind.name, "life": self._job.life, "generation": self._generation,
            "at_s": at_s, "time": told, "step": step,
        }  # fmt: skip
        faults.append(str(self._folder), msgspec.convert({**plain, **more}, Injected))

    @property
    def _generation(self) -> int:
        world = self._job.state.world
        return world.generation if world is not None else -1

    @property
    def _size(self) -> int:
        world = self._job.state.world
        if world is None:
            raise NotHere("no world runs")
        return world.size

    def _pid_of(self, rank: int) -> int:
        pid = self._job.pid_of(rank)
        if not self._is_ours(pid):
            raise NotHere(f"rank {rank} has no process")
        return pid

    def _is_ours(self, pid: int) -> bool:
        """Numbers of processes come again; nobody else's is to be hurt."""
        ours = {below for agent in self._job.agents for below in linux.descendants(agent.process.pid)}
        return pid in ours and linux.state(pid) not in ("", "Z")

    def _node(self, due: Due, first: int) -> int:
        nodes = len(self._job.agents)
        return due.node if due.node is not None else first + int(due.chance * (nodes - first))

    @property
    def _coordinator(self) -> int:
        """It is the endpoint's node; with etcd, the one to whom the others send what they record."""
        if self._etcd is None:
            return 0
        agents = self._job.agents
        node = max(range(len(agents)), key=lambda node: agents[node].others_s)
        if not agents[node].others_s:
            raise NotHere("nobody is seen to have the coordinator")
        return node

    def _count_saved(self) -> int:
        from holdfast.checkpoint import catalogue
        from holdfast.checkpoint.errors import CheckpointError
        from holdfast.checkpoint.storage import open_storage

        with contextlib.suppress(CheckpointError, OSError):
            found = catalogue.find(open_storage(str(self._checkpoints))).found
            return sum(not each.superseded for each in found)
        return 0
