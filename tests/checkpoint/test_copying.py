"""Copying a state into a slot beside training, with real threads and forks."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from holdfast.checkpoint import copying, devices, plans
from holdfast.checkpoint.copying import Copier
from holdfast.checkpoint.devices import Gathered
from holdfast.checkpoint.format import ITEM_BYTES
from holdfast.checkpoint.plans import Plan, Position
from holdfast.checkpoint.slots import DATA_AT, Slot

ALONE = Position(rank=0, world_size=1, local_rank=0, local_size=1, node=0, nodes=1)


def plan_of(tensors: dict[str, torch.Tensor], volatile: tuple[str, ...] = ()) -> Plan:
    return plans.Planner(ALONE, shared=True).plan(tensors, volatile)


def content(plan: Plan, data: memoryview, key: str) -> torch.Tensor:
    piece = next(piece for piece in plan.pieces if piece.key == key)
    if piece.size_bytes == 0:
        return torch.empty(piece.sizes)
    raw = torch.frombuffer(data, dtype=torch.uint8)[piece.at : piece.at + piece.size_bytes]
    return raw.view(getattr(torch, piece.dtype)).view(piece.sizes)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit."""
    one, other = (
        x.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8) for x in (one, other)
    )
    return torch.equal(one, other)


@pytest.fixture
def copier() -> Iterator[Copier]:
    copier = Copier()
    yield copier
    copier.close()


def copy(copier: Copier, plan: Plan) -> memoryview:
    data = memoryview(bytearray(plan.data_bytes))
    failures: list[Exception | None] = []
    copier.start(plan, data, failures.append)
    assert copier.wait()
    assert failures == [None]
    return data


def odd_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    base = torch.randn(300, 200)
    imaginary = torch.randn(100, 100, dtype=torch.complex64)
    tensors = {
        "dense": base,
        "parameter": torch.nn.Parameter(torch.randn(64, 64)),
        "transposed": base.t(),
        "strided": base[::3, 1::2],
        "channels last": torch.randn(4, 8, 16, 16).to(memory_format=torch.channels_last),
        "expanded": torch.randn(1, 2000).expand(50, 2000),
        "flipped": base.flip(0),
        "offset": base.reshape(-1)[7:50_007],
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 5),
        "conjugate": imaginary.conj(),
        "conjugate too": imaginary.t().conj().t(),
        "negative": imaginary.conj().imag,
        "dense negative": torch._neg_view(base),
        "large": torch.randint(0, 255, (copying._PART_BYTES * 2 + 12345,), dtype=torch.uint8),
    }
    for name in ITEM_BYTES:
        tensors[name] = torch.randint(0, 2, (3000, ITEM_BYTES[name]), dtype=torch.uint8).view(getattr(torch, name))
        tensors[f"{name} strided"] = tensors[name][::2]
        tensors[f"{name} small"] = tensors[name][:3]
    return tensors


def test_every_kind_of_tensor_is_copied_bit_for_bit(copier: Copier) -> None:
    tensors = odd_tensors()
    plan = plan_of(tensors, volatile=("transposed", "bool", "conjugate"))
    data = copy(copier, plan)
    for key, tensor in tensors.items():
        assert same(content(plan, data, key), tensor), key


def test_restore_puts_every_kind_back(copier: Copier) -> None:
    tensors = odd_tensors()
    plan = plan_of(tensors)
    data = copy(copier, plan)
    into = {
        key: torch.zeros_like(tensor.detach(), memory_format=torch.preserve_format)
        for key, tensor in tensors.items()
        if key != "expanded"
    }
    copier.restore([(content(plan, data, key), target) for key, target in into.items()], data)
    for key, target in into.items():
        assert same(target, tensors[key]), key


def test_volatile_ones_are_copied_at_once_and_the_rest_before_the_step(copier: Copier) -> None:
    tensors = {"buffer": torch.zeros(1 << 20), "count": torch.zeros(()), "weight": torch.zeros(20 << 20)}
    plan = plan_of(tensors, volatile=("buffer", "count"))
    data = memoryview(bytearray(plan.data_bytes))
    for value in range(1, 6):
        copier.start(plan, data, lambda failure: None)
        tensors["buffer"].fill_(value)
        tensors["count"].fill_(value)
        copier.wait_before_step()
        tensors["weight"].fill_(value)
        copier.wait()
        for key in tensors:
            assert (content(plan, data, key) == value - 1).all(), key


