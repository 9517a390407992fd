"""A plan of faults: a TOML file, read and checked, and drawn from its seed into faults that are due one by one."""

from __future__ import annotations

import random
import tomllib
from typing import Any

import msgspec

from holdfast.chaos.kinds import KINDS, NODES, Hand, Kind
from holdfast.cli.usage import nearest

RANDOM = "random"
MAX_FAULTS = 1_000_000


class Wrong(Exception):
    """A plan that cannot be meant. The text says where and what is."""


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One entry `[[fault]]`. Of `at_step`, `at_s`, `every_s` and `rate_per_hour` one is given."""

    kind: str
    at_step: int | None = None  # when so many steps are done, counted over all worlds where the optimizer counts
    at_s: float | None = None  # from the first step of the job
    every_s: float | None = None  # after the fault before is over, and the job trains
    rate_per_hour: float | None = None  # the same, with gaps as chance has them
    count: int = 1
    rank: int | str = RANDOM
    node: int | str = RANDOM
    generation: int | None = None
    for_s: float = 2.0
    delay_s: float = 0.05
    part: float = 0.05


class Mix(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The table `[random]`: `count` faults of these kinds, by their weights."""

    count: int
    kinds: dict[str, float]
    every_s: float | None = None
    rate_per_hour: float | None = None
    for_s: float = 2.0
    delay_s: float = 0.05
    part: float = 0.05


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    fault: tuple[Fault, ...] = ()
    random: Mix | None = None
    seed: int = 0
    nodes: int = 1
    backend: str = "c10d"  # of several nodes: c10d or etcd
    limit_s: float = 120.0  # a fault that the job has not come through by then is not waited for
    disk_mb: int = 64  # where a plan has full-disk, the size of the disk of checkpoints


class Due(msgspec.Struct, frozen=True):
    """One fault to come. `chance` stands for who is struck where the plan leaves that open."""

    number: int
    kind: Kind
    at_step: int | None = None
    at_s: float | None = None
    gap_s: float | None = None
    rank: int | None = None
    node: int | None = None
    generation: int | None = None
    for_s: float = 0.0
    delay_s: float = 0.0
    part: float = 0.0
    chance: float = 0.0

    @property
    def what(self) -> str:
        who = "" if self.rank is None else f" of rank {self.rank}"
        when = f" at step {self.at_step}" if self.at_step is not None else ""
        return f"{self.kind.name}{who}{when}"

    def struck(self, size: int) -> int:
        """The rank, in a world of that size."""
        return self.rank if self.rank is not None else int(self.chance * size)


def read(path: str) -> Plan:
    """Raises Wrong."""
    try:
        with open(path, "rb") as file:
            found = tomllib.load(file)
    except OSError as failure:
        raise Wrong(f"{path}: {failure.strerror}; name a plan, as in docs/chaos.md") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as failure:
        raise Wrong(f"{path}: {failure}") from None
    return _checked(path, found)


def _checked(path: str, found: dict[str, Any]) -> Plan:
    try:
        plan = msgspec.convert(found, Plan)
    except msgspec.ValidationError as failure:
        raise Wrong(f"{path}: {_place(str(failure))}") from None
    if plan.random is None and not plan.fault:
        raise Wrong(f"{path}: no faults; add a [[fault]] or a [random] table")
    if plan.nodes < 1 or plan.backend not in ("c10d", "etcd"):
        raise Wrong(
            f"{path}: nodes = {plan.nodes}, backend = {plan.backend!r}; at least 1, and c10d or etcd, are meant"
        )
    for number, fault in enumerate(plan.fault, 1):
        where = f"{path}: fault {number}"
        kind = _kind(where, fault.kind, plan)
        _check_when(where, fault, kind)
        _check_whom(where, fault, plan)
        _check_numbers(where, fault.count, fault.for_s, fault.delay_s, fault.part)
    if plan.random is not None:
        _check_mix(f"{path}: [random]", plan.random, plan)
    if total(plan) > MAX_FAULTS:
        raise Wrong(f"{path}: {total(plan)} faults; at most {MAX_FAULTS} are meant")
    return plan


def _place(message: str) -> str:
    """msgspec's words, with the key's place as a person would write it."""
    what, _, path = message.partition(" - at `")
    what = what.replace("Object contains unknown field", "there is no key").replace("Object missing", "missing:")
    where = path.rstrip("`").removeprefix("$").lstrip(".").replace("fault[...]", "a [[fault]]")
    return f"{where}: {what}" if where else what


def _kind(where: str, name: str, plan: Plan) -> Kind:
    if name not in KINDS:
        near = nearest(name, list(KINDS))
        raise Wrong(f"{where}: there is no kind {name!r}{near}; holdfast chaos kinds lists them")
    kind = KINDS[name]
    if NODES in kind.needs and plan.nodes < 2:
        raise Wrong(f"{where}: {name} needs nodes = 2 or more at the top of the plan")
    if kind.hand is Hand.ETCD and plan.backend != "etcd":
        raise Wrong(f'{where}: {name} needs backend = "etcd" at the top of the plan')
    return kind


