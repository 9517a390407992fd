"""`holdfast logs`: what ranks have printed, out of the files that the agents keep of it, byte for byte."""

from __future__ import annotations

import contextlib
import os
import re
import select
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from holdfast import linux
from holdfast.agent.streams import READ_BYTES, Lines
from holdfast.cli.flags import open_parser
from holdfast.cli.usage import Usage
from holdfast.observe import find
from holdfast.observe.screen_logs import STREAMS, Log, Logs, Wanted

LOOK_S = 1.0  # of a file on another machine nothing tells when it grows
PASS_S = 0.25  # through all files, at most so often
EXITS = "exit codes: 0; 1 there is nothing to show, or nothing matches; 2 there is no such job."
_RANKS = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*", re.ASCII)


def main(argv: Sequence[str]) -> int:
    parser = open_parser("holdfast logs", "Show what ranks have printed, as it is in their log files.")
    parser.epilog = EXITS
    add = parser.add_argument
    add("job", nargs="?", default="", metavar="JOB", help="as for holdfast status")
    add("--rank", default="", metavar="R[,R]", help="only of these; 0-3,8 is five of them")
    add("--generation", default="last", metavar="G", help="a number, last, or all")
    add("-f", "--follow", action="store_true", help="go on as they print, also into the next generation")
    add("--grep", default=None, metavar="REGEX", help="only lines in which this is found")
    add("-n", "--lines", type=int, default=None, metavar="N", help="of each file only the last N lines")
    add("--only", choices=STREAMS, default=None, help="one of the two streams")
    args = parser.parse_args(list(argv))
    try:
        ranks = _ranks(args.rank)
        generation = _generation(args.generation)
        pattern = re.compile(args.grep.encode(errors="surrogateescape")) if args.grep is not None else None
        if args.lines is not None and args.lines < 0:
            raise Usage("-n: a number of lines, 0 or more")
    except (Usage, re.error) as wrong:
        return _complain(f"--grep: {wrong}" if isinstance(wrong, re.error) else str(wrong), 2)
    try:
        found = find.find(args.job)
        logs = Logs(found)
    except find.NotFound as failure:
        return find.complain("logs", failure)
    except OSError as failure:
        return _complain(f"cannot read {found.record}: {failure.strerror}", 2)
    wanted = _wanted(logs, ranks, generation, args.follow, (args.only,) if args.only else STREAMS)
    printer = Printer(_is_several(logs, wanted), pattern, args.lines)
    try:
        return _follow(logs, wanted, printer) if args.follow else _print(logs, wanted, printer)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # who has read enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0


def _ranks(text: str) -> frozenset[int] | None:
    if not text:
        return None
    if not _RANKS.fullmatch(text) or len(text) > 10_000:
        raise Usage(f"--rank: {text!r} is no list of ranks like 0,3 or 0-7")
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        found.update(range(int(first), min(int(last or first), int(first) + 100_000) + 1))
    return frozenset(found)


def _generation(text: str) -> str | int:
    if text in ("last", "all"):
        return text
    if not (text.isascii() and text.isdigit()):
        raise Usage(f"--generation: {text!r} is neither a number, nor last, nor all")
    return int(text)


def _wanted(
    logs: Logs, ranks: frozenset[int] | None, generation: str | int, follow: bool, streams: tuple[str, ...]
) -> Wanted:
    if isinstance(generation, int):
        return Wanted(ranks, generation, generation, streams)
    if generation == "all":
        return Wanted(ranks, 0, None, streams)
    there = logs.logs(Wanted(ranks, 0, None, streams))
    last = there[-1].generation if there else max(logs.generations(), default=0)
    return Wanted(ranks, last, None if follow else last, streams)


def _is_several(logs: Logs, wanted: Wanted) -> bool:
    """Whether a line needs to say whose it is."""
    if wanted.ranks is not None:
        return len(wanted.ranks) > 1
    ranks = {log.rank for log in logs.logs(wanted)}
    for generation in filter(wanted.has_generation, logs.generations()):
        ranks |= logs.ranks_of(generation)
    return len(ranks) != 1


# -- printing ---------------------------------------------------------------------------------------------------------


