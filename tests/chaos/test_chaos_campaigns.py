"""Real campaigns: real jobs of two ranks, real faults, and the verdict that each must get."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness import needs
from holdfast import linux
from holdfast.chaos import faults, verdict
from holdfast.chaos.faults import Injected
from holdfast.observe import record

PACED = Path(__file__).parent / "scripts" / "paced_rank.py"
WAIT_S = 110.0
NEEDS_ROOT = needs(os.geteuid() == 0, "root")


def start(
    folder: Path,
    plan: str,
    *flags: str,
    epochs: int,
    nproc: int = 2,
    heartbeat_s: float = 2.0,
    job: tuple[str, ...] = (),
) -> Any:
    (folder / "plan.toml").write_text(plan)
    command = [sys.executable, "-m", "holdfast", "chaos", "run", "plan.toml", "--log-dir", "campaigns", *flags]
    command += ["--", f"--nproc-per-node={nproc}", f"--ft-rank-heartbeat-timeout={heartbeat_s:g}", *job, str(PACED)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "XDG_CONFIG_HOME": str(folder / "config")}
    with open(folder / "out", "wb") as out, open(folder / "err", "wb") as err:
        return subprocess.Popen([*command, f"--epochs={epochs}"], cwd=folder, env=env, stdout=out, stderr=err)


def run(folder: Path, plan: str, *flags: str, **options: Any) -> tuple[int, Path]:
    """Its exit code, and the campaign's folder."""
    process = start(folder, plan, *flags, **options)
    try:
        code = process.wait(WAIT_S)
    finally:
        process.terminate()
        process.wait()
    [campaign] = (folder / "campaigns").iterdir()
    return code, campaign


def every(*kinds: str, head: str = "", more: str = "") -> str:
    return head + "".join(f'[[fault]]\nkind = "{kind}"\nevery_s = 0.2\n{more}\n' for kind in kinds)


def told(folder: Path) -> str:
    return (folder / "out").read_text() + (folder / "err").read_text()


def kinds_done(campaign: Path) -> list[str]:
    return [fault.kind for fault in faults.read(str(campaign))]


def test_a_campaign_comes_through_with_the_weights_of_its_twin(tmp_path: Path) -> None:
    named = '[[fault]]\nkind = "kill"\nrank = 1\nat_step = 10\n'
    kinds = ("exception", "hang", "bit-flip")
    code, campaign = run(tmp_path, named + every(*kinds), epochs=8, heartbeat_s=3)
    assert code == 0, told(tmp_path)
    found = verdict.judge(verdict.load(campaign))
    assert found.held
    assert found.goodput is not None and 0 < found.goodput < 1
    done = {fault.number: fault for fault in faults.read(str(campaign))}
    assert [done[number].kind for number in sorted(done)] == ["kill", *kinds]
    assert (done[1].rank, done[1].step, done[1].generation) == (1, 10, 0)
    assert "everything held: 4 faults" in told(tmp_path)
    assert msgspec.json.decode((campaign / "verdict.json").read_bytes(), type=verdict.Verdict) == found
    weights = msgspec.json.decode((campaign / "weights.json").read_bytes(), type=verdict.Weights)
    assert weights.job == weights.twin != ""
    runs = (campaign / "job" / "logs" / "0").iterdir()  # of two lives
    notes = [noted.what for run_dir in runs for noted in record.read(run_dir / record.NAME)]
    assert sum(isinstance(what, record.FaultInjected) for what in notes) == 4
    judged_again(tmp_path, campaign, done[1])


