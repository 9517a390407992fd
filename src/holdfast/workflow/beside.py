"""What would hold up the loop, beside it: in threads, a few for each place that is worked with.

A store that does not answer holds up what is done with that store, and nothing else. Nor does it hold up the end of the
process: nobody waits for these threads.
"""

from __future__ import annotations

import _thread
import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from holdfast.workflow import lives

T = TypeVar("T")

HERE = ""  # this machine
WIDTH = 8  # threads a place; each transfer has pieces of 8 MiB in memory


_under_way: list[None] = []  # changed in loops only


def is_busy() -> bool:
    """Whether something is under way, which the end of the process cuts short."""
    return bool(_under_way)


def place_of(url: str) -> str:
    """A bucket, or all that is in files."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.partition('/')[0]}"


class Beside:
    """Of one loop."""

    def __init__(self) -> None:
        self._places: dict[str, asyncio.Semaphore] = {}
        self._left: dict[Path, asyncio.Future[None]] = {}  # lives, and who waits for what is left of them
        self._sweeping: asyncio.Task[None] | None = None

    async def run(self, place: str, work: Callable[..., T], *args: Any) -> T:
        """Whoever is cancelled while it waits leaves the work to its end, and its thread is not another's before."""
        room = self._places.setdefault(place, asyncio.Semaphore(WIDTH))
        await room.acquire()
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def end(give: Callable[..., None], given: Any) -> None:
            room.release()
            _under_way.pop()
            if not done.done():
                give(given)

        def act() -> None:
            try:
                what: tuple[Any, Any] = done.set_result, work(*args)
            except BaseException as failure:
                what = done.set_exception, failure
            with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits
                loop.call_soon_threadsafe(end, *what)

        _under_way.append(None)
        # A Thread would be waited for until it runs, which costs more than most of what is done in one.
        _thread.start_new_thread(act, ())
        return await done

    async def sweep(self, folder: Path) -> None:
        """See lives.sweep. One look at all processes is for all who ask before it begins: with many it takes long."""
        done = self._left[folder] = asyncio.get_running_loop().create_future()
        if self._sweeping is None:
            self._sweeping = asyncio.create_task(self._sweep())
        await done

    async def _sweep(self) -> None:
        while self._left:
            left, self._left = self._left, {}
            failed: OSError | None = None
            try:
                await self.run(HERE, lives.sweep, list(left))
            except OSError as failure:
                failed = failure
            for done in left.values():
                if not done.done():
                    done.set_result(None) if failed is None else done.set_exception(failed)
        self._sweeping = None
