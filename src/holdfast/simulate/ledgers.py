"""Where the simulated coordinator writes: a file on its host, or an etcd that is at times away, or slow to say."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from holdfast.control.membership import Record, Settings
from holdfast.control.restarts import History
from holdfast.simulate.network import ETCD, Network
from holdfast.simulate.timeline import Timeline

if TYPE_CHECKING:
    from holdfast.simulate.agent import Agent

TTL_S = 2.0  # of a coordinator's lease in etcd
RETRY_S = 0.25


class Leader(msgspec.Struct, frozen=True):
    term: int
    node: str


class File:
    """On the disk of the host with the endpoint: it outlives the agent, and a machine's crash."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.record: Record | None = None
        self.touched_s = 0.0

    def find(self, settings: Settings) -> tuple[Record | None, bool]:
        """What a restarted agent takes up, and whether that is so old that all of its nodes must have given up since:
        then the job begins anew, but never with the same terms and generations."""
        record = self.record
        old_s = settings.join_timeout_s + settings.node_timeout_s
        if record is None or record.over is not None or self.timeline.now_s - self.touched_s <= old_s:
            return record, False
        spent = record.history.spent
        history = History(settings.max_restarts, spent, refilled=spent)
        return msgspec.structs.replace(record, history=history, seats=()), True

    def write(self, agent: Agent, term: int, record: Record, done: Callable[[bool], None]) -> None:
        random = self.timeline.random
        delay_s = random.uniform(0.001, 0.02) if random.random() < 0.97 else random.uniform(0.1, 1.0)
        # The rename happens somewhere in between; who dies before it leaves the old record, after it the new one.
        before_s = delay_s * random.random()
        self.timeline.after(before_s, self._rename, agent, record, delay_s - before_s, done)

    def _rename(self, agent: Agent, record: Record, after_s: float, done: Callable[[bool], None]) -> None:
        if agent.host.down or not agent.may_write:
            return
        if agent.host.frozen and agent.alive:  # a machine that sleeps writes when it wakes up
            self.timeline.after(0.05, self._rename, agent, record, after_s, done)
            return
        if self.record is None or record.term >= self.record.term:  # each life has a file of its own; the newest counts
            self.record = record
            self.touched_s = self.timeline.now_s
        self.timeline.after(after_s, agent.post, done, True)

    def touch(self) -> None:
        self.touched_s = self.timeline.now_s

    def clear(self) -> None:
        self.record = None


class Etcd:
    """A register that is linearizable, with a term that fences it and a lease on who holds it. As a host of its own it
    can be cut off from others, and without a leader it answers nobody."""

    name = ETCD
    down = False

    def __init__(self, timeline: Timeline, network: Network) -> None:
        self.timeline = timeline
        self.network = network
        self.term = 0
        self.leader: Leader | None = None
        self.record: Record | None = None
        self.away = 0  # reasons for not answering
        self._lease = ("", 0)
        self._until_s = 0.0

    def call(self, agent: Agent, ask: Callable[[], object], answer: Callable[[object], None]) -> None:
        """Ask until there is an answer. An answer can be lost after the deed is done, which is then asked for again."""
        self.timeline.after(self._way_s(), self._asked, agent, ask, answer)

    def _asked(self, agent: Agent, ask: Callable[[], object], answer: Callable[[object], None]) -> None:
        if not agent.alive:
            return
        if self.away or self.network.is_cut(agent.host, self) or agent.host.frozen:
            self.timeline.after(RETRY_S, self._asked, agent, ask, answer)
            return
        result = ask()
        if self.network.is_cut(self, agent.host) or self.timeline.chance(0.01):
            self.timeline.after(RETRY_S, self._asked, agent, ask, answer)
            return
        self.timeline.after(self._way_s(), agent.post, answer, result)

    def _way_s(self) -> float:
        random = self.timeline.random
        return random.uniform(0.001, 0.01) if random.random() < 0.98 else random.uniform(0.05, 0.8)

    # -- what can be asked --------------------------------------------------------------------------------------------

    def look(self) -> Leader | None:
        return self.leader

    def campaign(self, node: str, lease: int, instead_of: Leader | None) -> tuple[Leader, Record | None] | None:
        if self.leader is not None and self._lease == (node, lease):
            return self.leader, self.record  # the answer to this very attempt was lost
        if self.leader != instead_of:
            return None
        self.term += 1
        self.leader, self._lease = Leader(self.term, node), (node, lease)
        self._renew()
        return self.leader, self.record

    def put(self, term: int, record: Record) -> bool:
        if term != self.term:
            return False
        self.record = record
        return True

    def renew(self, term: int) -> bool:
        if self.leader is None or self.leader.term != term:
            return False
        self._renew()
        return True

    def resign(self, term: int) -> bool:
        if self.leader is not None and self.leader.term == term:
            self.leader = None
        return True

    def clear(self, term: int) -> bool:
        if term == self.term:
            self.leader = self.record = None
        return True

    # -- its lease ----------------------------------------------------------------------------------------------------

    def _renew(self) -> None:
        self._until_s = self.timeline.now_s + TTL_S
        self.timeline.at(self._until_s, self._expire, self.term)

    def _expire(self, term: int) -> None:
        if self.leader is None or self.leader.term != term or self.timeline.now_s < self._until_s:
            return
        if self.away:  # leases are prolonged over a change of etcd's own leader
            self._renew()
        else:
            self.leader = None

    def lose_lease(self) -> None:
        self.leader = None
