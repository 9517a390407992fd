"""Whether this node may take part, by `holdfast doctor`; and a word to the others where it may not."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Mapping

from holdfast.agent.options import Options
from holdfast.agent.preflight import Refused
from holdfast.agent.visiting import visit
from holdfast.checkpoint.settings import DIRECTORY
from holdfast.control import protocol
from holdfast.doctor import examination
from holdfast.observe.events import EventLog
from holdfast.observe.record import NodeExamined
from holdfast.wire.session import Broken

TELL_S = 10.0  # the coordinator may still be at its own checks
AGAIN_S = 0.5


async def examine(options: Options, log_dir: str | None, env: Mapping[str, str]) -> tuple[NodeExamined, str]:
    """What was found, and why this node is kept out, in one line; '' if it is not. `env` is that of the ranks."""
    began_s = time.monotonic()
    findings = await examination.preflight(
        log_dir or os.devnull, env.get(DIRECTORY, ""), env, alone=options.cluster is None
    )
    failed, warned = (tuple(each.line for each in findings if each.state == state) for state in ("fail", "warn"))
    found = NodeExamined(not failed, failed, warned, round(time.monotonic() - began_s, 3))
    return found, examination.refusal(findings)


async def tell(options: Options, line: bytes, events: EventLog) -> None:
    """This line of its record goes into the job's, if the coordinator can be reached: a node that stays out does not
    join, and so forwards nothing."""
    if options.cluster is None:
        return

    def leaves() -> protocol.Recorded:
        return protocol.Recorded(time.monotonic() - events.start_s, 0, (line,))

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(TELL_S):
            while True:
                with contextlib.suppress(Refused, Broken, OSError):
                    if await visit(options.cluster, options.settings.run_id, leaves=leaves) is not None:
                        return
                await asyncio.sleep(AGAIN_S)
