"""Nodes that keep failing are set aside, with a reason, for a time."""

from __future__ import annotations

# Three incidents in ten minutes that began at one node are no chance; ten minutes are what a reboot takes.
STRIKES = 3
WINDOW_S = 600.0
QUARANTINE_S = 600.0
FOREVER_S = 1e9


class Quarantine:
    """By host, since a bad machine's next agent is on the same machine."""

    def __init__(self) -> None:
        self._strikes: dict[str, list[float]] = {}
        self._held: dict[str, tuple[str, float]] = {}  # why, and until when

    def blame(self, host: str, headline: str, now_s: float) -> str:
        """Note an incident that began there; the reason, if it was one too many."""
        if host in self._held:
            return ""  # as one that was asked to be excluded is, and not for minutes
        strikes = [at_s for at_s in self._strikes.get(host, []) if at_s > now_s - WINDOW_S]
        strikes.append(now_s)
        self._strikes[host] = strikes
        if len(strikes) < STRIKES:
            return ""
        del self._strikes[host]
        why = f"{STRIKES} incidents within {WINDOW_S / 60:g} minutes began there, the last: {headline}"
        self._held[host] = (why, now_s + QUARANTINE_S)
        return why

    def exclude(self, host: str, why: str) -> None:
        """Set it aside for good: one of its own ranks asked for that."""
        self._held[host] = (why, FOREVER_S)

    def holds(self, host: str) -> bool:
        return host in self._held

    def why(self, host: str) -> str:
        return self._held[host][0] if host in self._held else ""

    def left_s(self, host: str, now_s: float) -> float:
        return max(0.0, self._held[host][1] - now_s)

    def lift(self, host: str) -> bool:
        return self._held.pop(host, None) is not None

    def expire(self, now_s: float) -> None:
        for host in [host for host, (_, until_s) in self._held.items() if until_s <= now_s]:
            del self._held[host]

    def remaining(self, now_s: float) -> tuple[tuple[str, str, float], ...]:
        return tuple((host, why, max(0.0, until_s - now_s)) for host, (why, until_s) in self._held.items())

    def restore(self, held: tuple[tuple[str, str, float], ...], now_s: float) -> None:
        self._held = {host: (why, now_s + left_s) for host, why, left_s in held}
