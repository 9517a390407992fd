"""Commits: by the last, by one alone, and never by a world that training has left behind."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import states
from holdfast.checkpoint import catalogue, commits, persist, shards, terms
from holdfast.checkpoint.errors import Damaged, Fenced
from holdfast.checkpoint.folder import Folder
from holdfast.checkpoint.format import Shard
from holdfast.checkpoint.storage import Storage


@pytest.fixture
def folder() -> Iterator[Folder]:
    with states.in_memory() as folder:
        yield folder


def test_the_last_to_write_commits(folder: Folder) -> None:
    made = [states.snapshot(10, rank, 3) for rank in range(3)]
    shards.write(folder, *made[2])
    assert commits.commit(folder, made[2][0]) == commits.Commit(None, missing=(0, 1))
    shards.write(folder, *made[0])
    assert commits.commit(folder, made[0][0]).missing == (1,)
    assert states.names(folder) == []
    shards.write(folder, *made[1])
    done = commits.commit(folder, made[1][0])
    assert done.own and done.manifest is not None
    assert [listed.rank for listed in done.manifest.shards] == [0, 1, 2]
    assert states.names(folder) == ["step_00000010"]


def test_a_second_commit_is_content_with_the_first(folder: Folder) -> None:
    made, data = states.snapshot(10)
    shards.write(folder, made, data)
    first = commits.commit(folder, made)
    assert first.own
    assert commits.commit(folder, made) == commits.Commit(first.manifest, own=False)


@pytest.mark.parametrize("attempt", range(5))
def test_of_many_that_finish_at_once_exactly_one_commits(folder: Folder, attempt: int) -> None:
    ranks = 6
    made = [states.snapshot(10, rank, ranks) for rank in range(ranks)]
    gate = threading.Barrier(ranks)
    found = []

    def write(rank: int) -> None:
        gate.wait()
        shards.write(folder, *made[rank])
        found.append(commits.commit(folder, made[rank][0]))

    threads = [threading.Thread(target=write, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(one.own for one in found) == 1
    assert states.same(states.load(folder, catalogue.find(folder).found[0]), states.state(10))


def test_a_world_that_was_left_behind_does_not_commit(folder: Folder) -> None:
    first = states.begin(folder, generation=0)
    made, data = states.snapshot(10, term=first)
    shards.write(folder, made, data)
    terms.begin(folder, "job", 3, None, 1)
    with pytest.raises(Fenced, match=r"a later world \(term 2, generation 3\) writes here now"):
        commits.commit(folder, made)
    outcome = persist.persist(folder, made, data)
    assert not outcome.committed and "a later world" in outcome.note
    assert states.files(folder) == [".holdfast/terms/000001.json", ".holdfast/terms/000002.json"]


def test_what_a_later_world_went_on_from_may_still_be_committed(folder: Folder) -> None:
    """Its snapshot was in memory, and is written while the next world trains already."""
    first = states.begin(folder, generation=0)
    states.begin(folder, restored=10, generation=1)
    assert states.save(folder, 10, term=first)[0].committed
    assert not states.save(folder, 11, term=first)[0].committed


def test_a_commit_that_slips_through_is_superseded_all_the_same(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = states.begin(folder)
    states.save(folder, 10, term=first)
    monkeypatch.setattr(commits, "check_fence", lambda *_: states.begin(folder, restored=10, generation=1))
    states.save(folder, 20, term=first)  # the later world began in between
    monkeypatch.undo()
    states.save(folder, 15, term=99)
    assert [found.name for found in catalogue.find(folder).found if found.superseded] == ["step_00000020"]
    assert [found.step for found in states.latest(folder)] == [15, 10]


def test_a_world_that_was_left_behind_sets_nothing_aside_that_the_later_one_has_saved(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The later one has saved the same step, and deleted what was left of the earlier one's."""
    states.save(folder, 10, term=states.begin(folder))
    early = states.begin(folder, restored=10, generation=1)
    real = shards.scrub

    def scrub(storage: Storage, shard: Shard) -> None:
        if shard.term == early:
            later = states.begin(folder, restored=10, generation=2)
            assert states.save(folder, 20, term=later, generation=2)[0].committed
            folder.delete(f"step_00000020/t{early:06}.00000.bin")
        real(storage, shard)

    monkeypatch.setattr(shards, "scrub", scrub)
    [outcome] = states.save(folder, 20, term=early, generation=1)
    assert not outcome.committed and "a later world" in outcome.note
    [found] = [found for found in catalogue.find(folder).found if found.step == 20 and not found.superseded]
    assert found.term == early + 1 and found.verified
    assert not [name for name in folder.names() if name.startswith("damaged_")]


@pytest.mark.parametrize("attempt", range(8))
def test_two_worlds_that_write_the_same_steps_at_once(folder: Folder, attempt: int) -> None:
    """Processes of their own. Whatever they do, what is found is of one of them, whole, and the later one's wins."""
    states.save(folder, 10, 2, term=states.begin(folder))
    early = states.begin(folder, restored=10, generation=1)
    children = []
    for generation in (1, 2):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                term = early if generation == 1 else states.begin(folder, restored=10, generation=2)
                for step in (20, 30):
                    states.save(folder, step, 2, term=term, generation=generation, values=_values(step, generation))
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    there = catalogue.find(folder)
    assert not there.broken
    line = [found for found in there.found if not found.superseded]
    assert [found.step for found in line] == [30, 20, 10]
    for found in line[:2]:
        assert found.step is not None and found.term == early + 1
        assert states.same(states.load(folder, found), _values(found.step, 2))


def _values(step: int, generation: int) -> dict[str, object]:
    values = states.state(step)
    values["scheduler"]["generation"] = generation
    values["model"]["weight"] += generation
    return values


def test_a_shard_that_is_not_whole_is_not_committed(folder: Folder) -> None:
    made = [states.snapshot(10, rank, 2) for rank in range(2)]
    shards.write(folder, *made[0])
    path = Path(folder.url) / "step_00000010/t000001.00000.bin"
    os.truncate(path, 10)
    shards.write(folder, *made[1])
    with pytest.raises(Damaged, match=r"t000001\.00000\.bin: it has 10 bytes"):
        commits.commit(folder, made[1][0])
    path.unlink()
    with pytest.raises(Damaged, match="is missing"):
        commits.commit(folder, made[1][0])
    assert states.names(folder) == []


def test_ranks_that_do_not_agree_who_takes_part_do_not_commit(folder: Folder) -> None:
    shards.write(folder, *states.snapshot(10, 0, 2, ranks=(0,)))
    made, data = states.snapshot(10, 1, 2)
    shards.write(folder, made, data)
    with pytest.raises(Damaged, match="rank 0 saved this step with other ranks than rank 1 did"):
        commits.commit(folder, made)
