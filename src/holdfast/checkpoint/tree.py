"""State as a tree of plain values beside its tensors, and back.

A node is what JSON has (None, a boolean, a 64-bit integer, a finite float, a string), or an object with one tag that
says what is in it: `{"t": "model/layer.weight"}` is the tensor of that key. Nothing that a tree says is ever called
or imported, so one that somebody else made can at worst be refused.
"""

from __future__ import annotations

import base64
import binascii
import itertools
import math
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.checkpoint.errors import CheckpointError, Damaged

if TYPE_CHECKING:
    import torch

Node = Any  # what msgspec.json makes of one

MAX_DEPTH = 100  # far from the interpreter's own limit, on which a decoder and this module would break
_SMALLEST, _LARGEST = -(1 << 63), (1 << 63) - 1
_UNSAFE = re.compile("[/%]")
_ESCAPED = re.compile("%(2F|25)")


def flatten(value: Any, path: str, memory: Memory | None = None) -> tuple[Node, dict[str, torch.Tensor]]:
    """Tensors are referred to, not copied; numpy arrays are copied, since nothing tells when their owner changes them.
    Raises CheckpointError with the path of what cannot be saved."""
    walk = _Flatten(memory if memory is not None else Memory())
    return walk.node(value, path, 0), walk.tensors


class Memory:
    """What was flattened before: dicts that still have the same keys need not be looked at again. Nearly all of a state
    is such dicts, and this runs in the training loop."""

    def __init__(self) -> None:
        self._before: dict[str, _Seen] = {}
        self._now: dict[str, _Seen] = {}

    def turn(self) -> None:
        """What has not been met since the last turn is forgotten."""
        self._before, self._now = self._now, {}

    def seen(self, path: str, value: dict[Any, Any]) -> _Seen | None:
        """What is known of a dict at that place, if it has the same keys."""
        seen = self._before.get(path)
        if seen is None or seen.kind is not type(value) or seen.keys != tuple(value):
            return None
        if seen.key_types != list(map(type, value)):  # 1 and True are equal
            return None
        self._now[path] = seen
        return seen

    def note(self, path: str, seen: _Seen) -> None:
        self._now[path] = seen


class _Seen(NamedTuple):
    kind: type
    keys: tuple[Any, ...]
    key_types: list[type]
    names: list[tuple[Node, str]]  # of each key, its node and the path below it
    node: Node
    versions: Any  # of a module's state
    tensors: list[str]  # their keys, if there is nothing else in it
    inner: list[tuple[str, ...]]  # the keys of the dicts in it, if the tensors are in those

    def keys_of(self, tensors: list[torch.Tensor], inner: list[tuple[str, ...]], versions: Any) -> list[str] | None:
        """Of these tensors, if there is nothing new about them."""
        same = len(tensors) == len(self.tensors) and inner == self.inner and versions == self.versions
        return self.tensors if same else None


def unflatten(node: Node, tensors: Mapping[str, torch.Tensor]) -> Any:
    """What was flattened, with these tensors. Raises Damaged for a tree that `flatten` has not made."""
    return _Unflatten(tensors).value(node, 0)


def tensor_keys(node: Node) -> list[str]:
    """Of the tensors that a tree refers to, in its order. Raises Damaged as `unflatten` does."""
    found = _Listing()
    _Unflatten(found).value(node, 0)
    return found.keys_asked


def part(name: object) -> str:
    """A name as one part of a key. `/` stands between the parts, so it cannot be in one."""
    text = str(name)
    return _UNSAFE.sub(lambda found: f"%{ord(found[0]):02X}", text) if "/" in text or "%" in text else text


def join(path: str, name: object) -> str:
    """The key of what is called that in there."""
    return f"{path}/{part(name)}"


def parts(key: str) -> list[str]:
    """What `join` has joined."""
    return [_ESCAPED.sub(lambda found: chr(int(found[1], 16)), part) for part in key.split("/")]


