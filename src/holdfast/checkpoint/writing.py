"""A process's desk: the slots in memory that its snapshots go to, and its line to the writer."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence

import msgspec

import holdfast
from holdfast.wire import channel
from holdfast.wire.snapshots import (
    DOORBELL,
    Attach,
    Attached,
    Finish,
    FromWriter,
    Save,
    Saved,
    Slots,
)

ATTACH_S = 30.0
_PEER = struct.Struct("3i")
_MAX_ANSWER_BYTES = 64 * 1024
# What is on the path may be there by this process's own doing. Last, so that it hides nothing.
_START = "import sys\nsys.path.append(sys.argv.pop(1))\nfrom holdfast.checkpoint.writer import main\nmain()"


class Desk:
    """`slots` are descriptors of all slots of the node; `own` says which two of them are this process's. `world` goes
    into its snapshots. The descriptors stay the desk's until `close`, unless somebody takes them.

    One thread may receive while another saves. If the writer dies, `receive` returns None, and what it was asked for
    and has not answered is not saved; the next `save` finds, or starts, another one, and `fileno` is another then.
    """

    def __init__(
        self, line: socket.socket, slots: list[int], local_rank: int, world: str, renew: Callable[[], socket.socket]
    ) -> None:
        self.slots = slots
        self.own = (2 * local_rank, 2 * local_rank + 1)
        self.world = world
        self._renew = renew
        self._link: channel.Channel[FromWriter] = channel.Channel(line, FromWriter)
        self._lost = False

    def save(self, slot: int, step: int) -> None:
        """Have a checkpoint made of a slot, which is complete and not locked by this process. Until `Saved` comes for
        it, it must not be filled. Raises OSError where there is no writer and none can be started."""
        if not self._lost:
            with contextlib.suppress(channel.ChannelClosed):
                self._link.send(Save(slot, step))
                return
        self._link.close()
        self._link, self._lost = channel.Channel(self._renew(), FromWriter), False
        try:
            self._link.send(Save(slot, step))
        except channel.ChannelClosed:
            self._lost = True
            raise BrokenPipeError("the writer of checkpoints ends as soon as it is started") from None

    def take_slots(self) -> list[int]:
        """They are the caller's from now on."""
        slots, self.slots = self.slots, []
        return slots

    def fileno(self) -> int:
        return self._link.fileno()

    def receive(self) -> Saved | None:
        """The next answer; waits for it. None: the writer is gone."""
        while not self._lost:
            try:
                received = self._link.receive()
            except (channel.ChannelClosed, OSError):
                self._lost = True
                break
            if received is not None and isinstance(received[0], Saved):
                return received[0]
        return None

    def close(self, failed: bool = False) -> None:
        """Let go. What was asked for is still written, by a process that nobody waits for; and the newest snapshot, if
        its owner has failed."""
        with contextlib.suppress(channel.ChannelClosed, OSError):
            if not failed:
                self._link.send(Finish())  # heard by a writer of one's own only
        self._link.close()
        channel.close_all(self.slots)
        self.slots = []


def start_writer(
    owner: str, env: Mapping[str, str] | None = None, loads_torch: bool = True
) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """A writer process, and the line that controls it. `owner` is "agent" or "own". In a session of its own: what a
    terminal or a batch system tells the owner's is not for it. Epochs' files need torch, which it loads at once, or
    when it has to. Raises OSError."""
    when = "now" if loads_torch else "later"
    ours, theirs = channel.pair()
    root = os.path.dirname(os.path.dirname(holdfast.__file__))
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _START, root, str(theirs.fileno()), str(os.getpid()), owner, when],
            env=env,
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
    except OSError:
        ours.close()
        raise
    finally:
        theirs.close()
    return ours, process


def hand_slots(line: channel.Channel[FromWriter], slots: Sequence[int]) -> None:
    for first in range(0, len(slots), channel.MAX_FDS):
        line.send(Slots(first), slots[first : first + channel.MAX_FDS])


def make_slots(count: int) -> list[int]:
    """Memory files without a name, so that nothing can be left of them."""
    return [os.memfd_create(f"holdfast-slot-{index}", os.MFD_CLOEXEC) for index in range(count)]


def start_own(loads_torch: bool = True) -> Desk:
    """A desk for a process without an agent. Its writer outlives it for as long as it takes to save what it left."""
    slots = make_slots(2)
    started: list[subprocess.Popen[bytes]] = []

    def start() -> socket.socket:
        if started:
            started.pop().wait()  # it is gone already
        line, process = start_writer("own", loads_torch=loads_torch)
        started.append(process)
        with contextlib.suppress(channel.ChannelClosed):  # the next one who uses it finds out
            hand_slots(channel.Channel(line, FromWriter), slots)
        return line

    try:
        return Desk(start(), slots, 0, uuid.uuid4().hex, start)
    except OSError:
        channel.close_all(slots)
        raise


def attach(slots: bool = True) -> Desk | None:
    """The desk that a rank has from its agent; without slots where it has them already. None: there is no agent, or
    this is no rank of its; `start_own` then."""
    name = os.environ.get(DOORBELL, "")
    if not name:
        return None

    def renew() -> socket.socket:
        _, fds = _ask(name, Attach(slots=False))
        return channel.adopt(fds[0])

    try:
        attached, fds = _ask(name, Attach(slots))
    except (OSError, msgspec.MsgspecError):
        return None
    return Desk(channel.adopt(fds[0]), fds[1:], attached.local_rank, attached.world, renew)


def _ask(name: str, request: Attach) -> tuple[Attached, list[int]]:
    """One line of JSON there and one back, as all who ring there do; with descriptors. Raises OSError."""
    fds: list[int] = []
    answer = b""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(ATTACH_S)
        connection.connect("\0" + name)
        _, uid, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
        if uid not in (os.getuid(), 0):  # anybody can take a name
            raise ConnectionRefusedError(f"{name} is not this user's")
        connection.sendall(msgspec.json.encode(request) + b"\n")
        try:
            while not answer.endswith(b"\n") and len(answer) < _MAX_ANSWER_BYTES:
                chunk, more, _, _ = socket.recv_fds(connection, 4096, 253)
                fds += more
                if not chunk:
                    break
                answer += chunk
            attached = msgspec.json.decode(answer, type=Attached)
            if len(fds) != 1 + attached.slots:
                raise ConnectionRefusedError(f"{name} handed over {len(fds)} descriptors")
        except BaseException:
            channel.close_all(fds)
            raise
    for fd in fds:
        os.set_inheritable(fd, False)
    return attached, fds
