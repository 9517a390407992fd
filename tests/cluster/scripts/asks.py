"""trains_elastic.py, in which the rank of node ASKER asks for ACTION once there is a file ASK, in the first world."""

from __future__ import annotations

import os
import runpy
from pathlib import Path
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from holdfast.fault_tolerance import RankMonitorClient, WorkloadAction, WorkloadControlRequest


def ask(*_: Any) -> None:
    if os.path.exists(os.environ["ASK"]):
        os.unlink(os.environ["ASK"])
        action = WorkloadAction[os.environ["ACTION"]]
        RankMonitorClient().send_workload_control_request(WorkloadControlRequest(action, "the disk is on fire"))


if os.environ["NODE"] == os.environ["ASKER"] and os.environ["HOLDFAST_GENERATION"] == "0":
    register_optimizer_step_post_hook(ask)
runpy.run_path(str(Path(__file__).parent / "trains_elastic.py"))
