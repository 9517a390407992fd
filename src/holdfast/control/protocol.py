"""What agents and their coordinator tell each other: small values, each sent when something happened, none polled for.

Times in a message are on its sender's monotonic clock, and `now_s` says what that clock showed when it was sent. Who
receives it moves them to its own clock by the difference; no clock is ever compared with another machine's.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from holdfast.control.causes import Cause, Kind
from holdfast.control.hangs import NO_GAPS, Gaps
from holdfast.control.incidents import Incident
from holdfast.control.stacks import Group
from holdfast.control.stragglers import Found, Window
from holdfast.control.worlds import World

VERSION = 7


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of all of them: immutable, told apart by its class name."""


# -- agent to coordinator ---------------------------------------------------------------------------------------------


class Seek(Message, frozen=True):
    """The first word on every connection: which job is meant. Several may meet at one endpoint."""

    run_id: str


class Register(Message, frozen=True):
    """The coordinator of another job asks the one that has the endpoint to send its nodes on to this port."""

    run_id: str
    port: int


class Request(Message, frozen=True):
    """A rank of this node asks for something: exclude-node or shutdown."""

    generation: int
    rank: int
    action: str
    description: str


class Hello(Message, frozen=True):
    """A node has a warm zygote and can take part. Said once per connection, again after each reconnection, with what it
    knows of the past: a coordinator that has lost its ledger must not hand out a generation again."""

    version: int
    node: str  # one life of one agent
    host: str
    addr: str
    local_size: int
    store_port: int  # where it would keep the store, if it had group rank 0
    role: str = "default"
    order: int | None = None  # its place by the infrastructure: SLURM_PROCID, GROUP_RANK, or --node-rank
    arrival: int = -1  # as a coordinator told it before
    term: int = -1  # the newest coordinator's it has obeyed
    generation: int = -1  # the newest it was told of
    restarts: int = 0
    running: int = -1  # the generation of which it has live ranks
    ready: bool = True
    settings: str = ""  # what must be the same on all nodes, for a warning where it is not
    now_s: float = 0.0
    learned: str = ""  # the timeouts that its ranks have agreed on
    job_id: str = ""  # of the worlds that it has had
    asks: Request | None = None  # of its last world, which may be over; the next one must not be formed without it
    staying: bool = False  # it has processes that were ranks, and wait to be so again
    opened: tuple[int, int] = (-1, 0)  # the last incident that it heard of: generation and number
    failed_at_s: float = 0.0  # when that began


class Beat(Message, frozen=True):
    """Alive. Of constant size."""

    now_s: float
    generation: int = -1
    steps: int = -1
    gaps_s: Gaps = NO_GAPS  # the longest that any rank here gave no sign, by phase
    trained: bool = False  # ranks here have done enough steps to learn from
    busy_for_s: float = 0.0  # so long may ranks here still evaluate or save
    calm_for_s: float = -1.0  # so long ago one was last done with that; -1: never


class Started(Message, frozen=True):
    """All ranks of this node have a process."""

    generation: int


class Stepped(Message, frozen=True):
    """All ranks of this node have done their first step, the last of them at `at_s`."""

    generation: int
    at_s: float
    now_s: float
    stays: bool = False  # and all of them can stay


class Failing(Message, frozen=True):
    """A rank of this node has failed, and its others are being stopped. The causes follow with `Down`."""

    generation: int
    why: str
    hang: bool = False
    native: bool = False  # the hang cost so much already that C frames, where they can be had, are worth a second


class Down(Message, frozen=True):
    """No rank of the generation is left on this node."""

    generation: int
    now_s: float
    causes: tuple[Cause, ...] = ()
    steps: int | None = None
    ready: bool = True
    store_port: int = 0
    fit: bool = True  # False: it holds processes that cannot be ended, and leaves the job
    base: int = 0  # the steps that an optimizer had done before this world
    groups: tuple[Group, ...] = ()  # what the ranks were doing, if they hung
    staying: bool = False  # some have only left it, or a standby is there
    stay: int = 0  # so many have
    stays: bool = False  # all could, when they were told to stop
    anew: str = ""  # why none has that could
    replaced: int = 0  # so many could have, and did not get out
    as_they_are: bool = False  # those that stay can be no others, in a world of no other size


class Done(Message, frozen=True):
    """All ranks of this node ended with 0."""

    generation: int
    steps: int | None = None


class Ready(Message, frozen=True):
    """A zygote is there again."""

    store_port: int


class Leaving(Message, frozen=True):
    """This node was told to stop, and will not come back."""

    signum: int


class Learned(Message, frozen=True):
    """The ranks have agreed on timeouts: the client's `state_dict`, in JSON."""

    state: str


class Recorded(Message, frozen=True):
    """Lines of this node's record, for that of the whole job. `now_s` is what that record's own time is."""

    now_s: float
    last: int  # the number of the last of them
    lines: tuple[bytes, ...]


class Paced(Message, frozen=True):
    """What the ranks of this node needed for themselves, lately."""

    generation: int
    window: Window


class Peek(Message, frozen=True):
    """Somebody at this node wants to see what all ranks are doing."""

    visit: int


