"""What agents and coordinators say to each other: it arrives as it was, and nothing that is not understood is taken."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest

from holdfast.agent.streams import TAIL_LINES
from holdfast.control import protocol, stacks
from holdfast.control.causes import Cause, Kind
from holdfast.control.incidents import MAX_FOLLOWERS, Follower, Incident
from holdfast.control.protocol import MAX_CAUSES, MAX_LINE, MAX_TRACEBACK, shifted, trimmed
from holdfast.control.stacks import MAX_FRAMES, MAX_RANKS, Group
from holdfast.control.stragglers import Found, Window
from holdfast.control.worlds import World
from holdfast.wire.session import MAX_FRAME_BYTES

WORLD = World("run", 3, 1, 3, "10.0.0.1", 29500, 8, "trainer", 8, 16, 1, 2, 8, 16)
CAUSE = Cause(Kind.ERROR, "ValueError: bad", 9.0, 3, "host-b", 103, 1, True, "train.py:7", "Traceback ...", ("x",))
INCIDENT = Incident(
    2, 3, Kind.ERROR, "ValueError: bad", "restart 1 of 3", True, 3, "host-b", 103, 1, 12, 60.0, "Traceback ...", ("x",),
    (Follower(1, "closed", "host-a"),), 9.0, 10.0, 11.0, 12.0, 13.0,
)  # fmt: skip

GROUP = Group((1, 2), 2, "all_reduce", True, ("distributed_c10d.py:9 all_reduce",), "host-b")

TO_COORDINATOR: list[protocol.ToCoordinator] = [
    protocol.Seek("run"),
    protocol.Register("run", 29401),
    protocol.Hello(1, "n1", "host", "10.0.0.1", 8, 29500, "trainer", 3, 4, 5, 6, 2, 6, False, "--nnodes=2", 7.5),
    protocol.Beat(1.5, 3, 400),
    protocol.Started(3),
    protocol.Stepped(3, 1.5, 2.5),
    protocol.Failing(3, "rank 1 failed"),
    protocol.Down(3, 1.5, (CAUSE,), 12, False, 29500, False),
    protocol.Done(3, 12),
    protocol.Ready(29500),
    protocol.Leaving(15),
    protocol.Learned('{"heartbeat": 3.5}'),
    protocol.Request(3, 9, "exclude-node", "ECC errors"),
    protocol.Recorded(12.5, 41, (b'{"v":1}\n',)),
    protocol.Paced(3, Window(8, ((5, 0.2), (6, 0.15)), 0.1, 0.1, 0.01)),
    protocol.Peek(7),
    protocol.Shown("n1", 7, 2, "host-b", (GROUP,)),
    protocol.Look("host-b"),
]
TO_AGENT: list[protocol.ToAgent] = [
    protocol.Here(),
    protocol.Elsewhere(29401),
    protocol.Nobody(),
    protocol.Welcome(2, 4, 7.5),
    protocol.Refused("no"),
    protocol.Heard(1.5),
    protocol.Launch(WORLD),
    protocol.Stop(3, "node b is gone"),
    protocol.Standby("a spare"),
    protocol.Waiting("1 of 2"),
    protocol.Note("read this"),
    protocol.Straggles(3, Found(5, 0.2, 0.1)),
    protocol.Opened(INCIDENT, 14.0),
    protocol.Closed(INCIDENT, 14.0),
    protocol.Show("n1", 7, 2),
    protocol.Shown("n1", 7, 2, "host-b", (GROUP,)),
    protocol.Over(Kind.ERROR, "no restart", 12, False),
    protocol.Nodes("run", 1, 3, 1, 3, "running", (protocol.Seen("h", "a", 8, "spare", "why"),), 1, True),
]


def size(message: Any) -> int:
    return len(msgspec.msgpack.encode(message))


def named(message: object) -> str:
    return type(message).__name__


# -- on the wire ------------------------------------------------------------------------------------------------------


def test_the_messages_below_are_all_there_are() -> None:
    assert {type(message) for message in TO_COORDINATOR} == set(get_args(protocol.ToCoordinator))
    assert {type(message) for message in TO_AGENT} == set(get_args(protocol.ToAgent))


@pytest.mark.parametrize("message", TO_COORDINATOR, ids=named)
def test_what_an_agent_says_arrives_as_it_was(message: protocol.ToCoordinator) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=protocol.ToCoordinator) == message


@pytest.mark.parametrize("message", TO_AGENT, ids=named)
def test_what_a_coordinator_says_arrives_as_it_was(message: protocol.ToAgent) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=protocol.ToAgent) == message


@pytest.mark.parametrize("message", [*TO_COORDINATOR, *TO_AGENT], ids=named)
def test_a_field_that_is_not_known_is_refused(message: protocol.Message) -> None:
    fields = {**msgspec.to_builtins(message, builtin_types=(bytes,)), "extra": 1}
    kinds: Any = protocol.ToCoordinator if message in TO_COORDINATOR else protocol.ToAgent
    with pytest.raises(msgspec.ValidationError, match="extra"):
        msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=kinds)


@pytest.mark.parametrize("kinds", [protocol.ToCoordinator, protocol.ToAgent], ids=["to coordinator", "to agent"])
@pytest.mark.parametrize(
    "words", [{"type": "Surprise"}, {"node": "x"}, {"type": "Beat", "now_s": "soon"}, [1], 7, None]
)
def test_what_is_no_message_is_refused(kinds: Any, words: object) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(words), type=kinds)


def test_an_agent_takes_no_message_that_only_agents_send() -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(protocol.Leaving(15)), type=protocol.ToAgent)


# -- how large --------------------------------------------------------------------------------------------------------


def test_a_beat_and_its_answer_are_small_and_do_not_grow_with_the_job() -> None:
    long = (1e4, 1e4, 1e4, 1e4)
    young, old = protocol.Beat(0.5), protocol.Beat(1e9 + 0.5, 2**31, 2**40, long, True, 1e4, 1e4)
    assert size(old) - size(young) <= 16
    assert size(old) < 192
    assert size(protocol.Heard(0.5)) == size(protocol.Heard(1e9 + 0.5, long, True, 1e4, 1e4, True)) < 160


def a_huge_cause(character: str) -> Cause:
    long = character * 100_000
    return Cause(Kind.ERROR, long, 9.0, 3, "host-b", 103, 1, True, long, long, (long,) * TAIL_LINES)


@pytest.mark.parametrize("character", ["x", "é", "字", "🔥"], ids=["1 byte", "2 bytes", "3 bytes", "4 bytes"])
def test_the_end_of_a_world_fits_into_a_message_however_much_its_ranks_had_to_say(character: str) -> None:
    huge = Group(tuple(range(MAX_RANKS)), 9000, character * 500, False, (character * 500,) * MAX_FRAMES, "host-b")
    groups = stacks.trimmed((huge,) * 500)
    down = protocol.Down(3, 1.5, trimmed((a_huge_cause(character),) * 4096), 12, groups=groups)
    assert len(down.causes) == MAX_CAUSES
    assert size(down) < MAX_FRAME_BYTES


def test_an_incident_fits_into_a_message_too() -> None:
    [cause, *_] = trimmed((a_huge_cause("字"),))
    followers = (Follower(1, cause.headline, "host-a"),) * MAX_FOLLOWERS
    huge = Group(tuple(range(MAX_RANKS)), 9000, "字" * 500, False, ("字" * 500,) * MAX_FRAMES, "host-b")
    incident = msgspec.structs.replace(
        INCIDENT,
        groups=stacks.trimmed((huge,) * 500),
        headline=cause.headline,
        traceback=cause.traceback,
        stderr_tail=cause.stderr_tail,
        followers=followers,
    )
    assert size(protocol.Opened(incident, 1.0)) < MAX_FRAME_BYTES


def test_a_look_at_the_largest_job_fits_into_a_message() -> None:
    seen = protocol.Seen("h" * 63, "f" * 39, 8, "node rank 1000", "")
    nodes = protocol.Nodes("run", 1, 3, 1, 3, "running", (seen,) * protocol.MAX_NODES_SHOWN, 5000)
    assert size(nodes) < MAX_FRAME_BYTES


def test_trimming_keeps_the_first_causes_the_start_of_lines_and_the_end_of_tracebacks() -> None:
    long = "a" * MAX_TRACEBACK + "z"
    cause = msgspec.structs.replace(CAUSE, headline=long, traceback=long)
    others = tuple(msgspec.structs.replace(CAUSE, rank=rank) for rank in range(20))
    first, *rest = trimmed((cause, *others))
    assert first.headline == "a" * MAX_LINE
    assert (len(first.traceback), first.traceback[-1]) == (MAX_TRACEBACK, "z")
    assert [each.rank for each in rest] == list(range(MAX_CAUSES - 1))


def test_what_is_small_is_not_trimmed() -> None:
    assert trimmed((CAUSE,)) == (CAUSE,)


# -- clocks -----------------------------------------------------------------------------------------------------------


def times(value: Any) -> dict[str, float | None]:
    return {name: getattr(value, name) for name in value.__struct_fields__ if name.endswith("_at_s")}


def without_times(value: Any) -> dict[str, object]:
    return {name: getattr(value, name) for name in value.__struct_fields__ if name not in times(value)}


def test_another_clock_moves_every_time_of_a_cause_or_incident_and_nothing_else() -> None:
    cause, incident = shifted(CAUSE, 100.0), shifted(INCIDENT, 100.0)
    for before, after in ((CAUSE, cause), (INCIDENT, incident)):
        assert without_times(after) == without_times(before)
        assert times(after) == {
            name: at_s + 100.0 if at_s is not None else None for name, at_s in times(before).items()
        }
    assert incident.uptime_s == INCIDENT.uptime_s
    assert incident.phases_s() == INCIDENT.phases_s()


def test_a_time_that_is_not_known_stays_so_on_any_clock() -> None:
    unfinished = Incident(1, 0, Kind.ERROR, "bad", "", True, failed_at_s=1.0, stopped_at_s=2.0)
    moved = shifted(unfinished, -5.0)
    assert (moved.failed_at_s, moved.launched_at_s, moved.recovered_at_s) == (-4.0, None, None)
