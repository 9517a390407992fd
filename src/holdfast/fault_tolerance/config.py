"""The configuration of fault tolerance: its keys, their defaults, and what NVIDIA's keys mean here."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from holdfast.fault_tolerance.timeouts import RankMonitorClientError, check_name, seconds_or_none

RestartPolicy = Literal["any-failed", "min-healthy"]
HangDetection = Literal["off", "warn", "restart"]
POLICIES = ("any-failed", "min-healthy")
DETECTION = ("off", "warn", "restart")

TIMEOUTS = ("initial_rank_heartbeat_timeout", "rank_heartbeat_timeout", "rank_out_of_section_timeout")
ALIASES = {"max_no_progress_cycles": "max_no_progress_restarts"}

_HEALTH = "health checks of GPUs, networks and storage are not part of holdfast"
_LOGS = "logs and incidents are in the run directory"
_STEPS = "steps are counted as the optimizer does them, and any is progress"
_MEMORY = "processes that are gone have given their memory back"
_ANALYSIS = "no service is asked about a failure"
# Keys and flags of NVIDIA's launcher (0.4.1 to 0.6) that have nothing to act on here, and why.
WITHOUT_EFFECT: dict[str, str] = {
    "workload_check_interval": "ranks are watched, not polled",
    "restart_check_interval": "there is no second restarter to wait for",
    "skip_section_response": "nothing is answered, a section is written to memory",
    "log_level": _LOGS,
    "node_health_check_interval": _HEALTH,
    "node_health_check_endpoint": _HEALTH,
    "enable_nic_monitor": _HEALTH,
    "enable_nic_healthcheck": _HEALTH,
    "pci_topo_file": _HEALTH,
    "link_down_path_template": _HEALTH,
    "link_state_path_template": _HEALTH,
    "enable_dist_storage_healthcheck": _HEALTH,
    "storage_healthcheck_path": _HEALTH,
    "storage_health_check_path": _HEALTH,
    "segment": "nodes are not grouped by NVLink domain",
    "numa_bind_strict": "see --numa-binding",
    "gpu_memory_reclaim_timeout": _MEMORY,
    "gpu_memory_tolerance_mb": _MEMORY,
    "gpu_memory_poll_interval": _MEMORY,
    "check_remaining_processes": "what a rank leaves behind is always ended",
    "min_progress_iterations": _STEPS,
    "progress_update_interval": _STEPS,
    "checkpoint_iteration_file": _STEPS,
    "num_warmup_iterations": "the first step has a limit of its own",
    "install_exception_hook": "a rank's exception is always reported",
    "no_restart_exit_code": "see --exit-code-from-cause",
    "rdzv_impl": "see --rdzv-backend",
    "cycle_info_dir": _LOGS,
    "per_cycle_applog_prefix": _LOGS,
    "nvrx_logfile": _LOGS,
    "enable_log_server": _LOGS,
    "log_server_port": _LOGS,
    "log_server_log_prefix": _LOGS,
    "log_server_graceful_shutdown_timeout": _LOGS,
    "log_aggregator_count": _LOGS,
    "log_leaf_max_queue_chunks": _LOGS,
    "attribution_endpoint": _ANALYSIS,
    "attribution_startup_timeout": _ANALYSIS,
    "attribution_llm_api_key_file": _ANALYSIS,
    "attribution_llm_base_url": _ANALYSIS,
    "attribution_llm_model": _ANALYSIS,
    "attribution_analysis_backend": _ANALYSIS,
    "attribution_stop_action": _ANALYSIS,
    "attribution_log_level": _ANALYSIS,
    "attribution_export_url": _ANALYSIS,
}

# A rank that is sent one of these goes on.
_HARMLESS = {
    *(signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU),
    *(signal.SIGCONT, signal.SIGCHLD, signal.SIGURG, signal.SIGWINCH),
}


class BadConfig(ValueError):
    """A key that is not known, or a value that cannot be meant."""

    def __init__(self, key: str, what: str) -> None:
        super().__init__(f"{key}: {what}")
        self.key = key


class FaultToleranceConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A timeout that is None is no limit. `initial_rank_heartbeat_timeout` may also be left unset: then the time to the
    first step is learned, and the first heartbeat has no limit of its own."""

    initial_rank_heartbeat_timeout: float | UnsetType | None = UNSET
    rank_heartbeat_timeout: float | None = None
    rank_section_timeouts: Mapping[str, float | None] = {}
    rank_out_of_section_timeout: float | None = None
    safety_factor: float = 5.0
    rank_termination_signal: signal.Signals = signal.SIGKILL
    max_no_progress_restarts: int = 3  # 0: any number
    restart_policy: RestartPolicy | None = None
    use_infra_group_rank: bool | None = None
    hang_floor: float = 30.0
    hang_detection: HangDetection = "restart"

    def __post_init__(self) -> None:
        for key in TIMEOUTS:
            if (value := getattr(self, key)) is not None and value is not UNSET:
                _check_seconds(key, value, "or null for none")
        if not isinstance(self.rank_section_timeouts, Mapping):
            raise BadConfig("rank_section_timeouts", "names and their seconds are meant")
        for name, value in self.rank_section_timeouts.items():
            try:
                check_name(name)
            except RankMonitorClientError as wrong:
                raise BadConfig("rank_section_timeouts", str(wrong)) from None
            if value is not None:
                _check_seconds(f"rank_section_timeouts: {name}", value, "or null for none")
        _check_seconds("hang_floor", self.hang_floor)
        factor = seconds_or_none(self.safety_factor)
        if factor is None or factor < 1:
            raise BadConfig("safety_factor", f"{self.safety_factor!r} is not a number from 1 up")
        if type(self.max_no_progress_restarts) is not int or self.max_no_progress_restarts < 0:
            raise BadConfig("max_no_progress_restarts", f"{self.max_no_progress_restarts!r} is not a number from 0 up")
        if self.restart_policy not in (None, *POLICIES):
            raise BadConfig("restart_policy", f"{self.restart_policy!r} is none of {', '.join(POLICIES)}")
        if self.use_infra_group_rank is not None and type(self.use_infra_group_rank) is not bool:
            raise BadConfig("use_infra_group_rank", f"{self.use_infra_group_rank!r} is neither true nor false")
        if self.hang_detection not in DETECTION:
            raise BadConfig("hang_detection", f"{self.hang_detection!r} is none of {', '.join(DETECTION)}")
        if self.rank_termination_signal in _HARMLESS:
            raise BadConfig("rank_termination_signal", f"{self.rank_termination_signal.name} ends no process")

    @property
    def first_step_s(self) -> float | None:
        """Until the first step or heartbeat of a rank: None as learned, 0 without a limit."""
        value = self.initial_rank_heartbeat_timeout
        return None if isinstance(value, UnsetType) else value or 0.0

    @property
    def first_heartbeat_s(self) -> float | None:
        value = self.initial_rank_heartbeat_timeout
        return None if isinstance(value, UnsetType) else value

    @staticmethod
    def from_kwargs(**given: Any) -> FaultToleranceConfig:
        """From keys as a file has them. Raises ValueError for one that is not known."""
        return FaultToleranceConfig(**settle(given))

    @staticmethod
    def from_yaml_file(cfg_path: str) -> FaultToleranceConfig:
        """From the `fault_tolerance:` section of a file. Raises ValueError."""
        from holdfast.fault_tolerance import files

        return FaultToleranceConfig(**settle(files.load(cfg_path).values))


