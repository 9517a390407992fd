"""Whether all nodes see the same directory: one writes a token there, and the others look for it."""

from __future__ import annotations

import contextlib
import os
import socket
import uuid

import msgspec

from holdfast.checkpoint.errors import CheckpointError
from holdfast.checkpoint.storage import Storage
from holdfast.checkpoint.together import Together


def check(storage: Storage, together: Together) -> None:
    """Raises CheckpointError on all ranks if any does not see what rank 0 has written."""
    if together.size == 1:
        return
    name = ""
    said: tuple[str, str] = ("", "")  # the token, or what is wrong with writing it
    if together.rank == 0:
        name = f".holdfast/seen/{uuid.uuid4().hex}"
        try:
            storage.create(name, socket.gethostname().encode())
            said = (name, "")
        except CheckpointError as failure:
            said = ("", str(failure))
    name, wrong = msgspec.json.decode(together.tell(msgspec.json.encode(said)), type=tuple[str, str])
    if wrong:
        raise CheckpointError(wrong)
    blind = "" if _sees(storage, name) else f"{socket.gethostname()} (rank {together.rank})"

    def decide(answers: list[bytes]) -> bytes:
        return b", ".join(sorted({answer for answer in answers if answer}))

    blind = together.agree(blind.encode(), decide).decode()
    if together.rank == 0:
        with contextlib.suppress(CheckpointError, FileNotFoundError):
            storage.delete(name)
    if blind:
        raise CheckpointError(
            f"{storage.url} is not the same directory everywhere: what rank 0 writes on {_host(together)} is not seen "
            f"on {blind}. A rank that starts on another node would not find its checkpoints. Set CHECKPOINT_DIR to a "
            "path on a shared filesystem (NFS, Lustre, EFS), or to an object store (s3://bucket/path), or give "
            "Checkpointer(shared=False) for checkpoints on each node that are restored only where they are"
        )


def _sees(storage: Storage, name: str) -> bool:
    try:
        storage.size(name)
    except FileNotFoundError:
        return False
    return True


def _host(together: Together) -> str:
    return socket.gethostname() if together.rank == 0 else os.environ.get("MASTER_ADDR", "its node")
