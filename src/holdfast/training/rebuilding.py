"""Modules that hold a process group, after that is gone: they get the new one, and stay the objects that they are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from holdfast.worker import groups, handles


def wrapped(modules: Iterable[nn.Module]) -> Iterator[DistributedDataParallel]:
    """Each once."""
    for part in _parts(modules):
        if isinstance(part, DistributedDataParallel):
            yield part


def is_sharded(modules: Iterable[nn.Module]) -> bool:
    """Whether a rank holds what no other has, so that a world of another size would need another cut."""
    return any(isinstance(parameter, DTensor) for module in modules for parameter in module.parameters())


def held(state: Iterable[Any]) -> list[nn.Module]:
    """The modules of it, and what was wrapped around them and is not of it itself (`attach(model=ddp.module)`)."""
    modules = [value for value in state if isinstance(value, nn.Module)]
    known, own = set(map(id, _parts(modules))), {id(each) for module in modules for each in module.parameters()}
    return modules + [each for each in groups.wrappers() if id(each) not in known and _trained(each) <= own]


def _trained(module: nn.Module) -> set[int]:
    return {id(parameter) for parameter in module.parameters() if parameter.requires_grad}


def hinders(modules: Iterable[nn.Module], others: Iterable[Any]) -> str:
    """What cannot be given another group, if there is such a thing. And a new rank would have other weights in what it
    has wrapped, and does not get from the others."""
    known = set(map(id, _parts(modules)))
    if any(id(each) not in known for each in groups.wrappers()):
        return "a DistributedDataParallel that is not attached cannot be kept the same on all ranks; attach it, too"
    if any(part.process_group.size() < dist.get_world_size() for part in wrapped(modules)):
        return "a DistributedDataParallel of a part of the ranks has other weights than a new rank may get"
    if found := _has_own_group(modules, others):
        return f"{found} cannot be given another process group"
    return ""


def _has_own_group(modules: Iterable[nn.Module], others: Iterable[Any]) -> str:
    default = c10d._get_default_group().group_name
    for value in others:
        if getattr(value, "process_group", None) is not None:
            return f"a {type(value).__name__}, which has a process group,"
    fully_sharded = {group.mesh_info.mesh for part in _parts(modules) for group in _param_groups(part)}
    for part in _parts(modules):
        wraps = isinstance(part, DistributedDataParallel) and part.process_group.group_name != default
        if wraps and not handles.is_kept(part.process_group):  # made by split_group, or with options
            return "a DistributedDataParallel with a process group of its own"
        if any(isinstance(parameter, DTensor) for parameter in part.parameters(recurse=False)):
            own = part.parameters(recurse=False)
            meshes = {parameter.device_mesh for parameter in own if isinstance(parameter, DTensor)}
            if not all(map(_comes_back, meshes)):
                return "shards on a mesh that is not all ranks, or not made by new_group(),"
            if not hasattr(FSDPModule, "reset_iter_state"):
                return "shards of this version of torch (2.13 has FSDPModule.reset_iter_state)"
            if not meshes <= fully_sharded:  # others are filled by collectives, in which a new rank would be alone
                return "shards that are not of fully_shard (tensor parallelism, say)"
    return ""


def _comes_back(mesh: DeviceMesh) -> bool:
    """Whether it is of all ranks, and each of its groups is there in the next world."""
    default = c10d._get_default_group()
    own = [each for each in mesh.get_all_groups() if each is not default]
    return mesh.size() == default.size() and all(map(handles.is_kept, own))


def release(modules: Iterable[nn.Module]) -> None:
    """Let go of what belongs to the world that is over: its groups, and the gradients of a step that will not be."""
    for module in modules:
        if callable(reset := getattr(module, "reset_iter_state", None)):  # a root of FSDP2
            with contextlib.suppress(Exception):  # it may wait for a collective that has failed
                reset()
        for parameter in module.parameters():
            parameter.grad = None
    for part in wrapped(modules):
        part.reducer = part.logger = None  # type: ignore[assignment]
        if not handles.is_kept(part.process_group):
            part.process_group = None  # type: ignore[assignment]


def renew(modules: Iterable[nn.Module]) -> None:
    """Without a word to the other ranks: that all have the same weights is seen to elsewhere."""
    for part in _parts(modules):
        if isinstance(part, DistributedDataParallel):
            _renew_ddp(part)
        for group in _param_groups(part):
            for info in (group.mesh_info, group.post_forward_mesh_info):
                if info is not None:
                    known = info.mesh._get_root_mesh()._pg_registry
                    for name in info.mesh._dim_group_names:
                        if not handles.is_kept(known.get(name)):
                            known[name] = c10d._get_default_group()
                    info.__post_init__()


def _renew_ddp(part: DistributedDataParallel) -> None:
    if part.process_group is None:
        part.process_group = c10d._get_default_group()
    parameters, sparse = part._build_params_for_reducer()  # type: ignore[no-untyped-call]
    names = part._build_debug_param_to_name_mapping(parameters)  # type: ignore[no-untyped-call]
    part._ddp_init_helper(parameters, sparse, names, part.static_graph)  # type: ignore[no-untyped-call]
    part._has_rebuilt_buckets = part._lazy_init_ran = False
    hooks, part._comm_hooks = part._comm_hooks, []
    for hook, state in hooks:
        part.register_comm_hook(state, hook)


def _parts(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    seen: set[int] = set()
    for module in modules:
        for part in module.modules():
            if id(part) not in seen:
                seen.add(id(part))
                yield part


def _param_groups(part: nn.Module) -> list[Any]:
    if not callable(get := getattr(part, "_get_fsdp_state", None)):
        return []
    return list(get()._fsdp_param_groups)
