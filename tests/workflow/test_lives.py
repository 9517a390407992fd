"""One life of a task: begun once however many try, told to end at any moment, found again for what it is."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast import linux
from holdfast.workflow.lives import MARK, Life
from workflow.flows import Here

WAIT_S = 40.0


@pytest.fixture(params=[True, False])
def life(request: pytest.FixtureRequest) -> Iterator[Life]:
    folder = Path(tempfile.mkdtemp(dir="/var/tmp", prefix="holdfast-test-"))
    life = Life(folder / "1", private=request.param)
    life.make()
    yield life
    life.sweep()
    shutil.rmtree(folder)


def start(life: Life, script: str) -> subprocess.Popen[bytes]:
    return life.start(["bash", "-c", script], {**os.environ, "OUT": str(life.folder.parent)})


def until(path: Path) -> None:
    end_s = time.monotonic() + WAIT_S
    while not path.exists():
        assert time.monotonic() < end_s
        time.sleep(0.005)


def test_of_many_who_begin_it_one_does(life: Life) -> None:
    shells: list[subprocess.Popen[bytes]] = []
    several = [
        threading.Thread(target=lambda: shells.append(start(life, "echo x >> $OUT/begun; read < $OUT/end; exit 5")))
        for _ in range(8)
    ]
    os.mkfifo(life.folder.parent / "end")
    for one in several:
        one.start()
    for one in several:
        one.join()
    until(life.folder.parent / "begun")
    assert life.pid() in [shell.pid for shell in shells]
    (life.folder.parent / "end").write_text("now\n")
    for shell in shells:
        shell.wait(WAIT_S)
    assert (life.folder.parent / "begun").read_text() == "x\n" and life.code() == 5


def test_told_to_end_at_any_moment(life: Life) -> None:
    """Also before there is anybody to hear it, and whatever it is told, it hears once."""
    shell = start(life, "trap 'echo told >> $OUT/told; exit 3' TERM; echo > $OUT/set; sleep 300 & wait")
    begun_s = time.monotonic()
    while shell.poll() is None and time.monotonic() < begun_s + WAIT_S:
        life.ask()
        time.sleep(0.001)
    told = life.folder.parent / "told"
    assert life.code() == (3 if told.exists() else 143)  # of its own, or of a shell that had not set its trap
    assert not told.exists() or told.read_text() == "told\n"


def test_it_is_its_own_process_and_no_other_of_that_number(life: Life) -> None:
    shell = start(life, "echo > $OUT/set; sleep 300")
    until(life.folder.parent / "set")
    said = (life.folder / "pid").read_text()
    assert life.pid() == shell.pid
    boot = linux.read("/proc/sys/kernel/random/boot_id").strip()
    for other in (said.replace(boot, boot[::-1]), said.replace(f"{shell.pid} ", f"{os.getpid()} ", 1), "", "nobody\n"):
        (life.folder / "pid").write_text(other)
        assert life.pid() is None
    (life.folder / "pid").write_text(said)
    life.kill()
    assert shell.wait(WAIT_S) == 0 and life.code() == 137 and life.pid() is None


def test_nobody_may_begin_it_any_more(life: Life) -> None:
    assert life.forbid() and not life.forbid()
    assert start(life, "echo x > $OUT/begun").wait(WAIT_S) == 0
    assert life.pid() is None and not (life.folder.parent / "begun").exists()


def test_what_is_left_of_it_is_swept(life: Life) -> None:
    shell = start(life, "setsid sleep 300 & echo > $OUT/set; wait")
    until(life.folder.parent / "set")
    shell.kill()  # nobody writes down how it ended
    life.sweep()
    assert life.code() is None
    assert not linux.bearers(f"{MARK}={life.folder}".encode())


def test_a_shell_that_is_slow_to_begin(tmp_path: Path) -> None:
    """A runner is killed before it has; the next one begins the life, and the slow one does not."""
    with Here(tmp_path) as here:
        (tmp_path / "bin").mkdir()
        slow = tmp_path / "bin" / "sh"
        slow.write_text(f'#!/bin/bash\necho slow >> {here.outside}/slow\nsleep 0.7\nexec /bin/sh "$@"\n')
        slow.chmod(0o755)
        path = here.file("""
            workflow:
              name: w
              tasks: [{name: a, command: [bash, -c, "echo begun >> SAID; sleep 1"]}]
        """)
        usual = here.env["PATH"]
        here.env["PATH"] = f"{tmp_path}/bin:{usual}"
        runner = here.start("submit", str(path))
        here.until(lambda: (here.outside / "slow").exists())
        here.kill(runner)
        here.env["PATH"] = usual
        assert here.run("resume")[0] == 0
        assert here.told() == "begun\n" and here.left() == []


def test_files_that_a_task_may_have_open(tmp_path: Path) -> None:
    """As many as whoever submits it; the runner itself may need more."""
    with Here(tmp_path) as here:
        path = here.file("""
            workflow:
              name: w
              groups:
              - name: g
                barrier: false
                tasks:
                {% for i in range(40) %}
                - {name: t{{i}}, command: [bash, -c, "ulimit -S -n >> SAID; sleep 0.5"], lead: {{ i == 0 }} }
                {% endfor %}
        """)
        command = f"ulimit -S -n 32; exec {here.python} -m holdfast workflow submit {path}"
        done = subprocess.run(["sh", "-c", command], env=here.env, capture_output=True, text=True, timeout=WAIT_S)
        assert done.returncode == 0, done.stdout + done.stderr
        assert set(here.told().split()) == {"32"}
