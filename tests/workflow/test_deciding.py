"""What becomes of a group when its tasks end, each in its way."""

from __future__ import annotations

import random

import pytest

from holdfast.workflow import deciding
from holdfast.workflow.deciding import (
    PATIENCE_S,
    Begin,
    Cancel,
    Ended,
    Placed,
    Prepare,
    Prepared,
    Progressed,
    Requeued,
    Stop,
    Tick,
)
from holdfast.workflow.spec import RESCHEDULE, ExitActions, Group, Input, Resource, Task, Workflow
from holdfast.workflow.standing import (
    ALIVE,
    CANCELED,
    COMPLETED,
    ENDED,
    FAILED,
    PREPARING,
    QUEUED,
    RUNNING,
    STOPPING,
    WAITING,
    Node,
    Standing,
)

NODES = tuple(Node(name, 4) for name in ("n1", "n2", "n3"))
AGAIN = ExitActions(((3, 3, RESCHEDULE),))


def group(name: str = "g", tasks: int = 3, after: str = "", **options: object) -> Group:
    inputs = (Input(task=after),) if after else ()
    made = [Task(f"{name}{at}", ("x",), lead=at == 0, exit_actions=AGAIN, inputs=inputs) for at in range(tasks)]
    return Group(name, tuple(made), **options)  # type: ignore[arg-type]


class Flow:
    """A workflow as its runner would have it, without anything that runs."""

    def __init__(self, *groups: Group, nodes: tuple[Node, ...] | None = NODES, **options: float) -> None:
        self.workflow = Workflow("w", groups, **options)  # type: ignore[arg-type]
        self.stands: Standing = deciding.begin(self.workflow)
        self.now_s = 0.0
        self.nodes = nodes
        self.done: list[deciding.Action] = []
        self.tell(Tick())

    def tell(self, event: deciding.Event) -> list[deciding.Action]:
        before = self.stands
        self.stands, actions = deciding.decide(self.workflow, before, self.now_s, (event,), self.nodes)
        self.done += actions
        return actions

    def prepare(self) -> None:
        for name, task in self.stands.tasks.items():
            if task.state == PREPARING:
                self.tell(Prepared(name, task.attempt))

    def end(self, name: str, code: int | None) -> list[deciding.Action]:
        return self.tell(Ended(name, self.stands.tasks[name].attempt, code))

    def stop_those_told(self) -> None:
        for name, task in self.stands.tasks.items():
            if task.state == STOPPING:
                self.end(name, 143)

    def states(self, *names: str) -> list[str]:
        return [self.stands.tasks[name].state for name in names]


def running(*groups: Group, **options: object) -> Flow:
    flow = Flow(*groups, **options)  # type: ignore[arg-type]
    flow.prepare()
    return flow


def test_all_begin_together_once_all_are_prepared() -> None:
    flow = Flow(group())
    assert flow.done == [Prepare(f"g{at}", 1, node.name, ()) for at, node in enumerate(NODES)]
    assert flow.tell(Prepared("g0", 1)) == [] and flow.tell(Prepared("g2", 1)) == []
    assert flow.tell(Prepared("g1", 1)) == [Begin("g0", 1), Begin("g1", 1), Begin("g2", 1)]
    flow = Flow(group(barrier=False))
    assert flow.tell(Prepared("g2", 1)) == [Begin("g2", 1)]


def test_when_the_lead_ends_so_do_the_others() -> None:
    for code, state in ((0, COMPLETED), (1, FAILED)):
        flow = running(group())
        assert flow.end("g0", code) == [
            Stop(name, 1, "the lead g0 has ended" if not code else "g0: exit code 1") for name in ("g1", "g2")
        ]
        assert not deciding.is_over(flow.stands)
        flow.stop_those_told()
        assert deciding.is_over(flow.stands) and flow.states("g0", "g1", "g2") == [state] * 3
        assert deciding.exit_code(flow.workflow, flow.stands) == code


