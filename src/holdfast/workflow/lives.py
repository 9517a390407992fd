"""One life of a task on this machine: its folder, its processes, and what is left of them.

Nobody has to be there while it runs: a shell waits for the task and writes its exit code down. Whoever comes later
finds it by the number and the start time of that shell, which writes these itself, once: of two who would start the
same life, one does.

    tasks/<task>/<attempt>/
      tmp/                     what the task sees as /tmp
      tmp/.holdfast/inputs/N   what was fetched
      tmp/.holdfast/output
      stdout, stderr
      pid          of the shell, as soon as it runs: as the kernel tells of it, and of which boot
      exit         the code, when all is over
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from holdfast import linux

# A signal ends a wait, also one that has just seen the child's end; another one tells of that then. 127: it was told.
_WAIT = """
wait $child; code=$?
while kill -0 $child 2>/dev/null; do wait $child; code=$?; done
wait $child; last=$?
[ $last = 127 ] || code=$last
"""

# The first process of the task's own namespace: whatever it leaves behind ends with it. The first process of a
# namespace gets no signal that it has no handler for, so the task itself is its child. It is told to end again and
# again, and the task hears of it once: when it has a group, it is there to hear it.
_FIRST = (
    """
child= told=
trap '[ -n "$told" ] || ! kill -TERM -$child 2>/dev/null || told=1' TERM
setsid "$@" &
child=$!
"""
    + _WAIT
    + "exit $code\n"
)

# $1: the life's folder. $2: where its output goes. $3: how many files the task may have open. The rest is the command.
# With noclobber the first to write `pid` is the one who runs. It starts no program of its own, which whoever ends the
# task could take for a part of it.
_SHELL = (
    """
