"""Sharded tensors (DTensor): which part of one this rank has, and who has the same."""

from __future__ import annotations

import math
import sys
from typing import Any, NamedTuple

import torch

from holdfast.checkpoint.errors import CheckpointError


class Box(NamedTuple):
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def whole(tensor: torch.Tensor) -> Box:
    return Box((0,) * tensor.ndim, tuple(tensor.shape))


def is_sharded(tensor: torch.Tensor) -> bool:
    """Without importing what takes most of a second: where that is not loaded there are none."""
    if type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter:
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part, not a copy. To be called without gradients."""
    if not is_sharded(tensor):
        return tensor
    sharded: Any = tensor
    part: Any = sharded.to_local()
    # What a collective has yet to bring is a wrapper around it until then.
    return part.trigger_wait() if hasattr(part, "trigger_wait") else part  # type: ignore[no-any-return]


def check(key: str, tensor: Any) -> None:
    """Raises CheckpointError."""
    if any(placement.is_partial() for placement in tensor.placements):
        raise CheckpointError(f"{key} is a partial sum on each rank; reduce it (full_tensor) before it is saved")
    box = box_of(tensor)
    if box is not None and math.prod(box.sizes) != local(tensor).numel():
        raise CheckpointError(f"{key}: torch has {box.sizes} of it here, but there are {tuple(local(tensor).shape)}")
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is not None and not _in_one_box(tensor, coordinate):
        raise CheckpointError(f"{key}: sharded as {tensor.placements} a rank's rows do not follow each other")


def replicas(tensor: Any) -> list[int]:
    """The ranks that have the same part as this one, itself included, in the order of the mesh. For a rank outside of
    the mesh those of its first rank stand in."""
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate() or [0] * mesh.ndim
    at = tuple(
        slice(None) if placement.is_replicate() else place
        for placement, place in zip(tensor.placements, coordinate, strict=True)
    )
    return [int(rank) for rank in mesh.mesh[at].reshape(-1).tolist()]


def box_of(tensor: Any) -> Box | None:
    """What this rank has; None if that is nothing. Of a tensor without elements one rank has it, without elements."""
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return None
    if tensor.numel() == 0:
        first = all(
            place == 0 or placement.is_replicate()
            for placement, place in zip(tensor.placements, coordinate, strict=True)
        )
        return whole(tensor) if first else None
    from torch.distributed.checkpoint.default_planner import create_default_local_save_plan

    (item,) = create_default_local_save_plan({"": tensor}, is_coordinator=True).items
    assert item.tensor_data is not None
    chunk = item.tensor_data.chunk
    return Box(tuple(chunk.offsets), tuple(chunk.sizes)) if math.prod(chunk.sizes) else None


def _in_one_box(tensor: Any, coordinate: list[int]) -> bool:
    """Where one dimension is cut twice, the first cut may be strided, as FSDP's over tensor parallelism, and the second
    makes it whole again. Else torch's planner would still give one box. So the rows' numbers are cut as they were."""
    numbers: dict[int, torch.Tensor] = {}
    for placement, count, place in zip(tensor.placements, tensor.device_mesh.shape, coordinate, strict=True):
        if placement.is_replicate():
            continue
        dim = placement.dim
        before = numbers.get(dim, torch.arange(tensor.shape[dim]).reshape([1] * dim + [-1]))
        parts, _ = placement._split_tensor(before, count, with_padding=False, contiguous=False)
        numbers[dim] = parts[place]
    rows = [part.reshape(-1) for part in numbers.values()]
    return all(len(row) == 0 or int(row[-1]) - int(row[0]) + 1 == len(row) for row in rows)
