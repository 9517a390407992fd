"""`holdfast chaos`: break a job on purpose, by a plan, and judge how it came through."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from holdfast.chaos import plan
from holdfast.chaos.kinds import KINDS, NEEDS
from holdfast.chaos.plan import Wrong
from holdfast.cli.flags import open_parser


def main(argv: Sequence[str]) -> int:
    ours, command = _split(list(argv))
    args = make_parser().parse_args(ours)
    try:
        if args.act == "kinds":
            return _kinds()
        if args.act == "check":
            return _check(args.plan)
        if args.act == "judge":
            return _judge(args.folder, args.json)
        return _run(args, command)
    except Wrong as wrong:
        return _complain(str(wrong), 2)


def make_parser() -> argparse.ArgumentParser:
    parser = open_parser("holdfast chaos", "Break a job on purpose, by a plan, and judge how it came through.")
    acts = parser.add_subparsers(required=True, dest="act", metavar="run|check|judge|kinds")
    running = acts.add_parser(
        "run",
        help="run a job under a plan",
        usage="holdfast chaos run PLAN [options] -- [holdfast run flags] script ...",
    )
    running.add_argument("plan", metavar="PLAN", help="a TOML file")
    running.add_argument("--seed", type=int, help="instead of the plan's")
    running.add_argument(
        "--log-dir", default="chaos", metavar="DIR", help="for the campaign's folder (default: %(default)s)"
    )
    running.add_argument("--no-twin", action="store_true", help="do not run the job undisturbed, nor compare weights")
    checking = acts.add_parser("check", help="say what a plan would do")
    checking.add_argument("plan", metavar="PLAN", help="a TOML file")
    judging = acts.add_parser("judge", help="judge a campaign that has ended")
    judging.add_argument("folder", metavar="DIR", help="the campaign's folder")
    for each in (running, judging):
        each.add_argument("--json", action="store_true", help="the verdict, for programs")
    acts.add_parser("kinds", help="list the kinds of faults")
    return parser


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    at = argv.index("--") if "--" in argv else len(argv)
    return argv[:at], argv[at + 1 :]


def _run(args: argparse.Namespace, command: list[str]) -> int:
    if not command:
        return _complain(
            "run: no job; add -- and what you would give to holdfast run, as -- --nproc-per-node=2 train.py", 2
        )
    if any(word.replace("_", "-").partition("=")[0] == "--log-dir" for word in command):
        return _complain("run: --log-dir stands before the --; the campaign has to find the job's record", 2)
    planned = plan.read(args.plan)
    from holdfast.chaos import campaign

    try:
        folder = campaign.make_folder(args.log_dir)
        seed = args.seed if args.seed is not None else planned.seed
        judged = campaign.run(folder, args.plan, planned, seed, command, not args.no_twin, _say)
    except campaign.Failed as failure:
        return _complain(str(failure), 1)
    _show(judged, args.json)
    _say(f"more in {os.path.relpath(folder)}; holdfast chaos judge {os.path.relpath(folder)} shows this again")
    return 0 if judged.held else 1


def _check(path: str) -> int:
    planned = plan.read(path)
    from holdfast.chaos import campaign

    dues = plan.draw(planned, planned.seed)
    counts = {name: sum(due.kind.name == name for due in dues) for name in KINDS}
    for name, count in counts.items():
        if count:
            print(f"{count:6}  {name:17} {KINDS[name].what}")
    print(f"{len(dues):6}  faults from seed {planned.seed}")
    if lacks := campaign.missing(planned):
        return _complain(f"{path} needs {' and '.join(lacks)}, which is not here", 1)
    return 0


def _judge(folder: str, as_json: bool) -> int:
    from holdfast.chaos import verdict

    try:
        judged = verdict.judge(verdict.load(Path(folder)))
    except OSError as failure:
        return _complain(
            f"{folder} is no folder of a campaign that has ended: {failure.filename}: {failure.strerror}", 2
        )
    except msgspec.MsgspecError as failure:
        return _complain(f"{folder} is damaged: {failure}", 2)
    _show(judged, as_json)
    return 0 if judged.held else 1


def _kinds() -> int:
    for kind in KINDS.values():
        needs = f"; needs {' and '.join(NEEDS[need] for need in kind.needs)}" if kind.needs else ""
        causes = f" ({', '.join(sorted(kind.causes))})" if kind.causes else ""
        told = f", and {kind.told} where it can be seen" if kind.told else ""
        print(f"{kind.name:17} {kind.what}\n{'':17} expects {kind.answer}{causes}{told}{needs}")
    return 0


def _show(judged: object, as_json: bool) -> None:
    from holdfast.chaos import verdict

    assert isinstance(judged, verdict.Verdict)
    print(msgspec.json.encode(judged).decode() if as_json else verdict.text(judged), flush=True)


def _say(text: str) -> None:
    print(f"holdfast chaos: {text}", file=sys.stderr, flush=True)


def _complain(message: str, code: int) -> int:
    _say(message)
    return code
