"""What is told of an exception: its headline, the user's part of its traceback, and whether another rank may be why."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed as dist

import holdfast
from holdfast.agent.streams import Lines
from holdfast.wire.messages import Raised
from holdfast.worker.errors import Told, describe, leave_error_file, show

OURS = str(Path(holdfast.__file__).parent)  # the clone's own folder may have any name


def raised(action: Callable[[], object]) -> BaseException:
    try:
        action()
    except BaseException as failure:
        return failure
    raise AssertionError("it did not raise")


def told_of(failure: BaseException) -> Told:
    def fail() -> None:
        raise failure

    return describe(raised(fail))


def raised_below_us(failure: BaseException) -> BaseException:
    """An exception from a user's function that code of holdfast called, as seen from there."""

    def user_function(_: bytes) -> None:
        raise failure

    caught = raised(lambda: Lines(user_function).feed(b"x\n"))
    while caught.__traceback__ is not None and not is_ours(caught):
        caught = caught.with_traceback(caught.__traceback__.tb_next)
    return caught


def is_ours(failure: BaseException) -> bool:
    assert failure.__traceback__ is not None
    return failure.__traceback__.tb_frame.f_code.co_filename.startswith(OURS)


# -- headlines --------------------------------------------------------------------------------------------------------


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def noted() -> ValueError:
    failure = ValueError("bad")
    failure.add_note("ValueError: a note that looks like one")
    return failure


@pytest.mark.parametrize(
    ("failure", "headline"),
    [
        (ValueError("bad"), "ValueError: bad"),
        (ValueError(), "ValueError"),
        (KeyError("lr"), "KeyError: 'lr'"),
        (ValueError("first\nsecond\nthird"), "ValueError: first"),
        (noted(), "ValueError: bad"),
        (FileNotFoundError(2, "No such file or directory", "x"), "FileNotFoundError: [Errno 2] No such file"),
        (ExceptionGroup("many", [ValueError("bad")]), "ExceptionGroup: many (1 sub-exception)"),
        (ValueError("x" * 1000), "ValueError: xxx"),
    ],
    ids=["plain", "empty", "key", "lines", "note", "os", "group", "long"],
)
def test_a_headline_is_the_first_line_of_the_exception(failure: BaseException, headline: str) -> None:
    told = told_of(failure).headline
    assert told.startswith(headline)
    assert len(told) <= 300
    assert "\n" not in told


def test_a_headline_of_a_library_has_its_module() -> None:
    assert told_of(torch.OutOfMemoryError("full")).headline == "torch.OutOfMemoryError: full"


def test_a_headline_of_a_syntax_error_is_not_its_excerpt() -> None:
    failure = raised(lambda: compile("x = (1,\nSyntaxError = = 2\n", "train.py", "exec"))
    assert describe(failure).headline.startswith("SyntaxError: ")


def test_an_exception_that_cannot_be_printed_is_told_of() -> None:
    assert "Mute" in told_of(Mute()).headline


# -- tracebacks -------------------------------------------------------------------------------------------------------


def test_the_traceback_begins_with_the_users_code() -> None:
    failure = raised_below_us(ValueError("bad"))
    assert is_ours(failure)
    told = describe(failure)
    assert "streams.py" not in told.traceback
    assert "in user_function" in told.traceback
    assert told.traceback.endswith("ValueError: bad\n")


def test_the_place_is_the_line_that_raised() -> None:
    failure = raised(lambda: int("x"))
    assert failure.__traceback__ is not None
    last = failure.__traceback__
    while last.tb_next is not None:
        last = last.tb_next
    assert describe(failure).where == f"test_errors_unit.py:{last.tb_lineno}"


def test_an_exception_that_was_never_raised_has_no_place() -> None:
    assert describe(ValueError("bad")).where == ""


def test_causes_are_part_of_the_traceback() -> None:
    def fail() -> None:
        try:
            raise KeyError("lr")
        except KeyError as missing:
            raise ValueError("bad config") from missing

    told = describe(raised(fail))
    assert "KeyError: 'lr'" in told.traceback
    assert "The above exception was the direct cause" in told.traceback
    assert told.headline == "ValueError: bad config"


def test_a_long_traceback_keeps_its_end() -> None:
    told = told_of(ValueError("x" * 100_000 + "the end"))
    assert len(told.traceback) <= 32_000
    assert told.traceback.endswith("the end\n")


def test_the_user_is_shown_their_part_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)  # torch has its own where a group was made
    show(raised_below_us(ValueError("bad")))
    shown = capsys.readouterr().err
    assert shown.startswith("Traceback (most recent call last):\n")
    assert "streams.py" not in shown
    assert shown.endswith("ValueError: bad\n")


# -- kinds ------------------------------------------------------------------------------------------------------------


def from_(failure: BaseException, cause: BaseException) -> BaseException:
    failure.__cause__ = cause
    return failure


def while_handling(failure: BaseException, context: BaseException, suppressed: bool = False) -> BaseException:
    failure.__context__ = context
    failure.__suppress_context__ = suppressed
    return failure


