"""A world: one agreement on who has which rank. Immutable; the next one has the next generation."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


class World(msgspec.Struct, frozen=True):
    """What one node knows of a world: its own share, and what all share."""

    run_id: str
    generation: int
    restart_count: int
    max_restarts: int
    master_addr: str
    master_port: int
    local_size: int
    role: str = "default"
    first_rank: int = 0
    world_size: int = 0  # 0: this node is the whole world
    group_rank: int = 0
    group_size: int = 1
    role_first_rank: int = 0
    role_size: int = 0  # 0: this node is all of its role
    job_id: str = ""  # of this start of the job, whose name others may have had before
    ordinal: int = 0  # how many worlds of that start there were before
    stayed: bool = False  # some ranks were in an earlier world, and have its state

    @property
    def size(self) -> int:
        return self.world_size or self.local_size


def worker_env(world: World, local_rank: int, inherited: Mapping[str, str]) -> dict[str, str]:
    """Every variable that torchrun gives a worker."""
    rank = world.first_rank + local_rank
    env = {
        "LOCAL_RANK": str(local_rank),
        "RANK": str(rank),
        "GROUP_RANK": str(world.group_rank),
        "ROLE_RANK": str(world.role_first_rank + local_rank),
        "ROLE_NAME": world.role,
        "LOCAL_WORLD_SIZE": str(world.local_size),
        "WORLD_SIZE": str(world.size),
        "GROUP_WORLD_SIZE": str(world.group_size),
        "ROLE_WORLD_SIZE": str(world.role_size or world.local_size),
        "MASTER_ADDR": world.master_addr,
        "MASTER_PORT": str(world.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(world.restart_count),
        "TORCHELASTIC_MAX_RESTARTS": str(world.max_restarts),
        "TORCHELASTIC_RUN_ID": world.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": inherited.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        "HOLDFAST_GENERATION": str(world.generation),
        "HOLDFAST_JOB_ID": world.job_id,
    }
    for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"):
        if name in inherited:
            env[name] = inherited[name]
    return env


def one_gpu_env(local_rank: int, inherited: Mapping[str, str]) -> dict[str, str]:
    """`--virtual-local-rank`: every worker is local rank 0 and sees its own GPU alone. ValueError if it has none."""
    visible = inherited.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": str(local_rank)}
    gpus = [gpu.strip() for gpu in visible.split(",")]
    if local_rank >= len(gpus):
        raise ValueError(f"local rank {local_rank} has no GPU in CUDA_VISIBLE_DEVICES={visible}")
    return {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": gpus[local_rank]}
