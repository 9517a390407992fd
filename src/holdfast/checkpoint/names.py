"""Names inside a checkpoint directory: which are allowed, and those of what is only there for a moment."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets

from holdfast import linux
from holdfast.checkpoint.storage import StorageError

MAX_PART_BYTES = 255  # of Linux. Object stores allow 1024 for the whole key
TEMPORARY = ".tmp"
TRASH = ".trash"

_PASSING = re.compile(
    r"\.(?:tmp|trash)\.(?P<machine>[0-9a-f]{12})\.(?P<pid>\d+)\.(?P<start>\d+)\.[0-9a-f]{16}", re.ASCII
)


def is_allowed(part: str) -> bool:
    """One part of a name. Also none that a person, a shell or another system would read as something else."""
    if part in ("", ".", "..") or "/" in part or "\\" in part or not part.isprintable():
        return False
    try:
        return len(part.encode()) <= MAX_PART_BYTES
    except UnicodeEncodeError:
        return False


def split(name: str) -> list[str]:
    """The parts of a name, refused if it could lead anywhere else. A `/` at its end is a folder's."""
    parts = name.removesuffix("/").split("/")
    if not all(map(is_allowed, parts)):
        raise StorageError(f"{name!r} is not a name inside a checkpoint directory")
    return parts


def damaged(part: str, attempt: int) -> str:
    """What a damaged file or folder is renamed to; further attempts where that is in use."""
    name = f"damaged_{part}" if attempt == 0 else f"damaged_{part}.{attempt + 1}"
    if len(name.encode()) > MAX_PART_BYTES:
        name = f"damaged_{hashlib.sha256(part.encode()).hexdigest()}.{attempt + 1}"
    return name


# -- what is there for a moment ---------------------------------------------------------------------------------------


def passing(kind: str) -> str:
    """A name that nobody else has, and that says whose it is: `.tmp.<machine>.<pid>.<start>.<random>`."""
    return f"{kind}.{_machine()}.{os.getpid()}.{_start(os.getpid())}.{secrets.token_hex(8)}"


def is_passing(part: str) -> bool:
    return _PASSING.fullmatch(part) is not None


def is_abandoned(part: str, age_s: float, old_s: float) -> bool:
    """Whether nobody will touch it any more: whoever made it is gone, or on another machine and it is old."""
    found = _PASSING.fullmatch(part)
    if found is None:
        return False
    if part.startswith(TRASH + "."):
        return True  # nothing in there is wanted, and two may empty it at once
    if found["machine"] != _machine():
        return age_s > old_s
    return found["start"] != _start(int(found["pid"]))


def _machine() -> str:
    """Where a process id means the same process: this boot of this machine, and this namespace of ids. A host's name
    would not do: containers share it, or have it again after a restart."""
    identity = ""
    with contextlib.suppress(OSError):
        identity = linux.read("/proc/sys/kernel/random/boot_id").strip() + os.readlink("/proc/self/ns/pid")
    return hashlib.sha256(identity.encode()).hexdigest()[:12]


def _start(pid: int) -> str:
    """When a process was started, in ticks since boot; "" if it is gone, also if nobody has taken note of it yet."""
    try:
        fields = linux.read(f"/proc/{pid}/stat").rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    except (OSError, IndexError):
        return ""
