"""What is done next in a workflow: from how it stands, and what has happened, to actions. No clock, no process.

A group starts when all of its tasks have a node. A task that is rescheduled ends its life there; those that are
restarted with it end theirs, too. When the last of them has ended, and its checkpoint is uploaded, all begin anew: with
fresh folders and fresh inputs, so that all see the same last checkpoint and nothing that an earlier life has left.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from holdfast.workflow.placing import Room
from holdfast.workflow.spec import COMPLETE, FAIL, RESCHEDULE, Group, Task, Workflow
from holdfast.workflow.standing import (
    ALIVE,
    CANCELED,
    COMPLETED,
    ENDED,
    FAILED,
    PREPARING,
    QUEUED,
    READY,
    RUNNING,
    STOPPING,
    WAITING,
    GroupStands,
    Node,
    Standing,
    TaskStands,
)

BACKOFF_S = 1.0
MAX_BACKOFF_S = 60.0
PATIENCE_S = 5.0

# -- what happens -----------------------------------------------------------------------------------------------------


class Placed(msgspec.Struct, frozen=True, tag=True):
    """It has a node, where somebody else gives them out."""

    task: str
    attempt: int
    node: str


class Requeued(msgspec.Struct, frozen=True, tag=True):
    """Whoever gives out nodes has ended this life, and begins the next one by itself."""

    task: str
    attempt: int
    why: str


class Prepared(msgspec.Struct, frozen=True, tag=True):
    task: str
    attempt: int


class Ended(msgspec.Struct, frozen=True, tag=True):
    """A life of a task is over, its last checkpoint uploaded. No code: its node is lost, or it could not be prepared,
    which is worth another try elsewhere."""

    task: str
    attempt: int
    code: int | None
    text: str = ""
    blames: bool | None = None  # its node, if it is rescheduled; None: if it is the first to end so


class Progressed(msgspec.Struct, frozen=True, tag=True):
    """A new checkpoint is there."""

    task: str
    attempt: int
    at: str


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """All of it, or one group."""

    group: str = ""


class Tick(msgspec.Struct, frozen=True, tag=True):
    """Time has passed, or there are other nodes."""


Event = Placed | Requeued | Prepared | Ended | Progressed | Cancel | Tick

# -- what is done -----------------------------------------------------------------------------------------------------


class Prepare(msgspec.Struct, frozen=True, tag=True):
    """Begin a life of a task on a node."""

    task: str
    attempt: int
    node: str
    gpus: tuple[str, ...]


class Begin(msgspec.Struct, frozen=True, tag=True):
    """It is prepared, and so are all it has to wait for."""

    task: str
    attempt: int


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End a life; its end is told like any other. `patience_s`: it is likely to end by itself within this."""

    task: str
    attempt: int
    why: str
    patience_s: float = 0.0


Action = Prepare | Begin | Stop


def begin(workflow: Workflow) -> Standing:
    return Standing(
        {group.name: GroupStands() for group in workflow.groups},
        {task.name: TaskStands() for group in workflow.groups for task in group.tasks},
        {},
    )


def decide(
    workflow: Workflow, stands: Standing, now_s: float, events: Sequence[Event], nodes: tuple[Node, ...] | None
) -> tuple[Standing, list[Action]]:
    """What has happened since the last time, in its order. Without `nodes`, somebody else gives them out."""
    stands = msgspec.json.decode(msgspec.json.encode(stands), type=Standing)
    deciding = _Deciding(workflow, stands, now_s, nodes)
    for event in events:
        deciding.happened(event)
    deciding.go_on()
    return stands, deciding.actions


def is_over(stands: Standing) -> bool:
    return all(group.state in ENDED for group in stands.groups.values()) and not any(
        task.state in ALIVE for task in stands.tasks.values()
    )


def exit_code(workflow: Workflow, stands: Standing) -> int:
    """Of the whole: 0 if all groups are complete, 130 if it was canceled, else the first failed lead's, or 1."""
    if all(group.state == COMPLETED for group in stands.groups.values()):
        return 0
    if any(group.state == CANCELED for group in stands.groups.values()):
        return 130
    for group in workflow.groups:
        if stands.groups[group.name].state == FAILED and (code := stands.tasks[group.lead.name].code):
            return code
    return 1


def next_s(workflow: Workflow, stands: Standing, now_s: float) -> float | None:
    """When a Tick is due. What was due before has been seen to, or waits for something else than time."""
    found = []
    for group in workflow.groups:
        at = stands.groups[group.name]
        if at.state in ENDED:
            continue
        if at.queued_s is not None:
            found.append(at.not_before_s)
            found.append(at.queued_s + workflow.queue_timeout_s)
        if at.started_s is not None:
            found.append(at.started_s + workflow.run_timeout_s)
    return min((at_s for at_s in found if at_s > now_s), default=None)


