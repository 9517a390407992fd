"""Incidents in words: what a person reads while the job comes back, and when it does not."""

from __future__ import annotations

import re
import shlex

from holdfast.control.causes import Kind
from holdfast.control.incidents import Incident
from holdfast.control.stacks import describe

STDERR_LINES = 12
_RANK_PREFIX = re.compile(r"^\[rank\d+\]:\s?")  # which torch puts before a traceback once there is a process group


def opened(incident: Incident) -> list[str]:
    """The lines for a failure that is answered with a restart."""
    lines = [f"{incident.what}{_when(incident)}{_process(incident)}", *_doing(incident)]
    if incident.followers:
        lines.append("  then " + _followers(incident))
    lines.append(f"  {incident.action}")
    return lines


def closed(incident: Incident) -> list[str]:
    """The line that says what it cost."""
    if not incident.restarted or incident.recovered_at_s is None:
        return []
    return [f"back after {duration(incident.lost_s)} ({_phases(incident)})"]


def given_up(incident: Incident, run_dir: str | None) -> list[str]:
    """All that is known about the failure that ended the job."""
    verb = "was ended" if incident.kind is Kind.REQUESTED else "failed"
    lines = [f"the job {verb}: {incident.what}{_process(incident)}", *_doing(incident)]
    body = incident.traceback.rstrip().splitlines() or list(incident.stderr_tail[-STDERR_LINES:])
    if body:
        lines.append("  its traceback:" if incident.traceback else "  the last lines of its stderr:")
        lines += [f"    {line}" for line in body]
    if incident.traceback and (said := _said_beside(incident)):
        lines.append("  the last lines of its stderr before that:")
        lines += [f"    {line}" for line in said]
    if incident.followers:
        lines.append("  then " + _followers(incident))
    lines.append(f"  {incident.action}")
    if run_dir is not None:
        lines.append(f"  more in {run_dir}")
    return lines


def summary(steps: int, incidents: list[Incident], wall_s: float, kept_in: str | None) -> list[str]:
    """The closing lines of a run that had incidents."""
    lost_s = sum(incident.lost_s for incident in incidents)
    share = f", {100 * lost_s / wall_s:.2g} % of the run" if wall_s > 0 else ""
    many = "1 incident" if len(incidents) == 1 else f"{len(incidents)} incidents"
    done = f"{steps} steps in " if steps else ""
    lines = [f"{done}{duration(wall_s)}, {many}, {duration(lost_s)} lost{share}"]
    totals: dict[str, float] = {}
    for incident in incidents:
        for name, spent_s in incident.phases_s().items():
            totals[name] = totals.get(name, 0.0) + spent_s
    if totals:
        lines.append("  where it went: " + ", ".join(f"{name} {duration(s)}" for name, s in totals.items() if s > 0))
    if kept_in is not None:
        lines.append(f"  the records are in {kept_in}")
    return lines


def next_commands(run_dir: str, failed: bool) -> str:
    """What helps when a job has ended, to be copied into a shell."""
    where = shlex.quote(run_dir)
    return "next: " + (f"holdfast status {where}; " if failed else "") + f"holdfast report {where}"


def duration(seconds: float) -> str:
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def _doing(incident: Incident) -> list[str]:
    """What the ranks of a hung world were doing, and whom the others seem to have waited for."""
    if not incident.groups:
        return []
    lines = [f"  {describe(incident.groups)}"]
    if incident.suspects and any(group.collective for group in incident.groups):
        many = "ranks" if len(incident.suspects) > 1 else "rank"
        lines.append(f"  {many} {', '.join(map(str, incident.suspects[:8]))}: likely what the others wait for")
    return lines


def _when(incident: Incident) -> str:
    if incident.kind is Kind.HANG and not incident.steps:
        return ""  # its headline says so
    if incident.steps is None:  # the steps of a program that was started cold cannot be seen
        return ""
    return f" at step {incident.steps}" if incident.steps else " before its first step"


def _process(incident: Incident) -> str:
    if incident.pid is None:
        return ""
    return f" (pid {incident.pid}, {duration(incident.uptime_s)} into generation {incident.generation})"


def _followers(incident: Incident) -> str:
    shown = [f"rank {f.rank} ({f.headline[:100]})" for f in incident.followers[:3]]
    more = len(incident.followers) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")


def _phases(incident: Incident) -> str:
    return ", ".join(f"{name} {duration(s)}" for name, s in incident.phases_s().items() if s >= 0.0005)


def _said_beside(incident: Incident) -> list[str]:
    """What the rank wrote to stderr apart from the traceback itself."""
    told = {line.strip() for line in incident.traceback.splitlines()}
    said = [(line, _RANK_PREFIX.sub("", line).strip()) for line in incident.stderr_tail]
    return [line for line, bare in said if bare and bare not in told][-STDERR_LINES:]
