"""Where the configuration comes from, and what each key means."""

from __future__ import annotations

import math
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import UNSET

from holdfast.cli import fault_tolerance
from holdfast.cli.flags import parse
from holdfast.cli.run import notes, read
from holdfast.control.hangs import FLOOR_S, SAFETY_FACTOR, Mode
from holdfast.control.membership import Assignment, Policy
from holdfast.fault_tolerance import FaultToleranceConfig
from holdfast.fault_tolerance.config import WITHOUT_EFFECT

ALL = """
training:
  - name: x
    nested:
      fault_tolerance:
        initial_rank_heartbeat_timeout: 600
        rank_heartbeat_timeout: 60.5
        rank_section_timeouts: {step: 5, save: null}
        rank_out_of_section_timeout: 7
        safety_factor: 3
        rank_termination_signal: SIGTERM
        max_no_progress_restarts: 5
        restart_policy: min-healthy
        use_infra_group_rank: false
        hang_floor: 12
        hang_detection: warn
other: !mine {tag: 1}
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("pass\n")
    (tmp_path / "ft.yaml").write_text(ALL)
    monkeypatch.chdir(tmp_path)


def config(*argv: str) -> FaultToleranceConfig:
    return fault_tolerance.read(parse([*argv, "train.py"]))


def written(text: str, name: str = "ft.yaml") -> str:
    Path(name).write_text(text)
    return f"--ft-cfg-path={name}"


def test_the_defaults_are_those_of_the_rules() -> None:
    found = config()
    assert found == FaultToleranceConfig()
    assert (found.hang_floor, found.safety_factor, Mode(found.hang_detection)) == (FLOOR_S, SAFETY_FACTOR, Mode.RESTART)
    assert (found.first_step_s, found.first_heartbeat_s, found.max_no_progress_restarts) == (None, None, 3)


def test_every_key_can_be_given_in_the_file_at_any_depth() -> None:
    assert config("--ft-cfg-path=ft.yaml") == FaultToleranceConfig(
        initial_rank_heartbeat_timeout=600,
        rank_heartbeat_timeout=60.5,
        rank_section_timeouts={"step": 5, "save": None},
        rank_out_of_section_timeout=7,
        safety_factor=3,
        rank_termination_signal=signal.SIGTERM,
        max_no_progress_restarts=5,
        restart_policy="min-healthy",
        use_infra_group_rank=False,
        hang_floor=12,
        hang_detection="warn",
    )
    assert FaultToleranceConfig.from_yaml_file("ft.yaml") == config("--ft-cfg-path=ft.yaml")


@pytest.mark.parametrize("prefix", ["--ft-", "--ft-param-", "--ft_", "--ft_param_"])
def test_every_key_can_be_given_by_a_flag_which_beats_the_file(prefix: str) -> None:
    given = {
        "initial_rank_heartbeat_timeout": ("1", 1.0),
        "rank_heartbeat_timeout": ("null", None),
        "rank_section_timeouts": ("a:1,b=2.5,c:,d:none", {"a": 1.0, "b": 2.5, "c": None, "d": None}),
        "rank_out_of_section_timeout": ("", None),
        "safety_factor": ("2", 2.0),
        "rank_termination_signal": ("10", signal.SIGUSR1),
        "max_no_progress_restarts": ("0", 0),
        "restart_policy": ("any-failed", "any-failed"),
        "use_infra_group_rank": ("yes", True),
        "hang_floor": ("1.5", 1.5),
        "hang_detection": ("off", "off"),
    }
    for key, (text, value) in given.items():
        for spelled in (key, key.replace("_", "-")) if prefix.startswith("--ft-") else (key,):
            found = config("--ft-cfg-path=ft.yaml", f"{prefix}{spelled}={text}")
            assert getattr(found, key) == value
            assert found == msgspec.structs.replace(config("--ft-cfg-path=ft.yaml"), **{key: value})


def test_no_limit_is_not_the_same_as_nothing_said() -> None:
    assert config().initial_rank_heartbeat_timeout is UNSET
    for text in ("null", "~", "''", "none", "None"):
        found = config(written(f"fault_tolerance:\n  initial_rank_heartbeat_timeout: {text}\n"))
        assert (found.initial_rank_heartbeat_timeout, found.first_step_s, found.first_heartbeat_s) == (None, 0.0, None)
    assert config("--ft-initial-rank-heartbeat-timeout=9").first_step_s == 9.0


def test_words_that_yaml_takes_for_truth_are_understood() -> None:
    assert config(written("fault_tolerance: {hang_detection: off}")).hang_detection == "off"
    assert config(written("fault_tolerance: {hang_detection: on}")).hang_detection == "restart"


def test_an_empty_section_and_a_json_file_are_read() -> None:
    assert config(written("fault_tolerance:\n")) == FaultToleranceConfig()
    flag = written('{"a": [1, {"fault_tolerance": {"rank_heartbeat_timeout": 5, "log_level": "INFO"}}]}', "ft.json")
    assert config(flag) == FaultToleranceConfig(rank_heartbeat_timeout=5)


def test_several_documents_and_aliases_are_one_section() -> None:
    text = "a: 1\n---\nx: &ft {fault_tolerance: {hang_floor: 9}}\ny: *ft\n"
    assert config(written(text)).hang_floor == 9


def test_nvidias_name_for_no_progress_is_taken() -> None:
    assert config(written("fault_tolerance: {max_no_progress_cycles: 7}")).max_no_progress_restarts == 7
    assert config("--ft-max-no-progress-cycles=8").max_no_progress_restarts == 8


def test_what_has_no_effect_is_said_with_the_reason() -> None:
    keys = "\n".join(f"  {key}: 5" for key in WITHOUT_EFFECT)
    args = parse([written(f"fault_tolerance:\n{keys}\n"), "--ft-log-level=INFO", "--ft-ignore-missing-cfg", "train.py"])
    assert read(args).ft == FaultToleranceConfig()
    said = notes(args)
    assert "--ft-log-level has no effect: logs and incidents are in the run directory" in said
    assert "ft.yaml: workload_check_interval has no effect: ranks are watched, not polled" in said
    assert any("enable_nic_monitor" in line and "are not part of holdfast" in line for line in said)
    assert all(any(key in line for line in said) for key in WITHOUT_EFFECT)
    assert notes(read_args("--ft-cfg-path=ft.yaml")) != notes(read_args())


def read_args(*argv: str) -> Any:
    args = parse([*argv, "train.py"])
    read(args)
    return args


def test_the_file_sets_policy_and_assignment_and_flags_of_either_name_beat_it() -> None:
    cluster = ["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost", "--insecure"]

    def settings(*argv: str) -> tuple[Policy, Assignment, int]:
        found = read(parse([*cluster, *argv, "train.py"])).settings
        return found.policy, found.assignment, found.max_no_progress

    written("fault_tolerance: {restart_policy: min-healthy, use_infra_group_rank: false, max_no_progress_restarts: 9}")
    file = "--ft-cfg-path=ft.yaml"
    assert settings() == (Policy.ANY_FAILED, Assignment.INFRASTRUCTURE, 3)
    assert settings(file) == (Policy.MIN_HEALTHY, Assignment.DETERMINISTIC, 9)
    flags = ("--restart-policy=any-failed", "--rank-assignment=infrastructure")
    assert settings(file, *flags)[:2] == (Policy.ANY_FAILED, Assignment.INFRASTRUCTURE)
    flags = ("--ft-restart-policy=any-failed", "--ft-use-infra-group-rank=True")
    assert settings(file, *flags)[:2] == (Policy.ANY_FAILED, Assignment.INFRASTRUCTURE)


def test_the_configuration_goes_through_json_unchanged() -> None:
    for found in (
        FaultToleranceConfig(),
        config("--ft-cfg-path=ft.yaml"),
        config("--ft-initial-rank-heartbeat-timeout="),
    ):
        assert msgspec.json.decode(msgspec.json.encode(found), type=FaultToleranceConfig) == found


@pytest.mark.parametrize("value", [-1.0, 0.0, math.nan, math.inf, True, "5", 10**400], ids=repr)
def test_a_timeout_that_is_none_is_refused_wherever_it_is_given(value: Any) -> None:
    for key in (
        "initial_rank_heartbeat_timeout",
        "rank_heartbeat_timeout",
        "rank_out_of_section_timeout",
        "hang_floor",
    ):
        with pytest.raises(ValueError, match=rf"^{key}: "):
            FaultToleranceConfig(**{key: value})
    with pytest.raises(ValueError, match=r"^rank_section_timeouts: a: "):
        FaultToleranceConfig(rank_section_timeouts={"a": value})
    with pytest.raises(ValueError, match=r"^rank_heartbeat_timeout: "):
        FaultToleranceConfig.from_kwargs(rank_heartbeat_timeout=value)


def test_an_unknown_key_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"rank_heartbeat_timout: there is no such key; did you mean rank_heartbeat"):
        FaultToleranceConfig.from_kwargs(rank_heartbeat_timout=5)
