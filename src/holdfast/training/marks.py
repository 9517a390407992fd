"""What a step changes besides weights and what steps them, as it was after the last one that was done."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, MutableMapping, Sized
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from holdfast.checkpoint import randomness, tree
from holdfast.checkpoint.contents import is_stateful

OWN = frozenset(
    {"data", "progress", "accumulation"}
)  # parts of a state that are Holdfast's, and change with a step alone
LARGEST = 1000  # entries of a plain value that is looked at in each step
LARGEST_BYTES = 64 << 20  # of an object's state that is copied in each step
_FIXED = frozenset({bool, int, float, complex, str, bytes, type(None)})  # of which nobody can change one
_STEPPED = (Optimizer, LRScheduler, GradScaler)  # which do not step in a step that is not done


class Mark:
    """Taken after each step: random generators, modules' buffers, parameters that no optimizer steps, and what else is
    attached."""

    def __init__(self, state: MutableMapping[str, Any], modules: Iterable[nn.Module]) -> None:
        modules = list(modules)
        self._buffers = _Buffers(modules)
        optimizers = [value for value in state.values() if isinstance(value, Optimizer)]
        self._averages = _Averages(modules, optimizers)
        self._state = state
        self._names: set[str] = set()
        self._values: list[_Value] = []
        self._parts: list[_Buffers | _Averages | _Value] = [each for each in (self._buffers, self._averages) if each]
        self.randomness = randomness.mark()
        self.take()

    @property
    def too_large(self) -> str:
        """What cannot be copied in each step, if there is such a thing, and what to do about it."""
        return next((value.too_large for value in self._values if value.too_large), "")

    def take(self) -> str:
        """As it is now. Returns what is too large for that."""
        self.randomness = randomness.mark(self.randomness)
        if len(self._names) != len(self._state):
            self._note_names()
        if self._parts:
            with torch.no_grad():
                for part in self._parts:
                    part.take()
        return self.too_large if self._values else ""

    def _note_names(self) -> None:
        for name, value in self._state.items():
            if name not in self._names | OWN and not isinstance(value, (nn.Module, *_STEPPED)):
                self._values.append(_Value(self._state, name))
                self._parts.append(self._values[-1])
        self._names = set(self._state)

    @property
    def whole(self) -> bool:
        """Whether it could be put back."""
        return self._averages.whole and all(value.whole for value in self._values)

    def put_back(self) -> None:
        randomness.go_back(self.randomness)
        with torch.no_grad():
            for part in self._parts:
                part.put_back()

    @property
    def tensors(self) -> dict[int, torch.Tensor]:
        """Of modules, by where they are now."""
        return self._buffers.by_address() | self._averages.by_address()

    @property
    def values(self) -> dict[str, Any]:
        """Of what else is attached, or its state."""
        return {value.name: value.kept() for value in self._values if value.is_kept}


class _Copies:
    """Of some tensors."""

    def __init__(self) -> None:
        self.of: list[torch.Tensor] = []
        self.kept: list[torch.Tensor] = []

    def take(self, tensors: list[torch.Tensor]) -> None:
        if len(tensors) != len(self.of) or not all(map(operator.is_, tensors, self.of)):
            known = dict(zip(map(id, self.of), self.kept, strict=True))
            self.kept = [known[id(each)] if id(each) in known else torch.empty_like(each) for each in tensors]
            self.of = tensors
        if tensors:
            torch._foreach_copy_(self.kept, tensors)

    def put_back(self) -> None:
        for tensor, kept in zip(self.of, self.kept, strict=True):
            tensor.copy_(kept)


class _Buffers:
    """By module and name: a forward may put another tensor there (`self.seen = self.seen + 1`)."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        parts = {id(part): part for module in modules for part in module.modules()}
        self._places = [(part._buffers, name) for part in parts.values() for name in part._buffers]
        self._found: list[torch.Tensor | None] = []
        self._copies = _Copies()

    def __bool__(self) -> bool:
        return bool(self._places)

    def take(self) -> None:
        self._found = [buffers.get(name) for buffers, name in self._places]
        self._copies.take([buffer for buffer in self._found if buffer is not None])

    def put_back(self) -> None:
        for (buffers, name), found in zip(self._places, self._found, strict=True):
            if buffers.get(name) is not found:
                buffers[name] = found
        self._copies.put_back()

    def by_address(self) -> dict[int, torch.Tensor]:
        there = [place for place, found in zip(self._places, self._found, strict=True) if found is not None]
        pairs = [(buffers.get(name), kept) for (buffers, name), kept in zip(there, self._copies.kept, strict=True)]
        return {now.data_ptr(): kept for now, kept in pairs if now is not None and now.shape == kept.shape}


