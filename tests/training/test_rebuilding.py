"""What can be given another process group, and what becomes of it; in a world of one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed import device_mesh
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from holdfast.training import rebuilding
from holdfast.worker import groups, handles


def begin_world() -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)


@pytest.fixture(autouse=True)
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In which what is wrapped is noted, as in a rank that has attached nothing yet."""
    monkeypatch.setattr(groups, "_settled", False)
    monkeypatch.setattr(handles, "_calls", [])
    monkeypatch.setattr(DistributedDataParallel, "__init__", groups._noted(DistributedDataParallel.__init__))
    begin_world()
    yield
    groups._wrappers.clear()
    dist.destroy_process_group()


def hinders(*state: Any) -> str:
    modules = rebuilding.held(state)
    return rebuilding.hinders(modules, [value for value in state if not isinstance(value, nn.Module)])


def test_shards_of_all_ranks_in_a_row_do_not_hinder() -> None:
    model = nn.Linear(2, 2)
    fully_shard(model)
    assert hinders(model) == ""


@pytest.mark.parametrize("noted", [True, False])
def test_a_mesh_of_two_dimensions(monkeypatch: pytest.MonkeyPatch, noted: bool) -> None:
    dist.destroy_process_group()
    dist.init_process_group("fake", store=HashStore(), rank=0, world_size=2)
    if noted:
        monkeypatch.setattr(device_mesh, "new_group", groups._watched("new_group", dist.new_group))
    model = nn.Linear(2, 2)
    # By another name each time: torch has a cache of meshes, by which one can be that of an earlier world.
    fully_shard(model, mesh=init_device_mesh("cpu", (1, 2), mesh_dim_names=(f"replicate {noted}", "shard")))
    said = "shards on a mesh that is not all ranks, or not made by new_group(), cannot be given another process group"
    assert hinders(model) == ("" if noted else f"{said}; give fully_shard a mesh of all ranks, by init_device_mesh")


def test_a_mesh_of_a_part_of_the_ranks() -> None:
    dist.destroy_process_group()
    dist.init_process_group("fake", store=HashStore(), rank=0, world_size=2)
    model = nn.Linear(2, 2)
    group = dist.new_group([0])
    assert handles.keep(dist.new_group, ([0],), {}, group)
    fully_shard(model, mesh=device_mesh.DeviceMesh.from_group(group, "cpu", mesh_dim_names=("part",)))
    assert hinders(model).startswith("shards on a mesh that is not all ranks")


def test_tensor_parallelism_under_shards() -> None:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "tensor"))
    model = parallelize_module(nn.Linear(2, 2), mesh["tensor"], ColwiseParallel())
    fully_shard(model, mesh=mesh["data"])
    assert hinders(model).startswith("shards that are not of fully_shard (tensor parallelism, say)")


def test_tensor_parallelism_alone() -> None:
    model = distribute_module(nn.Linear(2, 2), init_device_mesh("cpu", (1,)))
    assert hinders(model).startswith("shards that are not of fully_shard (tensor parallelism, say)")


def test_a_wrapped_module_that_is_not_attached() -> None:
    inner, other = nn.Linear(2, 2), nn.Linear(2, 2)
    wrapped = DistributedDataParallel(inner)
    assert rebuilding.held([inner]) == [inner, wrapped] and hinders(inner) == hinders(wrapped) == ""
    assert hinders(other) == (
        "a DistributedDataParallel that is not attached cannot be kept the same on all ranks; attach it, too"
    )
    del wrapped
    assert hinders(other) == "", "nobody has it any more"


def test_a_sharded_module_that_is_not_attached() -> None:
    root = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    fully_shard(root[0])
    fully_shard(root)
    other = nn.Linear(2, 2)
    assert hinders(root) == "" and rebuilding.held([root]) == [root]
    assert hinders(other) == (
        "an FSDPSequential that is not attached cannot be kept the same on all ranks; attach it, too"
    )
    del root
    assert hinders(other) == "", "nobody has it any more"


def test_one_that_is_sharded_later_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FSDPState, "__init__", FSDPState.__init__)
    called: list[str] = []
    rebuilding.on_shards(called.append)
    fully_shard(nn.Linear(2, 2))
    assert called == ["fully_shard"]


def test_a_batch_norm_that_was_given_a_group() -> None:
    given: Any = nn.SyncBatchNorm(2, process_group=dist.group.WORLD)
    plain: Any = nn.SyncBatchNorm(2)
    model = nn.Sequential(given, plain)
    assert hinders(model) == ""
    dist.destroy_process_group()
    begin_world()
    rebuilding.renew([model])
    assert given.process_group is dist.group.WORLD and plain.process_group is None
    own = nn.SyncBatchNorm(2, process_group=dist.new_group([0]))
    assert hinders(own) == (
        "a SyncBatchNorm with a process group of its own cannot be given another process group; "
        "make that group by new_group, without pg_options"
    )


