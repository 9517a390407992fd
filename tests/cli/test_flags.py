"""The command line of `holdfast run`, frozen, and held against that of the torchrun which is installed."""

from __future__ import annotations

import argparse
import os
from typing import Any

import pytest

from holdfast.cli.flags import make_parser, parse

SUPPRESSED = argparse.SUPPRESS
SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"

# Every option string with its dest and default. A line that changes here changes what people's scripts mean.
OPTIONS: dict[str, tuple[str, object]] = {
    "-h": ("help", SUPPRESSED),
    "--help": ("help", SUPPRESSED),
    "--version": ("version", SUPPRESSED),
    # torchrun's
    "--nnodes": ("nnodes", "1:1"),
    "--nproc-per-node": ("nproc_per_node", "1"),
    "--nproc_per_node": ("nproc_per_node", "1"),
    "--max-restarts": ("max_restarts", 0),
    "--max_restarts": ("max_restarts", 0),
    "--shutdown-timeout": ("shutdown_timeout", None),
    "--shutdown_timeout": ("shutdown_timeout", None),
    "--signals-to-handle": ("signals_to_handle", SIGNALS),
    "--signals_to_handle": ("signals_to_handle", SIGNALS),
    "--monitor-interval": ("monitor_interval", 0.1),
    "--monitor_interval": ("monitor_interval", 0.1),
    "--rdzv-backend": ("rdzv_backend", "static"),
    "--rdzv_backend": ("rdzv_backend", "static"),
    "--rdzv-endpoint": ("rdzv_endpoint", ""),
    "--rdzv_endpoint": ("rdzv_endpoint", ""),
    "--rdzv-id": ("rdzv_id", "none"),
    "--rdzv_id": ("rdzv_id", "none"),
    "--rdzv-conf": ("rdzv_conf", ""),
    "--rdzv_conf": ("rdzv_conf", ""),
    "--standalone": ("standalone", False),
    "--node-rank": ("node_rank", 0),
    "--node_rank": ("node_rank", 0),
    "--master-addr": ("master_addr", "127.0.0.1"),
    "--master_addr": ("master_addr", "127.0.0.1"),
    "--master-port": ("master_port", None),
    "--master_port": ("master_port", None),
    "--local-addr": ("local_addr", None),
    "--local_addr": ("local_addr", None),
    "-m": ("module", False),
    "--module": ("module", False),
    "--no-python": ("no_python", False),
    "--no_python": ("no_python", False),
    "--run-path": ("run_path", False),
    "--run_path": ("run_path", False),
    "--role": ("role", "default"),
    "--start-method": ("start_method", "spawn"),
    "--start_method": ("start_method", "spawn"),
    "--virtual-local-rank": ("virtual_local_rank", False),
    "--virtual_local_rank": ("virtual_local_rank", False),
    "--numa-binding": ("numa_binding", None),
    "--numa_binding": ("numa_binding", None),
    "--log-dir": ("log_dir", None),
    "--log_dir": ("log_dir", None),
    "-r": ("redirects", "0"),
    "--redirects": ("redirects", "0"),
    "-t": ("tee", "0"),
    "--tee": ("tee", "0"),
    "--local-ranks-filter": ("local_ranks_filter", ""),
    "--local_ranks_filter": ("local_ranks_filter", ""),
    "--duplicate-stdout-filters": ("duplicate_stdout_filters", []),
    "--duplicate_stdout_filters": ("duplicate_stdout_filters", []),
    "--duplicate-stderr-filters": ("duplicate_stderr_filters", []),
    "--duplicate_stderr_filters": ("duplicate_stderr_filters", []),
    "--logs-specs": ("logs_specs", None),
    "--logs_specs": ("logs_specs", None),
    "--event-log-handler": ("event_log_handler", "null"),
    "--event_log_handler": ("event_log_handler", "null"),
    # holdfast's own
    "--restart-policy": ("restart_policy", "any-failed"),
    "--restart_policy": ("restart_policy", "any-failed"),
    "--restart-budget": ("restart_budget", "all"),
    "--restart_budget": ("restart_budget", "all"),
    "--restart-refill": ("restart_refill", None),
    "--restart_refill": ("restart_refill", None),
    "--spares": ("spares", 0),
    "--standby": ("standby", 0),
    "--spot": ("spot", None),
    "--on-straggler": ("on_straggler", "warn"),
    "--on_straggler": ("on_straggler", "warn"),
    "--dashboard": ("dashboard", None),
    "--preflight": ("preflight", False),
    "-q": ("quiet", False),
    "--quiet": ("quiet", False),
    "--rank-assignment": ("rank_assignment", "infrastructure"),
    "--rank_assignment": ("rank_assignment", "infrastructure"),
    "--node-timeout": ("node_timeout", 3.0),
    "--node_timeout": ("node_timeout", 3.0),
    "--retry-same-error": ("retry_same_error", False),
    "--retry_same_error": ("retry_same_error", False),
    "--resume": ("resume", None),
    "--exit-code-from-cause": ("exit_code_from_cause", False),
    "--exit_code_from_cause": ("exit_code_from_cause", False),
    "--reschedule-exit-code": ("reschedule_exit_code", None),
    "--reschedule_exit_code": ("reschedule_exit_code", None),
    "--cold-start": ("cold_start", False),
    "--cold_start": ("cold_start", False),
    "--secret-file": ("secret_file", None),
    "--secret_file": ("secret_file", None),
    "--insecure": ("insecure", False),
    "--tls-cert": ("tls_cert", None),
    "--tls_cert": ("tls_cert", None),
    "--tls-key": ("tls_key", None),
    "--tls_key": ("tls_key", None),
    "--tls-ca": ("tls_ca", None),
    "--tls_ca": ("tls_ca", None),
}

