"""Who coordinates, and what it wrote, while members of a real etcd cluster come and go."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from coordinator.etcd_cluster import DEADLINE_S, Certificates, Cluster, Relay, encoded, wait_for
from holdfast.coordinator import etcd_members
from holdfast.coordinator.etcd import Deposed, Etcd, EtcdError, Leader

T = TypeVar("T")

# A coordinator that is killed where it stands, as a child process: endpoint list and run id are its arguments.
COORDINATES = """
import asyncio, sys
from holdfast.coordinator.etcd import Etcd

async def main():
    etcd = Etcd(sys.argv[1].split(","), sys.argv[2])
    won = await etcd.campaign("child", "10.0.0.9", 9, 2.0)
    assert won is not None
    await etcd.write(b"of the child")
    print("elected", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("etcd"))
    yield cluster
    cluster.close()


@pytest.fixture
def cluster(members: Cluster) -> Iterator[Cluster]:
    yield members
    members.heal()


@pytest.fixture
def run_id() -> str:
    return f"job-{uuid.uuid4().hex[:8]}"


# One loop for all: gRPC has one queue for all loops of a process, and stumbles over what comes in for a closed one.
RUNNER = asyncio.Runner()


@pytest.fixture(scope="module", autouse=True)
def _close_runner() -> Iterator[None]:
    yield
    RUNNER.close()


def run(test: Coroutine[Any, Any, T]) -> T:
    return RUNNER.run(asyncio.wait_for(test, 3 * DEADLINE_S))


async def soon(what: Awaitable[T]) -> T:
    return await asyncio.wait_for(what, DEADLINE_S)


@contextlib.asynccontextmanager
async def agents(endpoints: list[str], run_id: str, count: int, **options: Any) -> AsyncIterator[list[Etcd]]:
    etcds = [Etcd(endpoints, run_id, **options) for _ in range(count)]
    try:
        yield etcds
    finally:
        for each in etcds:
            await each.close()


async def win(etcd: Etcd, node: str, instead_of: Leader | None = None, ttl_s: float = 2.0) -> Leader:
    won = await etcd.campaign(node, "10.0.0.1", 29400, ttl_s, instead_of)
    assert won is not None, f"{node} lost to {await etcd.leader()}"
    return won[0]


async def watching(cluster: Cluster, *etcds: Etcd, known: Leader | None) -> list[asyncio.Task[Leader | None]]:
    """`wait_change` of each, once etcd has the watches."""
    before = cluster.watches()
    tasks = [asyncio.create_task(each.wait_change(known)) for each in etcds]
    await asyncio.to_thread(wait_for, cluster.watches, lambda now: now >= before + len(etcds))
    return tasks


def record_of(cluster: Cluster, run_id: str) -> bytes | None:
    return cluster.keys(f"/holdfast/{run_id}/").get(f"/holdfast/{run_id}/record")


# -- being elected ----------------------------------------------------------------------------------------------------


def test_one_of_ten_candidates_wins(cluster: Cluster, run_id: str) -> None:
    async def test() -> None:
        before = set(cluster.leases())
        async with agents(cluster.endpoints, run_id, 10) as etcds:
            results = await asyncio.gather(*(each.campaign(f"n{i}", "h", i) for i, each in enumerate(etcds)))
            winners = [result for result in results if result is not None]
            assert len(winners) == 1
            assert winners[0][1] is None
            assert {await each.leader() for each in etcds} == {winners[0][0]}
            assert len(set(cluster.leases()) - before) == 1, "those who lost keep no lease"

    run(test())


def test_the_term_grows_and_the_record_is_handed_on(cluster: Cluster, run_id: str) -> None:
    async def test() -> None:
        async with agents(cluster.endpoints, run_id, 2) as (first, second):
            assert await first.leader() is None
            before = 0
            for term, (etcd, node) in enumerate(itertools.islice(itertools.cycle([(first, "a"), (second, "b")]), 5), 1):
                won = await etcd.campaign(node, "10.0.0.1", 29400)
                handed_on = b"of term %d" % (term - 1) if term > 1 else None
                assert won is not None
                assert won == (Leader(before + 1 if before else won[0].term, node, "10.0.0.1", 29400), handed_on)
                before = won[0].term
                await etcd.write(b"of term %d" % term)
                await etcd.resign()
            assert not first.lost.is_set(), "to resign is not to lose"

    run(test())


