"""The members of an etcd cluster as one: who fails is skipped, and every refusal is one line for the user.

Of aetcd only the generated stubs are used: its client knows one host, no TLS, and logs in once for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

CALL_TIMEOUT_S = 1.0  # a member that has not answered by then is skipped
PATIENCE_S = 5.0  # members electing their leader answer nobody: 1 to 2 s with etcd's defaults, and once more if it ties
PAUSE_S = 0.05  # between rounds in which every member failed
DEFAULT_PORT = 2379

T = TypeVar("T")


class EtcdError(Exception):
    """etcd cannot be used: one line that says what, where, and what to do."""


class Unreachable(EtcdError):
    """No member answered, or none could: it may pass."""


class Untrusted(Unreachable):
    """A member with which no TLS is to be had. Another may be in order; where none is, waiting mends nothing."""


class Refused(EtcdError):
    """A member answered, and said no."""

    def __init__(self, code: str, details: str, line: str) -> None:
        super().__init__(line)
        self.code = code
        self.details = details


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """gRPC writes to stderr at every fork unless told otherwise when it is imported. Only then: workers inherit the
    environment, and may use gRPC for themselves."""
    told = {"GRPC_VERBOSITY": "NONE", "GRPC_ENABLE_FORK_SUPPORT": "0"}
    before = {name: os.environ.get(name) for name in told}
    os.environ.update(told)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _stubs() -> Any:
    try:
        with _quiet():
            from aetcd import rpc
    except ImportError:
        raise EtcdError("--rdzv-backend=etcd needs aetcd: pip install 'holdfast[etcd]'") from None
    return rpc


def read_pem(path: str | os.PathLike[str] | None) -> bytes | None:
    try:
        return None if path is None else Path(path).read_bytes()
    except OSError as error:
        raise EtcdError(f"etcd: cannot read {path}: {error.strerror}") from None


_CHANNEL_OPTIONS = (
    ("grpc.enable_retries", 0),  # what was sent twice is for this module to know
    ("grpc.enable_http_proxy", 0),  # the cluster's own etcd is never behind http_proxy
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),  # the defaults leave a member that is back alone for up to 2 minutes
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
)


class Members:
    """The endpoints as one: a call goes to the member that answered last, and from one that fails on to the next."""

    def __init__(
        self,
        endpoints: Sequence[str],
        tls: tuple[bytes | None, bytes | None, bytes | None] | None,
        login: tuple[str, str] | None,
    ) -> None:
        self.rpc = _stubs()
        parsed = [endpoint.strip().rstrip("/").rpartition("://") for endpoint in endpoints if endpoint.strip()]
        if not parsed:
            raise EtcdError("etcd: no endpoint given: --rdzv-endpoint=HOST:PORT[,HOST:PORT...]")
        self.where = [host if _has_port(host) else f"{host}:{DEFAULT_PORT}" for _, _, host in parsed]
        self._tls = tls or ((None, None, None) if any(scheme == "https" for scheme, _, _ in parsed) else None)
        self._login = login
        self._token: str | None = None  # good on every member: etcd hands tokens out through its log
        self._channels: dict[int, Any] = {}
        # Not all agents of a job on the first member.
        self._at = random.randrange(len(self.where))

    def channel(self) -> tuple[int, Any]:
        """The member in use: its index, for `leave`, and its channel, opened late: gRPC binds it to a running loop."""
        at = self._at
        if at not in self._channels:
            target = self.where[at]
            if self._tls is None:
                self._channels[at] = self.rpc.insecure_channel(target, options=_CHANNEL_OPTIONS)
            else:
                import grpc

                ca, cert, key = self._tls
                credentials = grpc.ssl_channel_credentials(ca, key, cert)
                self._channels[at] = self.rpc.secure_channel(target, credentials, options=_CHANNEL_OPTIONS)
        return at, self._channels[at]

    def leave(self, at: int) -> None:
        """Use another member than `at`, unless a call beside this one has changed already."""
        if self._at == at:
            self._at = (at + 1) % len(self.where)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        return () if self._token is None else (("token", self._token),)

    async def close(self) -> None:
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close()

    def unary(self, service: str, method: str, request: Any) -> Callable[[Any, float], Awaitable[Any]]:
        async def ask(channel: Any, timeout_s: float) -> Any:
            stub = getattr(self.rpc, f"{service}Stub")(channel)
            return await getattr(stub, method)(request, timeout=timeout_s, metadata=self.metadata())

        return ask

    async def once(self, ask: Callable[[Any, float], Awaitable[T]], timeout_s: float) -> T:
        """Ask one member once. A member that cannot answer is left for the next."""
        at, channel = self.channel()
        try:
            if self._login is not None and self._token is None:
                await self._log_in(channel)
            try:
                return await ask(channel, timeout_s)
            except self.rpc.AioRpcError as error:
                if self._login is None or not _is_stale_token(error):
                    raise
                await self._log_in(channel)
                return await ask(channel, timeout_s)
        except Unreachable:
            self.leave(at)
            raise
        except self.rpc.AioRpcError as error:
            failure = _explain(self.where[at], error.code().name, error.details() or "")
            if isinstance(failure, Unreachable):
                self.leave(at)
            raise failure from None

    async def call(self, service: str, method: str, request: Any) -> Any:
        """Ask member after member until one answers. What is asked may be done twice, and late: it must bear that."""
        ask = self.unary(service, method, request)
        now = asyncio.get_running_loop().time
        until = now() + PATIENCE_S
        while True:
            failures: list[Unreachable] = []
            for _ in self.where:
                try:
                    return await self.once(ask, CALL_TIMEOUT_S)
                except Unreachable as error:
                    failures.append(error)
            reasons = "; ".join(sorted({str(failure) for failure in failures}))
            if all(isinstance(failure, Untrusted) for failure in failures):
                raise EtcdError(f"etcd: {reasons}: check the CA, the certificate and the key")
            if now() >= until:
                raise Unreachable(f"etcd: no member can be used: {reasons}: check the endpoints, TLS and etcd's quorum")
            await asyncio.sleep(PAUSE_S)

    async def _log_in(self, channel: Any) -> None:
        assert self._login is not None
        name, password = self._login
        request = self.rpc.AuthenticateRequest(name=name, password=password)
        try:
            self._token = (await self.rpc.AuthStub(channel).Authenticate(request, timeout=CALL_TIMEOUT_S)).token
        except self.rpc.AioRpcError as error:
            if "authentication is not enabled" not in (error.details() or ""):
                raise
            self._login = None


def _has_port(host: str) -> bool:
    return host.rpartition("]")[2].rpartition(":")[2].isdigit()


def _is_stale_token(error: Any) -> bool:
    # Tokens end after five idle minutes, with a change of users or roles, or with a restart.
    return error.code().name == "UNAUTHENTICATED" or "revision of auth store is old" in (error.details() or "")


def _explain(where: str, code: str, details: str) -> EtcdError:
    """What a call's status means: try another member, or give up."""
    details = re.sub(r"^.*; last error: \w+: \S+: ", "", details.partition("\n")[0])
    if "TSI_" in details or "SSL_ERROR" in details:  # gRPC's transport security; a server's refusal is its "corrupted"
        return Untrusted(f"{where}: TLS failed: {details}")
    if code == "DEADLINE_EXCEEDED":
        return Unreachable(f"{where} does not answer")
    if code in ("UNAVAILABLE", "CANCELLED", "UNKNOWN", "INTERNAL", "ABORTED") or "too many requests" in details:
        return Unreachable(f"{where}: {details}")
    if code in ("UNAUTHENTICATED", "PERMISSION_DENIED") or "authentication" in details or "user name" in details:
        line = f"etcd at {where} refuses this user: {details}: check user, password and its role's right to /holdfast/"
        return Refused(code, details, line)
    return Refused(code, details, f"etcd at {where}: {details or code}")
