"""`holdfast doctor` as a command, what ends a check, and what an agent asks before its first world."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from doctoring import WAIT_S, command, environment, examine, hook, package

from holdfast import linux
from holdfast.cli import doctor
from holdfast.doctor.checks import CHECKS, NAMES
from holdfast.doctor.examination import _judge, preflight, refusal
from holdfast.doctor.finding import combine, fail, ok, one_line, size, warn

WRONG = [
    (["--only", "shn"], "--only: 'shn' is not known (did you mean shm?); known are "),
    (["--only", "peer"], "--only peer needs --peer HOST:PORT, a node on which holdfast doctor --serve runs"),
    (
        ["--only", "shm", "--checkpoint-dir", "/x"],
        "--checkpoint-dir is for the check checkpoint, which --only leaves out",
    ),
    (["--peer", "host:port"], "--peer=host:port: HOST:PORT is meant, for example node1:29400"),
    (["--serve", "nowhere"], "--serve=nowhere: PORT or HOST:PORT is meant, for example node1:29400"),
    (["--serve", "29400", "--only", "shm"], "--serve only answers; give --only in a second command"),
    (["--limit", "0"], "--limit=0: a number of seconds above 0 is meant"),
    (["--port", "70000"], "--port=70000: a port from 1 to 65535 is meant"),
    (["--insecure", "--secret-file", "x"], "--insecure and --secret-file exclude each other"),
]


@pytest.mark.parametrize(("argv", "words"), WRONG, ids=[" ".join(argv) for argv, _ in WRONG])
def test_wrong_use(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(argv) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"holdfast doctor: {words}")
    assert said.count("\n") == 1


def test_help_names_every_check(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        doctor.main(["--help"])
    said = capsys.readouterr().out
    assert left.value.code == 0
    assert all(f"\n  {check.name:11} {check.what}\n" in said for check in CHECKS)


def test_what_a_person_sees(tmp_path: Path) -> None:
    flags = ("--only", "limits", "torch", "matmul")
    env = environment(tmp_path, **package(tmp_path, "torch", "raise ImportError('gone')"))
    ran = subprocess.run(command(*flags), env=env, capture_output=True, text=True, timeout=WAIT_S)
    lines = ran.stdout.splitlines()
    assert ran.returncode == 1
    assert "fail    torch       torch cannot be imported: ImportError: gone" in lines
    assert f"{'':20}next: install it anew in this environment" in lines
    assert "skipped matmul      torch has failed, which this needs" in lines
    assert lines[-1].startswith("1 ok, 1 fail, 1 skipped, in ") or "1 warn" in lines[-1]


def test_values() -> None:
    both = combine([ok("fine", a=1), warn("odd", "look"), fail("bad", "mend", b=2), fail("worse", "")])
    assert (both.state, both.text, both.cure, both.figures) == ("fail", "bad; worse", "mend", {"a": 1, "b": 2})
    assert one_line("a\x1b[31m\r\nb\u202e") == "a?[31m b?"
    assert len(one_line("x" * 1000)) == 300
    assert [size(n) for n in (5, 2048, 3 << 20, 80 << 30, 5 << 40)] == [
        "5 bytes",
        "2.0 KiB",
        "3.0 MiB",
        "80 GiB",
        "5.0 TiB",
    ]


# -- a check that hangs -----------------------------------------------------------------------------------------------


HANGS = """
import os
if os.environ.get("FORKS"):
    os.fork()
open(PIPE).read()
"""


@pytest.fixture
def hanging(tmp_path: Path) -> Iterator[tuple[dict[str, str], Path]]:
    """torch on a disk that does not answer: its import reads from a pipe into which nobody writes. The pipe can be
    opened to write once the import has begun."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    mark = uuid.uuid4().hex
    yield package(tmp_path, "torch", HANGS.replace("PIPE", repr(str(pipe)))) | {"MARK": mark}, pipe
    linux.signal_all(linux.bearers(f"MARK={mark}".encode()), signal.SIGKILL)


