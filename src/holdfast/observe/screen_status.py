"""`holdfast status` in words, on one screen, and for programs."""

from __future__ import annotations

import shlex
from typing import Any

import msgspec

from holdfast.control.incidents import Incident
from holdfast.control.stragglers import SECTION
from holdfast.observe.explain import duration
from holdfast.observe.record import IncidentNoted
from holdfast.observe.screen import age, ago, clean, cut, many, ranks, size
from holdfast.observe.screen_job import FAILED, LOST, RECOVERING, STARTING, STOPPED, TRAINING, Watched

INCIDENTS = 4  # the last ones; `holdfast report` has all
LABEL = 12
STALLED_S, STALLED_STEPS = 30.0, 5  # a record hears of steps every ten seconds; of slow ones less often


def lines(job: Watched, columns: int = 0) -> list[str]:
    """`columns`: what a line may take; 0 any length."""
    facts = [
        ("step", step(job)),
        ("world", world(job)),
        ("standby", standby(job)),
        ("restarts", restarts(job)),
        ("lost", lost(job)),
        ("checkpoint", checkpoint(job)),
        ("stragglers", stragglers(job)),
        ("said", job.state.said[-1] if job.state.said and job.word in (STARTING, RECOVERING) else ""),
    ]
    found = [headline(job), *(f"  {label:{LABEL}}{clean(text)}" for label, text in facts if text)]
    found += _incidents(job)
    found += ["", *(f"  {command}" for command in commands(job))]
    return [cut(line, columns) if columns else line for line in found]


def as_json(job: Watched) -> dict[str, Any]:
    """The folded record, and what follows from it. Names are kept stable."""
    folded: dict[str, Any] = msgspec.to_builtins(job.state)
    folded = {name: value for name, value in folded.items() if not name.startswith("_")}
    stands = job.word
    return {
        **folded,
        "run_id": job.run_id,
        "standing": stands,
        "is_training": stands == TRAINING,
        "exit_code": job.exit_code,
        "run_dir": str(job.found.run_dir),
        "record": str(job.found.record),
        "pid": job.pid,
        "answers": job.pid is not None and not job.is_silent,
        "wall_s": job.now_s,
        "lost_s": job.lost_s,
        "stalled_s": job.stalled_s,
        "left_s": job.left_s,
        "restarts": job.state.restarts,
        "generation": job.state.world.generation if job.state.world is not None else None,
        "stragglers": job.state.stragglers,
        "spares": job.spares,
        "standbys": msgspec.to_builtins(job.state.standing_by),
        "checkpoint_age_s": job.checkpoint_age_s,
    }


# -- each fact in words -----------------------------------------------------------------------------------------------


def headline(job: Watched) -> str:
    what = clean(f"{job.state.program or 'a program'}, job {job.run_id}")
    text = f"{what}: {standing(job)}"
    if job.is_silent:
        text += "; its agent does not answer, so this is what its record says"
    return text


def standing(job: Watched) -> str:
    """In a few words, with the reason where it does not train."""
    word, ended = job.word, job.state.ended
    if ended is not None:
        why = f": {ended.reason}" if word in (FAILED, STOPPED) and ended.reason else ""
        kind = f" ({ended.outcome})" if word == FAILED else ""
        return clean(f"{word}{kind} {ago(job.since_end_s)}, after {age(ended.wall_s)}{why}")
    if word == LOST:
        return f"lost: its agent has ended without a word; its record ends {ago(job.since_end_s)}"
    if word == RECOVERING and (incident := job.open_incident) is not None:
        return clean(f"recovering for {duration(max(0.0, job.now_s - job.at_s(incident)))}: {incident.what}")
    if word == STARTING and job.state.world is not None:
        return f"starting for {age(job.now_s - job.state.world.launched_s)}, no step seen yet"
    if word == TRAINING and job.state.world is not None and job.state.world.stepped_s is not None:
        slow = job.stalled_s > max(STALLED_S, STALLED_STEPS * job.state.step_s)
        stalled = f", but no step was seen for {age(job.stalled_s)}" if slow else ""
        return f"training for {age(job.now_s - job.state.world.stepped_s)}{stalled}"
    return word


def step(job: Watched) -> str:
    state = job.state
    if not state.step:
        return ""
    whole = f" of {state.step + state.steps_left:,}" if state.steps_left is not None else ""
    words = [f"{state.step:,}{whole}"]
    if state.step_s:
        words.append(f"{duration(state.step_s)} each")
    if state.samples_per_s:
        words.append(f"{state.samples_per_s:,.4g} samples/s")
    if state.loss is not None:
        words.append(f"loss {state.loss:.4g}")
    if state.epoch:
        words.append(f"epoch {state.epoch}")
    if job.left_s is not None:
        words.append(f"about {age(job.left_s)} left")
    return ", ".join(words)


def world(job: Watched) -> str:
    now = job.state.world
    if now is None:
        return ""
    on = f" on {many(len(now.nodes), 'node')}" if len(job.state.nodes) > 1 else ""
    spares = f"; {many(len(job.spares), 'spare node')}" if job.spares else ""
    doing: dict[str, int] = {}
    for rank in job.state.ranks.values():
        doing[rank.state] = doing.get(rank.state, 0) + 1
    states = ", ".join(f"{count} {name}" for name, count in sorted(doing.items(), key=lambda each: -each[1]))
    return f"generation {now.generation}, {many(now.size, 'rank')}{on}{f': {states}' if states else ''}{spares}"