def test_one_who_waits_helps(copier: Copier) -> None:
    """With the thread held up, the one that waits does all of the copying."""
    held, hold = threading.Event(), threading.Event()

    def wait(failure: Exception | None) -> None:
        held.set()
        hold.wait(30)

    first = plan_of({"a": torch.ones(5000)})
    copier.start(first, memoryview(bytearray(first.data_bytes)), wait)
    assert held.wait(30)
    job = copier._job
    assert job is not None
    parts: Any = deque([(0, 0, 0)] * 5)
    job._parts = parts
    copier.wait_before_step()
    assert not parts
    hold.set()
    copier.wait()


def test_it_is_not_done_before_the_one_who_helps_is(copier: Copier, monkeypatch: pytest.MonkeyPatch) -> None:
    helping, thread_is_through, done = threading.Event(), threading.Event(), threading.Event()
    early: list[bool] = []

    def memmove(*part: int) -> None:
        if threading.current_thread() is threading.main_thread():
            helping.set()
            assert thread_is_through.wait(30)
            early.append(done.wait(0.2))
        else:
            assert helping.wait(30)
            thread_is_through.set()

    monkeypatch.setattr("holdfast.checkpoint.copying.ctypes.memmove", memmove)
    plan = plan_of({"a": torch.ones(5000), "b": torch.ones(5000)})
    copier.start(plan, memoryview(bytearray(plan.data_bytes)), lambda failure: done.set())
    copier.wait_before_step()
    assert early == [False]
    assert copier.wait(30) and done.is_set()


def test_what_goes_wrong_in_the_thread_is_told_and_the_next_one_works(copier: Copier) -> None:
    plan = plan_of({"a": torch.ones(100, 100).t()})
    data = memoryview(bytearray(plan.data_bytes))
    told: list[Exception | None] = []
    with pytest.MonkeyPatch.context() as patch:
        # A source that became smaller behind our back: its strided copy fails in the thread.
        patch.setattr(copying._Later, "parts", lambda self, sources: [copying._Strided(self._view, torch.ones(3, 3))])
        copier.start(plan, data, told.append)
        copier.wait()
    assert isinstance(told[0], RuntimeError) and "size" in str(told[0])
    copier.start(plan, data, told.append)
    copier.wait()
    assert told[1] is None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_done_that_raises_does_not_end_the_thread(copier: Copier) -> None:
    def fail(failure: Exception | None) -> None:
        raise ValueError("not ours")

    plan = plan_of({"a": torch.ones(5000)})
    data = memoryview(bytearray(plan.data_bytes))
    copier.start(plan, data, fail)
    assert copier.wait(30)
    copy(copier, plan)


def test_what_goes_wrong_at_once_is_raised(copier: Copier) -> None:
    plan = plan_of({"a": torch.ones(5000)})
    told: list[Exception | None] = []
    with pytest.raises(RuntimeError):
        copier.start(plan, memoryview(bytearray(100)), told.append)
    assert copier.wait() and told == []


def test_sources_are_kept_until_they_are_copied_and_no_longer(copier: Copier) -> None:
    import weakref

    data = memoryview(bytearray(40_000_000))
    tensor = torch.full((10_000_000,), 3.0)
    seen = weakref.ref(tensor)
    plan = plan_of({"a": tensor})
    copier.start(plan, data, lambda failure: None)
    layout = plan.layout
    del tensor, plan
    copier.wait()
    gc.collect()
    assert seen() is None
    assert (torch.frombuffer(data, dtype=torch.float32) == 3.0).all()
    assert layout.data_bytes == 40_000_000


def test_ten_thousand_copies_leave_nothing_behind(copier: Copier) -> None:
    tensors = {f"t{at}": torch.randn(40, 50) for at in range(5)} | {f"s{at}": torch.zeros(()) for at in range(5)}
    planner = plans.Planner(ALONE, shared=True)
    slots = [memoryview(bytearray(planner.plan(tensors, {"t0"}).data_bytes)) for _ in range(2)]
    counts: list[Exception | None] = []

    def once(step: int) -> None:
        copier.start(planner.plan(dict(tensors), {"t0"}), slots[step % 2], counts.append)
        copier.wait_before_step()

    def state() -> tuple[int, int, int]:
        copier.wait()
        gc.collect()
        return threading.active_count(), len(os.listdir("/proc/self/fd")), len(gc.get_objects())

    for step in range(1000):
        once(step)
    before = state()
    rss = resident()
    for step in range(10_000):
        once(step)
        if step % 1000 == 0:
            counts.clear()
    counts.clear()
    after = state()
    assert after[:2] == before[:2]
    assert after[2] - before[2] < 100
    assert resident() - rss < 4 << 20
    assert len(copier._targets) == 2


def resident() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096