# Those of fault tolerance, each as --ft-NAME and --ft-param-NAME, and the first three also without the prefix.
FT_OWN = ["hang_detection", "hang_floor", "max_no_progress_restarts"]
FT = [
    *FT_OWN,
    *("initial_rank_heartbeat_timeout", "rank_heartbeat_timeout", "rank_section_timeouts"),
    *("rank_out_of_section_timeout", "safety_factor", "rank_termination_signal", "restart_policy"),
    "use_infra_group_rank",
]
# Those of NVIDIA's launcher that have nothing to act on.
FT_WITHOUT_EFFECT = [
    *("workload_check_interval", "restart_check_interval", "skip_section_response", "log_level"),
    *("node_health_check_interval", "node_health_check_endpoint", "enable_nic_monitor", "enable_nic_healthcheck"),
    *("pci_topo_file", "link_down_path_template", "link_state_path_template", "enable_dist_storage_healthcheck"),
    *("storage_healthcheck_path", "storage_health_check_path", "segment", "numa_bind_strict"),
    *("gpu_memory_reclaim_timeout", "gpu_memory_tolerance_mb", "gpu_memory_poll_interval"),
    *("check_remaining_processes", "min_progress_iterations", "progress_update_interval", "checkpoint_iteration_file"),
    *("num_warmup_iterations", "install_exception_hook", "no_restart_exit_code", "rdzv_impl", "cycle_info_dir"),
    *("per_cycle_applog_prefix", "nvrx_logfile", "enable_log_server", "log_server_port", "log_server_log_prefix"),
    *("log_server_graceful_shutdown_timeout", "log_aggregator_count", "log_leaf_max_queue_chunks"),
    *("attribution_endpoint", "attribution_startup_timeout", "attribution_llm_api_key_file"),
    *("attribution_llm_base_url", "attribution_llm_model", "attribution_analysis_backend", "attribution_stop_action"),
    *("attribution_log_level", "attribution_export_url"),
]


def spellings(name: str, *prefixes: str) -> list[str]:
    dashed = name.replace("_", "-")
    return [
        spelled
        for prefix in prefixes
        for spelled in (f"--{prefix}{dashed}", f"--{prefix}{name}", f"--{prefix.replace('-', '_')}{name}")
    ]


for _name in FT:
    _prefixes = ("", "ft-", "ft-param-") if _name in FT_OWN else ("ft-", "ft-param-")
    OPTIONS |= dict.fromkeys(spellings(_name, *_prefixes), (f"ft_{_name}", None))
for _name in FT_WITHOUT_EFFECT:
    OPTIONS |= dict.fromkeys(spellings(_name, "ft-", "ft-param-"), (f"ft_{_name}", None))
for _spelled in spellings("max_no_progress_cycles", "ft-", "ft-param-"):
    OPTIONS[_spelled] = ("ft_max_no_progress_restarts", None)
for _name in ("cfg_path", "ignore_missing_cfg"):
    OPTIONS |= dict.fromkeys(spellings(_name, "ft-"), (f"ft_{_name}", None))

# Ours of which only some values can be meant.
CHOICES = {
    "restart_policy": ["any-failed", "min-healthy"],
    "on_straggler": ["warn", "replace"],
    "ft_restart_policy": ["any-failed", "min-healthy"],
    "ft_hang_detection": ["off", "warn", "restart"],
    "restart_budget": ["all", "failures"],
    "rank_assignment": ["infrastructure", "deterministic"],
}

