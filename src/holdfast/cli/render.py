"""`holdfast render`: the file by which Slurm or Kubernetes runs a `holdfast run` job."""

from __future__ import annotations

import argparse
import os
import re
import secrets
import sys
from collections.abc import Callable, Sequence

from holdfast.cli import cluster, flags
from holdfast.cli.usage import Usage
from holdfast.render import k8s, slurm
from holdfast.render.job import Job

EPILOG = "example: holdfast render slurm --time=4:00:00 -- --nnodes=2:4 --nproc-per-node=8 --max-restarts=10 train.py\n"
# Each node would need another value.
NOT_IN_A_FILE = ("node_rank", "local_addr", "master_addr", "master_port")


def main(argv: Sequence[str]) -> int:
    words = list(argv)
    at = words.index("--") if "--" in words else len(words)
    try:
        if words[:1] in (["slurm"], ["k8s"]) and at >= len(words) - 1 and not {"-h", "--help"} & set(words):
            raise Usage(f"after -- the flags and the script of holdfast run are meant; {EPILOG.strip()}")
        args = make_parser().parse_args(words[:at])
        draw: Callable[[argparse.Namespace, Job], str] = args.draw
        text = draw(args, read(words[at + 1 :], args.gpus))
    except Usage as wrong:
        print(f"holdfast render: {wrong}", file=sys.stderr)
        return 2
    print(text, end="")
    return 0


def make_parser() -> argparse.ArgumentParser:
    parser = flags.open_parser("holdfast render", "Print the file by which a scheduler runs a job.")
    parser.epilog = EPILOG
    kinds = parser.add_subparsers(required=True, metavar="slurm|k8s")
    for name, draw, what in (
        ("slurm", _slurm, "a script for sbatch that saves and requeues itself before its time is over"),
        ("k8s", _k8s, "an indexed Job, its Service and its Secret, for kubectl apply"),
    ):
        one = kinds.add_parser(name, help=what, description=f"Print {what}.")
        one.usage = f"holdfast render {name} [options] -- <the flags and the script of holdfast run>"
        one.set_defaults(draw=draw)
        one.add_argument("--name", default="holdfast", metavar="NAME", help="the job's name (default holdfast)")
        one.add_argument(
            "--gpus", type=flags.at_least(0), metavar="N", help="GPUs of each node (default: as many as ranks)"
        )
        if name == "slurm":
            one.add_argument("--time", default="", metavar="LIMIT", help="as sbatch's: 4:00:00, 2-00, 90")
            one.add_argument("--partition", default="", metavar="NAME", help="as sbatch's")
            one.add_argument(
                "--cpus",
                type=flags.at_least(1),
                metavar="N",
                help="CPUs of each node (default: whole nodes, to itself)",
            )
        else:
            one.add_argument("--image", required=True, metavar="IMAGE", help="with holdfast and the script in it")
            one.add_argument(
                "--volume", default="", metavar="CLAIM:PATH", help="a PersistentVolumeClaim to mount there"
            )
            one.add_argument(
                "--secret", default="", metavar="NAME", help=f"a Secret that is there, with the key {k8s.KEY}"
            )
    return parser


# -- what is to be run ------------------------------------------------------------------------------------------------


def read(command: Sequence[str], gpus: int | None = None) -> Job:
    """The job of a `holdfast run` command line; raises Usage. Whether the script is there is for its nodes to say."""
    words = _without_program(command)
    _check_words(words)
    args = flags.parse(words)
    if "reschedule_exit_code" in args.given:
        raise Usage("--reschedule-exit-code: the file goes by --exit-code-from-cause; leave it out")
    smallest, largest = cluster.nodes(args.nnodes)
    several = not args.standalone and largest + args.spares > 1
    at_first = several and args.rdzv_backend != "etcd"
    if several:
        _check_several(args)
    # As it will be there, where the file names an endpoint.
    cluster.check(flags.parse(["--rdzv-backend=c10d", "--rdzv-endpoint=first", *words]) if at_first else args)
    return Job(
        command=tuple(words),
        min_nodes=smallest,
        max_nodes=largest if several else 1,
        spares=args.spares if several else 0,
        gpus=_gpus(args.nproc_per_node, gpus),
        shutdown_s=args.shutdown_timeout,
        says_cause=args.exit_code_from_cause,
        several=several,
        at_first=at_first,
        has_id="rdzv_id" in args.given,
        needs_secret=several and not args.insecure and args.secret_file is None,
    )