def test_old_places_are_forgotten(copier: Copier) -> None:
    plan = plan_of({"a": torch.ones(5000)})
    for _ in range(20):
        copy(copier, plan)
    assert len(copier._targets) <= copying._MOST_TARGETS


def test_a_closed_copier_may_be_used_again(copier: Copier) -> None:
    plan = plan_of({"a": torch.ones(5000)})
    for _ in range(3):
        copy(copier, plan)
        copier.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "holdfast copier" and copier._jobs]


def test_a_copier_that_is_dropped_takes_its_thread_with_it() -> None:
    copier = Copier()
    finished = threading.Event()
    plan = plan_of({"a": torch.ones(20 << 20)})
    data = memoryview(bytearray(plan.data_bytes))
    copier.start(plan, data, lambda failure: finished.set())
    thread = next(thread for thread in threading.enumerate() if thread.name == "holdfast copier" and thread.is_alive())
    del copier
    gc.collect()
    assert finished.wait(30)
    thread.join(30)
    assert not thread.is_alive()
    assert (torch.frombuffer(data, dtype=torch.float32) == 1).all()


# -- devices -----------------------------------------------------------------------------------------------------------


def test_what_is_gathered_lies_together_and_goes_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gathering itself is the same on any device."""
    monkeypatch.setattr(plans, "is_gathered", lambda device, size, volatile: volatile or size <= 2048)
    tensors = {
        f"{kind} {at}": torch.ones(size, dtype=getattr(torch, kind))
        for at, size in enumerate([5, 50_000, 300, 7, 60_000])
        for kind in ("float32", "bfloat16", "int8")
    }
    tensors["strided"] = torch.ones(20, 20)[::2, ::3]
    plan = plan_of(tensors, volatile=("float32 1",))
    small = [at for at, piece in enumerate(plan.pieces) if piece.size_bytes <= 2048 or piece.key == "float32 1"]
    assert small == list(range(len(small))) and len(small) == 11
    data = memoryview(bytearray(plan.data_bytes))
    host = torch.frombuffer(data, dtype=torch.uint8)
    gathered = Gathered([(at, plan.pieces[at]) for at in small], host, torch.device("cpu"))
    gathered.gather(plan.sources)
    for tensor in tensors.values():
        tensor.zero_()  # after that they are no longer looked at
    again = {key: content(plan, data, key) for key in tensors}
    assert not any(tensor.any() for tensor in again.values())
    gathered.send()
    assert all((again[plan.pieces[at].key] == 1).all() for at in small)


class Runtime:
    """The driver's part: what is registered."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.refuses = False

    def cudart(self) -> Runtime:
        return self

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if self.refuses or address in self.registered:
            return 712
        self.registered[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        return 0 if self.registered.pop(address, None) else 713


def test_memory_is_registered_once_and_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime()
    monkeypatch.setattr(devices, "_cuda", runtime)
    monkeypatch.setattr(devices, "_clear_error", lambda: None)
    pinned = devices.Pinned()
    small, large = memoryview(bytearray(100)), memoryview(bytearray(200))
    assert pinned.pin(small, 4096) and pinned.pin(small, 4096)
    assert runtime.registered == {4096: 100}
    assert pinned.pin(large, 4096)  # it has grown
    assert runtime.registered == {4096: 200}
    for page in range(2, 12):
        assert pinned.pin(small, 4096 * page)
    assert len(runtime.registered) == devices._MOST_PINNED
    runtime.refuses = True
    with pytest.warns(UserWarning, match="could not be page-locked"):
        assert not pinned.pin(small, 1 << 20)
    assert not pinned.pin(small, 1 << 20)  # and is not asked again
    pinned.close()
    assert runtime.registered == {}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpus_state_is_copied_beside_it_and_put_back(copier: Copier) -> None:
    fd = os.memfd_create("slot")
    slot = Slot(fd)
    tensors = {key: tensor.cuda() for key, tensor in odd_tensors().items()}
    tensors["on the host"] = torch.randn(100_000)
    for at in range(1000):
        tensors[f"layer {at}"] = torch.randn(64, 64, device="cuda")
    tensors["volatile"], tensors["weight"] = (torch.zeros(50 << 20, device="cuda") for _ in range(2))
    volatile = ("strided", "volatile", "float32 small")
    for step in range(1, 4):
        plan = plan_of(tensors, volatile)
        slot.reserve(plan.data_bytes)
        data = slot._map()[DATA_AT : DATA_AT + plan.data_bytes]
        failures: list[Exception | None] = []
        copier.start(plan, data, failures.append)
        tensors["volatile"].fill_(step)
        copier.wait_before_step()
        tensors["weight"].fill_(step)
        assert copier.wait(60) and failures == [None]
        for key, tensor in tensors.items():
            if key in ("volatile", "weight"):
                assert (content(plan, data, key) == step - 1).all(), key
            else:
                assert same(content(plan, data, key), tensor.cpu()), key
        into = {key: torch.empty_like(tensor, memory_format=torch.contiguous_format) for key, tensor in tensors.items()}
        copier.restore([(content(plan, data, key), target) for key, target in into.items()], data)
        for key, target in into.items():
            assert same(target.cpu(), content(plan, data, key)), key
    slot.close()
    os.close(fd)


# -- whole processes ---------------------------------------------------------------------------------------------------

PROLOGUE = """
import ctypes, json, os, sys, tempfile, threading, traceback
sys.path.insert(0, sys.argv[1])
import torch
from holdfast.checkpoint import copying
from test_copying import Copier, plan_of

ended = {}
for name, body in json.loads(sys.argv[2]).items():
    output = tempfile.TemporaryFile()
    pid = os.fork()
    if pid == 0:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        break  # and to the end of this script, as any other one
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    output.seek(0)
    ended[name] = [output.read().decode(), status]
else:
    print(json.dumps(ended), flush=True)
    os._exit(0)

tensors = {"a": torch.ones(4 << 20), "b": torch.ones(4 << 20)}
plan = plan_of(tensors)
data = memoryview(bytearray(plan.data_bytes))
copier = Copier()
inside, go_on = threading.Event(), threading.Event()
def slowly(*part, memmove=ctypes.memmove):  # a copy that is still running when it matters
    inside.set()
    go_on.wait(20)
    memmove(*part)
exec(body)
"""

BODIES = {
    "exits during a copy": """
copying.ctypes.memmove = slowly
copier.start(plan, data, lambda failure: print("done", failure, flush=True))
inside.wait(20)
go_on.set()
""",
    "exits though a copy hangs": """
copying._EXIT_S = 0.2
job = copying._Job
class Hung:  # a device that never gets there
    def synchronize(self):
        threading.Event().wait()
copying._Job = lambda parts, events, keep, done: job(parts, [(None, Hung())], keep, done)
copier.start(plan, data, print)
""",
    "forks during a copy": """
copying.ctypes.memmove = slowly
copier.start(plan, data, lambda failure: os.write(1, b"done in %d\\n" % (os.getpid() == parent)))
parent = os.getpid()
inside.wait(20)
child = os.fork()
if child == 0:
    copier.wait_before_step()
    copier.wait()
    assert not copier._jobs and threading.active_count() == 1
    go_on.set()
    mine = memoryview(bytearray(plan.data_bytes))
    copier.start(plan, mine, lambda failure: os.write(1, b"child's own\\n"))  # and may have its own
    copier.wait()
    sys.exit(0)  # with all that happens at an interpreter's exit
assert os.waitpid(child, 0)[1] == 0
go_on.set()
copier.wait()
""",
    "loads data during copies": """
from torch.utils.data import DataLoader
for step in range(2):
    copier.start(plan, data, lambda failure: None)
    items = list(DataLoader(range(40), num_workers=2, batch_size=10))
    copier.wait_before_step()
print(len(items))
""",
    "is interrupted while it helps": """
import signal
def interrupted(*part):
    if threading.current_thread() is threading.main_thread():
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000): pass
    else:
        inside.set()
        go_on.wait(20)
signal.signal(signal.SIGINT, signal.default_int_handler)
copying.ctypes.memmove = interrupted
copier.start(plan, data, lambda failure: print(failure, flush=True))
inside.wait(20)
try:
    copier.wait_before_step()
except KeyboardInterrupt:
    print("interrupted", flush=True)
go_on.set()
copier.wait()
""",
}

EXPECTED = {
    "exits during a copy": "done None\n",
    "exits though a copy hangs": "",
    "forks during a copy": "child's own\ndone in 1\n",
    "loads data during copies": "4\n",
    "is interrupted while it helps": "interrupted\nthe copy into memory was interrupted\n",
}


@pytest.fixture(scope="module")
def ended() -> dict[str, tuple[str, int]]:
    """How each of the scripts ended: all are forks of one process, which has imported torch for them."""
    command = [sys.executable, "-W", "ignore", "-c", PROLOGUE, os.path.dirname(__file__), json.dumps(BODIES)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr
    return {name: (output, status) for name, (output, status) in json.loads(run.stdout).items()}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_process_that(name: str, ended: dict[str, tuple[str, int]]) -> None:
    assert ended[name] == (EXPECTED[name], 0)