# Torchrun's options that take a value: two texts for each, and what they are read as.
VALUED: dict[str, tuple[tuple[str, object], tuple[str, object]]] = {
    "nnodes": (("1:4", "1:4"), ("2", "2")),
    "nproc_per_node": (("gpu", "gpu"), ("4", "4")),
    "max_restarts": (("3", 3), ("7", 7)),
    "shutdown_timeout": (("10", 10), ("0", 0)),
    "signals_to_handle": (("SIGUSR1", "SIGUSR1"), ("SIGTERM", "SIGTERM")),
    "monitor_interval": (("5", 5.0), ("0.5", 0.5)),
    "rdzv_backend": (("c10d", "c10d"), ("etcd", "etcd")),
    "rdzv_endpoint": (("a:1", "a:1"), ("b:2", "b:2")),
    "rdzv_id": (("job", "job"), ("other", "other")),
    "rdzv_conf": (("timeout=9", "timeout=9"), ("rank=0", "rank=0")),
    "node_rank": (("1", 1), ("2", 2)),
    "master_addr": (("localhost", "localhost"), ("10.0.0.1", "10.0.0.1")),
    "master_port": (("29500", 29500), ("29501", 29501)),
    "local_addr": (("localhost", "localhost"), ("10.0.0.1", "10.0.0.1")),
    "role": (("trainer", "trainer"), ("reader", "reader")),
    "start_method": (("fork", "fork"), ("forkserver", "forkserver")),
    "log_dir": (("logs", "logs"), ("/tmp/logs", "/tmp/logs")),
    "redirects": (("3", "3"), ("0:1,1:2", "0:1,1:2")),
    "tee": (("3", "3"), ("0:1,1:2", "0:1,1:2")),
    "local_ranks_filter": (("0", "0"), ("0,1", "0,1")),
    "duplicate_stdout_filters": (("a,b", ["a", "b"]), ("a,,b,c", ["a,b", "c"])),
    "duplicate_stderr_filters": (("a,b", ["a", "b"]), ("a,,b,c", ["a,b", "c"])),
    "event_log_handler": (("console", "console"), ("null", "null")),
}
SWITCHES = ["standalone", "module", "no_python", "run_path", "virtual_local_rank"]


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PET_")]:
        monkeypatch.delenv(name)


def options_of(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    return {string: action for action in parser._actions for string in action.option_strings}


def torchrun() -> argparse.ArgumentParser:
    from torch.distributed.run import get_args_parser

    parser: argparse.ArgumentParser = get_args_parser()
    return parser


def value_of(dest: str, *argv: str) -> Any:
    return getattr(parse([*argv, "train.py"]), dest)


def refused(*argv: str) -> None:
    with pytest.raises(SystemExit) as ended:
        parse([*argv, "train.py"])
    assert ended.value.code == 2


# -- the set of options -----------------------------------------------------------------------------------------------


def test_the_options_are_these_and_no_others() -> None:
    assert {name: (action.dest, action.default) for name, action in options_of(make_parser()).items()} == OPTIONS


def test_the_choices_are_these_and_no_others() -> None:
    ours = {action.dest: list(action.choices or []) for action in make_parser()._actions}
    assert {dest: ours[dest] for dest in CHOICES} == CHOICES
    for dest, choices in CHOICES.items():
        assert [value_of(dest, f"--{dest.replace('_', '-')}={choice}") for choice in choices] == choices


def test_every_torchrun_option_is_here_and_means_the_same() -> None:
    ours = options_of(make_parser())

    def meaning(action: argparse.Action) -> tuple[object, ...]:
        return (action.dest, action.default, list(action.choices or []), action.nargs, action.const)

    theirs = {name: meaning(action) for name, action in options_of(torchrun()).items()}
    assert {name: meaning(ours[name]) for name in theirs if name in ours} == theirs


def test_an_option_may_be_spelled_with_dashes_or_underscores() -> None:
    ours = options_of(make_parser())
    for name in [name for name in ours if name.startswith("--")]:
        assert ours["--" + name[2:].replace("-", "_")] is ours[name]


# -- abbreviations ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "dest", "value"),
    [
        (["--redirect=3"], "redirects", "3"),
        (["--nproc_per=2"], "nproc_per_node", "2"),
        (["--nproc-per", "2"], "nproc_per_node", "2"),
        (["--max-r", "3"], "max_restarts", 3),
        (["--stand"], "standalone", True),
        (["-r3"], "redirects", "3"),
        (["-t", "0:1"], "tee", "0:1"),
        (["--ft-rank-h", "9"], "ft_rank_heartbeat_timeout", "9"),
        (["--max-no", "9"], "ft_max_no_progress_restarts", "9"),
    ],
    ids=str,
)
def test_an_option_may_be_abbreviated(argv: list[str], dest: str, value: object) -> None:
    assert value_of(dest, *argv) == value


