"""Words and numbers for a terminal. Whatever a rank, a node or a file has said passes `clean` before it gets there."""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Iterable, Sequence

from holdfast.observe.explain import duration

UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def clean(text: str) -> str:
    """One line of it, with every character that could move a cursor, change a colour or turn the direction of writing
    spelt out."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else _spelt(each) for each in text)


def _spelt(character: str) -> str:
    return " " if character in "\n\t" else character.encode("unicode_escape").decode()


def width(text: str) -> int:
    """In columns: some characters take two, and some none."""
    return len(text) if text.isascii() else sum(map(_columns, text))


def _columns(character: str) -> int:
    if unicodedata.combining(character) or unicodedata.category(character) == "Me":
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def cut(text: str, columns: int) -> str:
    """No wider than that; what is missing shows as two dots."""
    if width(text) <= columns:
        return text
    room, kept = max(0, columns - 2), ""
    for character in text:
        room -= _columns(character)
        if room < 0:
            break
        kept += character
    return (kept + "..")[: max(0, columns)] if columns < 2 else kept + ".."


def left(text: str, columns: int) -> str:
    text = cut(text, columns)
    return text + " " * (columns - width(text))


def right(text: str, columns: int) -> str:
    text = cut(text, columns)
    return " " * (columns - width(text)) + text


def table(rows: Sequence[Sequence[str]], numbers: frozenset[int] = frozenset(), room: int = 0) -> list[str]:
    """Columns as wide as their widest word, those of numbers to the right. A line takes at most `room`, if any."""
    widths = [max(map(width, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [(right if at in numbers else left)(cell, widths[at]) for at, cell in enumerate(row)]
        line = "  ".join(cells).rstrip()
        lines.append(cut(line, room) if room else line)
    return lines


def many(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def ago(seconds: float) -> str:
    return f"{age(seconds)} ago"


def age(seconds: float) -> str:
    """Of something that a person does not time: in whole units, two at most."""
    whole = max(0, round(seconds))
    if whole < 120:
        return f"{whole} s"
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if minutes < 120:
        return f"{minutes} min"
    return f"{hours} h {minutes % 60} min" if hours < 48 else f"{days} days {hours % 24} h"


def step_time(seconds: float) -> str:
    return duration(seconds) if seconds > 0 else "-"


def size(count: int) -> str:
    value, unit = float(count), 0
    while value >= 999.5 and unit < len(UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.3g} {UNITS[unit]}"


def ranks(numbers: Iterable[int], most: int = 8) -> str:
    """`rank 3`, or `ranks 0, 3 and 12 more`."""
    all_ = sorted(numbers)
    shown = ", ".join(map(str, all_[:most]))
    more = f" and {len(all_) - most} more" if len(all_) > most else ""
    return f"rank{'s' if len(all_) != 1 else ''} {shown}{more}"


def show(lines: Iterable[str]) -> None:
    """On standard output, also on one that cannot spell all of it."""
    text = "".join(f"{line}\n" for line in lines)
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
    sys.stdout.flush()
