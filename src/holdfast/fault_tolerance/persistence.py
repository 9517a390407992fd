"""How learned timeouts go to the agent and come back with the next world."""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any

import msgspec

from holdfast.fault_tolerance.config import FaultToleranceConfig
from holdfast.fault_tolerance.timeouts import Learned, RankMonitorClientError, parse

PLAIN_BYTES = 60_000  # a datagram holds 200 KB, and ten thousand sections do not fit in one as they are


class Given(msgspec.Struct, frozen=True):
    config: FaultToleranceConfig = FaultToleranceConfig()
    learned: Any = None


def pack(learned: Learned) -> str:
    """JSON in either case: a dict, or the text of a deflated one."""
    text = json.dumps(learned.state(), separators=(",", ":"))
    if len(text) <= PLAIN_BYTES:
        return text
    return json.dumps(base64.b85encode(zlib.compress(text.encode(), 9)).decode())


def unpack(given: bytes) -> tuple[FaultToleranceConfig, Learned]:
    """What the agent left for the ranks: the configuration, and what earlier worlds have learned."""
    if not given:
        return FaultToleranceConfig(), Learned()
    try:
        found = msgspec.json.decode(given, type=Given)
        state = found.learned
        if isinstance(state, str):
            state = json.loads(zlib.decompress(base64.b85decode(state)))
    except (ValueError, zlib.error, msgspec.DecodeError) as wrong:
        raise RankMonitorClientError(f"the beacon page is corrupt: its configuration cannot be read: {wrong}") from None
    return found.config, parse(state or {})