def test_a_coordinator_in_office_is_not_replaced(cluster: Cluster, run_id: str) -> None:
    async def test() -> None:
        async with agents(cluster.endpoints, run_id, 2) as (first, second):
            leader = await win(first, "a")
            assert await second.campaign("b", "h", 1) is None
            assert await second.leader() == leader

    run(test())


def test_one_whose_port_refuses_is_replaced_at_once_and_learns_of_it(cluster: Cluster, run_id: str) -> None:
    async def test() -> None:
        async with agents(cluster.endpoints, run_id, 2) as (first, second):
            leader = await win(first, "a")
            await first.write(b"of a")
            assert await second.campaign("b", "h", 1, 2.0, leader) == (Leader(leader.term + 1, "b", "h", 1), b"of a")
            await soon(first.lost.wait())
            assert not second.lost.is_set()

    run(test())


def test_of_many_who_would_replace_it_one_does(cluster: Cluster, run_id: str) -> None:
    async def test() -> None:
        async with agents(cluster.endpoints, run_id, 6) as (first, *others):
            leader = await win(first, "a")
            tries = (each.campaign(f"n{i}", "h", i, 2.0, leader) for i, each in enumerate(others))
            assert sum(result is not None for result in await asyncio.gather(*tries)) == 1

    run(test())


def test_to_replace_one_who_is_replaced_already_fails(cluster: Cluster, run_id: str) -> None:
    async def test() -> None:
        async with agents(cluster.endpoints, run_id, 3) as (first, second, third):
            stale = await win(first, "a")
            leader = await win(second, "b", instead_of=stale)
            assert await third.campaign("c", "h", 1, 2.0, stale) is None
            assert await third.leader() == leader

    run(test())


def test_a_killed_coordinator_is_missed_when_its_lease_ends(cluster: Cluster, run_id: str) -> None:
    argv = [sys.executable, "-c", COORDINATES, ",".join(cluster.endpoints), run_id]
    child = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    async def test() -> None:
        async with agents(cluster.endpoints, run_id, 1) as (etcd,):
            leader = await etcd.leader()
            assert leader is not None
            child.kill()
            assert await soon(etcd.wait_change(leader)) is None
            assert await etcd.campaign("b", "h", 1) == (Leader(leader.term + 1, "b", "h", 1), b"of the child")

    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"elected\n"
        run(test())
    finally:
        child.kill()
        assert child.communicate()[1] == b"", "gRPC has nothing to say to the user"


def test_one_that_closes_without_resigning_is_missed_too(cluster: Cluster, run_id: str) -> None:
    async def test() -> None:
        async with agents(cluster.endpoints, run_id, 2) as (first, second):
            leader = await win(first, "a", ttl_s=1.0)
            await first.close()
            assert await soon(second.wait_change(leader)) is None
            assert (await win(second, "b")).term == leader.term + 1

    run(test())


# -- acting in a term -------------------------------------------------------------------------------------------------


def test_a_deposed_holder_cannot_write(cluster: Cluster, run_id: str) -> None:
    async def test() -> None:
        async with agents(cluster.endpoints, run_id, 2) as (first, second):
            leader = await win(first, "a")
            await first.write(b"of a")
            await win(second, "b", instead_of=leader)
            with pytest.raises(Deposed, match=r"term \d+ of a is over"):
                await first.write(b"late, of a")
            assert first.lost.is_set()
            assert record_of(cluster, run_id) == b"of a"
            await second.write(b"of b")
            for act in (first.write(b"later, of a"), first.clear()):
                with pytest.raises(Deposed):
                    await act
            assert record_of(cluster, run_id) == b"of b"

    run(test())


