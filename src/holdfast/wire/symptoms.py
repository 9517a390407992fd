"""What the text of an error says of its origin. Ranks ask of their exceptions, agents of what a rank said last."""

from __future__ import annotations

import re

# Torch raises plain RuntimeErrors for much of what its backends report.
_BACKEND = re.compile(r"gloo|nccl|c10d|ProcessGroup|TCPStore|Socket Timeout|Connection (closed|reset|refused)", re.I)
# The driver's own words for what is wrong with its GPU. An illegal access, a failed assertion on the device and an
# "unspecified launch failure" are not among them: those are mostly the program's.
_HARDWARE = re.compile(
    r"uncorrectable ECC error encountered"
    r"|uncorrectable NVLink error detected"
    r"|over nvlink or a hardware error"
    r"|hardware stack error"
    r"|CUDA-capable device\(s\) is/are busy or unavailable"
    r"|CUDA error: system not yet initialized"  # the switches between the GPUs are not up
    r"|fallen off the bus|GPU is lost|GPU requires reset"
    r"|HW Exception by GPU"
    # Memory that cannot be trusted, links, the bus, the GPU's own controller. Others are programs' faults.
    r"|\bXid \(PCI:[^)]*\): (48|63|64|74|79|92|94|95|119|120|140)\b",
    re.I,
)


def is_backend(text: str) -> bool:
    return _BACKEND.search(text) is not None


def is_hardware(text: str) -> bool:
    return _HARDWARE.search(text) is not None
