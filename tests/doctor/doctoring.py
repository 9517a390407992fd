"""`holdfast doctor` as a child process: what it finds, where something was broken on purpose."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from holdfast.doctor.finding import Finding

WAIT_S = 60.0
Env = Mapping[str, str]
ENTER = ("unshare", "--user", "--map-root-user", "--mount", "--uts")

# Runs in the process of a check, as a user's own sitecustomize would, and changes torch once it is imported.
AFTER_TORCH = """
import importlib.abc, importlib.util, sys

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        load = spec.loader.exec_module
        def exec_module(module):
            load(module)
            change(module)
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())

def change(torch):
"""


class Report(msgspec.Struct):
    host: str
    version: str
    ok: bool
    took_s: float
    findings: list[Finding]

    def __getitem__(self, name: str) -> Finding:
        (found,) = (finding for finding in self.findings if finding.check == name)
        return found


def command(*flags: str) -> list[str]:
    return [sys.executable, "-m", "holdfast", "doctor", *flags]


def environment(folder: Path, **more: str) -> dict[str, str]:
    """With a secret of its own: tests neither use the user's nor make one."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("GLOO_", "HOLDFAST_", "AWS_"))}
    return kept | {"XDG_CONFIG_HOME": str(folder / "config"), "OMP_NUM_THREADS": "1", **more}


def examine(
    folder: Path, *flags: str, after: str = "", inside: bool = False, env: Env | None = None, wait_s: float = WAIT_S
) -> Report:
    """What it reports. `after` is what a shell does before, in namespaces of its own if `inside`."""
    line = f"{after}\nexec {shlex.join(command('--json', *flags))}"
    ran = subprocess.run(
        [*(ENTER if inside else ()), "bash", "-ec", line],
        env=environment(folder, **(env or {})),
        capture_output=True,
        text=True,
        timeout=wait_s,
    )
    assert ran.returncode in (0, 1), ran.stderr
    report = msgspec.json.decode(ran.stdout, type=Report)
    failed = [finding for finding in report.findings if finding.state == "fail"]
    assert ran.returncode == bool(failed) and report.ok is not bool(failed)
    for finding in report.findings:
        assert bool(finding.cure) is (finding.state in ("warn", "fail")), finding  # what is wrong comes with a cure
        assert "\n" not in finding.line
    return report


def hook(folder: Path, text: str) -> dict[str, str]:
    """An environment in which each new Python runs this first."""
    place = folder / "hook"
    place.mkdir()
    (place / "sitecustomize.py").write_text(text)
    return {"PYTHONPATH": str(place)}


def package(folder: Path, name: str, text: str) -> dict[str, str]:
    """An environment in which a package is another one."""
    place = folder / "packages"
    (place / name).mkdir(parents=True)
    (place / name / "__init__.py").write_text(text)
    return {"PYTHONPATH": str(place)}


def need_namespaces(folder: Path) -> None:
    probe = [*ENTER, "mount", "-t", "tmpfs", "none", str(folder)]
    if shutil.which("unshare") is None or subprocess.run(probe, capture_output=True).returncode != 0:
        if os.environ.get("HOLDFAST_CI") == "1":
            pytest.fail("HOLDFAST_CI=1 and no filesystem can be mounted here: it needs unshare, and user namespaces")
        pytest.skip("no filesystem can be mounted here")


def end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGKILL)
        process.wait(WAIT_S)
    if process.stdout is not None:
        process.stdout.close()
