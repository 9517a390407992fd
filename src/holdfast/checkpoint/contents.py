"""What a user's state consists of, and how it gets back into it.

A state is a dict of names: modules, optimizers, schedulers and anything else with `state_dict` and `load_state_dict`,
tensors, and plain values. A wrapped module is saved as the module in it, as torch's own helpers do, so that a state has
the same names at any world size and with or without DDP and `torch.compile`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import torch
from torch import nn

from holdfast.checkpoint import plans, tree
from holdfast.checkpoint.errors import CheckpointError


class Contents(msgspec.Struct):
    """A state at one moment. The tensors are the live ones."""

    nodes: dict[str, Any]  # by name
    tensors: dict[str, torch.Tensor]
    volatile: set[str]  # those that may change before the optimizer's next step


def unwrap(value: Any) -> Any:
    """The module inside DDP, DataParallel and a compiled one."""
    while isinstance(value, nn.Module):
        if isinstance(value, nn.parallel.DistributedDataParallel | nn.DataParallel):
            value = value.module
        elif isinstance(inner := getattr(value, "_orig_mod", None), nn.Module):
            value = inner
        else:
            break
    return value


def is_stateful(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def check(state: Mapping[str, Any]) -> None:
    for name, value in state.items():
        if not isinstance(name, str) or not name:
            raise CheckpointError(f"state: {name!r} is no name; names are strings")
        if isinstance(value, type):
            raise CheckpointError(f"state[{name!r}] is a class; give an object of it")
        if isinstance(value, nn.Module):
            plans.check_module(value)


def collect(state: Mapping[str, Any], memory: tree.Memory | None = None) -> Contents:
    """Raises CheckpointError for what cannot be saved. Modules' parameters and optimizers' tensors change only in an
    optimizer's step; all else may at any time, and has to be copied at once."""
    contents = Contents({}, {}, set())
    if memory is not None:
        memory.turn()
    for name, value in state.items():
        value = unwrap(value)
        plain = _plain(value)
        node, tensors = tree.flatten(plain, tree.part(name), memory)
        contents.nodes[name] = node
        contents.tensors.update(tensors)
        if isinstance(value, nn.Module):
            contents.volatile |= _buffers(value, tree.part(name), tensors)
        elif not isinstance(value, torch.optim.Optimizer):
            contents.volatile |= tensors.keys()
    return contents


def _plain(value: Any) -> Any:
    if isinstance(value, nn.Module) and type(value).state_dict is nn.Module.state_dict:
        return value.state_dict(keep_vars=True)  # which makes no new tensors, and tells what is a parameter
    return value.state_dict() if is_stateful(value) else value


def _buffers(module: nn.Module, path: str, tensors: Mapping[str, torch.Tensor]) -> set[str]:
    if type(module).state_dict is nn.Module.state_dict:
        return {key for key, tensor in tensors.items() if not isinstance(tensor, nn.Parameter)}
    buffers = {tree.join(path, buffer) for buffer, _ in module.named_buffers(remove_duplicate=False)}
    return buffers & tensors.keys()
