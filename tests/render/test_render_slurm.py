"""The sbatch file, run by a real bash. srun, scancel and scontrol are stand-ins; processes and signals are real."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli.render import read
from holdfast.render.slurm import Batch, render

WAIT_S = 60.0
NASTY = ["a b", "it's", '"q"', "$HOME", "`id`", "$(id)", "\\", "*", "", "a\nb", "#SBATCH", "ü", "!x", "&", "--x=y z"]

# Starts the tasks, each with its place, and ends with the highest of their codes.
SRUN = """
import json, os, subprocess, sys
words = sys.argv[1:]
at = words.index("holdfast")
[count] = [int(word.partition("=")[2]) for word in words[:at] if word.startswith("--ntasks=")]
with open("srun.json", "w") as file:
    json.dump(words, file)
def start(place):
    return subprocess.Popen(words[at:], env={**os.environ, "SLURM_PROCID": str(place)})
tasks = [start(place) for place in range(count)]
with open("tasks", "w") as file:
    file.write("".join(f"{task.pid}\\n" for task in tasks))
os.rename("tasks", "tasks.now")
codes = [task.wait() for task in tasks]
sys.exit(max(code if code >= 0 else 128 - code for code in codes))
"""

# Signals the tasks, and not srun.
SCANCEL = """
import os, signal, sys, time
assert sys.argv[1:] == ["--signal=TERM", os.environ["SLURM_JOB_ID"]], sys.argv
while not os.path.exists("tasks.now"):
    time.sleep(0.01)
for line in open("tasks.now"):
    os.kill(int(line), signal.SIGTERM)
"""

SCONTROL = """
import os, signal, sys
if sys.argv[1] == "show":
    assert sys.argv[2:] == ["hostnames", os.environ["SLURM_JOB_NODELIST"]]
    if os.environ.get("EARLY"):
        os.kill(int(os.environ["BATCH"]), signal.Signals[os.environ["EARLY"]])
    print("127.0.0.1\\n127.0.0.2")
else:
    with open("requeued", "a") as file:
        print(*sys.argv[1:], file=file)
"""

# Tells what it was given, and ends when it is told to, with the code that the test wants: above 128, by that signal.
HOLDFAST = """
import json, os, signal, sys, time
def end(*_):
    if os.environ.get("SAVES"):
        open("heard again" if os.path.exists("saving") else "saving", "w").close()
        while not os.path.exists("release"):
            time.sleep(0.01)
    code = int(os.environ["CODE"])
    if code > 128:
        if code - 128 != signal.SIGKILL:
            signal.signal(code - 128, signal.SIG_DFL)
        os.kill(os.getpid(), code - 128)
    os._exit(code)
signal.signal(signal.SIGTERM, end)
with open("draft", "w") as file:
    json.dump({"argv": sys.argv[1:], "env": dict(os.environ)}, file)
os.rename("draft", "holdfast.json")
if os.environ.get("ENDS"):
    end()
while True:
    signal.pause()
