"""What one run was asked for, after every check that needs no torch."""

from __future__ import annotations

import signal
from collections.abc import Mapping

import msgspec

from holdfast.agent.logs import LogFilters
from holdfast.control.hangs import Mode, Rules
from holdfast.control.membership import Settings
from holdfast.fault_tolerance.config import FaultToleranceConfig
from holdfast.wire.messages import Program
from holdfast.wire.secret import Secret

CLOUDS = ("aws", "gcp")  # whose spot machines get a notice that `notices` reads
NUMA_MODES = ("node", "socket", "exclusive", "core-complex")
DEFAULT_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class EtcdAccess(msgspec.Struct, frozen=True):
    """How to come to etcd, beside its endpoints."""

    tls: bool = False
    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    user: str | None = None
    password: str | None = None


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """How the nodes of a job find and trust each other."""

    backend: str  # c10d or etcd
    endpoints: tuple[tuple[str, int], ...]
    secret: Secret
    order: int | None = None  # this node's place by the infrastructure
    local_addr: str = ""  # '': the one by which it reaches the coordinator
    is_host: bool | None = None  # None: whoever has the endpoint's address
    close_timeout_s: float = 30.0
    tls: tuple[str, str, str] | None = None  # files: certificate, key, authority
    etcd: EtcdAccess = EtcdAccess()


class Options(msgspec.Struct, frozen=True, kw_only=True):
    program: Program
    nproc: int | str = 1  # or cpu, gpu, xpu, auto, a backend's name
    settings: Settings = Settings(alone=True)  # of the job
    cluster: Cluster | None = None  # None: one node alone
    role: str = "default"
    shutdown_timeout_s: float = 30.0
    signals: tuple[int, ...] = DEFAULT_SIGNALS
    retry_same_error: bool = False
    exit_code_from_cause: bool = False
    reschedule_exit_code: int | None = None
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
    quiet: bool = False  # say nothing but what goes wrong
    dashboard: str | None = None  # [HOST:]PORT
    preflight: bool = False
    standby: int = 0  # processes that wait to be ranks
    spot: str | None = None  # the cloud whose notices are heeded
    resume: str = ""  # which checkpoint the job begins with; '': the latest
    ft: FaultToleranceConfig = FaultToleranceConfig()

    @property
    def rules(self) -> Rules:
        """How hangs are found."""
        return Rules(
            mode=Mode(self.ft.hang_detection),
            floor_s=self.ft.hang_floor,
            safety_factor=self.ft.safety_factor,
            first_s=self.ft.first_step_s,
        )

    def ranks_config(self, learned: str) -> bytes:
        """What the monitor's client in each rank is to know."""
        return msgspec.json.encode({"config": self.ft, "learned": msgspec.Raw(learned.encode() or b"null")})
