"""What a script says about itself: heartbeats, sections, timeouts and requests. The names are those of NVIDIA's
`nvidia_resiliency_ext.fault_tolerance`, so that a script moves over by its import. Importing this imports no torch."""

from __future__ import annotations

from holdfast.fault_tolerance.client import RankMonitorClient
from holdfast.fault_tolerance.config import FaultToleranceConfig
from holdfast.fault_tolerance.requests import WorkloadAction, WorkloadControlRequest
from holdfast.fault_tolerance.timeouts import HeartbeatTimeouts, RankInfo, RankMonitorClientError, SectionTimeouts

__all__ = [
    "FaultToleranceConfig",
    "HeartbeatTimeouts",
    "RankInfo",
    "RankMonitorClient",
    "RankMonitorClientError",
    "SectionTimeouts",
    "WorkloadAction",
    "WorkloadControlRequest",
]
