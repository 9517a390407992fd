"""Shards: what is written is read, verified, and nothing that an index says is believed."""

from __future__ import annotations

import hashlib
import itertools
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import states
from holdfast.checkpoint import assembly, catalogue, chunks, format, shards
from holdfast.checkpoint.catalogue import Found
from holdfast.checkpoint.errors import CheckpointError, Damaged
from holdfast.checkpoint.folder import Folder
from holdfast.checkpoint.format import Piece, Snapshot
from holdfast.checkpoint.shards import Opened


@pytest.fixture
def folder() -> Iterator[Folder]:
    with states.in_memory() as folder:
        yield folder


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> int:
    for module in (format, chunks, shards):
        monkeypatch.setattr(module, "CHUNK_BYTES", 64)
    return 64


def newest(folder: Folder) -> Found:
    return catalogue.find(folder).found[0]


# -- what is written is read ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_a_state_comes_back_bit_for_bit(folder: Folder, world_size: int, small_chunks: int) -> None:
    states.save(folder, 10, world_size)
    assert states.same(states.load(folder, newest(folder)), states.state(10))
    opened = shards.open_step(folder, newest(folder))
    assert msgspec.json.decode(opened.own(0)) == {"d": [["rng", {"l": [10, 0]}]]}
    assert bytes(opened.own(99)) == b"null"
    assert opened.covers("model/weight") and not opened.covers("model/nothing")


@pytest.mark.parametrize("seed", range(20))
def test_any_pieces_in_any_ranks(folder: Folder, small_chunks: int, seed: int) -> None:
    """Tensors of random shapes, cut into random grids, dealt to random ranks."""
    dice = random.Random(seed)
    world_size = dice.randrange(1, 6)
    tensors = {f"t{number}": _random_tensor(dice) for number in range(dice.randrange(1, 12))}
    parts: list[list[tuple[Piece, bytes]]] = [[] for _ in range(world_size)]
    for key, tensor in tensors.items():
        for piece, content in _grid(key, tensor, dice):
            dice.choice(parts).append((piece, content))
    for rank, some in enumerate(parts):
        shards.write(folder, *_dealt(some, rank, world_size, dice))
    states.commits_all(folder, 10, world_size)
    opened = shards.open_step(folder, newest(folder))
    found = assembly.of_step(opened)
    assert found.keys() == tensors.keys()
    assert all(states.same(found[key], tensors[key]) for key in tensors)
    few = set(dice.sample(sorted(tensors), dice.randrange(len(tensors))))
    assert assembly.of_step(opened, few).keys() == few


def _random_tensor(dice: random.Random) -> torch.Tensor:
    shape = [dice.choice([0, 1, 2, 3, 5, 9]) for _ in range(dice.randrange(4))]
    kind = dice.choice([torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.complex64, torch.bool])
    return torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(dice.randrange(1000))).to(kind)


def _grid(key: str, tensor: torch.Tensor, dice: random.Random) -> list[tuple[Piece, bytes]]:
    boxes: list[tuple[tuple[int, ...], torch.Tensor]] = [((), tensor)]
    for dim, size in enumerate(tensor.shape):
        cuts = sorted({0, size, *(dice.randrange(size + 1) for _ in range(dice.randrange(3)))})
        spans = list(itertools.pairwise(cuts)) or [(0, 0)]
        boxes = [
            ((*offsets, begin), box.narrow(dim, begin, end - begin)) for offsets, box in boxes for begin, end in spans
        ]
    dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
    return [
        (
            Piece(key, dtype, shape, offsets, tuple(box.shape), 0),
            box.contiguous().view(-1).view(torch.uint8).numpy().tobytes(),
        )
        for offsets, box in boxes
    ]


def _dealt(
    parts: list[tuple[Piece, bytes]], rank: int, world_size: int, dice: random.Random
) -> tuple[Snapshot, memoryview]:
    made, _ = states.snapshot(10, rank, world_size, values={})
    pieces, data = [], bytearray()
    for piece, content in parts:
        data += bytes(dice.choice([0, 0, 1, 7, 100]))  # pieces may lie apart
        pieces.append(msgspec.structs.replace(piece, at=len(data)))
        data += content
    made = msgspec.structs.replace(made, pieces=tuple(pieces), written=len(pieces), written_bytes=len(data))
    return made, memoryview(data)