def test_a_term_of_a_cleared_job_is_not_that_of_the_next(cluster: Cluster, run_id: str) -> None:
    """One who slept through the end of its job has no right in the next of that name, and a lower term."""

    async def test() -> None:
        async with agents(cluster.endpoints, run_id, 3) as (sleeper, second, third):
            leader = await win(sleeper, "a")
            await win(second, "b", instead_of=leader)
            await second.clear()
            assert (await win(third, "c")).term > leader.term + 1
            await third.write(b"of c")
            with pytest.raises(Deposed):
                await sleeper.write(b"late, of a")
            assert record_of(cluster, run_id) == b"of c"

    run(test())


def test_a_revoked_lease_is_lost(cluster: Cluster, run_id: str) -> None:
    async def test() -> None:
        before = set(cluster.leases())
        async with agents(cluster.endpoints, run_id, 1) as (etcd,):
            leader = await win(etcd, "a")
            (lease,) = set(cluster.leases()) - before
            cluster.post("/v3/lease/revoke", {"ID": lease})
            await soon(etcd.lost.wait())
            assert await etcd.leader() is None
            # It may stand again like anybody else.
            assert (await win(etcd, "a")).term == leader.term + 1
            assert not etcd.lost.is_set()

    run(test())


@pytest.mark.parametrize("left", ["nobody", "the leader alone"])
def test_a_lease_that_cannot_be_proved_is_lost(cluster: Cluster, run_id: str, left: str) -> None:
    async def test() -> None:
        async with agents(cluster.endpoints, run_id, 1) as (etcd,):
            await win(etcd, "a")
            leading = cluster.leader()
            for member in range(3):
                if left == "nobody" or member != leading:
                    cluster.stop(member)
            await soon(etcd.lost.wait())

    run(test())


def test_resigning_and_clearing_leave_nothing(cluster: Cluster, run_id: str) -> None:
    async def test() -> None:
        before = set(cluster.leases())
        async with agents(cluster.endpoints, run_id, 1) as (etcd,):
            await win(etcd, "a")
            await etcd.write(b"record")
            await etcd.resign()
            assert set(cluster.keys(f"/holdfast/{run_id}/")) == {f"/holdfast/{run_id}/{k}" for k in ("term", "record")}
            assert set(cluster.leases()) <= before
            with pytest.raises(Deposed):
                await etcd.write(b"after resigning")

            await win(etcd, "a")
            await etcd.clear()
            assert cluster.keys(f"/holdfast/{run_id}/") == {}
            assert set(cluster.leases()) <= before

    run(test())


def test_jobs_do_not_see_each_other(cluster: Cluster, run_id: str) -> None:
    async def test() -> None:
        async with (
            agents(cluster.endpoints, run_id, 1) as (outer,),
            agents(cluster.endpoints, f"{run_id}/inner", 1) as (inner,),
        ):
            await win(outer, "a")
            assert await inner.leader() is None
            leader = await win(inner, "b")
            await inner.write(b"of b")
            await outer.clear()
            assert await inner.leader() == leader
            await inner.write(b"of b, again")

    run(test())


# -- seeing a change --------------------------------------------------------------------------------------------------


def test_a_watcher_sees_every_change(cluster: Cluster, run_id: str) -> None:
    async def test() -> None:
        async with agents(cluster.endpoints, run_id, 3) as (first, second, watcher):
            (election,) = await watching(cluster, watcher, known=None)
            leader = await win(first, "a")
            assert await soon(election) == leader

            (resignation,) = await watching(cluster, watcher, known=leader)
            await first.resign()
            assert await soon(resignation) is None

            leader = await win(first, "a")
            (replacement,) = await watching(cluster, watcher, known=leader)
            successor = await win(second, "b", instead_of=leader)
            assert await soon(replacement) == successor

    run(test())


