"""Which job is meant: by its run id, by its agent's pid, by a path, or by being the only one."""

from __future__ import annotations

import contextlib
import glob
import heapq
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from holdfast.agent import doorbell
from holdfast.observe import record
from holdfast.observe.screen import clean, many

WHO_S = 2.0  # so long an agent may take to say which job it is
ASKED = 32  # at the same time
TAIL = 9  # of a run directory's name: what makes it different from others of the same run id


class Found(msgspec.Struct, frozen=True):
    """A job that has a record."""

    run_id: str
    run_dir: Path
    record: Path
    pid: int | None = None  # of its agent, where that runs on this machine and answers


class NotFound(Exception):
    """Why, in one line. Where several could be meant, `choices` has a line for each."""

    def __init__(self, why: str, choices: Sequence[str] = ()) -> None:
        super().__init__(why)
        self.choices = tuple(choices)


def complain(command: str, failure: NotFound) -> int:
    """Tell the person, and return the exit code."""
    print(f"holdfast {command}: {failure}", *(f"  {choice}" for choice in failure.choices), sep="\n", file=sys.stderr)
    return 2


def find(job: str = "") -> Found:
    """Raises NotFound. Without a word it is the job that runs here, else the last one that ended and left a record in
    the place for temporary files: but not while an agent is there that does not say which job it runs."""
    here, silent = running()
    if meant := [each for each in here if job in ("", each.run_id, str(each.pid))]:
        return _only(meant)
    if job and os.path.exists(job):
        return _at(Path(job), here)
    for found in _temporary(_folders(here)) if job or not silent else ():
        if job in ("", found.run_id):
            return found
    if silent:
        raise NotFound(f"{silent[0]}; name the run directory instead")
    if job:
        raise NotFound(f"there is no job {clean(job)!r} on this machine, nor a file or folder; try: holdfast ls")
    raise NotFound("no job runs here, and none has left a record; name its run directory, in its --log-dir")


def jobs(folders: Iterable[str | os.PathLike[str]] = ()) -> Iterator[Found]:
    """Those that run here, then those that ended and left a record in the place for temporary files or in one of these
    log directories, the newest first. One that keeps no record is not among them: see `running`."""
    here, _ = running()
    by_id: dict[str, list[doorbell.Job]] = {}
    for each in here:
        if each.run_dir:
            by_id.setdefault(each.run_id, []).append(each)
    yield from (_only(same) for same in by_id.values())
    taken = _folders(here)
    given = {found.record.absolute(): found for folder in folders for found in _inside(Path(folder), taken)}
    others = (found for found in _temporary(taken) if found.record not in given)
    yield from heapq.merge(given.values(), others, key=lambda found: -_written_s(found.record))


def running() -> tuple[list[doorbell.Job], list[str]]:
    """What the agents on this machine say of their jobs, and why one of them does not. All are asked at once: the waits
    for those that are stopped, say, must not add up."""
    pids = doorbell.find()
    with ThreadPoolExecutor(max_workers=ASKED) as pool:
        answers = list(pool.map(_who, pids))
    jobs = [each for each in answers if isinstance(each, doorbell.Job)]
    silent = {pid: each for pid, each in zip(pids, answers, strict=True) if isinstance(each, str)}
    there = doorbell.find() if silent else []  # some may have ended meanwhile, and have nothing to say
    return jobs, [why for pid, why in silent.items() if pid in there]


def _who(pid: int) -> doorbell.Answer | str:
    try:
        return doorbell.ask(pid, doorbell.Who(), WHO_S)
    except doorbell.NoAnswer as failure:
        return str(failure)


def siblings(found: Found) -> list[Path]:
    """The run directories of the same job that can be seen from here: those of other nodes, and of earlier lives. The
    found one comes first."""
    prefix = glob.escape(found.run_dir.name[:-TAIL])
    beside = glob.glob(str(found.run_dir.parent.joinpath(f"{prefix}_{'?' * (TAIL - 1)}").absolute()))
    if _is_temporary(found.run_dir):
        beside += glob.glob(os.path.join(glob.escape(tempfile.gettempdir()), "holdfast_*", f"{prefix}_{'?' * 8}"))
    others = {Path(path) for path in beside} - {found.run_dir.absolute()}
    return [found.run_dir, *sorted(path for path in others if _is_ours(path))]


