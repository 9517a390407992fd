"""What a process does once, the first time it trains: code that is loaded, memory that is touched, threads and handles
that are made. One that stands by does it while nobody waits for it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from holdfast.checkpoint import randomness
from holdfast.data import fingerprint
from holdfast.data.order import Order


def warm(modules: Iterable[nn.Module]) -> None:
    """On the devices and in the precisions of these. Random generators are left as they were."""
    before = randomness.capture()
    kinds = {(p.device, p.dtype) for module in modules for p in module.parameters() if p.dtype.is_floating_point}
    for device, dtype in sorted(kinds, key=str):
        weight = torch.ones(8, 8, device=device, dtype=dtype, requires_grad=True)
        loss = nn.functional.mse_loss(nn.functional.gelu(weight @ weight), weight.detach())
        loss.backward()  # type: ignore[no-untyped-call]
        assert weight.grad is not None
        moved = [weight.detach()]
        torch._foreach_lerp_(moved, [weight.grad], 0.1)
        torch._foreach_sqrt(moved)
        loss.item()
    data = TensorDataset(torch.ones(8, 8), torch.ones(8))
    fingerprint.of(data)
    Order(8, 0, 0, True).pick(torch.arange(8))
    for _ in DataLoader(data, batch_size=4):
        pass
    randomness.put_back(before)
