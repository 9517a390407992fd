"""Which node each task gets. Pure, and the same answer for the same question."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from holdfast.workflow.spec import Task
from holdfast.workflow.standing import ALIVE, Node, Standing, TaskStands

Place = tuple[str, tuple[str, ...]]  # a node, and which of its GPUs


def place(
    waiting: Sequence[Task], tasks: Mapping[str, TaskStands], nodes: Sequence[Node], stands: Standing
) -> list[Place] | None:
    """For all of them, or for none. A task that failed goes elsewhere if it can, and nobody goes where one failed as
    long as there is room where none did. What fits only there goes there: a node that one task was unlucky on is better
    than none."""
    free = {node.name: set(node.gpus) for node in nodes}
    load = {node.name: 0 for node in nodes}
    for task in stands.tasks.values():
        if task.state in ALIVE and task.node in free:
            free[task.node] -= set(task.gpus)
            load[task.node] += 1
    found: list[Place] = []
    for spec in waiting:
        mine = tasks[spec.name]

        def cost(node: Node, mine: TaskStands = mine) -> tuple[bool, bool, bool, int]:
            elsewhere = node.name != mine.node
            return node.name == mine.last_node, node.name in stands.aside, elsewhere, load[node.name]

        fits = [node for node in nodes if can_ever(spec, node) and len(free[node.name]) >= spec.resource.gpu]
        if not fits:
            return None
        node = min(fits, key=cost)
        gpus = tuple(sorted(free[node.name])[: spec.resource.gpu])
        free[node.name] -= set(gpus)
        load[node.name] += 1
        found.append((node.name, gpus))
    return found


def can_ever(spec: Task, node: Node) -> bool:
    """Whether it would fit there if nothing else ran. CPUs, memory and disk are not divided up: a machine that is tried
    out on has less of them than it is asked for."""
    wanted = spec.resource
    return node.name not in wanted.nodes_excluded and len(node.gpus) >= wanted.gpu


def impossible(tasks: Sequence[Task], nodes: Sequence[Node]) -> Task | None:
    """One that no node can ever have."""
    return next((task for task in tasks if not any(can_ever(task, node) for node in nodes)), None)
