"""What a worker is told of its world: torchrun's variables, all of them."""

from __future__ import annotations

import pytest

from holdfast.control.worlds import World, one_gpu_env, worker_env


def a_world(
    first_rank: int = 0,
    world_size: int = 0,
    group_rank: int = 0,
    group_size: int = 1,
    role: str = "default",
    role_first_rank: int = 0,
    role_size: int = 0,
) -> World:
    return World(
        run_id="run",
        generation=4,
        restart_count=2,
        max_restarts=3,
        master_addr="10.0.0.1",
        master_port=29500,
        local_size=2,
        role=role,
        first_rank=first_rank,
        world_size=world_size,
        group_rank=group_rank,
        group_size=group_size,
        role_first_rank=role_first_rank,
        role_size=role_size,
    )


def test_a_worker_gets_every_variable_that_torchrun_sets() -> None:
    assert worker_env(a_world(role="trainer"), 1, {}) == {
        "LOCAL_RANK": "1",
        "RANK": "1",
        "GROUP_RANK": "0",
        "ROLE_RANK": "1",
        "ROLE_NAME": "trainer",
        "LOCAL_WORLD_SIZE": "2",
        "WORLD_SIZE": "2",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_RUN_ID": "run",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "HOLDFAST_GENERATION": "4",
        "HOLDFAST_JOB_ID": "",
    }


def test_a_second_node_counts_its_ranks_from_where_the_first_one_ends() -> None:
    second = a_world(first_rank=2, world_size=4, group_rank=1, group_size=2, role_first_rank=2, role_size=4)
    env = worker_env(second, 1, {})
    assert (env["RANK"], env["LOCAL_RANK"], env["ROLE_RANK"]) == ("3", "1", "3")
    assert (env["WORLD_SIZE"], env["LOCAL_WORLD_SIZE"], env["ROLE_WORLD_SIZE"]) == ("4", "2", "4")
    assert (env["GROUP_RANK"], env["GROUP_WORLD_SIZE"]) == ("1", "2")


def test_a_role_counts_its_own_ranks_and_not_those_of_the_world() -> None:
    reader = a_world(first_rank=6, world_size=8, group_rank=1, group_size=2, role="reader", role_size=2)
    env = worker_env(reader, 1, {})
    assert (env["RANK"], env["ROLE_RANK"]) == ("7", "1")
    assert (env["WORLD_SIZE"], env["ROLE_WORLD_SIZE"], env["ROLE_NAME"]) == ("8", "2", "reader")


def test_a_node_that_is_the_whole_world_has_its_size() -> None:
    assert a_world().size == 2
    assert a_world(world_size=8).size == 8


def test_the_users_own_nccl_setting_is_kept() -> None:
    inherited = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    assert worker_env(a_world(), 0, inherited)["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"])
def test_threads_and_gpus_are_passed_on_only_where_they_are_set(name: str) -> None:
    assert name not in worker_env(a_world(), 0, {"HOME": "/root"})
    assert worker_env(a_world(), 0, {name: "5"})[name] == "5"


def test_nothing_else_is_passed_on() -> None:
    assert "HOME" not in worker_env(a_world(), 0, {"HOME": "/root"})


def test_a_virtual_rank_is_rank_zero_of_its_own_gpu() -> None:
    assert one_gpu_env(3, {}) == {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "3"}


def test_a_virtual_rank_gets_its_gpu_out_of_those_that_are_visible() -> None:
    assert one_gpu_env(1, {"CUDA_VISIBLE_DEVICES": "4, 6,7"})["CUDA_VISIBLE_DEVICES"] == "6"


def test_a_virtual_rank_without_a_gpu_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="local rank 2 has no GPU in CUDA_VISIBLE_DEVICES=0,1"):
        one_gpu_env(2, {"CUDA_VISIBLE_DEVICES": "0,1"})
