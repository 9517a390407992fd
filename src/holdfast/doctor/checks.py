"""The checks: what each looks at, for how long at most, and what it cannot do without."""

from __future__ import annotations

import msgspec

_KERNEL = "the machine is overloaded, or its kernel hangs; see dmesg"
_DISK = "the disk or the file server does not answer; see dmesg, and mount it again"
_GPU = "the GPU or its driver does not answer; see nvidia-smi and dmesg, reset it, or give more time with --limit"


class Check(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    what: str  # it looks at
    run: str  # module:function, which is imported in the check's own process alone
    limit_s: float = 10.0  # then its process is ended
    if_hung: str = _KERNEL  # what to do after that
    needs: str = ""  # a check that must not have failed
    gpus: bool = False  # only where torch has found some
    lane: str = ""  # those of one lane run one after the other: they would measure each other
    before_world: bool = False  # what a node must pass before its first world


# To import torch takes a second from a warm disk, and most of a minute from a file server that 500 nodes read at once.
TORCH_S = 60.0

CHECKS = (
    Check(
        name="limits",
        what="how many files a process may open, how much memory it may lock",
        run="holdfast.doctor.machine:limits",
        before_world=True,
    ),
    Check(
        name="shm",
        what="/dev/shm: its size, and whether it takes what is written there",
        run="holdfast.doctor.machine:shm",
        before_world=True,
    ),
    Check(
        name="names",
        what="this machine's own name, which gloo and others look up",
        run="holdfast.doctor.machine:names",
        if_hung="its DNS server does not answer; see /etc/resolv.conf, or put the name into /etc/hosts",
        before_world=True,
    ),
    Check(
        name="ports",
        what="the ports at which nodes meet: 29400 and 29500, or those given with --port",
        run="holdfast.doctor.machine:ports",
    ),
    Check(
        name="clock",
        what="the rate of this machine's clocks, and what it costs to read them",
        run="holdfast.doctor.clocks:clock",
        before_world=True,
    ),
    Check(
        name="disk",
        what="speed and free space where run directories go",
        run="holdfast.doctor.disks:disk",
        limit_s=30,
        if_hung=_DISK,
        lane="disk",
        before_world=True,
    ),
    Check(
        name="checkpoint",
        what="the checkpoint target: conditional put, rename, write, read back, speed, free space",
        run="holdfast.doctor.disks:checkpoint",
        limit_s=60,
        if_hung="the store, the disk or the file server does not answer; see the way there, and dmesg",
        lane="disk",
        before_world=True,
    ),
    Check(
        name="torch",
        what="torch, its CUDA, and whether the two see the GPUs that are there",
        run="holdfast.doctor.devices:torch_here",
        limit_s=TORCH_S,
        if_hung="torch is on a disk that does not answer, or a GPU's driver hangs; see dmesg, or raise --limit",
        before_world=True,
    ),
    Check(
        name="gpu",
        what="each GPU's free memory, and what its driver has to say of it",
        run="holdfast.doctor.devices:gpu",
        limit_s=TORCH_S,
        if_hung=_GPU,
        needs="torch",
        gpus=True,
        lane="device",
        before_world=True,
    ),
    Check(
        name="matmul",
        what="products of matrices on each GPU, or on the CPU where there is none, right to the last bit",
        run="holdfast.doctor.devices:matmul",
        limit_s=TORCH_S,
        if_hung=_GPU,
        needs="torch",
        lane="device",
        before_world=True,
    ),
    Check(
        name="collective",
        what="an all-reduce between two ranks on this machine, with gloo",
        run="holdfast.doctor.ranks:collective",
        limit_s=TORCH_S,
        if_hung="the ranks do not reach each other; see ip addr, the firewall, and GLOO_SOCKET_IFNAME",
        needs="torch",
        before_world=True,
    ),
    Check(
        name="nccl",
        what="an all-reduce between one rank for each GPU, with NCCL",
        run="holdfast.doctor.ranks:nccl",
        limit_s=TORCH_S + 30,
        if_hung="run it with NCCL_DEBUG=INFO; NCCL_P2P_DISABLE=1 and NCCL_SHM_DISABLE=1 show which way is broken",
        needs="torch",
        gpus=True,
        lane="device",
        before_world=True,
    ),
    Check(
        name="peer",
        what="the way to another node and back: names, ports, clocks, versions",
        run="holdfast.doctor.between:peer",
        limit_s=30,
        if_hung="its name cannot be looked up, or the way there swallows what is sent; see DNS and the firewall",
    ),
)
NAMES = tuple(check.name for check in CHECKS)
