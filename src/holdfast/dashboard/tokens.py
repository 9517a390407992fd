"""Who may look at the page, and who may act through it. Every token is compared in constant time."""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import os
import secrets
import stat
from email.message import Message
from http.cookies import CookieError, SimpleCookie
from urllib.parse import urlsplit

NAME = "control-token"  # in the run directory
LEAST_CHARS = 16
MAX_CHARS = 512
CONTROL_HEADER = "X-Holdfast-Control"


class Unusable(Exception):
    """A file with a token that must not be believed."""


def made() -> str:
    return secrets.token_urlsafe(32)


def read(path: str) -> str:
    """A token from a file of this user that others cannot read. Raises OSError and Unusable."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(fd, "rb") as file:
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode):
            raise Unusable(f"{path} is not a plain file")
        if about.st_mode & 0o077 or about.st_uid not in (os.getuid(), 0):
            raise Unusable(f"{path} is another user's, or others may read it; chmod 600 {path}")
        token = file.read(MAX_CHARS + 1).decode(errors="replace").strip()
    if not LEAST_CHARS <= len(token) <= MAX_CHARS or not token.isascii() or not token.isprintable():
        raise Unusable(f"{path} has no token: it takes {LEAST_CHARS} to {MAX_CHARS} plain characters")
    return token


def kept(run_dir: str) -> str:
    """The job's control token, the same for all pages of a job. It is made with the first page, for this user alone; in
    a folder that cannot be written, it is this page's own."""
    path = os.path.join(run_dir, NAME)
    with contextlib.suppress(OSError, Unusable):
        return read(path)
    token, part = made(), f"{path}.{os.getpid()}"
    with contextlib.suppress(OSError):
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(fd, "w") as file:
            file.write(token + "\n")
        os.replace(part, path)
    return token


def is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    return False


class Access:
    """What one page asks of those who come. `reading` is None where everybody may read, which is on loopback alone."""

    def __init__(self, reading: str | None, control: str, port: int) -> None:
        self.reading = reading
        self._control = control
        # Cookies belong to a host and not to a port: two pages on one machine must not undo each other's.
        self._cookie = f"holdfast_{port}"

    def may_read(self, headers: Message, given: str = "") -> bool:
        """`given`: in the address, as it was printed."""
        if self.reading is None:
            return True
        offered = [given, self._from_cookie(headers.get("Cookie", ""))]
        scheme, _, bearer = headers.get("Authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            offered.append(bearer.strip())
        return any(_same(one, self.reading) for one in offered)

    def may_act(self, headers: Message) -> bool:
        return _same(headers.get(CONTROL_HEADER, ""), self._control)

    def is_for_us(self, headers: Message) -> bool:
        """Without a token, a name that somebody points at 127.0.0.1 would let their page read ours."""
        host = _host(headers.get("Host", ""))
        return self.reading is not None or host == "localhost" or is_loopback(host)

    def is_from_us(self, headers: Message) -> bool:
        """What acts must not come from another site's page. Programs that are no browsers name no origin."""
        origin = headers.get("Origin")
        if headers.get("Sec-Fetch-Site", "same-origin") not in ("same-origin", "none"):
            return False
        return origin is None or origin.partition("://")[2] == headers.get("Host", "")

    def cookie(self) -> str:
        return f"{self._cookie}={self.reading}; Path=/; HttpOnly; SameSite=Strict"

    def _from_cookie(self, header: str) -> str:
        with contextlib.suppress(CookieError):
            if (found := SimpleCookie(header).get(self._cookie)) is not None:
                return found.value
        return ""


def _same(offered: str, token: str) -> bool:
    return hmac.compare_digest(offered.encode(errors="replace"), token.encode())


def _host(header: str) -> str:
    """Without the port, which a tunnel may change."""
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return ""
