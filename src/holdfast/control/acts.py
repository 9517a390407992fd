"""What a node hears, beside its coordinator's messages, and what it does about it."""

from __future__ import annotations

import msgspec

from holdfast.control import protocol
from holdfast.control.causes import Kind, RankExit
from holdfast.control.hangs import Hang
from holdfast.control.incidents import Incident
from holdfast.control.stacks import Group
from holdfast.control.stragglers import Found, Window
from holdfast.control.worlds import World

# -- events -----------------------------------------------------------------------------------------------------------


class HelpersReady(msgspec.Struct, frozen=True):
    """Workers can be forked."""


class HelpersLost(msgspec.Struct, frozen=True):
    """The zygote or the janitor was killed, and every worker with it."""

    what: str
    steps: int | None = None  # that its ranks had done


class KeeperLost(msgspec.Struct, frozen=True):
    """The store keeper of the generation was killed. What is connected goes on, but nothing new can start."""

    generation: int


class Started(msgspec.Struct, frozen=True):
    """All local ranks of the generation have a process."""

    generation: int


class Stepped(msgspec.Struct, frozen=True):
    """A rank has done its first step."""

    rank: int
    generation: int
    at_s: float


class Exited(msgspec.Struct, frozen=True):
    """A rank will not do another thing. Its process may be there until `Gone`: the kernel takes it apart."""

    generation: int
    exit: RankExit
    gone: bool = True


class Gone(msgspec.Struct, frozen=True):
    """The process of a rank that had ended before is, with all that it held."""

    generation: int
    rank: int


class Stays(msgspec.Struct, frozen=True):
    """A rank can leave its world, when that is over, and take part in the next one; or cannot any more."""

    generation: int
    rank: int
    stays: bool = True
    why: str = ""  # it cannot
    as_it_is: bool = False  # as the same rank of as many, and not otherwise


class StandsBy(msgspec.Struct, frozen=True):
    """So many processes wait to be ranks."""

    ready: int


class Stumbled(msgspec.Struct, frozen=True):
    """A collective has failed in a rank that stays. What has become of its world is not known to it."""

    generation: int
    rank: int
    at_s: float
    headline: str


class Left(msgspec.Struct, frozen=True):
    """A rank has left its world, and waits for a place in the next one."""

    generation: int
    rank: int
    steps: int | None = None
    base: int = 0


class Bequeathed(msgspec.Struct, frozen=True):
    """A rank cannot leave its world, and nothing is lost with it any more."""

    generation: int
    rank: int
    left: bool = True  # its state; else that was in snapshots


class Hung(msgspec.Struct, frozen=True):
    """A rank's monitor has given it up."""

    generation: int
    hang: Hang
    headline: str


class Dumped(msgspec.Struct, frozen=True):
    """The ranks' stacks are written down. Whose request it was comes back with it."""

    generation: int
    groups: tuple[Group, ...]
    show: protocol.Show | None = None


class Learned(msgspec.Struct, frozen=True):
    """The ranks have agreed on timeouts."""

    state: str


class Asked(msgspec.Struct, frozen=True):
    """A rank asks for something: continue, exclude-node or shutdown."""

    generation: int
    rank: int
    action: str
    description: str


class Paced(msgspec.Struct, frozen=True):
    """The ranks here have been measured."""

    generation: int
    window: Window


class PeekAsked(msgspec.Struct, frozen=True):
    """Somebody here wants to see what all ranks are doing."""

    visit: int


class StopRequested(msgspec.Struct, frozen=True):
    signum: int


class Contact(msgspec.Struct, frozen=True):
    """A coordinator is at the other end of a new connection."""


class ContactLost(msgspec.Struct, frozen=True):
    """The connection is gone."""


class TimerFired(msgspec.Struct, frozen=True):
    name: str
    key: int


Local = (
    HelpersReady | HelpersLost | KeeperLost | Started | Stepped | Exited | Gone | Stays | StandsBy | Stumbled | Left
    | Bequeathed | Hung | Dumped | Learned | Asked | Paced | PeekAsked | StopRequested
)  # fmt: skip
Event = Local | Contact | ContactLost | TimerFired | protocol.ToAgent


# -- actions ----------------------------------------------------------------------------------------------------------


class PrepareHelpers(msgspec.Struct, frozen=True):
    """Start a janitor and a zygote."""


class Run(msgspec.Struct, frozen=True):
    """Fork the ranks of a world, and give them the timeouts that earlier ones have agreed on. Processes that have
    stayed are those ranks instead, unless they are `outdated`: others have trained on without them."""

    world: World
    learned: str = ""
    outdated: bool = False


class Signal(msgspec.Struct, frozen=True):
    """`drain`: ranks that can are asked to end at the same boundary instead."""

    ranks: tuple[int, ...]
    signum: int
    why: str
    drain: bool = False


class Leave(msgspec.Struct, frozen=True):
    """Have ranks leave their world, and stay; at the same boundary, if there is time for that."""

    ranks: tuple[int, ...]
    why: str
    boundary: bool = False


class DumpStacks(msgspec.Struct, frozen=True):
    """Write down what the ranks are doing, and say when it is done. `native`: there is time for C frames too."""

    generation: int
    show: protocol.Show | None = None
    native: bool = False


class Agree(msgspec.Struct, frozen=True):
    """What ranks elsewhere take their time for."""

    heard: protocol.Heard


class Shown(msgspec.Struct, frozen=True):
    """One node's answer to `PeekAsked`."""

    shown: protocol.Shown


class Timer(msgspec.Struct, frozen=True):
    name: str
    key: int  # what it was set for; it comes back with it, and counts only if that is still so
    after_s: float


class ClearLeftovers(msgspec.Struct, frozen=True):
    """The world is over: end whatever its workers left running."""


class Tell(msgspec.Struct, frozen=True):
    """Send to the coordinator. The shell fills in what it alone knows: the port of the store, the steps done."""

    message: protocol.ToCoordinator


class Lease(msgspec.Struct, frozen=True):
    """Ranks may step until then, whatever becomes of this agent."""

    until_s: float


class HangUp(msgspec.Struct, frozen=True):
    """What is at the other end is silent, or has been replaced: close the connection, and look for a coordinator."""

    why: str


class Told(msgspec.Struct, frozen=True):
    """Tell the person at this node."""

    text: str


class Straggles(msgspec.Struct, frozen=True):
    """Say that a rank here is slow, or no longer so."""

    generation: int
    found: Found


class Opened(msgspec.Struct, frozen=True):
    """A failure was understood and answered; times on this node's clock."""

    incident: Incident


class Closed(msgspec.Struct, frozen=True):
    """What the failure cost is known."""

    incident: Incident


class Finish(msgspec.Struct, frozen=True):
    """This node's part is over; None is success."""

    kind: Kind | None
    reason: str = ""
    drained: bool = False  # it was told to end, and all ranks here did so in order
    elsewhere: bool | None = None  # whether another machine may do better; None: the kind says


Action = (
    PrepareHelpers | Run | Signal | Leave | DumpStacks | Agree | Shown | Timer | ClearLeftovers | Tell | Lease | HangUp
    | Told | Straggles | Opened | Closed | Finish
)  # fmt: skip
