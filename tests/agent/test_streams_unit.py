"""The parts that carry a rank's output: lines, tails, log files that fill up, a console that is slow or gone."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from holdfast.agent.console import HIGH_WATER_BYTES, Console
from holdfast.agent.logs import Destination, LogFilters, Plumbing, TorchrunLogs, parse_std, std_of
from holdfast.agent.streams import MAX_LINE_BYTES, TAIL_LINES, Lines, LogFile, Stream, Tail

MIB = 1 << 20


def never(_: str) -> None:
    raise AssertionError("nothing was to be complained about")


# -- lines ------------------------------------------------------------------------------------------------------------


def lines_of(*chunks: bytes) -> list[bytes]:
    taken: list[bytes] = []
    lines = Lines(taken.append)
    for chunk in chunks:
        lines.feed(chunk)
    lines.flush()
    return taken


def test_lines_come_out_whole_however_they_are_cut() -> None:
    text = b"one\ntwo\r\n\nthree \xff\n"
    expected = [b"one\n", b"two\r\n", b"\n", b"three \xff\n"]
    assert lines_of(text) == expected
    assert lines_of(*(text[i : i + 1] for i in range(len(text)))) == expected


def test_a_line_is_held_until_it_ends() -> None:
    taken: list[bytes] = []
    lines = Lines(taken.append)
    lines.feed(b"half a")
    assert taken == []
    lines.feed(b" line\n")
    assert taken == [b"half a line\n"]


def test_an_unfinished_line_comes_out_at_the_end() -> None:
    assert lines_of(b"done\nnot do", b"ne") == [b"done\n", b"not done"]
    assert lines_of() == []


def test_a_line_without_end_is_let_go_before_it_fills_the_memory() -> None:
    taken: list[bytes] = []
    lines = Lines(taken.append)
    for _ in range(10 * MAX_LINE_BYTES // 1000):
        lines.feed(b"x" * 1000)
    assert max(map(len, taken)) <= MAX_LINE_BYTES + 1000
    lines.flush()
    assert sum(map(len, taken)) == 10 * MAX_LINE_BYTES // 1000 * 1000


# -- the last lines ---------------------------------------------------------------------------------------------------


def tail_of(*lines: bytes) -> tuple[str, ...]:
    tail = Tail()
    for line in lines:
        tail.take(line)
    return tail.text()


def test_the_tail_keeps_the_last_lines() -> None:
    assert tail_of(*(b"%d\n" % i for i in range(100))) == tuple(str(i) for i in range(100 - TAIL_LINES, 100))


def test_of_a_progress_bar_only_its_last_form_is_kept() -> None:
    assert tail_of(b"10%\r50%\r100%\n", b"10%\r20%\r", b"windows\r\n") == ("100%", "20%", "windows")


def test_the_tail_is_text_whatever_the_bytes() -> None:
    assert tail_of(b"caf\xc3\xa9 \xff\n") == ("café �",)


def test_the_tail_does_not_begin_with_empty_lines_but_may_have_them() -> None:
    assert tail_of(b"\n", b"  \n", b"a\n", b"\n", b"b\n") == ("a", "", "b")


def test_a_long_line_is_cut() -> None:
    (line,) = tail_of(b"x" * 10_000 + b"\n")
    assert line == "x" * 2000


# -- log files --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def files_no_larger_than(size_bytes: int) -> Iterator[None]:
    """The nearest thing to a disk that fills up and has room again. Python has SIGXFSZ ignored, so a write fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_log_has_what_was_written_behind_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "stdout.log"
    path.write_bytes(b"before\n")
    log = LogFile(str(path), never)
    log.write(b"one\n")
    log.write(b"two\xff\n")
    log.close()
    assert path.read_bytes() == b"before\none\ntwo\xff\n"


def test_a_full_disk_is_complained_about_once_and_stops_nothing() -> None:
    complaints: list[str] = []
    log = LogFile("/dev/full", complaints.append)
    for _ in range(3):
        log.write(b"lost\n")
    log.close()
    assert complaints == [
        "cannot write /dev/full: No space left on device; training goes on, free some space to have logs again"
    ]


