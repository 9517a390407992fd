"""Beacons: what a rank writes into its page the agent reads, but for the lease, and nobody else's page is touched."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from holdfast.worker import beacon
from holdfast.worker.beacon import PAGE_BYTES, Beacon, Page


@pytest.fixture
def pages_fd() -> Iterator[int]:
    fd = beacon.make(ranks=3)
    yield fd
    os.close(fd)


def test_a_world_has_a_page_for_each_rank(pages_fd: int) -> None:
    assert os.fstat(pages_fd).st_size == 3 * PAGE_BYTES


def test_a_page_that_nobody_has_written_has_no_steps(pages_fd: int) -> None:
    page = Page(pages_fd, 1)
    assert (page.steps, page.last_step_s) == (None, 0.0)


def test_a_page_is_read_while_its_rank_steps(pages_fd: int) -> None:
    rank, page = Beacon(pages_fd, 0, generation=2), Page(pages_fd, 0)
    assert page.steps == 0
    assert [rank.step_done() for _ in range(3)] == [1, 2, 3]
    assert page.steps == 3
    rank.step_done()
    assert page.steps == 4


def test_the_time_of_the_last_step_is_on_this_machines_clock(pages_fd: int) -> None:
    rank, page = Beacon(pages_fd, 0, generation=0), Page(pages_fd, 0)
    before_s = time.monotonic()
    rank.step_done()
    first_s = page.last_step_s
    rank.step_done()
    assert before_s <= first_s <= page.last_step_s <= time.monotonic()


def test_ranks_do_not_touch_each_others_pages(pages_fd: int) -> None:
    Beacon(pages_fd, 0, generation=0).step_done()
    last = Beacon(pages_fd, 2, generation=0)
    last.step_done()
    last.step_done()
    assert [Page(pages_fd, slot).steps for slot in range(3)] == [1, None, 2]


def test_a_page_without_the_mark_is_not_believed(pages_fd: int) -> None:
    os.pwrite(pages_fd, b"\xff" * 24, 8)
    assert Page(pages_fd, 0).steps is None


# -- the lease --------------------------------------------------------------------------------------------------------


def test_a_rank_that_nobody_gave_a_lease_has_none(pages_fd: int) -> None:
    assert not Beacon(pages_fd, 0, generation=0).has_lease


def test_a_rank_sees_the_lease_that_the_agent_gives_it_and_when_it_is_over(pages_fd: int) -> None:
    rank, page = Beacon(pages_fd, 0, generation=0), Page(pages_fd, 0)
    page.lease(time.monotonic() + 1000.0)
    assert (rank.has_lease, rank.lease_is_over) == (True, False)
    page.lease(time.monotonic() - 0.001)
    assert (rank.has_lease, rank.lease_is_over) == (True, True)
    page.lease(time.monotonic() + 1000.0)
    assert not rank.lease_is_over


def test_a_lease_that_was_given_before_the_rank_was_there_is_kept(pages_fd: int) -> None:
    Page(pages_fd, 1).lease(time.monotonic() + 1000.0)
    rank = Beacon(pages_fd, 1, generation=3)
    assert rank.has_lease
    assert not rank.lease_is_over


def test_a_lease_is_its_ranks_own_and_touches_nothing_else(pages_fd: int) -> None:
    ranks = [Beacon(pages_fd, slot, generation=0) for slot in range(3)]
    ranks[1].step_done()
    Page(pages_fd, 1).lease(1.0)
    assert [rank.has_lease for rank in ranks] == [False, True, False]
    ranks[1].step_done()
    assert (Page(pages_fd, 1).steps, ranks[1].lease_is_over) == (2, True)


# -- the file ---------------------------------------------------------------------------------------------------------


def test_a_page_can_be_read_after_the_file_is_closed() -> None:
    fd = beacon.make(1)
    rank, page = Beacon(fd, 0, generation=0), Page(fd, 0)
    os.close(fd)
    rank.step_done()
    assert page.steps == 1


def test_the_file_has_no_name_and_does_not_survive_an_exec(pages_fd: int) -> None:
    assert os.fstat(pages_fd).st_nlink == 0
    assert not os.get_inheritable(pages_fd)


def test_the_steps_of_another_process_outlive_it(pages_fd: int) -> None:
    steps = """
import os, signal, sys
from holdfast.worker.beacon import Beacon
beacon = Beacon(int(sys.argv[1]), 1, 0)
for _ in range(1000):
    beacon.step_done()
os.kill(os.getpid(), signal.SIGKILL)
"""
    ended = subprocess.run([sys.executable, "-c", steps, str(pages_fd)], pass_fds=[pages_fd])
    assert ended.returncode == -9
    assert Page(pages_fd, 1).steps == 1000
