"""A barrier that says who is missing."""

from __future__ import annotations

import itertools
import time
from datetime import timedelta
from typing import Any

# All ranks call as often, so the same number is the same check everywhere, whoever asks.
_checks = itertools.count()


def begin_world() -> None:
    """Another world has another store."""
    global _checks
    _checks = itertools.count()


class HealthCheckFailed(RuntimeError):
    """Not all ranks came. `missing` are those that did not."""

    def __init__(self, message: str, missing: tuple[int, ...]) -> None:
        super().__init__(message)
        self.missing = missing


def check(timeout_s: float, world_size: int) -> None:
    """Wait until every rank has come here too. Every rank must call it.

    It goes through the store and not through a collective: it works with any backend, it cannot be stuck behind
    one, and it can say who is missing. Raises HealthCheckFailed, on all ranks that come.
    """
    if isinstance(timeout_s, bool) or not 0 < timeout_s < 1e6:
        raise ValueError(f"timeout_s={timeout_s!r}: a number of seconds above 0 is meant")
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        if world_size > 1:
            raise RuntimeError("health_check() needs the process group; call init_process_group() first")
        return
    from torch.distributed.distributed_c10d import _get_default_store

    _Check(_get_default_store(), next(_checks), dist.get_rank(), dist.get_world_size()).run(timeout_s)


class _Check:
    """One check: a key for each rank, a count, and a verdict that is given once and holds for all."""

    def __init__(self, store: Any, number: int, rank: int, size: int) -> None:
        self._store = store
        self._name = f"holdfast/health/{number}"
        self._rank = rank
        self._size = size

    def run(self, timeout_s: float) -> None:
        self._store.set(self._key(self._rank), "here")
        verdict = self._verdict(timeout_s)
        self._clean_up()
        if verdict == "passed":
            return
        missing = tuple(int(rank) for rank in verdict.partition(":")[2].split(","))
        if self._rank in missing:
            raise HealthCheckFailed(f"{_ranks(missing)} came too late to the health check", missing)
        raise HealthCheckFailed(f"{_ranks(missing)} did not come to the health check within {timeout_s:g} s", missing)

    def _verdict(self, timeout_s: float) -> str:
        store, key = self._store, f"{self._name}/verdict"
        if store.add(f"{self._name}/count", 1) == self._size:
            return self._give("passed")
        began_s = time.monotonic()
        try:
            store.wait([key], timedelta(seconds=timeout_s))
        except RuntimeError:
            if time.monotonic() - began_s < 0.9 * timeout_s:
                raise  # no timeout, but a lost store
            missing = [str(rank) for rank in range(self._size) if not store.check([self._key(rank)])]
            return self._give("failed:" + ",".join(missing) if missing else "passed")
        return str(store.get(key).decode())

    def _give(self, verdict: str) -> str:
        """What is decided: this, or what another rank has said before."""
        return str(self._store.compare_set(f"{self._name}/verdict", "", verdict).decode())

    def _clean_up(self) -> None:
        """Each rank takes its own key away, and the last one what is left."""
        self._store.delete_key(self._key(self._rank))
        if self._store.add(f"{self._name}/left", 1) == self._size:
            for name in ("count", "verdict", "left"):
                self._store.delete_key(f"{self._name}/{name}")

    def _key(self, rank: int) -> str:
        return f"{self._name}/{rank}"


def _ranks(ranks: tuple[int, ...]) -> str:
    *most, last = map(str, ranks)
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"
