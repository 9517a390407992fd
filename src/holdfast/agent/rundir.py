"""The run directory: logs, events and incidents of one run."""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import shutil
import stat
import tempfile
from pathlib import Path

KEPT = 10  # temporary ones of runs without an incident
MAY_GO = ".may-go"  # in the root of such a one. Another folder may be called as ours are: one that a user named, say


class RunDirectory:
    """`<log dir>/<run id>_<random>`; a temporary one where the user named none, and nothing at all for /dev/null."""

    def __init__(self, log_dir: str | None, run_id: str) -> None:
        """Raises OSError where it cannot be made or written."""
        self.path: str | None = None
        self._temporary_root: str | None = None
        self.siblings = ""  # a pattern for the run directories of the same job, this one included
        if log_dir == os.devnull:
            return
        roots = log_dir
        if log_dir is None:
            log_dir = self._temporary_root = tempfile.mkdtemp(prefix="holdfast_")
            roots = os.path.join(tempfile.gettempdir(), "holdfast_*")
        if os.path.isfile(log_dir):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), log_dir)
        os.makedirs(log_dir, exist_ok=True)
        safe = "".join(c if c.isalnum() or c in "-_." else "_" for c in run_id)
        self.path = tempfile.mkdtemp(prefix=f"{safe}_", dir=log_dir)
        where = roots if self._temporary_root is not None else glob.escape(log_dir)
        self.siblings = os.path.join(where or "", f"{glob.escape(safe)}_*")

    def join(self, *parts: str) -> str | None:
        return os.path.join(self.path, *parts) if self.path is not None else None

    def discard_if_temporary(self) -> None:
        """A run that the user gave no directory and that has nothing to report leaves nothing, unless it is a
        coordinator's ledger, which its next life will look for."""
        if self._temporary_root is not None and not self._has_ledger():
            with contextlib.suppress(OSError):
                shutil.rmtree(self._temporary_root)
            self.path = None

    def keep_for_now(self) -> None:
        """A run without an incident has ended, and its record may be asked for. A temporary one makes way for the next
        ones in the end, so that the place for temporary files does not fill up."""
        if self._temporary_root is not None and not self._has_ledger():
            with contextlib.suppress(OSError):
                Path(self._temporary_root, MAY_GO).touch()
                _make_room()

    def _has_ledger(self) -> bool:
        return os.path.exists(self.join("ledger") or "")


def _make_room() -> None:
    """Only folders that an agent of this user has marked at its end are removed: nobody writes there any more."""
    ended: list[tuple[float, Path]] = []
    for mark in Path(tempfile.gettempdir()).glob(f"holdfast_*/{MAY_GO}"):
        with contextlib.suppress(OSError):
            marked, root = mark.lstat(), mark.parent.lstat()
            if stat.S_ISDIR(root.st_mode) and marked.st_uid == root.st_uid == os.geteuid():
                ended.append((marked.st_mtime, mark.parent))
    for _, folder in sorted(ended, reverse=True)[KEPT:]:
        shutil.rmtree(folder, ignore_errors=True)  # of another's as well, that makes room at the same time
