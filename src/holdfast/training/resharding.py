"""Shards of FSDP2, cut anew for another rank of another number of ranks. What they held is loaded after that.

The parameters stay the objects that they are, for optimizers and whoever else has them: of a DTensor, whose own size is
that of the whole, only what is here of it changes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec

PLAIN = "FSDPMeshInfo"  # and not what is derived from it: HSDP's has groups of a part of the ranks


def can_be_cut(groups: Iterable[Any], meshes: Iterable[DeviceMesh]) -> bool:
    """Whether all these are cut by `fully_shard` alone, in one dimension and over all ranks; and nothing else of the
    program's has a mesh, of which `meshes` are all."""
    groups = list(groups)
    theirs = {id(group.mesh_info.mesh) for group in groups}
    if not all(id(mesh) in theirs for mesh in meshes):
        return False
    return all(_is_plain(group.mesh_info) and all(map(_is_whole, group.fsdp_params)) for group in groups)


def _is_plain(info: Any) -> bool:
    if type(info).__name__ != PLAIN or info.is_spmd_mesh or info.mesh.ndim != 1:
        return False
    alone = info.mesh._get_root_mesh() is info.mesh and not info.mesh._flatten_mapping
    return alone and info.mesh.get_group() is c10d._get_default_group() and info.reduce_scatter_process_group is None


def _is_whole(parameter: Any) -> bool:
    """Beside its shards there is nothing that is of one size, and the shards are tensors like others."""
    if parameter.post_forward_mesh_info not in (None, parameter.mesh_info) or parameter.is_dtensor:
        return False
    plain = type(parameter.sharded_param._local_tensor) is torch.Tensor
    return plain and parameter.fsdp_placement == Shard(0) and not parameter.offload_to_cpu


def other(groups: Iterable[Any]) -> list[Any]:
    """Those of them that are cut for another rank, or another number of ranks."""
    here = dist.get_rank(), dist.get_world_size()
    infos = [(group, group.mesh_info) for group in groups if type(group.mesh_info).__name__ == PLAIN]
    return [group for group, info in infos if (info.shard_mesh_rank, info.shard_mesh_size) != here]


def span(mesh: DeviceMesh) -> None:
    """All ranks that there are now. It is made again, and stays the object that it is."""
    ranks = torch.arange(dist.get_world_size(), device="cpu", dtype=torch.int)
    DeviceMesh.__init__(mesh, mesh.device_type, ranks, mesh_dim_names=mesh.mesh_dim_names)


def cut(group: Any, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """As this rank of its mesh has it. What an optimizer keeps of a parameter is cut the same way."""
    states: list[Any] = [optimizer.state for optimizer in optimizers]
    for each in group.fsdp_params:
        parameter, uid = each.sharded_param, each._orig_param_uid
        whole = torch.empty(each._orig_size, dtype=parameter.dtype, device=parameter.device)
        each._init_sharded_param(nn.Parameter(whole, parameter.requires_grad), each.device, None, each.mesh_info)
        fresh, each.sharded_param, each._orig_param_uid = each.sharded_param, parameter, uid
        _put(parameter, fresh._local_tensor, each._sharding_spec)
        each._setattr_on_modules(parameter)
        each.all_gather_outputs, each.unsharded_accumulated_grad = [], None
        each.__dict__.pop("_unsharded_param", None)
        each._unsharded_inner_tensors = []
        for kept in [value for state in states if parameter in state for value in state[parameter].values()]:
            if isinstance(kept, DTensor):
                _put(kept, torch.zeros_like(fresh._local_tensor, dtype=kept.dtype), each._sharding_spec)


def _put(tensor: Any, local: torch.Tensor, cut: DTensorSpec) -> None:
    """A spec of its own, and not the one that torch has for what is alike: that may have a mesh of an earlier world."""
    tensor._local_tensor = local
    tensor._spec = DTensorSpec(cut.mesh, cut.placements, tensor_meta=tensor._spec.tensor_meta)