"""


class Batched:
    """The file, and a folder in which it runs as under Slurm."""

    def __init__(self, folder: Path, text: str, holdfast: bool = True) -> None:
        self.folder = folder
        self._file = folder / "job.sbatch"
        self._file.write_text(text)
        self._programs = folder / "bin"
        self._programs.mkdir()
        for name, source in (("srun", SRUN), ("scancel", SCANCEL), ("scontrol", SCONTROL)):
            self._put(name, source)
        if holdfast:
            self._put("holdfast", HOLDFAST)
        self.process: subprocess.Popen[str] | None = None

    def _put(self, name: str, source: str) -> None:
        path = self._programs / name
        path.write_text(f"#!{sys.executable}\n{source}")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def start(self, nodes: int = 1, job_id: int = 4242, **env: str) -> None:
        path = [str(self._programs), str(Path(sys.executable).parent), os.environ["PATH"]]
        slurm = {"SLURM_JOB_ID": str(job_id), "SLURM_JOB_NODELIST": "n[1-9]", "SLURM_JOB_NUM_NODES": str(nodes)}
        command = ["bash", "-c", 'BATCH=$$ exec bash "$0"', str(self._file)]
        self.process = subprocess.Popen(
            command,
            cwd=self.folder,
            env={**os.environ, "PATH": os.pathsep.join(path), **slurm, "CODE": "0", **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def signal(self, name: str) -> None:
        assert self.process is not None
        os.kill(self.process.pid, signal.Signals[name])

    def wait(self) -> int:
        assert self.process is not None
        self.output, _ = self.process.communicate(timeout=WAIT_S)
        return self.process.returncode

    def until(self, name: str) -> None:
        """One of the programs has written that file."""
        end_s = time.monotonic() + WAIT_S
        while not (self.folder / name).exists():
            assert self.process is not None and self.process.poll() is None, self.process and self.process.communicate()
            assert time.monotonic() < end_s, f"no {name} within {WAIT_S} s"
            time.sleep(0.01)

    def told(self, name: str = "holdfast.json") -> Any:
        return json.loads((self.folder / name).read_text())

    def requeues(self) -> list[str]:
        path = self.folder / "requeued"
        return path.read_text().splitlines() if path.exists() else []

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.communicate()


@pytest.fixture
def batched(tmp_path: Path) -> Iterator[Batched]:
    made = Batched(tmp_path, render(read(["--nnodes=2", "train.py", *NASTY]), Batch()))
    yield made
    made.close()


def options(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH ")]


# -- the file ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [
        ["train.py"],
        ["--standalone", "--nproc-per-node=2", "train.py"],
        ["--nnodes=2:4", "--spares=1", "train.py", *NASTY],
        ["--nnodes=2", "--rdzv-backend=etcd", "--rdzv-endpoint=e1,e2", "--insecure", "-m", "my.train"],
    ],
)
def test_bash_can_read_it(command: list[str]) -> None:
    text = render(read(command), Batch(time="4:00:00"))
    done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert text.startswith("#!/bin/bash\n")


def test_what_is_asked_of_slurm() -> None:
    job = read(["--nnodes=2:4", "--spares=1", "--nproc-per-node=8", "--shutdown-timeout=300", "train.py"])
    assert options(render(job, Batch("run7", "4:00:00", "a100", cpus=64))) == [
        *("job-name=run7", "partition=a100", "time=4:00:00", "nodes=3-5", "gpus-per-node=8"),
        *("cpus-per-task=64", "output=%x-%j.log", "open-mode=append", "requeue", "no-kill", "signal=B:USR1@330"),
    ]
    assert options(render(read(["--nproc-per-node=cpu", "train.py"]), Batch())) == [
        *("job-name=holdfast", "nodes=1", "exclusive", "mem=0", "output=%x-%j.log"),
        *("open-mode=append", "requeue", "signal=B:USR1@120"),
    ]


def test_a_node_that_is_lost_ends_the_job_only_where_it_is_needed() -> None:
    assert "--no-kill" not in render(read(["--nnodes=2", "train.py"]), Batch())
    assert render(read(["--nnodes=2", "--spares=1", "train.py"]), Batch()).count("--no-kill") == 2


# -- what it runs -----------------------------------------------------------------------------------------------------


def test_holdfast_hears_every_word_as_it_was_written(batched: Batched) -> None:
    batched.start(SLURM_RESTART_COUNT="2", ENDS="at once")
    assert batched.wait() == 0, batched.output
    assert batched.told()["argv"] == [
        *("run", "--exit-code-from-cause", "--shutdown-timeout=90"),
        *("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:24242", "--rdzv-id=4242-2"),
        *("--nnodes=2", "train.py", *NASTY),
    ]


def test_the_secret_is_new_at_every_start_and_on_no_command_line(batched: Batched) -> None:
    seen = set()
    for _ in range(2):
        batched.start(ENDS="at once")
        assert batched.wait() == 0, batched.output
        secret = batched.told()["env"]["HOLDFAST_SECRET"]
        assert re.fullmatch("[0-9a-f]{64}", secret)
        assert secret not in json.dumps(batched.told("srun.json"))
        assert "--export=ALL" in batched.told("srun.json")
        seen.add(secret)
    assert len(seen) == 2


def test_what_the_command_says_is_left_to_it(tmp_path: Path) -> None:
    command = ["--nnodes=2", "--rdzv-backend=etcd", "--rdzv-endpoint=e1,e2", "--rdzv-id=mine", "--secret-file=s"]
    command += ["--exit-code-from-cause", "--shutdown-timeout=5", "train.py"]
    batched = Batched(tmp_path, render(read(["holdfast", "run", *command]), Batch()))
    batched.start(ENDS="at once")
    assert batched.wait() == 0, batched.output
    assert batched.told()["argv"] == ["run", *command]
    assert "HOLDFAST_SECRET" not in batched.told()["env"]


@pytest.mark.parametrize("code", [0, 81, 137])
def test_its_exit_code_is_the_jobs(batched: Batched, code: int) -> None:
    batched.start(ENDS="at once", CODE=str(code))
    assert batched.wait() == code
    assert batched.requeues() == []


# -- signals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [87, 81, 143])
def test_before_its_time_is_over_it_is_drained_and_requeued(batched: Batched, code: int) -> None:
    batched.start(CODE=str(code))
    batched.until("holdfast.json")
    batched.signal("SIGUSR1")
    assert batched.wait() == code, batched.output
    assert batched.requeues() == ["requeue 4242"]


@pytest.mark.parametrize("code", [0, 93])
def test_what_is_finished_or_asked_to_end_is_not_requeued(batched: Batched, code: int) -> None:
    batched.start(CODE=str(code))
    batched.until("holdfast.json")
    batched.signal("SIGUSR1")
    assert batched.wait() == code, batched.output
    assert batched.requeues() == []


def test_who_is_cancelled_ends_in_order_and_is_not_requeued(batched: Batched) -> None:
    batched.start(CODE="87")
    batched.until("holdfast.json")
    batched.signal("SIGTERM")
    assert batched.wait() == 87, batched.output
    assert batched.requeues() == []


def test_who_is_cancelled_while_it_saves_is_not_requeued(batched: Batched) -> None:
    batched.start(CODE="87", SAVES="until released")
    batched.until("holdfast.json")
    batched.signal("SIGUSR1")
    batched.until("saving")
    batched.signal("SIGTERM")
    batched.until("heard again")
    (batched.folder / "release").touch()
    assert batched.wait() == 87, batched.output
    assert batched.requeues() == []


def test_many_warnings_are_one_requeue(batched: Batched) -> None:
    batched.start(CODE="87", SAVES="until released")
    batched.until("holdfast.json")
    for _ in range(5):
        batched.signal("SIGUSR1")
        batched.until("saving")
    (batched.folder / "release").touch()
    assert batched.wait() == 87, batched.output
    assert batched.requeues() == ["requeue 4242"]


@pytest.mark.parametrize(("name", "requeues"), [("SIGUSR1", ["requeue 4242"]), ("SIGTERM", [])])
def test_a_signal_before_there_are_tasks_is_not_lost(batched: Batched, name: str, requeues: list[str]) -> None:
    batched.start(CODE="87", EARLY=name)
    assert batched.wait() in (87, 143), batched.output  # 143: before its handler was there
    assert batched.requeues() == requeues


# -- with a real holdfast ---------------------------------------------------------------------------------------------

TRAINS = """
import sys, time
import torch, torch.distributed as dist
import holdfast
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
checkpointer = holdfast.Checkpointer("checkpoints", {"model": model, "optimizer": optimizer})
found = checkpointer.restore()
step = found.step if found else 0
with open(f"began-{dist.get_rank()}", "a") as file:
    print(step, file=file)
