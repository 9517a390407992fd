"""A training of nothing, in a process that waits to be told what it is. A fork copies each page that it writes to, and
counting references writes; what a first step touches is copied here, while nobody waits for it."""

from __future__ import annotations

import contextlib
import os
import warnings

ACCELERATORS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dri", "/dev/dxg")


def rehearse() -> None:
    """Leaves nothing behind: no thread, no setting. Not where there is a GPU: a backward or an optimizer counts the
    devices, and which of them it may see is the rank's to say, in its environment, which is not there yet."""
    import torch

    if any(map(os.path.exists, ACCELERATORS)):
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with contextlib.suppress(Exception), warnings.catch_warnings():  # nothing depends on it
        warnings.simplefilter("ignore")
        _train()
    torch.set_num_threads(threads)


def _train() -> None:
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 16))
    optimizer = torch.optim.AdamW(model.parameters())
    for x, y in DataLoader(TensorDataset(torch.randn(8, 16), torch.randn(8, 16)), batch_size=4):
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    optimizer.state_dict()
    model.state_dict()
