"""What a coordinator says in words: who is missing, who is here, and how each node stands."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from holdfast.control import protocol
from holdfast.control.causes import signal_name
from holdfast.control.membership import Member, Seat, Settings
from holdfast.control.quarantine import Quarantine

NAMES = 8  # more than that nobody reads


def missing(settings: Settings, here: int, orders: Collection[int | None], lost: Sequence[str]) -> str:
    """Why there is no world."""
    lacking = settings.min_nodes - here
    if settings.static:
        who = ", ".join(f"node rank {rank}" for rank in range(settings.min_nodes) if rank not in orders)
    else:
        who = f"{lacking} more node{'s' if lacking != 1 else ''}"
        if lost:
            who += f" (lost: {_names(lost)})"
    return f"{here} of {settings.min_nodes} nodes are here; waiting at most {settings.join_timeout_s:g} s for {who}"


def too_few(settings: Settings, here: int, lost: Sequence[str]) -> str:
    """Why there will be none."""
    gone = f"; lost: {_names(lost)}" if lost else ""
    return (
        f"{here} of {settings.min_nodes} nodes came within {settings.join_timeout_s:g} s{gone}; "
        "start the others, or lower --nnodes"
    )


def joined(hosts: Sequence[str]) -> str:
    return f"node {', '.join(hosts[:3])}{' and others' if len(hosts) > 3 else ''} joined"


def standby(held: str, why: str) -> str:
    return f"set aside: {held}" if held else f"standing by as a spare{f': {why}' if why else ''}"


def seen(node: str, member: Member, seats: Mapping[str, Seat], has_world: bool, aside: Quarantine) -> protocol.Seen:
    state, why = _state(node, member, seats, has_world, aside)
    return protocol.Seen(member.hello.host, member.hello.addr, member.hello.local_size, state, why)


def _state(node: str, member: Member, seats: Mapping[str, Seat], has_world: bool, aside: Quarantine) -> tuple[str, str]:
    if held := aside.why(member.hello.host):
        return "set aside", held
    if node in seats and has_world:
        return f"node rank {seats[node].group_rank}", ""
    if member.leaving is not None:
        return "leaving", f"it got {signal_name(member.leaving)}"
    if not has_world:
        return "waiting", ""
    return "spare" if member.available else "joining", ""


def _names(hosts: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(hosts[-NAMES:]))
