"""Whose fault it was: the evidence of each rank, and the first cause among many."""

from __future__ import annotations

import signal

import msgspec
import pytest

from holdfast.control.causes import (
    EXIT_CODES,
    EXIT_DO_NOT_REQUEUE,
    Blame,
    Cause,
    Kind,
    RankExit,
    blame,
    explained,
    signal_name,
)
from holdfast.control.stacks import MAX_GROUPS, MAX_RANKS, Group
from holdfast.wire.messages import Raised

NCCL_SAYS = (
    "[rank1]:[E521 10:00:00] [PG ID 0 PG GUID 0] ProcessGroupNCCL's watchdog got stuck for 480 seconds",
    "terminate called after throwing an instance of 'c10::DistBackendError'",
)
ECC = "uncorrectable ECC error encountered"
HARDWARE = "; it looks like the hardware"


def killed(rank: int, at_s: float = 10.0, by: int = signal.SIGKILL, oom: bool = False) -> RankExit:
    return RankExit(rank, 100 + rank, -by, at_s, oom_killed=oom)


def exited(rank: int, code: int, at_s: float = 10.0) -> RankExit:
    return RankExit(rank, 100 + rank, code, at_s)


def stopped(rank: int, status: int = -signal.SIGTERM, at_s: float = 10.0) -> RankExit:
    return RankExit(rank, 100 + rank, status, at_s, stopped=True)


def raised(
    rank: int,
    headline: str = "ValueError: bad",
    at_s: float = 10.0,
    exited_at_s: float | None = None,
    backend: bool = False,
    memory: bool = False,
    hardware: bool = False,
) -> RankExit:
    report = Raised(rank, 0, at_s, headline, f"Traceback ...\n{headline}\n", "train.py:3", backend, memory, hardware)
    return RankExit(rank, 100 + rank, 1, at_s if exited_at_s is None else exited_at_s, raised=report)


def aborted(rank: int, stderr: tuple[str, ...], at_s: float = 10.0) -> RankExit:
    return RankExit(rank, 100 + rank, -signal.SIGABRT, at_s, stderr_tail=stderr)


def cold(rank: int, *stderr: str, at_s: float = 10.0) -> RankExit:
    """A program that told of its exception on stderr alone."""
    return RankExit(rank, 100 + rank, 1, at_s, stderr_tail=("Traceback (most recent call last):", *stderr))


def blame_for(*exits: RankExit) -> Blame:
    """The verdict over the failures among these ends, as a node reports them."""
    return blame([exit.cause() for exit in exits if exit.is_failure])


def lost(node: str, at_s: float) -> Cause:
    return Cause(Kind.LOST_NODE, f"node {node} is gone", at_s, node=node)


# -- one rank ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("exit", "kind", "headline"),
    [
        (exited(0, 3), Kind.ERROR, "exited with code 3"),
        (raised(0, "KeyError: 'lr'"), Kind.ERROR, "KeyError: 'lr'"),
        (raised(0, "DistBackendError: closed", backend=True), Kind.BACKEND, "DistBackendError: closed"),
        (raised(0, "OutOfMemoryError: no", memory=True), Kind.OUT_OF_MEMORY, "OutOfMemoryError: no"),
        (raised(0, "E: no memory", backend=True, memory=True), Kind.OUT_OF_MEMORY, "E: no memory"),
        (killed(0), Kind.SIGNAL, "killed by SIGKILL"),
        (killed(0, by=signal.SIGSEGV), Kind.SIGNAL, "killed by SIGSEGV"),
        (killed(0, by=signal.SIGRTMIN + 3), Kind.SIGNAL, f"killed by signal {signal.SIGRTMIN + 3}"),
        (killed(0, oom=True), Kind.OUT_OF_MEMORY, "killed by the kernel: out of memory (SIGKILL)"),
        (aborted(0, NCCL_SAYS), Kind.BACKEND, "killed by SIGABRT"),
        (aborted(0, ("Aborted by NCCL watchdog",)), Kind.BACKEND, "killed by SIGABRT"),
        (aborted(0, ("free(): invalid pointer",)), Kind.SIGNAL, "killed by SIGABRT"),
        (raised(0, f"E: {ECC}", hardware=True), Kind.HARDWARE, f"E: {ECC}{HARDWARE}"),
        (raised(0, f"E: {ECC}", backend=True, hardware=True), Kind.HARDWARE, f"E: {ECC}{HARDWARE}"),
        (raised(0, f"E: {ECC}", memory=True, hardware=True), Kind.OUT_OF_MEMORY, f"E: {ECC}"),
        (aborted(0, (*NCCL_SAYS, f"  what():  CUDA error: {ECC}")), Kind.HARDWARE, f"killed by SIGABRT{HARDWARE}"),
        (cold(0, f"torch.AcceleratorError: CUDA error: {ECC}"), Kind.HARDWARE, f"exited with code 1{HARDWARE}"),
        (cold(0, "[rank0]: torch.distributed.DistBackendError: x", "W Warning"), Kind.BACKEND, "exited with code 1"),
        (cold(0, "RuntimeError: [gloo/pair.cc:547] Connection closed by peer"), Kind.BACKEND, "exited with code 1"),
        (cold(0, "torch.distributed.DistStoreError", "KeyError: 'lr'"), Kind.ERROR, "exited with code 1"),
        (cold(0, "ValueError: gloo is not a word here"), Kind.ERROR, "exited with code 1"),
        (cold(0, "RuntimeError: CUDA error: device-side assert triggered"), Kind.ERROR, "exited with code 1"),
    ],
    ids=str,
)
def test_an_end_has_a_kind_and_a_headline(exit: RankExit, kind: Kind, headline: str) -> None:
    assert (exit.kind, exit.headline) == (kind, headline)