def test_a_log_says_what_is_missing_once_there_is_room_again(tmp_path: Path) -> None:
    complaints: list[str] = []
    path = tmp_path / "stderr.log"
    log = LogFile(str(path), complaints.append)
    with files_no_larger_than(8):
        log.write(b"0123456789")
        log.write(b"abc")
    log.write(b"again\n")
    log.write(b"and again\n")
    log.close()
    assert path.read_bytes() == b"01234567\n[holdfast: 5 bytes are missing here]\nagain\nand again\n"
    assert len(complaints) == 1


def test_a_log_that_cannot_be_opened_is_complained_about_once_and_stops_nothing(tmp_path: Path) -> None:
    complaints: list[str] = []
    path = tmp_path / "nowhere" / "stdout.log"
    log = LogFile(str(path), complaints.append)
    log.write(b"lost")
    log.close()
    (complaint,) = complaints
    assert complaint.startswith(f"cannot write {path}: No such file or directory")


def test_a_log_may_be_closed_twice_and_written_to_after(tmp_path: Path) -> None:
    path = tmp_path / "stdout.log"
    log = LogFile(str(path), never)
    log.close()
    log.close()
    log.write(b"late")
    assert path.read_bytes() == b""


# -- which streams ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "which"),
    [
        ("0", 0),
        ("3", 3),
        ("0:1", {0: 1}),
        ("0:1,1:2", {0: 1, 1: 2}),
        ("10:3,127:0", {10: 3, 127: 0}),
        ("1:1,1:2", {1: 2}),
    ],
)
def test_streams_are_chosen_for_all_ranks_or_by_rank(text: str, which: int | dict[int, int]) -> None:
    assert parse_std(text) == which


@pytest.mark.parametrize("text", ["", "4", "10", "0:4", "0:1,", ",0:1", "0:1 ,1:2", "a:1", "-1:1", "3\n", "0:1\n"])
def test_a_choice_that_is_none_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="is neither 0 to 3 nor a list"):
        parse_std(text)


def test_a_rank_that_is_not_named_has_no_stream() -> None:
    assert std_of({10: 3}, 10) == 3
    assert std_of({10: 3}, 1) == 0
    assert std_of(2, 1) == 2


# -- where they go ----------------------------------------------------------------------------------------------------


def test_without_redirects_everything_goes_to_the_console(tmp_path: Path) -> None:
    place = TorchrunLogs(str(tmp_path)).place(2, 0)
    assert place == Destination(error_file=f"{tmp_path}/attempt_2/0/error.json")
    assert os.path.isdir(f"{tmp_path}/attempt_2/0")


def test_a_redirected_stream_goes_to_its_file_alone(tmp_path: Path) -> None:
    place = TorchrunLogs(str(tmp_path), redirects=1).place(0, 3)
    assert (place.stdout_file, place.stdout_console) == (f"{tmp_path}/attempt_0/3/stdout.log", False)
    assert (place.stderr_file, place.stderr_console) == ("", True)
    assert not place.prefixed


def test_a_teed_stream_goes_to_its_file_and_behind_a_prefix_to_the_console(tmp_path: Path) -> None:
    place = TorchrunLogs(str(tmp_path), redirects=3, tee=2).place(0, 0)
    assert (place.stdout_file, place.stdout_console) == (f"{tmp_path}/attempt_0/0/stdout.log", False)
    assert (place.stderr_file, place.stderr_console) == (f"{tmp_path}/attempt_0/0/stderr.log", True)
    assert place.prefixed


def test_redirects_by_rank_leave_the_other_ranks_alone(tmp_path: Path) -> None:
    logs = TorchrunLogs(str(tmp_path), redirects={10: 3})
    assert logs.place(0, 10).stdout_file.endswith("/attempt_0/10/stdout.log")
    assert logs.place(0, 1).stdout_file == ""


def test_filtered_ranks_are_not_shown_but_still_logged(tmp_path: Path) -> None:
    logs = TorchrunLogs(str(tmp_path), tee=3, local_ranks=frozenset([0]))
    assert logs.place(0, 0).stdout_console
    hidden = logs.place(0, 1)
    assert not hidden.stdout_console
    assert not hidden.stderr_console
    assert hidden.stdout_file.endswith("/attempt_0/1/stdout.log")


def test_every_generation_has_a_folder_of_its_own(tmp_path: Path) -> None:
    logs = TorchrunLogs(str(tmp_path), redirects=3)
    assert logs.place(0, 0).stdout_file != logs.place(1, 0).stdout_file


