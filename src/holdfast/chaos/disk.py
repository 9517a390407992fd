"""Faults of the disk on which checkpoints are: a bit, a half of a file, all of its room."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from pathlib import Path

import msgspec

_CLONE_NEWNS = 0x00020000
FILLER = "chaos-fills-this-disk"
PIECE_BYTES = 1 << 20


class NotHere(Exception):
    """It cannot be done to this job now; the text says why."""


class Damage(msgspec.Struct, frozen=True):
    name: str  # of the checkpoint
    step: int
    file: str
    text: str


def damage(checkpoints: Path, kind: str, chance: float) -> Damage:
    """To the newest checkpoint, when there is one before it to go back to. Raises NotHere and OSError."""
    from holdfast.checkpoint import catalogue
    from holdfast.checkpoint.errors import CheckpointError
    from holdfast.checkpoint.storage import open_storage

    try:
        there = [found for found in catalogue.find(open_storage(str(checkpoints))).found if not found.superseded]
    except CheckpointError as why:
        raise NotHere(str(why)) from None
    there.sort(key=lambda found: found.step or 0, reverse=True)
    if len(there) < 2:
        raise NotHere(f"there are {len(there)} checkpoints in {checkpoints}, and 2 are needed")
    newest = there[0]
    path = checkpoints / newest.name
    size, file = max(((part.stat().st_size, part) for part in _parts(path)), default=(0, path))
    if not size:
        raise NotHere(f"there is nothing in {path} to damage")
    if kind == "torn-file":
        os.truncate(file, size // 2)
        text = f"cut from {size} to {size // 2} bytes"
    else:
        at, bit = int(chance * size), 1 << int(chance * 8e6) % 8
        with open(file, "r+b") as bytes_:
            bytes_.seek(at)
            [byte] = bytes_.read(1)
            bytes_.seek(at)
            bytes_.write(bytes([byte ^ bit]))
        text = f"bit {bit.bit_length() - 1} of byte {at}"
    return Damage(newest.name, newest.step or 0, str(file.relative_to(checkpoints)), text)


def _parts(path: Path) -> list[Path]:
    return list(path.glob("*.bin")) if path.is_dir() else [path]


def fill(checkpoints: Path) -> str:
    """Only on the small disk that the campaign has made: nobody else's is filled."""
    if not os.path.ismount(checkpoints):
        raise NotHere(f"{checkpoints} is not on a disk of its own")
    written = 0
    with open(checkpoints / FILLER, "wb", buffering=0) as file, contextlib.suppress(OSError):
        for piece in (bytes(PIECE_BYTES), bytes(4096)):
            with contextlib.suppress(OSError):
                while True:
                    written += file.write(piece)
    return f"{written} bytes written, and no room for more"


def free(checkpoints: Path) -> None:
    (checkpoints / FILLER).unlink(missing_ok=True)


def own_disk(checkpoints: Path, size_mb: int) -> None:
    """A small disk for checkpoints, in memory, that this process and its children alone see. Raises NotHere."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS) != 0:
        raise NotHere(f"a mount namespace of its own: {os.strerror(ctypes.get_errno())}; full-disk needs root")
    for command in (
        ["mount", "--make-rprivate", "/"],
        ["mount", "-t", "tmpfs", "-o", f"size={size_mb}m", "chaos", str(checkpoints)],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise NotHere(f"{' '.join(command)}: {done.stderr.strip()}; full-disk needs root")