class _Flatten:
    def __init__(self, memory: Memory) -> None:
        import torch

        self._torch = torch
        self._memory = memory
        self._tensor_types = {torch.Tensor, torch.nn.Parameter}
        self.tensors: dict[str, torch.Tensor] = {}

    def node(self, value: Any, path: str, depth: int) -> Node:
        # In the order of how often they occur: this runs in the training loop.
        kind = type(value)
        if isinstance(value, self._torch.Tensor):
            return self._tensor(value, path, "t")
        if value is None or kind is bool:
            return value
        if kind is int or kind is float or kind is str:
            return self._plain(value, path)
        if depth >= MAX_DEPTH:
            raise CheckpointError(f"{path}: nested more than {MAX_DEPTH} deep; does it contain itself?")
        if isinstance(value, dict):
            return self._dict(value, path, depth)
        if kind is list or kind is tuple:
            return {"l" if kind is list else "u": self._items(value, path, depth)}
        return self._rare(value, path, depth)

    def _plain(self, value: Any, path: str) -> Node:
        """An integer, float or string, also of a class derived from one: it comes back as the plain value."""
        if isinstance(value, str):
            if not value.isascii():
                _check_text(value, path)
            return str(value)
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {"f": str(float(value))}
        if _SMALLEST <= value <= _LARGEST:
            return int(value)
        try:
            return {"i": str(int(value))}
        except ValueError:
            raise CheckpointError(f"{path}: an integer of {value.bit_length()} bits cannot be saved") from None

    def _tensor(self, value: torch.Tensor, path: str, tag: str) -> Node:
        key = path if path.isascii() else _check_text(path, path)
        while key in self.tensors:  # of a dict with both 0 and "0": escaped keys have no `%` at their end
            key += "%"
        self.tensors[key] = value
        return {tag: key}

    def _dict(self, value: dict[Any, Any], path: str, depth: int) -> Node:
        seen = self._memory.seen(path, value)
        versions = getattr(value, "_metadata", None)
        tensors, inner = self._only_tensors(value)
        known = seen.keys_of(tensors, inner, versions) if seen is not None else None
        if seen is not None and known and self.tensors.keys().isdisjoint(known):
            self.tensors.update(zip(known, tensors, strict=True))
            return seen.node
        names = seen.names if seen is not None else [self._name(key, path, depth) for key in value]
        before = len(self.tensors)
        nodes = [self.node(item, below, depth + 1) for item, (_, below) in zip(value.values(), names, strict=True)]
        keys = list(self.tensors)[before:] if tensors else []
        node = self._tagged(value, [[name, node] for (name, _), node in zip(names, nodes, strict=True)], versions, path)
        types = list(map(type, value))
        self._memory.note(path, _Seen(type(value), tuple(value), types, names, node, versions, keys, inner))
        return node

    def _only_tensors(self, value: dict[Any, Any]) -> tuple[list[torch.Tensor], list[tuple[str, ...]]]:
        """The plain tensors of a dict, or of the dicts in it, as an optimizer has for its parameters, if there is
        nothing else. In calls that look at all of them at once: a large model has thousands."""
        kinds = set(map(type, value.values()))
        if kinds == {dict}:
            inner = list(map(tuple, value.values()))
            items = list(itertools.chain.from_iterable(map(dict.values, value.values())))
            if {str}.issuperset(map(type, itertools.chain.from_iterable(inner))):
                return (items, inner) if self._tensor_types.issuperset(map(type, items)) else ([], [])
        return (list(value.values()), []) if kinds and kinds <= self._tensor_types else ([], [])

    def _name(self, key: Any, path: str, depth: int) -> tuple[Node, str]:
        below = join(path, key)
        if type(key) is str and key.isascii():
            return key, below
        if isinstance(key, self._torch.Tensor):
            raise CheckpointError(f"{path}: a tensor as the key of a dict cannot be saved")
        return self.node(key, below, depth + 1), below

    def _tagged(self, value: dict[Any, Any], pairs: list[Node], versions: Any, path: str) -> Node:
        kind = type(value)
        if kind is OrderedDict:
            # Where modules keep the versions of their state; loading looks at them to convert older ones.
            if versions:
                return {"o": pairs, "m": self.node(versions, f"{path}/_metadata", 1)}
            return {"o": pairs}
        return {"k" if kind is Counter else "d": pairs}

    def _items(self, values: Any, path: str, depth: int) -> list[Node]:
        kinds = set(map(type, values))
        if kinds == {int} and min(values) >= _SMALLEST and max(values) <= _LARGEST:
            return list(values)  # parameter numbers of an optimizer, the 625 of `random.getstate()`
        return [self.node(value, f"{path}/{at}", depth + 1) for at, value in enumerate(values)]

    def _rare(self, value: Any, path: str, depth: int) -> Node:
        torch = self._torch
        if isinstance(value, bytes | bytearray):
            return {"b": base64.b64encode(value).decode()}
        if isinstance(value, torch.Size):
            return {"z": [int(size) for size in value]}
        if isinstance(value, torch.dtype):
            return {"y": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"v": str(value)}
        if isinstance(value, set):
            nodes = [self.node(item, join(path, item), depth + 1) for item in value]
            return {"s": sorted(nodes, key=repr)}  # the order of a set differs from process to process
        if type(value).__module__ == "numpy":
            return self._numpy(value, path, depth)
        if type(value) is complex:
            return {"c": [self._plain(value.real, path), self._plain(value.imag, path)]}
        if isinstance(value, int | float | str):
            return self._plain(value, path)
        raise _cannot(value, path)

    def _numpy(self, value: Any, path: str, depth: int) -> Node:
        import numpy

        if isinstance(value, numpy.generic) and not isinstance(value, numpy.void):
            plain = value.item()
            if not isinstance(plain, numpy.generic):  # as of a long double, which Python has no number for
                return self.node(plain, path, depth)
        if type(value) is not numpy.ndarray:
            raise _cannot(value, path)
        try:
            tensor = self._torch.from_numpy(numpy.array(value, dtype=value.dtype.newbyteorder("="), order="C"))
        except (TypeError, ValueError):
            raise CheckpointError(f"{path}: a numpy array of {value.dtype} cannot be saved") from None
        return self._tensor(tensor, path, "n")


