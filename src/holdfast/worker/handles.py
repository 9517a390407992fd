"""The process groups that a program has made for itself: the handles that it has, with the next world behind them.

A new rank makes them as its program does, in order, between the default group and `run.attach()`. Those that stay make
the same calls meanwhile, and so meet it. What they get is moved into the groups that their program has. Torch has no
call for that, but it has one by which a group lets go of what it consists of, and then it takes another's.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import inspect
import weakref
from collections.abc import Callable, Collection
from typing import Any

LET_GO = "_ZN4c10d12ProcessGroup17release_resourcesEv"  # c10d::ProcessGroup::release_resources()
WORDS = 4  # of a group in memory that are looked at; its store is among them


class Call:
    """One of new_group, and what came of it. A rank that is not in a group takes part in making it, too."""

    def __init__(self, make: Callable[..., Any], arguments: dict[str, Any], group: Any) -> None:
        self.make, self._arguments = make, arguments
        self._find: Callable[[], Any] = lambda: None
        self._in_use = self._current = False
        if _is_group(group):
            self._holds(group)

    def _holds(self, group: Any) -> None:
        self._find = weakref.ref(group)
        self._in_use = True  # the program has not destroyed it
        self._current = True  # it is of this world

    @property
    def group(self) -> Any:
        """None: this rank is not in it, or nobody has it."""
        return self._find()

    def let_go(self, known: Collection[Any]) -> list[Any]:
        if (group := self.group) is None or not self._current:
            return []
        self._current, self._in_use = False, group in known
        consists_of = backends(group)
        _let_go()(group._id())
        return consists_of

    def make_again(self) -> None:
        """Also what the program has destroyed since: a new rank has that still before it."""
        fresh = self.make(**self._arguments)
        if not _is_group(fresh):
            return
        group = self.group
        if group is None or (group.rank(), group.size()) != (fresh.rank(), fresh.size()):
            self._holds(fresh)
        elif self._in_use:
            _move(fresh, group)
            self._current = True


_calls: list[Call] = []


def keep(make: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], group: Any) -> bool:
    """Whether what came of this call can be made again."""
    from torch.distributed import distributed_c10d as c10d

    given = inspect.signature(make).bind(*args, **kwargs).arguments
    if given.get("ranks") is not None:
        given["ranks"] = list(given["ranks"])
    # With a device of its own a group may be split off from another one, which has to be as far as it was then.
    bound = given.get("device_id") or c10d._get_default_group().bound_device_id
    plain = given.get("pg_options") is None and (bound is None or given.get("backend") == "gloo")
    if not plain or _is_own_kind(group) or _store_at() is None:
        return False
    _calls.append(Call(make, given, group))
    return True


def backends(group: Any) -> list[Any]:
    found = []
    for device in group._device_types:
        with contextlib.suppress(RuntimeError):
            found.append(group._get_backend(device))
    return found


def keep_default() -> None:
    """The default group's handle, too: somebody has it."""
    from torch.distributed import distributed_c10d as c10d

    group = c10d._world.default_pg
    if group is not None and not is_kept(group) and not _is_own_kind(group) and _store_at() is not None:
        _calls.insert(0, Call(c10d._get_default_group, {}, group))


def are_kept(default: bool = True) -> bool:
    """Whether there are any, besides the default group's or with it. They can be of no other size, and this rank no
    other one in them."""
    from torch.distributed import distributed_c10d as c10d

    return any(default or call.make is not c10d._get_default_group for call in _calls)


def is_kept(group: Any) -> bool:
    return group is not None and any(call.group is group for call in _calls)


def let_go(known: Collection[Any]) -> list[Any]:
    """Of what all these groups consisted of in the world that is over; what of it has to come to its end is returned.
    `known`: the groups that were not destroyed."""
    return [each for call in _calls for each in call.let_go(known)]


def make_again() -> None:
    for call in _calls:
        call.make_again()


def _is_group(group: Any) -> bool:
    from torch.distributed import ProcessGroup

    return isinstance(group, ProcessGroup)


def _is_own_kind(group: Any) -> bool:
    """One in Python, say, which is no shell around backends."""
    from torch.distributed import ProcessGroup

    return isinstance(group, ProcessGroup) and type(group) is not ProcessGroup


def _move(fresh: Any, group: Any) -> None:
    """All that a new group has into one that has let go of what it had. The new one is nothing then."""
    import torch
    from torch._C._distributed_c10d import _register_process_group, _unregister_process_group
    from torch.distributed import distributed_c10d as c10d

    world: Any = c10d._world
    kinds = c10d.Backend.backend_type_map
    config = c10d.BackendConfig(c10d.Backend(world.pg_backend_config[fresh]))
    for kind, backend in config.get_device_backend_map().items():
        device = torch.device(kind)
        group._register_backend(device, kinds[backend], fresh._get_backend(device))
    at = _store_at()
    assert at is not None
    here, there = _words(group), _words(fresh)
    here[at], there[at] = there[at], here[at]
    name = world.pg_names[fresh]
    for known in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config, world.pg_to_tag):
        known[group] = known.pop(fresh)
    for tagged in world.tags_to_pg.values():
        tagged[:] = [group if each is fresh else each for each in tagged]
    _unregister_process_group(name)
    _register_process_group(name, group)
    if fresh is world.default_pg:
        c10d._update_default_pg(group)


def _words(group: Any) -> Any:
    return (ctypes.c_uint64 * WORDS).from_address(group._id())


@functools.cache
def _let_go() -> Callable[[int], None]:
    import torch

    call = ctypes.CDLL(f"{torch.__path__[0]}/lib/libtorch_cpu.so")[LET_GO]
    call.argtypes, call.restype = [ctypes.c_void_p], None
    return call


@functools.cache
def _store_at() -> int | None:
    """Which word of a group is its store. None: this version of torch is another than is known here; it is tried with
    a group of nobody."""
    import torch
    from torch._C._distributed_c10d import HashStore
    from torch.distributed import ProcessGroup

    device, kind = torch.device("cpu"), ProcessGroup.BackendType.CUSTOM
    try:
        Fake: Any = torch._C._distributed_c10d.FakeProcessGroup
        first, second = (Fake._create_internal(0, 1, Fake.Options()) for _ in range(2))
        group: Any = ProcessGroup(HashStore(), 0, 1)
        group._register_backend(device, kind, first)
        before = list(_words(group))
        _let_go()(group._id())
        changed = [at for at, word in enumerate(_words(group)) if word != before[at]]
        group._register_backend(device, kind, second)
        known = len(changed) == 1 and group.get_group_store() is None and group._get_backend(device) is second
    except (AttributeError, OSError, RuntimeError, TypeError):
        return None
    return changed[0] if known else None