while step < 8 if found else True:
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
    step += 1
    checkpointer.step(step)
    if step == 3:
        open("steps", "w").close()
    time.sleep(0.01)
checkpointer.save(step)
dist.destroy_process_group()
"""


@pytest.mark.long
def test_two_agents_save_are_requeued_and_go_on(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINS)
    batched = Batched(tmp_path, render(read(["--nnodes=2", "train.py"]), Batch()), holdfast=False)
    try:
        batched.start(nodes=2, job_id=_job_id())
        batched.until("steps")
        batched.signal("SIGUSR1")
        assert batched.wait() == 87, batched.output
        assert "all ranks saved and ended by themselves" in batched.output
        assert len(batched.requeues()) == 1
        batched.start(nodes=2, job_id=_job_id(), SLURM_RESTART_COUNT="1")
        assert batched.wait() == 0, batched.output
    finally:
        batched.close()
    for rank in (0, 1):
        first, then = (tmp_path / f"began-{rank}").read_text().split()
        assert int(first) == 0 and int(then) >= 3
    assert len(batched.requeues()) == 1


def _job_id() -> int:
    """One whose port is free: 20000 and the last four digits."""
    for number in range(os.getpid() % 9000, 10000):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", 20000 + number)):
            return 10000 + number
    raise AssertionError("no free port")