def test_a_segfault_after_nccl_complained_is_a_segfault() -> None:
    exit = RankExit(0, 100, -signal.SIGSEGV, 10.0, stderr_tail=NCCL_SAYS)
    assert exit.kind is Kind.SIGNAL


def test_a_failure_happened_when_it_was_raised_not_when_the_process_was_gone() -> None:
    assert raised(0, at_s=5.0, exited_at_s=9.0).failed_at_s == 5.0
    assert killed(0, at_s=9.0).failed_at_s == 9.0


def test_a_rank_that_ends_because_it_was_told_to_is_no_failure() -> None:
    assert not stopped(0).is_failure
    assert not stopped(0, status=1).is_failure
    assert not stopped(0, status=0).is_failure


def test_a_rank_that_ended_well_is_no_failure() -> None:
    assert not exited(0, 0).is_failure


def test_unknown_signals_have_a_number() -> None:
    assert signal_name(signal.SIGTERM) == "SIGTERM"
    assert signal_name(99) == "signal 99"


# -- many ranks -------------------------------------------------------------------------------------------------------


def test_the_first_of_equals_is_the_cause() -> None:
    verdict = blame_for(killed(0, at_s=10.2), killed(1, at_s=10.1), killed(2, at_s=10.3))
    assert verdict.first.rank == 1
    assert [cause.rank for cause in verdict.followers] == [0, 2]


def test_at_the_same_time_the_lowest_rank_is_the_cause() -> None:
    assert blame_for(killed(2), killed(0), killed(1)).first.rank == 0


def test_a_killed_rank_stands_before_peers_whose_collectives_broke_earlier() -> None:
    broken = [raised(rank, "DistBackendError: closed", at_s=9.0 + rank / 10, backend=True) for rank in (0, 1, 3)]
    verdict = blame_for(*broken, killed(2, at_s=10.0))
    assert verdict.first.rank == 2
    assert [cause.rank for cause in verdict.followers] == [0, 1, 3]


def test_an_exception_stands_before_peers_whose_collectives_broke_earlier() -> None:
    verdict = blame_for(raised(0, "RuntimeError: gloo", at_s=9.0, backend=True), raised(1, at_s=9.5))
    assert verdict.first.rank == 1


def test_a_rank_without_memory_stands_before_the_watchdogs_of_the_others() -> None:
    verdict = blame_for(aborted(0, NCCL_SAYS, at_s=5.0), killed(1, at_s=9.0, oom=True), aborted(2, NCCL_SAYS, at_s=6.0))
    assert (verdict.first.rank, verdict.first.kind) == (1, Kind.OUT_OF_MEMORY)
    assert [cause.rank for cause in verdict.followers] == [0, 2]


def test_among_broken_collectives_the_first_is_the_cause() -> None:
    verdict = blame_for(raised(0, at_s=9.2, backend=True), raised(1, at_s=9.1, backend=True))
    assert (verdict.first.rank, verdict.first.kind) == (1, Kind.BACKEND)


def test_stopped_ranks_and_those_that_ended_well_are_left_out() -> None:
    verdict = blame_for(stopped(0, at_s=1.0), exited(1, 0, at_s=2.0), exited(2, 1, at_s=10.0), stopped(3))
    assert verdict.first.rank == 2
    assert verdict.followers == ()


def test_without_a_failure_there_is_nobody_to_blame() -> None:
    with pytest.raises(ValueError, match="nothing failed"):
        blame([])


# -- many nodes -------------------------------------------------------------------------------------------------------


def test_a_lost_node_stands_before_the_collectives_that_broke_with_it() -> None:
    broken = raised(4, "DistBackendError: closed", at_s=9.0, backend=True).cause()
    assert blame([broken, lost("b", at_s=12.0)]).first.node == "b"


def test_a_killed_rank_stands_before_the_node_that_was_lost_later() -> None:
    verdict = blame([lost("b", at_s=12.0), killed(1, at_s=11.0).cause()])
    assert verdict.first.rank == 1
    assert [cause.node for cause in verdict.followers] == ["b"]


def test_the_verdict_does_not_hang_on_the_order_in_which_causes_came() -> None:
    causes = [lost("b", 9.0), lost("a", 9.0), killed(3, 9.0).cause(), killed(0, 9.0).cause()]
    assert blame(causes) == blame(causes[::-1])
    assert blame(causes).first.node == "a"


