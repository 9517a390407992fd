"""Questions to a running agent from the same machine: a Unix socket with no file, so that nothing is left behind.

One question a connection, as one line of JSON, and one line of JSON back. A question is a type in `Request`, its answer
one in `Answer`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

import msgspec

from holdfast import linux
from holdfast.control.stacks import Group
from holdfast.observe.record import Progress
from holdfast.wire.snapshots import Attach, Attached

MAX_REQUEST_BYTES = 64 * 1024
MAX_ANSWER_BYTES = 8 * 1024 * 1024
REQUEST_S = 5.0
ANSWER_S = 30.0
MAX_CALLERS = 1024  # all ranks of a node ring at the same time
MAX_FDS = 250  # with one message; the kernel allows 253

# A line of /proc/net/unix: address, references, protocol, flags, type, state, inode, name.
_NAME = re.compile(r"^\S+ \S+ \S+ ([0-9A-Fa-f]{8}) \S+ \S+ +\d+ @holdfast/(\d{1,10})/(\d{1,10})$", re.ASCII)
_LISTENING = 0x10000  # __SO_ACCEPTCON among the flags
_PEER = struct.Struct("3i")


class Who(msgspec.Struct, frozen=True, tag=True):
    """Which job is this?"""


class Stacks(msgspec.Struct, frozen=True, tag=True):
    """What are its ranks doing?"""


class Job(msgspec.Struct, frozen=True, tag=True):
    run_id: str
    pid: int
    nproc: int
    program: str
    generation: int
    run_dir: str = ""  # with its record; '': it keeps none


class Now(msgspec.Struct, frozen=True, tag=True):
    """How far are the ranks of this node?"""


class Sign(msgspec.Struct, frozen=True):
    """The last that a rank's beacon showed."""

    rank: int
    silent_s: float  # since a step, a heartbeat or another phase
    section: str = ""  # of those that are open, the one that was opened last
    section_s: float = 0.0


class Pace(msgspec.Struct, frozen=True, tag=True):
    """None: they have not stepped yet."""

    progress: Progress | None
    signs: tuple[Sign, ...] = ()


class Taken(msgspec.Struct, frozen=True, tag=True):
    groups: tuple[Group, ...]
    suspects: tuple[int, ...]
    folder: str  # with a file for each rank
    nodes: int = 1
    missing: int = 0  # nodes that did not answer


class Sorry(msgspec.Struct, frozen=True, tag=True):
    why: str


class Handed:
    """An answer that comes with descriptors: a socket, which is closed once it is sent, and others."""

    def __init__(self, attached: Attached, line: socket.socket, slots: Sequence[int]) -> None:
        self.attached = attached
        self.line = line
        self.slots = slots


Request: TypeAlias = Who | Stacks | Now | Attach
Answer: TypeAlias = Job | Taken | Pace | Sorry

_requests: msgspec.json.Decoder[Request] = msgspec.json.Decoder(Request)
_answers: msgspec.json.Decoder[Answer] = msgspec.json.Decoder(Answer)


class NoAnswer(Exception):
    """The agent is gone, is somebody else's, or says nothing."""


