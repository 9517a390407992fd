"""The flags of `holdfast run`: all of torchrun 2.13's, with its defaults, spellings and variables, and our own."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from holdfast._version import __version__
from holdfast.agent.options import CLOUDS, NUMA_MODES
from holdfast.cli import fault_tolerance
from holdfast.cli.usage import Remember, nearest

SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
OWN = {
    *("restart_policy", "restart_budget", "restart_refill", "retry_same_error", "exit_code_from_cause", "cold_start"),
    *("resume", "reschedule_exit_code", "quiet"),
    *(
        "spares",
        "standby",
        "spot",
        "rank_assignment",
        "node_timeout",
        "secret_file",
        "insecure",
        "tls_cert",
        "tls_key",
        "tls_ca",
    ),
    *fault_tolerance.DESTS,
}

_EPILOG = """\
Every option may be spelled with dashes or underscores, and torchrun's may be given as PET_<OPTION> in the environment.
--ft-NAME may also be --ft-param-NAME; those of NVIDIA's ft_launcher that have nothing to act on here are accepted too.
exit codes: 0 success, 1 failure, 2 usage; with --exit-code-from-cause a failure is
  81 the program's own error   82 torch's distributed backend   83 a signal            84 out of memory
  85 a hang                    86 a lost node                   87 stopped by a signal to holdfast
  88 a helper process of holdfast was killed                    89 failing hardware
with --reschedule-exit-code=N what another machine may cure is N: 82, 83 and 85 to 89, unless restarts got no further
"""


# One spelling of a flag is enough to know which is meant.
_SPELLINGS = re.compile(r"^argument (?:-\w/)?(--[\w-]+)(?:/\S+)?(?=: )")


class _Parser(argparse.ArgumentParser):
    """argparse, but a wrong flag is one line and not the whole usage."""

    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized arguments: "):
            unknown = message.split()[2].partition("=")[0]
            message = f"there is no flag {unknown}{nearest(unknown, list(self._option_string_actions))}"
        message = _SPELLINGS.sub(r"\1", message)
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """An abbreviation that torchrun understands means here what it means there, whatever flags we add."""
        found: list[Any] = super()._get_option_tuples(option_string)
        theirs = [match for match in found if match[0].dest not in OWN]
        # Several spellings of one option are one option.
        return list({match[0].dest: match for match in reversed(theirs or found)}.values())[::-1]


class _Help(argparse.RawDescriptionHelpFormatter):
    """argparse's, but an option is shown in one of its spellings."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        short = [name for name in action.option_strings if not name.startswith("--")]
        value = "" if action.nargs == 0 else " " + self._format_args(action, action.dest.upper())
        long = [name for name in action.option_strings if name.startswith("--")]
        return ", ".join([*short, *long[:1]]) + value


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = make_parser()
    namespace = argparse.Namespace(given={name for name in _FROM_ENV if f"PET_{name.upper()}" in os.environ})
    return parser.parse_args(list(argv), namespace)


def open_parser(program: str, description: str) -> argparse.ArgumentParser:
    return _Parser(prog=program, description=description, formatter_class=_Help)


def make_parser() -> argparse.ArgumentParser:
    parser = open_parser("holdfast run", "Run a training script on several ranks, and bring them back when one dies.")
    parser.epilog = _EPILOG
    _FROM_ENV.clear()
    _add_size_and_restarts(parser)
    _add_rendezvous(parser)
    _add_program(parser)
    _add_logs(parser)
    _add_own(parser)
    fault_tolerance.add(parser)
    add_trust(parser)
    parser.add_argument("training_script", help="the script, module or program that each rank runs")
    parser.add_argument(
        "training_script_args", nargs=argparse.REMAINDER, help="its arguments; ${local_rank} is replaced"
    )
    return parser


_FROM_ENV: list[str] = []


def _add(group: Any, name: str, *short: str, env: bool = True, **options: Any) -> None:
    """An option in both spellings, with its default from PET_<NAME> where torchrun has that too."""
    dest = name.replace("-", "_")
    flag = options.pop("flag", False)
    if env:
        _FROM_ENV.append(dest)
        given = os.environ.get(f"PET_{dest.upper()}")
        if flag:
            options["default"] = _env_flag(dest, given)
        elif given is not None:
            options["default"] = given
    elif flag:
        options["default"] = False
    if flag:
        options |= {"nargs": 0, "const": True}
    spellings = dict.fromkeys([*short, f"--{name}", f"--{dest}"])
    group.add_argument(*spellings, dest=dest, action=Remember, **options)


def _env_flag(dest: str, given: str | None) -> bool:
    try:
        return bool(int(given or "0"))
    except ValueError:
        raise SystemExit(_usage(f"PET_{dest.upper()}={given}: 0 or 1 is meant")) from None


def _usage(message: str) -> int:
    import sys

    print(f"holdfast run: {message}", file=sys.stderr)
    return 2


