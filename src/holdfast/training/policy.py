"""What becomes of the batch and the learning rate when the world has another size. Pure."""

from __future__ import annotations

import math

RULES = ("none", "linear", "sqrt")


def scale(rule: str, before: int, now: int) -> float:
    """By what the learning rate is multiplied when the number of ranks, and with it the global batch, goes from one to
    the other."""
    if rule == "none":
        return 1.0
    return now / before if rule == "linear" else math.sqrt(now / before)


def told(rule: str, per_rank: int, before: int, now: int, rates: tuple[float, float]) -> str:
    rate = f"learning rate {rates[0]:g} to {rates[1]:g} ({rule})" if rule != "none" else "learning rate as before"
    return f"{before} to {now} ranks: global batch {per_rank * before} to {per_rank * now}, {rate}"
