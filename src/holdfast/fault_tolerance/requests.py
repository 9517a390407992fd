"""What a rank may ask of the job it is part of."""

from __future__ import annotations

from enum import Enum

import msgspec


class WorkloadAction(Enum):
    Continue = 0
    ExcludeThisNode = 1
    ShutdownWorkload = 2


class WorkloadControlRequest(msgspec.Struct, frozen=True):
    """It acts at once. The description is shown to whoever looks at the job."""

    action: WorkloadAction
    description: str = ""


# As they go to the agent.
WORDS = {
    WorkloadAction.Continue: "continue",
    WorkloadAction.ExcludeThisNode: "exclude-node",
    WorkloadAction.ShutdownWorkload: "shutdown",
}