GLOO = RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]")


@pytest.mark.parametrize(
    ("failure", "distributed"),
    [
        (dist.DistBackendError("NCCL error"), True),
        (dist.DistNetworkError("The client socket has timed out"), True),
        (dist.DistStoreError("wait timeout"), True),
        (GLOO, True),
        (RuntimeError("Socket Timeout"), True),
        (RuntimeError("NCCL communicator was aborted on rank 1."), True),
        (ConnectionError("Connection reset by peer"), True),
        (from_(ValueError("evaluation failed"), GLOO), True),
        (while_handling(ValueError("evaluation failed"), GLOO), True),
        (while_handling(ValueError("evaluation failed"), GLOO, suppressed=True), False),
        (ValueError("gloo is not a word here"), False),
        (RuntimeError("shape mismatch"), False),
        (ConnectionResetError(104, "Connection reset by peer"), False),
        (KeyError("nccl"), False),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_what_torchs_distributed_layer_raised_may_be_another_ranks_fault(
    failure: BaseException, distributed: bool
) -> None:
    assert told_of(failure).distributed is distributed


@pytest.mark.parametrize(
    ("failure", "out_of_memory"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (torch.AcceleratorError("CUDA error: out of memory"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes"), True),
        (from_(ValueError("step failed"), MemoryError()), True),
        (ValueError("out of memory"), False),
        (RuntimeError("out of range"), False),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_what_ran_out_of_memory_is_known(failure: BaseException, out_of_memory: bool) -> None:
    assert told_of(failure).out_of_memory is out_of_memory


ECC = torch.AcceleratorError(
    "CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be asynchronously reported"
)


@pytest.mark.parametrize(
    ("failure", "hardware"),
    [
        (ECC, True),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), True),
        (torch.AcceleratorError("CUDA error: uncorrectable NVLink error detected during the execution"), True),
        (torch.AcceleratorError("CUDA error: hardware stack error"), True),
        (torch.AcceleratorError("CUDA error: Invalid access of peer GPU memory over nvlink or a hardware error"), True),
        (torch.AcceleratorError("CUDA error: CUDA-capable device(s) is/are busy or unavailable"), True),
        (torch.AcceleratorError("CUDA error: system not yet initialized"), True),
        (RuntimeError("Unable to determine the device handle for GPU0000:1B:00.0: GPU is lost"), True),
        (RuntimeError("NVRM: Xid (PCI:0000:1b:00): 79, pid=1, GPU has fallen off the bus."), True),
        (RuntimeError("NVRM: Xid (PCI:0000:1b:00): 94, Contained memory error"), True),
        (RuntimeError("NVRM: Xid (PCI:0000:1b:00): 31, MMU Fault"), False),
        (dist.DistBackendError("NCCL error: unhandled cuda error 'uncorrectable ECC error encountered'"), True),
        (from_(ValueError("step failed"), ECC), True),
        (torch.AcceleratorError("CUDA error: device-side assert triggered"), False),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), False),
        (torch.AcceleratorError("CUDA error: unspecified launch failure"), False),
        (RuntimeError("0 volatile uncorrectable ECC errors"), False),
        (ValueError("uncorrectable ECC error encountered"), False),
    ],
    ids=lambda value: repr(value)[:60],
)
def test_hardware_is_known_by_the_drivers_words(failure: BaseException, hardware: bool) -> None:
    assert told_of(failure).hardware is hardware


def test_exceptions_that_cause_each_other_are_no_endless_chain() -> None:
    one, other = ValueError("one"), ValueError("other")
    one.__context__, other.__context__ = other, one
    assert not describe(one).distributed


# -- the error file ---------------------------------------------------------------------------------------------------


def test_the_error_file_is_one_that_torchrun_can_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    told = told_of(ValueError("schlecht \N{SNOWMAN}"))
    leave_error_file(told)
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(path))
    assert failure.error_file_data == json.loads(path.read_text())
    assert failure.error_file_data["message"]["message"] == "ValueError: schlecht \N{SNOWMAN}"
    assert failure.error_file_data["message"]["extraInfo"]["py_callstack"] == told.traceback
    assert failure.timestamp > 0


def test_an_error_file_that_record_has_left_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "error.json"
    path.write_text("from @record")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    leave_error_file(told_of(ValueError("bad")))
    assert path.read_text() == "from @record"


@pytest.mark.parametrize("path", [None, "", "/proc/nowhere/error.json"])
def test_without_a_place_for_it_there_is_no_error_file(path: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    if path is not None:
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", path)
    leave_error_file(told_of(ValueError("bad")))


@pytest.mark.parametrize("text", ["caf\udce9.txt", "\ud800"], ids=["file name", "half a pair"])
def test_an_exception_with_text_that_is_no_unicode_can_be_reported(text: str) -> None:
    """A file name that is no UTF-8 looks like this in Python; so may a text that a tokenizer cut in two."""
    told = told_of(ValueError(f"cannot read {text}"))
    msgspec.msgpack.encode(Raised(0, 0, 1.0, told.headline, told.traceback, told.where))