KEYS = tuple(FaultToleranceConfig.__struct_fields__)


def settle(given: Mapping[str, Any]) -> dict[str, Any]:
    """What each known key means; keys without effect are left out. Raises BadConfig."""
    found: dict[str, Any] = {}
    for written, value in given.items():
        key = ALIASES.get(written, written)
        if key in WITHOUT_EFFECT:
            continue
        if key not in KEYS:
            raise BadConfig(str(written), f"there is no such key{_nearest(str(written))}")
        if key in found:
            raise BadConfig(written, f"it is another name of {key}, which is given too")
        found[key] = _meant(key, value)
    # A value that is wrong by itself is told with its own key.
    for key, value in found.items():
        try:
            FaultToleranceConfig(**{key: value})
        except BadConfig as wrong:
            said = next((written for written in given if ALIASES.get(written) == key), key)
            raise BadConfig(said + wrong.key[len(key) :], str(wrong).removeprefix(f"{wrong.key}: ")) from None
    return found


def _meant(key: str, value: object) -> object:
    if isinstance(value, str) and value.strip().lower() in ("", "null", "none"):
        value = None
    if key in TIMEOUTS or key in ("restart_policy", "use_infra_group_rank"):
        return value
    if key == "rank_section_timeouts":
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise BadConfig(key, f"{value!r} is not a list of names and seconds")
        return {name: _meant(TIMEOUTS[0], limit_s) for name, limit_s in value.items()}
    if value is None:
        raise BadConfig(key, "it cannot be null; leave it out for its default")
    if key == "hang_detection" and isinstance(value, bool):
        return "restart" if value else "off"  # YAML reads the words on and off as these
    return _signal(value) if key == "rank_termination_signal" else value


def _signal(value: object) -> signal.Signals:
    if isinstance(value, str):
        name = value.strip().upper()
        name = name if name.startswith("SIG") else f"SIG{name}"
        if name in signal.Signals.__members__:
            return signal.Signals[name]
    elif isinstance(value, int) and not isinstance(value, bool) and value in set(signal.Signals):
        return signal.Signals(value)
    raise BadConfig("rank_termination_signal", f"there is no signal {value!r}; SIGKILL or SIGTERM may be meant")


def _check_seconds(key: str, value: object, instead: str = "") -> None:
    if seconds_or_none(value) is None:
        raise BadConfig(key, f"{value!r} is not a number of seconds above 0{instead and ', ' + instead}")


def _nearest(key: str) -> str:
    near = get_close_matches(key, [*KEYS, *ALIASES, *WITHOUT_EFFECT], 1)
    return f"; did you mean {near[0]}?" if near else f"; known are {', '.join(KEYS)}"
