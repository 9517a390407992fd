"""What a checkpointer is told, by its arguments and by its environment; checked before anything starts."""

from __future__ import annotations

import math
import os
import re
import uuid
from collections.abc import Callable

from holdfast.checkpoint import sealed
from holdfast.checkpoint.format import Policy
from holdfast.checkpoint.plans import Position
from holdfast.wire.snapshots import JOB_ID
from holdfast.worker import place

DIRECTORY = "CHECKPOINT_DIR"

_SLIP = re.compile(r"(s3|gs|az):(?!//)")
_alone = uuid.uuid4().hex


def directory(given: str | os.PathLike[str] | None) -> str:
    found = os.fspath(given) if given is not None else os.environ.get(DIRECTORY) or "checkpoints"
    if (slip := _SLIP.match(found)) is not None:
        raise ValueError(f"{found!r}: {slip[1]}://{found[slip.end() :].lstrip('/')} is meant")
    return found


def policy(keep: int, keep_best: int, keep_every: int, metric: str, mode: str) -> Policy:
    for name, value in (("keep", keep), ("keep_best", keep_best), ("keep_every", keep_every)):
        count(name, value)
    if mode not in ("min", "max"):
        raise ValueError(f"mode={mode!r}: min or max is meant, for a metric that is best when low or high")
    return Policy(keep, keep_best, metric, mode, keep_every)


def count(name: str, value: int) -> int:
    if type(value) is not int:
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise TypeError(f"{name}={value!r}: a whole number is meant")
        value = int(value)
    if not 0 <= value < 10**18:
        raise ValueError(f"{name}={value}: a number from 0 on is meant")
    return value


def steps(name: str, value: int | None, least: int = 1) -> int | None:
    if value is None:
        return None
    if count(name, value) < least:
        raise ValueError(f"{name}={value}: at least {least} is meant")
    return int(value)


def minutes(name: str, value: float | None) -> float | None:
    """In seconds."""
    if value is None:
        return None
    if isinstance(value, bool) or not 0 < value < math.inf:
        raise ValueError(f"{name}={value!r}: a number of minutes above 0 is meant")
    return 60.0 * float(value)


def metrics(given: dict[str, float] | Callable[[], dict[str, float]] | None) -> dict[str, float]:
    given = given() if callable(given) else given
    return sealed.finite({str(name): float(value) for name, value in (given or {}).items()})


def position(rank: int, size: int, local_rank: int | None) -> Position:
    """Which ranks share a node's memory: those of one agent. Without an agent every rank is by itself."""
    if local_rank is None:
        return Position(rank=rank, world_size=size, local_rank=0, local_size=1, node=rank, nodes=size)
    return Position(
        rank=rank,
        world_size=size,
        local_rank=local_rank,
        local_size=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        node=int(os.environ.get("GROUP_RANK", "0")),
        nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
    )


def on_one_node() -> bool:
    """Whether a launcher says that all ranks are on this node."""
    return os.environ.get("GROUP_WORLD_SIZE") == "1"


def generation() -> int:
    here = place.current()
    return here.generation if here is not None else int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def job() -> str:
    """The same in all worlds of a job; another one when it is started again."""
    return os.environ.get(JOB_ID) or _alone
