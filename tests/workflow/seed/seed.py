"""The seed's way: an error of the backend is written to a file, of which the launch script makes an exit code."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from train_ddp import Trainer


def train(args: argparse.Namespace, rank: int) -> None:
    trainer = Trainer(args.snapshot_path, torch.device("cpu"))
    while trainer.epochs_run < args.total_epochs:
        if trainer.epochs_run == args.fail_at:
            raise dist.DistBackendError("NCCL error: unhandled system error")
        trainer.run_epoch(5)
        with open(args.steps, "a") as steps:
            steps.write(f"{os.environ['HOLDFAST_ATTEMPT']} {rank} {trainer.epochs_run} {time.time()}\n")
        if rank == 0:
            trainer.save()


def is_of_the_backend(failure: RuntimeError) -> bool:
    """gloo's are no more than that."""
    return any(word in str(failure) for word in ("gloo", "Connection", "peer"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--total_epochs", type=int)
    parser.add_argument("--snapshot_path", type=Path)
    parser.add_argument("--error_log")
    parser.add_argument("--steps", type=Path)
    parser.add_argument("--fail_at", type=int, default=-1)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    try:
        train(args, rank)
    except (dist.DistBackendError, ChildFailedError, RuntimeError) as failure:
        if not isinstance(failure, dist.DistBackendError | ChildFailedError) and not is_of_the_backend(failure):
            raise
        if not args.error_log:
            raise
        with open(f"{args.error_log}.rank_{rank}", "a") as log:
            log.write(f"Training error occurred: {failure}\n")
        leave()  # its process group is broken, and would wait for the others
    dist.barrier()
    dist.destroy_process_group()
    leave()


def leave() -> None:
    """Without the end of the interpreter, in which a thread of torch 2.13's gloo aborts the process now and then."""
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
