"""What ranks are doing: their stacks read, grouped by where they are, and whom the others wait for."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence

import msgspec

from holdfast.control import places

MAX_RANKS = 64  # named in a group; more are counted
MAX_FRAMES = 8  # shown of a group
MAX_SHOWN = 4  # groups in one line of text
MAX_GROUPS = 16  # in a message
MAX_LINE = 200  # of a group in one, in bytes; a generated name can be longer than anybody reads
MAX_TEXT_CHARS = 1 << 20
MAX_WORD_CHARS = 500  # as faulthandler has it

STOPPED = "stopped"
DEBUGGED = "held by a debugger"
IN_KERNEL = "in the kernel"
ENDING = "Python's shutdown"  # a note: the main thread has no Python frame any more

_THREAD = re.compile(r"^(Current thread|Thread) 0x([0-9a-fA-F]+)(?: \[(.*)\])? \(most recent call first\):")
_FRAME = re.compile(r'^  File (?:"(.*)"|\?\?\?), line (\d{1,9}|\?\?\?) in (.*)$')
_OWN = re.compile(r"/holdfast/(agent|worker)/\w+\.py$|^<frozen runpy>$|/lib(64)?/python\d+\.\d+/runpy\.py$")


class Frame(msgspec.Struct, frozen=True):
    file: str
    line: int
    function: str


class Thread(msgspec.Struct, frozen=True):
    ident: str
    name: str  # '' before Python 3.14
    main: bool
    frames: tuple[Frame, ...]  # most recent first
    current: bool = False  # the one that took the signal


class Stack(msgspec.Struct, frozen=True):
    """One rank's main thread, without our own frames at its bottom."""

    rank: int
    frames: tuple[Frame, ...] = ()
    state: str = ""  # one of the above, where the rank cannot run at all
    workers: tuple[tuple[Frame, ...], ...] = ()  # of the data loader that it waits for
    note: str = ""  # why there is no stack


class Group(msgspec.Struct, frozen=True):
    """Ranks that are at one place."""

    ranks: tuple[int, ...]  # the first of them
    count: int
    what: str
    collective: bool = False
    frames: tuple[str, ...] = ()  # innermost first
    node: str = ""
    stuck: bool = False  # they cannot run: stopped, or waiting in the kernel
    key: str = ""  # tells apart ranks that are at one line of the user's, but not at one of a library


def parse(text: str) -> tuple[Thread, ...]:
    """The threads in a dump of faulthandler, whatever is left of it."""
    threads: list[Thread] = []
    frames: list[Frame] = []
    cut = False
    heading: re.Match[str] | None = None

    def finish() -> None:
        if heading is not None:
            ident, name = heading[2].lower()[:32], (heading[3] or "")[:MAX_WORD_CHARS]
            threads.append(Thread(ident, name, False, tuple(frames), heading[1] == "Current thread"))
        frames.clear()

    for line in text[:MAX_TEXT_CHARS].splitlines():
        if (found := _THREAD.match(line)) is not None:
            finish()
            heading = found
        elif heading is not None and (frame := _frame(line)) is not None:
            frames.append(frame)
        elif line == "..." or line.startswith("<freed"):
            cut = True
        elif line and not line[0].isspace():
            finish()  # a heading of another kind, such as that of a C stack
            heading = None
    finish()
    return _mark_main(threads, cut)


def _frame(line: str) -> Frame | None:
    if (found := _FRAME.match(line)) is None:
        return None
    number = int(found[2]) if found[2].isdecimal() else 0
    return Frame((found[1] or "???")[:MAX_WORD_CHARS], number, found[3][:MAX_WORD_CHARS])


def _mark_main(threads: list[Thread], cut: bool) -> tuple[Thread, ...]:
    """Threads are dumped youngest first, so the main one is the last. Of more than 100 the rest is left out; but the
    kernel gives a process's signal to its main thread when it can."""
    if not threads:
        return ()
    at = len(threads) - 1
    if cut:
        at = next((i for i, thread in enumerate(threads) if thread.current), at)
    threads[at] = msgspec.structs.replace(threads[at], main=True)
    return tuple(threads)


def main_frames(threads: Sequence[Thread]) -> tuple[Frame, ...]:
    """The main thread's frames, without ours."""
    main = next((thread for thread in threads if thread.main), None)
    if main is None:
        return ()
    frames = main.frames
    if frames and places.is_backward(frames[0]):
        # A GPU's part of a backward runs in a thread of autograd's own, which Python did not start.
        engine = [t.frames for t in threads if t is not main and t.frames and t.frames[-1].function != "_bootstrap"]
        frames = (engine[0] if len(engine) == 1 else ()) + frames
    end = len(frames)
    while end and _is_ours(frames[end - 1]):
        end -= 1
    return frames[:end]


def _is_ours(frame: Frame) -> bool:
    return (frame.file, frame.function) == ("<string>", "<module>") or _OWN.search(frame.file) is not None


def group(stacks: Iterable[Stack], node: str = "") -> tuple[Group, ...]:
    """Equal stacks are one group, and so is everybody who is in the same collective. The largest first."""
    return merge(_alone(stack, node) for stack in stacks)


