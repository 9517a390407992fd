"""Copies a rank's state into a slot beside forward and backward, and back out of it.

Parameters and the optimizer's state change in `optimizer.step()` only. So what is copied from them may run until just
before the next one; what may change earlier (volatile) is copied before `start` returns.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import torch

from holdfast.checkpoint.devices import Gathered, Outward, Pinned, new_stream, piece_view
from holdfast.checkpoint.errors import CheckpointError
from holdfast.checkpoint.format import Piece
from holdfast.checkpoint.plans import Layout, Plan, is_gathered

Done = Callable[[Exception | None], None]

_SMALL_BYTES = 4096  # up to which tensors are copied together: to plan each would cost more
_PART_BYTES = 64 << 20  # two can share a large tensor, and each part is still copied at full speed
_MOST_TARGETS = 4
_EXIT_S = 10.0  # how long an interpreter that exits waits for a copy; a hung device would keep it for ever


class Copier:
    """For one thread, the training's. One copy at a time: `start` waits for the one before."""

    def __init__(self) -> None:
        self._targets: OrderedDict[tuple[int, int], _Targets] = OrderedDict()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._pinned = Pinned()
        self._job: _Job | None = None
        self._jobs: SimpleQueue[_Job | None] | None = None
        _copiers.add(self)

    def start(self, plan: Plan, data: memoryview, done: Done) -> None:
        """Begin to copy. `done` is called in another thread when all bytes are there, with what went wrong if they are
        not. What goes wrong before this returns is raised, and then `done` is not called."""
        self.wait()
        with torch.no_grad():
            targets = self._targets_of(plan, data)
            sources = plan.sources
            if targets.at_once:
                torch._foreach_copy_(targets.at_once_views, [sources[index] for index in targets.at_once])
            events = [(outward.device, outward.launch(sources)) for outward in targets.outward]
            parts = deque(part for later in targets.later for part in later.parts(sources))
            if targets.small:
                parts.appendleft(_Small(targets.small_views, [sources[index] for index in targets.small]))
        job = self._job = _Job(parts, events, (sources, targets), done)
        self._thread().put(job)

    def wait_before_step(self) -> None:
        """To be called before anything changes what is being copied. Devices are told to wait, the host is not kept."""
        job = self._job
        if job is None or job.finished.is_set():
            return
        job.help()
        job.copied.wait()
        for device, event in job.events:
            torch.cuda.current_stream(device).wait_event(event)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Until all bytes are there and `done` was called. False if that takes longer."""
        job = self._job
        if job is None:
            return True
        if not job.finished.is_set():
            job.help()
        if not job.finished.wait(timeout_s):
            return False
        self._job = None
        return True

    def restore(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]], data: memoryview | None = None) -> None:
        """Each from the first tensor to the second. The first are on the host, in `data` where that is given: it is
        page-locked if enough of it goes to a device. Devices may still be copying when it returns, in their current
        streams: what waits for those sees all of it."""
        devices = {into.device for _, into in copies if into.device.type == "cuda"}
        if devices and data:
            wanted = sum(source.numel() * source.element_size() for source, into in copies if into.is_cuda)
            if 2 * wanted >= len(data):
                self._pinned.pin(data, _base(data).data_ptr())
        with torch.no_grad():
            if not devices:
                for source, into in copies:
                    into.copy_(source)
            elif copies:
                torch._foreach_copy_([into for _, into in copies], [source for source, _ in copies], non_blocking=True)

    def rest(self) -> None:
        """Wait, and end the thread. It may be started again."""
        self.wait()
        self._end_thread()
        self._targets.clear()

    def close(self) -> None:
        """The same, and let go of what is page-locked."""
        self.rest()
        self._pinned.close()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _targets_of(self, plan: Plan, data: memoryview) -> _Targets:
        base = _base(data)
        key = id(plan.layout), base.data_ptr()
        targets = self._targets.get(key)
        if targets is None or len(targets.base) != len(base):
            devices = {source.device for source in plan.sources if source.device.type == "cuda"}
            for device in devices - self._streams.keys():
                self._streams[device] = new_stream(device)
            if devices:
                self._pinned.pin(data, base.data_ptr())
            targets = self._targets[key] = _Targets(plan, base, self._streams)
            while len(self._targets) > _MOST_TARGETS:
                self._targets.popitem(last=False)
        self._targets.move_to_end(key)
        return targets

    def _thread(self) -> SimpleQueue[_Job | None]:
        """A daemon, so that it never keeps an interpreter from its end, and of which nothing refers to this object."""
        if self._jobs is None:
            jobs: SimpleQueue[_Job | None] = SimpleQueue()
            threading.Thread(target=_serve, args=(jobs,), name="holdfast copier", daemon=True).start()
            weakref.finalize(self, jobs.put, None).atexit = False
            self._jobs = jobs
        return self._jobs

    def _end_thread(self) -> None:
        if self._jobs is not None:
            self._jobs.put(None)
            self._jobs = None

    def _forget(self) -> None:
        """In a forked child there is no thread, and what was being copied is the parent's affair."""
        self._job = self._jobs = None
        self._pinned.forget()


