"""The line that says how far training is."""

from __future__ import annotations

import io

import pytest

from holdfast.training.progress import Progress, told_s


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Told:
    """Progress by a clock of its own."""

    def __init__(self, out: io.StringIO, restarts: int = 0) -> None:
        self.out = out
        self._now_s = 100.0
        self.progress = Progress(restarts, out, lambda: self._now_s)

    def step(self, step: int, left: int | None, after_s: float = 1.0, loss: float | None = 0.25) -> str:
        """What it writes."""
        self._now_s += after_s
        before = len(self.out.getvalue())
        if self.progress.step(64) or left == 0:
            self.progress.say(step, "1/2", loss, left)
        return self.out.getvalue()[before:]


def test_a_log_has_a_line_every_ten_seconds_and_one_at_the_end() -> None:
    told = Told(io.StringIO(), restarts=2)
    assert [told.step(step, 2000 - step) for step in range(1, 11)] == [""] * 10
    assert told.step(11, 1989) == (
        "holdfast: step 11   epoch 1/2   loss 0.25   64 samples/s   33 min left   2 restarts\n"
    )
    assert told.step(12, 1) == ""
    assert told.step(13, 0, loss=None) == "holdfast: step 13   epoch 1/2   64 samples/s   2 restarts\n"
    told.progress.end()
    assert told.out.getvalue().count("\n") == 2


def test_a_terminal_has_one_line_that_is_written_over() -> None:
    told = Told(Terminal(), restarts=1)
    assert [told.step(1, 9), told.step(2, 8, after_s=0.125)] == ["", ""]
    assert told.step(3, 7, after_s=0.125) == (
        "\r\x1b[Kstep 3   epoch 1/2   loss 0.25   512 samples/s   1 s left   1 restart"
    )
    told.progress.end()
    told.progress.end()
    assert told.out.getvalue().count("\n") == 1 and told.out.getvalue().endswith("\n")


def test_who_is_asked_to_be_quiet_shows_nothing_and_tells_the_record() -> None:
    told: list[int] = []
    now_s = iter(range(100, 200, 20))
    out = io.StringIO()
    progress = Progress(0, out, lambda: float(next(now_s)), lambda step, *_: told.append(step), quiet=True)
    for step in (1, 2, 3):
        if progress.step(64):
            progress.say(step, "1/1", 0.5, 3 - step)
    progress.end()
    assert told == [2, 3] and out.getvalue() == ""


def test_where_no_end_is_known_none_is_told_of() -> None:
    told = Told(io.StringIO())
    assert [told.step(step, None) for step in (1, 2)] == ["", ""]
    assert told.step(1003, None, after_s=9.0) == "holdfast: step 1,003   epoch 1/2   loss 0.25   13 samples/s\n"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "1 s"), (89.5, "90 s"), (600, "10 min"), (7200, "2.0 h"), (200_000, "2.3 days")]
)
def test_times_are_told_as_people_do(seconds: float, text: str) -> None:
    assert told_s(seconds) == text