@pytest.mark.parametrize("fault", ["kill", "stop"])
def test_a_watcher_outlasts_its_member(cluster: Cluster, run_id: str, fault: str) -> None:
    """One watcher to a member, so that one of them is hit."""

    async def test() -> None:
        async with contextlib.AsyncExitStack() as stack:
            (first,) = await stack.enter_async_context(agents(cluster.endpoints, run_id, 1))
            leader = await win(first, "a", ttl_s=10.0)
            watchers: list[Etcd] = []
            for endpoint in cluster.endpoints:
                others = [each for each in cluster.endpoints if each != endpoint]
                (watcher,) = await stack.enter_async_context(agents([endpoint], run_id, 1))
                assert await watcher.leader() == leader
                watcher._members.where += others  # begun on one member, and free to move
                watchers.append(watcher)
            changes = await watching(cluster, *watchers, known=leader)
            getattr(cluster, fault)(0)
            await first.resign()
            assert await soon(asyncio.gather(*changes)) == [None] * 3

    run(test())


def test_a_watcher_outlasts_all_of_etcd(cluster: Cluster, run_id: str) -> None:
    async def test() -> None:
        async with agents(cluster.endpoints, run_id, 2) as (first, watcher):
            leader = await win(first, "a", ttl_s=30.0)
            (change,) = await watching(cluster, watcher, known=leader)
            for member in range(3):
                cluster.kill(member)
            for member in range(3):
                cluster.restart(member)
            await asyncio.to_thread(cluster.wait_healthy)
            await first.resign()
            assert await soon(change) is None

    run(test())


# -- members that fail ------------------------------------------------------------------------------------------------


def test_no_acknowledged_write_is_lost_with_the_leading_member(cluster: Cluster, run_id: str) -> None:
    async def test() -> None:
        async with agents(cluster.endpoints, run_id, 2) as (etcd, successor):
            leader = await win(etcd, "a")
            for number in range(60):
                if number == 20:
                    cluster.kill(cluster.leader())
                await etcd.write(b"%d" % number)
            won = await successor.campaign("b", "h", 1, 2.0, leader)
            assert won is not None
            assert won[1] == b"59"

    run(test())


def test_no_term_has_two_holders_while_leading_members_die(cluster: Cluster, run_id: str) -> None:
    """Three agents take the job from one another as fast as they can; whatever was acknowledged is handed on."""
    holders: dict[int, str] = {}
    acknowledged: dict[int, int] = {}  # term to the last write of it that etcd confirmed
    handed_on: dict[int, tuple[int, int]] = {}  # term to the term and number its holder found
    enough = False

    async def agent(etcd: Etcd, node: str) -> None:
        while not enough:
            try:
                won = await etcd.campaign(node, "h", 1, 2.0, instead_of=await etcd.leader())
                if won is None:
                    continue
                (leader, record) = won
                assert holders.setdefault(leader.term, node) == node
                found = (record or b"0 0").split()
                handed_on[leader.term] = (int(found[0]), int(found[1]))
                for number in range(1, 8):
                    await etcd.write(b"%d %d" % (leader.term, number))
                    acknowledged[leader.term] = number
            except (Deposed, EtcdError):
                pass

    async def faults(etcd: Etcd) -> None:
        nonlocal enough
        for _ in range(2):
            await changes(etcd, 10)
            leading = cluster.leader()
            cluster.kill(leading)
            await changes(etcd, 10)
            cluster.restart(leading)
            await asyncio.to_thread(cluster.wait_healthy)
        enough = True

    async def changes(etcd: Etcd, count: int) -> None:
        leader = await etcd.leader()
        for _ in range(count):
            leader = await soon(etcd.wait_change(leader))

    async def test() -> None:
        async with agents(cluster.endpoints, run_id, 4) as (observer, *etcds):
            await asyncio.gather(faults(observer), *(agent(etcd, f"n{i}") for i, etcd in enumerate(etcds)))
        assert len(holders) > 20
        for term, found in handed_on.items():
            last = max((each for each in acknowledged if each < term), default=0)
            assert found >= (last, acknowledged.get(last, 0)), f"term {term} found {found}"

    run(test())