def at_least(minimum: int, maximum: int | None = None) -> Callable[[str], int]:
    def number(text: str) -> int:
        value = int(text)
        if value < minimum:
            raise argparse.ArgumentTypeError(f"{text} is less than {minimum}")
        if maximum is not None and value > maximum:
            raise argparse.ArgumentTypeError(f"{text} is more than {maximum}")
        return value

    number.__name__ = "int"
    return number


def _checkpoint(text: str) -> str:
    """Which checkpoint is meant. Whether it is there is known only to ranks, which have the directory."""
    kind, separated, number = text.partition(":")
    if kind in ("epoch", "step") and separated and not (number.isascii() and number.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text}: a number is meant after {kind}:")
    if not text.strip():
        raise argparse.ArgumentTypeError("latest, best, epoch:N, step:N or a path is meant")
    return text


def _seconds(text: str) -> float:
    value = float(text)
    if not 0.05 <= value < 1e6:
        raise argparse.ArgumentTypeError(f"{text}: a number of seconds from 0.05 up is meant")
    return value


def _commas(text: str) -> list[str]:
    """A comma-separated list in which `,,` stands for a comma."""
    return [item.replace("\0", ",") for item in text.replace(",,", "\0").split(",")]


def _add_size_and_restarts(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("ranks and restarts")
    _add(group, "nnodes", default="1:1", metavar="N|MIN:MAX", help="number of nodes, or its range (default 1:1)")
    _add(
        group,
        "nproc-per-node",
        default="1",
        metavar="N",
        help="ranks on this node: a number, cpu, gpu, xpu or auto (default 1)",
    )
    _add(
        group,
        "max-restarts",
        type=at_least(0),
        default=0,
        metavar="N",
        help="restarts before giving up (default 0)",
    )
    _add(
        group,
        "shutdown-timeout",
        type=at_least(0),
        default=None,
        metavar="S",
        help="seconds between asking a rank to end and SIGKILL, on every path "
        "(default $TORCH_ELASTIC_SHUTDOWN_TIMEOUT, else 30)",
    )
    _add(
        group,
        "signals-to-handle",
        default=SIGNALS,
        metavar="LIST",
        help=f"signals that end the job and are passed on to the ranks (default {SIGNALS})",
    )
    _add(
        group, "monitor-interval", type=float, default=0.1, metavar="S", help="no effect: ranks are watched, not polled"
    )


def add_meeting(parser: argparse.ArgumentParser) -> Any:
    group = parser.add_argument_group("how nodes find each other")
    _add(group, "rdzv-backend", default="static", metavar="NAME", help="static, c10d or etcd (default static)")
    _add(
        group,
        "rdzv-endpoint",
        default="",
        metavar="HOST[:PORT]",
        help="where the nodes meet: one of them with c10d (port 29400), or etcd's members, separated by commas (2379)",
    )
    _add(group, "rdzv-id", default="none", metavar="ID", help="the job's id (default: a random one on a single node)")
    _add(
        group,
        "rdzv-conf",
        default="",
        metavar="K=V,...",
        help="join_timeout (600 s), last_call_timeout (0 s), close_timeout (30 s), is_host; "
        "etcd: user, cacert, ssl_cert, ssl_cert_key",
    )
    _add(group, "local-addr", default=None, metavar="HOST", help="address of this node (default: found by connecting)")
    _add(group, "node-rank", type=at_least(0), default=0, metavar="N", help="this node's rank, with static")
    _add(group, "master-addr", default="127.0.0.1", metavar="HOST", help="address of rank 0's node, with static")
    _add(
        group,
        "master-port",
        type=at_least(1, 65535),
        default=None,
        metavar="PORT",
        help="port there (default: 29500 with several nodes, else any free one)",
    )
    return group


def _add_rendezvous(parser: argparse.ArgumentParser) -> None:
    _add(add_meeting(parser), "standalone", flag=True, help="one node that needs none of these")


def add_trust(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("how nodes trust each other")
    _add(
        group,
        "secret-file",
        env=False,
        default=None,
        metavar="FILE",
        help="the secret that the nodes share (default: $HOLDFAST_SECRET, else ~/.config/holdfast/secret)",
    )
    _add(group, "insecure", env=False, flag=True, help="let nodes in without a secret")
    _add(group, "tls-cert", env=False, default=None, metavar="FILE", help="encrypt between nodes: certificate,")
    _add(group, "tls-key", env=False, default=None, metavar="FILE", help="its key,")
    _add(group, "tls-ca", env=False, default=None, metavar="FILE", help="and who must have signed the others'")


def _add_program(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what each rank runs")
    _add(group, "module", "-m", flag=True, help="the script is a module name, as for python -m")
    _add(group, "no-python", flag=True, help="the script is a program of its own, started by exec")
    _add(
        group, "run-path", flag=True, help="as torchrun's: run the script in this interpreter, which is always so here"
    )
    _add(group, "role", default="default", metavar="NAME", help="name of this role (default default)")
    _add(
        group,
        "start-method",
        default="spawn",
        choices=["spawn", "fork", "forkserver"],
        help="no effect: ranks are forked from a process that has torch loaded",
    )
    _add(group, "virtual-local-rank", flag=True, help="LOCAL_RANK=0 everywhere; each rank sees its own GPU alone")
    _add(
        group,
        "numa-binding",
        env=False,
        default=None,
        choices=NUMA_MODES,
        help="keep each rank on the CPUs near its GPU",
    )


def _add_logs(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output and events")
    _add(group, "log-dir", default=None, metavar="DIR", help="where run directories go (default: a temporary one)")
    _add(group, "redirects", "-r", default="0", metavar="STD", help="streams to files: 0..3, or RANK:STD,...")
    _add(group, "tee", "-t", default="0", metavar="STD", help="streams to files and console; same form")
    _add(group, "local-ranks-filter", default="", metavar="LIST", help="show only these local ranks on the console")
    _add(
        group,
        "duplicate-stdout-filters",
        type=_commas,
        default=[],
        metavar="LIST",
        help="copy tee'd lines with any of these texts to filtered_stdout.log",
    )
    _add(
        group,
        "duplicate-stderr-filters",
        type=_commas,
        default=[],
        metavar="LIST",
        help="the same for filtered_stderr.log",
    )
    _add(
        group,
        "logs-specs",
        env=False,
        default=None,
        metavar="NAME",
        help="a torchrun.logs_specs plug-in that places the streams",
    )
    _add(
        group,
        "event-log-handler",
        default="null",
        metavar="NAME",
        help="null, or console for torchelastic's events on stderr (default null)",
    )
    _add(group, "quiet", "-q", env=False, flag=True, help="say nothing but what goes wrong; show no progress")


def _add_own(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("holdfast's own")
    _add(
        group,
        "restart-policy",
        env=False,
        default="any-failed",
        choices=["any-failed", "min-healthy"],
        help="end the world if one rank fails, or only when fewer than MIN nodes are healthy; ranks that can stay go "
        "on in the next one (default any-failed)",
    )
    _add(
        group,
        "restart-budget",
        env=False,
        default="all",
        choices=["all", "failures"],
        help="what --max-restarts counts: also nodes that join, leave or die, or failures of ranks alone (default all)",
    )
    _add(
        group,
        "restart-refill",
        env=False,
        type=at_least(1),
        default=None,
        metavar="STEPS",
        help="give one restart back after so many good steps",
    )
    _add(
        group,
        "spares",
        env=False,
        type=at_least(0),
        default=0,
        metavar="N",
        help="hold N nodes back as hot spares; nodes beyond MAX always are",
    )
    _add(
        group,
        "standby",
        env=False,
        type=at_least(0),
        default=0,
        metavar="N",
        help="keep N started processes on each node, to be ranks where ranks die; for programs with holdfast.init()",
    )
    _add(
        group,
        "rank-assignment",
        env=False,
        default="infrastructure",
        choices=["infrastructure", "deterministic"],
        help="node ranks by SLURM_PROCID, GROUP_RANK or arrival, or kept from the last world (default infrastructure)",
    )
    _add(
        group,
        "node-timeout",
        env=False,
        type=_seconds,
        default=3.0,
        metavar="S",
        help="a node that is silent for so long is lost (default 3)",
    )
    _add(
        group,
        "on-straggler",
        env=False,
        default="warn",
        choices=["warn", "replace"],
        help="say which rank holds the others up, or have a spare node take the place of its node (default warn)",
    )
    _add(
        group,
        "dashboard",
        env=False,
        default=None,
        metavar="[HOST:]PORT",
        help="show the job on a web page, with metrics for Prometheus; for this machine alone unless HOST says more",
    )
    _add(
        group,
        "preflight",
        env=False,
        flag=True,
        help="check this node with holdfast doctor before the first world, and keep it out if it fails",
    )
    _add(
        group,
        "spot",
        env=False,
        default=None,
        choices=CLOUDS,
        help="leave the job in order when this cloud takes the machine back, as by SIGTERM",
    )
    _add(
        group,
        "retry-same-error",
        env=False,
        flag=True,
        help="go on even if the script raised the same exception three times in a row before its first step",
    )
    _add(
        group,
        "resume",
        env=False,
        type=_checkpoint,
        default=None,
        metavar="WHICH",
        help="the checkpoint to begin with: latest (the default), best, epoch:N, step:N or a path",
    )
    _add(group, "exit-code-from-cause", env=False, flag=True, help="exit with a code that names the cause, see below")
    _add(
        group,
        "reschedule-exit-code",
        env=False,
        type=at_least(1, 255),
        default=None,
        metavar="N",
        help="exit with N where another machine may do better, or the job was stopped by a signal; see below",
    )
    _add(group, "cold-start", env=False, flag=True, help="start each rank as a new process that imports torch itself")
    group.add_argument("--version", action="version", version=f"holdfast {__version__}")
