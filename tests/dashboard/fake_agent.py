"""This process in the place of an agent: it answers the doorbell, and its children are its ranks."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dashboard.made_records import Made
from holdfast.agent import doorbell
from holdfast.agent.doorbell import Answer, Doorbell, Request
from holdfast.observe import record, state

HERE = f"here:{os.getpid()}"


@contextmanager
def answering(answer: doorbell.Job) -> Iterator[None]:
    """Until the end of the block, with this to every question."""
    ready, done = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def reply(request: Request, pid: int) -> Answer:
        return answer

    async def scene() -> None:
        bell = Doorbell(loop, reply)
        assert bell.start()
        ready.set()
        await done.wait()
        bell.close()

    thread = threading.Thread(target=lambda: loop.run_until_complete(scene()))
    thread.start()
    assert ready.wait(30)
    try:
        yield
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join()
        loop.close()


def folded(run_dir: Path, pid: int, nodes: tuple[str, ...] = (HERE,)) -> state.State:
    """A job of this process, with one rank on each node."""
    made = Made(run_dir, lead=HERE)
    made.start(list(nodes), 1, pid=os.getpid())
    for at, node in enumerate(nodes):
        made.add(record.WorldLaunched(0, len(nodes), 0, at, at, len(nodes), "", 1), 1.0, node)
        made.add(record.WorldStarted(0, {at: pid}), 1.1, node)
    made.close()
    return state.fold(record.read(run_dir / record.NAME))


def told(run_dir: Path, run_id: str = "llama-small") -> doorbell.Job:
    return doorbell.Job(run_id, os.getpid(), 1, "train.py", 0, str(run_dir))
