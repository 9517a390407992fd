"""Where workflows are kept on this machine: a folder each, and at most one runner in it."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from pathlib import Path

import msgspec

from holdfast.workflow.record import Record, load

LOOKS_S = 0.2  # who only looks whether there is a runner has the lock for a moment
HOME = "HOLDFAST_WORKFLOWS"  # in the environment: a folder for them, not the user's own


class NotThere(Exception):
    """No such workflow. One line."""


class Taken(Exception):
    """Another runner has it. One line."""


def root() -> Path:
    given = os.environ.get(HOME)
    return Path(given) if given else Path.home() / ".local" / "state" / "holdfast" / "workflows"


def make(name: str) -> Path:
    """A folder that nobody has; its name is the workflow's id."""
    root().mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        try:
            (made := root() / f"{name}-{number}").mkdir()
        except FileExistsError:
            number += 1
        else:
            (made / "made").touch()
            return made


def find(identity: str) -> Path:
    """By its id; without one, the last that was submitted."""
    folders = [folder for folder in there() if not identity or folder.name == identity]
    if not folders:
        known = ", ".join(folder.name for folder in there()[-5:])
        what = f"no workflow {identity!r}" if identity else "no workflow"
        raise NotThere(f"there is {what} in {root()}" + (f"; the last are {known}" if known else ""))
    return folders[-1]


def there() -> list[Path]:
    """All, in the order in which they were submitted."""
    if not root().is_dir():
        return []
    found = [folder for folder in root().iterdir() if (folder / "standing.json").is_file()]
    return sorted(found, key=_made_ns)


def _made_ns(folder: Path) -> int:
    try:
        return (folder / "made").stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def read(folder: Path) -> Record:
    try:
        return load(folder)
    except (OSError, msgspec.MsgspecError) as failure:
        raise NotThere(f"{folder} cannot be read: {failure}") from None


def _take(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class Lock:
    """Held by the one runner of a workflow as long as it lives."""

    def __init__(self, folder: Path) -> None:
        self._fd = os.open(folder / "runner", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        end_s = time.monotonic() + LOOKS_S
        while not _take(self._fd):
            if time.monotonic() > end_s:
                os.close(self._fd)
                raise Taken(f"{folder.name} has a runner, process {runner(folder)}") from None
            time.sleep(0.005)
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)

    def release(self) -> None:
        os.close(self._fd)


def runner(folder: Path) -> int | None:
    """The process that runs it, if one does, on this machine or, where all see the folder, on another one."""
    said = _held(folder).split()
    return int(said[0]) if said else None


def elsewhere(folder: Path) -> str:
    """The other machine on which its runner is, or ''."""
    host = _held(folder).partition(" ")[2].strip()
    return host if host != socket.gethostname() else ""


def _held(folder: Path) -> str:
    """What the one who holds the lock has written."""
    try:
        with open(folder / "runner") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return file.read()
    except OSError:
        pass
    return ""