@pytest.mark.parametrize("ignore", [True, False])
def test_another_one_fails(ignore: bool) -> None:
    flow = running(group(ignore_nonlead=ignore))
    flow.end("g2", 7)
    if ignore:
        assert flow.states("g0", "g1", "g2") == [RUNNING, RUNNING, FAILED]
        flow.end("g0", 0)
        flow.stop_those_told()
        assert deciding.exit_code(flow.workflow, flow.stands) == 0
    else:
        flow.stop_those_told()
        assert flow.stands.groups["g"].state == FAILED and flow.stands.groups["g"].why == "g2: exit code 7"
        assert deciding.exit_code(flow.workflow, flow.stands) not in (0, None)


def test_another_one_completes_and_the_rest_goes_on() -> None:
    flow = running(group(ignore_nonlead=False))
    assert flow.end("g1", 0) == []
    assert flow.states("g0", "g1", "g2") == [RUNNING, COMPLETED, RUNNING]


@pytest.mark.parametrize(("task", "ignore"), [("g0", True), ("g0", False), ("g2", True), ("g2", False)])
def test_a_reschedule(task: str, ignore: bool) -> None:
    """The lead takes the others along, whatever the flag says; another one only if it says so."""
    flow = running(group(ignore_nonlead=ignore))
    node = flow.stands.tasks[task].node
    actions = flow.end(task, 3)
    alone = task == "g2" and ignore
    others = [name for name in ("g0", "g1", "g2") if name != task]
    if alone:
        assert [type(action) for action in actions] == [Prepare]
    else:
        assert actions == [Stop(name, 1, f"begins anew with {task}") for name in others]
        assert flow.states(task) == [WAITING]  # the others' last checkpoints are being uploaded
        flow.stop_those_told()
    stands = flow.stands.tasks
    assert stands[task].attempt == 2 and stands[task].node != node and node in flow.stands.aside
    assert [stands[name].attempt for name in others] == [1 if alone else 2] * 2
    assert [stands[name].node for name in others] == [
        "n1" if name == "g0" else "n2" if name == "g1" else "n3" for name in others
    ]
    assert (stands[task].reschedules, *(stands[name].reschedules for name in others)) == (1, 0, 0)
    flow.prepare()
    assert flow.states("g0", "g1", "g2") == [RUNNING] * 3


def test_one_that_moves_takes_nobodys_place() -> None:
    flow = running(group(), nodes=(*NODES, Node("n4", 4)))
    flow.end("g0", 3)
    flow.stop_those_told()
    assert [flow.stands.tasks[name].node for name in ("g0", "g1", "g2")] == ["n4", "n2", "n3"]


def test_who_had_completed_begins_anew_with_the_others() -> None:
    flow = running(group(ignore_nonlead=False))
    flow.end("g1", 0)
    flow.end("g2", 3)
    flow.stop_those_told()
    assert flow.states("g0", "g1", "g2") == [PREPARING] * 3


def test_a_lost_node_is_a_reschedule_and_the_only_node_is_better_than_none() -> None:
    flow = running(group(tasks=1), nodes=NODES[:1])
    assert flow.end("g0", None) == [Prepare("g0", 2, "n1", ())]


def test_the_budget_waits_longer_each_time_and_is_refilled_by_progress() -> None:
    flow = running(group(tasks=1))
    waits = []
    for _ in range(3):
        flow.end("g0", 3)
        due_s = flow.stands.groups["g"].not_before_s
        waits.append(due_s - flow.now_s)
        flow.now_s = due_s
        flow.tell(Tick())
        flow.prepare()
    assert waits == [0.0, 1.0, 2.0]
    flow.tell(Progressed("g0", flow.stands.tasks["g0"].attempt, "now"))
    for _ in range(3):
        flow.end("g0", 3)
        flow.now_s = max(flow.now_s, flow.stands.groups["g"].not_before_s)
        flow.tell(Tick())
        flow.prepare()
    assert flow.states("g0") == [RUNNING]
    flow.end("g0", 3)
    assert flow.states("g0") == [FAILED]
    assert flow.stands.groups["g"].why == "g0: exit code 3, after 3 reschedules without progress"
    assert deciding.exit_code(flow.workflow, flow.stands) == 3