def _without_program(command: Sequence[str]) -> list[str]:
    """Whoever copies a whole line means the same."""
    for program in (["holdfast", "run"], ["torchrun"]):
        if list(command[: len(program)]) == program:
            return list(command[len(program) :])
    return list(command)


def _check_words(words: list[str]) -> None:
    if here := sorted(name for name in os.environ if name.startswith("PET_")):
        raise Usage(f"{here[0]} is set here, and would not be there; unset it, and give its flag after --")
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError:
            raise Usage(f"{word!r} is no text; a file cannot hold it") from None


def _check_several(args: argparse.Namespace) -> None:
    for name in NOT_IN_A_FILE:
        if name in args.given:
            raise Usage(f"--{name.replace('_', '-')}: the scheduler gives every node its place; leave it out")
    if args.rdzv_backend == "static" and "rdzv_backend" in args.given:
        raise Usage("--rdzv-backend=static needs a flag of its own on every node; leave it out, or use etcd")
    if args.rdzv_endpoint and args.rdzv_backend != "etcd":
        raise Usage("--rdzv-endpoint: nodes meet at the first of them, which the scheduler chooses; leave it out")


def _gpus(nproc: str, given: int | None) -> int:
    count = int(nproc) if nproc.isascii() and nproc.isdigit() else None
    if count == 0 or (count is None and not nproc.isidentifier()):
        raise Usage(f"--nproc-per-node={nproc}: a number of at least 1, cpu, gpu, xpu or auto is meant")
    if given is not None:
        return given
    if count is not None:
        return count
    if nproc in ("cpu", "xpu"):
        return 0
    raise Usage(f"--nproc-per-node={nproc}: how many GPUs has a node? Say so by --gpus, before --")


# -- the files --------------------------------------------------------------------------------------------------------


def _slurm(args: argparse.Namespace, job: Job) -> str:
    _match("--name", args.name, r"[\w.+-]+", "letters, digits, dashes and dots are")
    _match("--time", args.time, r"(\d+-)?\d+(:\d+){0,2}|", "4:00:00, or 2-00 for two days, is")
    if args.time and _seconds(args.time) < 2 * slurm.warning_s(job):
        # It would be warned as soon as it runs, and would go round without a step.
        raise Usage(f"--time={args.time}: it is warned {slurm.warning_s(job)} s before that; ask for more")
    _match("--partition", args.partition, r"[\w.,+-]+|", "the name of a partition is")
    return slurm.render(job, slurm.Batch(args.name, args.time, args.partition, args.cpus))


def _seconds(limit: str) -> int:
    """Of Slurm's ways to write it: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S."""
    days, _, rest = limit.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if days or len(parts) == 3:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    else:
        hours, (minutes, seconds) = 0, (*parts, 0)[:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def _k8s(args: argparse.Namespace, job: Job) -> str:
    # A pod's name in the network is the job's, a dash and its number, and has at most 63 characters.
    longest = 63 - len(f"-{job.most_nodes - 1}")
    label = rf"(?=.{{1,{longest}}}$)[a-z]([a-z0-9-]*[a-z0-9])?"
    _match("--name", args.name, label, f"at most {longest} small letters, digits and dashes, a letter first, are")
    _match("--secret", args.secret, r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?|", "the name of a Secret is")
    _match("--image", args.image, r"[\w][\w./:@+-]*", "the name of an image is")
    _match("--volume", args.volume, r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?:/[^:]*|", "CLAIM:PATH is, such as runs:/runs,")
    if args.secret and not job.needs_secret:
        raise Usage("--secret: this job needs none; leave it out")
    claim, _, mount = args.volume.partition(":")
    pods = k8s.Pods(args.image, args.name, args.secret, claim, mount)
    return k8s.render(job, pods, secrets.token_hex(32))


def _match(flag: str, value: str, pattern: str, meant: str) -> None:
    if not re.fullmatch(pattern, value, re.ASCII):
        raise Usage(f"{flag}={value}: {meant} meant")
