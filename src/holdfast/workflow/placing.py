"""Which node each task gets. Pure, and the same answer for the same question."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from holdfast.workflow.spec import Task
from holdfast.workflow.standing import ALIVE, Node, Standing, TaskStands

Place = tuple[str, tuple[str, ...]]  # a node, and which of its GPUs


class Room:
    """What is free on each node. Without nodes, somebody else gives them out, and there is always room."""

    def __init__(self, nodes: Sequence[Node] | None, stands: Standing) -> None:
        self._nodes = nodes
        self._aside = stands.aside
        self._free = {node.name: set(node.gpus) for node in nodes or ()}
        self._load = dict.fromkeys(self._free, 0)
        for task in stands.tasks.values():
            if task.state in ALIVE and task.node in self._free:
                self._take((task.node, task.gpus))

    def place(self, waiting: Sequence[Task], tasks: Mapping[str, TaskStands]) -> list[Place] | None:
        """For all of them, or for none. A task that failed goes elsewhere if it can, and nobody goes where one failed
        as long as there is room where none did. What fits only there goes there: a node that one task was unlucky on is
        better than none."""
        if self._nodes is None:
            return [("", ()) for _ in waiting]
        found: dict[str, Place] = {}
        # Those that can stay where they were first, or one that has to move might take their place.
        for spec in sorted(waiting, key=lambda spec: tasks[spec.name].node in ("", *self._aside)):
            if (place := self._one(spec, tasks[spec.name])) is None:
                for taken in found.values():
                    self._give_back(taken)
                return None
            self._take(place)
            found[spec.name] = place
        return [found[spec.name] for spec in waiting]

    def _one(self, spec: Task, mine: TaskStands) -> Place | None:
        def cost(node: Node) -> tuple[bool, bool, bool, int]:
            elsewhere = node.name != mine.node
            return node.name == mine.last_node, node.name in self._aside, elsewhere, self._load[node.name]

        wanted = spec.resource.gpu
        fits = [node for node in self._nodes or () if can_ever(spec, node) and len(self._free[node.name]) >= wanted]
        if not fits:
            return None
        node = min(fits, key=cost)
        return node.name, tuple(sorted(self._free[node.name])[:wanted])

    def _take(self, place: Place) -> None:
        self._free[place[0]] -= set(place[1])
        self._load[place[0]] += 1

    def _give_back(self, place: Place) -> None:
        self._free[place[0]] |= set(place[1])
        self._load[place[0]] -= 1


def can_ever(spec: Task, node: Node) -> bool:
    """Whether it would fit there if nothing else ran."""
    if node.name in spec.resource.nodes_excluded:
        return False
    return all(wanted <= there for _, wanted, there in _amounts(spec, node))


def lacking(spec: Task, nodes: Sequence[Node]) -> str:
    """Why no node can ever have it, or ''."""
    if any(can_ever(spec, node) for node in nodes):
        return ""
    most: dict[str, float] = {}
    for node in nodes:
        for what, _, there in _amounts(spec, node):
            most[what] = max(most.get(what, 0), there)
    for what, wanted, _ in _amounts(spec, nodes[0]) if nodes else ():
        if wanted > most[what]:
            return f"{spec.name} wants {wanted:g} {what}, and no node has more than {most[what]:g}"
    return f"{spec.name} wants more than any node has that is not excluded"


def _amounts(spec: Task, node: Node) -> list[tuple[str, float, float]]:
    """What is wanted, how much of it, and how much there is."""
    wanted = spec.resource
    gib = 1024.0**3
    return [
        ("GPUs", wanted.gpu, len(node.gpus)),
        ("CPUs", wanted.cpu, node.cpu),
        ("GiB of memory", round(wanted.memory_bytes / gib, 1), round(node.memory_bytes / gib, 1)),
        ("GiB of disk", round(wanted.storage_bytes / gib, 1), round(node.storage_bytes / gib, 1)),
    ]
