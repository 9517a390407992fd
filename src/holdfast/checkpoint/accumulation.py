"""Gradients that have been summed up and not yet stepped with, so that a save in between loses none of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from holdfast.checkpoint.contents import unwrap


class GradientAccumulation:
    """Put one into the state, and set `position` to how many micro-batches are in the gradients: 0 after a step.

    What is saved is the sum over all ranks, which is the same at any world size. It comes back on rank 0, and the other
    ranks begin with zeros, so that the next reduction over all ranks gives what it would have given.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        """With several ranks, all must call it."""
        sums: dict[str, torch.Tensor] = {}
        if self.position:
            for name, parameter in unwrap(self._model).named_parameters():
                if parameter.grad is not None:
                    sums[name] = _summed(parameter.grad)
        return {"position": self.position, "sums": sums}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]
        rank, _ = _rank_and_size()
        for name, parameter in unwrap(self._model).named_parameters():
            found = state["sums"].get(name)
            if found is None:
                parameter.grad = None
            elif isinstance(parameter, DTensor):
                whole = found.to(parameter.device)
                parameter.grad = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
            else:
                parameter.grad = torch.zeros_like(parameter)
                if rank == 0:
                    parameter.grad.copy_(found)


def _summed(gradient: torch.Tensor) -> torch.Tensor:
    """A sharded one is reduced as soon as it is made; others are each rank's own until the last micro-batch."""
    import torch.distributed as dist

    _, size = _rank_and_size()
    if size == 1 or isinstance(gradient, DTensor):
        return gradient.detach().clone()
    total = gradient.detach().clone()
    dist.all_reduce(total)
    return total


def _rank_and_size() -> tuple[int, int]:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1
