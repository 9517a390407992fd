"""A script that is compiled before it is known when it will run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.wire import messages
from holdfast.worker import programs


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "script.py"
    path.write_text("told = 1\n")
    yield path
    programs._compiled = None


def told(path: Path) -> int:
    found: dict[str, int] = {}
    exec(programs._code(str(path)), found)
    return found["told"]


def test_it_is_compiled_once(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs.prepare(messages.Script(str(script), ()))
    monkeypatch.setattr(programs, "_compile", None)
    assert told(script) == 1


def test_who_mends_it_gets_what_is_there_then(script: Path) -> None:
    programs.prepare(messages.Script(str(script), ()))
    script.write_text("told = 2\n")
    os.utime(script, ns=(1, 1))  # clocks of files are coarse, and this is within one moment
    assert told(script) == 2


def test_one_that_cannot_be_compiled_says_so_when_it_runs(script: Path) -> None:
    script.write_text("told =\n")
    programs.prepare(messages.Script(str(script), ()))
    programs.prepare(messages.Script(str(script.with_name("gone.py")), ()))
    with pytest.raises(SyntaxError):
        told(script)
