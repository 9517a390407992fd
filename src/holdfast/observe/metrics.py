"""A job in numbers, and Prometheus's text of them.

Names follow that community's rules: base units, `_total` for what only grows, `_info` for text, and when something
happened in place of how long ago: a reader that is late, or no longer hears anything, can still tell.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import NamedTuple, TypeAlias

from holdfast.control.causes import Kind
from holdfast.observe.state import PHASES, State

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Each is told with 0 as well: a rate over a series that appears with 1 misses the first.
STATES = ("starting", "training", "recovering", "succeeded", "preempted", "failed")
RANK_STATES = (*PHASES, "exited", "failed", "hung")
LOST_IN = ("detect", "stop", "wait", "start", "first step", "failed again")

Labels: TypeAlias = tuple[tuple[str, str], ...]
Samples: TypeAlias = list[tuple[Labels, float]]


class Family(NamedTuple):
    """One metric, with a value for each set of labels. The run's id is a label of all, and not among them."""

    name: str
    grows: bool  # a counter; else a gauge
    help: str
    samples: Samples


def render(state: State, now_s: float | None = None, is_gone: bool = False) -> str:
    """The text that Prometheus scrapes, version 0.0.4. `now_s` and `is_gone` as in `families`."""
    run_id = ("run_id", state.run_id)
    texts: dict[Labels, str] = {}  # a rank's labels come in several families
    lines: list[str] = []
    for name, grows, help, samples in families(state, now_s, is_gone):
        lines.append(f"# HELP {name} {help}")
        lines.append(f"# TYPE {name} {'counter' if grows else 'gauge'}")
        for labels, value in samples:
            if (text := texts.get(labels)) is None:
                text = texts[labels] = ",".join(f'{key}="{_escaped(word)}"' for key, word in (run_id, *labels))
            lines.append(f"{name}{{{text}}} {_number(value)}")
    return "\n".join(lines) + "\n"


def families(state: State, now_s: float | None = None, is_gone: bool = False) -> list[Family]:
    """All that have a value. `now_s` is the wall clock, for the job's length; without, it is as long as its record.
    `is_gone`: its agent has ended without a word, of which the record knows nothing."""
    began_s = wall_start_s(state)
    groups = (
        _of_job(state, began_s, now_s, is_gone),
        _of_training(state, began_s),
        _of_world(state, began_s),
        _of_standbys(state),
        _of_incidents(state),
        _of_checkpoints(state, began_s),
        _of_ranks(state),
    )
    return [family for group in groups for family in group if family.samples]


def wall_start_s(state: State) -> float | None:
    """When the job began, by the wall clock; None of a record without a beginning."""
    try:
        return datetime.fromisoformat(state.started).timestamp()
    except ValueError:
        return None


# -- what there is ----------------------------------------------------------------------------------------------------


def _of_job(state: State, began_s: float | None, now_s: float | None, is_gone: bool) -> Iterator[Family]:
    is_gone = is_gone and state.ended is None
    is_up = state.ended is None and not is_gone
    yield _gauge("holdfast_up", "Whether the job is under way: 0 once it has ended, however that was.", is_up)
    about = (("program", state.program), ("version", state.version), ("node", state.lead))
    yield Family(
        "holdfast_job_info", False, "The job: its program, its version of holdfast, its first node.", [(about, 1)]
    )
    yield _gauge("holdfast_start_timestamp_seconds", "When the job began.", began_s)
    yield _counter("holdfast_wall_seconds_total", "How long the job has run.", _wall_s(state, began_s, now_s))
    standing = state.phase if state.phase in STATES and not is_gone else "failed"
    yield _each("holdfast_state", "How the job stands: 1 for what it is.", "state", _one_of(STATES, standing))
    if state.ended is not None:
        outcome = (("outcome", state.ended.outcome),)
        yield Family("holdfast_outcome_info", False, "How the job ended: 'succeeded', or why not.", [(outcome, 1)])
    newest_s = _moment(began_s, state.at_s)
    yield _gauge("holdfast_last_event_timestamp_seconds", "When the record last told of anything.", newest_s)
    yield _counter("holdfast_faults_injected_total", "Faults that somebody caused on purpose.", state.faults)


def _of_training(state: State, began_s: float | None) -> Iterator[Family]:
    yield _gauge("holdfast_step", "The newest step. It goes back where steps have to be done again.", state.step)
    done = sum(world.steps for world in state.worlds)
    yield _counter("holdfast_steps_total", "Steps that were done, those that were done again included.", done)
    yield _gauge("holdfast_step_duration_seconds", "What a step took lately.", state.step_s or None)
    yield _gauge("holdfast_steps_left", "Steps to the end, where the program knows.", state.steps_left)
    yield _gauge("holdfast_loss", "The newest loss that the program told.", state.loss)
    yield _gauge(
        "holdfast_samples_per_second", "Samples that all ranks trained on lately.", state.samples_per_s or None
    )
    progressed_s = _moment(began_s, _progressed_s(state))
    help = "When a step was last seen to be done; before the first, when the job began."
    yield _gauge("holdfast_last_progress_timestamp_seconds", help, progressed_s)


