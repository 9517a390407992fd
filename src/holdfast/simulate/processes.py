"""Hosts with clocks of their own, and processes that can be stopped, continued and killed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from holdfast.simulate.timeline import Timeline

if TYPE_CHECKING:
    from holdfast.simulate.agent import Agent


class Host:
    """A machine. Its clock has its own zero and its own rate, and no other machine ever sees it."""

    def __init__(self, timeline: Timeline, index: int, drift: float) -> None:
        self.timeline = timeline
        self.index = index
        self.name = f"n{index}"
        self.down = False
        self.frozen = False
        self.agent: Agent | None = None
        self.agents = 0  # lives of agents so far
        self.resumed_s = -1.0  # when it last ran again, or its clock was set, on that clock
        self.slept_s = 0.0  # in all, on that clock
        self._stopped_s = 0.0
        self.disturbed_s = -1.0  # when anything of it last ran again, in real time
        self._zero_s = timeline.random.uniform(0.0, 1e5)
        self._rate = 1.0 + timeline.random.uniform(-drift, drift)
        self._processes: list[Process] = []

    def clock_s(self) -> float:
        return self._zero_s + self._rate * self.timeline.now_s

    def real_s(self, local_s: float) -> float:
        return local_s / self._rate

    def jump(self, by_s: float) -> None:
        self._zero_s += by_s
        self.resumed_s, self.disturbed_s = self.clock_s(), self.timeline.now_s
        self.slept_s += by_s
        for process in self._processes:
            process.set_timers_again()

    def freeze(self) -> None:
        self.frozen, self._stopped_s = True, self.clock_s()

    def thaw(self) -> None:
        self.frozen, self.resumed_s = False, self.clock_s()
        self.slept_s += self.resumed_s - self._stopped_s

    def run(self, process: Process) -> None:
        self._processes = [other for other in self._processes if other.alive]
        self._processes.append(process)


class Process:
    def __init__(self, host: Host) -> None:
        self.host = host
        self.timeline = host.timeline
        self.alive = True
        self.frozen = False
        self._timers: dict[int, tuple[float, Callable[..., None], tuple[Any, ...]]] = {}
        self._set = 0
        self._missed: list[tuple[bool, Callable[..., None], tuple[Any, ...]]] = []
        host.run(self)

    def post(self, call: Callable[..., None], *args: Any) -> None:
        """Something from outside: at once, or when the process is continued, or never if it is dead."""
        if self.frozen or self.host.frozen:
            self._missed.append((False, call, args))
        elif self.alive:
            call(*args)

    def after(self, delay_s: float, call: Callable[..., None], *args: Any) -> None:
        """A timer on the host's clock."""
        self._set += 1
        self._timers[self._set] = (self.host.clock_s() + delay_s, call, args)
        self.timeline.after(self.host.real_s(delay_s), self._fire, self._set)

    def set_timers_again(self) -> None:
        """The clock has jumped. What was under way, such as the end of a killed process, comes before late timers."""
        now_s = self.host.clock_s()
        for key, (due_s, _, _) in self._timers.items():
            self.timeline.after(self.host.real_s(max(0.1, due_s - now_s)), self._fire, key)

    def _fire(self, key: int) -> None:
        timer = self._timers.pop(key, None)
        if timer is None or not self.alive:
            return
        if self.frozen or self.host.frozen:
            self._missed.append((True, timer[1], timer[2]))
        else:
            timer[1](*timer[2])

    def resume(self) -> None:
        """What lies in the buffers comes first, then the timers that are over, as asyncio does it."""
        if self.frozen or self.host.frozen or not self.alive:
            return
        missed, self._missed = self._missed, []
        for wanted in (False, True):
            for is_timer, call, args in missed:
                if is_timer is wanted and self.alive:
                    call(*args)

    def die(self) -> None:
        self.alive = False
        self._timers.clear()
        self._missed.clear()
