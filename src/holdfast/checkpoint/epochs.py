"""Epochs as `checkpoint_epoch_N.pt`, which plain `torch.load` opens, and other people's files of that kind."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast import _version
from holdfast.checkpoint import catalogue, chunks, commits, faultpoints, sealed, shards, sidecars, torchfiles
from holdfast.checkpoint.chunks import Stream
from holdfast.checkpoint.errors import CheckpointError, Damaged
from holdfast.checkpoint.format import CHUNK_BYTES, EPOCH_FILE, VERSION, Manifest, Snapshot, seal
from holdfast.checkpoint.sidecars import Sidecar
from holdfast.checkpoint.storage import Storage

if TYPE_CHECKING:
    from holdfast.checkpoint.catalogue import Found

POINTS = (
    "epoch.before", "epoch.after", "sidecar.before", "sidecar.after", "set_aside.before", "set_aside.after",
    "epoch_scrub.before", "epoch_scrub.after",
)  # fmt: skip

_ARRAY = "holdfast.numpy"  # torch.load opens no numpy arrays by itself, so one is kept as a tensor under this key


class Loaded(msgspec.Struct):
    """What a `.pt` holds, whoever wrote it."""

    step: int | None
    epoch: int | None
    metrics: dict[str, float]
    state: dict[str, Any]  # by name: model, optimizer, ...
    own: dict[int, Any]  # what each rank had of its own
    world_size: int | None = None


# -- writing ----------------------------------------------------------------------------------------------------------


def make_room(storage: Storage, snapshot: Snapshot) -> str | None:
    """What is in the way of the file is set aside if training has left it behind or it is damaged; returns what to say
    of that. None if this very epoch is there already. Raises CheckpointError if another good one is."""
    epoch = _epoch(snapshot)
    while True:
        if snapshot.file not in storage.names():
            return ""  # nothing was, or another rank has been faster
        there = catalogue.find(storage)
        found = next((one for one in there.found if one.name == snapshot.file), None)
        broken = dict(there.broken)
        if snapshot.file in there.unread:
            raise CheckpointError(f"{snapshot.file} is there already; {'; '.join(there.notes)}")
        if found is not None or snapshot.file in broken:
            break  # else it was gone when it was looked at: another rank has set it aside, and may have written its own
    if found is None:
        why = broken[snapshot.file]
    elif (found.term, found.step) == (snapshot.term, snapshot.step):
        return None
    elif found.foreign:
        # Somebody else's, of an epoch that training has now done again.
        why = "it was not of this training"
    elif found.superseded:
        why = "training has gone on from before it"
    elif not (wrong := chunks.damages(storage, sidecars.read(storage, epoch, found.term or 0).hashed())):
        if found.step == snapshot.step:
            return None  # of an earlier start, which this one has gone on from
        raise CheckpointError(f"{snapshot.file} is there already, of step {found.step}; nothing is ever overwritten")
    else:
        why = wrong[0]
    faultpoints.passed("set_aside.before")
    try:
        put = storage.set_aside(snapshot.file)
    except FileNotFoundError:
        return ""  # another rank was faster
    faultpoints.passed("set_aside.after")
    return f"{snapshot.file} was in the way ({why}) and is {put} now"


def _epoch(snapshot: Snapshot) -> int:
    match = EPOCH_FILE.fullmatch(snapshot.file)
    if match is None or snapshot.epoch != int(match[1]):
        raise CheckpointError(f"{snapshot.file!r} is not the name of epoch {snapshot.epoch}")
    return int(match[1])


Content = Callable[[], dict[str, Any]]


def of_memory(snapshot: Snapshot, data: memoryview) -> Content:
    """The content of the file, of a process that was alone."""

    def make() -> dict[str, Any]:
        from holdfast.checkpoint import assembly

        return _content(snapshot, snapshot.common, {snapshot.rank: snapshot.own}, assembly.of_memory(snapshot, data))

    return make


def of_step(storage: Storage, snapshot: Snapshot, manifest: Manifest) -> Content:
    """The content of the file, of the committed shards of all ranks. It needs memory for the whole state."""

    def make() -> dict[str, Any]:
        from holdfast.checkpoint import assembly

        opened = shards.open_manifest(storage, manifest)
        own = {rank: opened.own(rank) for rank in opened.shards}
        return _content(snapshot, opened.common, own, assembly.of_step(opened))

    return make


def content(
    manifest: Manifest, common: msgspec.Raw, own: dict[int, msgspec.Raw], tensors: dict[str, Any]
) -> dict[str, Any]:
    """What is in a `.pt`: the keys that tutorials have, and the rest under `holdfast`."""
    from holdfast.checkpoint import tree

    try:
        nodes = msgspec.json.decode(common)["state"]
        state = {name: tree.unflatten(node, tensors) for name, node in nodes.items()}
        owned = {rank: _marked(tree.unflatten(msgspec.json.decode(value), tensors)) for rank, value in own.items()}
    except (msgspec.MsgspecError, RecursionError, TypeError, KeyError, AttributeError) as failure:
        raise Damaged(f"step {manifest.step}: its values cannot be read: {failure}") from None
    made: dict[str, Any] = {"epoch": manifest.epoch}
    for name in ("model", "optimizer"):
        if name in state:
            made[f"{name}_state_dict"] = _plain(state.pop(name))
    made["loss"] = manifest.metrics.get("loss")
    made["holdfast"] = {
        "step": manifest.step,
        "term": manifest.term,
        "generation": manifest.generation,
        "world_size": manifest.world_size,
        "metrics": dict(manifest.metrics),
        "state": {name: _marked(value) for name, value in state.items()},
        "own": owned,
    }
    return made


def _content(
    snapshot: Snapshot, common: msgspec.Raw, own: dict[int, msgspec.Raw], tensors: dict[str, Any]
) -> dict[str, Any]:
    about = Manifest(
        VERSION, snapshot.step, snapshot.epoch, snapshot.term, snapshot.generation, snapshot.world_size,
        snapshot.metrics, (), "", "",
    )  # fmt: skip
    return content(about, common, own, tensors)


def write(storage: Storage, snapshot: Snapshot, make: Content) -> int:
    """The sidecar is there before the file is, and the file at once and whole. Returns its size. Raises Fenced."""
    epoch = _epoch(snapshot)
    sidecar = sidecars.name(epoch, snapshot.term)
    storage.delete(sidecar)  # of an attempt that did not get as far as the file
    stream = Stream()
    faultpoints.passed("epoch.before")
    try:
        published = storage.publish(snapshot.file, _parts(storage, snapshot, epoch, make(), stream))
    except BaseException:
        with contextlib.suppress(CheckpointError):
            storage.delete(sidecar)
        raise
    faultpoints.passed("epoch.after")
    if not published:
        storage.delete(sidecar)
        raise CheckpointError(f"{snapshot.file} is there already, written by somebody else")
    return stream.size_bytes


def _parts(
    storage: Storage, snapshot: Snapshot, epoch: int, value: dict[str, Any], stream: Stream
) -> Iterator[memoryview | bytes]:
    first, last = b"", b""
    for part in torchfiles.saved(value):
        stream.add(part)
        size = len(part)
        if len(first) < sidecars.END_BYTES:
            first += bytes(part[: sidecars.END_BYTES - len(first)])
        last = (last + bytes(part[max(0, size - sidecars.END_BYTES) :]))[-sidecars.END_BYTES :]
        yield part
    stream.finish()
    # All bytes are on their way, and the file gets its name when this returns.
    commits.check_fence(storage, snapshot.term, snapshot.step)
    about = Sidecar(
        version=VERSION, epoch=epoch, step=snapshot.step, term=snapshot.term, generation=snapshot.generation,
        world_size=snapshot.world_size, metrics=sealed.finite(snapshot.metrics), size_bytes=stream.size_bytes,
        chunk_bytes=CHUNK_BYTES, hashes=tuple(stream.hashes), ends=sidecars.hash_ends(first, last),
        created=sealed.now(), holdfast=_version.__version__,
    )  # fmt: skip
    faultpoints.passed("sidecar.before")
    if not storage.create(sidecars.name(epoch, snapshot.term), seal(about)):
        raise CheckpointError(f"somebody else writes {snapshot.file} in term {snapshot.term}")
    faultpoints.passed("sidecar.after")


def scrub(storage: Storage, snapshot: Snapshot) -> None:
    """Read the file back and say so. Raises Damaged."""
    epoch = _epoch(snapshot)
    faultpoints.passed("epoch_scrub.before")
    file = sidecars.read(storage, epoch, snapshot.term).hashed()
    file.check_size(storage)
    for _ in chunks.verified(storage, file):
        pass
    storage.create(sidecars.mark_name(epoch, snapshot.term), b"every byte was read back\n")
    faultpoints.passed("epoch_scrub.after")


def is_verified(storage: Storage, snapshot: Snapshot) -> bool:
    mark = sidecars.mark_name(_epoch(snapshot), snapshot.term)
    return mark.rpartition("/")[2] in storage.names(sidecars.FOLDER)


# -- numpy arrays, which torch.load does not take ----------------------------------------------------------------------


def _marked(value: Any) -> Any:
    return _mapped(value, lambda array: {_ARRAY: array})


def _plain(value: Any) -> Any:
    return _mapped(value, lambda array: array)


def _mapped(value: Any, convert: Callable[[Any], Any]) -> Any:
    """With arrays replaced, everything else as it is."""
    import torch

    if type(value).__module__ == "numpy":
        return convert(torch.from_numpy(value))
    if isinstance(value, dict):
        for key, item in value.items():
            value[key] = _mapped(item, convert)
        return value
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(_mapped(item, convert) for item in value)
    return value


def _unmarked(value: Any) -> Any:
    if isinstance(value, dict):
        if list(value) == [_ARRAY]:
            return value[_ARRAY].numpy()
        for key, item in value.items():
            value[key] = _unmarked(item)
        return value
    if type(value) in (list, tuple):
        return type(value)(_unmarked(item) for item in value)
    return value


# -- reading ----------------------------------------------------------------------------------------------------------


def open_epoch(storage: Storage, found: Found) -> Loaded:
    """Raises Damaged; StorageError if it cannot be read, which says nothing about what is there."""
    known = None
    if not found.foreign:
        assert found.epoch is not None and found.term is not None
        try:
            known = sidecars.read(storage, found.epoch, found.term).hashed()
        except FileNotFoundError:
            raise Damaged(f"{sidecars.name(found.epoch, found.term)} is missing") from None
    return understand(torchfiles.load(storage, found.name, known), found.name)


def open_file(storage: Storage, name: str) -> Loaded:
    """A `.pt` of any name, of which nothing is known."""
    return understand(torchfiles.load(storage, name, None), name)


def understand(value: Any, name: str) -> Loaded:
    """Of our own files, those of tutorials (`model_state_dict`, ...), OSMO's (`MODEL_STATE`), or a model's state alone.
    Raises Damaged."""
    if not isinstance(value, dict) or not value:
        raise Damaged(f"{name}: it holds a {type(value).__name__}, and no state")
    if "MODEL_STATE" in value:
        return Loaded(None, _number(value.get("EPOCHS_RUN")), {}, {"model": value["MODEL_STATE"]}, {})
    ending = "_state_dict"
    state = {
        str(key).removesuffix(ending): item
        for key, item in value.items()
        if isinstance(key, str) and key.endswith(ending) and key != ending
    }
    if "holdfast" in value:
        return _ours(value, state, name)
    if not state:
        import torch

        if not all(isinstance(key, str) and isinstance(item, torch.Tensor) for key, item in value.items()):
            raise Damaged(f"{name}: it holds no model_state_dict, no MODEL_STATE and is no model's state")
        return Loaded(None, None, {}, {"model": value}, {})
    loss = value.get("loss")
    metrics = {"loss": float(loss)} if isinstance(loss, int | float) else {}
    return Loaded(_number(value.get("step")), _number(value.get("epoch")), metrics, state, {})


def form(loaded: Loaded) -> dict[str, Any]:
    """The reverse, for any file that was understood."""
    state = dict(loaded.state)
    made: dict[str, Any] = {"epoch": loaded.epoch}
    for name in ("model", "optimizer"):
        if name in state:
            made[f"{name}_state_dict"] = state.pop(name)
    made["loss"] = loaded.metrics.get("loss")
    made["holdfast"] = {
        "step": loaded.step,
        "term": None,
        "generation": None,
        "world_size": loaded.world_size,
        "metrics": dict(loaded.metrics),
        "state": {name: _marked(value) for name, value in state.items()},
        "own": {rank: _marked(value) for rank, value in loaded.own.items()},
    }
    return made


def _ours(value: dict[Any, Any], state: dict[str, Any], name: str) -> Loaded:
    try:
        about = value["holdfast"]
        state |= {str(key): _unmarked(item) for key, item in about["state"].items()}
        own = {int(rank): _unmarked(item) for rank, item in about["own"].items()}
        metrics = {str(key): float(item) for key, item in about["metrics"].items()}
        return Loaded(
            _number(about["step"]), _number(value.get("epoch")), metrics, state, own, _number(about["world_size"])
        )
    except (AttributeError, KeyError, TypeError, ValueError) as failure:
        raise Damaged(f"{name}: what it says of itself makes no sense: {failure!r}") from None


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
