"""`holdfast checkpoint`: what is in a checkpoint directory, whether it is whole, and what becomes of it."""

from __future__ import annotations

import argparse
import datetime
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from holdfast.checkpoint import catalogue, export, keeping, shards, verify
from holdfast.checkpoint.catalogue import Catalogue, Found
from holdfast.checkpoint.errors import CheckpointError
from holdfast.checkpoint.format import Policy
from holdfast.checkpoint.storage import Storage, open_storage
from holdfast.cli.flags import open_parser

COLUMNS = ("name", "step", "epoch", "size", "age", "ranks", "metrics", "state")
MAX_METRICS = 40  # characters

Act = Callable[[Storage, Catalogue, argparse.Namespace], int]


def main(argv: Sequence[str]) -> int:
    args = make_parser().parse_args(list(argv))
    act: Act = args.act
    try:
        if "://" not in args.directory and not os.path.isdir(args.directory):
            raise CheckpointError(f"there is no directory {args.directory}")
        storage = open_storage(args.directory)
        return act(storage, catalogue.find(storage), args)
    except CheckpointError as failure:
        print(f"holdfast checkpoint: {failure}", file=sys.stderr)
        return 1


def make_parser() -> argparse.ArgumentParser:
    parser = open_parser("holdfast checkpoint", "See to what training has saved in a directory, or in an object store.")
    parser.epilog = f"WHICH is {catalogue.FORMS}."
    acts = parser.add_subparsers(required=True, metavar="ls|show|verify|export|pin|rm")
    listing = _add(acts, "ls", _ls, "list what is there, newest first")
    listing.add_argument("--json", action="store_true", help="for programs")
    showing = _add(acts, "show", _show, "show what is in one", which="?")
    showing.add_argument("--json", action="store_true", help="for programs")
    _add(acts, "verify", _verify, "read every byte of one, or of all; exits 1 on damage", which="all")
    exporting = _add(acts, "export", _export, "write one file of one: .pt, or .safetensors of its model", which="")
    exporting.add_argument("file", metavar="FILE", help="it must not exist")
    pinning = _add(acts, "pin", _pin, "keep one, whatever the rules of its training say", which="")
    pinning.add_argument("--undo", action="store_true", help="let the rules decide again")
    removing = _add(acts, "rm", _rm, "delete some", which="+")
    removing.add_argument("--force", action="store_true", help="also one that is pinned, or the newest that is sure")
    return parser


def _add(acts: Any, name: str, act: Act, what: str, which: str | None = None) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = acts.add_parser(name, help=what, description=what)
    parser.set_defaults(act=act)
    parser.add_argument("directory", metavar="DIR", help="a directory, or s3://, gs://, az://")
    if which is not None:
        counts: dict[str, Any] = {"?": {"nargs": "?", "default": "latest"}, "+": {"nargs": "+"}}
        counts["all"] = {"nargs": "?", "default": None}
        parser.add_argument("which", metavar="WHICH", help=f"{catalogue.FORMS}", **counts.get(which, {}))
        parser.add_argument("--metric", default="loss", metavar="NAME", help="what best means (default loss)")
        parser.add_argument("--mode", default="min", choices=["min", "max"], help="of it (default min)")
    return parser


def _one(there: Catalogue, which: str, args: argparse.Namespace) -> Found:
    candidates = catalogue.choose(which, there, Policy(metric=args.metric, mode=args.mode))
    if not candidates:
        raise CheckpointError(f"there is no checkpoint in {there.url}")
    return candidates[0]


# -- ls ---------------------------------------------------------------------------------------------------------------


def _ls(storage: Storage, there: Catalogue, args: argparse.Namespace) -> int:
    if args.json:
        print(msgspec.json.encode({"found": there.found, "broken": there.broken, "notes": there.notes}).decode())
        return 0
    now = datetime.datetime.now(datetime.UTC)
    rows = [_row(found, now) for found in there.found]
    rows += [(name, "", "", "", "", "", "", f"damaged: {why}") for name, why in there.broken]
    if rows:
        _print_table([COLUMNS, *rows])
    else:
        print(f"no checkpoints in {there.url}")
    for note in there.notes:
        print(note, file=sys.stderr)
    return 0


