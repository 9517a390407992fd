"""Plans: what is read from them, what is drawn, and what each wrong one is told."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.chaos import plan
from holdfast.chaos.kinds import KINDS
from holdfast.cli import chaos

ROOT = Path(__file__).resolve().parents[2]


def write(folder: Path, text: str) -> str:
    path = folder / "plan.toml"
    path.write_text(text)
    return str(path)


def test_the_examples_can_be_read() -> None:
    short = plan.read(str(ROOT / "examples" / "chaos" / "plan.toml"))
    assert [due.kind.name for due in plan.draw(short, short.seed)[:3]] == ["kill", "exception", "out-of-memory"]
    names = ("campaign", "campaign-nodes", "campaign-etcd")
    campaigns = [plan.read(str(ROOT / "examples" / "chaos" / f"{name}.toml")) for name in names]
    assert sum(map(plan.total, campaigns)) >= 1000
    assert {name for campaign in campaigns for name in plan.kinds_of(campaign)} == KINDS.keys()


def test_a_seed_draws_the_same_faults_and_another_one_others(tmp_path: Path) -> None:
    text = "[random]\ncount = 50\nrate_per_hour = 360\nkinds = { kill = 1, stop = 1, hang = 2 }"
    found = plan.read(write(tmp_path, text))
    assert plan.draw(found, 5) == plan.draw(found, 5)
    assert plan.draw(found, 5) != plan.draw(found, 6)
    dues = plan.draw(found, 5)
    assert [due.number for due in dues] == list(range(1, 51))
    assert {due.kind.name for due in dues} == {"kill", "stop", "hang"}
    assert 5 < sum(due.gap_s or 0 for due in dues) / 50 < 20  # 10 s, on average
    assert {due.struck(4) for due in dues} == {0, 1, 2, 3}


def test_a_weight_of_nothing_never_comes(tmp_path: Path) -> None:
    found = plan.read(write(tmp_path, "[random]\ncount = 200\nevery_s = 1\nkinds = { kill = 1, stop = 0 }"))
    assert {due.kind.name for due in plan.draw(found, 0)} == {"kill"} == plan.kinds_of(found)


KILL = '[[fault]]\nkind = "kill"\n'
WRONG = {
    "seed = \n": "at line 1",
    "seed = 1": "no faults; add a [[fault]] or a [random] table",
    "sed = 1\n" + KILL + "at_s = 1": "there is no key `sed`",
    KILL: "fault 1: one of at_step, at_s, every_s and rate_per_hour is meant, not none",
    KILL + "at_s = 1\nat_step = 2": "every_s and rate_per_hour is meant, not at_step and at_s",
    KILL + "at_s = -1": "fault 1: at_s = -1.0 cannot be",
    KILL + "at_s = 1\ncount = 2": "fault 1: count is for every_s and rate_per_hour",
    KILL + "at_s = 1\ngeneration = 2": "fault 1: generation is for faults inside a rank, and kill is none",
    KILL + 'at_s = 1\nrank = "all"': 'fault 1: rank = "all"; a number or "random" is meant',
    KILL + "at_s = 1\nrank = -1": "fault 1: rank = -1; they are counted from 0",
    KILL + "at_s = 1\nnode = 1": "fault 1: node = 1, of 1",
    KILL + "at_s = 1\nfor_s = 0": "for_s and delay_s are more than 0",
    KILL + "at_step = 'soon'": "at_step: Expected `int | null`, got `str`",
    KILL + "at_s = 1\n\n" + '[[fault]]\nkind = "kil"\nat_s = 1': "fault 2: there is no kind 'kil' (did you mean kill?)",
    '[[fault]]\nkind = "node-loss"\nat_s = 1': "fault 1: node-loss needs nodes = 2 or more",
    'nodes = 2\n[[fault]]\nkind = "etcd-leader-loss"\nat_s = 1': 'needs backend = "etcd"',
    "nodes = 0\n" + KILL + "at_s = 1": "nodes = 0",
    "[random]\ncount = 1\nkinds = { kill = 1 }": "[random]: one of every_s and rate_per_hour is meant",
    "[random]\ncount = 1\nevery_s = 1\nkinds = { kill = 0 }": "[random]: kinds has a weight of more than 0",
    "[random]\ncount = 0\nevery_s = 1\nkinds = { kill = 1 }": "[random]: count = 0; at least 1 is meant",
    "[random]\ncount = 2000000\nevery_s = 1\nkinds = { kill = 1 }": "2000000 faults; at most 1000000 are meant",
}


@pytest.mark.parametrize("text", WRONG, ids=WRONG.values())
def test_a_wrong_plan_is_told_in_one_line(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, text)
    assert chaos.main(["check", path]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"holdfast chaos: {path}: ")
    assert WRONG[text] in told
    assert told.count("\n") == 1


def test_check_says_what_a_plan_would_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert chaos.main(["check", write(tmp_path, KILL + "every_s = 1\ncount = 3")]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split() == ["3", "faults", "from", "seed", "0"]


def test_check_says_what_is_missing_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("PATH", str(tmp_path))
    path = write(tmp_path, 'nodes = 2\nbackend = "etcd"\n[[fault]]\nkind = "full-disk"\nat_s = 1')
    assert chaos.main(["check", path]) == 1
    told = capsys.readouterr().err
    assert told == f"holdfast chaos: {path} needs root, for full-disk and the program etcd, which is not here\n"


def test_every_kind_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert chaos.main(["kinds"]) == 0
    listed = capsys.readouterr().out
    assert [name for name in KINDS if f"\n{name} " not in "\n" + listed] == []


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["check", "/nowhere.toml"], "/nowhere.toml: No such file or directory"),
        (["run", "plan.toml"], "run: no job; add -- and what you would give to holdfast run"),
        (["run", "plan.toml", "--", "--log-dir=x", "train.py"], "run: --log-dir stands before the --"),
        (["judge", "/nowhere"], "/nowhere is no folder of a campaign that has ended"),
    ],
)
def test_wrong_use_is_told_in_one_line(argv: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert chaos.main(argv) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"holdfast chaos: {told}")
    assert said.count("\n") == 1


def test_what_a_rank_would_do_fits_a_kind_that_exists() -> None:
    for kind in KINDS.values():
        assert bool(kind.causes) == (kind.answer == "one incident"), kind.name
        assert not kind.names_rank or kind.causes, kind.name