def test_groups_wait_for_what_they_need() -> None:
    flow = running(group("a", 1), group("b", 2, after="a0"), group("c", 1, after="b0"))
    assert flow.states("a0", "b0", "c0") == [RUNNING, WAITING, WAITING]
    flow.end("a0", 0)
    flow.prepare()
    assert flow.states("b0", "b1", "c0") == [RUNNING, RUNNING, WAITING]
    flow.end("b0", 1)
    flow.stop_those_told()
    assert flow.states("c0") == [FAILED] and "b0, which it waits for" in flow.stands.groups["c"].why
    assert deciding.is_over(flow.stands)


def test_gpus_are_divided_and_waited_for() -> None:
    nodes = (Node("n1", 4, ("0", "1")),)
    wants = Resource(gpu=2)
    groups = [Group(name, (Task(f"{name}0", ("x",), lead=True, resource=wants),)) for name in ("a", "b")]
    flow = running(*groups, nodes=nodes)
    assert flow.states("a0", "b0") == [RUNNING, WAITING] and flow.stands.tasks["a0"].gpus == ("0", "1")
    flow.end("a0", 0)
    assert flow.states("b0") == [PREPARING] and flow.stands.tasks["b0"].gpus == ("0", "1")


def test_limits_of_time() -> None:
    flow = running(group(), run_timeout_s=100.0)
    assert deciding.next_s(flow.workflow, flow.stands, 0.0) == 100.0
    flow.now_s = 100.0
    assert [type(action) for action in flow.tell(Tick())] == [Stop] * 3
    flow.stop_those_told()
    assert flow.states("g0") == [FAILED] and "its limit" in flow.stands.groups["g"].why
    flow = Flow(group(), nodes=(), queue_timeout_s=5.0)
    flow.now_s = 5.0
    flow.tell(Tick())
    assert deciding.is_over(flow.stands) and "no nodes for it" in flow.stands.groups["g"].why


def test_a_queue_system_gives_out_nodes_and_begins_anew() -> None:
    flow = Flow(group(ignore_nonlead=False), nodes=None)
    assert flow.done == [Prepare(f"g{at}", 1, "", ()) for at in range(3)]
    assert flow.states("g0") == [QUEUED] and deciding.next_s(flow.workflow, flow.stands, 0.0) is not None
    for at in range(3):
        assert flow.stands.groups["g"].queued_s == 0.0
        flow.tell(Placed(f"g{at}", 1, f"n{at}"))
    assert flow.stands.groups["g"].queued_s is None and flow.stands.groups["g"].started_s == 0.0
    flow.prepare()
    flow.end("g1", 0)
    for at in range(3):
        assert flow.tell(Requeued(f"g{at}", 1, "its time is over")) == []
    assert flow.states("g0", "g1", "g2") == [QUEUED] * 3  # who had ended works with the others again
    assert [task.attempt for task in flow.stands.tasks.values()] == [2] * 3 and not flow.stands.aside
    for at, node in enumerate(("n0", "n1", "bad")):
        flow.tell(Placed(f"g{at}", 2, node))
    flow.prepare()
    assert flow.states("g0", "g1", "g2") == [RUNNING] * 3
    flow.end("g2", 3)
    assert set(flow.stands.aside) == {"bad"}
    # The queue system has begun it anew before it knew: that life ends, and all begin together.
    assert flow.tell(Requeued("g2", 2, "")) == [Stop("g2", 3, "rescheduled: exit code 3")]
    assert flow.tell(Requeued("g0", 2, "")) == [Stop("g0", 3, "begins anew with g2")]
    flow.tell(Requeued("g1", 2, ""))
    flow.stop_those_told()
    assert [(task.state, task.attempt) for task in flow.stands.tasks.values()] == [(QUEUED, 4)] * 3


def test_what_is_not_the_nodes_fault_sets_none_aside() -> None:
    flow = running(group(tasks=1))
    flow.tell(Ended("g0", 1, None, "its time is over", blames=False))
    assert flow.stands.aside == {} and flow.stands.tasks["g0"].node == "n1" and flow.states("g0") == [PREPARING]