def standby(job: Watched) -> str:
    waiting, (host, gpu) = len(job.state.standing_by), job.state.standby_bytes
    if not waiting:
        return ""
    on_gpus = f", {size(gpu)} on GPUs" if gpu else ""
    return f"{waiting:,} {'process' if waiting == 1 else 'processes'}, {size(host)} of memory{on_gpus}"


def restarts(job: Watched) -> str:
    state = job.state
    return f"{state.restarts} of {state.max_restarts}" if state.restarts or state.max_restarts else ""


def lost(job: Watched) -> str:
    count = len(job.state.incidents)
    if not count:
        return "nothing, no incident" if job.state.world is not None else ""
    wall_s = job.state.ended.wall_s if job.state.ended is not None else job.now_s
    share = f", {100 * job.lost_s / wall_s:.2g} % of the time" if wall_s > 0 else ""
    return f"{duration(job.lost_s)} in {many(count, 'incident')}{share}"


def checkpoint(job: Watched) -> str:
    saved, failures = job.state.checkpoint, job.state.checkpoint_failures
    failed = f"{many(failures, 'save')} failed" if failures else ""
    if saved is None or job.checkpoint_age_s is None:
        return failed
    when = ago(job.checkpoint_age_s + (job.since_end_s if job.is_over else 0.0))
    much = f", {size(saved.bytes)} of a rank in {duration(saved.seconds)}" if saved.bytes else ""
    return f"step {saved.step:,}, {when}{much}{f'; {failed}' if failed else ''}"


def stragglers(job: Watched) -> str:
    slow = job.state.stragglers
    if not slow:
        return ""
    worst = max((job.state.ranks[rank] for rank in slow), key=lambda rank: rank.own_s)
    on = f" on {job.short(worst.node)}" if len(job.state.nodes) > 1 else ""
    in_sections = worst.slow_by == SECTION
    own_s, where = (worst.section_s, "in its sections") if in_sections else (worst.own_s, "for itself")
    usual_s = job.usual_s(lambda rank: rank.section_s if in_sections else rank.own_s)
    usual = f", where most take {duration(usual_s)}" if usual_s else ""
    return f"{ranks(slow)}; rank {worst.rank}{on} takes {duration(own_s)} a step {where}{usual}"


# -- incidents --------------------------------------------------------------------------------------------------------


def _incidents(job: Watched) -> list[str]:
    all_ = job.state.incidents
    if not all_:
        return []
    title = "incidents:" if len(all_) <= INCIDENTS else f"the last {INCIDENTS} of {len(all_):,} incidents:"
    found = ["", title]
    for number in sorted(all_)[-INCIDENTS:]:
        what, answer = incident(job, all_[number])
        found += [f"  {what}", f"      {answer}"]
    return found


def incident(job: Watched, of: Incident) -> tuple[str, str]:
    """What happened, when and by whom; and what was done about it, at what cost."""
    when = ago(job.now_s - job.at_s(of) + (job.since_end_s if job.is_over else 0.0))
    clock = f", {of.failed_at[11:19]}Z" if isinstance(of, IncidentNoted) and len(of.failed_at) > 19 else ""
    at = f" at step {of.steps:,}" if of.steps else ""
    what = f"{of.number}. {when}{clock}, generation {of.generation}, {of.kind.value}: {of.what}{at}"
    then = [follower.rank for follower in of.followers if follower.rank is not None]
    words = [of.action, f"took {ranks(then, 4)} with it" if then else "", _cost(job, of)]
    return clean(what), clean("; ".join(filter(None, words)))


def _cost(job: Watched, of: Incident) -> str:
    if of.failed_again_at_s:
        return f"failed again after {duration(of.lost_s)}"
    if of.recovered_at_s:
        return f"back after {duration(of.lost_s)}"
    if of is job.open_incident:
        return f"{duration(max(0.0, job.now_s - job.at_s(of)))} lost so far"
    return f"{duration(of.lost_s)} lost" if of.lost_s else ""


# -- what helps next --------------------------------------------------------------------------------------------------


def commands(job: Watched) -> list[str]:
    """The few that do."""
    name = shlex.quote(clean(job.run_id if job.pid is not None else str(job.found.run_dir)))
    rows: list[tuple[str, str]] = []
    if not job.is_over:
        rows.append((f"holdfast top {name}", "watch it"))
        if job.pid is not None:
            rows.append((f"holdfast stacks {name}", "what its ranks are doing now"))
    blamed = job.state.incidents[max(job.state.incidents)] if job.state.incidents else None
    if keeps_logs(job):
        if blamed is not None and blamed.rank is not None and job.word != TRAINING:
            rank = f"--rank {blamed.rank} --generation {blamed.generation}"
            rows.append((f"holdfast logs {name} {rank}", "what the rank to blame has printed"))
        else:
            rows.append((f"holdfast logs {name}{'' if job.is_over else ' -f'}", "what its ranks print"))
    if blamed is not None:
        file = job.found.run_dir / "incidents" / f"{blamed.number:04}.json"
        if file.exists():
            rows.append((f"cat {shlex.quote(clean(str(file)))}", "all about the last incident"))
    rows.append((f"holdfast report {name}", "where the time went"))
    wide = max(len(command) for command, _ in rows)
    return [f"{command:{min(wide, 60)}}  {why}" for command, why in rows]


def keeps_logs(job: Watched) -> bool:
    """Of the newest world."""
    world = job.state.world
    return world is not None and any(job.found.run_dir.glob(f"attempt_{world.generation}/*/std*.log"))
