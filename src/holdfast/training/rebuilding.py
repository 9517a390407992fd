"""Modules that hold a process group, after that is gone: they get the new one, and stay the objects that they are."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _composable_state
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from holdfast.checkpoint import contents
from holdfast.training import resharding
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
    return modules + [each for each in _noticed() if id(each) not in known and _trained(each) <= own]


def _noticed() -> list[nn.Module]:
    """What the program has wrapped so far and still has, attached or not: by DDP, or by `fully_shard`, of which torch
    has a list; of those in each other the outermost."""
    sharded = [each for each in list(_composable_state._module_state_mapping) if isinstance(each, FSDPModule)]
    inner = {id(part) for each in sharded for part in each.modules() if part is not each}
    return groups.wrappers() + [each for each in sharded if id(each) not in inner]


def on_shards(call: Callable[[str], None]) -> None:
    """What is to be called when the program shards a module later."""
    with contextlib.suppress(ImportError):  # a torch that has it elsewhere
        from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

        init = FSDPState.__init__

        @functools.wraps(init)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            init(self, *args, **kwargs)
            call("fully_shard")

        FSDPState.__init__ = __init__  # type: ignore[method-assign]


def _trained(module: nn.Module) -> set[int]:
    return {id(parameter) for parameter in module.parameters() if parameter.requires_grad}


def hinders(modules: Iterable[nn.Module], others: Iterable[Any]) -> str:
    """What cannot be given another group, if there is such a thing. And a new rank would have other weights in what it
    has wrapped, and does not get from the others."""
    known = set(map(id, _parts(modules)))
    if any(id(each) not in known for each in _noticed()):
        gc.collect()  # nobody may have it any more
    for each in _noticed():
        if id(each) not in known:
            name = f"{'an' if isinstance(each, FSDPModule) else 'a'} {type(each).__name__}"
            return f"{name} that is not attached cannot be kept the same on all ranks; attach it, too"
    if any(part.process_group.size() < dist.get_world_size() for part in wrapped(modules)):
        return (
            "a DistributedDataParallel of a part of the ranks has other weights than a new rank may get; "
            "wrap the model for all ranks"
        )
    if (found := _has_own_group(modules, others)) is not None:
        what, instead = found
        return f"{what} cannot be given another process group; {instead}"
    return ""


def _has_own_group(modules: Iterable[nn.Module], others: Iterable[Any]) -> tuple[str, str] | None:
    """What has, and what to do about it."""
    default = c10d._get_default_group().group_name
    for value in others:
        if getattr(value, "process_group", None) is not None:
            return f"a {type(value).__name__}, which has a process group,", "attach one without"
    fully_sharded = {group.mesh_info.mesh for part in _parts(modules) for group in _param_groups(part)}
    for part in _parts(modules):
        own = part.__dict__.get("process_group")
        apart = isinstance(own, c10d.ProcessGroup) and own.group_name != default
        if apart and not handles.is_kept(own):  # made by split_group, or with options
            instead = "make that group by new_group, without pg_options"
            return f"a {type(part).__name__} with a process group of its own", instead
        meshes = {each.device_mesh for each in part.parameters(recurse=False) if isinstance(each, DTensor)}
        if not all(map(_comes_back, meshes)):
            what = "shards on a mesh that is not all ranks, or not made by new_group(),"
            return what, "give fully_shard a mesh of all ranks, by init_device_mesh"
        if meshes and not hasattr(FSDPModule, "reset_iter_state"):
            return "shards of this version of torch", "torch 2.13 has FSDPModule.reset_iter_state for it"
        if not meshes <= fully_sharded:  # others are filled by collectives, in which a new rank would be alone
            what = "shards that are not of fully_shard (tensor parallelism, say)"
            return what, "call fully_shard for the whole model"
    return None


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


def fits_any_size(modules: Iterable[nn.Module], others: Mapping[str, Any]) -> bool:
    """Whether all that is sharded can be cut for a world of another size. A copy of shards, an average say, cannot: who
    made it knows what it is a copy of."""
    modules = list(modules)
    sharded = [group for part in _parts(modules) for group in _param_groups(part)]
    held = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    held += contents.collect(others).tensors.values()
    with contextlib.suppress(AttributeError):  # a torch that has it elsewhere
        own = {id(each.sharded_param) for group in sharded for each in group.fsdp_params}
        copies = any(isinstance(tensor, DTensor) and id(tensor) not in own for tensor in held)
        return not copies and resharding.can_be_cut(sharded, groups.meshes())
    return False


def renew(modules: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer] = ()) -> bool:
    """Without a word to the other ranks: that all have the same weights is seen to elsewhere. Whether shards were cut
    anew, which are empty then."""
    modules = list(modules)
    stale = resharding.other(group for part in _parts(modules) for group in _param_groups(part))
    for mesh in {id(group.mesh_info.mesh): group.mesh_info.mesh for group in stale}.values():
        resharding.span(mesh)
    for part in _parts(modules):
        if isinstance(part, DistributedDataParallel):
            _renew_ddp(part)
        else:
            own = part.__dict__.get("process_group")  # SyncBatchNorm's, if it was given one
            if isinstance(own, c10d.ProcessGroup) and not handles.is_kept(own):
                part.__dict__["process_group"] = c10d._get_default_group()
        for group in _param_groups(part):
            for info in (group.mesh_info, group.post_forward_mesh_info):
                if info is not None:
                    known = info.mesh._get_root_mesh()._pg_registry
                    for name in info.mesh._dim_group_names:
                        if not handles.is_kept(known.get(name)):
                            known[name] = c10d._get_default_group()
                    info.__post_init__()
    for group in stale:
        resharding.cut(group, optimizers)
    return bool(stale)


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