class Shown(Message, frozen=True):
    """What the ranks of one node are doing; the coordinator passes it on to the node that asked."""

    origin: str
    visit: int
    nodes: int  # how many were asked
    host: str
    groups: tuple[Group, ...]


class Look(Message, frozen=True):
    """Somebody wants to see the nodes; `lift` is the host, if any, whose quarantine is to end."""

    lift: str = ""


ToCoordinator = (
    Seek | Register | Hello | Beat | Started | Stepped | Failing | Down | Done | Ready | Leaving | Learned | Request
    | Recorded | Paced | Peek | Shown | Look
)  # fmt: skip


# -- coordinator to agent ---------------------------------------------------------------------------------------------


class Here(Message, frozen=True):
    """The coordinator of that job is at the other end."""


class Elsewhere(Message, frozen=True):
    """It is at another port of the same host."""

    port: int


class Nobody(Message, frozen=True):
    """Nothing is known of that job here."""


class Welcome(Message, frozen=True):
    term: int
    arrival: int
    said_s: float = 0.0  # the `now_s` of the hello
    recorded: int = -1  # the last line of this node that the coordinator has


class Refused(Message, frozen=True):
    """This node cannot take part, ever."""

    reason: str


class Heard(Message, frozen=True):
    """The answer to a beat, with that beat's own time. A node's lease counts from there: an answer may lie in a buffer
    for as long as a frozen machine sleeps, and says nothing of the time since."""

    said_s: float
    gaps_s: Gaps = NO_GAPS  # the longest of all nodes
    trained: bool = False
    busy_for_s: float = 0.0  # of the other nodes
    calm_for_s: float = -1.0
    stepped: bool = False  # a rank has done a step in this world


class Launch(Message, frozen=True):
    """A node's own share of a new world."""

    world: World
    learned: str = ""


class Stop(Message, frozen=True):
    """End the ranks of the generation and of any older one. If it hangs, write down first what they are doing; if
    nothing is wrong with it, let them end at a boundary."""

    generation: int
    why: str
    hang: bool = False
    native: bool = False
    drain: bool = False


class Show(Message, frozen=True):
    """Say what your ranks are doing."""

    origin: str
    visit: int
    nodes: int


class Standby(Message, frozen=True):
    """This node is a spare."""

    why: str


class Waiting(Message, frozen=True):
    """There is no world, and this is what is missing."""

    why: str


class Note(Message, frozen=True):
    """Something that a person at this node should read."""

    text: str


class Straggles(Message, frozen=True):
    """A rank of this node holds all others up, or does so no longer."""

    generation: int
    found: Found


class Opened(Message, frozen=True):
    incident: Incident
    now_s: float


class Closed(Message, frozen=True):
    incident: Incident
    now_s: float


class Over(Message, frozen=True):
    """The job has ended; None is success."""

    kind: Kind | None
    reason: str = ""
    steps: int = 0
    elsewhere: bool | None = None  # whether another machine may do better; None: the kind says


class Seen(Message, frozen=True):
    """One node, for those who look."""

    host: str
    addr: str
    ranks: int
    state: str  # rank 0..3 | spare | joining | quarantined | lost
    why: str = ""


class Nodes(Message, frozen=True):
    """The answer to `Look`."""

    run_id: str
    term: int
    generation: int
    restarts: int
    max_restarts: int
    phase: str
    nodes: tuple[Seen, ...]  # at most MAX_NODES_SHOWN of them
    count: int
    lifted: bool = False


ToAgent = (
    Here | Elsewhere | Nobody | Welcome | Refused | Heard | Launch | Stop | Standby | Waiting | Note | Opened | Closed
    | Show | Shown | Over | Nodes | Straggles
)  # fmt: skip

# What a cause may carry over the network, in bytes. A traceback is read from its end.
MAX_TRACEBACK = 8_000
MAX_LINE = 400
MAX_CAUSES = 8
MAX_LEARNED = 32_000
MAX_RECORDED = 64_000  # lines of a record, in one message, but for the last of them
MAX_NODES_SHOWN = 1_000

T = TypeVar("T", Cause, Incident)


def trimmed(causes: tuple[Cause, ...]) -> tuple[Cause, ...]:
    """The causes, small enough to send."""
    return tuple(
        msgspec.structs.replace(
            cause,
            headline=_start(cause.headline),
            where=_start(cause.where),
            traceback=_end(cause.traceback),
            stderr_tail=tuple(_start(line) for line in cause.stderr_tail),
        )
        for cause in causes[:MAX_CAUSES]
    )


def _end(text: str) -> str:
    return text[-MAX_TRACEBACK:].encode(errors="replace")[-MAX_TRACEBACK:].decode(errors="ignore")


def _start(line: str) -> str:
    return line[:MAX_LINE].encode(errors="replace")[:MAX_LINE].decode(errors="ignore")


def shifted(value: T, by_s: float) -> T:
    """The same on another clock."""
    moved = {
        name: at_s + by_s
        for name in value.__struct_fields__
        if name.endswith("_at_s") and (at_s := getattr(value, name)) is not None
    }
    return msgspec.structs.replace(value, **moved)
