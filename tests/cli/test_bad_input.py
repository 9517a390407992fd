"""What cannot be meant is refused before anything starts: in one line that names it, with an exit code of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast import cli
from holdfast.cli.flags import parse
from holdfast.cli.run import main, read
from holdfast.cli.usage import Usage

USAGE, REFUSED = 2, 1
NOWHERE = "no-such-host.invalid"

Refuse = Callable[..., str]


@pytest.fixture(autouse=True)
def a_folder_with_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("pass\n")
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(("PET_", "TORCH"))]:
        monkeypatch.delenv(name)


@pytest.fixture
def refuse(capsys: pytest.CaptureFixture[str]) -> Refuse:
    """Runs `holdfast run` in this process and returns the one line that it refuses with."""

    def run(*argv: str, code: int = USAGE) -> str:
        try:
            ended: object = main([*argv])
        except SystemExit as leaving:
            ended = leaving.code
        said = capsys.readouterr()
        assert ended == code
        assert said.out == ""
        return the_line(said.err)

    return run


def the_line(stderr: str) -> str:
    assert "Traceback" not in stderr
    assert stderr.count("\n") == 1, stderr
    assert stderr.startswith("holdfast")
    return stderr.rstrip("\n")


# -- the script -------------------------------------------------------------------------------------------------------


def test_a_missing_script_is_named_with_the_one_that_was_meant(refuse: Refuse) -> None:
    assert refuse("trian.py") == "holdfast run: there is no script 'trian.py'; did you mean train.py?"


def test_a_missing_script_without_a_like_is_named(refuse: Refuse) -> None:
    assert refuse("zzz") == "holdfast run: there is no script 'zzz'; check its path"


def test_a_script_in_a_missing_folder_is_named(refuse: Refuse) -> None:
    assert "'nowhere/train.py'" in refuse("nowhere/train.py")


def test_a_near_miss_in_another_folder_is_found_there(tmp_path: Path, refuse: Refuse) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "pretrain.py").touch()
    assert "did you mean" in refuse("jobs/pretrian.py")


def test_no_script_at_all_is_said(refuse: Refuse) -> None:
    assert "training_script" in refuse("--nproc-per-node=2")


def test_a_module_is_not_run_without_python(refuse: Refuse) -> None:
    line = refuse("--module", "--no-python", "train")
    assert "--module" in line
    assert "--no-python" in line


# -- flags ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nnodes", ["two", "0", "-1", "4:2", "1:2:3", "", ":", "1:"])
def test_a_number_of_nodes_that_is_none_is_named(nnodes: str, refuse: Refuse) -> None:
    assert f"--nnodes={nnodes}: a number or MIN:MAX" in refuse(f"--nnodes={nnodes}", "train.py")


@pytest.mark.parametrize("nproc", ["0", "-1", "1.5", "two words", "", "2x", "g-p-u"])
def test_a_number_of_ranks_that_is_none_is_named(nproc: str, refuse: Refuse) -> None:
    assert f"--nproc-per-node={nproc}:" in refuse(f"--nproc-per-node={nproc}", "train.py")


@pytest.mark.parametrize("flag", ["--max-restarts", "--shutdown-timeout", "--node-rank", "--master-port"])
def test_a_negative_number_is_refused(flag: str, refuse: Refuse) -> None:
    line = refuse(f"{flag}=-1", "train.py")
    assert flag in line
    assert "-1 is less than" in line


@pytest.mark.parametrize("flag", ["--max-restarts", "--shutdown-timeout", "--monitor-interval", "--master-port"])
def test_a_number_that_is_none_is_named(flag: str, refuse: Refuse) -> None:
    line = refuse(f"{flag}=many", "train.py")
    assert flag in line
    assert "'many'" in line


def test_a_port_beyond_the_last_one_is_refused() -> None:
    """Rather than taken modulo 65536. Read, not run: while it is accepted, running it would start a job."""
    with pytest.raises((SystemExit, Usage)):
        read(parse(["--master-port=65536", "train.py"]))


@pytest.mark.parametrize(("code", "why"), [("0", "0 is less than 1"), ("256", "256 is more than 255"), ("x", "'x'")])
def test_an_exit_code_that_no_program_can_have_is_refused(code: str, why: str, refuse: Refuse) -> None:
    line = refuse(f"--reschedule-exit-code={code}", "train.py")
    assert "--reschedule-exit-code" in line
    assert why in line


@pytest.mark.parametrize("flag", ["--start-method", "--numa-binding", "--restart-policy", "--restart-budget"])
def test_a_choice_that_is_none_is_named_with_those_that_are(flag: str, refuse: Refuse) -> None:
    line = refuse(f"{flag}=best", "train.py")
    assert flag in line
    assert "invalid choice: 'best' (choose from" in line


def test_an_unknown_flag_is_named(refuse: Refuse) -> None:
    assert "--no-such-flag" in refuse("--no-such-flag", "train.py")


def test_an_ambiguous_flag_is_named(refuse: Refuse) -> None:
    assert "--rdzv could match --rdzv-backend" in refuse("--rdzv", "c10d", "train.py")


@pytest.mark.parametrize("flag", ["--redirects", "--tee"])
@pytest.mark.parametrize("std", ["4", "-1", "0:4", "0:1,", "stdout", "0:1;1:2", "", "0:"])
def test_a_choice_of_streams_that_is_none_is_named(flag: str, std: str, refuse: Refuse) -> None:
    assert f"{flag}: {std!r} is neither 0 to 3 nor a list" in refuse(f"{flag}={std}", "train.py")


@pytest.mark.parametrize("ranks", ["a", "0,b", "0;1", "0,,1", "1.5"])
def test_a_list_of_ranks_that_is_none_is_named(ranks: str, refuse: Refuse) -> None:
    assert f"--local-ranks-filter={ranks}: a list of local ranks" in refuse(f"--local-ranks-filter={ranks}", "train.py")


def test_an_unknown_signal_is_named_with_the_nearest(refuse: Refuse) -> None:
    line = refuse("--signals-to-handle=SIGTERM,SIGUSR", "train.py")
    assert "--signals-to-handle: there is no signal 'SIGUSR' (did you mean SIGUSR" in line


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP"])
def test_a_signal_that_nobody_can_handle_is_refused(name: str, refuse: Refuse) -> None:
    assert f"--signals-to-handle: {name} cannot be handled" in refuse(f"--signals-to-handle={name}", "train.py")


def test_an_unknown_event_handler_is_named_with_the_nearest(refuse: Refuse) -> None:
    assert "--event-log-handler: 'consol' is not known (did you mean console?)" in refuse(
        "--event-log-handler=consol", "train.py"
    )


# -- rendezvous -------------------------------------------------------------------------------------------------------


def test_an_unknown_rendezvous_setting_is_named_with_the_nearest(refuse: Refuse) -> None:
    line = refuse("--rdzv-conf=timeout=3,join_timout=9", "train.py")
    assert "--rdzv-conf: 'join_timout' is not known (did you mean join_timeout?)" in line


def test_a_rendezvous_setting_without_a_value_is_named(refuse: Refuse) -> None:
    assert "'timeout' is not of the form key=value" in refuse("--rdzv-conf=timeout", "train.py")


def test_an_unknown_rendezvous_backend_is_named_with_the_nearest(refuse: Refuse) -> None:
    assert "--rdzv-backend: 'c10' is not known (did you mean c10d?)" in refuse("--rdzv-backend=c10", "train.py")


@pytest.mark.parametrize("endpoint", ["localhost:http", "localhost:", ":29400", "localhost:65536", "a:1,b:2", "[h]:x"])
def test_an_endpoint_that_is_none_is_named(endpoint: str, refuse: Refuse) -> None:
    line = refuse("--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "train.py")
    assert f"--rdzv-endpoint={endpoint}: HOST or HOST:PORT is meant" in line


@pytest.mark.parametrize("flag", ["--master-addr", "--local-addr"])
def test_a_host_that_nobody_knows_is_named(flag: str, refuse: Refuse) -> None:
    line = refuse(f"{flag}={NOWHERE}", "train.py", code=REFUSED)
    assert f"{flag}: cannot resolve the host name {NOWHERE!r}" in line


def test_a_host_that_is_no_name_at_all_is_named(refuse: Refuse) -> None:
    assert "not a host name" in refuse(f"--master-addr={'x' * 70}.example", "train.py", code=REFUSED)


# -- fault tolerance --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        *(
            (flag, value, "is not a number of seconds above 0")
            for flag in ("--ft-rank-heartbeat-timeout", "--ft-initial-rank-heartbeat-timeout", "--hang-floor")
            for value in ("-1", "0", "nan", "inf", "soon", "1e400")
        ),
        ("--hang-floor", "null", "it cannot be null"),
        ("--ft-rank-out-of-section-timeout", "-1", "is not a number of seconds above 0, or null for none"),
        ("--ft-rank-section-timeouts", "step", "'step' is not of the form name:seconds"),
        ("--ft-rank-section-timeouts", "step:-1", "step: -1.0 is not a number of seconds above 0"),
        ("--ft-rank-section-timeouts", "step:soon", "step: 'soon' is not a number of seconds above 0"),
        ("--ft-rank-section-timeouts", ":5", "a name is a text of 1 to 200 characters"),
        ("--ft-rank-section-timeouts", "a:5,a:6", "'a' is given twice"),
        ("--ft-safety-factor", "0.5", "0.5 is not a number from 1 up"),
        ("--ft-safety-factor", "five", "'five' is not a number from 1 up"),
        ("--max-no-progress-restarts", "-1", "-1 is not a number from 0 up"),
        ("--max-no-progress-restarts", "few", "'few' is not a number from 0 up"),
        ("--ft-rank-termination-signal", "SIGNOPE", "there is no signal 'SIGNOPE'"),
        ("--ft-rank-termination-signal", "9999", "there is no signal 9999"),
        ("--ft-rank-termination-signal", "SIGSTOP", "SIGSTOP ends no process"),
        ("--ft-use-infra-group-rank", "perhaps", "'perhaps' is neither true nor false"),
        ("--ft-restart-policy", "best", "invalid choice: 'best'"),
        ("--hang-detection", "kill", "invalid choice: 'kill'"),
    ],
)
def test_a_fault_tolerance_flag_that_cannot_be_meant_is_named(
    flag: str, value: str, words: str, refuse: Refuse
) -> None:
    line = refuse(f"{flag}={value}", "train.py")
    assert flag in line
    assert words in line


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "fault_tolerance:\n  rank_hartbeat_timeout: 5\n",
            "line 2: rank_hartbeat_timeout: there is no such key; did you mean rank_heartbeat_timeout?",
        ),
        ("fault_tolerance:\n  rank_heartbeat_timeout: -5\n", "line 2: rank_heartbeat_timeout: -5 is not a number"),
        ("fault_tolerance:\n  rank_heartbeat_timeout: .nan\n", "rank_heartbeat_timeout: nan is not a number"),
        ("fault_tolerance:\n  rank_heartbeat_timeout: true\n", "rank_heartbeat_timeout: True is not a number"),
        ("fault_tolerance:\n  rank_heartbeat_timeout: '5'\n", "rank_heartbeat_timeout: '5' is not a number"),
        ("fault_tolerance:\n  safety_factor: null\n", "safety_factor: it cannot be null"),
        ("fault_tolerance:\n  rank_section_timeouts: {a: -1}\n", "line 2: rank_section_timeouts: a: -1 is not"),
        ("fault_tolerance:\n  rank_section_timeouts: 5\n", "rank_section_timeouts: 5 is not a list of names"),
        (
            "fault_tolerance:\n  max_no_progress_cycles: -1\n",
            "line 2: max_no_progress_cycles: -1 is not a number from 0",
        ),
        ("fault_tolerance:\n  max_no_progress_cycles: 1\n  max_no_progress_restarts: 2\n", "is given too"),
        ("fault_tolerance:\n  hang_floor: 5\n  hang_floor: 6\n", "line 3: the key 'hang_floor' is given twice"),
        ("fault_tolerance: 5\n", "line 1: fault_tolerance is not a list of keys"),
        ("fault_tolerance: {5: 6}\n", "fault_tolerance is not a list of keys"),
        ("a: {fault_tolerance: {}}\nb: {fault_tolerance: {}}\n", "has 2 sections fault_tolerance: in lines 1, 2"),
        ("fault_tolerance: {}\nfault_tolerance: {}\n", "has 2 sections fault_tolerance: in lines 1, 2"),
        ("other: 5\n", "has no section fault_tolerance:"),
        ("", "has no section fault_tolerance:"),
        ("a: [1\nb: 2\n", "line 2: no YAML: "),
        ("a: \x00\n", "no YAML: "),
        ("fault_tolerance: !python/object:os.system {}\n", "line 1: no YAML: "),
    ],
    ids=lambda value: repr(value)[:60],
)
def test_a_fault_tolerance_file_that_cannot_be_meant_is_named(
    text: str, words: str, tmp_path: Path, refuse: Refuse
) -> None:
    (tmp_path / "ft.yaml").write_text(text)
    line = refuse("--ft-cfg-path=ft.yaml", "train.py")
    assert "--ft-cfg-path: ft.yaml" in line
    assert words in line


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"fault_tolerance": {"hang_flor": 5}}', "ft.json: hang_flor: there is no such key; did you mean hang_floor?"),
        ('{\n"fault_tolerance"', "ft.json line 2: no JSON"),
        ('{"fault_tolerance": {}, "fault_tolerance": {}}', "ft.json: the key 'fault_tolerance' is given twice"),
        ('{"a": [{"fault_tolerance": {}}], "fault_tolerance": {}}', "ft.json has 2 sections"),
    ],
)
def test_a_json_file_that_cannot_be_meant_is_named(text: str, words: str, tmp_path: Path, refuse: Refuse) -> None:
    (tmp_path / "ft.json").write_text(text)
    assert words in refuse("--ft-cfg-path=ft.json", "train.py")


def test_a_file_that_is_not_there_is_named(tmp_path: Path, refuse: Refuse) -> None:
    assert "--ft-cfg-path: ft.yaml cannot be read: No such file" in refuse("--ft-cfg-path=ft.yaml", "train.py")
    (tmp_path / "ft.yaml").write_bytes(b"\xff\xfe\x00")
    assert "ft.yaml is not UTF-8 text" in refuse("--ft-cfg-path=ft.yaml", "train.py")
    assert "cannot be read: Is a directory" in refuse("--ft-cfg-path=.", "train.py")


def test_without_a_reader_of_yaml_it_is_said_what_to_install(
    tmp_path: Path, refuse: Refuse, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ft.yaml").write_text("fault_tolerance: {}\n")
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert "pip install 'holdfast[yaml]'" in refuse("--ft-cfg-path=ft.yaml", "train.py")


# -- variables --------------------------------------------------------------------------------------------------------


def test_a_switch_variable_that_is_neither_0_nor_1_is_named(refuse: Refuse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_STANDALONE", "yes")
    assert "PET_STANDALONE=yes: 0 or 1 is meant" in refuse("train.py")


@pytest.mark.parametrize(
    ("name", "value", "word"),
    [
        ("PET_MAX_RESTARTS", "many", "max-restarts"),
        ("PET_MAX_RESTARTS", "-1", "max-restarts"),
        ("PET_NNODES", "two", "nnodes"),
        ("PET_NPROC_PER_NODE", "0", "nproc-per-node"),
        ("PET_REDIRECTS", "9", "redirects"),
        ("PET_EVENT_LOG_HANDLER", "consol", "event-log-handler"),
    ],
)
def test_a_variable_that_cannot_be_read_is_refused_as_its_flag_is(
    name: str, value: str, word: str, refuse: Refuse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    line = refuse("train.py")
    assert word in line
    assert value in line


def test_a_shutdown_timeout_that_is_no_number_is_named(refuse: Refuse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "soon")
    assert "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=soon: a number of seconds is meant" in refuse("train.py")


# -- the program itself -----------------------------------------------------------------------------------------------


def holdfast(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "holdfast", *argv], capture_output=True, text=True)


def test_an_unknown_command_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["holdfast", "rum"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == USAGE
    assert the_line(capsys.readouterr().err) == "holdfast: there is no command 'rum'; try: holdfast run --help"


def test_the_program_refuses_as_its_parts_do() -> None:
    for argv, code, word in [
        (("rum",), USAGE, "'rum'"),
        (("run", "--no-such-flag", "train.py"), USAGE, "--no-such-flag"),
        (("run", "trian.py"), USAGE, "did you mean train.py?"),
        (("run", f"--master-addr={NOWHERE}", "train.py"), REFUSED, NOWHERE),
    ]:
        ended = holdfast(*argv)
        assert word in the_line(ended.stderr)
        assert (ended.returncode, ended.stdout) == (code, "")


@pytest.mark.parametrize(
    ("argv", "names"),
    [
        (["-m", "no.such.module"], "no module 'no'"),
        (["--no-python", "no-such-program"], "no program 'no-such-program'"),
        (["/"], "'/' is a directory without a __main__.py"),
    ],
)
def test_a_program_that_is_not_there_is_refused_before_any_worker(
    argv: list[str], names: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert names in line
