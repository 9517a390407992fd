"""What the page is told of a job: short rows of its state, in the order that the page's scripts know."""

from __future__ import annotations

from typing import Any, TypeAlias

from holdfast.control.incidents import Incident
from holdfast.observe import explain
from holdfast.observe.record import IncidentClosed, IncidentNoted
from holdfast.observe.state import Node, Point, Rank, State, World

MAX_WHAT = 200  # characters of an incident in the list; the whole one is asked for by its number
MAX_SAID = 10

Row: TypeAlias = tuple[Any, ...]


def of_rank(rank: Rank) -> Row:
    """Without its pace, which changes all the time."""
    slow_by = rank.slow_by if rank.straggles else ""
    return rank.rank, rank.node, rank.pid, rank.state, slow_by, rank.text[:MAX_WHAT]


def of_node(node: Node) -> Row:
    return node.name, node.nproc, node.pid, node.ended


def of_world(world: World) -> Row:
    times = (world.launched_s, world.started_s, world.stepped_s, world.ended_s)
    return world.generation, world.size, world.restarts, *(_short(each) for each in times), world.steps, world.base


def of_incident(state: State, incident: Incident) -> Row:
    return (
        incident.number,
        incident.generation,
        incident.kind.value,
        incident.what[:MAX_WHAT],
        incident.rank,
        incident.node,
        _short(max(0.0, state.at(incident.failed_at_s))),
        _short(incident.lost_s),
        incident.restarted,
        isinstance(incident, IncidentClosed),
        incident.failed_again_at_s is not None,
    )


def of_point(point: Point) -> Row:
    return _short(point.at_s), point.step, float(f"{point.value:.5g}")


def head(state: State, standing: str, now_s: float, lost_s: float) -> dict[str, Any]:
    """What fits on one screen, whatever the size of the job."""
    world, saved = state.world, state.checkpoint
    phase = state.phase if state.ended is not None or standing != "gone" else "gone"
    return {
        "run_id": state.run_id,
        "program": state.program,
        "version": state.version,
        "lead": state.lead,
        "started": state.started,
        "phase": phase,
        "standing": standing,
        "now_s": round(now_s, 2),
        "step": state.step,
        "step_s": state.step_s,
        "loss": state.loss,
        "epoch": state.epoch,
        "samples_per_s": state.samples_per_s,
        "steps_left": state.steps_left,
        "generation": world.generation if world is not None else None,
        "size": world.size if world is not None else 0,
        "nodes": len(world.nodes) if world is not None else len(state.nodes),
        "standby": [len(state.standing_by), *state.standby_bytes],
        "restarts": world.restarts if world is not None else 0,
        "max_restarts": state.max_restarts,
        "incidents": len(state.incidents),
        "lost_s": round(lost_s, 4),
        "saving_s": state.saving_s,
        "checkpoint": None if saved is None else [saved.step, saved.at_s, saved.name, saved.bytes, saved.seconds],
        "checkpoint_failures": state.checkpoint_failures,
        "stragglers": state.stragglers,
        "faults": state.faults,
        "said": [line[:MAX_WHAT] for line in state.said[-MAX_SAID:]],
        "ended": None if state.ended is None else [state.ended.outcome, state.ended.reason, state.ended.wall_s],
    }


def whole(state: State, incident: Incident) -> dict[str, Any]:
    """One incident with all that is known of it."""
    return {
        "number": incident.number,
        "generation": incident.generation,
        "kind": incident.kind.value,
        "what": incident.what,
        "headline": incident.headline,
        "action": incident.action,
        "restarted": incident.restarted,
        "closed": isinstance(incident, IncidentClosed),
        "rank": incident.rank,
        "node": incident.node,
        "pid": incident.pid,
        "status": incident.status,
        "steps": incident.steps,
        "uptime_s": incident.uptime_s,
        "failed_s": max(0.0, state.at(incident.failed_at_s)),
        "failed_at": incident.failed_at if isinstance(incident, IncidentNoted) else "",
        "lost_s": incident.lost_s,
        "phases_s": list(incident.phases_s().items()),
        "traceback": incident.traceback,
        "stderr_tail": incident.stderr_tail,
        "followers": incident.followers,
        "suspects": incident.suspects,
        "groups": incident.groups,
        "told": explain.opened(incident),
    }


def _short(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)