cd "$1" || exit 1
read -r stat < /proc/$$/stat
read -r boot < /proc/sys/kernel/random/boot_id
set -C
{ echo "$stat" "$boot" > pid; } 2>/dev/null || exit 0
set +C
exec >/dev/null
out=$2
ulimit -S -n "$3"
shift 3
"$@" </dev/null >"$out/stdout" 2>"$out/stderr" &
child=$!
trap 'kill -TERM $child 2>/dev/null' TERM
"""
    + _WAIT
    + "echo $code > exit\n"
)


MARK = "HOLDFAST_LIFE"  # in the environment of all that comes of one
SETTLES_S = 1.0  # who has begun a life says so; it is the matter of a moment
OPEN_FILES = resource.getrlimit(resource.RLIMIT_NOFILE)[0]  # a runner of many tasks may have more
_TMP = re.compile(r"(?<![\w/.-])/tmp(?![\w.-])")


class Life:
    def __init__(self, folder: Path, private: bool, out: Path | None = None) -> None:
        """`private`: the kernel lets it have processes and a /tmp of its own. `out`: the folder for what it prints, if
        that is another."""
        self.folder = folder
        self._out = out or folder
        self.private = private

    # -- before -------------------------------------------------------------------------------------------------------

    def make(self) -> None:
        """A fresh folder. What an earlier try to prepare it has left is of no use."""
        if self.folder.exists():
            shutil.rmtree(self.folder)
        for name in ("inputs", "output"):
            (self.folder / "tmp" / ".holdfast" / name).mkdir(parents=True)

    def path(self, seen: str) -> Path:
        """Where a path that the task sees is: below /tmp, in its own folder."""
        if seen == "/tmp" or seen.startswith("/tmp/"):
            return self.folder / seen.lstrip("/")
        return Path(seen)

    def text(self, text: str) -> str:
        """What the task is given to read. Without a /tmp of its own, its folder is named instead."""
        return text if self.private else _TMP.sub(str(self.folder / "tmp"), text)

    def own(self, name: str) -> str:
        """As the task sees a folder of ours."""
        return self.text(f"/tmp/.holdfast/{name}")

    def put(self, seen: str, content: bytes) -> None:
        path = self.path(seen)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Returns when it has begun, here or by somebody else."""
        inner = ["sh", "-c", _FIRST, "task", *command]
        if self.private:
            mounts = " && ".join([*self._mounts(), 'exec "$@"'])
            # Whoever signals all there is (Slurm does) would end the namespace with its maker, at once.
            inner = [
                "env", "--ignore-signal=TERM",
                *_unshare(), "env", "--default-signal=TERM", "sh", "-c", mounts, "mount", *inner,
            ]  # fmt: skip
        shell = subprocess.Popen(
            ["sh", "-c", _SHELL, "life", str(self.folder), str(self._out), str(OPEN_FILES), *inner],
            env={**environment, MARK: str(self.folder)},
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert shell.stdout is not None
        with shell.stdout as pipe:
            pipe.read()  # which it closes when it has said who it is
        self.settle()
        return shell

    def settle(self) -> None:
        """Wait until it is said who has begun it, if somebody does so at this moment."""
        end_s = time.monotonic() + SETTLES_S
        with contextlib.suppress(FileNotFoundError):
            while not (self.folder / "pid").stat().st_size and time.monotonic() < end_s:
                time.sleep(0.001)

    def _mounts(self) -> list[str]:
        """Its own /tmp in the place of the machine's, but for what Python runs from, wherever that is."""
        mine = shlex.quote(str(self.folder / "tmp"))
        said = []
        for path in {sys.prefix, sys.base_prefix, str(Path(__file__).resolve().parents[2])}:
            if path.startswith("/tmp/"):
                seen = mine + shlex.quote(path.removeprefix("/tmp"))
                said += [f"mkdir -p {seen}", f"mount --bind {shlex.quote(path)} {seen}"]
        return [*said, f"mount --rbind {mine} /tmp"]

    def forbid(self) -> bool:
        """Nobody may begin it any more. False if it has begun."""
        try:
            with open(self.folder / "pid", "x") as file:
                file.write("nobody\n")
        except FileExistsError:
            return False
        except FileNotFoundError:
            pass  # not even its folder is there
        return True

    # -- while it runs ------------------------------------------------------------------------------------------------

    def pid(self) -> int | None:
        """Of its shell, if it is still that one."""
        try:
            said = (self.folder / "pid").read_text()
            number = int(said.split(" ", 1)[0])
            now = linux.read(f"/proc/{number}/stat") + linux.read("/proc/sys/kernel/random/boot_id")
        except (FileNotFoundError, ProcessLookupError, ValueError):
            return None  # no other error: one that cannot be looked at is not gone
        here, then = (text.rpartition(")")[2].split() for text in (now, said))
        return number if here[0] not in "ZX" and (here[19], here[-1]) == (then[19], then[-1]) else None

    @property
    def has_begun(self) -> bool:
        return (self.folder / "pid").exists()

    def ask(self) -> None:
        """It to end. It may be too early for that to be heard, and it may be asked again."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """All of it. Its shell stays, to write down how it ended."""
        if (pid := self.pid()) is None:
            return
        for child in _below(pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)

    def _signal(self, signum: int) -> None:
        if (pid := self.pid()) is not None:
            for child in linux.children(pid):
                for first in linux.children(child) if self.private else [child]:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(first, signum)

    # -- after --------------------------------------------------------------------------------------------------------

    def sweep(self) -> None:
        sweep([self.folder])

    def code(self) -> int | None:
        """None: nobody has written it down, because even its shell was killed."""
        try:
            return int((self.folder / "exit").read_text())
        except (FileNotFoundError, ValueError):
            return None


def sweep(folders: Collection[Path]) -> None:
    """End what is left of lives: what has left its tree where that has no namespace, or all of it where its shell was
    killed. They know whose they are."""
    marks = [f"{MARK}={folder}".encode() for folder in folders]
    spared: set[int] = set()  # of another user, by now
    while left := [pid for pid in linux.bearers(*marks) if pid not in spared]:
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            except PermissionError:
                spared.add(pid)
        for pid in left:
            if pid not in spared:
                _wait_for(pid)


def _below(pid: int) -> list[int]:
    """All processes that came of it, the last first."""
    found: list[int] = []
    for child in linux.children(pid):
        found += [*_below(child), child]
    return found


def _wait_for(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        fd = os.pidfd_open(pid)
        try:
            select.select([fd], [], [], 10.0)
        finally:
            os.close(fd)


def can_be_private() -> bool:
    """Whether this machine lets us make namespaces."""
    return subprocess.run([*_unshare(), "true"], capture_output=True, check=False).returncode == 0


def _unshare() -> list[str]:
    """Who is not root makes mounts as one that is, in a namespace of users in which all keep their names."""
    user = ["--user", "--map-current-user", "--keep-caps"] if os.geteuid() != 0 else []
    kinds = ["--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--propagation=private"]
    return ["unshare", *user, *kinds]