@pytest.mark.parametrize("seed", range(10))
def test_each_chunk_that_is_wanted_is_read_once_and_in_order(folder: Folder, small_chunks: int, seed: int) -> None:
    dice = random.Random(seed)
    size = dice.randrange(1, 2000)
    content = dice.randbytes(size)
    opened = _of_bytes(folder, content)
    edges = [sorted((dice.randrange(size + 1), dice.randrange(size + 1))) for _ in range(dice.randrange(6))]
    wanted = [(begin, end) for begin, end in edges]
    got = [(at, bytes(chunk)) for at, chunk in opened.chunks(0, wanted)]
    assert [at for at, _ in got] == sorted({at for at, _ in got})
    assert all(content[at : at + len(chunk)] == chunk for at, chunk in got)
    covered = {at + offset for at, chunk in got for offset in range(len(chunk))}
    needed = {byte for begin, end in wanted for byte in range(begin, end)}
    assert needed <= covered
    assert all(any(at <= byte < at + len(chunk) for byte in needed) for at, chunk in got)


def _of_bytes(folder: Folder, content: bytes) -> Opened:
    size = len(content)
    piece = Piece("x", "uint8", (size,), (0,), (size,), 0)
    made, _ = states.snapshot(10, values={})
    made = msgspec.structs.replace(made, pieces=(piece,), written=1, written_bytes=size)
    shards.write(folder, made, memoryview(content))
    states.commits_all(folder, 10, 1)
    return shards.open_step(folder, newest(folder))


def test_no_thread_is_left_when_reading_stops_early(folder: Folder, small_chunks: int) -> None:
    import threading

    opened = _of_bytes(folder, bytes(5000))
    before = threading.active_count()
    reading = opened.chunks(0, [(0, 5000)])
    next(reading)
    assert threading.active_count() > before
    reading.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before


def test_a_range_outside_is_refused(folder: Folder) -> None:
    opened = _of_bytes(folder, bytes(100))
    for wanted in ((-1, 5), (0, 101), (7, 3)):
        with pytest.raises(ValueError, match="are asked for"):
            list(opened.chunks(0, [wanted]))


def test_only_what_this_rank_writes_is_in_its_shard(folder: Folder) -> None:
    made, data = states.snapshot(10)
    first = made.pieces[0]
    made = msgspec.structs.replace(made, written=1, written_bytes=first.size_bytes)
    shard = shards.write(folder, made, data)
    assert shard.pieces == (first,) and shard.size_bytes == first.size_bytes
    assert folder.size("step_00000010/t000001.00000.bin") == first.size_bytes


def test_what_is_there_is_not_written_again(folder: Folder) -> None:
    made, data = states.snapshot(10)
    first = shards.write(folder, made, data)
    path = Path(folder.url) / "step_00000010/t000001.00000.bin"
    before = path.stat()
    assert shards.write(folder, made, data) == first
    assert path.stat().st_mtime_ns == before.st_mtime_ns and path.stat().st_ino == before.st_ino
    other, data = states.snapshot(10, values={"model": {"another": torch.zeros(3)}})
    with pytest.raises(CheckpointError, match="is there already, with another state"):
        shards.write(folder, other, data)


def test_metrics_that_are_no_numbers_do_not_spoil_the_checkpoint(folder: Folder) -> None:
    states.save(folder, 10, metrics={"loss": float("nan"), "top": float("inf"), "good": 0.5})
    assert newest(folder).metrics == {"good": 0.5}
    assert states.same(states.load(folder, newest(folder)), states.state(10))


# -- what an index says -----------------------------------------------------------------------------------------------


def forge(folder: Folder, change: Callable[[dict[str, Any]], None], which: str = "shard") -> None:
    """Change an index or a manifest, with all checksums right."""
    root = Path(folder.url) / "step_00000010"
    index, manifest = root / "t000001.00000.json", root / "t000001.manifest.json"
    body = msgspec.json.decode((index if which == "shard" else manifest).read_bytes().split(b"\n")[0])
    change(body)
    if which == "shard":
        index.write_bytes(sealed(body))
        body = msgspec.json.decode(manifest.read_bytes().split(b"\n")[0])
        body["shards"][0]["index_sha256"] = hashlib.sha256(index.read_bytes()).hexdigest()
    manifest.write_bytes(sealed(body))


