"""Asks a `torchrun.logs_specs` plug-in where the streams of a world go."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping

import msgspec

from holdfast.agent.logs import Destination, std_of
from holdfast.agent.options import Options
from holdfast.agent.preflight import Refused
from holdfast.agent.zygotes import Zygotes
from holdfast.control.worlds import World, worker_env
from holdfast.wire import messages


class Plan(msgspec.Struct, frozen=True):
    destinations: dict[int, Destination]  # by local rank
    filtered_dir: str


class LogPlanner:
    """The plug-in lives in the zygote, since it needs torch."""

    def __init__(self, options: Options, helpers: Zygotes) -> None:
        self._options = options
        self._helpers = helpers
        self._answer: asyncio.Future[messages.LogsPlanned] | None = None

    async def plan(self, world: World, env: Mapping[str, str]) -> Plan:
        options, ranks = self._options, range(world.local_size)
        self._answer = asyncio.get_running_loop().create_future()
        self._helpers.request(
            messages.PlanLogs(
                plugin=options.logs_plugin or "",
                log_dir=options.log_dir,
                redirects={rank: std_of(options.redirects, rank) for rank in ranks},
                tee={rank: std_of(options.tee, rank) for rank in ranks},
                local_ranks=tuple(options.local_ranks) if options.local_ranks is not None else None,
                envs={rank: worker_env(world, rank, env) for rank in ranks},
            )
        )
        planned = await self._answer
        self._answer = None
        if planned.error:
            raise Refused(f"--logs-specs {options.logs_plugin}: {planned.error}")
        destinations = {rank: _destination(planned, rank) for rank in ranks}
        return Plan(destinations, os.path.dirname(planned.filtered_stdout))

    def answered(self, planned: messages.LogsPlanned) -> None:
        if self._answer is not None:
            self._answer.set_result(planned)


def _destination(plan: messages.LogsPlanned, rank: int) -> Destination:
    stdout, stderr = plan.stdouts.get(rank, ""), plan.stderrs.get(rank, "")
    return Destination(
        stdout_file="" if stdout == os.devnull else stdout,
        stderr_file="" if stderr == os.devnull else stderr,
        stdout_console=not stdout or rank in plan.tee_stdouts,
        stderr_console=not stderr or rank in plan.tee_stderrs,
        prefixed=rank in plan.tee_stdouts or rank in plan.tee_stderrs,
        error_file=plan.error_files.get(rank, ""),
    )
