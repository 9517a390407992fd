"""The report in words, as JSON, and the figures that it compares with."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.observe import report
from holdfast.observe.goodput import Phase, divide
from holdfast.observe.screen import width
from report.written import Written, killed

BENCHMARKS = Path(__file__).resolve().parents[2] / "docs" / "benchmarks.md"


def test_a_person_reads_where_the_time_went() -> None:
    lines = report.text(killed(base=10).divided(), report.peers())
    assert lines[0] == "r1, train.py, 2 ranks: succeeded, 10.0 s, 1 restart"
    assert lines[1] == "effective training time ratio 46.00 %"
    assert re.search(r"redone work +1\.9 s +19\.00 %", "\n".join(lines))
    assert re.search(r"wall clock +10\.0 s +100\.00 %", "\n".join(lines))
    assert "66 steps done, 20 of them again (30 %)" in lines
    [row] = [line for line in lines if "rank 1: killed by SIGKILL" in line]
    assert re.sub(" +", " ", row.strip()) == "1 0:00:05 30 rank 1: killed by SIGKILL 2.9 s 100 ms 200 ms 700 ms 1.9 s"


def test_what_is_not_known_is_said() -> None:
    told = " ".join(report.text(divide(killed(base=-1).notes[3:-1]), report.peers()))
    assert "the record has no end" in told
    assert "beginning is missing" in told
    assert "generation 1 went on is not known" in told


def test_hostile_words_do_not_reach_the_terminal() -> None:
    job = Written(run_id="r\x1b[2J", program="/x/\x1b]0;owned\x07.py").world(0, 1.0, 1.5, 2.0, 2.0)
    job.incident(1, 0, 5.0, 5.5, restarted=False, headline="\x1b[31mred\nline\u202e").end(6.0, "\x1b[2J")
    for line in report.text(job.divided(), report.peers()):
        assert line.isprintable()


def test_a_narrow_terminal_gets_narrow_rows() -> None:
    lines = report.text(killed(base=10).divided(), report.peers(), 60)
    [row] = [line for line in lines if "SIGKILL" in line]
    assert width(row) == 60 and row.endswith("..")


def test_of_many_incidents_the_costliest_are_shown_in_their_order() -> None:
    job = Written()
    for generation in range(100):
        at_s = 10.0 * generation
        job.world(generation, at_s, at_s, at_s, at_s)
        failed_s, back_s = at_s + 5.0, at_s + 6.0 + generation % 50 / 50
        times_s = (failed_s, failed_s, back_s)
        job.back(generation + 1, generation, failed_s, *times_s)
    job.world(100, 1000.0, 1000.0, 1000.0, 1000.0)
    lines = report.text(job.divided(), report.peers())
    shown = [int(found[1]) for line in lines if (found := re.match(r" +(\d+) .*SIGKILL", line))]
    assert len(shown) == report.MOST
    assert shown == sorted(shown)
    assert set(shown) == {*range(31, 51), *range(81, 101)}


@given(st.lists(st.integers(0, 10**9), min_size=len(Phase), max_size=len(Phase)))
def test_shares_add_up_as_they_are_shown(taken_us: list[int]) -> None:
    whole = killed().divided()
    phases_s = {phase.value: us / 1e6 for phase, us in zip(Phase, taken_us, strict=True)}
    divided = type(whole)(
        **{name: getattr(whole, name) for name in whole.__struct_fields__ if name not in ("phases_s", "wall_s")},
        phases_s=phases_s,
        wall_s=sum(taken_us) / 1e6,
    )
    shown = [f"{share:.2f}" for share in report.shares(divided).values()]
    assert sum(round(100 * float(share)) for share in shown) == (10_000 if sum(taken_us) else 0)
    for phase, share in report.shares(divided).items():
        if sum(taken_us):
            assert share == pytest.approx(100 * phases_s[phase] / divided.wall_s, abs=0.011)


def test_a_program_gets_the_same() -> None:
    found = json.loads(report.as_json(killed(base=10).divided(), report.peers()))
    assert found["v"] == 1
    assert found["ratio"] == 0.46
    assert round(sum(found["phases_s"].values()), 6) == found["wall_s"] == 10.0
    assert (found["steps"], found["steps_redone"], found["restarts"]) == (66, 20, 1)
    [incident] = found["incidents"]
    assert incident["what"] == "rank 1: killed by SIGKILL"
    assert incident["lost_s"] == pytest.approx(sum(incident["phases_s"].values()))
    assert found["elsewhere"]["source"]["command"].startswith("python -m bench.recovery")


# -- other launchers --------------------------------------------------------------------------------------------------


def test_each_restart_would_take_as_much_longer_as_was_measured() -> None:
    peers = report.peers()
    divided = killed().divided()
    for other, peer in zip(report.elsewhere(divided, peers), peers.launchers, strict=True):
        assert other.more_s == pytest.approx(peer.median_s - peers.ours.median_s)
        assert other.ratio == pytest.approx(6.5 / (10.0 + other.more_s))
    assert "did not come back from 4 of 8 kills" in " ".join(report.text(divided, peers))


def test_a_job_without_restarts_is_compared_with_nobody() -> None:
    job = Written().world(0, 1.0, 1.5, 2.0, 2.0).exits(9.0, 0).end(9.0)
    assert "torchrun" not in "\n".join(report.text(job.divided(), report.peers()))


def test_the_figures_are_those_of_the_benchmarks() -> None:
    """Who measures anew has to say so here too."""
    section = BENCHMARKS.read_text().partition("## Recovery from a killed rank")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("|")]
    table = {row[0]: row for row in rows}
    peers = report.peers()
    assert peers.date in section and peers.command in section and peers.versions in section
    for peer in (peers.ours, *peers.launchers):
        _, kills, recovered, median, _, worst, _ = table[peer.name]
        assert (str(peer.kills), f"{peer.recovered} of {peer.kills}") == (kills, recovered)
        assert (f"{peer.median_s * 1000:.0f} ms", f"{peer.worst_s * 1000:.0f} ms") == (median, worst)