def test_writes_go_on_past_a_stopped_member(cluster: Cluster, run_id: str) -> None:
    async def test() -> None:
        async with agents(cluster.endpoints, run_id, 1) as (etcd,):
            await win(etcd, "a", ttl_s=10.0)
            for member in range(3):
                cluster.stop(member)
                await etcd.write(b"while %d was stopped" % member)
                await etcd.write(b"after %d was stopped" % member)
                cluster.cont(member)
                await asyncio.to_thread(cluster.wait_healthy)
                assert record_of(cluster, run_id) == b"after %d was stopped" % member
            assert not etcd.lost.is_set()

    run(test())


def test_a_write_waits_for_a_quorum_to_come_back(cluster: Cluster, run_id: str) -> None:
    async def test() -> None:
        async with agents(cluster.endpoints, run_id, 1) as (etcd,):
            leader = await win(etcd, "a", ttl_s=10.0)
            cluster.kill(0)
            cluster.kill(1)
            write = asyncio.create_task(etcd.write(b"record"))
            cluster.restart(0)
            await soon(write)
            assert await etcd.leader() == leader

    run(test())


def test_a_win_whose_answer_is_lost_is_a_win(cluster: Cluster, run_id: str) -> None:
    async def test() -> None:
        async with Relay(cluster).running() as relay, agents(relay.endpoints, run_id, 1) as (etcd,):
            relay.lose_answer_to(b'"node":"a"')
            won = await etcd.campaign("a", "h", 1, 10.0)
            assert won == (await etcd.leader(), None)
            await etcd.write(b"of a")

    run(test())


def test_a_write_whose_answer_is_lost_is_written_once(cluster: Cluster, run_id: str) -> None:
    async def test() -> None:
        async with Relay(cluster).running() as relay, agents(relay.endpoints, run_id, 1) as (etcd,):
            await win(etcd, "a", ttl_s=10.0)
            relay.lose_answer_to(b"the first")
            await etcd.write(b"the first")
            await etcd.write(b"the second")
            assert record_of(cluster, run_id) == b"the second"

    run(test())


def test_a_write_that_arrives_late_undoes_nothing(cluster: Cluster, run_id: str) -> None:
    async def test() -> None:
        async with Relay(cluster).running() as relay, agents(relay.endpoints, run_id, 1) as (etcd,):
            await win(etcd, "a", ttl_s=10.0)
            relay.hold(b"the first")
            await etcd.write(b"the first")
            await etcd.write(b"the second")
            answered = cluster.transactions()
            await relay.release()
            await asyncio.to_thread(wait_for, cluster.transactions, lambda now: now > answered)
            assert record_of(cluster, run_id) == b"the second"

    run(test())


# -- what etcd refuses ------------------------------------------------------------------------------------------------


def test_users_and_passwords(tmp_path: Path, run_id: str) -> None:
    cluster = Cluster(tmp_path / "etcd", size=1)

    async def test() -> None:
        for user in ("root", "trainer"):
            cluster.post("/v3/auth/user/add", {"name": user, "password": f"{user}'s"})
            cluster.post("/v3/auth/role/add", {"name": user})
            cluster.post("/v3/auth/user/grant", {"user": user, "role": user})
        right = {"permType": "READWRITE", "key": encoded("/holdfast/"), "range_end": encoded("/holdfast0")}
        cluster.post("/v3/auth/role/grant", {"name": "trainer", "perm": right})
        cluster.post("/v3/auth/enable", {})
        root = cluster.post("/v3/auth/authenticate", {"name": "root", "password": "root's"})["token"]

        for login in ({}, {"user": "trainer", "password": "wrong"}, {"user": "nobody", "password": "wrong"}):
            async with agents(cluster.endpoints, run_id, 1, **login) as (etcd,):
                with pytest.raises(EtcdError, match="refuses this user"):
                    await etcd.leader()
                with pytest.raises(EtcdError, match="refuses this user"):
                    await etcd.wait_change(None)
        login = {"user": "trainer", "password": "trainer's"}
        async with agents(cluster.endpoints, run_id, 2, **login) as (first, second):
            leader = await win(first, "a", ttl_s=1.0)
            (change,) = await watching(cluster, second, known=leader)
            # From here on the tokens are out of date.
            cluster.post("/v3/auth/user/add", {"name": "another", "password": "another's"}, root)
            await first.write(b"of a")
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(first.lost.wait(), 1.5)  # longer than its lease: it was renewed
            await first.resign()
            assert await soon(change) is None
            await win(second, "b")
            await second.clear()

    try:
        run(test())
    finally:
        cluster.close()


