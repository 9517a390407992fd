"""The agent's vault: who gets its memory, what happens to a writer that dies, and what is told of checkpoints."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal, cast

import pytest

from holdfast import linux
from holdfast.agent import vault as vaults
from holdfast.agent.doorbell import Doorbell, Handed, Sorry
from holdfast.agent.vault import Vault
from holdfast.agent.world import RunningWorld
from holdfast.checkpoint import writing
from holdfast.checkpoint.format import Policy
from holdfast.checkpoint.plans import Position
from holdfast.checkpoint.slots import Slot
from holdfast.checkpoint.snapshots import Memory, Snapshots
from holdfast.checkpoint.together import Together
from holdfast.checkpoint.writing import Desk
from holdfast.control.worlds import World
from holdfast.observe.events import Event, EventLog
from holdfast.wire.snapshots import DOORBELL, Attach

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "checkpoint"))

from desks import a_snapshot, fill, saved_steps


class Awaited(asyncio.Event):
    """Tells when somebody waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.awaited = asyncio.Event()

    async def wait(self) -> Literal[True]:
        self.awaited.set()
        return await super().wait()


class Ranks:
    """A world of which this very process is the ranks it is said to be."""

    def __init__(self, generation: int = 0, local_size: int = 1, local_rank: int | None = 0) -> None:
        self.world = World("run", generation, 0, 3, "127.0.0.1", 1, local_size, job_id="job")
        self.local_rank = local_rank
        self.all_forked = Awaited()

    def local_rank_of(self, pid: int) -> int | None:
        return self.local_rank if pid == os.getpid() else None