def _check_when(where: str, fault: Fault, kind: Kind) -> None:
    given = [name for name in ("at_step", "at_s", "every_s", "rate_per_hour") if getattr(fault, name) is not None]
    if len(given) != 1:
        raise Wrong(
            f"{where}: one of at_step, at_s, every_s and rate_per_hour is meant, not {' and '.join(given) or 'none'}"
        )
    if getattr(fault, given[0]) < 0 or (given[0] == "rate_per_hour" and fault.rate_per_hour == 0):
        raise Wrong(f"{where}: {given[0]} = {getattr(fault, given[0])} cannot be")
    if fault.count != 1 and given[0] in ("at_step", "at_s"):
        raise Wrong(f"{where}: count is for every_s and rate_per_hour; {given[0]} comes once")
    if fault.generation is not None and kind.hand is not Hand.RANK:
        raise Wrong(f"{where}: generation is for faults inside a rank, and {kind.name} is none")


def _check_whom(where: str, fault: Fault, plan: Plan) -> None:
    for key, value in (("rank", fault.rank), ("node", fault.node)):
        if isinstance(value, str) and value != RANDOM:
            raise Wrong(f'{where}: {key} = "{value}"; a number or "random" is meant')
        if isinstance(value, int) and value < 0:
            raise Wrong(f"{where}: {key} = {value}; they are counted from 0")
    if isinstance(fault.node, int) and fault.node >= plan.nodes:
        raise Wrong(f"{where}: node = {fault.node}, of {plan.nodes}; they are counted from 0")


def _check_numbers(where: str, count: int, for_s: float, delay_s: float, part: float) -> None:
    if count < 1:
        raise Wrong(f"{where}: count = {count}; at least 1 is meant")
    if for_s <= 0 or delay_s <= 0 or not 0 < part < 1:
        raise Wrong(f"{where}: for_s and delay_s are more than 0, part is between 0 and 1")


def _check_mix(where: str, mix: Mix, plan: Plan) -> None:
    if (mix.every_s is None) == (mix.rate_per_hour is None):
        raise Wrong(f"{where}: one of every_s and rate_per_hour is meant")
    if (mix.every_s is not None and mix.every_s < 0) or (mix.rate_per_hour is not None and mix.rate_per_hour <= 0):
        raise Wrong(f"{where}: every_s and rate_per_hour are more than 0")
    if not mix.kinds or any(weight < 0 for weight in mix.kinds.values()) or not sum(mix.kinds.values()):
        raise Wrong(f"{where}: kinds has a weight of more than 0 for each kind that may come")
    for name in mix.kinds:
        _kind(where, name, plan)
    _check_numbers(where, mix.count, mix.for_s, mix.delay_s, mix.part)


def total(plan: Plan) -> int:
    return sum(fault.count for fault in plan.fault) + (plan.random.count if plan.random is not None else 0)


def kinds_of(plan: Plan) -> set[str]:
    drawn = [name for name, weight in plan.random.kinds.items() if weight] if plan.random is not None else []
    return {fault.kind for fault in plan.fault} | set(drawn)


def draw(plan: Plan, seed: int) -> list[Due]:
    """All faults of a plan, in the order in which those that have no time of their own come. The same seed gives the
    same faults."""
    chance = random.Random(seed)
    found: list[Due] = []
    for fault in plan.fault:
        for _ in range(fault.count):
            gap_s = _gap_s(fault.every_s, fault.rate_per_hour, chance)
            found.append(
                Due(
                    number=0, kind=KINDS[fault.kind], at_step=fault.at_step, at_s=fault.at_s, gap_s=gap_s,
                    rank=fault.rank if isinstance(fault.rank, int) else None,
                    node=fault.node if isinstance(fault.node, int) else None,
                    generation=fault.generation, for_s=fault.for_s, delay_s=fault.delay_s, part=fault.part,
                    chance=chance.random(),
                )
            )  # fmt: skip
    if (mix := plan.random) is not None:
        names, weights = list(mix.kinds), list(mix.kinds.values())
        for _ in range(mix.count):
            [name] = chance.choices(names, weights)
            gap_s = _gap_s(mix.every_s, mix.rate_per_hour, chance)
            found.append(
                Due(
                    number=0, kind=KINDS[name], gap_s=gap_s, for_s=mix.for_s, delay_s=mix.delay_s, part=mix.part,
                    chance=chance.random(),
                )
            )  # fmt: skip
    return [msgspec.structs.replace(due, number=number) for number, due in enumerate(found, 1)]


def _gap_s(every_s: float | None, rate_per_hour: float | None, chance: random.Random) -> float | None:
    if rate_per_hour is not None:
        return chance.expovariate(rate_per_hour / 3600)
    return every_s
