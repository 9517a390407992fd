"""The final weights of a run, as one digest: the newest checkpoint's model and optimizer, bit for bit."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

READ_S = 300.0


def digests(*folders: Path) -> list[str]:
    """Of each folder of checkpoints; '' where there is none. Raises ValueError for one that cannot be read.

    In a process of its own, since it needs torch and all of the weights.
    """
    command = [sys.executable, "-m", "holdfast.chaos.weights", *map(str, folders)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=READ_S)
    except subprocess.TimeoutExpired:
        raise ValueError(f"the weights cannot be read: not done after {READ_S:g} s") from None
    if done.returncode != 0:
        raise ValueError(f"the weights cannot be read: {(done.stderr.strip().splitlines() or ['no word why'])[-1]}")
    return done.stdout.split("\n")[: len(folders)]


def _of(checkpoints: str) -> str:
    from holdfast.checkpoint import catalogue, export
    from holdfast.checkpoint.storage import open_storage

    if not os.path.isdir(checkpoints):
        return ""
    storage = open_storage(checkpoints)
    there = [found for found in catalogue.find(storage).found if not found.superseded]
    if not there:
        return ""
    newest = max(there, key=lambda found: found.step or 0)
    content = export._content(storage, newest)
    hashed = hashlib.sha256()
    for key in ("model_state_dict", "optimizer_state_dict"):
        _add(hashed, key, content.get(key))
    return f"step {newest.step} {hashed.hexdigest()[:32]}"


def _add(hashed: Any, path: str, value: Any) -> None:
    if hasattr(value, "detach"):
        plain = value.detach().cpu().contiguous()
        hashed.update(f"{path} {plain.dtype} {tuple(plain.shape)}\n".encode())
        hashed.update(ctypes.string_at(plain.data_ptr(), plain.numel() * plain.element_size()))
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            _add(hashed, f"{path}.{key}", value[key])
    elif isinstance(value, list | tuple):
        for at, each in enumerate(value):
            _add(hashed, f"{path}.{at}", each)
    else:
        hashed.update(f"{path} {value!r}\n".encode())


if __name__ == "__main__":
    for folder in sys.argv[1:]:
        print(_of(folder))