def _alone(stack: Stack, node: str) -> Group:
    frames = stack.frames
    lines = tuple(places.show(frame) for frame in frames[:MAX_FRAMES])
    key, operation = "", places.collective(frames)
    if stack.state:
        place = places.of_user(frames)
        what = "stopped by a signal" if stack.state == STOPPED else stack.state
        what = f"{what} at {place}" if place and stack.state == IN_KERNEL else what
    elif operation:
        what = operation
    elif places.waits_for_loader(frames):
        what = places.at_loader(stack.workers)
    elif stack.note == ENDING:
        what, lines = ENDING, ("<no Python frame>",)
    elif frames:
        what, key = places.of_user(frames), _digest(frames)
    else:
        what = f"an unknown place ({stack.note or 'no stack'})"
    return Group((stack.rank,), 1, what, bool(operation) and not stack.state, lines, node, bool(stack.state), key)


def _digest(frames: Sequence[Frame]) -> str:
    """The same on every node, wherever the files are there."""
    parts = (f"{'/'.join(frame.file.split('/')[-2:])}:{frame.line}:{frame.function}" for frame in frames)
    return hashlib.blake2s("\n".join(parts).encode(errors="replace"), digest_size=8).hexdigest()


def merge(groups: Iterable[Group]) -> tuple[Group, ...]:
    """The groups of all nodes, or of all ranks of one."""
    found: dict[tuple[str, bool, str], list[Group]] = {}
    for one in groups:
        found.setdefault((one.what, one.collective, one.key), []).append(one)
    merged = [_joined(alike) for alike in found.values()]
    return tuple(sorted(merged, key=lambda one: (-one.count, one.ranks)))


def _joined(alike: list[Group]) -> Group:
    first = min(alike, key=lambda one: one.ranks)
    return msgspec.structs.replace(
        first,
        ranks=tuple(sorted({rank for one in alike for rank in one.ranks})[:MAX_RANKS]),
        count=sum(one.count for one in alike),
        node=first.node if len({one.node for one in alike}) == 1 else "",
        stuck=any(one.stuck for one in alike),
    )


def trimmed(groups: Sequence[Group]) -> tuple[Group, ...]:
    """The largest ones, small enough to send."""
    return tuple(
        msgspec.structs.replace(one, what=_start(one.what), frames=tuple(map(_start, one.frames)))
        for one in groups[:MAX_GROUPS]
    )


def _start(line: str) -> str:
    return line[:MAX_LINE].encode(errors="replace")[:MAX_LINE].decode(errors="ignore")


def suspects(groups: Sequence[Group]) -> tuple[int, ...]:
    """The ranks that the others probably wait for; nobody where that cannot be told."""
    if stuck := [one for one in groups if one.stuck]:
        return _ranks(stuck)
    if any(one.collective for one in groups):
        outside = [one for one in groups if not one.collective]
        # A rank without a stack is blamed only where there is nobody else.
        return _ranks([one for one in outside if one.frames] or outside)
    # With a GPU a collective returns at once, and its ranks wait wherever they next need its result.
    most = max(groups, key=lambda one: one.count, default=None)
    if most is None or 2 * most.count <= sum(one.count for one in groups):
        return ()
    return _ranks([one for one in groups if one is not most])


def _ranks(groups: Iterable[Group]) -> tuple[int, ...]:
    return tuple(sorted(rank for one in groups for rank in one.ranks))


def describe(groups: Sequence[Group]) -> str:
    """In one line: "3 ranks in all_reduce, rank 2 in data.py:41 read"."""
    if not groups:
        return "no rank has a stack"
    parts = [f"{who(one)} {'' if one.stuck else 'in '}{where(one, groups)}" for one in groups[:MAX_SHOWN]]
    if (more := sum(one.count for one in groups[MAX_SHOWN:])) > 0:
        parts.append(f"and {more} more")
    return ", ".join(parts)


def where(one: Group, groups: Iterable[Group]) -> str:
    """A group's place, with the library's line where another group is at the same line of the user's."""
    shared = sum(other.what == one.what for other in groups) > 1
    return f"{one.what} ({one.frames[0]})" if shared and one.frames and one.frames[0] != one.what else one.what


def who(one: Group) -> str:
    return f"{one.count} ranks" if one.count > 1 else f"rank {one.ranks[0]}" if one.ranks else "a rank"


def report(groups: Sequence[Group], suspected: Sequence[int]) -> str:
    """The same for somebody who has time to read."""
    lines = [describe(groups)]
    if suspected:
        named = ", ".join(map(str, suspected[:MAX_RANKS]))
        why = "cannot run" if any(one.stuck for one in groups) else "elsewhere"
        if why == "elsewhere" and any(one.collective for one in groups):
            why = "not in a collective"
        lines.append(f"{why}: rank{'s' if len(suspected) > 1 else ''} {named}, likely what the others wait for")
    for one in groups:
        ranks = ", ".join(map(str, one.ranks)) + (", ..." if one.count > len(one.ranks) else "")
        on = f" on {one.node}" if one.node else ""
        lines += ["", f"{where(one, groups)}: rank{'s' if one.count > 1 else ''} {ranks}{on}"]
        lines += [f"    {frame}" for frame in one.frames]
    return "\n".join(lines) + "\n"
