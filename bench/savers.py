"""Those who save a training's state, each with its best settings, and how long each holds the training up."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import shutil
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver as dcp
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.optim.optimizer import register_optimizer_step_pre_hook

import holdfast
from bench.training import Training

# -- those who save ---------------------------------------------------------------------------------------------------


class Saver:
    """`begin` saves, or begins to; `ready` returns when the optimizer may change the state; `finish` when all is
    written."""

    name: str

    def begin(self, step: int) -> None:
        raise NotImplementedError

    def ready(self) -> None: ...

    def finish(self) -> None: ...


class Ours(Saver):
    """It waits by a hook of its own before the optimizer steps."""

    name = "holdfast"

    def __init__(self, checkpointer: holdfast.Checkpointer) -> None:
        self.checkpointer = checkpointer

    def begin(self, step: int) -> None:
        if not self.checkpointer.save(step):
            raise SystemExit(f"step {step} was skipped: the one before is still being written")

    def finish(self) -> None:
        self.checkpointer.wait()


class TorchSave(Saver):
    name = "torch.save"

    def __init__(self, training: Training, folder: Path) -> None:
        self._training, self._path = training, folder / "torch_save.pt"

    def begin(self, step: int) -> None:
        torch.save(self._training.state_dict(), self._path)

    def finish(self) -> None:
        self._path.unlink(missing_ok=True)


class Distributed(Saver):
    """`dcp.save`. As many threads as help, and no fsync: `torch.save` makes none either."""

    name = "dcp.save"

    def __init__(self, training: Training, folder: Path) -> None:
        self._training, self._folder = training, folder / "dcp"

    def _writer(self) -> FileSystemWriter:
        threads = min(8, len(os.sched_getaffinity(0)))
        return FileSystemWriter(self._folder, sync_files=False, thread_count=threads)

    def begin(self, step: int) -> None:
        dcp.save(self._training.state_dict(), storage_writer=self._writer(), no_dist=True)

    def finish(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


_KEEPS_STAGER = tuple(map(int, torch.__version__.split(".")[:2])) > (2, 11)  # that one closes it after one use


class Asynchronous(Distributed):
    """`dcp.async_save` with a stager that is kept where it can be, so that its memory is made once. It stages in a
    thread, and the optimizer waits for that; memory is pinned where there is a GPU, and shared where a process is to
    write it."""

    def __init__(self, training: Training, folder: Path, process: bool) -> None:
        super().__init__(training, folder)
        kinds = dcp.AsyncCheckpointerType
        self._kind = kinds.PROCESS if process else kinds.THREAD
        self.name = f"dcp.async_save, {self._kind.value}"
        gpu = training.device.type == "cuda"
        self._options = StagingOptions(
            use_pinned_memory=gpu, use_shared_memory=process, use_async_staging=True, use_non_blocking_copy=gpu
        )
        self._stager = DefaultStager(self._options)
        self._staged: Any = None
        self._written: Any = None

    def begin(self, step: int) -> None:
        if not _KEEPS_STAGER:
            self._stager = DefaultStager(self._options)
        answer: Any = dcp.async_save(
            self._training.state_dict(),
            storage_writer=self._writer(),
            async_checkpointer_type=self._kind,
            async_stager=self._stager,
            no_dist=True,
        )
        self._staged, self._written = answer.staging_completion, answer.upload_completion

    def ready(self) -> None:
        if self._staged is not None:
            self._staged.result()
            self._staged = None

    def finish(self) -> None:
        if self._written is not None:
            self._written.result()
        super().finish()


@contextlib.contextmanager
def stock(training: Training, folder: Path) -> Iterator[list[Saver]]:
    """The four of torch. The one with a process wants a process group, and a descriptor for every tensor."""
    folder.mkdir(parents=True, exist_ok=True)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    os.environ.update(MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    try:
        yield [
            TorchSave(training, folder),
            Distributed(training, folder),
            Asynchronous(training, folder, process=False),
            Asynchronous(training, folder, process=True),
        ]
    finally:
        dist.destroy_process_group()


# -- how long they hold it up -----------------------------------------------------------------------------------------


class Sample(NamedTuple):
    held_s: float  # inside the call that saves, and before the optimizer could step
    total_s: float  # all steps


class Trial:
    """Steps with and without a save. To be made before all checkpointers: an optimizer calls the global hooks first, in
    the order in which they were made, and then its own, so that theirs lie between the two of this."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._saver: Saver | None = None
        self.steps = itertools.count(1)  # no step is saved twice
        self._since_s = self._waited_s = 0.0
        self._hooks: list[Any] = [
            register_optimizer_step_pre_hook(self._first),
            training.optimizer.register_step_pre_hook(self._last),
        ]

    def _first(self, *_: Any) -> None:
        self._since_s = time.perf_counter()

    def _last(self, *_: Any) -> None:
        if self._saver is not None:
            self._saver.ready()
        assert self._since_s > 0.0, "torch calls an optimizer's own hooks first: the order of these two is wrong"
        self._waited_s += time.perf_counter() - self._since_s
        self._since_s = 0.0

    def run(self, saver: Saver | None, beside: int) -> Sample:
        """A save, then as many steps with forward and backward. None: the optimizer steps at once, and that is all.
        What is written later is waited for, but not counted."""
        training, self._saver = self._training, saver
        self._waited_s = 0.0
        training.finish()
        began_s = time.perf_counter()
        if saver is not None:
            saver.begin(next(self.steps))
        called_s = time.perf_counter() - began_s
        for _ in range(beside):
            training.forward_backward()
            training.optimizer.step()
        if not beside:
            training.optimizer.step()
        training.finish()
        total_s = time.perf_counter() - began_s
        held_s = called_s + self._waited_s if saver is not None else 0.0
        if saver is not None:
            saver.finish()
        self._saver = None
        return Sample(held_s, total_s)

    def snapshot(self, checkpointer: holdfast.Checkpointer, step: int) -> float:
        """What a snapshot in memory holds up, if the optimizer steps at once."""
        self._waited_s = 0.0
        began_s = time.perf_counter()
        checkpointer.step(step)
        called_s = time.perf_counter() - began_s
        self._training.optimizer.step()
        return called_s + self._waited_s

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


def verdict(met: bool) -> str:
    return "met" if met else "not met"


def milliseconds(times_s: Sequence[float]) -> str:
    """The median, and how far they lie apart."""
    if not times_s:
        return ""
    return f"{1e3 * statistics.median(times_s):.1f} ms ({1e3 * min(times_s):.1f} to {1e3 * max(times_s):.1f})"


def rate(size_bytes: int, seconds: float) -> str:
    return f"{size_bytes / seconds / 1e9:.2f} GB/s"
