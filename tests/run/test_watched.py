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


@pytest.mark.parametrize(
    ("story", "flags", "said"),
    [
        ("no_more_heartbeats", BEATS, "no heartbeat for "),
        ("no_first_heartbeat", ("--ft-initial-rank-heartbeat-timeout=3",), "no first heartbeat for "),
        ("stays_in_a_section", SECTIONS, "section 'data' open for "),
        ("stays_in_an_outer_section", SECTIONS, "section 'outer' open for "),
        ("stays_outside", OUTSIDE, "outside of any section for "),
    ],
)
def test_a_limit_that_passes_is_a_hang(job: Job, story: str, flags: tuple[str, ...], said: str) -> None:
    assert job.run(WATCHED, story, max_restarts=1, flags=flags) == 0
    [incident] = job.incidents()
    assert (incident["kind"], incident["rank"]) == ("hang", 1)
    assert incident["headline"].startswith(said)
    assert incident["phases_s"]["detect"] >= 1
    [folder] = (job.run_dir / "stacks").iterdir()
    assert f"in {story}" in (folder / "rank_1.txt").read_text()
    assert f"rank 1 hangs: {said}" in job.err
    assert job.leftovers() == []


@pytest.mark.parametrize(
    ("story", "flags", "said"),
    [
        ("no_more_heartbeats", BEATS, "no heartbeat for "),
        ("stays_in_an_outer_section", SECTIONS, "section 'outer' open for "),
    ],
)
def test_the_same_for_a_program_that_is_started_cold(job: Job, story: str, flags: tuple[str, ...], said: str) -> None:
    assert job.run(WATCHED, story, max_restarts=1, flags=("--cold-start", *flags)) == 0
    [incident] = job.incidents()
    assert (incident["kind"], incident["rank"]) == ("hang", 1)
    assert incident["headline"].startswith(said)
    assert job.leftovers() == []


# -- limits that do not -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("story", "flags"),
    [
        ("ends_all_sections", SECTIONS),
        ("shuts_down_in_time", (*BEATS, *SECTIONS, *OUTSIDE)),
        ("never_begins", (*BEATS, *SECTIONS, *OUTSIDE)),
        ("finishes_early", (*BEATS, *SECTIONS, *OUTSIDE)),
        ("ends_slowly", (*BEATS, *SECTIONS, *OUTSIDE)),
    ],
)
def test_a_rank_that_is_done_or_never_began_is_not_held_to_limits(job: Job, story: str, flags: tuple[str, ...]) -> None:
    assert job.run(WATCHED, story, flags=flags) == 0
    assert job.events("rank.hung") == []
    assert job.leftovers() == []


def test_a_death_before_the_first_heartbeat_does_not_blind_later_monitors(job: Job) -> None:
    assert job.run(WATCHED, "dies_before_the_first_heartbeat", max_restarts=3, flags=BEATS) == 0
    assert causes(job) == [("error", 1), ("error", 1), ("hang", 1)]
    assert job.leftovers() == []


# -- learned timeouts -------------------------------------------------------------------------------------------------


def test_learned_timeouts_outlive_their_world(job: Job) -> None:
    flags = ("--ft-safety-factor=40", "--ft-rank-section-timeouts=data:9")
    assert job.run(WATCHED, "learns", max_restarts=1, flags=flags) == 0
    told = job.news.seen
    learned = [line["learned"] for line in told if "learned" in line]
    found = {(line["generation"], line["rank"]): line["found"] for line in told if "found" in line}
    assert found[0, 0]["section"] == {"data": 9}
    assert found[0, 0]["state"] == {"current_timeouts": {}}
    assert learned[0] == learned[1] == found[1, 0] == found[1, 1]
    assert 40 * 0.06 <= learned[0]["section"]["data"] < 9  # that of the slower rank, and not what was configured
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


@pytest.mark.parametrize("then", ["go on", "raise"])
def test_continue_changes_nothing(job: Job, then: str) -> None:
    assert job.run(WATCHED, "asks", "Continue", then, max_restarts=1) == 0
    [asked] = job.events("rank.asked")
    assert asked["action"] == "continue"
    assert causes(job) == ([("error", 1)] if then == "raise" else [])


# -- a page that something else wrote to ------------------------------------------------------------------------------


@pytest.mark.parametrize("byte", ["255", "0"])
def test_a_corrupt_page_is_told_once_and_is_no_hang(job: Job, byte: str) -> None:
    flags = (*BEATS, *SECTIONS, "--ft-initial-rank-heartbeat-timeout=3")
    assert job.run(WATCHED, "scribbles", byte, flags=flags) == 0
    assert len(job.events("beacon.corrupt")) == 1
    assert job.err.count("the beacon of rank 1 is corrupt") == 1
    assert job.events("rank.hung") == []
    [refused] = [line["refused"] for line in job.news.seen if "refused" in line]
    assert "corrupt" in refused
    assert job.leftovers() == []


def test_what_a_corrupt_page_says_does_not_count(job: Job) -> None:
    """A rank that writes where it must not often dies of it. Its last words are no measure of progress."""
    assert job.run(WATCHED, "scribbles_and_dies", max_restarts=4, flags=("--max-no-progress-restarts=2",)) == 0
    assert causes(job) == [("error", 1)] * 4
    assert max(incident["steps"] for incident in job.incidents()) <= 5
    assert job.events("job.ended")[0]["steps"] <= 25
    assert job.leftovers() == []
