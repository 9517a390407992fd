"""A handle of a process group that has gone through worlds of one rank."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, _resolve_process_group
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh

from holdfast.worker import groups, handles


@pytest.fixture(autouse=True)
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(handles, "_calls", [])
    begin_world()
    yield
    dist.destroy_process_group()


def begin_world() -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)


def next_world() -> None:
    groups.leave()
    begin_world()
    handles.make_again()


def make(**kwargs: Any) -> Any:
    group = dist.new_group(**kwargs)
    assert handles.keep(dist.new_group, (), kwargs, group)
    return group


def summed(group: Any) -> float:
    tensor = torch.full((), 3.0)
    dist.all_reduce(tensor, group=group)
    return tensor.item()


def test_it_is_the_group_of_the_next_world() -> None:
    groups_made = [make(ranks=[0]), make(group_desc="second")]
    names = [group.group_name for group in groups_made]
    backends = [weakref.ref(group._get_backend(torch.device("cpu"))) for group in groups_made]
    for _ in range(3):
        next_world()
        for group, name in zip(groups_made, names, strict=True):
            assert summed(group) == 3.0
            assert group.group_name == name and _resolve_process_group(name) is group
            assert dist.get_backend(group) == "gloo" and dist.get_process_group_ranks(group) == [0]
            group.get_group_store().set("key", "value")
            assert group.get_group_store().get("key") == b"value"
    assert groups_made[1].group_desc == "second"
    while any(each() is not None for each in backends):
        gc.collect()  # a thread drops them


def test_between_worlds_it_has_nothing() -> None:
    group = make()
    groups.leave()
    with pytest.raises(RuntimeError, match="backend"):
        group.allreduce(torch.ones(1))
    groups.leave()  # a world that did not come about
    begin_world()
    handles.make_again()
    assert summed(group) == 3.0


def test_one_that_was_destroyed_stays_so_and_is_made_all_the_same() -> None:
    gone, group = make(), make()
    dist.destroy_process_group(gone)
    for _ in range(2):
        next_world()
        assert c10d._world.group_count == 3 and summed(group) == 3.0
        assert gone not in c10d._world.pg_names


def test_one_that_nobody_has_is_there_by_its_name() -> None:
    name = make().group_name
    for _ in range(2):
        next_world()
        assert summed(_resolve_process_group(name)) == 3.0


def test_the_default_group_of_a_mesh() -> None:
    mesh = init_device_mesh("cpu", (1,))
    handles.keep_default()
    handles.keep_default()
    for _ in range(2):
        next_world()
        assert mesh.get_group() is dist.group.WORLD and summed(mesh.get_group()) == summed(None) == 3.0


def test_options_are_not_made_again() -> None:
    options = c10d.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    group = dist.new_group(pg_options=options)
    assert not handles.keep(dist.new_group, (), {"pg_options": options}, group)
    assert not handles.are_kept() and not handles.is_kept(group)


def test_a_torch_that_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handles, "LET_GO", "another_name")
    monkeypatch.setattr(handles, "_let_go", handles._let_go.__wrapped__)
    assert handles._store_at.__wrapped__() is None
