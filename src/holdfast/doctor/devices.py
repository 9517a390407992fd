"""Checks of torch and of what it computes with."""

from __future__ import annotations

import glob
import os
import shutil
import statistics
import subprocess
import time
import warnings
from typing import TYPE_CHECKING

from holdfast.doctor.finding import Asked, Finding, combine, fail, first_line, ok, plural, size, skipped, warn
from holdfast.wire.symptoms import is_hardware

if TYPE_CHECKING:
    import torch

OLDEST_TORCH = (2, 6)
LITTLE_FREE, MOST_FREE = 0.1, 0.8  # of a GPU's memory
SMI_S = 10.0
GPU_SIDE, CPU_SIDE = 2048, 512
MATMUL_S = 0.3
TIMED = 20

_DRIVERS = ("/dev/nvidia[0-9]*", "/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
_SMI = ("index", "ecc.errors.uncorrected.volatile.total", "clocks_throttle_reasons.hw_thermal_slowdown")
_BAD_DEVICE = "take this machine out of jobs: nvidia-smi and dmesg say more, a reset or a reboot may cure it"


def torch_here(asked: Asked) -> Finding:
    try:
        import torch
        import torch.distributed as dist
    except (ImportError, OSError) as failure:
        return fail(f"torch cannot be imported: {first_line(failure)}", "install it anew in this environment")
    version = str(torch.__version__)
    if _numbers(version) < OLDEST_TORCH:
        return fail(f"torch {version} is too old", f"install torch {'.'.join(map(str, OLDEST_TORCH))} or later")
    if not dist.is_available() or not dist.is_gloo_available():
        return fail(f"torch {version} was built without gloo", "install a build of it with torch.distributed")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        return _without_gpu(version, [str(warning.message) for warning in said])
    platform = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else ""  # type: ignore[no-untyped-call]
    text = f"torch {version}, {platform}, {f'NCCL {nccl}, ' if nccl else ''}{plural(count, 'GPU')}"
    if not nccl:
        return warn(f"{text}, but no NCCL", "install a build of torch with NCCL", torch=version, gpus=count)
    return ok(text, torch=version, platform=platform, nccl=nccl, gpus=count)


def _without_gpu(version: str, said: list[str]) -> Finding:
    import torch

    text = f"torch {version}"
    if not any(map(glob.glob, _DRIVERS)):
        return ok(f"{text}; no GPU here", torch=version, gpus=0)
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return ok(f"{text}; CUDA_VISIBLE_DEVICES hides the GPUs", torch=version, gpus=0)
    if torch.version.cuda is None and torch.version.hip is None:
        cure = "install a build of torch for it, or go on without"
        return warn(f"a GPU is here, and {text} is a build without", cure, torch=version, gpus=0)
    why = f": {said[0].splitlines()[0]}" if said else ""
    return fail(f"a GPU is here that {text} cannot use{why}", "see nvidia-smi; is the driver new enough for its CUDA?")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.partition("+")[0].split(".")[:2] if part.isdigit())


# -- each GPU ---------------------------------------------------------------------------------------------------------


def gpu(asked: Asked) -> Finding:
    import torch

    if not torch.cuda.is_available():
        return skipped("no GPU here")
    return combine([*(_memory(index) for index in range(torch.cuda.device_count())), *_complaints()])


def _memory(index: int) -> Finding:
    import torch

    try:
        free, total = torch.cuda.mem_get_info(index)
    except RuntimeError as failure:
        return fail(f"GPU {index}: {first_line(failure)}", _BAD_DEVICE)
    figures = {f"gpu_{index}_free_bytes": free, f"gpu_{index}_bytes": total}
    text = f"GPU {index}: {size(free)} of {size(total)} are free"
    cure = "nvidia-smi shows who holds the rest: perhaps what an ended job has left"
    if free < LITTLE_FREE * total:
        return fail(text, cure, **figures)
    return warn(text, cure, **figures) if free < MOST_FREE * total else ok(text, **figures)


