"""What a given flag leads to, and a wrong one."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any


class Remember(argparse.Action):
    """Remember that the option was given, so that one that has no effect can be answered for."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, self.const if self.nargs == 0 else values)
        namespace.given.add(self.dest)


class Usage(Exception):
    """A flag that cannot be meant; exit code 2."""


def one_of(flag: str, value: str, known: Sequence[str]) -> str:
    if value not in known:
        raise Usage(f"{flag}: {value!r} is not known{nearest(value, known)}; known are {', '.join(known)}")
    return value


def nearest(value: str, known: Sequence[str]) -> str:
    near = get_close_matches(value, known, 1)
    return f" (did you mean {near[0]}?)" if near else ""
