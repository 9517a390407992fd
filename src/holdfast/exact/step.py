"""A step's gradients, the same bits at any number of ranks: what a training script's units are summed by."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from holdfast.checkpoint.contents import unwrap
from holdfast.checkpoint.sharded import is_sharded
from holdfast.exact.buffers import Flat
from holdfast.exact.combine import Exchange
from holdfast.exact.keyed import seed_all, seed_of
from holdfast.exact.modules import Buffers
from holdfast.exact.trees import Sums


class ExactStep:
    """The leaves of a step: `begin` before the forward of each, `take` after its backward."""

    def __init__(self, modules: Iterable[nn.Module], seed: int) -> None:
        whole = nn.ModuleList()
        for module in modules:
            whole.append(unwrap(module))
            if isinstance(module, DistributedDataParallel):
                # It would reduce in an order that depends on the world.
                module.require_backward_grad_sync = module.require_forward_param_sync = False
        self._parameters = [parameter for parameter in whole.parameters() if parameter.requires_grad]
        if any(is_sharded(parameter) for parameter in self._parameters):
            raise ValueError(
                "exact=True works with DDP and with one process; a model sharded by FSDP reduces its own way"
            )
        self._seed = seed
        self._exchange, self._sums, self._buffers = Exchange(), Sums(), Buffers(whole)
        self._flat = Flat([*self._parameters, *self._buffers.floating])
        self._step = -1
        self._count = 0

    def begin(self, step: int, leaf: int, count: int) -> None:
        """All ranks know how many leaves the step has."""
        if step != self._step:
            self._step, self._count = step, count
            self._sums.begin(count)
            self._buffers.begin_step()
            self._forget()
        self._buffers.begin_leaf()
        seed_all(seed_of(self._seed, step, leaf))

    @torch.no_grad()
    def take(self, leaf: int | None, is_last: bool) -> None:
        """No leaf: this rank has none in this step, and what it has computed counts nothing."""
        if leaf is not None:
            values: list[Any] = [parameter.grad for parameter in self._parameters]
            values += self._buffers.after_leaf(leaf)
            self._sums.add(leaf, self._flat.gather(values, self._sums.spare()))
        self._forget()
        if is_last:
            self._finish()

    def _finish(self) -> None:
        found = self._exchange.combine(self._sums.partials(), self._count, self._flat.specs)
        totals = self._flat.views(found)
        self._exchange.first(self._buffers.firsts)
        self._buffers.finish(totals[len(self._parameters) :], self._count)
        for parameter, total in zip(self._parameters, totals, strict=False):
            parameter.grad = total

    def _forget(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None