class Source:
    """One file, as far as it is printed."""

    def __init__(
        self, log: Log, put: Callable[[bytes], None], prefix: bytes, pattern: re.Pattern[bytes] | None
    ) -> None:
        """Raises OSError."""
        self.log = log
        self._file = log.path.open("rb", buffering=0)
        self._put = put
        self._prefix = prefix
        self._pattern = pattern
        self._lines = Lines(self._take) if prefix or pattern is not None else None

    def skip_to_last(self, lines: int) -> None:
        """So that only so many are left."""
        end = self._file.seek(0, os.SEEK_END)
        start, rest, missing = end, b"", lines
        while start > 0:
            before, start = start, max(0, start - READ_BYTES)
            self._file.seek(start)
            rest = self._file.read(before - start)
            if before == end and rest.endswith(b"\n"):
                missing += 1  # the one that ends the last line
            newlines = rest.count(b"\n")
            if newlines >= missing > 0:
                at = len(rest)
                for _ in range(missing):
                    at = rest.rindex(b"\n", 0, at)
                self._file.seek(start + at + 1)
                return
            missing -= newlines
            if missing <= 0:
                break
        self._file.seek(0 if lines else end)

    def pump(self) -> None:
        while piece := self._file.read(READ_BYTES):
            if self._lines is not None:
                self._lines.feed(piece)
            else:
                self._put(piece)

    def close(self) -> None:
        self.pump()
        if self._lines is not None:
            self._lines.flush()
        self._file.close()

    def _take(self, line: bytes) -> None:
        if self._pattern is None or self._pattern.search(line.rstrip(b"\n")):
            self._put(self._prefix + line + (b"" if line.endswith(b"\n") or not self._prefix else b"\n"))


class Printer:
    """Says where another generation begins, on standard error: the other stream is the ranks' own."""

    def __init__(self, several: bool, pattern: re.Pattern[bytes] | None, tail: int | None) -> None:
        self.printed = False
        self.is_unfiltered = pattern is None
        self._several, self._pattern, self._tail = several, pattern, tail
        self._open: dict[Path, Source] = {}
        self._done: set[Path] = set()
        self._generation: int | None = None

    def open(self, log: Log, is_new: bool = False) -> None:
        """`is_new`: it was not there when this began, so that none of it is old."""
        if log.path in self._open or log.path in self._done:
            return
        prefix = b"[default%d]:" % log.rank if self._several else b""
        with contextlib.suppress(OSError):
            source = Source(log, partial(self._put, log.generation), prefix, self._pattern)
            self._open[log.path] = source
            if self._tail is not None and not is_new:
                source.skip_to_last(self._tail)

    def pump(self) -> None:
        for source in self._open.values():
            source.pump()
        sys.stdout.buffer.flush()

    def close(self, before: int | None = None) -> None:
        """All of them; or those of the generations before, which are complete."""
        for path, source in list(self._open.items()):
            if before is None or source.log.generation < before:
                source.close()
                self._done.add(path)
                del self._open[path]
        sys.stdout.buffer.flush()

    def _put(self, generation: int, data: bytes) -> None:
        if self._generation not in (None, generation):
            sys.stdout.buffer.flush()
            print(f"holdfast logs: generation {generation}", file=sys.stderr, flush=True)
        self._generation, self.printed = generation, True
        sys.stdout.buffer.write(data)


def _print(logs: Logs, wanted: Wanted, printer: Printer) -> int:
    for log in logs.logs(wanted):
        printer.open(log)
        printer.close()
    return _result(logs, wanted, printer)


def _follow(logs: Logs, wanted: Wanted, printer: Printer) -> int:
    """Until the job is over, or another generation has begun and only this one is wanted."""
    changes: linux.Changes | None = None
    with contextlib.suppress(OSError):
        changes = linux.Changes()
    watched: set[Path] = set()
    is_first = True
    while True:
        if changes is not None:
            changes.forget()
        began_s = time.monotonic()
        is_over = logs.main.is_over()  # asked first: what was written until then is read below
        logs.read()
        is_over |= wanted.last is not None and max(logs.generations(), default=0) > wanted.last
        watched |= _watch(changes, set(logs.folders(wanted)) - watched)
        found = logs.logs(wanted)
        for log in found:
            printer.open(log, is_new=not is_first)
        printer.pump()
        printer.close(before=found[-1].generation if found else 0)
        if is_over or (not found and wanted.first in logs.main.started):
            break
        is_first = False
        if select.select([changes.fd] if changes is not None else [], [], [], LOOK_S)[0]:
            time.sleep(max(0.0, began_s + PASS_S - time.monotonic()))
    printer.close()
    if changes is not None:
        changes.close()
    return _result(logs, wanted, printer)


def _watch(changes: linux.Changes | None, folders: set[Path]) -> set[Path]:
    if changes is not None:
        for folder in folders:
            with contextlib.suppress(OSError):
                changes.add(str(folder))
    return folders


def _result(logs: Logs, wanted: Wanted, printer: Printer) -> int:
    if why := logs.missing(wanted):
        return _complain(why, 1)
    return 0 if printer.printed or printer.is_unfiltered else 1


def _complain(message: str, code: int) -> int:
    print(f"holdfast logs: {message}", file=sys.stderr)
    return code