def test_a_cause_has_the_evidence_of_its_rank() -> None:
    report = raised(3, "KeyError: 'lr'", at_s=5.0, exited_at_s=9.0)
    cause = report.cause()
    assert (cause.kind, cause.headline, cause.failed_at_s) == (Kind.ERROR, "KeyError: 'lr'", 5.0)
    assert (cause.rank, cause.pid, cause.status) == (3, 103, 1)
    assert (cause.raised, cause.where) == (True, "train.py:3")
    assert cause.traceback.startswith("Traceback")
    assert aborted(0, NCCL_SAYS).cause().stderr_tail == NCCL_SAYS
    assert not killed(0).cause().raised


# -- exit codes -------------------------------------------------------------------------------------------------------


def test_every_kind_has_an_exit_code_of_its_own_that_no_shell_uses() -> None:
    """But for a change of membership, which ends a job only as a lost node does."""
    assert set(EXIT_CODES) == set(Kind)
    assert EXIT_CODES[Kind.MEMBERSHIP] == EXIT_CODES[Kind.LOST_NODE]
    assert sorted(set(EXIT_CODES.values())) == [*range(81, 90), EXIT_DO_NOT_REQUEUE]
    assert EXIT_CODES[Kind.REQUESTED] == EXIT_DO_NOT_REQUEUE == 93


def test_a_rank_that_never_had_a_process_is_the_launchers_fault() -> None:
    exit = RankExit(rank=3, pid=0, status=1, at_s=1.0, not_started="Resource temporarily unavailable")
    assert (exit.kind, exit.is_failure) == (Kind.LAUNCHER, True)
    assert exit.headline == "could not be started: Resource temporarily unavailable"


# -- hangs ------------------------------------------------------------------------------------------------------------


def hang(rank: int, node: str = "a", since_s: float = 5.0) -> Cause:
    return Cause(Kind.HANG, "no step for 31 s (limit 30 s)", since_s, rank=rank, node=node, detected_at_s=36.0)


def waiting(*ranks: int, node: str = "a") -> Group:
    return Group(ranks, len(ranks), "all_reduce", collective=True, frames=("all_reduce",), node=node)


def reading(*ranks: int, node: str = "b") -> Group:
    return Group(ranks, len(ranks), "data.py:41 read", frames=("data.py:41 read",), node=node)


def test_the_rank_that_the_others_wait_for_is_to_blame_not_the_one_whose_monitor_noticed() -> None:
    [cause] = explained([hang(0)], [waiting(0, 1), waiting(3, node="b"), reading(2)])
    assert (cause.rank, cause.node, cause.suspects) == (2, "b", (2,))
    assert [group.ranks for group in cause.groups] == [(0, 1, 3), (2,)]
    assert (cause.failed_at_s, cause.detected_at_s) == (5.0, 36.0)


def test_where_all_wait_for_each_other_nobody_is_to_blame() -> None:
    [cause] = explained([hang(0)], [waiting(0, 1), waiting(2, 3, node="b")])
    assert (cause.rank, cause.node, cause.suspects) == (None, "", ())


def test_where_stacks_tell_nothing_a_rank_that_passed_its_own_limit_is_to_blame() -> None:
    """As one whose heartbeats stopped, beside another that is at something else and has its own in time."""
    places = [reading(1, node="a"), Group((0,), 1, "train.py:7 main", frames=("train.py:7 main",), node="a")]
    [silent] = explained([hang(1)], places)
    [own] = explained([msgspec.structs.replace(hang(1), own_limit=True)], places)
    assert (silent.rank, own.rank, own.node) == (None, 1, "a")
    [waits] = explained([msgspec.structs.replace(hang(0), own_limit=True)], [waiting(0), reading(1)])
    assert waits.rank == 1, "unless it waits for another"


def test_a_hang_whose_stacks_are_not_known_stays_with_whoever_noticed() -> None:
    assert explained([hang(0)], []) == [hang(0)]


def test_a_single_rank_is_its_own_suspect_even_if_it_waits() -> None:
    [cause] = explained([hang(0)], [waiting(0)])
    assert (cause.rank, cause.node) == (0, "a")


def test_only_hangs_are_explained_by_stacks() -> None:
    stuck = Cause(Kind.HANG, "rank 1 does not end even by SIGKILL", 9.0, stuck=True)
    others = [killed(1).cause(), lost("b", 3.0), stuck]
    assert explained(others, [waiting(0), reading(1)]) == others


def test_what_is_known_of_the_stacks_of_a_huge_world_is_bounded() -> None:
    groups = [Group((rank,), 1, f"train.py:{rank} " + "x" * 900, frames=("y" * 900,) * 8) for rank in range(500)]
    [cause] = explained([hang(0)], [waiting(1000, 1001), *groups])
    assert len(cause.groups) == MAX_GROUPS
    assert len(cause.suspects) == MAX_RANKS
    assert sum(len(frame) for group in cause.groups for frame in group.frames) < 32_000
