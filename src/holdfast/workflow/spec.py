"""What a workflow file says, as values. `reading` makes them of a file, and has checked all of it by then."""

from __future__ import annotations

import msgspec

COMPLETE, FAIL, RESCHEDULE = "COMPLETE", "FAIL", "RESCHEDULE"
ACTIONS = (COMPLETE, FAIL, RESCHEDULE)

DAY_S = 86400.0


class Problem(Exception):
    """A workflow file that cannot be run. One line: where, what, and what is meant."""

    def __init__(self, text: str, file: str, line: int | None = None) -> None:
        super().__init__(f"{file}:{line}: {text}" if line is not None else f"{file}: {text}")
        self.text, self.file, self.line = text, file, line


class ExitActions(msgspec.Struct, frozen=True):
    """What an exit code means. Ranges do not overlap; both ends are meant."""

    ranges: tuple[tuple[int, int, str], ...] = ()

    def of(self, code: int) -> str:
        for first, last, action in self.ranges:
            if first <= code <= last:
                return action
        return COMPLETE if code == 0 else FAIL


class File(msgspec.Struct, frozen=True):
    path: str  # where the task finds it, absolute
    contents: str | None = None  # tokens in it are replaced, as in args
    local: str | None = None  # of this file; as it is


class Input(msgspec.Struct, frozen=True):
    """`{{input:N}}` is a folder with what is there. Nothing is no error: that is how a first run begins."""

    url: str = ""
    task: str = ""  # or the output of this task, which has to be complete first
    regex: str = ""  # of relative paths, matched at their beginning; '' for all


class Output(msgspec.Struct, frozen=True):
    """Where the contents of `{{output}}` go when the task has ended."""

    url: str
    regex: str = ""


class Checkpoint(msgspec.Struct, frozen=True):
    """A folder of the task that goes to `url`/its last part, every so often and when the task ends."""

    path: str
    url: str
    frequency_s: float
    regex: str = ""


class Resource(msgspec.Struct, frozen=True):
    """What a task needs of its node. 0: nothing in particular."""

    cpu: float = 0
    gpu: int = 0
    memory_bytes: int = 0
    storage_bytes: int = 0
    nodes_excluded: tuple[str, ...] = ()


class Task(msgspec.Struct, frozen=True):
    name: str
    command: tuple[str, ...]
    args: tuple[str, ...] = ()
    lead: bool = False
    environment: dict[str, str] = {}
    files: tuple[File, ...] = ()
    inputs: tuple[Input, ...] = ()
    outputs: tuple[Output, ...] = ()
    checkpoints: tuple[Checkpoint, ...] = ()
    exit_actions: ExitActions = ExitActions()
    resource: Resource = Resource()
    max_reschedules: int = 3
    image: str = ""
    line: int = 0  # of the workflow file


class Group(msgspec.Struct, frozen=True):
    """Tasks that run together. When the lead ends, so do the others."""

    name: str
    tasks: tuple[Task, ...]
    ignore_nonlead: bool = True  # what becomes of the others does not matter to the group
    barrier: bool = True  # all begin together, once all have their inputs
    line: int = 0

    @property
    def lead(self) -> Task:
        return next(task for task in self.tasks if task.lead)

    @property
    def after(self) -> tuple[str, ...]:
        """Tasks of other groups that have to be complete first."""
        mine = {task.name for task in self.tasks}
        needed = (given.task for task in self.tasks for given in task.inputs if given.task)
        return tuple(dict.fromkeys(name for name in needed if name not in mine))


class Workflow(msgspec.Struct, frozen=True):
    name: str
    groups: tuple[Group, ...]
    run_timeout_s: float = 60 * DAY_S  # of each group, from its first start
    queue_timeout_s: float = 60 * DAY_S  # of each group, until all of its tasks have a node
    file: str = ""

    def task(self, name: str) -> Task:
        return next(task for group in self.groups for task in group.tasks if task.name == name)
