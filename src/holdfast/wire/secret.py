"""Where the secret that a job's nodes share comes from: a named file, the environment, or a file made on first use.

The default file needs no set-up where the home directory is shared, and one `scp` where it is not.
"""

from __future__ import annotations

import hmac
import os
import secrets
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec

VARIABLE = "HOLDFAST_SECRET"
MIN_CHARACTERS = 16
_MAX_BYTES = 64 * 1024  # a wrong path may lead to a checkpoint, or to a device that never ends


class SecretError(Exception):
    """There is no secret to use. One line: what is wrong, where, and what to do next."""


class Secret(msgspec.Struct, frozen=True):
    """A key, and for messages the place it came from. An empty key stands for `--insecure`."""

    key: bytes
    source: str

    @property
    def insecure(self) -> bool:
        return not self.key

    def __repr__(self) -> str:
        return f"Secret(from {self.source})"  # the key stays out of logs and tracebacks


INSECURE = Secret(b"", "--insecure")


def load(file: str | os.PathLike[str] | None = None, environ: Mapping[str, str] | None = None) -> Secret:
    """The secret of the named file, else of the environment, else of the default file, which is made if need be."""
    environ = os.environ if environ is None else environ
    if file is not None:
        path = Path(file)
        try:
            return _read(path)
        except FileNotFoundError:
            raise SecretError(f"the secret file {path} is not there; copy it from the coordinator's node") from None
    if VARIABLE in environ:
        # Set but empty is a mistake in a job script. To go on with another secret would hide it.
        return _derive(os.fsencode(environ[VARIABLE]), f"the variable {VARIABLE}")
    path = default_file(environ)
    try:
        return _read(path)
    except FileNotFoundError:
        _make(path)
    try:
        return _read(path)
    except FileNotFoundError:
        raise SecretError(f"the secret file {path} was removed as soon as it was made; start again") from None


def default_file(environ: Mapping[str, str]) -> Path:
    config = environ.get("XDG_CONFIG_HOME", "")
    if os.path.isabs(config):  # the XDG specification has a relative path ignored
        return Path(config, "holdfast", "secret")
    if home := environ.get("HOME", ""):
        return Path(home, ".config", "holdfast", "secret")
    raise SecretError(f"there is no HOME to keep the job's secret in; set {VARIABLE} or give --secret-file")


def _read(path: Path) -> Secret:
    """Raises FileNotFoundError, because what a missing file means is the caller's to say."""
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode  # of the file that is read, not of one that took its name since
            content = file.read(_MAX_BYTES)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise SecretError(
            f"the secret file {path} cannot be read ({error.strerror}); make it readable, or give another --secret-file"
        ) from error
    if mode & 0o077:
        raise SecretError(f"the secret file {path} is open to other users (mode {mode & 0o777:o}); chmod 600 {path}")
    return _derive(content, f"the file {path}")


def _derive(content: bytes, source: str) -> Secret:
    """A final newline more or less, as editors and `echo` have it, makes no other secret."""
    content = content.strip()
    if len(content) < MIN_CHARACTERS:
        size = f"has {len(content)} characters" if content else "is empty"
        raise SecretError(
            f"the secret in {source} {size} and needs {MIN_CHARACTERS}; `openssl rand -hex 32` prints a good one"
        )
    return Secret(hmac.digest(b"holdfast secret 1", content, "sha256"), source)


def _make(path: Path) -> None:
    """Put 32 random bytes there, unless another process did so first.

    Nodes with one home directory all come here at once. A link, unlike a rename, leaves an earlier file alone, and what
    it names is whole already; this holds over NFS as well.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd, draft = tempfile.mkstemp(prefix=".secret-", dir=path.parent)
        try:
            with open(fd, "wb") as file:
                os.fchmod(fd, 0o600)  # mkstemp's mode, whatever the umask took from it
                file.write(secrets.token_hex(32).encode() + b"\n")
                file.flush()
                os.fsync(fd)
            os.link(draft, path)
        finally:
            os.unlink(draft)
    except OSError as error:
        if isinstance(error, FileExistsError) and path.is_file():
            return
        raise SecretError(
            f"the job's secret cannot be kept in {path} ({error.strerror}); set {VARIABLE} or give --secret-file"
        ) from error
