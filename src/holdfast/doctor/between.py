"""The check of the way to another node and back, against a `holdfast doctor --serve` over there."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import secrets
import socket
import time
from typing import Any, NamedTuple, TypeVar

from holdfast.agent.meeting import cure, reason
from holdfast.doctor import clocks, encounter
from holdfast.doctor.finding import Asked, Finding, combine, fail, ok, skipped, warn
from holdfast.wire import peer as wire
from holdfast.wire import secret
from holdfast.wire.session import Broken
from holdfast.wire.tls import TlsError, client_context

CONNECT_S = 3.0
ANSWER_S = 8.0  # the other side looks a name up, and connects back, before it answers
PAUSE_S = 0.1
TICKS = 8
APART_S = 0.5
LOAD_BYTES = 200_000
LOAD_S = 5.0
WALL_APART_S = 1.0
FLUSH_S = 1.0

T = TypeVar("T")


class Sample(NamedTuple):
    """One look at both clocks."""

    round_trip_s: float
    ours_s: float  # in the middle of it
    wall_apart_s: float  # theirs is ahead by so much
    theirs_s: float
    their_wall_s: float


def peer(asked: Asked) -> Finding:
    return asyncio.run(_visit(asked))


async def _visit(asked: Asked) -> Finding:
    if asked.peer is None:
        return skipped("no other node was named; --peer names one")
    host = asked.peer[0]
    if not await encounter.addresses(host):
        return fail(f"the name {host!r} cannot be resolved here", "check its spelling, DNS and /etc/hosts")
    try:
        shared = secret.INSECURE if asked.insecure else secret.load(asked.secret_file)
        line = await _call(asked, shared)
    except (secret.SecretError, TlsError) as missing:
        text, _, advice = str(missing).partition("; ")
        return fail(text, advice)
    except Broken as broken:
        advice = cure(broken, shared.source).removeprefix("; ").replace("coordinator's", "other")
        return fail(f"it {broken.reason}", advice or "is it a holdfast doctor of the same version?")
    except (OSError, TimeoutError) as failure:
        return fail(
            f"nobody there: {_why(failure)}", f"run holdfast doctor --serve {asked.peer[1]} there; see its firewall"
        )
    try:
        finding = await line.examine()
        line.peer.send(encounter.Verdict(finding.state, finding.text))
        return finding
    except (Broken, OSError, TimeoutError) as failure:
        return fail(f"{_why(failure)}, in the middle of it", "see the other side's output, and the network")
    finally:
        await line.close()


async def _call(asked: Asked, shared: secret.Secret) -> _Line:
    """A line to the other side. It may be about to start: both commands are given by one person, or at once by srun."""
    assert asked.peer is not None
    until_s = time.monotonic() + asked.wait_s
    while True:
        line = _Line(shared)
        try:
            async with asyncio.timeout(CONNECT_S):
                context = client_context(*asked.tls) if asked.tls is not None else None
                await wire.connect(*asked.peer, line.make, ssl=context)
            return line
        except OSError as failure:  # TimeoutError is one
            if isinstance(failure, TimeoutError) or time.monotonic() > until_s:
                raise
        await asyncio.sleep(PAUSE_S)


def _why(failure: BaseException) -> str:
    """asyncio has one error for all addresses of a name, with no number and a long text."""
    return "Connection refused" if "[Errno 111]" in str(failure) else reason(failure)


class _Line:
    def __init__(self, shared: secret.Secret) -> None:
        self._shared = shared
        self._answers: asyncio.Queue[Any] = asyncio.Queue()
        self._over = asyncio.Event()
        self._heard: asyncio.Queue[str] = asyncio.Queue()
        self.peer: wire.Peer

    def make(self) -> wire.Peer:
        """asyncio may make several, for several addresses, and goes on with one."""
        return wire.Peer(
            "client",
            self._shared,
            encounter.ToCaller,
            on_ready=self._ready,
            on_message=lambda peer, message: self._answers.put_nowait(message),
            on_closed=self._closed,
        )

    def _ready(self, peer: wire.Peer) -> None:
        self.peer = peer

    def _closed(self, peer: wire.Peer, why: Broken | None) -> None:
        self._over.set()
        self._answers.put_nowait(why or Broken("lost", "closed the connection"))

    async def close(self) -> None:
        self.peer.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_S):
                await self._over.wait()

    async def _ask(self, question: encounter.ToServer, kind: type[T], within_s: float = ANSWER_S) -> T:
        self.peer.send(question)
        async with asyncio.timeout(within_s):
            answer = await self._answers.get()
        if isinstance(answer, Broken):
            raise answer
        if not isinstance(answer, kind):
            raise Broken("message", "gave an answer to another question")
        return answer

    async def examine(self) -> Finding:
        met, way_back = await self._meet()
        first = await self._look()
        loaded = await self._load()
        await asyncio.sleep(APART_S)
        second = await self._look()
        rtt_s = min(first.round_trip_s, second.round_trip_s)
        trip = ok(f"{met.host}: {rtt_s * 1e3:.2g} ms there and back", round_trip_s=round(rtt_s, 6))
        names = await _judge_names(met, encounter.plain(self.peer.remote_host))
        return combine([trip, way_back, loaded, *names, *_judge_clocks(first, second), *_judge_versions(met)])

    async def _meet(self) -> tuple[encounter.Met, Finding]:
        """Have the other side connect to a port that is opened for this, at the address by which it is reached."""
        token = secrets.token_hex(16)
        listener = await asyncio.start_server(self._hear, self.peer.local_host, 0)
        async with listener:
            port = listener.sockets[0].getsockname()[1]
            hello = encounter.Hello(socket.gethostname(), encounter.versions(), port, token)
            met = await self._ask(hello, encounter.Met)
            heard = ""
            if not met.no_way_back:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(CONNECT_S):
                        heard = await self._heard.get()
        if heard == token:
            return met, ok("it connects back")
        why = met.no_way_back or "what it sent came to somebody else"
        text = f"{met.host} cannot connect back to {met.seen_as}: {why}"
        return met, fail(text, "open all ports between the nodes, both ways: each rank connects to the others")

    async def _hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(OSError, ValueError):
            self._heard.put_nowait((await reader.readline()).decode(errors="replace").strip())

    async def _load(self) -> Finding:
        content = secrets.token_bytes(LOAD_BYTES)
        try:
            back = await self._ask(encounter.Load(content), encounter.Load, LOAD_S)
        except TimeoutError:
            cure = "large packets are lost on the way: compare the MTU of both interfaces, and of what is between"
            return fail(f"{LOAD_BYTES // 1000} kB did not come back, though short messages do", cure)
        if back.content != content:
            return fail(f"{LOAD_BYTES // 1000} kB came back altered", "see the network card, its driver and its cable")
        return ok("large messages pass")

    async def _look(self) -> Sample:
        """Of some looks the one that took least time, which is the one to trust."""
        looks = [await self._tick() for _ in range(TICKS)]
        return min(looks, key=lambda look: look.round_trip_s)

    async def _tick(self) -> Sample:
        began_s, wall_s = time.monotonic(), time.time()
        theirs = await self._ask(encounter.Tick(), encounter.Tock)
        took_s = time.monotonic() - began_s
        apart_s = theirs.wall_s - (wall_s + took_s / 2)
        return Sample(took_s, began_s + took_s / 2, apart_s, theirs.monotonic_s, theirs.wall_s)


# -- what to make of it -----------------------------------------------------------------------------------------------


async def _judge_names(met: encounter.Met, seen: str) -> list[Finding]:
    """Addresses are what a job uses; a name that leads astray is what people, and torch, stumble over."""
    ours = socket.gethostname()
    theirs = await encounter.addresses(met.host)
    cure = "correct DNS or /etc/hosts, on every node alike"
    found = [
        _judge_name(f"on {met.host}, the name of this machine", ours, met.known_as, met.seen_as, cure),
        _judge_name("here, the name of the other machine", met.host, theirs, seen, cure),
    ]
    return [finding for finding in found if finding is not None]


def _judge_name(what: str, name: str, known: tuple[str, ...], seen: str, cure: str) -> Finding | None:
    if not known:
        return warn(f"{what}, {name!r}, cannot be resolved", cure)
    if seen in known or ipaddress.ip_address(seen.partition("%")[0]).is_loopback:
        return None
    return warn(f"{what}, {name!r}, is {known[0]}, yet it comes from {seen}", cure)


def _judge_clocks(first: Sample, second: Sample) -> list[Finding]:
    passed_s = second.ours_s - first.ours_s
    doubt = (first.round_trip_s + second.round_trip_s) / 2 / passed_s
    rate = (second.theirs_s - first.theirs_s) / passed_s - 1
    found = [clocks.judge_rate(rate, doubt, "the other clock", "this one", "clock_rate")]
    wall = (second.their_wall_s - first.their_wall_s) / passed_s - 1
    found.append(clocks.judge_rate(wall, doubt, "the other wall clock", "this one", "wall_clock_rate"))
    found.append(ok("its clock runs as this one"))
    apart_s = second.wall_apart_s
    figures = {"wall_apart_s": round(apart_s, 4)}
    if abs(apart_s) > WALL_APART_S + second.round_trip_s:
        text = f"the other wall clock is {abs(apart_s):,.1f} s {'ahead' if apart_s > 0 else 'behind'}"
        found.append(warn(text, "run chrony or ntpd on both: logs will not fit together", **figures))
    else:
        found.append(ok("", **figures))
    return found


def _judge_versions(met: encounter.Met) -> list[Finding]:
    ours = encounter.versions()
    found: list[Finding] = []
    for name in ("holdfast", "torch", "python"):
        here, there = ours.get(name, "none"), met.versions.get(name, "none")
        if here != there:
            text = f"{name} is {there} on {met.host}, and {here} here"
            judge = warn if name == "python" else fail
            found.append(judge(text, "install the same on every node"))
    return found or [ok("same versions")]
