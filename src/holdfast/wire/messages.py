"""The messages between an agent, its zygotes and its workers. All of one machine; the agents' own wire is another."""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages: immutable, told apart by its class name."""


# A command line may hold bytes that are no text; Python keeps them as lone surrogates, which no message can carry. They
# travel as private characters of the last plane, one for one.
_TO_PORTABLE = {0xDC00 + byte: 0x10FF00 + byte for byte in range(0x80, 0x100)}
_TO_NATIVE = {there: here for here, there in _TO_PORTABLE.items()}


def portable(argument: str) -> str:
    return argument.translate(_TO_PORTABLE)


def native(argument: str) -> str:
    return argument.translate(_TO_NATIVE)


# -- what a worker is to run ------------------------------------------------------------------------------------------


class Script(Message, frozen=True):
    """`python path args`, in a process that has torch already."""

    path: str
    args: tuple[str, ...] = ()


class Module(Message, frozen=True):
    """`python -m name args`."""

    name: str
    args: tuple[str, ...] = ()


class Command(Message, frozen=True):
    """Any program, started by exec."""

    argv: tuple[str, ...]


class Function(Message, frozen=True):
    """A pickled call in a private file; the result of rank N is left beside it as `result-N`."""

    path: str


Program = Script | Module | Command | Function


# -- agent to zygote --------------------------------------------------------------------------------------------------


class ForkWorker(Message, frozen=True):
    """Start one rank; or, said to a process that has stayed, be that rank. Descriptors: report, beacon, stacks, seat
    (to a new process alone), then those of `stdio` in order."""

    token: int
    program: Program
    rank: int
    world_size: int
    generation: int
    slot: int  # which page of the beacon file is this rank's
    env: dict[str, str]
    stdio: tuple[int, ...]  # which of 1 and 2 the last descriptors replace
    title: str
    threads: int | None = None  # torch's intra-op threads, where the zygote was started before the number was known
    numa: str | None = None
    after: tuple[int, ...] = ()  # processes that have to be gone before the program goes on
    gpu: int = -1  # that the last process in its place has computed on


class ForkKeeper(Message, frozen=True):
    """Start the store keeper of a world. Descriptor: the bound, listening socket."""

    token: int
    host: str
    port: int
    waits: bool = False  # there is no such world yet; SIGCONT says when there is


class CountDevices(Message, frozen=True):
    """Say how many ranks `kind` (cpu, gpu, xpu, auto, a backend's name) means here. Descriptor: where to answer."""

    token: int
    kind: str


class PlanLogs(Message, frozen=True):
    """Ask the named `torchrun.logs_specs` plug-in where the streams of a world go."""

    plugin: str
    log_dir: str | None
    redirects: dict[int, int]
    tee: dict[int, int]
    local_ranks: tuple[int, ...] | None
    envs: dict[int, dict[str, str]]


class Park(Message, frozen=True):
    """Have this many children forked ahead, for the next world, which will run that program."""

    count: int
    program: Program | None = None


class Grow(Message, frozen=True):
    """Fork a new zygote that also holds these modules. Descriptor: the new zygote's channel."""

    modules: tuple[str, ...]
    janitor: int


class Retire(Message, frozen=True):
    """Fork nothing more; end when the last child has."""


ToZygote = ForkWorker | ForkKeeper | CountDevices | PlanLogs | Park | Grow | Retire


# -- zygote to agent --------------------------------------------------------------------------------------------------


class Ready(Message, frozen=True):
    """This zygote can fork. `refused` maps a module it would not keep to the reason."""

    pid: int
    torch: str
    refused: dict[str, str] = {}


class Growing(Message, frozen=True):
    """A zygote-to-be says who it is before it imports anything."""

    pid: int


class NotGrown(Message, frozen=True):
    """A zygote-to-be holds a module that cannot be forked, and ends; the next one does without it."""

    refused: dict[str, str]


class NotReady(Message, frozen=True):
    """This zygote cannot start, for a reason that is the user's to mend."""

    reason: str


class Forked(Message, frozen=True):
    token: int
    pid: int


class NotForked(Message, frozen=True):
    """The kernel would not: too many processes, or no memory."""

    token: int
    reason: str


class Exited(Message, frozen=True):
    """A child is gone; `status` is its exit code, or minus the signal that ended it."""

    pid: int
    status: int
    at_s: float


class Retired(Message, frozen=True):
    """The last word of a zygote that was told to retire: its children have all been reported."""


class LogsPlanned(Message, frozen=True):
    """Paths by local rank, as torch's `LogsDest` has them; '' is the console."""

    stdouts: dict[int, str]
    stderrs: dict[int, str]
    tee_stdouts: dict[int, str]
    tee_stderrs: dict[int, str]
    error_files: dict[int, str]
    filtered_stdout: str
    filtered_stderr: str
    error: str = ""


FromZygote = Ready | Growing | NotGrown | NotReady | Forked | NotForked | Exited | Retired | LogsPlanned


# -- agent to worker, on its seat: a line of its own that outlives worlds ---------------------------------------------


class Leave(Message, frozen=True):
    """The world is over. Leave it, and stay: a place in the next one follows. `boundary`: it is not over yet, but all
    ranks are to leave it after the same step."""

    generation: int
    why: str
    boundary: bool = False
    steps: int = 0  # that one of its ranks has done in it, so that all can


ToWorker = Leave | ForkWorker


# -- worker to agent, on the world's report socket --------------------------------------------------------------------


class Stepped(Message, frozen=True):
    """A rank finished its first optimizer step; `modules` are the installed modules it imported since the fork,
    one a line, deflated: a datagram holds 200 KB, and a large framework has thousands."""

    rank: int
    generation: int
    at_s: float
    modules: bytes = b""


class Raised(Message, frozen=True):
    """A rank's program ended in an exception."""

    rank: int
    generation: int
    at_s: float
    headline: str
    traceback: str
    where: str = ""
    distributed: bool = False
    out_of_memory: bool = False
    hardware: bool = False


class Leaving(Message, frozen=True):
    """A rank's program has called `sys.exit` with a code that is none of success. Its sockets close before it is gone,
    so its peers may fail, and be seen to, before it is."""

    rank: int
    generation: int
    at_s: float
    code: int


class Stays(Message, frozen=True):
    """When its world is over, this rank can leave it and take part in the next one. `as_it_is`: as the same rank of as
    many, and not otherwise. Without `stays` it cannot any more, and `why`. `gpu`: what it computes on."""

    rank: int
    generation: int
    as_it_is: bool = False
    stays: bool = True
    why: str = ""
    gpu: int = -1


class StandsBy(Message, frozen=True):
    """A process that has no rank is ready to have one; what it takes of memory."""

    host_bytes: int
    gpu_bytes: int


class Stumbled(Message, frozen=True):
    """A collective has failed in a rank that stays. It waits to be told what has become of its world."""

    rank: int
    generation: int
    at_s: float
    headline: str


class Left(Message, frozen=True):
    """A rank has left its world, and takes no step until it has a place in another. `beside`: another one like it can
    start while this one is there."""

    rank: int
    generation: int
    at_s: float
    beside: bool = False


NO_FILE = -1


class Bequeathed(Message, frozen=True):
    """A rank cannot leave its world. Its state, as of that step, is in a file that it has open; in none, if that is but
    a part, of no use without the others'."""

    rank: int
    generation: int
    fd: int
    step: int = -1


class Poke(Message, frozen=True):
    """A rank could now be hung sooner than its agent meant to look."""

    rank: int
    generation: int


class Sections(Message, frozen=True):
    """The names of sections, from that slot of the rank's beacon on; at most 1,000 in one message."""

    rank: int
    generation: int
    slot: int
    names: tuple[str, ...]


class Learned(Message, frozen=True):
    """The timeouts that all ranks have agreed on, as the client's `state_dict` in JSON. For the next worlds."""

    rank: int
    generation: int
    state: str


class Control(Message, frozen=True):
    """A rank asks for something: continue, exclude-node or shutdown."""

    rank: int
    generation: int
    action: str
    description: str


class Trained(Message, frozen=True):
    """How far the program is, by its own count."""

    rank: int
    generation: int
    step: int
    epoch: str
    loss: float | None
    samples_per_s: float
    left: int | None  # steps to the end, if that is known


class Restored(Message, frozen=True):
    """A rank goes on from a checkpoint, which took so long to load."""

    rank: int
    generation: int
    step: int
    seconds: float
    source: str


class Counted(Message, frozen=True):
    """The answer to `CountDevices`: a number, or the reason there is none."""

    token: int
    count: int
    reason: str = ""


Report = (
    Stepped | Raised | Leaving | Stays | StandsBy | Stumbled | Left | Bequeathed | Poke | Sections | Learned | Control
    | Trained | Restored | Counted
)  # fmt: skip
