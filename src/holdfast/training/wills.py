"""A rank's will: its state, left in memory by one that cannot leave its world, for whoever takes its place.

What it is stuck in may be user's C code, or gloo, which tells nobody who waits for a message that was cut off in its
middle. Its state is whole all the same: the step in which it is stuck was not done.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Mapping
from typing import Any

import msgspec
import torch

from holdfast.checkpoint import contents
from holdfast.checkpoint.placing import prepare
from holdfast.training.handover import Described, Offer, Peer, chunks, described, view

_HEAD = 8


class Will(msgspec.Struct, frozen=True, array_like=True):
    offer: Offer
    described: Described
    randomness: dict[str, Any]


def write(
    state: Mapping[str, Any], offer: Offer, randomness: Mapping[str, Any], instead: Mapping[int, torch.Tensor]
) -> int:
    """A file without a name. In a thread of its own, whatever the others do. `instead`, by address: what these have
    changed already."""
    found = contents.collect(state)
    will = Will(offer, described(found), dict(randomness))
    head = msgspec.msgpack.encode(will)
    pieces = list(chunks(will.described))
    begin = _begin(len(head))
    fd = os.memfd_create("holdfast-will", os.MFD_CLOEXEC)
    with contextlib.ExitStack() as unless_whole:
        unless_whole.callback(os.close, fd)
        os.ftruncate(fd, begin + sum(size for _, size in pieces) or 1)
        with mmap.mmap(fd, 0) as file, torch.no_grad(), _apart():
            file[: _HEAD + len(head)] = len(head).to_bytes(_HEAD, "little") + head
            memory = torch.frombuffer(file, dtype=torch.uint8)
            for piece, size in pieces:
                for key, at, dtype, shape in piece:
                    now = found.tensors[key].detach()
                    view(memory, begin + at, dtype, shape).copy_(instead.get(now.data_ptr(), now))
                begin += size
            del memory
        unless_whole.pop_all()
    return fd


def read(path: str, state: Mapping[str, Any]) -> Will | None:
    """Put it into `state`. None: it is gone, and `state` as it was."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    with open(fd, "rb") as file, mmap.mmap(fd, 0, access=mmap.ACCESS_COPY) as bytes_:
        length = int.from_bytes(file.read(_HEAD), "little")
        will = msgspec.msgpack.decode(file.read(length), type=Will)
        placing = prepare(state, Peer(will.offer.step, will.described))
        memory = torch.frombuffer(bytes_, dtype=torch.uint8)
        begin = _begin(length)
        with torch.no_grad():
            for piece, size in chunks(will.described):
                for key, at, dtype, shape in piece:
                    if (target := placing.targets.get(key)) is not None:
                        target.detach().copy_(view(memory, begin + at, dtype, shape))
                begin += size
        del memory
    for each in placing.finish:
        each()
    return will


def _begin(head: int) -> int:
    return -(-(_HEAD + head) // 4096) * 4096


def _apart() -> contextlib.AbstractContextManager[Any]:
    """From what the GPU may be stuck in, too."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.Stream())  # type: ignore[no-untyped-call]
