"""A ledger in etcd, for a coordinator that was elected there."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable

import msgspec

from holdfast.control.membership import Record
from holdfast.coordinator import etcd
from holdfast.coordinator.ledger import Deposed


class Elected:
    """Every write is fenced by the term; the first that fails is the last."""

    def __init__(self, client: etcd.Etcd) -> None:
        self._client = client

    @property
    def valid(self) -> bool:
        return self._client.valid

    def write(self, record: Record) -> Awaitable[None]:
        return self._write(msgspec.msgpack.encode(record))

    async def _write(self, data: bytes) -> None:
        try:
            await self._client.write(data)
        except etcd.Deposed as newer:
            raise Deposed(str(newer)) from None

    def touch(self) -> None:
        return None  # the lease tells

    async def close(self, over: bool) -> None:
        with contextlib.suppress(etcd.Deposed, etcd.EtcdError):
            await (self._client.clear() if over else self._client.resign())
