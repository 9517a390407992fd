"""Torchrun's error file, on the launcher's side: the first cause's file becomes our own, for whoever started us."""

from __future__ import annotations

import contextlib
import json
import os


def forward(rank_file: str, status: int | None) -> None:
    """Copy the failed rank's file to `$TORCHELASTIC_ERROR_FILE`, with the exit code that the rank could not know."""
    own = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not own or not rank_file:
        return
    with contextlib.suppress(OSError, ValueError):
        with open(rank_file) as file:
            told = json.load(file)
        if status and isinstance(told.get("message"), dict):
            told["message"]["errorCode"] = status
        with open(own, "w") as file:
            json.dump(told, file)
