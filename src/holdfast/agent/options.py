"""What one run was asked for, after every check that needs no torch."""

from __future__ import annotations

import signal
from collections.abc import Mapping

import msgspec

from holdfast.agent.logs import LogFilters
from holdfast.wire.messages import Program

NUMA_MODES = ("node", "socket", "exclusive", "core-complex")
DEFAULT_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class Options(msgspec.Struct, frozen=True, kw_only=True):
    program: Program
    nproc: int | str = 1  # or cpu, gpu, xpu, auto, a backend's name
    max_restarts: int = 0
    run_id: str = "none"
    role: str = "default"
    shutdown_timeout_s: float = 30.0
    signals: tuple[int, ...] = DEFAULT_SIGNALS
    retry_same_error: bool = False
    exit_code_from_cause: bool = False
    master_addr: str = "127.0.0.1"
    master_port: int = 0  # 0: a free one for every world
    virtual_local_rank: bool = False
    numa_binding: str | None = None
    log_dir: str | None = None
    redirects: int | Mapping[int, int] = 0
    tee: int | Mapping[int, int] = 0
    local_ranks: frozenset[int] | None = None
    filters: LogFilters = LogFilters()
    prefix_template: str | None = None  # of tee'd lines; ${role_name}, ${rank} and ${local_rank} are replaced
    logs_plugin: str | None = None
    event_handler: str = "null"
