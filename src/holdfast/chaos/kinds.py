"""Every kind of fault, as data: what it does, who does it, what it needs, and what a sound job answers to it."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from holdfast.control.causes import Kind as Cause


class Answer(StrEnum):
    """How a sound job comes through."""

    INCIDENT = "one incident"  # the world ends, with one incident that names the cause, and the next one trains
    NOTHING = "no incident"  # the same world trains on
    LIFE = "a new life"  # nobody is left to tell of it; whoever starts the command again finds what was saved


class Hand(StrEnum):
    """Who does it."""

    RANK = "the rank itself"
    PROCESS = "a signal to the rank"
    WRITER = "a signal to the writer of checkpoints"
    NODE = "SIGKILL to a node"
    DISK = "the disk of checkpoints"
    LINK = "the network between nodes"
    ETCD = "a member of etcd"


class Kind(msgspec.Struct, frozen=True):
    name: str
    what: str
    hand: Hand
    answer: Answer
    causes: frozenset[Cause] = frozenset()  # of which the incident's is one
    names_rank: bool = False  # the incident must name the rank that was struck
    lasts: bool = False  # for `for_s` seconds; then it is mended
    told: str = ""  # the event by which the job's record tells of it, where it cannot have been missed
    needs: tuple[str, ...] = ()


ROOT, CHECKPOINTS, NODES, ETCD = "root", "checkpoints", "nodes", "etcd"
NEEDS = {
    ROOT: "root on this machine",
    CHECKPOINTS: "a program that saves to $CHECKPOINT_DIR",
    NODES: "nodes = 2 or more in the plan",
    ETCD: "etcd on the path, and the package aetcd",
}

_INCIDENT, _NOTHING, _LIFE = Answer.INCIDENT, Answer.NOTHING, Answer.LIFE
_SIGNAL, _HANG, _ERROR = frozenset({Cause.SIGNAL}), frozenset({Cause.HANG}), frozenset({Cause.ERROR})
_LOST = frozenset({Cause.LOST_NODE})

_ALL = (
    Kind("kill", "SIGKILL, as the kernel's or an operator's", Hand.PROCESS, _INCIDENT, _SIGNAL, names_rank=True),
    Kind("segfault", "SIGSEGV, as a bug in C code", Hand.PROCESS, _INCIDENT, _SIGNAL, names_rank=True),
    Kind("stop", "SIGSTOP: the rank is there and does nothing", Hand.PROCESS, _INCIDENT, _HANG, names_rank=True),
    Kind("hang", "a call in Python that does not return", Hand.RANK, _INCIDENT, _HANG, names_rank=True),
    Kind("hang-gil", "a call in C that keeps the GIL", Hand.RANK, _INCIDENT, _HANG, names_rank=True),
    Kind("hang-collective", "a wait for a peer that sends nothing", Hand.RANK, _INCIDENT, _HANG),
    Kind("exception", "an exception from the training loop", Hand.RANK, _INCIDENT, _ERROR, names_rank=True),
    Kind("crash-on-import", "a kill; then an import fails in the next world", Hand.RANK, _INCIDENT, _ERROR, True),
    Kind(
        "out-of-memory", "an allocation fails: MemoryError", Hand.RANK, _INCIDENT, frozenset({Cause.OUT_OF_MEMORY}),
        names_rank=True,
    ),
    Kind("slow-rank", "delay_s more for each step", Hand.RANK, _NOTHING, lasts=True, told="straggler.found"),
    Kind(
        "writer-loss", "SIGKILL to the process that writes checkpoints", Hand.WRITER, _NOTHING, told="writer.ended",
        needs=(CHECKPOINTS,),
    ),
    Kind(
        "slow-disk", "the process that writes checkpoints stands still, as in a write that does not return",
        Hand.WRITER, _NOTHING, lasts=True, needs=(CHECKPOINTS,),
    ),
    Kind(
        "full-disk", "no byte is left where checkpoints are", Hand.DISK, _NOTHING, lasts=True,
        needs=(CHECKPOINTS, ROOT),
    ),
    Kind("job-loss", "all of the job is killed, and started again", Hand.NODE, _LIFE),
    Kind(
        "torn-file", "the newest checkpoint is cut in half; then as job-loss", Hand.DISK, _LIFE, needs=(CHECKPOINTS,)
    ),
    Kind("bit-flip", "one bit of the newest checkpoint; then as job-loss", Hand.DISK, _LIFE, needs=(CHECKPOINTS,)),
    Kind("node-loss", "a node is killed, and started again", Hand.NODE, _INCIDENT, _LOST, needs=(NODES,)),
    Kind(
        "coordinator-loss", "the node that has the coordinator, likewise", Hand.NODE, _INCIDENT, _LOST, needs=(NODES,)
    ),
    Kind(
        "link-cut", "every packet from and to a node is lost", Hand.LINK, _INCIDENT, _LOST, lasts=True,
        needs=(NODES, ROOT),
    ),
    Kind(
        "link-delay", "every packet of a node comes delay_s later", Hand.LINK, _NOTHING, lasts=True,
        needs=(NODES, ROOT),
    ),
    Kind(
        "link-loss", "a part of a node's packets is lost: `part`", Hand.LINK, _NOTHING, lasts=True,
        needs=(NODES, ROOT),
    ),
    Kind("etcd-leader-loss", "SIGKILL to etcd's leader", Hand.ETCD, _NOTHING, needs=(NODES, ETCD)),
)  # fmt: skip
KINDS: dict[str, Kind] = {kind.name: kind for kind in _ALL}
