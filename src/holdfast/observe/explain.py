"""Incidents in words: what a person reads while the job comes back, and when it does not."""

from __future__ import annotations

from holdfast.control.incidents import Incident

STDERR_LINES = 12


def opened(incident: Incident) -> list[str]:
    """The lines for a failure that is answered with a restart."""
    at = (
        f" at step {incident.steps}"
        if incident.steps
        else " before its first step"
        if incident.rank is not None
        else ""
    )
    lines = [f"{incident.what}{at}{_process(incident)}"]
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
    lines = [f"the job failed: {incident.what}{_process(incident)}"]
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


def summary(steps: int, incidents: list[Incident], wall_s: float) -> list[str]:
    """The closing lines of a run that had incidents."""
    lost_s = sum(incident.lost_s for incident in incidents)
    share = f", {100 * lost_s / wall_s:.2g} % of the run" if wall_s > 0 else ""
    many = "1 incident" if len(incidents) == 1 else f"{len(incidents)} incidents"
    lines = [f"{steps} steps in {duration(wall_s)}, {many}, {duration(lost_s)} lost{share}"]
    totals: dict[str, float] = {}
    for incident in incidents:
        for name, spent_s in incident.phases_s().items():
            totals[name] = totals.get(name, 0.0) + spent_s
    if totals:
        lines.append("  where it went: " + ", ".join(f"{name} {duration(s)}" for name, s in totals.items() if s > 0))
    return lines


def duration(seconds: float) -> str:
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


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
    return [line for line in incident.stderr_tail if line.strip() and line.strip() not in told][-STDERR_LINES:]
