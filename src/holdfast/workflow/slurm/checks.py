"""Whether Slurm would take a job, before there is one."""

from __future__ import annotations

import tempfile

from holdfast.workflow.slurm import commands
from holdfast.workflow.slurm.requests import SCRIPT, options
from holdfast.workflow.spec import Group


def refusal(group: Group) -> str:
    """What it says, or ''. One that does not answer now may later."""
    never = sorted({name for task in group.tasks for name in task.resource.nodes_excluded})
    with tempfile.NamedTemporaryFile("w", suffix=".sh") as script:
        script.write(SCRIPT.format(command="true"))
        script.flush()
        try:
            commands.check(options(group.tasks, never), script.name, {})
        except commands.Failed as failure:
            if failure.passing:
                raise
            return f"{group.name}: {failure}"
    return ""