def test_a_hook_and_a_static_graph_are_there_in_the_next_world() -> None:
    model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)), static_graph=True)
    asked: list[dist.ProcessGroup] = []

    def noted(bucket: Any) -> torch.futures.Future[torch.Tensor]:
        asked.append(dist.group.WORLD)  # type: ignore[arg-type]
        return default_hooks.allreduce_hook(asked[-1], bucket)

    model.register_comm_hook(None, lambda state, bucket: noted(bucket))
    x = torch.ones(4, 2)
    expected = torch.autograd.grad(model.module(x).sum(), list(model.parameters()))
    for world in range(3):
        for _ in range(3):
            model.zero_grad()
            model(x).sum().backward()
            assert all(map(torch.equal, expected, [parameter.grad for parameter in model.parameters()]))  # type: ignore[arg-type]
        assert asked and all(group is dist.group.WORLD for group in asked), world
        asked.clear()
        rebuilding.release([model])
        dist.destroy_process_group()
        begin_world()
        rebuilding.renew([model])


def test_wrapped_with_a_group_of_its_own() -> None:
    own = dist.new_group()
    model = DistributedDataParallel(nn.Linear(2, 2), process_group=own)
    assert hinders(model).startswith(
        "a DistributedDataParallel with a process group of its own cannot be given another"
    )
    assert handles.keep(dist.new_group, (), {}, own)
    assert hinders(model) == ""


def test_wrapped_for_a_part_of_the_ranks() -> None:
    """Others have other weights, and would give them to a new rank."""
    dist.destroy_process_group()
    dist.init_process_group("fake", store=HashStore(), rank=0, world_size=2)
    own = dist.new_group([0])
    assert handles.keep(dist.new_group, ([0],), {}, own)
    model = DistributedDataParallel(nn.Linear(2, 2), process_group=own)
    assert hinders(model).startswith("a DistributedDataParallel of a part of the ranks has other weights")


# -- shards in a world of another size --------------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(3, 7), nn.Linear(7, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.outer(self.inner(x))
        return y


def begin_fake_world(rank: int, size: int) -> None:
    dist.destroy_process_group()
    dist.init_process_group("fake", store=HashStore(), rank=rank, world_size=size)


def a_mesh(name: str) -> device_mesh.DeviceMesh:
    """Of a name that no other has: torch would take one for the other."""
    return init_device_mesh("cpu", (2,), mesh_dim_names=(name,))


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def rows(parameter: Any) -> int:
    return int(parameter.to_local().shape[0])


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "_meshes", [])
    monkeypatch.setattr(device_mesh.DeviceMesh, "__init__", groups._keeping(device_mesh.DeviceMesh.__init__))


def test_shards_are_cut_anew_in_the_objects_that_there_are(noted: None) -> None:
    begin_fake_world(0, 2)
    model, mesh = Model(), a_mesh("cut anew")
    fully_shard(model.inner, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    before: list[Any] = list(model.parameters())
    assert [rows(each) for each in before] == [4, 4, 1, 1]
    assert rebuilding.fits_any_size([model], {"tokens": 3})
    for rank, size, expected in [(2, 3, [1, 1, 0, 0]), (0, 1, [7, 7, 2, 2]), (1, 2, [3, 3, 1, 1])]:
        rebuilding.release([model])
        begin_fake_world(rank, size)
        assert rebuilding.renew([model], [optimizer])
        assert all(map(lambda one, other: one is other, model.parameters(), before))
        assert [rows(each) for each in before] == expected
        for parameter in before:
            assert parameter.device_mesh.size() == size and parameter.device_mesh.get_local_rank() == rank
            assert optimizer.state[parameter]["exp_avg"].to_local().shape == parameter.to_local().shape
        train(model, optimizer)
        assert not rebuilding.renew([model], [optimizer]), "it is as it should be"


def test_copies_of_shards_are_of_one_size(noted: None) -> None:
    begin_fake_world(0, 2)
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=a_mesh("copied"))
    copy = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    assert rebuilding.fits_any_size([model], {"tokens": 3})
    assert not rebuilding.fits_any_size([model], {"average": copy})


def test_another_mesh_is_of_one_size(noted: None) -> None:
    begin_fake_world(0, 2)
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=a_mesh("one"))
    mesh = a_mesh("other")
    assert not rebuilding.fits_any_size([model], {})
    del mesh
    assert rebuilding.fits_any_size([model], {})


def test_hsdp_is_of_one_size(noted: None) -> None:
    begin_fake_world(0, 4)
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("two", "dimensions")))
    assert not rebuilding.fits_any_size([model], {})
