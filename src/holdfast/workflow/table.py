"""A workflow for people: a line a task, no longer and no more than there is room for; and for programs."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any

from holdfast.workflow import deciding
from holdfast.workflow.record import Record
from holdfast.workflow.standing import ENDED

COLUMNS = ("task", "state", "node", "attempt", "reschedules", "last checkpoint", "")


def rows(record: Record, only: Collection[str] | None = None) -> list[tuple[str, ...]]:
    """Of these tasks, or of all."""
    found: list[tuple[str, ...]] = [COLUMNS]
    for group in record.workflow.groups:
        for task in group.tasks:
            if only is not None and task.name not in only:
                continue
            at = record.standing.tasks[task.name]
            name = task.name + (" *" if task.lead and len(group.tasks) > 1 else "")
            attempt = str(at.attempt) if at.attempt else "-"
            times = f"{at.reschedules}" + (f" ({at.rescheduled} of {task.max_reschedules})" if at.rescheduled else "")
            found.append((name, at.state, at.node or "-", attempt, times, ago(at.checkpoint_at), _plain(at.why)))
    return found


def text(record: Record, width: int | None = None, only: Collection[str] | None = None) -> str:
    table = rows(record, only)
    widths = [max(len(row[column]) for row in table) for column in range(len(COLUMNS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    return "\n".join(cut(line, width) for line in lines)


def cut(line: str, width: int | None) -> str:
    return line if width is None or len(line) <= width else line[: max(0, width - 1)] + "…"


def _plain(text: str) -> str:
    """What was told of a failure may have come from anywhere."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def summary(record: Record) -> str:
    """One line."""
    counts = counted(at.state for at in record.standing.tasks.values())
    times = sum(at.reschedules for at in record.standing.tasks.values())
    return f"{record.id}: {state_of(record)}; {counts}; {times} reschedule{'' if times == 1 else 's'}"


def counted(states: Iterable[str]) -> str:
    return ", ".join(f"{count} {state}" for state, count in Counter(states).items())


def some(names: Iterable[str], most: int = 20) -> str:
    found = list(names)
    return ", ".join(found[:most]) + (f" and {len(found) - most} more" if len(found) > most else "")


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