class _Averages:
    """Parameters that no attached optimizer steps. Most are frozen, and may be large. So those are copied that have
    been seen to change, by torch's count of changes to each tensor. Shards are left out: theirs come from a snapshot.
    """

    def __init__(self, modules: Iterable[nn.Module], optimizers: Iterable[Optimizer]) -> None:
        stepped = {id(each) for one in optimizers for group in one.param_groups for each in group["params"]}
        found = {id(each): each for module in modules for each in module.parameters() if not isinstance(each, DTensor)}
        self._parameters = [each for key, each in found.items() if key not in stepped and not each.is_inference()]
        self._versions = self._now()
        self._kept: dict[int, torch.Tensor] = {}  # by number
        self._room = True
        self._other = False  # what is here is not what it was, by a hand of ours

    def __bool__(self) -> bool:
        return bool(self._parameters)

    def _now(self) -> list[int]:
        return [parameter._version for parameter in self._parameters]

    def _changed(self) -> list[int]:
        now = self._now()
        if now == self._versions:
            return []
        return [at for at, (before, version) in enumerate(zip(self._versions, now, strict=True)) if before != version]

    def take(self) -> None:
        changed = list(self._kept) if self._other else self._changed()
        self._other = False
        again = [at for at in changed if at in self._kept]
        if again:
            torch._foreach_copy_([self._kept[at] for at in again], [self._parameters[at] for at in again])
        try:
            for at in changed:
                if at not in self._kept and self._room:
                    self._kept[at] = self._parameters[at].detach().clone()
        except torch.OutOfMemoryError:
            self._room = False
        self._versions = self._now()

    @property
    def whole(self) -> bool:
        return self._other or all(at in self._kept for at in self._changed())

    def put_back(self) -> None:
        for at in self._changed():
            if at in self._kept:
                self._parameters[at].copy_(self._kept[at])
        self._other = True

    def by_address(self) -> dict[int, torch.Tensor]:
        return {self._parameters[at].data_ptr(): kept for at, kept in self._kept.items()}


def _is_fixed(values: Collection[Any]) -> bool:
    """Whether none of them can be changed where it is."""
    kinds = set(map(type, values))
    if kinds <= _FIXED:
        return True
    return kinds <= _FIXED | {tuple} and all(_is_fixed(each) for each in values if type(each) is tuple)


class _Log:
    """A list of very many entries, of all losses so far, say. To look at all of them in each step would take too long,
    so it may only grow, and a step costs what it adds. That the entries before are still the same is looked at when
    it matters."""

    def __init__(self) -> None:
        self.of: list[Any] = []
        self.kept: list[Any] = []

    def take(self, value: list[Any]) -> bool:
        """Whether it could: the two ends tell of most lists that do not only grow, a window of the last ones say."""
        if value is not self.of:
            self.of, self.kept = value, []
        known = len(self.kept)
        if known and (len(value) < known or value[0] is not self.kept[0] or value[known - 1] is not self.kept[-1]):
            return False
        new = value[known:]
        self.kept += new
        return _is_fixed(new)

    @property
    def whole(self) -> bool:
        return self.of[: len(self.kept)] == self.kept


