"""Terms: numbers that only grow, and which checkpoints they leave behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import states
from holdfast.checkpoint import terms
from holdfast.checkpoint.errors import Fenced
from holdfast.checkpoint.folder import Folder
from holdfast.checkpoint.terms import Term


@pytest.fixture
def folder() -> Iterator[Folder]:
    with states.in_memory() as folder:
        yield folder


def term(number: int, restored: int | None) -> Term:
    return Term(number, "job", 0, restored, 1, "")


def test_each_start_takes_the_next_number(folder: Folder) -> None:
    assert terms.read(folder) == ()
    first = terms.begin(folder, "job", 0, None, 2)
    second = terms.begin(folder, "job", 1, 100, 4)
    assert (first.number, second.number) == (1, 2)
    assert terms.read(folder) == (first, second)
    assert second.restored == 100 and second.world_size == 4


def test_a_world_of_an_earlier_generation_is_kept_out(folder: Folder) -> None:
    terms.begin(folder, "job", 3, None, 1)
    with pytest.raises(Fenced, match=r"a later world \(term 1, generation 3\) writes here now; this one is of gener"):
        terms.begin(folder, "job", 2, None, 1)
    assert terms.begin(folder, "job", 3, None, 1).number == 2
    assert terms.begin(folder, "another job", 0, None, 1).number == 3


def test_many_at_once_get_different_numbers(folder: Folder) -> None:
    found: list[int] = []
    threads = [
        threading.Thread(target=lambda: found.append(terms.begin(folder, "job", 0, None, 1).number)) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == list(range(1, 9))


@pytest.mark.parametrize(
    ("later", "step", "by"),
    [
        ([], 10, None),
        ([term(5, None)], 10, None),  # its own
        ([term(4, None)], 10, None),  # an earlier one
        ([term(6, None)], 10, 6),
        ([term(6, None)], 0, 6),
        ([term(6, 10)], 10, None),  # went on from it
        ([term(6, 11)], 10, None),
        ([term(6, 9)], 10, 6),
        ([term(6, 20), term(7, 5)], 10, 7),
    ],
)
def test_which_term_leaves_a_checkpoint_of_term_five_behind(later: list[Term], step: int, by: int | None) -> None:
    found = terms.supersedes(later, 5, step)
    assert (found.number if found else None) == by


@pytest.mark.parametrize("content", [b"", b"{}", b"[" * 70000, b"x" * 100_000, b'{"number": 2}\n' + b"0" * 64 + b"\n"])
def test_a_term_that_cannot_be_read_keeps_its_number_and_leaves_nothing_behind(folder: Folder, content: bytes) -> None:
    states.begin(folder)
    folder.create(".holdfast/terms/000002.json", content)
    assert [one.number for one in terms.read(folder)] == [1, 2]
    assert terms.supersedes(terms.read(folder), 1, 10**15) is None
    assert states.begin(folder) == 3


def test_a_term_in_the_name_of_another_is_not_believed(folder: Folder) -> None:
    states.begin(folder)
    path = Path(folder.url) / ".holdfast/terms"
    (path / "000007.json").write_bytes((path / "000001.json").read_bytes())
    assert terms.read(folder)[1].restored != terms.read(folder)[0].restored
    assert states.begin(folder) == 8


def test_numbers_do_not_come_again_when_our_notes_are_removed(folder: Folder) -> None:
    for _ in range(3):
        number = states.begin(folder)
    states.save(folder, 10, term=number)
    for path in (Path(folder.url) / ".holdfast/terms").iterdir():
        path.unlink()
    assert states.begin(folder) == number + 1


def test_old_terms_are_forgotten_but_for_the_newest(folder: Folder) -> None:
    for _ in range(12):
        states.begin(folder)
    terms.forget(folder, before=3, keep=2)
    assert [one.number for one in terms.read(folder)] == list(range(3, 13))
    terms.forget(folder, before=100, keep=2)
    assert [one.number for one in terms.read(folder)] == [11, 12]


def test_junk_among_the_terms_is_not_looked_at(folder: Folder) -> None:
    states.begin(folder)
    path = Path(folder.url) / ".holdfast/terms"
    for name in ("1.json", "0000002.json", "000003.json.bak", "readme", "\uff10\uff10\uff10\uff10\uff14.json"):
        (path / name).write_text("x")
    (path / "000005.json").symlink_to("/etc/passwd")
    (path / "000006.json").mkdir()
    assert [one.number for one in terms.read(folder)] == [1]
