"""What a check is asked, and what it has found: one line, and one line on what to do next."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, TypeAlias

import msgspec

State = Literal["ok", "warn", "fail", "skipped"]
Figures: TypeAlias = dict[str, float | int | str]

MAX_CHARACTERS = 300
_SOURCE = re.compile(r"\[/\S+:\d+\] ")  # where in C++ it was raised
_ORDER: tuple[State, ...] = ("fail", "warn", "ok", "skipped")


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What a check may want to know. It goes to another process as JSON, so no secret is in it."""

    checkpoint_dir: str = ""  # '': none is known
    log_dir: str = ""  # '': where temporary files go
    together: bool = False  # with all other nodes of a job, so that what they share is asked for little
    ports: tuple[int, ...] = ()  # those the job will use; (): it has not said
    peer: tuple[str, int] | None = None  # host and port of a doctor that serves
    secret_file: str | None = None
    insecure: bool = False
    tls: tuple[str, str, str] | None = None  # files: certificate, key, authority
    wait_s: float = 5.0  # for a peer that does not listen yet


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    check: str = ""
    state: State
    text: str
    cure: str = ""  # what to do next
    figures: Figures = {}
    took_s: float = 0.0

    @property
    def line(self) -> str:
        return f"{self.check}: {self.text}" + (f"; {self.cure}" if self.cure else "")


def ok(text: str, **figures: float | int | str) -> Finding:
    return Finding(state="ok", text=one_line(text), figures=figures)


def warn(text: str, cure: str, **figures: float | int | str) -> Finding:
    return Finding(state="warn", text=one_line(text), cure=one_line(cure), figures=figures)


def fail(text: str, cure: str, **figures: float | int | str) -> Finding:
    return Finding(state="fail", text=one_line(text), cure=one_line(cure), figures=figures)


def skipped(text: str) -> Finding:
    return Finding(state="skipped", text=one_line(text))


def combine(parts: Sequence[Finding]) -> Finding:
    """As bad as the worst of them, whose texts alone are shown: who reads of a failure wants no good news with it."""
    state = min((part.state for part in parts), key=_ORDER.index)
    worst = [part for part in parts if part.state == state]
    figures: Figures = {}
    for part in parts:
        figures |= part.figures
    text = one_line("; ".join(part.text for part in worst if part.text))
    return Finding(state=state, text=text, cure=worst[0].cure, figures=figures)


def one_line(text: str) -> str:
    """Also of what a library or another machine has said: nothing of it moves the cursor of who reads it."""
    flat = " ".join(text.split())
    clean = "".join(character if character.isprintable() else "?" for character in flat)
    return clean if len(clean) <= MAX_CHARACTERS else clean[: MAX_CHARACTERS - 3] + "..."


def first_line(failure: BaseException) -> str:
    """An exception in short. Torch's have a C++ stack after the first line."""
    lines = _SOURCE.sub("", str(failure)).strip().splitlines()
    return one_line(f"{type(failure).__name__}: {lines[0]}" if lines else type(failure).__name__)


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def size(count: float) -> str:
    """A number of bytes, for people."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if count >= 10 or unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} TiB"