class _Value:
    """A plain value of a state, a tensor, or an object with a state of its own."""

    def __init__(self, state: MutableMapping[str, Any], name: str) -> None:
        self.name = name
        self.too_large = ""
        self._state = state
        self._value: Any = None
        self._log: _Log | None = None  # of a long list
        self._fixed = False  # what is there cannot be changed, only put in another's place
        self._node: tree.Node = None
        self._keys: list[str] = []
        self._copies = _Copies()

    def _flat(self, value: Any) -> tuple[tree.Node, dict[str, torch.Tensor]]:
        return tree.flatten(value.state_dict() if is_stateful(value) else value, tree.part(self.name))

    @property
    def is_kept(self) -> bool:
        return not self.too_large

    def take(self) -> None:
        value = self._state.get(self.name)
        before, self._value = self._value, value
        if not self.is_kept or (self._fixed and value is before):
            return
        self._fixed = False
        length = _entries(value)
        if length > LARGEST:
            self._take_long(value, length)
            return
        self._log = None
        self._node, tensors = self._flat(value)
        if is_stateful(value) and sum(tensor.nbytes for tensor in tensors.values()) > LARGEST_BYTES:
            self._give_up(
                f"the state of {self.name!r}, a {type(value).__name__}", "attach modules and optimizers themselves"
            )
            return
        self._keys = list(tensors)
        self._copies.take(list(tensors.values()))

    def _take_long(self, value: Any, length: int) -> None:
        self._node, self._keys, self._copies = None, [], _Copies()
        if type(value) is list:
            self._log = self._log or _Log()
            if not self._log.take(value):
                what = f"{self.name!r}, a list of {length} entries that does not only grow, by plain values"
                self._give_up(what, "keep it in a tensor, or in an object with state_dict")
            return
        self._log = None
        self._fixed = type(value) in _FIXED or (type(value) is tuple and _is_fixed(value))
        if not self._fixed:
            what = f"{self.name!r}, a {type(value).__name__} of {length} entries"
            self._give_up(what, "keep it in a tensor, or in an object with state_dict")

    def _give_up(self, what: str, instead: str) -> None:
        self.too_large = f"{what}, is too large to be put back; {instead}"
        self._node, self._keys, self._copies, self._log, self._fixed = None, [], _Copies(), None, False

    @property
    def whole(self) -> bool:
        """Whether it could be put back. What is too large has been said to be."""
        return self._log is None or self._log.whole

    def kept(self) -> Any:
        if self._fixed:
            return self._value
        if self._log is not None:
            return list(self._log.kept)
        copies = [kept.clone() for kept in self._copies.kept]
        return tree.unflatten(self._node, dict(zip(self._keys, copies, strict=True)))

    def put_back(self) -> None:
        """Into the same object, where it is one that changes: the program may have it, too."""
        value = self._value
        if self._log is not None and not self._log.whole:
            length = len(self._log.kept)
            self._give_up(
                f"{self.name!r}, a list of {length} entries of which some were changed", "keep it in a tensor"
            )
        if not self.is_kept or self._is_as_it_was():
            return
        if is_stateful(value):
            value.load_state_dict(self.kept())
        elif isinstance(value, torch.Tensor):
            self._copies.put_back()
        elif self._log is not None:
            del value[len(self._log.kept) :]
        elif isinstance(value, list):
            value[:] = self.kept()
        elif isinstance(value, dict | set):
            kept = self.kept()
            value.clear()
            value.update(kept)
        elif _is_array(value):
            value[...] = self.kept()
        else:
            value = self.kept()
        self._state[self.name] = value

    def _is_as_it_was(self) -> bool:
        value = self._state.get(self.name)
        if value is not self._value:
            return False
        if self._log is not None:
            return len(value) == len(self._log.kept)
        if self._fixed:
            return True
        node, tensors = self._flat(value)
        same = node == self._node and list(tensors) == self._keys
        return same and all(map(torch.equal, tensors.values(), self._copies.kept))


def _is_array(value: Any) -> bool:
    """Of numpy, which need not be there."""
    return type(value).__module__ == "numpy" and type(value).__name__ == "ndarray"


def _entries(value: Any) -> int:
    """How many there are to be looked at one by one."""
    at_once = isinstance(value, torch.Tensor) or is_stateful(value) or _is_array(value)
    return len(value) if isinstance(value, Sized) and not at_once else 0