def _cannot(value: Any, path: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: a {type(value).__name__} cannot be saved; give it state_dict() and load_state_dict(), or leave it out"
    )


def _check_text(value: str, path: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise CheckpointError(f"{path!a}: {value!a} is no Unicode text") from None
    return value


class _Unflatten:
    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._kinds: dict[str, Callable[[Any, int], Any]] = {
            "t": self._tensor,
            "d": lambda inner, depth: self._dict(inner, {}, depth),
            "o": lambda inner, depth: self._dict(inner, OrderedDict(), depth),
            "k": self._counter,
            "l": self._list,
            "u": lambda inner, depth: tuple(self._list(inner, depth)),
            "s": self._set,
            "f": _special_float,
            "i": _large_integer,
            "b": lambda inner, depth: _from_base64(inner),
            "c": self._complex,
            "n": self._array,
            "y": lambda inner, depth: _dtype(inner),
            "z": _size,
            "v": _device,
        }

    def value(self, node: Node, depth: int) -> Any:
        if node is None or isinstance(node, bool | int | float | str):
            return node
        if depth > MAX_DEPTH:
            raise Damaged(f"the state's tree is nested more than {MAX_DEPTH} deep")
        if not isinstance(node, dict) or not node:
            raise _bad(node)
        tag, inner = next(iter(node.items()))
        kind = self._kinds.get(tag) if isinstance(tag, str) else None
        if kind is None or len(node) > (2 if tag == "o" and "m" in node else 1):
            raise _bad(node)
        value = kind(inner, depth)
        if len(node) == 2:
            value._metadata = self.value(node["m"], depth + 1)
        return value

    def _tensor(self, key: Any, depth: int) -> torch.Tensor:
        if not isinstance(key, str):
            raise _bad(key)
        try:
            return self._tensors[key]
        except KeyError:
            raise Damaged(f"{key}: the state's tree refers to it, but there is no such tensor") from None

    def _array(self, key: Any, depth: int) -> Any:
        tensor = self._tensor(key, depth).detach().cpu()
        try:
            return tensor.numpy()
        except (RuntimeError, TypeError):
            raise Damaged(f"{key}: {tensor.dtype} is none of numpy's") from None

    def _dict(self, pairs: Any, into: dict[Any, Any], depth: int) -> dict[Any, Any]:
        for pair in _as_list(pairs):
            if not isinstance(pair, list) or len(pair) != 2:
                raise _bad(pair)
            key = pair[0] if type(pair[0]) is str else self._key(pair[0], depth)
            if key in into:
                raise Damaged(f"{key!r} is twice in a dict of the state's tree")
            node = pair[1]
            if type(node) is dict and len(node) == 1 and "t" in node:  # nearly all of them, in a large state
                into[key] = self._tensor(node["t"], depth)
            else:
                into[key] = self.value(node, depth + 1)
        return into

    def _key(self, node: Node, depth: int) -> Any:
        value = self.value(node, depth + 1)
        try:
            hash(value)
        except TypeError:
            raise _bad(node) from None
        return value

    def _list(self, nodes: Any, depth: int) -> list[Any]:
        return [self.value(node, depth + 1) for node in _as_list(nodes)]

    def _set(self, nodes: Any, depth: int) -> set[Any]:
        return {self._key(node, depth) for node in _as_list(nodes)}

    def _counter(self, pairs: Any, depth: int) -> Counter[Any]:
        counts: Counter[Any] = Counter()
        self._dict(pairs, counts, depth)
        return counts

    def _complex(self, parts: Any, depth: int) -> complex:
        values = self._list(parts, depth)
        if len(values) != 2 or not all(isinstance(value, int | float) for value in values):
            raise _bad(parts)
        return complex(values[0], values[1])


class _Listing(dict[str, Any]):
    """Has any tensor that it is asked for, and remembers that it was."""

    def __init__(self) -> None:
        import torch

        self.keys_asked: list[str] = []
        self._any = torch.empty(0)

    def __missing__(self, key: str) -> torch.Tensor:
        self.keys_asked.append(key)
        return self._any


def _bad(node: Any) -> Damaged:
    text = repr(node) if isinstance(node, str | int | float) else type(node).__name__
    if isinstance(node, dict):
        text = f"a node with {sorted(map(str, node))[:3]}"
    return Damaged(f"the state's tree cannot be read: {text[:80]} where something else should be")


def _as_list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise _bad(value)
    return value


def _special_float(inner: Any, depth: int) -> float:
    if inner not in ("nan", "inf", "-inf"):
        raise _bad(inner)
    return float(inner)


def _large_integer(inner: Any, depth: int) -> int:
    if not isinstance(inner, str) or not re.fullmatch(r"-?[0-9]{1,4300}", inner):
        raise _bad(inner)
    return int(inner)


def _from_base64(inner: Any) -> bytes:
    try:
        return base64.b64decode(inner, validate=True)
    except (binascii.Error, TypeError, ValueError):
        raise _bad(inner) from None


def _dtype(inner: Any) -> torch.dtype:
    import torch

    found = getattr(torch, inner, None) if isinstance(inner, str) else None
    if not isinstance(found, torch.dtype):
        raise _bad(inner)
    return found


def _size(inner: Any, depth: int) -> torch.Size:
    import torch

    return torch.Size(_sizes(inner))


def _sizes(inner: Any) -> list[int]:
    if not all(type(size) is int and 0 <= size <= _LARGEST for size in _as_list(inner)):
        raise _bad(inner)
    return list(inner)


def _device(inner: Any, depth: int) -> torch.device:
    import torch

    try:
        return torch.device(inner if isinstance(inner, str) else "")
    except RuntimeError:
        raise _bad(inner) from None