def test_every_abbreviation_that_torchrun_takes_means_the_same_here() -> None:
    ours, theirs = make_parser(), torchrun()

    def meant(parser: argparse.ArgumentParser, text: str) -> list[str]:
        return [found[0].dest for found in parser._get_option_tuples(text)]

    names = [name for name in options_of(theirs) if name.startswith("--")]
    prefixes = {name[:length] for name in names for length in range(3, len(name))}
    taken = {text: meant(theirs, text) for text in prefixes if len(meant(theirs, text)) == 1}
    assert {text: meant(ours, text) for text in taken} == taken


def test_the_help_shows_each_option_once_and_none_without_effect() -> None:
    text = make_parser().format_help()
    assert "--ft-rank-heartbeat-timeout S" in text
    for name in ("--ft_rank", "--ft-param-rank", *spellings("log_level", "ft-", "ft-param-")):
        assert name not in text


def test_an_ambiguous_abbreviation_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    refused("--rdzv=3")
    assert "ambiguous option: --rdzv=3" in capsys.readouterr().err


# -- variables --------------------------------------------------------------------------------------------------------


def test_the_variables_below_are_all_that_torchrun_reads() -> None:
    actions = torchrun()._actions
    assert {action.dest for action in actions if type(action).__name__ == "env"} == set(VALUED)
    assert {action.dest for action in actions if type(action).__name__ == "check_env"} == set(SWITCHES)


@pytest.mark.parametrize("dest", VALUED)
def test_an_option_may_be_given_by_its_variable_and_a_flag_beats_it(dest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (text, value), (other_text, other_value) = VALUED[dest]
    monkeypatch.setenv(f"PET_{dest.upper()}", text)
    assert value_of(dest) == value
    assert value_of(dest, f"--{dest.replace('_', '-')}", other_text) == other_value


@pytest.mark.parametrize("dest", SWITCHES)
def test_a_switch_may_be_given_by_its_variable_and_a_flag_beats_it(dest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"PET_{dest.upper()}"
    monkeypatch.setenv(name, "1")
    assert value_of(dest) is True
    monkeypatch.setenv(name, "0")
    assert value_of(dest) is False
    assert value_of(dest, f"--{dest}") is True


@pytest.mark.parametrize(
    "dest",
    ["logs_specs", "numa_binding", "cold_start", "exit_code_from_cause", "spares", "insecure", "reschedule_exit_code"],
)
def test_other_options_have_no_variable(dest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    default = value_of(dest)
    monkeypatch.setenv(f"PET_{dest.upper()}", "1")
    assert value_of(dest) == default


def test_a_flag_beats_a_variable_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_MAX_RESTARTS", "many")
    assert value_of("max_restarts", "--max-restarts=2") == 2


def test_what_was_given_is_known_however_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_START_METHOD", "fork")
    args = parse(["--monitor-interval=5", "--standalone", "train.py"])
    assert args.given == {"monitor_interval", "start_method", "standalone"}


# -- the script's own -------------------------------------------------------------------------------------------------


def test_options_after_the_script_belong_to_the_script() -> None:
    args = parse(["--nproc-per-node=2", "train.py", "--nproc-per-node=8", "-m", "--help", "--version", "--", "x"])
    assert (args.nproc_per_node, args.module, args.training_script) == ("2", False, "train.py")
    assert args.training_script_args == ["--nproc-per-node=8", "-m", "--help", "--version", "--", "x"]


@pytest.mark.parametrize(
    "line",
    [
        "train.py",
        "train.py a b",
        "--nproc-per-node 2 train.py --lr 0.1",
        "-m pkg.train --lr=0.1 -m x",
        "-m --nproc_per_node=gpu pkg.train",
        "--no-python /bin/echo -n hello",
        "--standalone --nnodes=1 --nproc-per-node=2 train.py --standalone",
        "-r 3 -t 1 train.py -r 0",
        "-- train.py --lr 0.1",
        "train.py -- --lr 0.1",
        "--nproc-per-node=2 -- train.py -- -x",
        "--duplicate-stdout-filters a,,b,c train.py",
        "--master-port=29500 --master-addr=localhost --node-rank=1 train.py",
        "--rdzv-backend=c10d --rdzv-endpoint=h:1 --rdzv-id=7 --rdzv-conf=timeout=3 train.py",
    ],
)
def test_a_command_line_is_read_as_torchrun_reads_it(line: str) -> None:
    theirs = vars(torchrun().parse_args(line.split()))
    ours = vars(parse(line.split()))
    assert {dest: ours[dest] for dest in theirs} == theirs