def test_without_a_run_directory_there_are_no_files() -> None:
    assert TorchrunLogs(None, redirects=0).place(0, 0) == Destination()


# -- the console ------------------------------------------------------------------------------------------------------


class Reader:
    """Somebody at the other end of the console, who reads when told to and not before."""

    def __init__(self) -> None:
        self._fd, self.write_end = os.pipe()
        self.data = bytearray()
        self._thread = threading.Thread(target=self._read)

    def start(self) -> None:
        self._thread.start()

    def leave(self) -> None:
        os.close(self._fd)

    def rest(self) -> bytes:
        """All that came, once the console is closed."""
        os.close(self.write_end)
        self._thread.join()
        os.close(self._fd)
        return bytes(self.data)

    def _read(self) -> None:
        while chunk := os.read(self._fd, 1 << 20):
            self.data += chunk


def in_a_loop(test: Callable[[asyncio.AbstractEventLoop], Awaitable[None]]) -> None:
    async def run() -> None:
        async with asyncio.timeout(60):
            await test(asyncio.get_running_loop())

    asyncio.run(run())


async def room_in(console: Console) -> None:
    drained = asyncio.Event()
    while console.is_full(drained.set):
        await drained.wait()
        drained.clear()


def test_a_hundred_megabytes_come_out_in_order() -> None:
    async def test(loop: asyncio.AbstractEventLoop) -> None:
        reader = Reader()
        reader.start()
        console = Console(reader.write_end, loop)
        chunks = [bytes([i]) * MIB for i in range(100)]
        for chunk in chunks:
            await room_in(console)
            console.write(chunk)
        console.close()
        assert reader.rest() == b"".join(chunks)

    in_a_loop(test)


def test_a_slow_reader_holds_nobody_up_but_is_noticed() -> None:
    async def test(loop: asyncio.AbstractEventLoop) -> None:
        reader = Reader()
        console = Console(reader.write_end, loop)
        drained = asyncio.Event()
        assert not console.is_full(drained.set)
        console.write(b"x" * HIGH_WATER_BYTES)  # returns, though the pipe holds a sixty-fourth of it
        assert console.is_full(drained.set)
        assert not drained.is_set()
        reader.start()
        await drained.wait()
        assert not console.is_full(drained.set)
        console.close()
        assert reader.rest() == b"x" * HIGH_WATER_BYTES

    in_a_loop(test)


def test_a_reader_that_leaves_is_forgotten() -> None:
    async def test(loop: asyncio.AbstractEventLoop) -> None:
        reader = Reader()
        console = Console(reader.write_end, loop)
        drained = asyncio.Event()
        console.write(b"x" * HIGH_WATER_BYTES)
        assert console.is_full(drained.set)
        reader.leave()
        await drained.wait()  # whoever waited for room goes on
        console.write(b"x" * HIGH_WATER_BYTES)
        assert not console.is_full(drained.set)
        console.close()
        os.close(reader.write_end)

    in_a_loop(test)


def test_a_console_that_was_made_non_blocking_loses_nothing() -> None:
    async def test(loop: asyncio.AbstractEventLoop) -> None:
        reader = Reader()
        os.set_blocking(reader.write_end, False)
        reader.start()
        console = Console(reader.write_end, loop)
        chunks = [bytes([i]) * MIB for i in range(8)]
        for chunk in chunks:
            console.write(chunk)
        console.close()
        assert reader.rest() == b"".join(chunks)

    in_a_loop(test)


def test_a_console_that_is_closed_takes_no_more() -> None:
    async def test(loop: asyncio.AbstractEventLoop) -> None:
        reader = Reader()
        console = Console(reader.write_end, loop)
        console.write(b"before")
        console.close()
        console.write(b"after")
        console.close()
        reader.start()
        assert reader.rest() == b"before"

    in_a_loop(test)


def test_a_pipe_is_no_terminal() -> None:
    async def test(loop: asyncio.AbstractEventLoop) -> None:
        terminal, pipe = os.openpty(), os.pipe()
        assert Console(terminal[1], loop).is_terminal
        assert not Console(pipe[1], loop).is_terminal
        for fd in (*terminal, *pipe):
            os.close(fd)

    in_a_loop(test)


