"""The writer process: what it writes when it is asked to, when its owner dies, and what does not end it."""

from __future__ import annotations

import fcntl
import os
import queue
import select
import signal
import struct
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from desks import WAIT_S, a_snapshot, fill, last_writer, saved_steps, wait_for_end

from holdfast import linux
from holdfast.checkpoint import persist, writing
from holdfast.checkpoint.errors import Damaged
from holdfast.checkpoint.format import Snapshot
from holdfast.checkpoint.persist import Outcome
from holdfast.checkpoint.reading import Reading
from holdfast.checkpoint.slots import Slot
from holdfast.checkpoint.storage import Storage
from holdfast.checkpoint.writer import Writer
from holdfast.checkpoint.writing import Desk
from holdfast.wire import channel
from holdfast.wire.snapshots import Client, Finish, FromWriter, Persist, Persisted, Proceed, Save, Saved

FLOCK = "hhqqi4x"  # the kernel's struct


@pytest.fixture
def url(tmp_path: Path) -> str:
    return str(tmp_path / "checkpoints")


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = writing.start_own(loads_torch=False)
    yield desk
    desk.close()
    wait_for_end(last_writer())


def receive(desk: Desk) -> Saved | None:
    assert select.select([desk], [], [], WAIT_S)[0], "the writer says nothing"
    return desk.receive()


# -- saves ------------------------------------------------------------------------------------------------------------


def test_a_slot_becomes_a_checkpoint(desk: Desk, url: str) -> None:
    slots = [Slot(fd) for fd in desk.slots]
    for index, step in ((0, 10), (1, 20), (0, 30)):
        fill(slots[index], a_snapshot(url, step))
        desk.save(index, step)
        saved = receive(desk)
        assert saved is not None
        assert (saved.slot, saved.step, saved.ok, saved.committed, saved.verified) == (index, step, True, True, True)
        assert (saved.name, saved.rank, saved.text) == (f"step_{step:08}", 0, "")
        assert saved.bytes == 100_000 and saved.seconds > 0
        assert slots[index].lock()  # it is free again
        slots[index].unlock()
    assert saved_steps(url) == [30, 20, 10]
    assert "libtorch" not in linux.read(f"/proc/{last_writer()}/maps")


def test_both_slots_may_be_asked_for_at_once(desk: Desk, url: str) -> None:
    for index, step in ((0, 1), (1, 2)):
        fill(Slot(desk.slots[index]), a_snapshot(url, step))
        desk.save(index, step)
    answers = [receive(desk), receive(desk)]
    assert [(answer.step, answer.ok) for answer in answers if answer is not None] == [(1, True), (2, True)]
    assert saved_steps(url) == [2, 1]


@pytest.mark.parametrize(
    ("slot", "step", "why"),
    [
        (0, 8, "step 8 is not in memory any more"),
        (1, 7, "step 7 is not in memory any more"),
        (2, 7, "there is no slot 2"),
    ],
)
def test_what_is_not_there_is_not_saved(desk: Desk, url: str, slot: int, step: int, why: str) -> None:
    fill(Slot(desk.slots[0]), a_snapshot(url, 7))
    fill(Slot(desk.slots[1]), a_snapshot(url, 7), complete=False)
    desk.save(slot, step)
    assert receive(desk) == Saved(slot, step, False, text=why)


def test_a_slot_that_its_owner_still_holds_is_not_read(desk: Desk, url: str) -> None:
    slot = Slot(desk.slots[0])
    fill(slot, a_snapshot(url, 7))
    assert slot.lock()
    desk.save(0, 7)
    assert receive(desk) == Saved(0, 7, False, text="its memory is being filled")


