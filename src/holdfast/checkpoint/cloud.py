"""An object store, connected: which one a url means, how long it is waited for, and what its errors say in one line."""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
import urllib.parse
from typing import TYPE_CHECKING, Any

from holdfast.checkpoint import names
from holdfast.checkpoint.errors import CheckpointError
from holdfast.checkpoint.storage import StorageError

if TYPE_CHECKING:
    from obstore.store import ObjectStore

SCHEMES = ("s3", "gs", "az")

BACKOFF_S = 0.1  # before the first retry; twice that before the next
_RETRIES = 4
_RETRYING_S = 60.0  # no further try is begun after this
_CONNECTING_S = 5.0
_REQUEST_S = 120.0  # 32 MiB, eight at once, over a line of 20 Mbit/s

_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT")
_STATUS = re.compile(r"status code: (\d{3}(?: [A-Z][A-Za-z-]*)*)")
_CODE = re.compile(r"<Code>(\w{1,64})</Code>")
_FULL = re.compile(r"status code: 507|StorageFull|QuotaExceeded|InsufficientCapacity")
_UNSUPPORTED = re.compile(r"status code: (?:501|405)|NotImplemented")


def connect(url: str) -> ObjectStore:
    """Credentials and the like come from the environment, as each provider's own tools have it."""
    _check(url)
    try:
        from obstore.store import from_url
    except ImportError:
        raise CheckpointError(f"{url} needs obstore: pip install 'holdfast[cloud]'") from None
    settings: dict[str, Any] = {
        "client_options": {
            "connect_timeout": datetime.timedelta(seconds=_CONNECTING_S),
            "timeout": datetime.timedelta(seconds=_REQUEST_S),
        },
        "retry_config": {
            "max_retries": _RETRIES,
            "retry_timeout": datetime.timedelta(seconds=_RETRYING_S),
            "backoff": {
                "init_backoff": datetime.timedelta(seconds=BACKOFF_S),
                "max_backoff": datetime.timedelta(seconds=5),
                "base": 2,
            },
        },
    }
    if any(_is_on_loopback(os.environ[name]) for name in _ENDPOINTS if name in os.environ):
        settings["client_options"]["allow_http"] = True  # what stays on this machine needs no encryption
    if url.startswith("s3://") and "AWS_COPY_IF_NOT_EXISTS" not in os.environ:
        settings["copy_if_not_exists"] = "multipart"
    try:
        return from_url(url, **settings)
    except Exception as failure:
        raise CheckpointError(f"{url}: {explain(failure)}") from failure


def _check(url: str) -> None:
    scheme, _, rest = url.partition("://")
    if "@" in rest or "?" in rest or "#" in rest:
        # Not repeated here: what stands there may be a secret.
        raise CheckpointError(f"a url of {scheme}:// is only a bucket and a path; credentials go into the environment")
    if scheme not in SCHEMES:
        raise CheckpointError(f"{url}: a checkpoint directory is a path, or a url of s3://, gs:// or az://")
    bucket, _, path = rest.partition("/")
    try:
        names.split(bucket)
        if path:
            names.split(path)
    except StorageError:
        raise CheckpointError(f"{url}: not a url of a bucket and a path in it, as {scheme}://bucket/path") from None


def _is_on_loopback(endpoint: str) -> bool:
    host = urllib.parse.urlsplit(endpoint).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


# -- errors -----------------------------------------------------------------------------------------------------------


def explain(failure: BaseException) -> str:
    """One line, and no secrets: an answer's body may repeat what was signed, a query may carry a token."""
    text = str(failure)
    status, code = _STATUS.search(text), _CODE.search(text)
    if status is not None:
        why = status[1] + (f" ({code[1]})" if code else "")
    else:
        # The source that follows, on lines of its own, repeats all of it.
        why = re.sub(r"\?\S*", "", (text.splitlines() or [type(failure).__name__])[0])[:300]
    advice = _advise(text, why)
    return why + (f"; {advice}" if advice else "")


def _advise(text: str, why: str) -> str:
    if "NoSuchBucket" in text or "ContainerNotFound" in text:
        return "make the bucket first, or correct its name"
    if "169.254.169.254" in text or "metadata.google.internal" in text:
        return (
            "no credentials were found; set those of the provider in the environment (files of profiles are not read)"
        )
    if "Account must be specified" in text:
        return "set AZURE_STORAGE_ACCOUNT_NAME"
    if why.startswith(("401", "403")):
        return "check the credentials, and what they allow in this bucket"
    if "builder error" in text and "http://" in text:
        return "an endpoint without TLS must be allowed: AWS_ALLOW_HTTP=true"
    if _FULL.search(text):
        return "free some space there, or keep fewer checkpoints"
    if why.startswith(("5", "429")) or "HTTP error" in text:
        return "tried several times; the store, or the way to it, is down"
    return ""


def is_full(failure: BaseException) -> bool:
    return _FULL.search(str(failure)) is not None


def is_unsupported(failure: BaseException) -> bool:
    """The store has no such conditional request."""
    from obstore.exceptions import NotSupportedError

    return isinstance(failure, NotSupportedError) or _UNSUPPORTED.search(str(failure)) is not None


def is_refused(failure: BaseException) -> bool:
    """The store has said no, for good: nothing was done, and trying again does not help."""
    status = _STATUS.search(str(failure))
    return status is not None and status[1].startswith("4") and not status[1].startswith(("408", "409", "429"))