def _row(found: Found, now: datetime.datetime) -> tuple[str, ...]:
    words = ["verified"] if found.verified else ["not ours"] if found.foreign else ["not verified"]
    words += ["pinned"] * found.pinned + ["superseded"] * found.superseded
    return (
        found.name, _number(found.step), _number(found.epoch), size_text(found.size_bytes),
        _age(found.created, now), _number(found.world_size), _metrics(found.metrics), ", ".join(words),
    )  # fmt: skip


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        print("  ".join(cells).rstrip())


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)


def _metrics(metrics: dict[str, float]) -> str:
    text = " ".join(f"{name}={value:.4g}" for name, value in sorted(metrics.items()))
    return text if len(text) <= MAX_METRICS else f"{len(metrics)} metrics"


def size_text(size_bytes: int) -> str:
    value = float(size_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def _age(created: str, now: datetime.datetime) -> str:
    try:
        at = datetime.datetime.fromisoformat(created)
    except ValueError:
        return "-"
    seconds = (now - at if at.tzinfo else now.replace(tzinfo=None) - at).total_seconds()
    for limit, size, unit in ((120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{max(0, seconds) / size:.0f} {unit}"
    return f"{seconds / 86400:.0f} d"


# -- the others -------------------------------------------------------------------------------------------------------


def _show(storage: Storage, there: Catalogue, args: argparse.Namespace) -> int:
    found = _one(there, args.which, args)
    tensors: list[tuple[str, str, tuple[int, ...]]] = []
    if found.kind == "step":
        opened = shards.open_step(storage, found)
        tensors = sorted({(piece.key, piece.dtype, piece.shape) for _, piece in opened.pieces()})
    if args.json:
        print(msgspec.json.encode({"checkpoint": found, "tensors": tensors}).decode())
        return 0
    now = datetime.datetime.now(datetime.UTC)
    for name, cell in zip(COLUMNS, _row(found, now), strict=True):
        print(f"{name:8} {cell}")
    for metric, value in sorted(found.metrics.items()):
        print(f"{'metric':8} {metric} = {value:g}")
    for key, dtype, shape in tensors:
        print(f"{'tensor':8} {key}  {dtype}{list(shape)}")
    return 0


def _verify(storage: Storage, there: Catalogue, args: argparse.Namespace) -> int:
    wanted = list(there.found) if args.which is None else [_one(there, args.which, args)]
    wrong = 0
    for found in wanted:
        problems = verify.verify(storage, found)
        wrong += bool(problems)
        print(f"{found.name}: {'damaged' if problems else f'whole, {size_text(found.size_bytes)}'}")
        for problem in problems:
            print(f"  {problem}")
    if args.which is None:
        for name, why in there.broken:
            wrong += 1
            print(f"{name}: damaged\n  {why}")
        if not wanted and not there.broken:
            print(f"no checkpoints in {there.url}")
    return 1 if wrong else 0


def _export(storage: Storage, there: Catalogue, args: argparse.Namespace) -> int:
    found = _one(there, args.which, args)
    size = export.export(storage, found, args.file)
    print(f"{found.name} is in {args.file} ({size_text(size)})")
    return 0


def _pin(storage: Storage, there: Catalogue, args: argparse.Namespace) -> int:
    found = _one(there, args.which, args)
    if args.undo:
        keeping.unpin(storage, found)
    else:
        keeping.pin(storage, found)
    print(f"{found.name} is {'not pinned any more' if args.undo else 'pinned'}")
    return 0


def _rm(storage: Storage, there: Catalogue, args: argparse.Namespace) -> int:
    wanted = [_one(there, which, args) for which in args.which]
    sure = next((found for found in there.found if found.verified and not found.superseded), None)
    for found in wanted:
        if not args.force and (found.pinned or found == sure):
            why = "is pinned" if found.pinned else "is the newest that was verified"
            raise CheckpointError(f"{found.name} {why}; nothing was deleted (--force does it)")
    for found in wanted:
        keeping.remove(storage, found, there)
        keeping.unpin(storage, found)
        print(f"{found.name} is deleted")
    return 0