def test_a_login_where_none_is_needed(cluster: Cluster, run_id: str) -> None:
    async def test() -> None:
        async with agents(cluster.endpoints, run_id, 1, user="trainer", password="any") as (etcd,):
            assert await etcd.leader() is None

    run(test())


def test_client_certificates(tmp_path: Path, run_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd_members, "PATIENCE_S", 0.1)
    ours, theirs = Certificates.make(tmp_path / "ours"), Certificates.make(tmp_path / "theirs")
    cluster = Cluster(tmp_path / "etcd", size=1, certificates=ours)

    async def test() -> None:
        async with agents(cluster.endpoints, run_id, 2, ca=ours.ca, cert=ours.client, key=ours.key) as (first, second):
            leader = await win(first, "a")
            (change,) = await watching(cluster, second, known=leader)
            await first.write(b"of a")
            await first.clear()
            assert await soon(change) is None
        for wrong, told in (
            ({"ca": theirs.ca, "cert": ours.client, "key": ours.key}, "TLS failed: .*CERTIFICATE_VERIFY_FAILED"),
            ({"ca": ours.ca}, "TLS failed"),
            ({"ca": ours.ca, "cert": theirs.client, "key": theirs.key}, "TLS failed"),
            ({}, "Socket closed: check the endpoints, TLS"),
        ):
            async with agents(cluster.endpoints, run_id, 1, **wrong) as (etcd,):
                with pytest.raises(EtcdError, match=told):
                    await etcd.leader()

    try:
        run(test())
    finally:
        cluster.close()


def test_no_member_at_all(run_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd_members, "PATIENCE_S", 0.1)

    async def test() -> None:
        async with agents(["127.0.0.1:9", "127.0.0.1:10"], run_id, 1) as (etcd,):
            with pytest.raises(EtcdError, match=r"no member can be used: .*:10: .*refused; .*:9: .*refused") as told:
                await etcd.leader()
            assert "\n" not in str(told.value)

    run(test())


@pytest.mark.parametrize(
    ("endpoints", "options", "told"),
    [
        ([" "], {}, "no endpoint"),
        (["h"], {"cert": "c.pem"}, "needs its key"),
        (["h"], {"user": "u"}, "needs a password"),
        (["h"], {"ca": "/no/such.pem"}, "cannot read /no/such.pem: No such file"),
    ],
)
def test_bad_options_are_refused_before_anything_is_asked(
    endpoints: list[str], options: dict[str, str], told: str
) -> None:
    with pytest.raises(EtcdError, match=told):
        Etcd(endpoints, "job", **options)


def test_endpoints_are_given_in_many_ways() -> None:
    given = ["etcd", "etcd:1", "http://etcd:2/", "https://10.0.0.1", "[::1]", "[::1]:3"]
    where = ["etcd:2379", "etcd:1", "etcd:2", "10.0.0.1:2379", "[::1]:2379", "[::1]:3"]
    assert Etcd(given, "job")._members.where == where


def test_a_job_without_etcd_needs_no_aetcd() -> None:
    script = (
        "import sys; sys.modules['aetcd'] = None\n"
        "import holdfast.coordinator.etcd as etcd\n"
        "assert 'grpc' not in sys.modules\n"
        "try: etcd.Etcd(['h'], 'job')\n"
        "except etcd.EtcdError as error: print(error)"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert said == "--rdzv-backend=etcd needs aetcd: pip install 'holdfast[etcd]'\n"
