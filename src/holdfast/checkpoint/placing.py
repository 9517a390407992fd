"""How a saved state gets back into a user's: what is filled where it is, what is made, and what is called then."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import msgspec
import torch
from torch import nn

from holdfast.checkpoint import boxes, tree
from holdfast.checkpoint.contents import is_stateful, unwrap
from holdfast.checkpoint.errors import CheckpointError
from holdfast.checkpoint.sources import Source


class Placing(msgspec.Struct):
    """Read `targets`, then call `finish`. Nothing but tensors that are filled in place changes before that."""

    targets: dict[str, torch.Tensor]
    finish: list[Callable[[], None]]
    notes: list[str]  # what a person should know
    lacking: list[str]  # of which nothing is in the source, not even what they are


def prepare(state: Mapping[str, Any], source: Source) -> Placing:
    """Raises CheckpointError where what was saved is not of the same make."""
    placing = Placing({}, [], [], [])
    for name, value in state.items():
        if name not in source.nodes:
            placing.notes.append(f"it has no {name!r}, which stays as it is")
            continue
        node, value = source.nodes[name], unwrap(value)
        if isinstance(value, nn.Module):
            _module(placing, name, value, node, source)
        elif isinstance(value, torch.optim.Optimizer):
            _optimizer(placing, name, value, node, source)
        elif is_stateful(value):
            _stateful(placing, name, value, node, source)
        elif isinstance(value, torch.Tensor):
            _fill(placing, tree.part(name), value.detach(), source)
        else:
            _value(placing, name, state, node, source)
    if extra := sorted(source.nodes.keys() - state.keys()):
        placing.notes.append(f"it also has {', '.join(extra)}, which nobody asked for")
    return placing


def _module(placing: Placing, name: str, module: nn.Module, node: Any, source: Source) -> None:
    now, targets = tree.flatten(module.state_dict(), tree.part(name))
    saved = set(tree.tensor_keys(node))
    if missing := sorted(targets.keys() - saved):
        raise CheckpointError(f"it was saved of another model: it has no {_some(missing)}")
    if extra := sorted(saved - targets.keys()):
        raise CheckpointError(f"it was saved of another model: the model has no {_some(extra)}")
    for key, tensor in targets.items():
        _fill(placing, key, tensor, source)
    if now != node or type(module).load_state_dict is not nn.Module.load_state_dict:
        # It has state besides its tensors, or its own way to load: the tensors are its own, so this copies nothing new.
        placing.finish.append(lambda: _load(name, module, tree.unflatten(node, targets)))


def _optimizer(placing: Placing, name: str, optimizer: torch.optim.Optimizer, node: Any, source: Source) -> None:
    """An optimizer adopts the tensors it is given, so they are made where it will want them."""
    _, present = tree.flatten(optimizer.state_dict(), tree.part(name))
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    made: dict[str, torch.Tensor] = {}
    counts_there = all(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
    for key in tree.tensor_keys(node):
        tensor, described = present.get(key), _described(key, source)
        if tensor is not None and (tensor.dtype, tensor.shape) == described:
            made[key] = placing.targets[key] = tensor
            continue
        parameter = _parameter_of(tree.parts(key), parameters)
        if described is None and parameter is not None:
            # No part of it is where this rank can read. It may need none: there may be fewer rows than ranks.
            described = parameter.dtype, tuple(parameter.shape)
        if described is None:
            placing.lacking.append(key)
            continue
        made[key] = placing.targets[key] = _like(parameter, *described, counts_there)
    placing.finish.append(lambda: _load(name, optimizer, tree.unflatten(node, made)))


def _parameter_of(parts: list[str], parameters: list[torch.Tensor]) -> torch.Tensor | None:
    if len(parts) > 2 and parts[1] == "state" and parts[2].isdecimal() and int(parts[2]) < len(parameters):
        return parameters[int(parts[2])]
    return None


def _like(
    parameter: torch.Tensor | None, dtype: torch.dtype, shape: tuple[int, ...], counts_there: bool
) -> torch.Tensor:
    """`counts_there`: also its steps are counted where the parameter is."""
    if parameter is not None and tuple(parameter.shape) == shape and shape:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False, memory_format=torch.contiguous_format)
    there = parameter.device if parameter is not None and counts_there and not shape else None
    return torch.empty(shape, dtype=dtype, device=there)


def _stateful(placing: Placing, name: str, value: Any, node: Any, source: Source) -> None:
    made = _make(placing, node, source)
    placing.finish.append(lambda: _load(name, value, tree.unflatten(node, made)))


def _value(placing: Placing, name: str, state: Mapping[str, Any], node: Any, source: Source) -> None:
    made = _make(placing, node, source)

    def put() -> None:
        if not isinstance(state, MutableMapping):
            raise CheckpointError(f"state[{name!r}] cannot be set: give the state as a dict")
        state[name] = tree.unflatten(node, made)

    placing.finish.append(put)


def _make(placing: Placing, node: Any, source: Source) -> dict[str, torch.Tensor]:
    made = {}
    for key in tree.tensor_keys(node):
        if (described := _described(key, source)) is None:
            placing.lacking.append(key)
        else:
            dtype, shape = described
            made[key] = placing.targets[key] = torch.empty(shape, dtype=dtype)
    return made


def _fill(placing: Placing, key: str, tensor: torch.Tensor, source: Source) -> None:
    described = _described(key, source)
    if described is not None and tensor.shape != described[1]:
        raise CheckpointError(f"{key} was saved with shape {described[1]}, and is now of shape {tuple(tensor.shape)}")
    placing.targets[key] = tensor


def _described(key: str, source: Source) -> tuple[torch.dtype, tuple[int, ...]] | None:
    found = source.described(key)
    return (boxes.dtype_of(found[0]), found[1]) if found is not None else None


def _load(name: str, value: Any, state: Any) -> None:
    try:
        value.load_state_dict(state)
    except CheckpointError:
        raise
    except Exception as failure:
        text = " ".join(str(failure).split())[:300]
        raise CheckpointError(f"{name}: its load_state_dict refused: {type(failure).__name__}: {text}") from failure


def _some(keys: list[str]) -> str:
    return ", ".join(keys[:3]) + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")
