"""What is asked of Slurm.."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.workflow.placing import can_ever
from holdfast.workflow.spec import Task
from holdfast.workflow.standing import Node, Standing

# What a user may want otherwise is here, where SBATCH_... variables go before it; the rest is given to sbatch itself.
SCRIPT = """#!/bin/sh
#SBATCH --signal=B:USR1@120
exec {command}
"""

MIB = 1024 * 1024


def options(tasks: Sequence[Task], leave_out: Sequence[str]) -> list[str]:
    """A node for each task; all of them have what the most demanding one wants."""
    wanted = [task.resource for task in tasks]
    cpus = max(resource.cpu for resource in wanted)
    gpus = max(resource.gpu for resource in wanted)
    memory = max(resource.memory_bytes for resource in wanted)
    storage = max(resource.storage_bytes for resource in wanted)
    return [
        *("--requeue", "--open-mode=append"),
        *(f"--nodes={len(tasks)}", f"--ntasks={len(tasks)}", "--ntasks-per-node=1"),
        *([f"--cpus-per-task={max(1, round(cpus))}"] if cpus else []),
        *([f"--gres=gpu:{gpus}"] if gpus else []),
        *([f"--mem={-(-memory // MIB)}M"] if memory else []),
        *([f"--tmp={-(-storage // MIB)}M"] if storage else []),
        *([f"--exclude={','.join(leave_out)}"] if leave_out else []),
    ]


def excluded(tasks: Sequence[Task], stands: Standing, nodes: Sequence[Node]) -> list[str]:
    """Nodes that tasks may not have, and those on which one failed, as long as enough others are there. The last to
    fail is the last to be taken back: a node that was bad long ago may be well again."""
    never = {name for task in tasks for name in task.resource.nodes_excluded}
    fit = [node.name for node in nodes if all(can_ever(task, node) for task in tasks)]
    aside = [name for name in stands.aside if name in fit]
    spare = len(fit) - len(tasks)
    return sorted(never | set(aside[max(0, len(aside) - max(0, spare)) :]))