def judged_again(folder: Path, campaign: Path, fault: Injected) -> None:
    """What was written down cannot be talked away: a fault more, or other weights, and the verdict is another."""
    judge = [sys.executable, "-m", "holdfast", "chaos", "judge"]
    moved = folder / "moved"
    shutil.copytree(campaign, moved)
    assert subprocess.run([*judge, str(moved)], capture_output=True, timeout=WAIT_S).returncode == 0
    with open(moved / faults.NAME, "ab") as file:
        file.write(msgspec.json.encode(msgspec.structs.replace(fault, number=99, generation=77)) + b"\n")
    done = subprocess.run([*judge, str(moved)], capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 1
    assert "fault 99 (kill) has no incident in generation 77" in done.stdout


def test_a_campaign_whose_weights_are_others_and_whose_fault_never_came(tmp_path: Path) -> None:
    """A program that says something else each time, and ends before it has stepped."""
    (tmp_path / "plan.toml").write_text(every("kill"))
    command = [sys.executable, "-m", "holdfast", "chaos", "run", "plan.toml", "--", "--no-python", "sh"]
    command += ["-c", 'echo "final weights: $$"']
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 1, done.stderr
    [campaign] = (tmp_path / "chaos").iterdir()
    written = msgspec.json.decode((campaign / "verdict.json").read_bytes(), type=verdict.Verdict)
    broken = {check.name: check.wrong for check in written.checks if not check.held}
    assert not written.held and broken.keys() == {
        "every fault of the plan was done",
        "final weights are those of the undisturbed twin",
    }
    assert broken["every fault of the plan was done"] == ("kill: the job had ended",)
    weights = msgspec.json.decode((campaign / "weights.json").read_bytes(), type=verdict.Weights)
    assert weights.job != weights.twin
    assert f"{weights.job} here, {weights.twin} there" in done.stdout
    assert "not everything held: 0 faults" in done.stdout


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_a_campaign_that_is_ended_leaves_nothing(signum: signal.Signals, tmp_path: Path) -> None:
    process = start(tmp_path, every("kill", more="count = 1000"), "--no-twin", epochs=1000)
    err = tmp_path / "err"
    try:
        while "1 of 1000: kill" not in err.read_text():
            assert process.poll() is None, told(tmp_path)
            wait_a_moment(process.pid)
        below = list(linux.descendants(process.pid))
        assert below
        process.send_signal(signum)
        assert process.wait(WAIT_S) == (1 if signum == signal.SIGTERM else -signum)
    finally:
        process.kill()
        process.wait()
    if signum == signal.SIGTERM:
        assert "interrupted; the job was ended" in err.read_text()
    else:
        linux.wait_for_end(below, WAIT_S)  # nobody is left who could
    assert [pid for pid in below if linux.state(pid) not in ("", "Z")] == []


@pytest.mark.parametrize("flags", [(), ("--no-twin",)], ids=["with a twin", "alone"])
def test_a_job_that_never_begins(flags: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(every("kill"))
    command = [sys.executable, "-m", "holdfast", "chaos", "run", "plan.toml", *flags, "--", "nosuch.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("holdfast chaos: the ")
    assert "holdfast run: there is no script 'nosuch.py'; check its path; see " in last
    assert Path(last.rpartition("see ")[2]).is_file()


def wait_a_moment(pid: int) -> None:
    """For a moment, or for the end of the process."""
    fd = os.pidfd_open(pid)
    try:
        select.select([fd], [], [], 0.05)
    finally:
        os.close(fd)


# -- the other kinds: each needs seconds of its own -----------------------------------------------------------------


@pytest.mark.long
def test_a_program_that_crashes_in_c_or_at_an_import(tmp_path: Path) -> None:
    code, campaign = run(tmp_path, every("segfault", "crash-on-import"), epochs=5)
    assert code == 0, told(tmp_path)
    assert sorted(kinds_done(campaign)) == ["crash-on-import", "kill", "segfault"]  # a kill, for the import


@pytest.mark.long
def test_hangs_of_every_sort_and_a_lack_of_memory(tmp_path: Path) -> None:
    kinds = ("stop", "hang-gil", "hang-collective", "hang", "out-of-memory")
    code, campaign = run(tmp_path, every(*kinds), "--no-twin", epochs=6)
    assert code == 0, told(tmp_path)
    assert kinds_done(campaign) == [*kinds]


@pytest.mark.long
def test_what_must_not_end_a_world(tmp_path: Path) -> None:
    kinds = ("slow-rank", "writer-loss", "slow-disk", *(["full-disk"] if os.geteuid() == 0 else []))
    code, campaign = run(tmp_path, every(*kinds, more="for_s = 1"), epochs=10)
    assert code == 0, told(tmp_path)
    assert kinds_done(campaign) == [*kinds]
    [run_dir] = (campaign / "job" / "logs" / "0").iterdir()
    failed = [each for each in record.read(run_dir / record.NAME) if isinstance(each.what, record.CheckpointFailed)]
    assert failed  # the writer was lost, and the disk was full


@pytest.mark.long
def test_a_slow_rank_is_named(tmp_path: Path) -> None:
    plan = every("slow-rank", more="rank = 1\nfor_s = 6")
    code, campaign = run(tmp_path, plan, "--no-twin", epochs=20)
    assert code == 0, told(tmp_path)
    [run_dir] = (campaign / "job" / "logs" / "0").iterdir()
    notes = [noted.what for noted in record.read(run_dir / record.NAME)]
    assert [what.rank for what in notes if isinstance(what, record.StragglerFound)] == [1]


@pytest.mark.long
def test_the_loss_of_the_whole_job_and_of_its_newest_checkpoint(tmp_path: Path) -> None:
    plan = "".join(f'[[fault]]\nkind = "{kind}"\nevery_s = 1.5\n' for kind in ("job-loss", "torn-file", "bit-flip"))
    code, campaign = run(tmp_path, plan, "--no-twin", epochs=30)
    assert code == 0, told(tmp_path)
    assert kinds_done(campaign) == ["job-loss", "torn-file", "bit-flip"]
    damaged = [path.name for path in (campaign / "job" / "checkpoints").glob("damaged_*")]
    assert len(damaged) == 2


@pytest.mark.long
def test_a_job_that_does_not_come_through(tmp_path: Path) -> None:
    """Nobody looks for hangs in it, so that it stands still for good."""
    plan = every("stop", "kill", head="limit_s = 3\n")
    code, campaign = run(tmp_path, plan, "--no-twin", epochs=6, job=("--hang-detection=off",))
    assert code == 1, told(tmp_path)
    assert kinds_done(campaign) == ["stop"]
    broken = {check.name: check.wrong for check in verdict.judge(verdict.load(campaign)).checks if not check.held}
    assert broken["every fault of the plan was done"] == ("kill: the job had ended",)
    assert broken["the job has succeeded"] == ("it did not end by itself and was killed",)
    [missing, late] = broken["every fault has its one incident, with the right cause"]
    assert "fault 1 (stop) has no incident" in missing and "fault 1 was not come through in time" in late


@pytest.mark.long
def test_the_loss_of_nodes(tmp_path: Path) -> None:
    code, campaign = run(tmp_path, every("node-loss", "coordinator-loss", head="nodes = 2\n"), epochs=12, nproc=1)
    assert code == 0, told(tmp_path)
    assert kinds_done(campaign) == ["node-loss", "coordinator-loss"]


@pytest.mark.long
@NEEDS_ROOT
def test_links_that_fail(tmp_path: Path) -> None:
    plan = every("link-delay", "link-loss", "link-cut", head="nodes = 2\n", more="for_s = 4\npart = 0.02")
    code, campaign = run(tmp_path, plan, "--no-twin", epochs=20, nproc=1, heartbeat_s=10)
    assert code == 0, told(tmp_path)
    assert kinds_done(campaign) == ["link-delay", "link-loss", "link-cut"]


@pytest.mark.long
@needs(shutil.which("etcd") is not None, "etcd")
def test_the_loss_of_a_leader_of_etcd(tmp_path: Path) -> None:
    plan = every("etcd-leader-loss", "coordinator-loss", head='nodes = 2\nbackend = "etcd"\n', more="for_s = 1")
    code, campaign = run(tmp_path, plan, "--no-twin", epochs=12, nproc=1, heartbeat_s=10)
    assert code == 0, told(tmp_path)
    assert kinds_done(campaign) == ["etcd-leader-loss", "coordinator-loss"]
    assert "which had the coordinator, is gone" in (campaign / "job" / "err").read_text()