def test_a_failed_save_is_said_in_one_line_and_the_next_one_works(desk: Desk, url: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    fill(Slot(desk.slots[0]), a_snapshot(str(tmp_path / "file" / "below"), 1))
    desk.save(0, 1)
    saved = receive(desk)
    assert saved is not None and not saved.ok
    assert str(tmp_path / "file") in saved.text and "\n" not in saved.text
    fill(Slot(desk.slots[1]), a_snapshot(url, 2))
    desk.save(1, 2)
    assert (saved := receive(desk)) is not None and saved.ok
    assert saved_steps(url) == [2]


def test_signals_do_not_end_it(desk: Desk, url: str) -> None:
    fill(Slot(desk.slots[0]), a_snapshot(url, 1))
    desk.save(0, 1)
    receive(desk)  # so it has come far enough to have its dispositions
    pid = last_writer()
    assert os.getsid(pid) == pid
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(pid, signum)
    fill(Slot(desk.slots[1]), a_snapshot(url, 2))
    desk.save(1, 2)
    assert (saved := receive(desk)) is not None and saved.ok
    assert last_writer() == pid


def test_a_killed_writer_is_noticed_and_the_next_save_has_another(desk: Desk, url: str) -> None:
    fill(Slot(desk.slots[0]), a_snapshot(url, 1))
    desk.save(0, 1)
    receive(desk)
    first = last_writer()
    os.kill(first, signal.SIGKILL)
    assert receive(desk) is None
    assert desk.receive() is None
    fill(Slot(desk.slots[1]), a_snapshot(url, 2))
    desk.save(1, 2)
    assert (saved := receive(desk)) is not None and saved.ok
    assert last_writer() != first
    assert saved_steps(url) == [2, 1]


def test_what_was_asked_for_before_the_end_is_written(url: str) -> None:
    desk = writing.start_own(loads_torch=False)
    pid = last_writer()
    for index, step in ((0, 1), (1, 2)):
        fill(Slot(desk.slots[index]), a_snapshot(url, step))
        desk.save(index, step)
    desk.close()
    wait_for_end(pid)
    assert saved_steps(url) == [2, 1]


def test_what_nobody_asked_for_is_not_written_at_an_orderly_end(url: str) -> None:
    desk = writing.start_own(loads_torch=False)
    pid = last_writer()
    fill(Slot(desk.slots[0]), a_snapshot(url, 1))
    desk.close()
    wait_for_end(pid)
    assert not os.path.exists(url)


# -- an owner that dies -----------------------------------------------------------------------------------------------


OWNER = """
    import os, sys, time
    sys.path.insert(0, {tests!r})
    from desks import a_snapshot, fill, last_writer
    from holdfast.checkpoint import writing
    from holdfast.checkpoint.slots import Slot

    url = {url!r}
    desk = writing.start_own(loads_torch=False)
    slots = [Slot(fd) for fd in desk.slots]
    {body}
    print(last_writer(), flush=True)
    sys.stdin.read()
"""


def kill_owner(url: str, body: str) -> str:
    """Let a process with a writer of its own come so far, kill it, and wait for its writer's end; returns stderr."""
    script = textwrap.dedent(OWNER).format(tests=os.path.dirname(__file__), url=url, body=body)
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as owner:
        assert owner.stdout is not None and owner.stderr is not None
        writer = int(owner.stdout.readline())
        owner.kill()
        owner.wait()
        wait_for_end(writer)
        return owner.stderr.read().decode()


def test_what_a_killed_process_left_in_memory_is_saved(url: str) -> None:
    text = kill_owner(url, "fill(slots[0], a_snapshot(url, 5)); fill(slots[1], a_snapshot(url, 6))")
    assert saved_steps(url) == [6]
    assert text == "holdfast: the process ended; its last snapshot, of step 6, was saved as step_00000006\n"


def test_a_snapshot_that_was_being_filled_is_passed_over(url: str) -> None:
    kill_owner(url, "fill(slots[0], a_snapshot(url, 5)); fill(slots[1], a_snapshot(url, 6), complete=False)")
    assert saved_steps(url) == [5]


def test_what_is_saved_already_is_not_saved_again(url: str) -> None:
    body = "fill(slots[0], a_snapshot(url, 5)); fill(slots[1], a_snapshot(url, 6)); desk.save(1, 6); desk.receive()"
    assert kill_owner(url, body) == ""
    assert saved_steps(url) == [6]


def test_a_save_that_was_asked_for_comes_first(url: str) -> None:
    kill_owner(url, "fill(slots[0], a_snapshot(url, 5)); fill(slots[1], a_snapshot(url, 6)); desk.save(0, 5)")
    assert saved_steps(url) == [6, 5]


def test_a_fork_of_the_owner_does_not_keep_it_alive(url: str) -> None:
    """A data loader's workers hold all that their parent had open."""
    fork = "fill(slots[0], a_snapshot(url, 5)); os.fork() or (os.close(1), os.close(2), os.read(0, 1), os._exit(0))"
    kill_owner(url, fork)
    assert saved_steps(url) == [5]


def test_a_last_snapshot_that_cannot_be_saved_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    text = kill_owner(str(tmp_path / "file" / "below"), "fill(slots[0], a_snapshot(url, 5))")
    assert text.startswith("holdfast: the process ended; its last snapshot could not be saved: ")


# -- under an agent ---------------------------------------------------------------------------------------------------


class Control:
    """An agent's end, with slots for so many ranks."""

    def __init__(self, ranks: int) -> None:
        sock, self.process = writing.start_writer("agent")
        sock.settimeout(WAIT_S)
        self.fds = writing.make_slots(2 * ranks)
        self.slots = [Slot(fd) for fd in self.fds]
        self.link: channel.Channel[FromWriter] = channel.Channel(sock, FromWriter)
        writing.hand_slots(self.link, self.fds)

    def client(self) -> channel.Channel[FromWriter]:
        ours, theirs = channel.pair()
        ours.settimeout(WAIT_S)
        with theirs:
            self.link.send(Client(), [theirs.fileno()])
        return channel.Channel(ours, FromWriter)

    def persist(self, ranks: int, first_rank: int = 0, world: str = "w") -> Persisted:
        self.link.send(Persist(9, world, first_rank, ranks))
        answer = self.hears()
        assert isinstance(answer, Persisted)
        return answer

    def frees(self, *wanted: int) -> bool:
        """Whether these slots, and no others, could be filled, before long."""
        asked = struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        end_s = time.monotonic() + WAIT_S
        while time.monotonic() < end_s:
            answers = [struct.unpack(FLOCK, fcntl.fcntl(slot.fd, fcntl.F_GETLK, asked)) for slot in self.slots]
            if wanted == tuple(number for number, answer in enumerate(answers) if answer[0] == fcntl.F_UNLCK):
                return True
            time.sleep(0.005)
        return False

    def hears(self) -> FromWriter:
        received = self.link.receive()
        assert received is not None
        return received[0]

    def close(self) -> None:
        self.link.close()
        self.process.wait(WAIT_S)
        channel.close_all(self.fds)


@pytest.fixture
def control(request: pytest.FixtureRequest) -> Iterator[Control]:
    control = Control(getattr(request, "param", 2))
    yield control
    control.close()


def test_the_agent_hears_of_every_save(control: Control, url: str) -> None:
    clients = [control.client(), control.client()]
    for rank in (0, 1):
        fill(control.slots[2 * rank], a_snapshot(url, 4, rank, (0, 1)))
        clients[rank].send(Save(2 * rank, 4))
        received = clients[rank].receive()
        assert received is not None and received[0] == control.hears()
        assert isinstance(received[0], Saved) and received[0].ok and received[0].committed == (rank == 1)
    assert saved_steps(url) == [4]


@pytest.mark.parametrize("control", [40], indirect=True)
def test_a_node_may_have_many_slots(control: Control, url: str) -> None:
    fill(control.slots[79], a_snapshot(url, 4, 39, (39,)))
    client = control.client()
    client.send(Save(79, 4))
    answer = control.hears()
    assert isinstance(answer, Saved) and answer.ok


def test_a_client_may_only_save(control: Control, url: str) -> None:
    client = control.client()
    client.send(Finish())
    client.send(Persist(1, "w", 0, 2))
    fill(control.slots[0], a_snapshot(url, 4))
    client.send(Save(0, 4))
    answer = control.hears()
    assert isinstance(answer, Saved) and answer.ok


def test_the_newest_step_that_all_ranks_have_is_persisted(control: Control, url: str) -> None:
    for rank in (0, 1):
        fill(control.slots[2 * rank], a_snapshot(url, 4, rank, (0, 1)))
    fill(control.slots[1], a_snapshot(url, 5, 0, (0, 1)))
    fill(control.slots[3], a_snapshot(url, 5, 1, (0, 1)), complete=False)
    persisted = control.persist(2)
    assert (persisted.token, persisted.step, persisted.ok, persisted.committed) == (9, 4, True, True)
    assert (persisted.name, persisted.bytes) == ("step_00000004", 200_000)
    assert saved_steps(url) == [4]
    assert all(slot.lock() for slot in control.slots)
    for slot in control.slots:
        slot.unlock()
    assert control.persist(2).step is None  # it is there now


def test_what_is_of_another_world_is_not_persisted(control: Control, url: str) -> None:
    for rank in (0, 1):
        fill(control.slots[2 * rank], a_snapshot(url, 4, rank, (0, 1), world="before"))
    assert control.persist(2).step is None
    assert not os.path.exists(url)


def test_one_node_of_several_persists_its_part_of_each_step_that_may_become_whole(control: Control, url: str) -> None:
    """Which is the newest that the other node has whole, nobody here can know."""
    for step in (4, 5):
        for rank in (0, 1):
            fill(control.slots[2 * rank + step - 4], a_snapshot(url, step, rank, (0, 1, 2, 3)))
    persisted = control.persist(2)
    assert (persisted.step, persisted.committed) == (5, False)
    assert "2, 3" in persisted.text
    assert saved_steps(url) == []
    for rank in (2, 3):
        fill(control.slots[2 * rank - 4], a_snapshot(url, 4, rank, (0, 1, 2, 3)))
    assert control.persist(2, first_rank=2).committed
    assert saved_steps(url) == [4]


def test_a_rank_that_takes_no_part_is_not_waited_for(control: Control, url: str) -> None:
    fill(control.slots[0], a_snapshot(url, 4, 0, (0,)))
    assert control.persist(2).step == 4


def test_the_part_of_a_dead_rank_is_finished_before_it_is_persisted(control: Control, url: str) -> None:
    clients = [control.client(), control.client()]
    for rank in (0, 1):
        fill(control.slots[2 * rank], a_snapshot(url, 4, rank, (0, 1)))
    clients[0].send(Save(0, 4))
    clients[0].close()
    clients[1].close()
    control.link.send(Persist(3, "w", 0, 2))
    answers = [control.hears(), control.hears()]
    # The two lines are read in any order; either way all of it is there once.
    assert {type(answer) for answer in answers} == {Saved, Persisted}
    assert saved_steps(url) == [4]


def test_what_is_to_wait_is_kept_and_its_room_is_not(control: Control, url: str) -> None:
    for step in (4, 5):
        for rank in (0, 1):
            fill(control.slots[2 * rank + step - 4], a_snapshot(url, step, rank, (0, 1)))
    control.link.send(Persist(7, "w", 0, 2, waits=True))
    assert control.frees(0, 2)
    assert saved_steps(url) == []
    control.link.send(Proceed())
    answer = control.hears()
    assert isinstance(answer, Persisted) and (answer.token, answer.step) == (7, 5)
    assert control.frees(0, 1, 2, 3)


def test_what_waits_is_written_before_what_the_next_world_saves(control: Control, url: str) -> None:
    """Else parts of it would be taken for what nobody will finish, beside a newer step that is there."""
    fill(control.slots[0], a_snapshot(url, 4, 0, (0,)))
    control.link.send(Persist(7, "w", 0, 1, waits=True))
    assert control.frees(1, 2, 3)
    fill(control.slots[1], a_snapshot(url, 9, 0, (0,), world="next"))
    control.client().send(Save(1, 9))
    first, second = control.hears(), control.hears()
    assert isinstance(first, Persisted) and (first.token, first.step) == (7, 4)
    assert isinstance(second, Saved) and second.ok and second.step == 9


def test_two_worlds_that_are_over_are_written_one_after_the_other(control: Control, url: str) -> None:
    """And what is older than one that is there by then is not written at all."""
    fill(control.slots[0], a_snapshot(url, 9, 0, (0,)))
    fill(control.slots[1], a_snapshot(url, 4, 0, (0,), world="later"))
    control.link.send(Persist(7, "w", 0, 1, waits=True))
    control.link.send(Persist(8, "later", 0, 1, waits=True))
    control.link.send(Proceed())
    first, second = control.hears(), control.hears()
    assert isinstance(first, Persisted) and (first.token, first.step) == (7, 9)
    assert isinstance(second, Persisted) and (second.token, second.step) == (8, None)


def test_what_others_have_outrun_meanwhile_is_not_missed(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """This node has left the job, say, and those who went on have cleared away what it was about to finish."""
    real = persist.persist

    def outrun(storage: Storage, snapshot: Snapshot, data: memoryview) -> Outcome:
        real(storage, msgspec.structs.replace(snapshot, step=9), memoryview(bytes([9]) * len(data)))
        raise Damaged("step_00000004/t000001.00000.bin is missing")

    monkeypatch.setattr(persist, "persist", outrun)
    fds = writing.make_slots(2)
    fill(Slot(fds[0]), a_snapshot(url, 4))
    reading = Reading()
    reading.take(0, fds)
    held = reading.hold_all("w")
    assert reading.write_newest(7, reading.choose(held, range(1))) == Persisted(7, None)
    assert saved_steps(url) == [9]
    reading.release(held)
    channel.close_all(fds)


@pytest.mark.parametrize("end", ["another world's end", "finish"])
def test_what_waits_is_written_before_what_does_not_and_at_the_end(control: Control, url: str, end: str) -> None:
    fill(control.slots[0], a_snapshot(url, 4, 0, (0,)))
    control.link.send(Persist(7, "w", 0, 1, waits=True))
    assert control.frees(1, 2, 3)
    control.link.send(Finish() if end == "finish" else Persist(8, "next", 0, 1))
    answers = [control.hears() for _ in range(1 if end == "finish" else 2)]
    assert all(isinstance(answer, Persisted) for answer in answers)
    assert {answer.token: answer.step for answer in answers if isinstance(answer, Persisted)}[7] == 4
    assert saved_steps(url) == [4]


def test_no_slot_is_written_by_two_at_once(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """A save that is heard of only after the end of its world, while that is being persisted, waits for its turn."""
    begun: queue.Queue[str] = queue.Queue()
    go_on = threading.Semaphore(0)

    def work(what: str, result: object) -> object:
        begun.put(what)
        assert go_on.acquire(timeout=WAIT_S)
        return result

    outcome = Outcome(4, "step_00000004", 1, 0.1, True, True)
    monkeypatch.setattr(Reading, "write", lambda self, slot, step: work(f"save {slot}", (0, outcome)))
    monkeypatch.setattr(Reading, "write_newest", lambda self, token, candidates: work("persist", Persisted(token, 4)))
    ours, theirs = channel.pair()
    ours.settimeout(WAIT_S)
    link: channel.Channel[FromWriter] = channel.Channel(ours, FromWriter)
    fds = writing.make_slots(4)
    writer = threading.Thread(target=Writer(theirs, os.getpid(), under_agent=True).run)
    writer.start()
    writing.hand_slots(link, fds)
    fill(Slot(fds[0]), a_snapshot(url, 4))
    fill(Slot(fds[2]), a_snapshot(url, 5, world="next"))
    link.send(Persist(1, "w", 0, 1))
    assert begun.get(timeout=WAIT_S) == "persist"
    link.send(Save(0, 4))  # the slot that is being read
    link.send(Save(2, 5))
    link.send(Persist(2, "next", 0, 1))
    link.send(Save(99, 4))
    assert link.receive() == (Saved(99, 4, False, text="there is no slot 99"), [])  # so all before it was heard
    assert begun.empty()
    link.send(Finish())
    go_on.release()
    assert link.receive() == (Persisted(1, 4), [])
    assert begun.get(timeout=WAIT_S) == "save 0"
    for _ in range(3):
        go_on.release()
    writer.join(WAIT_S)
    assert [begun.get(timeout=WAIT_S) for _ in range(2)] == ["save 2", "persist"]
    assert not writer.is_alive()
    channel.close_all(fds)
    ours.close()


@pytest.mark.parametrize("ranks", [(0,), (0, 1)], ids=["alone", "with another node"])
def test_what_is_not_needed_is_free_for_the_next_world(
    monkeypatch: pytest.MonkeyPatch, url: str, ranks: tuple[int, ...]
) -> None:
    """While the newest step is written. The one before it is needed where another node may not have the newest."""
    begun, go_on = threading.Event(), threading.Event()

    def write_newest(self: Reading, token: int, candidates: object) -> Persisted:
        begun.set()
        assert go_on.wait(WAIT_S)
        return Persisted(token, 5)

    monkeypatch.setattr(Reading, "write_newest", write_newest)
    ours, theirs = channel.pair()
    ours.settimeout(WAIT_S)
    link: channel.Channel[FromWriter] = channel.Channel(ours, FromWriter)
    fds = writing.make_slots(2)
    writer = threading.Thread(target=Writer(theirs, os.getpid(), under_agent=True).run)
    writer.start()
    writing.hand_slots(link, fds)
    for fd, step in zip(fds, (4, 5), strict=True):
        fill(Slot(fd), a_snapshot(url, step, 0, ranks))
    link.send(Persist(1, "w", 0, 1))
    assert begun.wait(WAIT_S)
    assert [others_may_fill(fd) for fd in fds] == [ranks == (0,), False]
    go_on.set()
    assert link.receive() == (Persisted(1, 5), [])
    assert all(map(others_may_fill, fds))
    link.send(Finish())
    writer.join(WAIT_S)
    assert not writer.is_alive()
    channel.close_all(fds)
    ours.close()


def others_may_fill(fd: int) -> bool:
    """Asked in another process: the lock is a process's."""
    pid = os.fork()
    if pid == 0:
        os._exit(0 if Slot(fd).lock() else 1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_it_writes_what_was_asked_for_and_ends(control: Control, url: str) -> None:
    fill(control.slots[0], a_snapshot(url, 4))
    control.link.send(Persist(3, "w", 0, 1))
    control.link.send(Finish())
    answer = control.hears()
    assert isinstance(answer, Persisted) and answer.committed
    with pytest.raises(channel.ChannelClosed):
        control.hears()
    assert control.process.wait(WAIT_S) == 0


def test_it_dies_with_its_agent(url: str) -> None:
    script = textwrap.dedent("""
        import sys
        from holdfast.checkpoint import writing
        line, process = writing.start_writer("agent")
        print(process.pid, flush=True)
        sys.stdin.read()
    """)
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as agent:
        assert agent.stdout is not None
        writer = int(agent.stdout.readline())
        agent.kill()
        wait_for_end(writer)