class _Later:
    """A tensor of the host that is copied in the background."""

    def __init__(self, index: int, view: torch.Tensor) -> None:
        self._index = index
        self._view = view
        self._address = view.data_ptr()
        self._size_bytes = view.numel() * view.element_size()

    def parts(self, sources: Sequence[torch.Tensor]) -> list[_Part]:
        source = sources[self._index]
        if not source.is_contiguous() or source.is_conj() or source.is_neg():
            return [_Strided(self._view, source)]
        # Not `copy_`: that takes all of torch's threads, which forward and backward want for themselves.
        to, begin = self._address, source.data_ptr()
        size = self._size_bytes
        if size <= _PART_BYTES:
            return [(to, begin, size)]
        return [(to + at, begin + at, min(_PART_BYTES, size - at)) for at in range(0, size, _PART_BYTES)]


class _Strided:
    def __init__(self, view: torch.Tensor, source: torch.Tensor) -> None:
        self.view = view
        self.source = source


class _Small:
    def __init__(self, views: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        self.views = views
        self.sources = sources


_Part = tuple[int, int, int] | _Strided | _Small  # to, from, size: addresses of dense ones


class _Targets:
    """Where the pieces of a layout go in one slot, made once."""

    def __init__(self, plan: Plan, base: torch.Tensor, streams: dict[torch.device, torch.cuda.Stream]) -> None:
        self.base = base
        self.layout: Layout = plan.layout  # so that its id stays taken
        volatile = set(plan.volatile)
        self.at_once: list[int] = []
        self.at_once_views: list[torch.Tensor] = []
        self.small: list[int] = []
        self.small_views: list[torch.Tensor] = []
        self.later: list[_Later] = []
        runs: dict[torch.device, list[list[tuple[int, Piece]]]] = {}
        large: dict[torch.device, dict[int, torch.Tensor]] = {}
        for index, (piece, source) in enumerate(zip(plan.pieces, plan.sources, strict=True)):
            if piece.size_bytes == 0:
                continue
            view = piece_view(base, piece, piece.at)
            device = source.device
            if device.type == "cuda":
                if is_gathered(device, piece.size_bytes, index in volatile):
                    _extend(runs.setdefault(device, []), index, piece)
                else:
                    large.setdefault(device, {})[index] = view
            elif device.type != "cpu" or index in volatile:
                self.at_once.append(index)
                self.at_once_views.append(view)
            elif piece.size_bytes <= _SMALL_BYTES:
                self.small.append(index)
                self.small_views.append(view)
            else:
                self.later.append(_Later(index, view))
        self.outward = [
            Outward(
                device,
                streams[device],
                [Gathered(run, base, device) for run in runs.get(device, ())],
                large.get(device, {}),
            )
            for device in dict.fromkeys([*runs, *large])
        ]


def _extend(runs: list[list[tuple[int, Piece]]], index: int, piece: Piece) -> None:
    """Pieces that follow each other go together."""
    if runs and runs[-1][-1][0] == index - 1:
        runs[-1].append((index, piece))
    else:
        runs.append([(index, piece)])


class _Job:
    def __init__(
        self,
        parts: deque[_Part],
        events: list[tuple[torch.device, torch.cuda.Event]],
        keep: object,
        done: Done,
    ) -> None:
        self.events = events
        self.copied = threading.Event()  # all that is on the host
        self.finished = threading.Event()
        self._parts = parts
        self._keep = keep  # the memory must not become another tensor's meanwhile, nor be unmapped
        self._done = done
        self._helping = threading.Lock()
        self._failure: Exception | None = None

    def run(self) -> None:
        """In the copier's thread."""
        self._copy_parts()
        with self._helping:
            pass  # whoever helps has taken the last parts, and is not done with them before
        self.copied.set()
        try:
            for _, event in self.events:
                event.synchronize()
        except Exception as failure:
            self._failure = failure
        self._keep = None
        try:
            self._done(self._failure)
        finally:
            self.finished.set()

    def help(self) -> None:
        """In a thread that has nothing to do but to wait: two cores copy faster than one."""
        with self._helping:
            self._copy_parts()

    def _copy_parts(self) -> None:
        try:
            with torch.no_grad():
                while part := self._next():
                    if isinstance(part, tuple):
                        ctypes.memmove(*part)  # lets go of the interpreter's lock meanwhile
                    elif isinstance(part, _Strided):
                        part.view.copy_(part.source)
                    else:
                        torch._foreach_copy_(part.views, part.sources)
        except Exception as failure:
            self._failure = failure
            self._parts.clear()
        except BaseException:  # an interrupt: a part was taken, and is perhaps not there
            self._failure = CheckpointError("the copy into memory was interrupted")
            self._parts.clear()
            raise

    def _next(self) -> _Part | None:
        try:
            return self._parts.popleft()
        except IndexError:
            return None


def _base(data: memoryview) -> torch.Tensor:
    return torch.frombuffer(data, dtype=torch.uint8) if len(data) else torch.empty(0, dtype=torch.uint8)


def _serve(jobs: SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        try:
            job.run()
        except Exception as failure:  # of `done`, which is not ours: told, and the next job still done
            threading.excepthook(threading.ExceptHookArgs((type(failure), failure, failure.__traceback__, None)))
        del job  # else the last one would be kept until the next


_copiers: weakref.WeakSet[Copier] = weakref.WeakSet()


def _forget_all() -> None:
    for copier in list(_copiers):
        copier._forget()


def _finish_all() -> None:
    """A copy into memory that the interpreter is taking down would end in a crash."""
    for copier in list(_copiers):
        copier.wait(_EXIT_S)
        copier._end_thread()


os.register_at_fork(after_in_child=_forget_all)
atexit.register(_finish_all)