def test_a_check_that_hangs_is_cut_off_with_all_that_it_has_started(
    tmp_path: Path, hanging: tuple[dict[str, str], Path]
) -> None:
    env, _ = hanging
    report = examine(tmp_path, "--only", "torch", "--limit", "1.5", env=env | {"FORKS": "1"})
    assert (report["torch"].state, report["torch"].text) == ("fail", "no answer within 1.5 s")
    wait_for_the_end_of(env["MARK"])


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_a_doctor_that_is_ended_takes_its_checks_along(
    tmp_path: Path, hanging: tuple[dict[str, str], Path], signum: signal.Signals
) -> None:
    env, pipe = hanging
    process = subprocess.Popen(command("--only", "torch"), env=environment(tmp_path, **env), stderr=subprocess.PIPE)
    try:
        writer = os.open(pipe, os.O_WRONLY)  # returns when the check has come as far as that, and it reads for ever
        process.send_signal(signum)
        assert process.wait(WAIT_S) != 0
        wait_for_the_end_of(env["MARK"])
        os.close(writer)
    finally:
        process.kill()
        process.communicate()


def wait_for_the_end_of(mark: str) -> None:
    for pid in linux.bearers(f"MARK={mark}".encode()):
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        assert select.select([fd], [], [], WAIT_S)[0], f"process {pid} is left"
        os.close(fd)


def test_a_process_that_cannot_be_killed_is_left_behind_with_a_word() -> None:
    """It waits in the kernel for a disk, and no test may have one like that."""
    found = _judge(CHECKS[0], None, None, gone=False, limit_s=5, words="")
    assert found.text == "no answer within 5 s, and its process cannot be killed: it waits in the kernel"


# -- before a world ---------------------------------------------------------------------------------------------------


def test_a_node_that_is_well_is_not_kept_out(tmp_path: Path) -> None:
    found = asyncio.run(preflight(str(tmp_path), str(tmp_path / "run"), env=environment(tmp_path)))
    assert refusal(found) == ""
    states = {finding.check: finding.state for finding in found}
    alone = ["limits", "shm", "clock", "disk", "checkpoint", "torch", "gpu", "matmul", "collective", "nccl"]
    assert list(states) == alone
    assert [states[name] for name in ("torch", "matmul", "collective")] == ["ok"] * 3
    if not torch.cuda.is_available():
        assert states["gpu"] == states["nccl"] == "skipped"


def test_a_node_that_fails_is_kept_out_with_one_line(tmp_path: Path) -> None:
    env = environment(tmp_path, **package(tmp_path, "torch", "raise ImportError('no CUDA\\nat all')"))
    (tmp_path / "file").write_bytes(b"")
    found = asyncio.run(preflight(checkpoint_dir=str(tmp_path / "file"), env=env))
    why = refusal(found)
    assert why.startswith("checkpoint: ") and why.endswith(" (and 1 more, see holdfast doctor)")
    found = asyncio.run(preflight(env=env))
    assert (
        refusal(found) == "torch: torch cannot be imported: ImportError: no CUDA; install it anew in this environment"
    )


def test_a_name_that_nobody_knows_keeps_a_node_out_if_there_are_others_to_look_it_up(tmp_path: Path) -> None:
    unknown = "import socket\nsocket.gethostname = lambda: 'no-such-host.invalid'\n"
    broken = "raise ImportError('not needed here')"
    env = environment(tmp_path, **package(tmp_path, "torch", broken))
    env["PYTHONPATH"] += f":{hook(tmp_path, unknown)['PYTHONPATH']}"

    def look(alone: bool, **more: str) -> dict[str, str]:
        found = asyncio.run(preflight(env={**env, **more}, alone=alone))
        return {finding.check: finding.text for finding in found if finding.state == "fail"}

    assert "'no-such-host.invalid' cannot be resolved" in look(alone=False)["names"]
    assert look(alone=True).keys() == look(alone=False, GLOO_SOCKET_IFNAME="lo").keys() == {"torch"}


def test_a_preflight_that_is_cancelled_leaves_nothing(tmp_path: Path, hanging: tuple[dict[str, str], Path]) -> None:
    """An agent that is told to stop does not wait for a disk."""
    env, pipe = hanging

    async def scene() -> None:
        task = asyncio.create_task(preflight(env=environment(tmp_path, **env)))
        writer = await asyncio.to_thread(os.open, pipe, os.O_WRONLY)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        os.close(writer)

    asyncio.run(scene())
    wait_for_the_end_of(env["MARK"])


def test_every_check_has_a_limit_and_a_name_of_its_own() -> None:
    assert len(set(NAMES)) == len(CHECKS)
    assert all(0 < check.limit_s <= 120 and check.if_hung for check in CHECKS)
