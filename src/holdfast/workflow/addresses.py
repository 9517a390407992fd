"""Addresses in a workflow file, checked as far as that can be done without asking anybody."""

from __future__ import annotations

import functools
import importlib.util

from holdfast.checkpoint import cloud
from holdfast.checkpoint.errors import CheckpointError
from holdfast.workflow.fields import Field

_SCHEMES = ("file", *cloud.SCHEMES)


def url_of(field: Field) -> str:
    url = field.text()
    scheme, found, rest = url.partition("://")
    if not found or scheme not in _SCHEMES or not rest:
        raise field.problem(f"{url!r} is no address; {', '.join(f'{one}://' for one in _SCHEMES)} are known")
    if scheme != "file":
        _check_cloud(field, scheme)
    elif not rest.startswith("/"):
        raise field.problem(f"{url!r}: a path after file:// is absolute, as in file:///data")
    return url.rstrip("/")


def _check_cloud(field: Field, scheme: str) -> None:
    if importlib.util.find_spec("obstore") is None:
        raise field.problem(f"{scheme}:// needs the extra: pip install 'holdfast[cloud]'")
    if failure := _refusal(field.text()):
        raise field.problem(failure)


@functools.cache
def _refusal(url: str) -> str:
    """What is wrong with an address, or with the environment for it. Nobody is asked."""
    try:
        cloud.connect(url)
    except CheckpointError as failure:
        return str(failure)
    return ""