# -- a rank's stream --------------------------------------------------------------------------------------------------


def test_what_a_rank_said_last_is_known_though_it_did_not_end_the_line() -> None:
    async def test(loop: asyncio.AbstractEventLoop) -> None:
        stream = Stream(loop, as_terminal=False, like_fd=2)
        tail = Tail()
        stream.to_tail(tail)
        os.write(stream.write_end, b"first words\nlast words")
        stream.start()
        stream.drain()
        said = tail.text()
        stream.close()
        assert said == ("first words", "last words")

    in_a_loop(test)


class Enough(Exception):
    pass


def test_draining_ends_though_somebody_goes_on_writing() -> None:
    """A process that the rank left behind still has the pipe, and fills it as fast as it is emptied. Whoever drains it
    wants what was there when the rank ended, and must not wait for that process to pause."""

    class Echo(Tail):
        def __init__(self, fd: int) -> None:
            super().__init__()
            self._fd = fd
            self._taken_bytes = 0

        def take(self, line: bytes) -> None:
            self._taken_bytes += len(line)
            if self._taken_bytes > 64 * MIB:
                raise Enough
            os.write(self._fd, line)

    async def test(loop: asyncio.AbstractEventLoop) -> None:
        stream = Stream(loop, as_terminal=False, like_fd=2)
        left_behind = os.dup(stream.write_end)
        stream.to_tail(Echo(left_behind))
        os.write(left_behind, b"x" * 50_000 + b"\n")
        stream.start()
        stream.drain()
        stream.close()
        os.close(left_behind)

    in_a_loop(test)


def test_a_stream_goes_to_the_console_to_its_file_and_to_the_filtered_one(tmp_path: Path) -> None:
    async def test(loop: asyncio.AbstractEventLoop) -> None:
        reader = Reader()
        reader.start()
        console = Console(reader.write_end, loop)
        plumbing = Plumbing(loop, console, console, never, None, LogFilters(stdout=("loss", "lr")))
        to = Destination(stdout_file=str(tmp_path / "stdout.log"), prefixed=True)
        output = plumbing.open(to, "trainer", rank=9, local_rank=1, filtered_dir=str(tmp_path))
        written = b"loss 3\nhello\nlr 0.1\nunfinished"
        os.write(output.streams[1].write_end, written)
        output.start()
        output.close()
        plumbing.end_world()
        console.close()
        assert (tmp_path / "stdout.log").read_bytes() == written
        assert (tmp_path / "filtered_stdout.log").read_bytes() == b"[trainer1]:loss 3\n[trainer1]:lr 0.1\n"
        shown = b"[trainer1]:loss 3\n[trainer1]:hello\n[trainer1]:lr 0.1\n[trainer1]:unfinished\n"
        assert reader.rest() == shown

    in_a_loop(test)


def test_a_stream_waits_for_a_full_console_and_then_goes_on() -> None:
    async def test(loop: asyncio.AbstractEventLoop) -> None:
        reader = Reader()
        console = Console(reader.write_end, loop)
        console.write(b"x" * HIGH_WATER_BYTES)
        stream = Stream(loop, as_terminal=False, like_fd=1)
        stream.to_console(console, b"")
        os.write(stream.write_end, b"from the rank")
        stream.start()
        await asyncio.sleep(0)  # the loop looks at the stream; it must leave it alone
        assert console.is_full(lambda: None)
        reader.start()
        await room_in(console)
        stream.close()
        console.close()
        assert reader.rest() == b"x" * HIGH_WATER_BYTES + b"from the rank"

    in_a_loop(test)


def test_a_terminal_changes_nothing_on_the_way() -> None:
    async def test(loop: asyncio.AbstractEventLoop) -> None:
        reader = Reader()
        reader.start()
        console = Console(reader.write_end, loop)
        stream = Stream(loop, as_terminal=True, like_fd=1)
        stream.to_console(console, b"")
        assert os.isatty(stream.write_end)
        os.write(stream.write_end, b"50%\r100%\n\x03\t\x1b[1mdone\n")
        stream.start()
        stream.close()
        console.close()
        assert reader.rest() == b"50%\r100%\n\x03\t\x1b[1mdone\n"

    in_a_loop(test)
