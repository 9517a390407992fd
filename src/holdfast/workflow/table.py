"""A workflow for people: a line a task."""

from __future__ import annotations

import datetime
from typing import Any

from holdfast.workflow import deciding
from holdfast.workflow.record import Record
from holdfast.workflow.standing import ENDED

COLUMNS = ("task", "state", "node", "attempt", "reschedules", "last checkpoint", "")


def rows(record: Record) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = [COLUMNS]
    for group in record.workflow.groups:
        for task in group.tasks:
            at = record.standing.tasks[task.name]
            name = task.name + (" *" if task.lead and len(group.tasks) > 1 else "")
            attempt = str(at.attempt) if at.attempt else "-"
            times = f"{at.reschedules}" + (f" ({at.rescheduled} of {task.max_reschedules})" if at.rescheduled else "")
            found.append((name, at.state, at.node or "-", attempt, times, ago(at.checkpoint_at), at.why))
    return found


def text(record: Record) -> str:
    table = rows(record)
    widths = [max(len(row[column]) for row in table) for column in range(len(COLUMNS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    return "\n".join(lines)


def summary(record: Record) -> str:
    """One line."""
    states = [at.state for at in record.standing.tasks.values()]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    times = sum(at.reschedules for at in record.standing.tasks.values())
    return f"{record.id}: {state_of(record)}; {counts}; {times} reschedule{'' if times == 1 else 's'}"


def state_of(record: Record) -> str:
    groups = [at.state for at in record.standing.groups.values()]
    if not all(state in ENDED for state in groups):
        return "running" if any(at.attempt for at in record.standing.tasks.values()) else "waiting"
    return next((state for state in ("canceled", "failed") if state in groups), "completed")


def as_json(record: Record, runner: int | None) -> dict[str, Any]:
    tasks = {
        task.name: {
            "group": group.name, "lead": task.lead, "state": at.state, "node": at.node, "attempt": at.attempt,
            "reschedules": at.reschedules, "exit_code": at.code, "last_checkpoint": at.checkpoint_at or None,
            "why": at.why,
        }
        for group in record.workflow.groups
        for task in group.tasks
        if (at := record.standing.tasks[task.name])
    }  # fmt: skip
    over = deciding.is_over(record.standing)
    return {
        "id": record.id, "state": state_of(record), "submitted": record.submitted.at, "runner": runner,
        "exit_code": deciding.exit_code(record.workflow, record.standing) if over else None,
        "nodes_set_aside": record.standing.aside, "tasks": tasks,
    }  # fmt: skip


def ago(at: str) -> str:
    if not at:
        return "-"
    seconds = (datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(at)).total_seconds()
    if seconds < 120:
        return f"{max(0, seconds):.0f} s ago"
    return f"{seconds / 60:.0f} min ago" if seconds < 7200 else f"{seconds / 3600:.1f} h ago"
