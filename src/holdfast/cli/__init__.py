"""The command line: one file a subcommand. This one only finds the subcommand, so that nothing unused is imported."""

from __future__ import annotations

import importlib
import os
import signal
import sys

_COMMANDS = {
    "run": "run a training script on ranks that come back when one is killed; takes torchrun's flags",
    "status": "show on one screen how a job is, what happened and what it cost",
    "top": "watch a running job: its nodes, ranks, steps and incidents",
    "logs": "show what ranks have printed, by rank and generation",
    "ls": "list the jobs of this machine, running and ended",
    "nodes": "show the nodes of a running job, or take back one that was set aside",
    "stacks": "show what the ranks of a running job are doing, and whom the others wait for",
    "report": "divide a job's wall clock: training, and what each incident cost",
    "dashboard": "show a job on a web page, with its metrics for Prometheus",
    "doctor": "check this machine, and the way between nodes, before a job depends on them",
    "chaos": "break a job on purpose, by a plan, and judge how it came through",
    "checkpoint": "list, verify, export, pin or remove what training has saved",
    "workflow": "run the tasks of a workflow file, and reschedule those that fail for reasons that this can cure",
    "render": "print the file by which Slurm or Kubernetes runs a job",
    "simulate": "try the control plane against simulated disasters, from a seed",
}


def main() -> None:
    command, *rest = sys.argv[1:] or ["--help"]
    if command in _COMMANDS:
        try:
            code = importlib.import_module(f"holdfast.cli.{command}").main(rest)
            if sys.stdout is not None:
                sys.stdout.flush()
        except BrokenPipeError:  # who reads this has seen enough, as `head` does
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            code = 128 + signal.SIGPIPE
        sys.exit(code)
    if command in ("-h", "--help"):
        print("usage: holdfast <command> ...\n")
        for name, what in _COMMANDS.items():
            print(f"  {name:10} {what}")
        print("\nholdfast <command> --help says more. holdfast --version prints the version.")
        sys.exit(0)
    if command == "--version":
        from holdfast._version import __version__

        print(f"holdfast {__version__}")
        sys.exit(0)
    print(f"holdfast: there is no command {command!r}; try: holdfast run --help", file=sys.stderr)
    sys.exit(2)
