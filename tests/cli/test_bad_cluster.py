"""The flags of several nodes: what cannot be meant is refused in one line, what can be is read, nothing is ignored."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.agent.options import Cluster, Options
from holdfast.cli import nodes as nodes_command
from holdfast.cli.flags import parse
from holdfast.cli.run import main, notes, read
from holdfast.control.membership import Assignment, Budget, Policy

USAGE, REFUSED = 2, 1
NOWHERE = "no-such-host.invalid"
C10D = ("--rdzv-backend=c10d", "--rdzv-endpoint=node1")

Refuse = Callable[..., str]


@pytest.fixture(autouse=True)
def a_folder_with_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    unwanted = ("PET_", "TORCH", "HOLDFAST_", "SLURM_", "GROUP_RANK", "XDG_")
    for name in [name for name in os.environ if name.startswith(unwanted)]:
        monkeypatch.delenv(name)


@pytest.fixture
def refuse(capsys: pytest.CaptureFixture[str]) -> Refuse:
    """Runs `holdfast run` in this process and returns the one line that it refuses with."""

    def run(*argv: str, code: int = USAGE) -> str:
        try:
            ended: object = main([*argv, "train.py"])
        except SystemExit as leaving:
            ended = leaving.code
        said = capsys.readouterr()
        assert (ended, said.out) == (code, "")
        [line] = said.err.splitlines()
        assert line.startswith("holdfast run: ")
        return line

    return run


def taken(*argv: str) -> Options:
    """Read, but not run: the other nodes would be waited for."""
    return read(parse([*argv, "train.py"]))


def cluster(*argv: str) -> Cluster:
    found = taken("--insecure", *argv).cluster
    assert found is not None
    return found


def noted(*argv: str) -> list[str]:
    return notes(parse([*argv, "train.py"]))


# -- what is meant ----------------------------------------------------------------------------------------------------


def test_several_nodes_meet_at_the_master_unless_another_place_is_named() -> None:
    static = cluster("--nnodes=2", "--master-addr=node1", "--node-rank=1")
    assert (static.endpoints, static.order, static.is_host) == ((("node1", 29500),), 1, False)
    assert cluster("--nnodes=2:4", *C10D).endpoints == (("node1", 29400),)
    etcd = cluster("--nnodes=2", "--rdzv-backend=etcd", "--rdzv-endpoint=http://e1:2379,e2,[::1]:4001")
    assert etcd.endpoints == (("e1", 2379), ("e2", 2379), ("::1", 4001))


def test_a_name_that_cannot_be_resolved_yet_is_no_mistake_where_nodes_are_waited_for() -> None:
    assert cluster("--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint={NOWHERE}").endpoints == ((NOWHERE, 29400),)


@pytest.mark.parametrize("argv", [["--nnodes=1"], ["--nnodes=1:4"], ["--standalone", "--nnodes=1:4", *C10D]], ids=str)
def test_a_job_that_nobody_can_join_needs_no_secret(argv: list[str], tmp_path: Path) -> None:
    options = taken(*argv)
    assert (options.cluster, options.settings.alone) == (None, True)
    assert not (tmp_path / ".config").exists()


def test_the_settings_are_what_the_flags_say() -> None:
    settings = taken(
        *("--insecure", "--nnodes=2:4", *C10D, "--rdzv-id=job", "--spares=1", "--max-restarts=3"),
        *("--restart-budget=failures", "--restart-refill=500", "--restart-policy=min-healthy", "--node-timeout=1.5"),
        *("--rank-assignment=deterministic", "--rdzv-conf=join_timeout=60,last_call_timeout=5"),
    ).settings
    assert (settings.run_id, settings.min_nodes, settings.max_nodes, settings.spares) == ("job", 2, 4, 1)
    assert (settings.max_restarts, settings.budget, settings.refill_steps) == (3, Budget.FAILURES, 500)
    assert (settings.policy, settings.assignment) == (Policy.MIN_HEALTHY, Assignment.DETERMINISTIC)
    assert (settings.join_timeout_s, settings.last_call_s, settings.node_timeout_s) == (60.0, 5.0, 1.5)


def test_the_other_spelling_of_a_policy_beats_ours() -> None:
    settings = taken("--ft-restart-policy=min-healthy", "--ft-use-infra-group-rank=False").settings
    assert (settings.policy, settings.assignment) == (Policy.MIN_HEALTHY, Assignment.DETERMINISTIC)
    assert taken("--ft-use-infra-group-rank=True").settings.assignment is Assignment.INFRASTRUCTURE


def test_the_scheduler_says_the_order_of_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GROUP_RANK", "5")
    assert cluster("--nnodes=2", *C10D).order == 5
    monkeypatch.setenv("SLURM_PROCID", "3")
    assert cluster("--nnodes=2", *C10D).order == 3


# -- what cannot be meant ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--nnodes=2", "--rdzv-backend=c10d"], "--rdzv-backend=c10d needs --rdzv-endpoint"),
        (["--nnodes=2", "--rdzv-backend=etcd"], "--rdzv-backend=etcd needs --rdzv-endpoint"),
        (["--nnodes=2", "--rdzv-backend=etcd-v2"], "use --rdzv-backend=etcd"),
        (["--nnodes=2:4"], "--nnodes=2:4: a range needs --rdzv-backend=c10d or etcd"),
        (["--nnodes=1:4", "--rdzv-endpoint=h"], "--nnodes=1:4: a range needs --rdzv-backend=c10d or etcd"),
        (["--nnodes=2", "--node-rank=2"], "--node-rank=2 is not below --nnodes=2"),
        (["--nnodes=2", "--standalone"], "--standalone is one node, --nnodes=2 is not"),
        (["--tls-cert=c.pem"], "--tls-cert and --tls-key belong together"),
        (["--tls-key=k.pem"], "--tls-cert and --tls-key belong together"),
        (["--tls-cert=c.pem", "--tls-key=k.pem"], "--tls-cert needs --tls-ca"),
        (["--tls-ca=ca.pem"], "--tls-ca needs --tls-cert"),
        (["--insecure", "--secret-file=s"], "--insecure and --secret-file exclude each other"),
        (["--ft-restart-policy=best"], "invalid choice: 'best'"),
        (["--rank-assignment=best"], "invalid choice: 'best'"),
        (["--ft-use-infra-group-rank=perhaps"], "--ft-use-infra-group-rank: 'perhaps' is neither true nor false"),
        (["--rdzv-conf=is_host=maybe"], "--rdzv-conf is_host=maybe: true or false is meant"),
        (["--rdzv-conf=join_timeout=soon"], "--rdzv-conf join_timeout=soon: a number of seconds is meant"),
        (["--rdzv-conf=join_timeout=-1"], "--rdzv-conf join_timeout=-1: a number of seconds is meant"),
        (["--rdzv-conf=close_timeout=nan"], "--rdzv-conf close_timeout=nan: a number of seconds is meant"),
        (["--restart-refill=0"], "0 is less than 1"),
        (["--spares=-1"], "-1 is less than 0"),
        (["--node-timeout=0"], "0: a number of seconds from 0.05 up is meant"),
        (["--node-timeout=soon"], "'soon'"),
    ],
    ids=str,
)
def test_what_cannot_be_meant_is_refused_by_name(argv: list[str], says: str, refuse: Refuse) -> None:
    assert says in refuse(*argv)


def test_a_secret_that_cannot_be_had_is_refused(refuse: Refuse, tmp_path: Path) -> None:
    several = ("--nnodes=2", *C10D)
    assert "none is not there" in refuse(*several, "--secret-file=none", code=REFUSED)
    (tmp_path / "open").write_text("s" * 32)
    (tmp_path / "open").chmod(0o644)
    assert "chmod 600 open" in refuse(*several, "--secret-file=open", code=REFUSED)


def test_a_secret_that_is_too_short_is_refused(refuse: Refuse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_SECRET", "short")
    assert "has 5 characters and needs 16" in refuse("--nnodes=2", *C10D, code=REFUSED)


def test_a_certificate_that_cannot_be_read_is_refused(refuse: Refuse) -> None:
    tls = ("--tls-cert=none.pem", "--tls-key=none.pem", "--tls-ca=none.pem")
    assert "--tls-cert none.pem cannot be read" in refuse("--nnodes=2", "--insecure", *C10D, *tls, code=REFUSED)


def test_a_host_that_nobody_knows_is_refused_where_it_is_this_nodes_own(refuse: Refuse) -> None:
    line = refuse("--nnodes=2", *C10D, f"--local-addr={NOWHERE}", code=REFUSED)
    assert f"--local-addr: cannot resolve the host name {NOWHERE!r}" in line


# -- what has no effect -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--nnodes=1:4"], "--nnodes=1:4: nobody can join without --rdzv-backend=c10d"),
        ([*C10D], "--rdzv-backend, --rdzv-endpoint have no effect on a single node"),
        (["--standalone", "--insecure"], "--insecure has no effect on a single node"),
        (["--standalone", "--rdzv-id=7"], "--rdzv-id is not used with --standalone"),
        (["--nnodes=2", *C10D, "--node-rank=1"], "--node-rank has no effect with --rdzv-backend=c10d"),
        (["--nnodes=2", *C10D, "--rdzv-conf=read_timeout=9"], "--rdzv-conf read_timeout has no effect here"),
        (["--nnodes=2", *C10D, "--insecure"], "whoever reaches the coordinator's port can join or end this job"),
    ],
    ids=str,
)
def test_what_has_no_effect_or_no_guard_is_said(argv: list[str], says: str) -> None:
    assert any(says in note for note in noted(*argv))


def test_a_plain_job_of_several_nodes_has_nothing_to_be_told() -> None:
    assert noted("--nnodes=2", *C10D) == noted("--nnodes=2", "--node-rank=1", "--master-addr=h") == []


# -- holdfast nodes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        ([], USAGE, "--rdzv-endpoint is needed"),
        (["--rdzv-endpoint=h:x"], USAGE, "--rdzv-endpoint=h:x: HOST or HOST:PORT is meant"),
        (["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:1"], REFUSED, "no answer from 127.0.0.1:1"),
        (["--rdzv-endpoint=127.0.0.1:1", "--secret-file=none"], REFUSED, "none is not there"),
        (["--rdzv-backend=c10", "--rdzv-endpoint=127.0.0.1:1"], USAGE, "did you mean c10d?"),
        (["--rdzv-endpoint=127.0.0.1:1", "--insecure", "--secret-file=none"], USAGE, "exclude each other"),
    ],
    ids=str,
)
def test_who_looks_for_nodes_and_cannot_find_them_is_told_in_one_line(
    argv: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert nodes_command.main(argv) == code
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("holdfast nodes: ")
    assert says in line
