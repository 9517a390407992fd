"""One checkpoint as one file that others read: `.pt` with the keys of tutorials, or `.safetensors` of the model."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from holdfast.checkpoint import assembly, epochs, shards, torchfiles
from holdfast.checkpoint.catalogue import Found
from holdfast.checkpoint.errors import CheckpointError
from holdfast.checkpoint.folder import Folder
from holdfast.checkpoint.storage import Storage

if TYPE_CHECKING:
    import torch

ENDINGS = (".pt", ".safetensors")

TYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "uint16": "U16", "uint32": "U32", "uint64": "U64", "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0", "complex64": "C64",
}  # fmt: skip


def export(storage: Storage, found: Found, target: str) -> int:
    """Returns the file's size. Nothing is replaced. Raises Damaged if the checkpoint is, and CheckpointError."""
    folder, name = os.path.split(os.path.abspath(target))
    if not name.endswith(ENDINGS):
        raise CheckpointError(f"{target}: a name that ends in {' or '.join(ENDINGS)} is meant")
    if not os.path.isdir(folder):
        raise CheckpointError(f"{target}: there is no directory {folder}")
    if os.path.lexists(target):
        raise CheckpointError(f"{target} is there already; nothing is overwritten")
    content = _content(storage, found)
    parts = torchfiles.saved(content) if name.endswith(".pt") else _safetensors(_model(content), found)
    if not Folder(folder).publish(name, parts):
        raise CheckpointError(f"{target} is there already; nothing is overwritten")
    return os.path.getsize(target)


def _content(storage: Storage, found: Found) -> dict[str, Any]:
    if found.kind == "step":
        opened = shards.open_step(storage, found)
        own = {rank: opened.own(rank) for rank in opened.shards}
        return epochs.content(opened.manifest, opened.common, own, assembly.of_step(opened))
    return epochs.form(epochs.open_epoch(storage, found))


def _model(content: dict[str, Any]) -> dict[str, torch.Tensor]:
    import torch

    found: dict[str, torch.Tensor] = {}

    def walk(value: Any, path: str) -> None:
        if isinstance(value, torch.Tensor):
            found[path] = value
        elif isinstance(value, dict):
            for key, item in value.items():
                walk(item, f"{path}.{key}" if path else str(key))

    walk(content.get("model_state_dict", {}), "")
    if not found:
        raise CheckpointError("there is no model in it; export it as .pt")
    return found


def _safetensors(tensors: dict[str, torch.Tensor], found: Found) -> Iterator[memoryview | bytes]:
    """Eight bytes of length, a header in JSON, then the bytes of each: the format is that small."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "epoch": str(found.epoch), "step": str(found.step)}}
    at = 0
    for name, tensor in tensors.items():
        kind = TYPES.get(str(tensor.dtype).removeprefix("torch."))
        if kind is None:
            raise CheckpointError(f"{name}: safetensors has no {tensor.dtype}; export it as .pt")
        size = tensor.numel() * tensor.element_size()
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for tensor in tensors.values():
        yield from assembly.raw(tensor)