def _complaints() -> list[Finding]:
    """What the driver has counted and logged. Where it may not be asked there is nothing to say."""
    found: list[Finding] = []
    for row in _ask_driver():
        index, errors, hot = row
        if errors.isdigit() and int(errors) > 0:
            text = f"GPU {index} has had {plural(int(errors), 'memory error')} that could not be corrected"
            found.append(warn(text, _BAD_DEVICE))
        if hot == "Active":
            found.append(warn(f"GPU {index} is slowed down by heat", "see its fans, and the machine's air"))
    if logged := [line for line in _kernel_log() if is_hardware(line)]:
        found.append(warn(f"the kernel has logged {plural(len(logged), 'fault')}, last: {logged[-1]}", _BAD_DEVICE))
    return found


def _ask_driver() -> list[list[str]]:
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", f"--query-gpu={','.join(_SMI)}", "--format=csv,noheader"]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=SMI_S)
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = [[field.strip() for field in line.split(",")] for line in ran.stdout.splitlines()]
    return [row for row in rows if len(row) == len(_SMI)] if ran.returncode == 0 else []


def _kernel_log() -> list[str]:
    lines: list[str] = []
    try:
        fd = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return []
    try:
        while record := os.read(fd, 8192):
            lines.append(record.decode(errors="replace").partition(";")[2].partition("\n")[0])
    except OSError:  # mostly: that was all
        pass
    finally:
        os.close(fd)
    return lines


# -- what it computes -------------------------------------------------------------------------------------------------


def matmul(asked: Asked) -> Finding:
    """Of matrices of -1, 0 and 1: every sum on the way is a whole number below 256, which even bfloat16 holds exactly.
    So there is one right result, whatever the order of the sums, and it is compared bit by bit."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    devices = [torch.device("cuda", index) for index in range(count)] or [torch.device("cpu")]
    side = GPU_SIDE if count else CPU_SIDE
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randint(-1, 2, (side, side), generator=generator) for _ in range(2))
    expected = torch.matmul(left.double(), right.double()).float()
    found = [_multiply(device, left, right, expected) for device in devices]
    return combine([*found, *_laggards(found)])


def _multiply(device: torch.device, left: torch.Tensor, right: torch.Tensor, expected: torch.Tensor) -> Finding:
    import torch

    name = f"GPU {device.index}" if device.type == "cuda" else "the CPU"
    try:
        wanted = expected.to(device)
        pairs = {kind: (left.to(device, kind), right.to(device, kind)) for kind in (torch.float32, torch.bfloat16)}
        until_s = time.monotonic() + MATMUL_S
        rounds = 0
        while rounds == 0 or time.monotonic() < until_s:
            for kind, pair in pairs.items():
                product = torch.matmul(*pair).float()
                if not torch.equal(product, wanted):
                    wrong = int((product != wanted).sum())
                    text = f"{name}: {wrong:,} of {wanted.numel():,} sums are wrong in a product of matrices ({kind})"
                    return fail(text, "take this machine out of jobs: it computes wrong results")
            rounds += 1
        if device.type == "cpu":
            return ok(f"{name} is right in {plural(rounds, 'round')}")
        rate = _rate(*pairs[torch.bfloat16])
    except RuntimeError as failure:
        return fail(f"{name}: {first_line(failure)}", _BAD_DEVICE)
    text = f"{name} is right in {plural(rounds, 'round')}, {rate / 1e12:,.0f} TFLOP/s"
    return ok(text, **{f"gpu_{device.index}_flops": round(rate)})


def _rate(left: torch.Tensor, right: torch.Tensor) -> float:
    """Operations a second; small matrices are not the fastest, but the same on every GPU."""
    import torch

    torch.cuda.synchronize(left.device)
    began_s = time.perf_counter()
    for _ in range(TIMED):
        torch.matmul(left, right)
    torch.cuda.synchronize(left.device)
    return TIMED * 2 * left.shape[0] ** 3 / (time.perf_counter() - began_s)


def _laggards(found: list[Finding]) -> list[Finding]:
    rates = {name: float(rate) for finding in found for name, rate in finding.figures.items()}
    if not rates:
        return []
    usual = statistics.median(rates.values())
    slow = [name.split("_")[1] for name, rate in rates.items() if rate < usual / 2]
    if not slow:
        return []
    text = f"GPU {', '.join(slow)}: less than half as fast as the others"
    return [warn(text, "it holds up all ranks; see nvidia-smi -q -d PERFORMANCE, heat, and who else uses it")]
