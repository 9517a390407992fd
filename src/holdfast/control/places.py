"""Where a stack is, in a word: in a collective, at a data loader, or at a line of the user's own."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

DATA_LOADER = "data loader"


class Frame(Protocol):
    @property
    def file(self) -> str: ...
    @property
    def line(self) -> int: ...
    @property
    def function(self) -> str: ...


_LIBRARY = re.compile(r"/(site|dist)-packages/|/lib(64)?/python\d+\.\d+/|^<frozen ")
# What a call passes through on its way into C++. Being there says nothing.
_PLUMBING = re.compile(
    r"/torch/(_ops\.py|_library/|_dynamo/eval_frame\.py|_compile\.py|utils/_contextlib\.py|distributed/c10d_logger\.py)"
)
_C10D = re.compile(r"/torch/distributed/(distributed_c10d|c10d_logger|rendezvous)\.py$")
_DDP = re.compile(r"/torch/(nn/parallel/distributed|distributed/utils)\.py$")
_FSDP = re.compile(r"/torch/distributed/(fsdp|_composable)/")
# Those of the rest of torch.distributed that wait for peers; the checkpoint code, for one, mostly waits for disks.
_WAITS = re.compile(
    r"/torch/distributed/(_functional_collectives\w*\.py|nn/functional\.py|tensor/_collective_utils\.py"
    r"|_symmetric_memory/|pipelining/|algorithms/)"
)
_BACKWARD = ("/torch/autograd/graph.py", "_engine_run_backward")
_LOADER = "/torch/utils/data/dataloader.py"
_LOADER_WAITS = ("_try_get_data", "_get_data")
_WORKER = ("/torch/utils/data/_utils/worker.py", "_worker_loop")
_FETCH = ("/torch/utils/data/_utils/fetch.py", "fetch")


def show(frame: Frame) -> str:
    return f"{os.path.basename(frame.file)}:{frame.line} {frame.function}"


def is_library(frame: Frame) -> bool:
    return _LIBRARY.search(frame.file) is not None


def is_backward(frame: Frame) -> bool:
    return _is(frame, _BACKWARD)


def collective(frames: Sequence[Frame]) -> str:
    """The operation that waits for other ranks, or ''. What counts is the innermost frame alone: a layer that computes
    below DDP's forward waits for nobody."""
    at = next((i for i, frame in enumerate(frames) if not _PLUMBING.search(frame.file)), None)
    if at is None:
        return ""
    frame = frames[at]
    if _C10D.search(frame.file):
        return _operation(frames[at:])
    if _DDP.search(frame.file):
        return _of_ddp(frames[at:])
    if _FSDP.search(frame.file):
        return f"FSDP {_public(frame.function)}"
    if _WAITS.search(frame.file):
        return _public(frame.function)
    # DDP's all-reduces are started and waited for in here, in C++.
    return "backward" if is_backward(frame) else ""


def _operation(frames: Sequence[Frame]) -> str:
    """The name that was called from outside: all_gather_object rather than the all_gather within."""
    names = []
    for frame in frames:
        if not _C10D.search(frame.file):
            break
        if not _PLUMBING.search(frame.file):
            names.append(frame.function)
    return next((name for name in reversed(names) if not name.startswith("_")), _public(names[-1]))


def _of_ddp(frames: Sequence[Frame]) -> str:
    outermost = ""
    for frame in frames:
        if not _DDP.search(frame.file):
            break
        outermost = frame.function
    return "DistributedDataParallel" if outermost == "__init__" else f"DistributedDataParallel {_public(outermost)}"


def waits_for_loader(frames: Sequence[Frame]) -> bool:
    for frame in frames:
        if frame.file.endswith(_LOADER) and frame.function in _LOADER_WAITS:
            return True
        if not is_library(frame):
            return False
    return False


def at_loader(workers: Sequence[Sequence[Frame]]) -> str:
    """What the workers do that a rank waits for, as most of them have it."""
    places = Counter(place for worker in workers if (place := _of_worker(worker)))
    if not places:
        return DATA_LOADER
    return f"{places.most_common(1)[0][0]} ({DATA_LOADER} worker)"


def _of_worker(frames: Sequence[Frame]) -> str:
    """A worker that is idle is at no place. Below its loop are the frames of the rank that it was forked from."""
    end = next((i for i, frame in enumerate(frames) if _is(frame, _WORKER)), 0)
    own = frames[:end]
    mine = next((frame for frame in own if not is_library(frame)), None)
    if mine is not None:
        return show(mine)
    return show(own[0]) if any(_is(frame, _FETCH) for frame in own) else ""


def of_user(frames: Sequence[Frame]) -> str:
    """The innermost line that is not a library's."""
    if not frames:
        return ""
    return show(next((frame for frame in frames if not is_library(frame)), frames[0]))


def _is(frame: Frame, known: tuple[str, str]) -> bool:
    return frame.file.endswith(known[0]) and frame.function == known[1]


def _public(name: str) -> str:
    return name.strip("_") or name
