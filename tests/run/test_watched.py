"""Scripts that are watched by what they say about themselves: heartbeats, sections, learned timeouts and requests."""

from __future__ import annotations

from typing import Any

import pytest

from harness import SCRIPTS, Job

WATCHED = SCRIPTS / "watched.py"
BEATS = ("--ft-rank-heartbeat-timeout=1",)
SECTIONS = ("--ft-rank-section-timeouts=data:1,outer:1",)
OUTSIDE = ("--ft-rank-out-of-section-timeout=1",)


def causes(job: Job) -> list[tuple[Any, ...]]:
    return [(incident["kind"], incident["rank"]) for incident in job.incidents()]


# -- limits that pass -------------------------------------------------------------------------------------------------


LIMITS = (*BEATS, *SECTIONS, "--ft-initial-rank-heartbeat-timeout=3")
SAID = {
    "no_first_heartbeat": "no first heartbeat for ",
    "no_more_heartbeats": "no heartbeat for ",
    "stays_in_a_section": "section 'data' open for ",
    "stays_in_an_outer_section": "section 'outer' open for ",
    "stays_outside": "outside of any section for ",
}


@pytest.mark.parametrize(
    ("stories", "flags"),
    [
        (("no_first_heartbeat", "no_more_heartbeats"), LIMITS),
        (("stays_in_a_section", "stays_in_an_outer_section"), LIMITS),
        (("stays_outside",), OUTSIDE),
    ],
)
def test_a_limit_that_passes_is_a_hang(job: Job, stories: tuple[str, ...], flags: tuple[str, ...]) -> None:
    """One a world. The limits are the script's own, so the second hang has no more time than the first."""
    assert job.run(WATCHED, "+".join(stories), max_restarts=len(stories), flags=flags) == 0
    folders = sorted((job.run_dir / "stacks").iterdir())
    for story, incident, folder in zip(stories, job.incidents(), folders, strict=True):
        assert (incident["kind"], incident["rank"]) == ("hang", 1)
        assert incident["headline"].startswith(SAID[story])
        assert incident["phases_s"]["detect"] >= 1
        assert f"in {story}" in (folder / "rank_1.txt").read_text()
        assert f"rank 1 hangs: {SAID[story]}" in job.err
    assert job.leftovers() == []


def test_the_same_for_a_program_that_is_started_cold(job: Job) -> None:
    stories = ("no_more_heartbeats", "stays_in_an_outer_section")
    flags = ("--cold-start", *BEATS, *SECTIONS)
    assert job.run(WATCHED, "+".join(stories), max_restarts=2, flags=flags) == 0
    for story, incident in zip(stories, job.incidents(), strict=True):
        assert (incident["kind"], incident["rank"]) == ("hang", 1)
        assert incident["headline"].startswith(SAID[story])
    assert job.leftovers() == []


# -- limits that do not -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("story", "nproc", "flags"),
    [("ends_all_sections", 2, SECTIONS), ("is_not_held_to_limits", 5, (*BEATS, *SECTIONS, *OUTSIDE))],
)
def test_a_rank_that_is_done_or_never_began_is_not_held_to_limits(
    job: Job, story: str, nproc: int, flags: tuple[str, ...]
) -> None:
    assert job.run(WATCHED, story, nproc=nproc, flags=flags) == 0
    assert job.events("rank.hung") == []
    assert job.leftovers() == []


@pytest.mark.long
def test_a_death_before_the_first_heartbeat_does_not_blind_later_monitors(job: Job) -> None:
    assert job.run(WATCHED, "dies_before_the_first_heartbeat", max_restarts=3, flags=BEATS) == 0
    assert causes(job) == [("error", 1), ("error", 1), ("hang", 1)]
    assert job.leftovers() == []


# -- learned timeouts -------------------------------------------------------------------------------------------------


def test_learned_timeouts_outlive_their_world(job: Job) -> None:
    flags = ("--ft-safety-factor=40", "--ft-rank-section-timeouts=data:900")
    assert job.run(WATCHED, "learns", max_restarts=1, flags=flags) == 0
    told = job.news.seen
    learned = [line["learned"] for line in told if "learned" in line]
    found = {(line["generation"], line["rank"]): line["found"] for line in told if "found" in line}
    assert found[0, 0]["section"] == {"data": 900}
    assert found[0, 0]["state"] == {"current_timeouts": {}}
    assert learned[0] == learned[1] == found[1, 0] == found[1, 1]
    assert 40 * 0.06 <= learned[0]["section"]["data"] < 900  # that of the slower rank, and not what was configured
    assert learned[0]["state"]["current_timeouts"]["section"]["calculated_sections"] == ["data"]
    assert causes(job) == [("error", 1)]


# -- requests ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("then", ["wait", "raise"])
def test_a_shutdown_ends_the_job_whatever_follows(job: Job, then: str) -> None:
    assert job.run(WATCHED, "asks", "ShutdownWorkload", then, max_restarts=5) == 93
    assert len(job.events("world.launched")) == 1
    [asked] = job.events("rank.asked")
    assert (asked["rank"], asked["action"], asked["description"]) == (1, "shutdown", "the disk is on fire")
    [incident] = job.incidents()
    assert (incident["kind"], incident["rank"], incident["action"]) == ("requested", 1, "the job ends")
    assert "the job was ended: rank 1: asked to end the job: the disk is on fire" in job.err
    assert job.leftovers() == []


def test_the_only_node_cannot_be_excluded(job: Job) -> None:
    flags = ("--exit-code-from-cause",)
    assert job.run(WATCHED, "asks", "ExcludeThisNode", "wait", max_restarts=5, flags=flags) == 86
    assert len(job.events("world.launched")) == 1
    assert causes(job) == [("lost-node", 1)]
    assert "asked to exclude its node: the disk is on fire" in job.err
    assert "there is no other node to go on with" in job.events("job.ended")[0]["reason"]
    assert job.leftovers() == []


def test_continue_changes_nothing(job: Job) -> None:
    assert job.run(WATCHED, "asks", "Continue", "raise+go on", max_restarts=1) == 0
    assert [asked["action"] for asked in job.events("rank.asked")] == ["continue"] * 2
    assert causes(job) == [("error", 1)]


# -- a page that something else wrote to ------------------------------------------------------------------------------


def test_a_corrupt_page_is_told_once_and_is_no_hang(job: Job) -> None:
    """Rank 1 fills its page with ones, rank 2 with zeros."""
    assert job.run(WATCHED, "scribbles", "255", "0", nproc=3, flags=LIMITS) == 0
    assert len(job.events("beacon.corrupt")) == 2
    assert [job.err.count(f"the beacon of rank {rank} is corrupt") for rank in (1, 2)] == [1, 1]
    assert job.events("rank.hung") == []
    refused = {line["rank"]: line["refused"] for line in job.news.seen if "refused" in line}
    assert sorted(refused) == [1, 2]
    assert all("corrupt" in text for text in refused.values())
    assert job.leftovers() == []


def test_what_a_corrupt_page_says_does_not_count(job: Job) -> None:
    """A rank that writes where it must not often dies of it. Its last words are no measure of progress."""
    assert job.run(WATCHED, "scribbles_and_dies", max_restarts=4, flags=("--max-no-progress-restarts=2",)) == 0
    assert causes(job) == [("error", 1)] * 4
    # None if rank 1 was gone before rank 0 had begun: they do not wait for each other.
    assert max(incident["steps"] or 0 for incident in job.incidents()) <= 5
    assert job.events("job.ended")[0]["steps"] <= 25
    assert job.leftovers() == []