# -- one of several ---------------------------------------------------------------------------------------------------


def _only(jobs: Sequence[doorbell.Job]) -> Found:
    """Of several nodes on one machine, the one whose record has the others' lines, too: the longest."""
    if len({job.run_id for job in jobs}) > 1:
        raise NotFound("several jobs run here; say which by its run id or pid:", [line(job) for job in jobs])
    kept = [_running(job) for job in jobs if job.run_dir]
    if not kept:
        raise NotFound(f"job {clean(jobs[0].run_id)} keeps no record: it was started with --log-dir=/dev/null")
    return max(kept, key=_bytes)


def _running(job: doorbell.Job) -> Found:
    run_dir = Path(job.run_dir)
    if not run_dir.is_absolute():  # as the agent sees it
        with contextlib.suppress(OSError):
            run_dir = Path(os.readlink(f"/proc/{job.pid}/cwd")) / run_dir
    return Found(job.run_id, run_dir, run_dir / record.NAME, job.pid)


def _folders(jobs: Iterable[doorbell.Job]) -> set[Path]:
    return {_running(job).run_dir.absolute() for job in jobs if job.run_dir}


def line(job: doorbell.Job) -> str:
    """Which one it is, for who has to choose."""
    of = f"{clean(job.program)}, {many(job.nproc, 'rank')}, generation {job.generation}"
    return f"{clean(job.run_id)}  pid {job.pid}  {of}"


def _at(path: Path, here: Sequence[doorbell.Job]) -> Found:
    """A record, its run directory, or a log directory of one job."""
    agents = {_running(job).record.absolute(): job.pid for job in here if job.run_dir}
    file = path if path.is_file() else path / record.NAME
    if file.is_file():
        found = _read(file)
        return msgspec.structs.replace(found, pid=agents.get(file.absolute()))
    several = [
        msgspec.structs.replace(found, pid=agents.get(found.record.absolute())) for found in _inside(path, set())
    ]
    if not several:
        raise NotFound(f"{clean(str(path))} has no {record.NAME}, nor has a folder in it")
    if len({found.run_id for found in several}) > 1:
        lines = [clean(f"{found.run_dir}{f'  pid {found.pid}' if found.pid else ''}") for found in several]
        raise NotFound(f"several jobs are in {clean(str(path))}; say which by its folder:", lines)
    return max((found for found in several if found.pid is not None), key=_bytes, default=several[0])


# -- records on the disk ----------------------------------------------------------------------------------------------


def _temporary(taken: set[Path]) -> Iterator[Found]:
    """The newest first. Anybody can make a folder there, so only this user's are looked at."""
    paths = glob.glob(os.path.join(glob.escape(tempfile.gettempdir()), "holdfast_*", "*", record.NAME))
    return _records((path for path in map(Path, paths) if _is_ours(path.parent)), taken)


def _inside(folder: Path, taken: set[Path]) -> Iterator[Found]:
    return _records(map(Path, glob.glob(os.path.join(glob.escape(str(folder)), "*", record.NAME))), taken)


def _records(paths: Iterable[Path], taken: set[Path]) -> Iterator[Found]:
    for path in sorted(paths, key=_written_s, reverse=True):
        if path.parent.absolute() not in taken:
            with contextlib.suppress(NotFound):
                yield _read(path)


def _read(file: Path) -> Found:
    """Who it is, by its first line; by the name of its folder where that line is lost."""
    try:
        with file.open("rb") as opened:
            first = record.understood(opened.readline(record.MAX_LINE_BYTES))
    except OSError as failure:
        raise NotFound(f"cannot read {clean(str(file))}: {failure.strerror}") from None
    if first is not None and isinstance(first.what, record.JobStarted):
        return Found(first.what.run_id, file.parent, file)
    return Found(file.absolute().parent.name[:-TAIL], file.parent, file)


def _is_ours(folder: Path) -> bool:
    try:
        return folder.stat().st_uid == os.getuid()
    except OSError:
        return False


def _is_temporary(run_dir: Path) -> bool:
    root = run_dir.absolute().parent
    return root.name.startswith("holdfast_") and str(root.parent) == tempfile.gettempdir()


def _written_s(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def _bytes(found: Found) -> int:
    try:
        return found.record.stat().st_size
    except OSError:
        return 0
