"""Where a world's output goes: torchrun's log tree, but a directory per generation, never deleted by a restart."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Mapping
from string import Template
from typing import Protocol

import msgspec

from holdfast.agent.console import Console
from holdfast.agent.streams import LogFile, Stream, Tail

OUT, ERR = 1, 2
_MAPPING = re.compile(r"\d+:[0-3](,\d+:[0-3])*")


def parse_std(text: str) -> int | dict[int, int]:
    """`3`, or `0:1,10:3`: which of stdout (1) and stderr (2), for all local ranks or for some."""
    if re.fullmatch(r"[0-3]", text):
        return int(text)
    if _MAPPING.fullmatch(text):
        return {int(rank): int(value) for rank, value in (pair.split(":") for pair in text.split(","))}
    raise ValueError(f"{text!r} is neither 0 to 3 nor a list like 0:1,1:3")


def std_of(which: int | Mapping[int, int], local_rank: int) -> int:
    return which if isinstance(which, int) else which.get(local_rank, 0)


class Destination(msgspec.Struct, frozen=True):
    """Where one rank's output goes. A path of '' is no file."""

    stdout_file: str = ""
    stderr_file: str = ""
    stdout_console: bool = True
    stderr_console: bool = True
    prefixed: bool = False  # lines are shown behind the rank's prefix
    error_file: str = ""


class Logs(Protocol):
    """The plug-in point for log handling: where do the streams of each local rank of a world go?"""

    def place(self, generation: int, local_rank: int) -> Destination: ...


class TorchrunLogs:
    """The default: `attempt_<generation>/<local rank>/{stdout.log,stderr.log,error.json}` in the run directory."""

    def __init__(
        self,
        run_dir: str | None,
        redirects: int | Mapping[int, int] = 0,
        tee: int | Mapping[int, int] = 0,
        local_ranks: frozenset[int] | None = None,
        complain: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._complain = complain
        self._run_dir = run_dir
        self._redirects = redirects
        self._tee = tee
        self._local_ranks = local_ranks

    def place(self, generation: int, local_rank: int) -> Destination:
        tee = std_of(self._tee, local_rank)
        redirect = std_of(self._redirects, local_rank) | tee
        shown = self._local_ranks is None or local_rank in self._local_ranks
        folder = self._folder(generation, local_rank)

        def file(std: int, name: str) -> str:
            return os.path.join(folder, name) if folder and redirect & std else ""

        return Destination(
            stdout_file=file(OUT, "stdout.log"),
            stderr_file=file(ERR, "stderr.log"),
            stdout_console=shown and (not redirect & OUT or bool(tee & OUT)),
            stderr_console=shown and (not redirect & ERR or bool(tee & ERR)),
            prefixed=bool(tee),
            error_file=os.path.join(folder, "error.json") if folder else "",
        )

    def _folder(self, generation: int, local_rank: int) -> str:
        """Made now; a disk that has become full costs logs, not the restart."""
        if self._run_dir is None:
            return ""
        folder = os.path.join(self._run_dir, f"attempt_{generation}", str(local_rank))
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as failure:
            self._complain(
                f"cannot make {folder}: {failure.strerror}; training goes on without logs of this generation"
            )
            return ""
        return folder


class RankOutput:
    """The open streams of one rank."""

    def __init__(self, tail: Tail) -> None:
        self.tail = tail
        self.streams: dict[int, Stream] = {}  # by the descriptor they replace in the rank
        self._null = -1

    def descriptors(self) -> dict[int, int]:
        ends = {number: stream.write_end for number, stream in self.streams.items()}
        if self._null >= 0:
            ends[1] = self._null
        return ends

    def hide_stdout(self) -> None:
        self._null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)

    def start(self) -> None:
        for stream in self.streams.values():
            stream.start()
        if self._null >= 0:
            os.close(self._null)
            self._null = -1

    def drain(self) -> None:
        for stream in self.streams.values():
            stream.drain()

    def close(self) -> None:
        for stream in self.streams.values():
            stream.close()


class LogFilters(msgspec.Struct, frozen=True):
    """`--duplicate-std*-filters`: lines of tee'd ranks that go to one more file."""

    stdout: tuple[str, ...] = ()
    stderr: tuple[str, ...] = ()


class Plumbing:
    """Opens the streams of a world's ranks as their destinations say."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        stdout: Console,
        stderr: Console,
        complain: Callable[[str], None],
        prefix_template: str | None,
        filters: LogFilters,
    ) -> None:
        self._loop = loop
        self._consoles = {1: stdout, 2: stderr}
        self._complain = complain
        self._template = Template(prefix_template or "[${role_name}${local_rank}]:")
        self._filters = {1: filters.stdout, 2: filters.stderr}
        self._filtered: list[LogFile] = []

    def open(self, to: Destination, role: str, rank: int, local_rank: int, filtered_dir: str) -> RankOutput:
        names = {"role_name": role, "rank": rank, "local_rank": local_rank}
        prefix = self._template.safe_substitute(names).encode()
        output = RankOutput(Tail())
        for number, path, shown in ((1, to.stdout_file, to.stdout_console), (2, to.stderr_file, to.stderr_console)):
            if number == 1 and not path:
                if not shown:
                    output.hide_stdout()
                continue  # nothing to do with it: the rank writes to the console itself
            console = self._consoles[number]
            stream = Stream(self._loop, as_terminal=shown and not path and console.is_terminal, like_fd=number)
            if number == 2:
                stream.to_tail(output.tail)
            if path:
                stream.to_file(LogFile(path, self._complain))
            if shown:
                stream.to_console(console, prefix if to.prefixed and path else b"")
            if shown and path and self._filters[number] and filtered_dir:
                wanted = [text.encode() for text in self._filters[number]]
                stream.to_filtered(self._filtered_file(number, filtered_dir), prefix, wanted)
            output.streams[number] = stream
        return output

    def end_world(self) -> None:
        for file in self._filtered:
            file.close()
        self._filtered.clear()

    def _filtered_file(self, number: int, folder: str) -> LogFile:
        path = os.path.join(folder, "filtered_stdout.log" if number == 1 else "filtered_stderr.log")
        for file in self._filtered:
            if file.path == path:
                return file
        self._filtered.append(LogFile(path, self._complain))
        return self._filtered[-1]
