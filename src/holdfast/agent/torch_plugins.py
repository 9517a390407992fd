"""Where torch's own extension points are asked, in a process that has torch: devices, and `torchrun.logs_specs`."""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING, Any

from holdfast.wire import messages

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing import LogsSpecs


def count_devices(kind: str) -> int:
    """How many ranks `--nproc-per-node=kind` means. Raises ValueError where there are none."""
    import torch

    if kind == "cpu":
        return _cpus()
    if kind == "gpu":
        if not torch.cuda.is_available():
            raise ValueError("there is no CUDA device here; leave it out, or use a number or cpu")
        return torch.cuda.device_count()
    if kind == "xpu":
        if not torch.xpu.is_available():
            raise ValueError("there is no XPU device here; use a number or cpu")
        return torch.xpu.device_count()
    if kind == "auto":
        accelerator: Any = torch.accelerator
        return int(accelerator.device_count()) if accelerator.is_available() else _cpus()
    custom = torch._C._get_privateuse1_backend_name()
    backend = getattr(torch, kind, None)
    if kind != custom or backend is None:
        raise ValueError(f"{kind!r} is not a number, cpu, gpu, xpu or auto")
    if not backend.is_available():
        raise ValueError(f"there is no {kind} device here")
    return int(backend.device_count())


def _cpus() -> int:
    import os

    return len(os.sched_getaffinity(0))


def plan_logs(made: dict[str, LogsSpecs], request: messages.PlanLogs) -> messages.LogsPlanned:
    """Let the plug-in place a world's streams. It is made once and kept, as torchrun does."""
    from torch.distributed.elastic.multiprocessing import Std

    if request.plugin not in made:
        found = metadata.entry_points(group="torchrun.logs_specs", name=request.plugin)
        if not found:
            known = sorted(e.name for e in metadata.entry_points(group="torchrun.logs_specs"))
            raise ValueError(f"no entry point torchrun.logs_specs[{request.plugin}]; installed: {known or 'none'}")
        made[request.plugin] = next(iter(found)).load()(
            log_dir=request.log_dir,
            redirects={rank: Std(value) for rank, value in request.redirects.items()},
            tee={rank: Std(value) for rank, value in request.tee.items()},
            local_ranks_filter=set(request.local_ranks) if request.local_ranks else None,
        )
    envs = {rank: dict(env) for rank, env in request.envs.items()}
    dest = made[request.plugin].reify(envs)
    return messages.LogsPlanned(
        stdouts=dict(dest.stdouts),
        stderrs=dict(dest.stderrs),
        tee_stdouts=dict(dest.tee_stdouts),
        tee_stderrs=dict(dest.tee_stderrs),
        error_files={
            rank: env.get("TORCHELASTIC_ERROR_FILE", dest.error_files.get(rank, "")) for rank, env in envs.items()
        },
        filtered_stdout=dest.filtered_stdout,
        filtered_stderr=dest.filtered_stderr,
    )