class Doorbell:
    """The agent's end. Only its own user and root are answered. `answer` is given the question and who asks."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, answer: Callable[[Request, int], Awaitable[Answer | Handed]]
    ) -> None:
        self._loop = loop
        self._answer = answer
        self._listener: socket.socket | None = None
        self._callers: set[asyncio.Task[None]] = set()

    @property
    def name(self) -> str:
        """By which it is found, after a NUL; '' if it cannot be."""
        return _name(os.getuid(), os.getpid())[1:] if self._listener is not None else ""

    def start(self) -> bool:
        """False where the name is taken, as by an agent in another container on this network. A job runs without."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            listener.bind(_name(os.getuid(), os.getpid()))
            listener.listen(MAX_CALLERS)
        except OSError:
            listener.close()
            return False
        self._listener = listener
        self._loop.add_reader(listener.fileno(), self._accept)
        return True

    def close(self) -> None:
        if self._listener is not None:
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None
        for caller in self._callers:
            caller.cancel()

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        if _peer(connection)[1] not in (os.getuid(), 0) or len(self._callers) >= MAX_CALLERS:
            connection.close()
            return
        connection.setblocking(False)
        caller = self._loop.create_task(self._serve(connection))
        self._callers.add(caller)
        caller.add_done_callback(self._callers.discard)

    async def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, TimeoutError):
            line = await asyncio.wait_for(self._read_line(connection), REQUEST_S)
            reply = await self._reply(line, _peer(connection)[0])
            if isinstance(reply, Handed):
                self._hand_over(connection, reply)
                return
            text = msgspec.json.encode(reply)
            if len(text) >= MAX_ANSWER_BYTES:
                text = msgspec.json.encode(Sorry("the answer is too long"))
            await asyncio.wait_for(self._loop.sock_sendall(connection, text + b"\n"), ANSWER_S)

    def _hand_over(self, connection: socket.socket, handed: Handed) -> None:
        """Descriptors come with bytes: those that one message cannot take go ahead with a blank, which JSON allows. All
        of it is far less than an empty socket takes at once."""
        with handed.line:
            fds = [handed.line.fileno(), *handed.slots]
            while len(fds) > MAX_FDS:
                socket.send_fds(connection, [b" "], fds[:MAX_FDS])
                fds = fds[MAX_FDS:]
            socket.send_fds(connection, [msgspec.json.encode(handed.attached) + b"\n"], fds)

    async def _read_line(self, connection: socket.socket) -> bytes:
        line = b""
        while not line.endswith(b"\n") and len(line) <= MAX_REQUEST_BYTES:
            if not (chunk := await self._loop.sock_recv(connection, 1 << 16)):
                break
            line += chunk
        return line

    async def _reply(self, line: bytes, pid: int) -> Answer | Handed:
        if len(line) > MAX_REQUEST_BYTES:
            return Sorry("the question is too long")
        try:
            request = _requests.decode(line)
        except msgspec.MsgspecError as failure:
            return Sorry(f"not understood: {failure}")
        try:
            return await self._answer(request, pid)
        except Exception as failure:  # a question must not end a job
            return Sorry(f"{type(failure).__name__}: {failure}")


# -- the asking end ---------------------------------------------------------------------------------------------------


def find() -> list[int]:
    """The agents of this user on this machine."""
    return sorted(pid for uid, pid in _agents() if uid == os.getuid())


def ask(pid: int, request: Who | Stacks | Now, timeout_s: float = ANSWER_S) -> Answer:
    uid = _user_of(pid)
    until_s = time.monotonic() + timeout_s
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            connection.settimeout(timeout_s)
            connection.connect(_name(uid, pid))
            if _peer(connection)[1] not in (uid, 0):  # anybody can take a name
                raise NoAnswer(f"process {pid} is not an agent of this user")
            connection.sendall(msgspec.json.encode(request) + b"\n")
            return _answers.decode(_read_answer(connection, until_s))
        except TimeoutError:
            raise NoAnswer(f"the agent with pid {pid} gave no answer in {timeout_s:g} s") from None
        except OSError as failure:
            raise NoAnswer(f"no agent with pid {pid} answers: {failure.strerror or failure}") from None
        except msgspec.MsgspecError as failure:
            raise NoAnswer(f"the agent with pid {pid} gave an answer that is none: {failure}") from None


def _read_answer(connection: socket.socket, until_s: float) -> bytes:
    answer = bytearray()
    while not answer.endswith(b"\n") and len(answer) <= MAX_ANSWER_BYTES:
        connection.settimeout(max(0.001, until_s - time.monotonic()))
        if not (chunk := connection.recv(1 << 16)):
            break
        answer += chunk
    return bytes(answer)


def _user_of(pid: int) -> int:
    """Root may ask anybody's agent. Anybody may take any name, so others ask their own."""
    own = os.getuid()
    users = [uid for uid, agent in _agents() if agent == pid]
    return users[0] if own == 0 and users and own not in users else own


def _agents() -> list[tuple[int, int]]:
    """The user and pid in the name of each listening agent."""
    found: list[tuple[int, int]] = []
    with contextlib.suppress(OSError):
        for line in linux.read("/proc/net/unix").splitlines():
            if (name := _NAME.match(line)) is not None and int(name[1], 16) & _LISTENING:
                found.append((int(name[2]), int(name[3])))
    return found


def _name(uid: int, pid: int) -> str:
    return f"\0holdfast/{uid}/{pid}"


def _peer(connection: socket.socket) -> tuple[int, int, int]:
    """The process, user and group at the other end."""
    pid, uid, gid = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return pid, uid, gid
