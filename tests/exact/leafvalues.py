"""Values of leaves for which the order of additions shows, made from the leaf's number alone."""

from __future__ import annotations

import torch

DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def value(leaf: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    dice = torch.Generator().manual_seed(1000 * size + leaf)
    found = torch.randn(size, generator=dice, dtype=torch.float64)
    found *= 10.0 ** torch.randint(-3, 4, (size,), generator=dice)
    found[::7] *= 1e-41  # below the smallest normal number of all but float64
    return found.to(dtype)


def values(leaf: int, size: int) -> list[torch.Tensor]:
    return [value(leaf, size, dtype) for dtype in DTYPES]


def bits(flats: list[torch.Tensor]) -> list[bytes]:
    return [flat.view(torch.uint8).numpy().tobytes() for flat in flats]
