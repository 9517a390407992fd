"""A real Slurm on one machine: a controller and three nodes, of this test alone."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from holdfast import linux
from ports import free_port

NODES = ("n1", "n2", "n3")
DEADLINE_S = 60.0
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")

CONF = """
ClusterName=holdfast
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0
JobRequeue=1
KillWait=10
SlurmdTimeout=60
ReturnToService=1
MpiDefault=none
MailProg=/bin/true
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    def __init__(self, folder: Path) -> None:
        if missing := [name for name in PROGRAMS if _find(name) is None]:
            if os.environ.get("HOLDFAST_CI") == "1":
                pytest.fail(f"HOLDFAST_CI=1 and no {missing[0]}: tools/system-packages installs Slurm")
            pytest.skip(f"there is no {missing[0]}: tools/system-packages installs Slurm where it may")
        if os.geteuid() != 0:
            pytest.skip("slurmd needs root")
        self.folder = folder
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._configure()
        self._start_munge()
        self.start_controller()
        for name in NODES:
            self.start_node(name)
        self.wait_for_nodes()

    def _configure(self) -> None:
        (self.folder / "state").mkdir(parents=True)
        os.chmod(self.folder, 0o755)  # munge wants to know that nobody else writes here
        ports = [free_port() for _ in range(1 + len(NODES))]
        host = socket.gethostname().partition(".")[0]
        nodes = [
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.1.{at + 1} Port={ports[at + 1]} CPUs=2 RealMemory=2000"
            for at, name in enumerate(NODES)
        ]
        conf = CONF.format(folder=self.folder, host=host, port=ports[0], nodes="\n".join(nodes))
        (self.folder / "slurm.conf").write_text(conf)

    def _start_munge(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        paths = [f"--{name}={self.folder}/munge.{end}" for name, end in _MUNGE.items()]
        self._start("munged", ["--foreground", "--force", *paths])
        _until(lambda: (self.folder / "munge.socket").exists(), "munge's socket")

    def start_controller(self) -> None:
        self._start("slurmctld", ["-D", "-f", str(self.folder / "slurm.conf")])

    def start_node(self, name: str) -> None:
        self._start("slurmd", ["-D", "-N", name, "-f", str(self.folder / "slurm.conf")], name)

    def stop(self, name: str) -> None:
        """'slurmctld', 'munged', or a node's name. Steps of a node stay."""
        process = self._processes.pop(name)
        process.terminate()
        process.wait(DEADLINE_S)

    def kill(self, name: str) -> None:
        process = self._processes.pop(name)
        process.kill()
        process.wait(DEADLINE_S)

    def clear(self) -> None:
        """No jobs, and all nodes in order."""
        self.run("scancel", "--user=root")
        self.run("scancel", "--user=root", "--signal=KILL", "--full")
        for name in NODES:
            self.run("scontrol", "update", f"nodename={name}", "state=resume", check=False)
        self.wait_for_nodes()

    def logs(self) -> str:
        """The last of what the controller and its nodes have written."""
        paths = sorted(self.folder.glob("slurm*.log"))
        return "\n".join(f"{path.name}:\n" + "\n".join(path.read_text().splitlines()[-60:]) for path in paths)

    def close(self) -> None:
        for name in (*NODES, "slurmctld", "munged"):
            if name in self._processes:
                self.kill(name)  # nobody needs what they would write at their end
        self._end_steps()

    def _end_steps(self) -> None:
        """Those of this Slurm: they would try for minutes to tell a controller that is gone how they ended."""
        mark = f"SLURM_CONF={self.environment['SLURM_CONF']}".encode()
        linux.signal_all(linux.bearers(mark), signal.SIGKILL)

    def run(self, *command: str, check: bool = True) -> str:
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
        if check and done.returncode != 0:
            raise AssertionError(f"{' '.join(command)}: {done.stderr}")
        return done.stdout

    def wait_for_nodes(self) -> None:
        def idle() -> bool:
            return self.run("sinfo", "-h", "-N", "-o", "%T", check=False).split() == ["idle"] * len(NODES)

        _until(idle, "idle nodes")

    def _start(self, program: str, args: list[str], name: str = "") -> None:
        name = name or program
        path = _find(program)
        assert path is not None
        with open(self.folder / f"{name}.out", "ab") as out:
            self._processes[name] = subprocess.Popen(
                [path, *args],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                preexec_fn=partial(linux.die_with_parent, os.getpid()),  # also of one that is killed
            )


_MUNGE = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}


def _find(program: str) -> str | None:
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def _until(happens: Callable[[], bool], what: str) -> None:
    """Slurm has no event to wait for."""
    end_s = time.monotonic() + DEADLINE_S
    while not happens():
        assert time.monotonic() < end_s, f"no {what} within {DEADLINE_S} s"
        time.sleep(0.05)


@contextmanager
def slurm(folder: Path) -> Iterator[Slurm]:
    made = Slurm(folder)
    try:
        yield made
    finally:
        made.close()