class Scene:
    """A vault behind a doorbell, in this process, and all that it says."""

    def __init__(self, nproc: int, grace_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[Event] = []
        self.said: list[str] = []
        self.ranks: Ranks | None = Ranks(local_size=nproc)
        loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        log = EventLog(None, [self._note], self.said.append)
        self.vault = Vault(loop, os.environ, nproc, grace_s, log, self.said.append, self.said.append)
        self.bell = Doorbell(loop, self._answer)
        assert self.bell.start()
        monkeypatch.setenv(DOORBELL, self.bell.name)

    def _note(self, event: Event) -> None:
        self.events.append(event)
        self._news.set()

    async def _answer(self, request: object, pid: int) -> Handed | Sorry:
        assert isinstance(request, Attach)
        return await self.vault.attach(cast("RunningWorld | None", self.ranks), pid, request)

    async def attach(self) -> Desk | None:
        return await asyncio.to_thread(writing.attach)

    def named(self, name: str) -> list[dict[str, Any]]:
        return [event.data for event in self.events if event.name == name]

    async def until(self, name: str, count: int = 1) -> list[dict[str, Any]]:
        """Events of that name, once there are so many."""
        async with asyncio.timeout(30):
            while len(self.named(name)) < count:
                self._news.clear()
                await self._news.wait()
        return self.named(name)


@asynccontextmanager
async def scene(monkeypatch: pytest.MonkeyPatch, nproc: int = 1, grace_s: float = 30.0) -> AsyncIterator[Scene]:
    found = Scene(nproc, grace_s, monkeypatch)
    try:
        yield found
    finally:
        found.bell.close()
        found.vault.close()


@pytest.fixture
def url(tmp_path: Path) -> str:
    return str(tmp_path / "checkpoints")


def test_a_rank_gets_all_slots_of_its_node_and_a_line(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    async def play() -> None:
        async with scene(monkeypatch, nproc=3) as here:
            assert here.ranks is not None
            here.ranks.local_rank = 1
            desk = await here.attach()
            assert desk is not None
            assert (len(desk.slots), desk.own, desk.world) == (6, (2, 3), "job.0")
            fill(Slot(desk.slots[3]), a_snapshot(url, 4))
            desk.save(3, 4)
            saved = await asyncio.to_thread(desk.receive)
            assert saved is not None and saved.ok
            [told] = await here.until("checkpoint.saved")
            assert told == {
                "step": 4, "checkpoint": "step_00000004", "bytes": 100_000, "seconds": round(saved.seconds, 3),
                "verified": True,
            }  # fmt: skip
            desk.close()

    asyncio.run(play())
    assert saved_steps(url) == [4]


def test_who_goes_on_in_another_world_keeps_its_memory_as_it_is(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    async def play() -> None:
        async with scene(monkeypatch, nproc=2) as here:
            desk = await here.attach()
            assert desk is not None
            before = len(linux.open_descriptors())
            memory = Memory(desk)
            own, other = memory.slots[1], memory.slots[2]
            fill(own, a_snapshot(url, 4))
            fill(other, a_snapshot(url, 4))
            address = own.address
            memory.leave()
            desk.close()
            assert (own.address, other.address) == (address, 0)
            again = await asyncio.to_thread(writing.attach, False)
            assert again is not None and again.slots == []
            memory.move(again)
            assert own.address == address and own.lock()
            again.save(1, 4)  # the writer has the same memory, and waits for its lock
            own.unlock()
            saved = await asyncio.to_thread(again.receive)
            assert saved is not None and saved.ok
            assert here.ranks is not None
            here.ranks.local_rank = 1
            elsewhere = await asyncio.to_thread(writing.attach, False)
            assert elsewhere is not None
            memory.move(elsewhere)
            assert own.address == 0, "which is somebody else's by now"
            again.close()
            elsewhere.close()
            memory.close()
            assert len(linux.open_descriptors()) < before

    asyncio.run(play())
    assert saved_steps(url) == [4]


@pytest.mark.parametrize(
    ("left", "first_to_be_filled"),
    [({}, 0), ({0: (4, 0)}, 1), ({1: (4, 0)}, 0), ({0: (6, 0), 1: (4, 0)}, 1), ({0: (4, 0), 1: (4, 2)}, 1),
     ({0: (4, 2), 1: (4, 0)}, 0)],
)  # fmt: skip
def test_the_newest_snapshot_is_the_last_to_be_filled_over(
    url: str, left: dict[int, tuple[int, int]], first_to_be_filled: int
) -> None:
    """Also by who comes after the one that took it. A part of a step is not as much as a whole one."""
    desk = writing.start_own(loads_torch=False)
    memory = Memory(desk)
    for slot, (step, part) in left.items():
        fill(memory.slots[slot], a_snapshot(url, step, part=part))
    together = cast("Together", None)  # nobody is asked here
    snapshots = Snapshots(memory, "w", Position(0, 1, 0, 1, 0, 1), together, url, False, Policy())
    assert snapshots._free((), False, False) == first_to_be_filled
    memory.close()
    desk.close()


def test_more_slots_than_one_message_can_take(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    async def play() -> None:
        async with scene(monkeypatch, nproc=150) as here:
            desk = await here.attach()
            assert desk is not None and len(set(desk.slots)) == 300
            fill(Slot(desk.slots[299]), a_snapshot(url, 4))
            desk.save(299, 4)
            saved = await asyncio.to_thread(desk.receive)
            assert saved is not None and saved.ok, saved
            desk.close()

    asyncio.run(play())


@pytest.mark.parametrize("ranks", [None, Ranks], ids=["no world", "no rank"])
def test_others_get_nothing(monkeypatch: pytest.MonkeyPatch, ranks: Callable[..., Ranks] | None) -> None:
    async def play() -> None:
        async with scene(monkeypatch) as here:
            here.ranks = ranks(local_rank=None) if ranks is not None else None
            if here.ranks is not None:
                here.ranks.all_forked.set()
            assert await here.attach() is None
            assert here.named("writer.started") == []

    asyncio.run(play())


def test_a_rank_that_is_faster_than_the_news_of_its_fork_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play() -> None:
        async with scene(monkeypatch) as here:
            ranks = here.ranks = Ranks(local_rank=None)
            asked = asyncio.create_task(here.attach())
            await ranks.all_forked.awaited.wait()
            assert not asked.done()
            ranks.local_rank = 0
            ranks.all_forked.set()
            desk = await asked
            assert desk is not None
            desk.close()

    asyncio.run(play())


def test_without_an_agent_there_is_no_desk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DOORBELL, raising=False)
    assert writing.attach() is None
    monkeypatch.setenv(DOORBELL, f"holdfast/{os.getuid()}/0")
    assert writing.attach() is None


def test_what_rings_back_must_be_an_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"holdfast-test/{os.getpid()}"
    monkeypatch.setenv(DOORBELL, name)
    for answer in (b'{"type":"Attached","local_rank":0,"slots":2,"world":"w"}\n', b"nonsense\n", b"\n", b""):
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind("\0" + name)
            listener.listen()

            async def play(listener: socket.socket = listener, answer: bytes = answer) -> None:
                asked = asyncio.create_task(asyncio.to_thread(writing.attach))
                connection, _ = await asyncio.to_thread(listener.accept)
                with connection:
                    connection.recv(4096)
                    connection.sendall(answer)
                assert await asked is None

            asyncio.run(play())


def test_memory_outlives_worlds_and_their_end_is_answered(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    async def play() -> None:
        async with scene(monkeypatch) as here:
            here.vault.persist()  # nobody has attached: there is nothing to ask for
            assert here.named("writer.started") == []
            desk = await here.attach()
            assert desk is not None
            fill(Slot(desk.slots[0]), a_snapshot(url, 4, world=desk.world))
            desk.close()
            here.vault.persist()
            [told] = await here.until("checkpoint.persisted")
            assert (told["step"], told["checkpoint"], told["committed"]) == (4, "step_00000004", True)
            assert here.said == ["step 4, which the ranks had left in memory, is saved: step_00000004"]
            here.ranks = Ranks(generation=1)
            again = await here.attach()
            assert again is not None and again.world == "job.1"
            head = Slot(again.slots[0]).peek()
            assert head is not None and (head.step, head.world) == (4, "job.0")
            again.close()
            here.vault.persist()
            await here.vault.finish()
            assert len(here.named("checkpoint.persisted")) == 1  # it is not of that world
            [ended] = here.named("writer.ended")
            assert ended["status"] == 0

    asyncio.run(play())


def test_a_killed_writer_is_replaced(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    async def play() -> None:
        async with scene(monkeypatch) as here:
            desk = await here.attach()
            assert desk is not None
            for number, step in ((1, 4), (2, 5)):
                os.kill(here.named("writer.started")[-1]["pid"], signal.SIGKILL)
                assert await asyncio.to_thread(desk.receive) is None
                fill(Slot(desk.slots[step % 2]), a_snapshot(url, step, world=desk.world))
                await asyncio.to_thread(desk.save, step % 2, step)
                saved = await asyncio.to_thread(desk.receive)
                assert saved is not None and saved.ok
                assert [event["status"] for event in await here.until("writer.ended", number)] == [-9] * number
            desk.close()
            # Also where the agent is the next to need it.
            fill(Slot(vault_slot(here)), a_snapshot(url, 6, world="job.0"))
            os.kill(here.named("writer.started")[-1]["pid"], signal.SIGKILL)
            await here.until("writer.ended", 3)
            here.vault.persist()
            [told] = await here.until("checkpoint.persisted")
            assert told["step"] == 6

    asyncio.run(play())
    assert saved_steps(url) == [6, 5, 4]


def test_what_a_world_has_left_waits_for_the_next_to_train(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setattr(vaults, "WAITS_S", 60.0)

    async def play(trains: bool) -> None:
        async with scene(monkeypatch) as here:
            desk = await here.attach()
            assert desk is not None
            step = 4 if trains else 5
            fill(Slot(desk.slots[0]), a_snapshot(url, step, world=desk.world))
            desk.close()
            began_s = time.monotonic()
            here.vault.persist(waits=True)
            await asyncio.sleep(0.1)
            assert here.named("checkpoint.persisted") == []
            if trains:
                here.vault.proceed()
            [told] = await here.until("checkpoint.persisted")
            assert told["step"] == step
            if not trains:
                assert time.monotonic() - began_s >= 0.3

    asyncio.run(play(True))
    monkeypatch.setattr(vaults, "WAITS_S", 0.3)
    asyncio.run(play(False))


def vault_slot(here: Scene) -> int:
    return here.vault._slots[0]


def test_failures_are_said_once_a_step_and_left_as_events(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    async def play() -> None:
        async with scene(monkeypatch, nproc=2) as here:
            desk = await here.attach()
            assert desk is not None
            for slot in (0, 2):
                fill(Slot(desk.slots[slot]), a_snapshot(str(tmp_path / "file" / "below"), 4, slot // 2, (0, 1)))
                desk.save(slot, 4)
            events = await here.until("checkpoint.failed", 2)
            assert [event["step"] for event in events] == [4, 4]
            [line] = here.said
            assert line.startswith("the checkpoint of step 4 failed: ") and line.endswith("; training goes on")
            assert events[0]["why"] in line
            desk.close()

    asyncio.run(play())


def test_a_writer_that_is_stuck_is_not_waited_for_beyond_the_grace(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    async def play() -> None:
        async with scene(monkeypatch, grace_s=0.2) as here:
            desk = await here.attach()
            assert desk is not None
            pid = here.named("writer.started")[0]["pid"]
            fill(Slot(desk.slots[0]), a_snapshot(url, 4, world=desk.world))
            os.kill(pid, signal.SIGSTOP)
            here.vault.persist()
            await here.vault.finish()
            here.vault.close()
            assert here.said == [
                "checkpoints were still being written 0.2 s after the end, and are given up",
                "what the ranks left in memory could not be saved: the writer was killed",
            ]
            assert linux.state(pid) == ""
            desk.close()

    asyncio.run(play())


def test_a_writer_that_cannot_be_started_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(owner: str, env: object) -> Any:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    async def play() -> None:
        async with scene(monkeypatch) as here:
            monkeypatch.setattr(vaults, "start_writer", start)
            assert await here.attach() is None

    asyncio.run(play())
