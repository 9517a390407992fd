"""What can go wrong with a checkpoint."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """What happened, where, and what to do next."""


class Damaged(CheckpointError):
    """A checkpoint is not what was written."""


class Fenced(CheckpointError):
    """A later world writes here now; this one must not."""
