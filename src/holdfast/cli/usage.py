"""What a wrong flag leads to."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches


class Usage(Exception):
    """A flag that cannot be meant; exit code 2."""


def one_of(flag: str, value: str, known: Sequence[str]) -> str:
    if value not in known:
        raise Usage(f"{flag}: {value!r} is not known{nearest(value, known)}; known are {', '.join(known)}")
    return value


def nearest(value: str, known: Sequence[str]) -> str:
    near = get_close_matches(value, known, 1)
    return f" (did you mean {near[0]}?)" if near else ""
