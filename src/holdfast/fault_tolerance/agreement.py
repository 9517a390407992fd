"""How all ranks come to the same limits: the longest of what any has seen.

Every rank says the same few numbers first, whatever it knows, so that no rank waits for one that has given up. They
tell whether all ask for the same and know the same names. Names are exchanged only if not, which is seldom.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from holdfast.fault_tolerance.timeouts import Learned, RankMonitorClientError

Longest = Callable[[Sequence[float]], list[float]]


class Seen(msgspec.Struct, frozen=True):
    """The longest that was seen, in seconds. 0: never."""

    first: float = 0.0  # to the first heartbeat
    gap: float = 0.0  # between two
    outside: float = 0.0
    sections: dict[str, float] = {}


class Ask(msgspec.Struct, frozen=True):
    """What is to be learned."""

    heartbeat: bool = False
    sections: bool = False  # those below, or all that were seen or are expected
    selected: tuple[str, ...] | None = None
    expected: tuple[str, ...] = ()  # those that are configured
    outside: bool = False


class Together(msgspec.Struct, frozen=True):
    """The same on all ranks."""

    seen: Seen
    learned: Learned
    needed: tuple[str, ...]  # sections

    def lacks(self, ask: Ask) -> list[str]:
        """What nobody has seen yet."""
        seen = self.seen
        missing = [f"section {name!r}" for name in self.needed if not seen.sections.get(name)]
        if ask.heartbeat:
            missing += [
                what for what, at in (("a first heartbeat", seen.first), ("a second heartbeat", seen.gap)) if not at
            ]
        if ask.outside and not seen.outside:
            missing.append("time outside of sections")
        if not ask.heartbeat and not ask.outside and not self.needed:
            missing.append("any section")
        return missing


def agree(ask: Ask, seen: Seen, learned: Learned, world: tuple[int, Longest, Callable[[Any], list[Any]]]) -> Together:
    """Raises RankMonitorClientError, on all ranks or on none."""
    size, longest, gather = world
    names = tuple(sorted({*seen.sections, *learned.section, *(ask.selected or ())}))
    if size > 1:
        what = _fingerprint([repr((ask.heartbeat, ask.sections, ask.selected, ask.expected, ask.outside))])
        known = _fingerprint(names)
        most, least, most_known, least_known = longest([what, -what, known, -known])
        if most != -least:
            raise RankMonitorClientError("the ranks ask for different timeouts; call it with the same on every rank")
        if most_known != -least_known:
            names = tuple(sorted(set().union(*gather(names))))
    first, gap = learned.heartbeat or (0.0, 0.0)
    times = [seen.first, seen.gap, seen.outside, first, gap, learned.out_of_section or 0.0]
    times += [seen.sections.get(name, 0.0) for name in names]
    times += [learned.section.get(name, 0.0) for name in names]
    if size > 1:
        times = longest(times)
    first, gap = times[3:5]
    sections = dict(zip(names, times[6:], strict=False))
    learned_sections = dict(zip(names, times[6 + len(names) :], strict=False))
    together = Seen(times[0], times[1], times[2], sections)
    return Together(
        together,
        Learned(
            (first, gap) if first and gap else None, {n: s for n, s in learned_sections.items() if s}, times[5] or None
        ),
        _needed(ask, together),
    )


def _needed(ask: Ask, seen: Seen) -> tuple[str, ...]:
    if not ask.sections:
        return ()
    if ask.selected is not None:
        return ask.selected
    return tuple(sorted({*ask.expected, *(name for name, longest_s in seen.sections.items() if longest_s)}))


def world() -> tuple[int, Longest, Callable[[Any], list[Any]]]:
    """The default process group, or this process alone."""
    import torch
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return 1, list, lambda value: [value]
    size = dist.get_world_size()
    # "cpu:gloo,cuda:nccl": whichever kind of memory the backend can send.
    kinds = [pair.partition(":")[0] for pair in str(dist.get_backend_config()).split(",")]
    device = torch.device("cpu" if "cpu" in kinds else kinds[0])

    def longest(values: Sequence[float]) -> list[float]:
        tensor = torch.tensor(list(values), dtype=torch.float64, device=device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return [float(value) for value in tensor.tolist()]

    def gather(value: Any) -> list[Any]:
        found: list[Any] = [None] * size
        dist.all_gather_object(found, value)
        return found

    return size, longest, gather


def _fingerprint(texts: Iterable[str]) -> float:
    """A number that a double holds exactly."""
    digest = hashlib.blake2b("\0".join(texts).encode(), digest_size=6).digest()
    return float(int.from_bytes(digest, "little"))
