"""What is told of an exception that ended a rank: to the user, to the agent, and in torchrun's error file."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
import traceback
from types import TracebackType
from typing import NamedTuple

from holdfast.wire.symptoms import is_backend, is_hardware

_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_MAX_TRACEBACK_CHARS = 32_000

_MEMORY_WORDS = re.compile(r"can't allocate memory|out of memory", re.I)


class Told(NamedTuple):
    headline: str  # "ValueError: bad"
    traceback: str
    where: str  # "train.py:12"
    distributed: bool  # raised by torch's distributed layer, so perhaps by another rank's death
    out_of_memory: bool
    hardware: bool


def describe(failure: BaseException) -> Told:
    tb = _users_part(failure.__traceback__)
    text = "".join(traceback.format_exception(type(failure), failure, tb))
    frames = traceback.extract_tb(tb)
    where = f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""
    return Told(
        headline=_headline(failure),
        traceback=_encodable(text[-_MAX_TRACEBACK_CHARS:]),
        where=where,
        distributed=any(_is_distributed(link) for link in _chain(failure)),
        out_of_memory=any(_is_out_of_memory(link) for link in _chain(failure)),
        hardware=any(isinstance(link, RuntimeError) and is_hardware(str(link)) for link in _chain(failure)),
    )


def _headline(failure: BaseException) -> str:
    """The first line of the exception itself, without notes and without a syntax error's excerpt."""
    name = type(failure).__name__
    lines = [line for line in traceback.format_exception_only(type(failure), failure) if name in line.split(":")[0]]
    return _encodable((lines[0] if lines else name).strip().split("\n")[0][:300])


def _encodable(text: str) -> str:
    """File names and arguments may hold bytes that are no text; a message cannot."""
    return text.encode(errors="replace").decode()


def show(failure: BaseException) -> None:
    """Print the exception as Python would have, without the frames that are ours."""
    failure = failure.with_traceback(_users_part(failure.__traceback__))
    sys.excepthook(type(failure), failure, failure.__traceback__)


def leave_error_file(told: Told) -> None:
    """Torchrun's protocol: `@record` leaves this file; for a program without it, we do."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or os.path.exists(path):
        return
    extra = {"py_callstack": told.traceback, "timestamp": str(int(time.time()))}
    with contextlib.suppress(OSError), open(path, "w") as file:
        json.dump({"message": {"message": told.headline, "extraInfo": extra}}, file)


def _users_part(tb: TracebackType | None) -> TracebackType | None:
    """Skip our frames at the top, and the interpreter's runpy between us and the user's module."""
    while tb is not None and _is_ours(tb.tb_frame.f_code.co_filename):
        tb = tb.tb_next
    return tb


def _is_ours(filename: str) -> bool:
    return filename.startswith(_OWN) or filename in ("<string>", "<frozen runpy>") or filename.endswith("/runpy.py")


def _chain(failure: BaseException) -> list[BaseException]:
    links: list[BaseException] = []
    link: BaseException | None = failure
    while link is not None and link not in links:
        links.append(link)
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return links


def _is_distributed(failure: BaseException) -> bool:
    import torch.distributed as dist

    kinds = tuple(getattr(dist, name) for name in ("DistError",) if hasattr(dist, name))
    if isinstance(failure, kinds):
        return True
    return type(failure) in (RuntimeError, ConnectionError) and is_backend(str(failure))


def _is_out_of_memory(failure: BaseException) -> bool:
    import torch

    if isinstance(failure, (MemoryError, torch.OutOfMemoryError)):
        return True
    plain = (RuntimeError, getattr(torch, "AcceleratorError", RuntimeError))  # which older ones do not have
    return type(failure) in plain and _MEMORY_WORDS.search(str(failure)) is not None
