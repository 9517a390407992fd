"""A workflow file before it is YAML: its default values, its Jinja templates, and the tokens that are known only later.

Jinja sees no token: `{{host:x}}` is none of its syntax, and `{{output}}` none of its names. So they are put away before
it, and come back after it. Each line is marked with its number before it is rendered: loops make many lines of one, and
a mistake is to be told where the user can find it.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from holdfast.workflow.spec import Problem

MOST_CHARACTERS = 16 * 1024 * 1024
MOST_PIECES = 1_000_000
_KEYS = ("version", "workflow", "default-values")
_TOP = re.compile(r"^([A-Za-z_-]+)\s*:", re.MULTILINE)
_TOKEN = re.compile(r"\{\{[ ]*(uuid|workflow_id|output|(?:input|host):[A-Za-z0-9_.-]+)[ ]*\}\}")
_PUT_AWAY = re.compile("\ue000([^\ue001]*)\ue001")
_LINE = re.compile("\ue002(\\d+)\ue003")


class Rendered(NamedTuple):
    text: str
    lines: list[int]  # of the file, for each line of the text


def split(content: str, file: str) -> dict[str, tuple[int, str]]:
    """The parts of a file by their keys, which stand at the beginning of a line, with the line each begins at."""
    if "\ue000" <= max(content, default="") <= "\ue003" and re.search("[\ue000-\ue003]", content):
        raise Problem("it has characters of Unicode's private area (U+E000 to U+E003); take them out", file)
    parts: dict[str, tuple[int, str]] = {}
    found = list(_TOP.finditer(content))
    before = content[: found[0].start()] if found else content
    for number, line in enumerate(before.splitlines(), 1):
        if line.strip() and not line.lstrip().startswith("#") and line.strip() != "---":
            raise Problem(f"{line.strip()!r} stands before any of {', '.join(_KEYS)}", file, number)
    for at, match in enumerate(found):
        key, line_number = match[1], content.count("\n", 0, match.start()) + 1
        if key not in _KEYS:
            raise Problem(
                f"unknown key {key!r}; at the beginning of a line there may be {', '.join(_KEYS)}", file, line_number
            )
        if key in parts:
            raise Problem(f"{key!r} is there twice; the first is in line {parts[key][0]}", file, line_number)
        end = found[at + 1].start() if at + 1 < len(found) else len(content)
        parts[key] = line_number, content[match.start() : end]
    if "workflow" not in parts:
        raise Problem("it has no 'workflow'", file)
    return parts


def render(template: str, first_line: int, values: Mapping[str, Any], file: str) -> Rendered:
    """With these values for names. An undefined name is an error."""
    from jinja2 import StrictUndefined
    from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
    put_away = _TOKEN.sub("\ue000\\1\ue001", template)
    try:
        text = _limited(environment.from_string(_marked(environment.lex(put_away), first_line)).generate(values), file)
    except TemplateSyntaxError as wrong:
        if (at := _unclosed(put_away)) is not None:
            why = f"{put_away[at : at + 2]!r} does not close: " + re.sub(r" at \d+$", "", str(wrong.message))
            raise Problem(why, file, first_line + put_away.count("\n", 0, at)) from None
        raise Problem(f"{wrong.message}", file, first_line + wrong.lineno - 1) from None
    except (TemplateError, SecurityError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as wrong:
        raise Problem(f"{wrong}{_hint(wrong)}", file, first_line + _failed_line(wrong) - 1) from None
    except MemoryError as wrong:
        raise Problem("the template needs too much memory", file, first_line + _failed_line(wrong) - 1) from None
    except (RecursionError, SyntaxError) as wrong:
        raise Problem("the template is nested too deeply", file, first_line + _failed_line(wrong) - 1) from None
    lines: list[int] = []
    plain = []
    last = first_line
    for line in text.split("\n"):
        found = _LINE.findall(line)
        last = int(found[0]) if found else last
        lines.append(last)
        plain.append(_LINE.sub("", line))
    return Rendered(_PUT_AWAY.sub("{{\\1}}", "\n".join(plain)), lines)


def _marked(tokens: Any, first_line: int) -> str:
    """The same template, with each line's number at its beginning, where that is text."""
    made, line = [f"\ue002{first_line}\ue003"], first_line
    for _, kind, value in tokens:
        for at, piece in enumerate(value.split("\n")):
            if at:
                line += 1
                made.append("\n" + (f"\ue002{line}\ue003" if kind == "data" else ""))
            made.append(piece)
    return "".join(made)


def _limited(pieces: Iterator[str], file: str) -> str:
    made, size, line = [], 0, None
    for piece in pieces:
        made.append(piece)
        size += len(piece)
        if found := _LINE.findall(piece):
            line = int(found[-1])
        if size > MOST_CHARACTERS or len(made) > MOST_PIECES:
            raise Problem("the template makes more text than a workflow can be", file, line)
    return "".join(made)


def _unclosed(template: str) -> int | None:
    """The first tag that does not end before another begins."""
    for match in re.finditer(r"\{[{%#]", template):
        end = {"{": "}}", "%": "%}", "#": "#}"}[match[0][1]]
        rest = template[match.end() :]
        closes, begins = rest.find(end), re.search(r"\{[{%]", rest)
        if closes < 0 or (begins is not None and begins.start() < closes and end != "#}"):
            return match.start()
    return None


def names_in(template: str) -> set[str]:
    """Those that are to be given."""
    from jinja2 import TemplateSyntaxError, meta
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    try:
        return meta.find_undeclared_variables(ImmutableSandboxedEnvironment().parse(_TOKEN.sub("", template)))
    except (TemplateSyntaxError, RecursionError):
        return set()  # which is told when it is rendered


def _failed_line(wrong: BaseException) -> int:
    lines = [frame.lineno for frame in traceback.extract_tb(wrong.__traceback__) if frame.filename == "<template>"]
    return lines[-1] or 1 if lines else 1


def _hint(wrong: BaseException) -> str:
    return "; give it in default-values or with --set" if "is undefined" in str(wrong) else ""


def fill(text: str, known: Mapping[str, str]) -> str:
    """Put what tokens stand for into their places."""
    return _TOKEN.sub(lambda match: known[match[1]], text)


def tokens_in(text: str) -> list[tuple[str, int]]:
    """Each with where it is."""
    return [(match[1], match.start()) for match in _TOKEN.finditer(text)]


def as_value(text: str) -> int | float | str:
    """As `--set` reads one: a number where it is one. `007` is a name, not seven."""
    if re.fullmatch(r"-?(0|[1-9]\d{0,17})", text):
        return int(text)
    return float(text) if re.fullmatch(r"-?(0|[1-9]\d{0,17})(\.\d+)?(e[+-]?\d{1,2})?", text) else text
