"""What this machine has, as one node or as several for trying things out."""

from __future__ import annotations

import os
import shutil

from holdfast.workflow.standing import Node

__all__ = ["Node", "nodes"]


def nodes(count: int) -> tuple[Node, ...]:
    """Its GPUs are divided up; its cores, its memory and its disk are everybody's."""
    found = gpus()
    each = len(found) // count
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    disk = shutil.disk_usage("/").total
    return tuple(
        Node(f"node-{at + 1}", float(os.cpu_count() or 1), tuple(found[at * each : (at + 1) * each]), memory, disk)
        for at in range(count)
    )


def gpus() -> list[str]:
    """As CUDA_VISIBLE_DEVICES names them."""
    if (given := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name for name in given.split(",") if name]
    try:
        return [str(number) for number, _ in enumerate(os.listdir("/proc/driver/nvidia/gpus"))]
    except FileNotFoundError:
        return []
