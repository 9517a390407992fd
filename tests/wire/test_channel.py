"""Channels between real sockets: messages whole and typed, descriptors handed over, and peers that are gone."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator

import msgspec
import pytest

from holdfast.agent.zygotes import Zygote
from holdfast.wire import channel
from holdfast.wire.channel import MAX_PACKET_BYTES, Channel, ChannelClosed
from holdfast.wire.messages import (
    Command,
    Exited,
    Forked,
    ForkKeeper,
    ForkWorker,
    FromZygote,
    Function,
    Message,
    Module,
    Program,
    Ready,
    Retire,
    Script,
    ToZygote,
)


class Link:
    """An agent's end and a zygote's."""

    def __init__(self) -> None:
        self.agents_socket, self.zygotes_socket = channel.pair()
        self.agent: Channel[FromZygote] = Channel(self.agents_socket, FromZygote)
        self.zygote: Channel[ToZygote] = Channel(self.zygotes_socket, ToZygote)

    def close(self) -> None:
        self.agent.close()
        self.zygote.close()


@pytest.fixture
def link() -> Iterator[Link]:
    link = Link()
    yield link
    link.close()


def fork_worker(program: Program) -> ForkWorker:
    return ForkWorker(7, program, 1, 2, 0, 1, {"RANK": "1"}, (1, 2), "train.py", threads=4)


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


# -- messages ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "message",
    [
        fork_worker(Script("/a/train.py", ("--lr", "0.1"))),
        fork_worker(Module("pkg.train")),
        fork_worker(Command(("/bin/echo", "${local_rank}"))),
        fork_worker(Function("/tmp/call")),
        ForkKeeper(1, "127.0.0.1", 29500),
        Retire(),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_message_arrives_as_it_was_sent(message: ToZygote, link: Link) -> None:
    link.agent.send(message)
    assert link.zygote.receive() == (message, [])


def test_messages_arrive_one_by_one_and_in_order(link: Link) -> None:
    sent = [Forked(token, 100 + token) for token in range(50)]
    for message in sent:
        link.zygote.send(message)
    received = [link.agent.receive() for _ in sent]
    assert received == [(message, []) for message in sent]


def test_a_channel_works_both_ways(link: Link) -> None:
    link.agent.send(Retire())
    link.zygote.send(Ready(1, "2.13.0", {"numpy": "it leaves a thread running"}))
    assert link.zygote.receive() == (Retire(), [])
    assert link.agent.receive() == (Ready(1, "2.13.0", {"numpy": "it leaves a thread running"}), [])


def test_a_channel_without_a_message_has_none(link: Link) -> None:
    link.agent.setblocking(False)
    assert link.agent.receive() is None


def test_text_that_is_no_ascii_arrives(link: Link) -> None:
    message = fork_worker(Script("/données/entraîner.py", ("☃",)))
    link.agent.send(message)
    assert link.zygote.receive() == (message, [])


# -- descriptors ------------------------------------------------------------------------------------------------------


def test_descriptors_arrive_in_order_and_work(link: Link) -> None:
    pipes = [os.pipe() for _ in range(4)]
    link.agent.send(Retire(), [write_end for _, write_end in pipes])
    received = link.zygote.receive()
    assert received is not None
    for number, (fd, (read_end, write_end)) in enumerate(zip(received[1], pipes, strict=True)):
        os.write(fd, b"%d" % number)
        assert os.read(read_end, 10) == b"%d" % number
        channel.close_all([fd, read_end, write_end])


def test_the_sender_keeps_its_descriptors(link: Link) -> None:
    read_end, write_end = os.pipe()
    link.agent.send(Retire(), [read_end])
    received = link.zygote.receive()
    assert received is not None
    channel.close_all(received[1])
    assert is_open(read_end)
    channel.close_all([read_end, write_end])


def test_a_descriptor_that_was_handed_over_is_not_passed_on_by_an_exec(link: Link) -> None:
    read_end, write_end = os.pipe()
    link.agent.send(Retire(), [read_end])
    received = link.zygote.receive()
    assert received is not None
    (fd,) = received[1]
    inheritable = os.get_inheritable(fd)
    channel.close_all([fd, read_end, write_end])
    assert not inheritable


def test_neither_end_survives_an_exec() -> None:
    ours, theirs = channel.pair()
    assert not os.get_inheritable(ours.fileno())
    assert not os.get_inheritable(theirs.fileno())
    ours.close()
    theirs.close()


def test_a_handed_over_socket_can_be_adopted(link: Link) -> None:
    ours, theirs = channel.pair()
    link.agent.send(Retire(), [theirs.fileno()])
    theirs.close()
    received = link.zygote.receive()
    assert received is not None
    adopted: Channel[ToZygote] = Channel(channel.adopt(received[1][0]), ToZygote)
    other: Channel[FromZygote] = Channel(ours, FromZygote)
    adopted.send(Forked(1, 2))
    assert other.receive() == (Forked(1, 2), [])
    adopted.close()
    other.close()


def test_closing_what_is_closed_is_no_error() -> None:
    read_end, write_end = os.pipe()
    channel.close_all([read_end, write_end])
    channel.close_all([read_end, write_end])


# -- peers that are gone ----------------------------------------------------------------------------------------------


def test_a_closed_peer_reads_as_closed(link: Link) -> None:
    link.zygote.close()
    with pytest.raises(ChannelClosed):
        link.agent.receive()


def test_what_a_peer_said_before_it_closed_is_heard(link: Link) -> None:
    link.zygote.send(Exited(3, -9, 1.5))
    link.zygote.close()
    assert link.agent.receive() == (Exited(3, -9, 1.5), [])
    with pytest.raises(ChannelClosed):
        link.agent.receive()


def test_a_peer_that_closed_without_listening_reads_as_closed(link: Link) -> None:
    link.agent.send(Retire())
    link.zygote.close()
    with pytest.raises(ChannelClosed):
        link.agent.receive()


def test_nothing_can_be_sent_to_a_closed_peer(link: Link) -> None:
    link.zygote.close()
    with pytest.raises(ChannelClosed):
        link.agent.send(Retire())


def test_descriptors_cannot_be_sent_to_a_closed_peer_either(link: Link) -> None:
    link.zygote.close()
    with pytest.raises(ChannelClosed):
        link.agent.send(Retire(), [0])


# -- packets that are wrong -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "packet",
    [
        b"\xc1",
        b"hello",
        msgspec.msgpack.encode({"type": "NoSuchMessage"}),
        msgspec.msgpack.encode({"type": "Forked", "token": 1}),
        msgspec.msgpack.encode({"type": "Forked", "token": 1, "pid": "2"}),
        msgspec.msgpack.encode({"type": "Forked", "token": 1, "pid": 2, "more": 3}),
        msgspec.msgpack.encode(Retire()),
        msgspec.msgpack.encode(Forked(1, 2))[:-1],
    ],
    ids=["no msgpack", "text", "unknown", "too few", "wrong type", "too many", "wrong way", "cut"],
)
def test_a_packet_that_is_no_message_is_refused_and_the_next_one_read(packet: bytes, link: Link) -> None:
    link.zygotes_socket.send(packet)
    link.zygote.send(Forked(1, 2))
    with pytest.raises(msgspec.MsgspecError):
        link.agent.receive()
    assert link.agent.receive() == (Forked(1, 2), [])


def test_the_descriptors_of_a_packet_that_is_no_message_are_closed(link: Link) -> None:
    read_end, write_end = os.pipe()
    socket.send_fds(link.zygotes_socket, [b"hello"], [write_end])
    os.close(write_end)
    with pytest.raises(msgspec.MsgspecError):
        link.agent.receive()
    assert os.read(read_end, 1) == b""  # end of file: no writer is left
    os.close(read_end)


class Large(Message, frozen=True):
    text: str


@pytest.mark.parametrize("size", [MAX_PACKET_BYTES, 3_000_000])
def test_a_message_larger_than_a_packet_arrives_with_its_descriptors(link: Link, size: int) -> None:
    large: Channel[Large] = Channel(link.zygotes_socket, Large)
    read_end, write_end = os.pipe()
    link.agent.send(Large("x" * size), [write_end])
    os.close(write_end)
    received = large.receive()
    assert received is not None
    assert len(received[0].text) == size
    os.write(received[1][0], b"through")
    assert os.read(read_end, 100) == b"through"
    channel.close_all([read_end, *received[1]])


def test_the_largest_message_that_is_allowed_arrives(link: Link) -> None:
    room = MAX_PACKET_BYTES - len(msgspec.msgpack.encode(Large("x" * 70_000))) + 70_000
    large: Channel[Large] = Channel(link.zygotes_socket, Large)
    link.agent.send(Large("x" * room))
    received = large.receive()
    assert received is not None
    assert len(received[0].text) == room


async def _post_burst(link: Link, sent: list[ForkWorker]) -> list[ToZygote]:
    """Post everything before the zygote reads anything, then let it read."""
    loop = asyncio.get_running_loop()
    zygote = Zygote(link.agents_socket, loop)
    read_end, write_end = os.pipe()
    for message in sent:
        zygote.post(message, [write_end])
    os.close(write_end)
    received: list[ToZygote] = []
    all_there = asyncio.Event()

    def read() -> None:
        got = link.zygote.receive()
        assert got is not None
        received.append(got[0])
        channel.close_all(got[1])
        if len(received) == len(sent):
            all_there.set()

    loop.add_reader(link.zygotes_socket.fileno(), read)
    await all_there.wait()
    loop.remove_reader(link.zygotes_socket.fileno())
    zygote.close()
    assert os.read(read_end, 1) == b""  # every descriptor that was kept for a later message is closed
    os.close(read_end)
    return received


@pytest.mark.timeout(20)
def test_a_burst_that_the_zygote_cannot_keep_up_with_arrives_whole(link: Link) -> None:
    """What a launch is: a request per rank, at once, on a channel that does not block. The kernel holds 200 KiB."""
    sent = [fork_worker(Script("train.py", (str(number), "x" * 20_000))) for number in range(50)]
    assert asyncio.run(_post_burst(link, sent)) == sent
