"""A step's gradients, the same bits at any number of ranks: what a training script's units are summed by."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
from holdfast.exact.trees import Node, Sums, Values, complete


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
        self._round: Node | None = None
        self._nodes: dict[Node, Values] = {}  # of the rounds that are over, where a step has several
        self._spare: list[Values] = []

    def begin(self, step: int, leaf: int, count: int, of: Node) -> None:
        """All ranks know how many leaves the step has, and of which node this one is: they sum one after the other."""
        if step != self._step:
            self._begin_step(step, count)
        if of != self._round:
            self._round = of
            self._sums.begin(len(of.leaves(count)))
        self._buffers.begin_leaf()
        seed_all(seed_of(self._seed, step, leaf))

    @torch.no_grad()
    def take(self, leaf: int | None, closes: bool, is_last: bool) -> None:
        """No leaf: this rank has none of the node, and what it has computed counts nothing."""
        assert self._round is not None
        these = self._round.leaves(self._count)
        if leaf is not None:
            values: list[Any] = [parameter.grad for parameter in self._parameters]
            values += self._buffers.after_leaf(leaf)
            self._sums.add(leaf - these.start, self._flat.gather(values, self._sums.spare()))
        self._forget()
        if not closes:
            return
        found = self._exchange.combine(self._sums.partials(), len(these), self._flat.specs)
        if these.start == 0:
            self._exchange.first(self._buffers.firsts)
        if len(these) < self._count:
            self._add(self._round, found)
        if is_last:
            self._finish(complete(self._count, self._nodes) if self._nodes else found)

    # -- a step that is not done yet ----------------------------------------------------------------------------------

    def so_far(self) -> dict[str, Any]:
        """Of the nodes that are closed: as good on any rank, and at any number of them."""
        self._buffers.begin_leaf()
        sums = {f"{level}.{place}": [flat.clone() for flat in flats] for (level, place), flats in self._nodes.items()}
        return {"sums": sums, "firsts": [tensor.clone() for tensor in self._buffers.firsts]}

    def go_on(self, step: int, count: int, state: dict[str, Any]) -> None:
        self._begin_step(step, count)
        for name, flats in state["sums"].items():
            level, place = map(int, name.split("."))
            self._nodes[Node(level, place)] = [
                flat.to(spec.device) for flat, spec in zip(flats, self._flat.specs, strict=True)
            ]
        for tensor, saved in zip(self._buffers.firsts, state["firsts"], strict=True):
            tensor.copy_(saved)

    def _begin_step(self, step: int, count: int) -> None:
        self._step, self._count, self._round = step, count, None
        self._spare += self._nodes.values()
        self._nodes = {}
        self._buffers.begin_step()
        self._forget()

    def _add(self, node: Node, found: Values) -> None:
        """What a node was summed in is used again for the next."""
        total = self._spare.pop() if self._spare else [torch.empty_like(flat) for flat in found]
        _each(torch.Tensor.copy_, total, found)
        while node.place % 2 and (left := self._nodes.pop(Node(node.level, node.place - 1), None)) is not None:
            _each(torch.Tensor.add_, left, total)
            self._spare.append(total)
            node, total = Node(node.level + 1, node.place // 2), left
        self._nodes[node] = total

    def _finish(self, found: Values) -> None:
        totals = self._flat.views(found)
        self._buffers.finish(totals[len(self._parameters) :], self._count)
        for parameter, total in zip(self._parameters, totals, strict=False):
            parameter.grad = total

    def _forget(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None


def _each(do: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], into: Values, values: Values) -> None:
    for one, other in zip(into, values, strict=True):
        do(one, other)