class _Deciding:
    def __init__(self, workflow: Workflow, stands: Standing, now_s: float, nodes: tuple[Node, ...] | None) -> None:
        self._workflow, self._stands, self._now_s, self._nodes = workflow, stands, now_s, nodes
        self._of = {task.name: (group, task) for group in workflow.groups for task in group.tasks}
        self.actions: list[Action] = []

    # -- events -------------------------------------------------------------------------------------------------------

    def happened(self, event: Event) -> None:
        match event:
            case Placed(name, attempt, node):
                self.placed(name, attempt, node)
            case Requeued(name, attempt, why):
                self.requeued(name, attempt, why)
            case Prepared(name, attempt):
                self.prepared(name, attempt)
            case Ended():
                self.ended(event)
            case Progressed(name, attempt, at):
                self.progressed(name, attempt, at)
            case Cancel(name):
                self.cancel(name)
            case Tick():
                pass

    def placed(self, name: str, attempt: int, node: str) -> None:
        task = self._stands.tasks[name]
        if task.attempt != attempt or task.state not in ALIVE:
            return
        task.node = node
        if task.state == QUEUED:
            task.state, task.why = PREPARING, ""
        group = self._of[name][0]
        if not any(self._stands.tasks[other.name].state in (WAITING, QUEUED) for other in group.tasks):
            self._has_nodes(self._stands.groups[group.name])

    def requeued(self, name: str, attempt: int, why: str) -> None:
        """It begins anew, also if it had ended: those that it works with do, too. Nobody is to blame. One that was to
        end, or to begin in some other way, ends this life first."""
        task = self._stands.tasks[name]
        group, spec = self._of[name]
        over = self._stands.groups[group.name].state in ENDED and task.state not in ALIVE
        if task.attempt != attempt or over:
            return
        task.attempt, task.node, task.gpus = attempt + 1, "", ()
        if task.state == STOPPING:
            self.actions.append(Stop(name, task.attempt, task.why))
        elif task.state == WAITING:
            self._stop(spec, WAITING, task.why)
        else:
            task.state, task.why = QUEUED, why

    def prepared(self, name: str, attempt: int) -> None:
        task = self._stands.tasks[name]
        if task.attempt == attempt and task.state == PREPARING:
            task.state, task.why = READY, "its inputs are there"

    def progressed(self, name: str, attempt: int, at: str) -> None:
        """It was worth it: who fails from here on has all of its reschedules again, and so have those beside it."""
        task = self._stands.tasks[name]
        task.checkpoint_at = at
        if task.attempt == attempt:
            for other in self._of[name][0].tasks:
                self._stands.tasks[other.name].rescheduled = 0

    def ended(self, event: Ended) -> None:
        task = self._stands.tasks[event.task]
        if task.attempt != event.attempt or task.state not in ALIVE:
            return
        group, spec = self._of[event.task]
        code = event.code
        task.code, task.gpus = code, ()
        action = spec.exit_actions.of(code) if code is not None else RESCHEDULE
        said = event.text or (f"exit code {code}" if code is not None else "its node is lost")
        if task.state == STOPPING:
            if event.blames:  # another has only been quicker to say so
                self._set_aside(task, f"{spec.name}: {said}")
            task.state = task.after
        elif action == RESCHEDULE:
            if event.blames is not False:
                self._set_aside(task, f"{spec.name}: {said}")
            # The nodes of a job end together. If this one is not to blame, another is about to say that it is.
            patience_s = PATIENCE_S if event.blames is False and code is not None else 0.0
            self._reschedule(group, spec, task, said, patience_s)
        elif action == COMPLETE:
            task.state, task.why = COMPLETED, said
            if spec.lead:
                self._end(group, COMPLETED, "")
        else:
            assert action == FAIL
            self._fail(group, spec, task, said)

    def cancel(self, name: str) -> None:
        for group in self._workflow.groups:
            if name in ("", group.name):
                self._end(group, CANCELED, "canceled")

    # -- ends ---------------------------------------------------------------------------------------------------------

    def _set_aside(self, task: TaskStands, why: str) -> None:
        """Its node."""
        if task.node:
            task.last_node = task.node
            self._stands.aside.pop(task.node, None)  # the last to fail stands last
            self._stands.aside[task.node] = why

    def _fail(self, group: Group, spec: Task, task: TaskStands, why: str) -> None:
        task.state, task.why = FAILED, why
        if spec.lead or not group.ignore_nonlead:
            self._end(group, FAILED, f"{spec.name}: {why}")

    def _end(self, group: Group, state: str, why: str) -> None:
        """The others of a group end with it."""
        at = self._stands.groups[group.name]
        if at.state in ENDED:
            return
        at.state, at.why, at.queued_s = state, why, None
        for spec in group.tasks:
            task = self._stands.tasks[spec.name]
            if task.state in ALIVE:
                self._stop(spec, state, why or f"the lead {group.lead.name} has ended")
            elif task.state == WAITING:
                task.state, task.why = state, why

    def _reschedule(self, group: Group, spec: Task, task: TaskStands, why: str, patience_s: float) -> None:
        if task.rescheduled >= spec.max_reschedules:
            times = f"{task.rescheduled} reschedules" if task.rescheduled != 1 else "1 reschedule"
            self._fail(group, spec, task, f"{why}, after {times} without progress" if task.rescheduled else why)
            return
        task.rescheduled += 1
        task.reschedules += 1
        task.state, task.why = WAITING, f"rescheduled: {why}"
        at = self._stands.groups[group.name]
        at.queued_s = self._now_s
        # At once after the first failure: most are over by then. Then ever later.
        wait_s = min(MAX_BACKOFF_S, BACKOFF_S * 2.0 ** (task.rescheduled - 2)) if task.rescheduled > 1 else 0.0
        at.not_before_s = max(at.not_before_s, self._now_s + wait_s)
        if spec.lead or not group.ignore_nonlead:
            for other in group.tasks:
                beside = self._stands.tasks[other.name]
                if beside.state in (QUEUED, PREPARING, READY, RUNNING):
                    self._stop(other, WAITING, f"begins anew with {spec.name}", patience_s)
                elif beside.state in ENDED:  # it had done its part of what is now done again
                    beside.state, beside.why = WAITING, f"begins anew with {spec.name}"

    def _stop(self, spec: Task, after: str, why: str, patience_s: float = 0.0) -> None:
        task = self._stands.tasks[spec.name]
        if task.state != STOPPING:
            self.actions.append(Stop(spec.name, task.attempt, why, patience_s))
        task.state, task.after, task.why = STOPPING, after, why

    # -- what is due --------------------------------------------------------------------------------------------------

    def go_on(self) -> None:
        for group in self._workflow.groups:
            self._look_at(group)
        due = [group for group in self._workflow.groups if self._is_due(group)]
        if due:
            room = Room(self._nodes, self._stands)
            for group in due:
                self._start(group, room)
        for group in self._workflow.groups:
            self._release(group)

    def _look_at(self, group: Group) -> None:
        """What comes before it, and how long it may take."""
        at = self._stands.groups[group.name]
        if at.state in ENDED:
            return
        if at.state == WAITING and at.queued_s is None:
            before = [self._stands.tasks[name] for name in group.after]
            if failed := [name for name in group.after if self._stands.tasks[name].state in (FAILED, CANCELED)]:
                self._end(group, FAILED, f"{failed[0]}, which it waits for, has not completed")
                return
            if any(task.state != COMPLETED for task in before):
                return
            at.queued_s = self._now_s
        if at.started_s is not None and self._now_s >= at.started_s + self._workflow.run_timeout_s:
            self._end(group, FAILED, f"it has run for {self._workflow.run_timeout_s:g} s, its limit")
        elif at.queued_s is not None and self._now_s >= at.queued_s + self._workflow.queue_timeout_s:
            self._end(group, FAILED, f"there were no nodes for it in {self._workflow.queue_timeout_s:g} s, its limit")

    def _is_due(self, group: Group) -> bool:
        """Some of it wait, and nobody that begins anew with them is still ending."""
        at = self._stands.groups[group.name]
        if at.state in ENDED or at.queued_s is None or self._now_s < at.not_before_s:
            return False
        tasks = [self._stands.tasks[spec.name] for spec in group.tasks]
        ending = any(task.state == STOPPING and task.after == WAITING for task in tasks)
        return any(task.state == WAITING for task in tasks) and not ending

    def _start(self, group: Group, room: Room) -> None:
        at = self._stands.groups[group.name]
        tasks = {spec.name: self._stands.tasks[spec.name] for spec in group.tasks}
        waiting = [spec for spec in group.tasks if tasks[spec.name].state == WAITING]
        places = room.place(waiting, tasks)
        if places is None:
            return
        for spec, (node, gpus) in zip(waiting, places, strict=True):
            task = tasks[spec.name]
            task.attempt += 1
            task.state, task.node, task.gpus, task.why = PREPARING if node else QUEUED, node, gpus, ""
            self.actions.append(Prepare(spec.name, task.attempt, node, gpus))
        at.state = RUNNING
        if self._nodes is not None:
            self._has_nodes(at)

    def _has_nodes(self, at: GroupStands) -> None:
        at.queued_s = None
        if at.started_s is None:
            at.started_s = self._now_s

    def _release(self, group: Group) -> None:
        tasks = [(spec, self._stands.tasks[spec.name]) for spec in group.tasks]
        if group.barrier and any(task.state in (WAITING, QUEUED, PREPARING, STOPPING) for _, task in tasks):
            return
        for spec, task in tasks:
            if task.state == READY:
                task.state, task.why = RUNNING, ""
                self.actions.append(Begin(spec.name, task.attempt))