def _of_world(state: State, began_s: float | None) -> Iterator[Family]:
    world = state.world
    yield _gauge("holdfast_generation", "The number of the newest world.", world.generation if world else None)
    yield _gauge("holdfast_world_size", "Ranks of the newest world.", world.size if world else None)
    yield _gauge("holdfast_nodes", "Nodes of the newest world.", len(world.nodes) if world else None)
    heard = {name: _moment(began_s, node.heard_s) for name, node in state.nodes.items() if not node.ended}
    yield _each("holdfast_node_last_event_timestamp_seconds", "When a node last told of anything.", "node", heard)
    counts = dict.fromkeys(RANK_STATES, 0)
    for rank in state.ranks.values():
        counts[rank.state] = counts.get(rank.state, 0) + 1
    yield _each("holdfast_ranks", "Ranks of the newest world, by what they are at.", "state", counts)


def _of_standbys(state: State) -> Iterator[Family]:
    yield _gauge("holdfast_standby_processes", "Processes that wait to be ranks.", len(state.standing_by))
    taken = dict(zip(("host", "gpu"), state.standby_bytes, strict=True))
    yield _each("holdfast_standby_memory_bytes", "Memory that they take.", "memory", taken)


def _of_incidents(state: State) -> Iterator[Family]:
    yield _counter("holdfast_restarts_total", "Restarts of the world.", state.restarts)
    yield _gauge("holdfast_restarts_limit", "Restarts that the job was given.", state.max_restarts)
    kinds = dict.fromkeys((kind.value for kind in Kind), 0)
    lost = dict.fromkeys(LOST_IN, 0.0)
    for incident in state.incidents.values():
        kinds[incident.kind.value] += 1
        for phase, spent_s in incident.phases_s().items():
            lost[phase] = lost.get(phase, 0.0) + spent_s
    yield _each("holdfast_incidents_total", "Incidents, by kind.", "kind", kinds, grows=True)
    yield _each("holdfast_lost_seconds_total", "Time that incidents have cost, by phase.", "phase", lost, grows=True)


def _of_checkpoints(state: State, began_s: float | None) -> Iterator[Family]:
    if (saved := state.checkpoint) is not None:
        yield _gauge("holdfast_checkpoint_last_step", "The step of the newest checkpoint.", saved.step)
        saved_s = _moment(began_s, saved.at_s)
        yield _gauge("holdfast_checkpoint_last_timestamp_seconds", "When the newest checkpoint was complete.", saved_s)
        yield _gauge("holdfast_checkpoint_last_size_bytes", "What one rank wrote of it.", saved.bytes)
        yield _gauge(
            "holdfast_checkpoint_last_duration_seconds", "How long that took it, beside the training.", saved.seconds
        )
    help = "Parts of checkpoints that could not be written."
    yield _counter("holdfast_checkpoint_failures_total", help, state.checkpoint_failures)
    yield _counter("holdfast_saving_seconds_total", "Time that ranks were held up by saves.", state.saving_s)


def _of_ranks(state: State) -> Iterator[Family]:
    ranks = state.ranks.values()
    named: dict[int, Labels] = {rank.rank: (("rank", str(rank.rank)), ("node", rank.node)) for rank in ranks}
    steps: Samples = [(named[rank.rank], rank.steps) for rank in ranks]
    yield Family("holdfast_rank_steps", False, "Steps of a rank in the newest world.", steps)
    step_s = [(named[rank.rank], rank.step_s) for rank in ranks if rank.step_s]
    yield Family("holdfast_rank_step_duration_seconds", False, "What a step took the rank lately.", step_s)
    own_s = [(named[rank.rank], rank.own_s) for rank in ranks if rank.own_s]
    help = "Of that, what it needed for itself before it waited for others."
    yield Family("holdfast_rank_own_duration_seconds", False, help, own_s)
    section_s = [(named[rank.rank], rank.section_s) for rank in ranks if rank.section_s]
    help = "What a step took the rank in the sections that its program names."
    yield Family("holdfast_rank_section_duration_seconds", False, help, section_s)
    straggles: Samples = [(named[rank.rank], int(rank.straggles)) for rank in ranks]
    yield Family("holdfast_rank_straggles", False, "Whether the rank holds the others up.", straggles)


# -- moments ----------------------------------------------------------------------------------------------------------


def _moment(began_s: float | None, at_s: float) -> float | None:
    return round(began_s + at_s, 3) if began_s is not None else None


def _progressed_s(state: State) -> float:
    """As the record counts. Steps that are done again are progress, too: how many there are is what incidents tell."""
    stepped = (world.stepped_s for world in reversed(state.worlds) if world.stepped_s is not None)
    return max(state.progressed_s, next(stepped, 0.0))


def _wall_s(state: State, began_s: float | None, now_s: float | None) -> float:
    if state.ended is not None:
        return max(state.ended.wall_s, state.at_s)  # it was told to be nearly as long as that
    if now_s is None or began_s is None:
        return state.at_s
    return max(state.at_s, now_s - began_s)


# -- families and text ------------------------------------------------------------------------------------------------


def _gauge(name: str, help: str, value: float | None) -> Family:
    return Family(name, False, help, [] if value is None else [((), value)])


def _counter(name: str, help: str, value: float) -> Family:
    return Family(name, True, help, [((), value)])


def _each(name: str, help: str, label: str, values: Mapping[str, float | None], grows: bool = False) -> Family:
    return Family(name, grows, help, [(((label, key),), value) for key, value in values.items() if value is not None])


def _one_of(states: tuple[str, ...], it: str) -> dict[str, int]:
    return {state: int(state == it) for state in states}


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(+value)  # the plus makes a number of True
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


def _escaped(text: str) -> str:
    """A name that is no UTF-8, as a host's may be, would cost the whole page."""
    text = text.encode("utf-8", "replace").decode()
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
