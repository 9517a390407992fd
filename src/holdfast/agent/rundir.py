"""The run directory: logs, events and incidents of one run."""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import shutil
import tempfile


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
        """A run that the user gave no directory and that had no incident leaves nothing, unless it is a coordinator's
        ledger, which its next life will look for."""
        if self._temporary_root is not None and not os.path.exists(self.join("ledger") or ""):
            with contextlib.suppress(OSError):
                shutil.rmtree(self._temporary_root)
            self.path = None