def sealed(body: Any) -> bytes:
    text = body if isinstance(body, bytes) else msgspec.json.encode(body)
    return text + b"\n" + hashlib.sha256(text).hexdigest().encode() + b"\n"


def piece(number: int, **changes: Any) -> Callable[[dict[str, Any]], None]:
    fields = Piece.__struct_fields__

    def change(body: dict[str, Any]) -> None:
        for name, value in changes.items():
            body["pieces"][number][fields.index(name)] = value

    return change


def set_to(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda body: body.update(changes)


SHARD_TRICKS: dict[str, Callable[[dict[str, Any]], None]] = {
    "another rank": set_to(rank=1),
    "another step": set_to(step=11),
    "another term": set_to(term=2),
    "a larger file": set_to(size_bytes=10**9),
    "a negative file": set_to(size_bytes=-1),
    "huge chunks": set_to(chunk_bytes=1 << 60),
    "no chunks": set_to(chunk_bytes=0),
    "negative chunks": set_to(chunk_bytes=-8),
    "too few hashes": set_to(hashes=[]),
    "wrong hashes": set_to(hashes=["0" * 32]),
    "hashes that are numbers": set_to(hashes=[1]),
    "pieces that are none": set_to(pieces=[1]),
    "behind the end": piece(0, at=10**6),
    "before the beginning": piece(0, at=-8),
    "at a huge place": piece(0, at=1 << 62),
    "at no integer": piece(0, at=10**30),
    "over the one before": piece(1, at=0),
    "a box that is too large": piece(0, sizes=[8, 4]),
    "a box outside": piece(0, offsets=[1, 0]),
    "a negative box": piece(0, sizes=[-7, -4]),
    "a negative place": piece(0, offsets=[-1, 0]),
    "a shape of other dimensions": piece(0, shape=[28]),
    "a huge shape": piece(0, shape=[1 << 61, 4], sizes=[1 << 61, 4]),
    "too many dimensions": piece(0, shape=[1] * 99, offsets=[0] * 99, sizes=[1] * 99),
    "an unknown type": piece(0, dtype="object"),
    "a path as a type": piece(0, dtype="../../etc/passwd"),
    "the same twice": lambda body: body["pieces"].append(body["pieces"][0]),
    "no values": set_to(common=None),
}


@pytest.mark.parametrize("trick", SHARD_TRICKS)
def test_an_index_with_tricks_is_damage(folder: Folder, trick: str) -> None:
    states.save(folder, 10, 1)
    forge(folder, SHARD_TRICKS[trick])
    with pytest.raises(Damaged):
        states.load(folder, newest(folder))


MANIFEST_TRICKS: dict[str, Callable[[dict[str, Any]], None]] = {
    "another step": set_to(step=11),
    "another term": set_to(term=2),
    "no ranks": set_to(shards=[]),
    "no world": set_to(world_size=0),
    "a huge world": set_to(world_size=1 << 60),
    "a rank twice": lambda body: body["shards"].append(body["shards"][0]),
    "a rank outside": lambda body: body["shards"][0].update(rank=5),
    "a negative rank": lambda body: body["shards"][0].update(rank=-1),
    "a path as a rank": lambda body: body["shards"][0].update(rank="../../x"),
    "a negative size": lambda body: body["shards"][0].update(size_bytes=-5),
    "a huge size": lambda body: body["shards"][0].update(size_bytes=1 << 62),
    "a negative epoch": set_to(epoch=-1),
    "text as metrics": set_to(metrics={"loss": "low"}),
    "nothing": lambda body: body.clear(),
    "a list": set_to(shards={"0": 1}),
}


@pytest.mark.parametrize("trick", MANIFEST_TRICKS)
def test_a_manifest_with_tricks_is_broken(folder: Folder, trick: str) -> None:
    states.save(folder, 10, 1)
    found = newest(folder)
    forge(folder, MANIFEST_TRICKS[trick], "manifest")
    there = catalogue.find(folder)
    assert there.found == () and [name for name, _ in there.broken] == ["step_00000010"]
    with pytest.raises(Damaged):
        shards.open_step(folder, found)


@pytest.mark.parametrize(
    "content",
    [b"", b"\n", b"\0" * 5_000_000, b"[" * 200_000, sealed(b"[" * 200_000), sealed(b'{"step":' * 100_000),
     sealed(b'"\xff\xfe"'), sealed(b"null"), sealed(b"1e999999"), sealed(b'{"step": 1' + b"0" * 100_000 + b"}")],
    ids=["empty", "a line", "zeros", "deep", "deep and sealed", "deep objects", "no text", "null", "a float", "digits"],
)  # fmt: skip
@pytest.mark.parametrize("name", ["t000001.manifest.json", "t000001.00000.json"])
def test_garbage_is_damage_and_never_a_crash(folder: Folder, name: str, content: bytes) -> None:
    states.save(folder, 10, 1)
    found = newest(folder)
    (Path(folder.url) / "step_00000010" / name).write_bytes(content)
    catalogue.find(folder)
    with pytest.raises(Damaged):
        shards.open_step(folder, found)


@pytest.mark.parametrize("which", ["own", "common"])
def test_values_that_are_nested_too_deeply_are_damage(folder: Folder, which: str) -> None:
    states.save(folder, 10, 1)
    root = Path(folder.url) / "step_00000010"
    text = (root / "t000001.00000.json").read_bytes().split(b"\n")[0]
    body = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    body[which] = msgspec.Raw(b"[" * 100_000 + b"]" * 100_000)
    (root / "t000001.00000.json").write_bytes(sealed(msgspec.json.encode(body)))
    manifest = msgspec.json.decode((root / "t000001.manifest.json").read_bytes().split(b"\n")[0])
    manifest["shards"][0]["index_sha256"] = hashlib.sha256((root / "t000001.00000.json").read_bytes()).hexdigest()
    (root / "t000001.manifest.json").write_bytes(sealed(manifest))
    with pytest.raises(Damaged):
        shards.open_step(folder, newest(folder))


def test_another_versions_is_not_damage(folder: Folder) -> None:
    states.save(folder, 10, 1)
    found = newest(folder)
    forge(folder, set_to(version=2), "manifest")
    there = catalogue.find(folder)
    assert there.found == () and there.broken == () and "version 2" in there.notes[0]
    with pytest.raises(CheckpointError, match="version 2") as caught:
        shards.open_step(folder, found)
    assert not isinstance(caught.value, Damaged)


def test_pieces_of_several_ranks_must_agree(folder: Folder) -> None:
    states.save(folder, 10, 2)
    found = newest(folder)
    forge(folder, piece(0, offsets=[1, 0]))  # rank 0's rows reach into rank 1's
    with pytest.raises(Damaged, match=r"pieces of 'model/weight' overlap"):
        shards.open_step(folder, found)
    forge(folder, piece(0, offsets=[0, 0], dtype="int32"))
    with pytest.raises(Damaged, match=r"ranks disagree about the shape of 'model/weight'"):
        shards.open_step(folder, found)


def test_a_part_of_a_tensor_is_known_to_be_one(folder: Folder) -> None:
    states.save(folder, 10, 2, ranks=(0,))
    opened = shards.open_step(folder, newest(folder))
    assert opened.covers("model/bias") and not opened.covers("model/weight")
    with pytest.raises(CheckpointError, match="only part of it is here"):
        assembly.of_step(opened)


def test_a_shard_behind_a_link_is_not_followed(folder: Folder, tmp_path: Path) -> None:
    states.save(folder, 10, 1)
    found = newest(folder)
    path = Path(folder.url) / "step_00000010/t000001.00000.bin"
    shutil.move(path, tmp_path / "elsewhere.bin")
    path.symlink_to(tmp_path / "elsewhere.bin")
    assert catalogue.find(folder).broken == (("step_00000010", "step_00000010/t000001.00000.bin is missing"),)
    with pytest.raises(CheckpointError):
        states.load(folder, found)
