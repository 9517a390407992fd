"""Runs checks, each in a process that is ended when its time is over: a disk that hangs holds up nothing but itself."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import msgspec

from holdfast import linux
from holdfast.control.causes import signal_name
from holdfast.doctor.checks import CHECKS, Check
from holdfast.doctor.child import Order
from holdfast.doctor.finding import Asked, Finding, fail, one_line, skipped

END_S = 1.0  # for a process that was killed; one that waits for a dead disk stays for ever
LAST_WORDS_BYTES = 4096

Tell = Callable[[Finding], None]


async def preflight(
    log_dir: str = "",
    checkpoint_dir: str = "",
    env: Mapping[str, str] | None = None,
    limit_s: float | None = None,
    alone: bool = True,
) -> list[Finding]:
    """What a node must pass before its first world; `refusal` makes one line of it. Cancelled, it leaves nothing.
    `env` is that of the ranks; `alone`: there are no other nodes."""
    needed = {
        "checkpoint": bool(checkpoint_dir),
        "names": not alone and "GLOO_SOCKET_IFNAME" not in (env or os.environ),  # else nobody looks its name up
    }
    checks = [check for check in CHECKS if check.before_world and needed.get(check.name, True)]
    asked = Asked(log_dir=log_dir, checkpoint_dir=checkpoint_dir, together=True)
    return await examine(checks, asked, env=env, limit_s=limit_s)


def refusal(findings: Sequence[Finding]) -> str:
    """Why a node is kept out, in one line; '' if nothing has failed."""
    failed = [finding for finding in findings if finding.state == "fail"]
    if not failed:
        return ""
    more = f" (and {len(failed) - 1} more, see holdfast doctor)" if len(failed) > 1 else ""
    return failed[0].line + more


async def examine(
    checks: Sequence[Check],
    asked: Asked,
    peers: Sequence[tuple[str, int]] = (),
    *,
    env: Mapping[str, str] | None = None,
    limit_s: float | None = None,
    tell: Tell = lambda finding: None,
) -> list[Finding]:
    """All findings, in the order of the checks; `tell` hears of each as it comes. `limit_s` is for each check, in the
    place of its own."""
    jobs = [(check, asked) for check in checks if check.name != "peer"]
    for check in checks:
        if check.name == "peer":
            jobs += [(check, msgspec.structs.replace(asked, peer=peer)) for peer in peers]
    run = _Run(env, limit_s, tell)
    async with asyncio.TaskGroup() as group:
        for check, given in jobs:
            run.begin(group, check, given)
    return [task.result() for task in run.tasks]


class _Run:
    def __init__(self, env: Mapping[str, str] | None, limit_s: float | None, tell: Tell) -> None:
        self._env, self._limit_s, self._tell = env, limit_s, tell
        self._lanes: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._by_name: dict[str, asyncio.Task[Finding]] = {}
        self.tasks: list[asyncio.Task[Finding]] = []

    def begin(self, group: asyncio.TaskGroup, check: Check, asked: Asked) -> None:
        task = group.create_task(self._do(check, asked))
        self._by_name[check.name] = task
        self.tasks.append(task)

    async def _do(self, check: Check, asked: Asked) -> Finding:
        finding = await self._spared(check)
        if finding is None:
            limit_s = self._limit_s or check.limit_s
            if check.lane:
                async with self._lanes[check.lane]:
                    finding = await _run(check, asked, limit_s, self._env)
            else:
                finding = await _run(check, asked, limit_s, self._env)
        name = f"peer {address(asked.peer)}" if asked.peer else check.name
        finding = msgspec.structs.replace(finding, check=name)
        self._tell(finding)
        return finding

    async def _spared(self, check: Check) -> Finding | None:
        """What need not be tried, after what another check has found."""
        before = self._by_name.get(check.needs)
        if before is None:
            return None
        found = await asyncio.shield(before)
        if found.state == "fail":
            return skipped(f"{check.needs} has failed, which this needs")
        if check.gpus and found.figures.get("gpus") == 0:
            return skipped("no GPU here")
        return None


def address(peer: tuple[str, int]) -> str:
    host, port = peer
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


# -- one process ------------------------------------------------------------------------------------------------------


async def _run(check: Check, asked: Asked, limit_s: float, env: Mapping[str, str] | None) -> Finding:
    began_s = time.monotonic()
    words = os.memfd_create("holdfast-doctor", os.MFD_CLOEXEC)  # the disk may be what is broken
    answer: bytes | None = None
    try:
        try:
            process = _start(check, asked, words, env)
        except OSError as failure:
            return fail(f"no process can be started: {failure.strerror}", "see ulimit -u and -n, and free memory")
        assert process.stdout is not None
        with process.stdout:
            try:
                async with asyncio.timeout(limit_s):
                    answer = await _read_line(process.stdout.fileno())
            except TimeoutError:
                pass
            finally:
                gone = await _end(process)
        finding = _judge(check, answer, process.returncode, gone, limit_s, _last_line(words))
    finally:
        os.close(words)
    return msgspec.structs.replace(finding, took_s=round(time.monotonic() - began_s, 3))


def _start(check: Check, asked: Asked, words: int, env: Mapping[str, str] | None) -> subprocess.Popen[bytes]:
    order = msgspec.json.encode(Order(check.run, asked, os.getpid())).decode()
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "holdfast.doctor.child", order],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=words,
        env=env,
        start_new_session=True,
    )


def _judge(check: Check, answer: bytes | None, code: int | None, gone: bool, limit_s: float, words: str) -> Finding:
    if answer is None:
        left = "" if gone else ", and its process cannot be killed: it waits in the kernel"
        return fail(f"no answer within {limit_s:g} s{left}", check.if_hung)
    try:
        return msgspec.json.decode(answer, type=Finding)
    except msgspec.MsgspecError:
        how = f"ended by {signal_name(-code)}" if code is not None and code < 0 else f"ended with code {code}"
        said = f": {words}" if words else " and said nothing"
        return fail(f"its process {how}{said}", "a crash here is one in training, too; see dmesg, and install it anew")


async def _read_line(fd: int) -> bytes:
    """What comes before a newline, or before the end."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    os.set_blocking(fd, False)
    loop.add_reader(fd, readable.set)
    got = b""
    try:
        while not got.endswith(b"\n"):
            await readable.wait()
            readable.clear()
            try:
                chunk = os.read(fd, 1 << 16)
            except BlockingIOError:
                continue
            if not chunk:
                break
            got += chunk
        return got
    finally:
        loop.remove_reader(fd)


async def _end(process: subprocess.Popen[bytes]) -> bool:
    """Kill it with all that it has started. False: it does not go."""
    linux.signal_session(process.pid, signal.SIGKILL)
    loop = asyncio.get_running_loop()
    gone = asyncio.Event()
    try:
        fd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return True
    loop.add_reader(fd, gone.set)
    try:
        async with asyncio.timeout(END_S):
            await gone.wait()
        process.poll()
        return True
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(fd)
        os.close(fd)


def _last_line(fd: int) -> str:
    end = os.fstat(fd).st_size
    text = os.pread(fd, LAST_WORDS_BYTES, max(0, end - LAST_WORDS_BYTES)).decode(errors="replace")
    lines = [line for line in text.splitlines() if line.strip()]
    return one_line(lines[-1]) if lines else ""
