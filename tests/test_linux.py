"""What Linux tells of a process in its first moments."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import uuid

from holdfast import linux


def test_an_environment_is_there_as_soon_as_a_process_is_said_to_have_begun() -> None:
    """With more to do than there are cores: who starts one hears of it before the kernel has put its environment in
    place, and a look into /proc finds it empty most of the time."""
    env = {**os.environ, "MARK": uuid.uuid4().hex}
    with contextlib.ExitStack() as others:
        for _ in range(4):
            other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            others.callback(other.wait)
            others.callback(other.kill)
        for _ in range(40):
            process = subprocess.Popen([sys.executable, "-c", "input()"], env=env, stdin=subprocess.PIPE)
            try:
                assert linux.environment(process.pid).count(f"MARK={env['MARK']}".encode()) == 1
            finally:
                process.communicate(b"\n")


def test_one_without_any_is_not_waited_for() -> None:
    with subprocess.Popen(["/bin/cat"], env={}, stdin=subprocess.PIPE) as bare:
        began_s = time.monotonic()
        assert linux.environment(bare.pid) == [b""]
        assert time.monotonic() - began_s < linux._EXEC_S
    assert linux.environment(bare.pid) == []  # nor is one that is gone


def test_bearers_are_others_that_live() -> None:
    mark = f"MARK={uuid.uuid4().hex}"
    env = {**os.environ, "MARK": mark.partition("=")[2]}
    with subprocess.Popen(["/bin/cat"], env=env, stdin=subprocess.PIPE) as one:
        assert linux.bearers(mark.encode(), b"NOBODY=1") == [one.pid]
    assert linux.bearers(mark.encode()) == []