def test_the_one_to_blame_is_set_aside_whoever_is_first_to_say_so() -> None:
    """All nodes of a job end with the same code; one of them knows that it was the cause."""
    flow = running(group(ignore_nonlead=False), nodes=(*NODES, Node("n4", 4)))
    stops = flow.tell(Ended("g2", 1, 3, blames=False))
    assert stops == [Stop(name, 1, "begins anew with g2", PATIENCE_S) for name in ("g0", "g1")]
    flow.tell(Ended("g1", 1, 143, blames=True))  # it was told to stop in the middle of its end
    flow.tell(Ended("g0", 1, 3, blames=False))
    assert list(flow.stands.aside) == ["n2"]
    assert [(task.attempt, task.node) for task in flow.stands.tasks.values()] == [(2, "n1"), (2, "n4"), (2, "n3")]


def test_one_group_is_canceled() -> None:
    flow = running(group("a", 1), group("b", 1), group("c", 1, after="a0"))
    flow.tell(Cancel("a"))
    flow.stop_those_told()
    assert flow.states("a0", "b0", "c0") == [CANCELED, RUNNING, FAILED]
    flow.end("b0", 0)
    assert deciding.is_over(flow.stands) and deciding.exit_code(flow.workflow, flow.stands) == 130


def test_cancel_ends_all() -> None:
    flow = running(group("a", 2), group("b", 1, after="a0"))
    flow.tell(Cancel())
    assert flow.states("a0", "a1", "b0") == [STOPPING, STOPPING, CANCELED]
    flow.stop_those_told()
    assert deciding.is_over(flow.stands) and deciding.exit_code(flow.workflow, flow.stands) == 130


def test_news_of_an_earlier_life_change_nothing() -> None:
    flow = running(group(tasks=1))
    flow.end("g0", 3)
    before = flow.stands
    for event in (Ended("g0", 1, 0), Ended("g0", 1, None), Prepared("g0", 1)):
        assert flow.tell(event) == []
        assert flow.stands == before


@pytest.mark.parametrize("seed", range(300))
def test_any_order_of_events_comes_to_an_end(seed: int) -> None:
    """No task has two lives at once, each has as many as were begun, and when all is over nothing lives."""
    dice = random.Random(seed)
    groups = [group("a", dice.randrange(1, 4), ignore_nonlead=dice.random() < 0.5, barrier=dice.random() < 0.7)]
    groups.append(group("b", dice.randrange(1, 4), after=dice.choice(["", "a0"]), ignore_nonlead=dice.random() < 0.5))
    flow = Flow(*groups, run_timeout_s=1000.0)
    alive: dict[str, int] = {}
    for action in flow.done:
        apply(alive, action)
    for _ in range(2000):
        if deciding.is_over(flow.stands):
            break
        flow.now_s += dice.random()
        event: deciding.Event = Tick()
        if alive and dice.random() < 0.9:
            name = dice.choice(sorted(alive))
            task = flow.stands.tasks[name]
            if task.state == PREPARING and dice.random() < 0.7:
                event = Prepared(name, task.attempt)
            elif dice.random() < 0.1:
                event = Progressed(name, task.attempt, "")
            elif dice.random() < 0.2:
                event = Requeued(name, task.attempt, "")
                alive[name] += 1
            else:
                event = Ended(name, alive.pop(name), dice.choice([0, 1, 3, 3, 3, None, 143]))
        elif dice.random() < 0.01:
            event = Cancel()
        for action in flow.tell(event):
            apply(alive, action)
        for name, task in flow.stands.tasks.items():
            assert (task.state in ALIVE) == (name in alive), (name, task.state)
    assert deciding.is_over(flow.stands) and not alive
    assert all(at.state in ENDED for at in flow.stands.groups.values())


def apply(alive: dict[str, int], action: deciding.Action) -> None:
    if isinstance(action, Prepare):
        assert action.task not in alive
        alive[action.task] = action.attempt
    else:
        assert alive[action.task] == action.attempt
