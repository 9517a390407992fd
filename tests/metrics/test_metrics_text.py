"""The text that Prometheus scrapes: what it says of a job, and that nothing a job is called can break it."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from holdfast.control.causes import Kind
from holdfast.observe import record
from holdfast.observe.metrics import families, render
from holdfast.observe.state import State, fold
from metrics.prometheus_server import promtool
from metrics.told import CLOCK_S, Told, full

ROOT = Path(__file__).resolve().parents[2]
BEGAN_S = 1_800_000_000.0
SAMPLE = re.compile(r'(\w+)\{((?:\w+="(?:[^"\\\n]|\\.)*",?)+)\} (\S+)')


def values(state: State, now_s: float | None = None) -> dict[str, str]:
    """By name and labels, without the run's id."""
    found: dict[str, str] = {}
    for line in render(state, now_s).splitlines():
        if not line.startswith("#"):
            sample = SAMPLE.fullmatch(line)
            assert sample is not None, line
            labels = re.sub(r'^run_id="(?:[^"\\]|\\.)*",?', "", sample[2])
            found[f"{sample[1]}{{{labels}}}" if labels else sample[1]] = sample[3]
    return found


def test_a_full_state_is_told() -> None:
    found = values(full("r", BEGAN_S).state)
    assert found["holdfast_up"] == "1"
    assert found['holdfast_job_info{program="train.py",version="0.1.0",node="n1"}'] == "1"
    assert found["holdfast_start_timestamp_seconds"] == repr(BEGAN_S)
    assert found["holdfast_step"] == "61"
    assert found["holdfast_steps_total"] == "110"  # 50 before the restart, 60 since
    assert found["holdfast_step_duration_seconds"] == "0.5"
    assert found["holdfast_loss"] == "0.75"
    assert found["holdfast_samples_per_second"] == "640.0"
    assert found["holdfast_steps_left"] == "900"
    assert found["holdfast_world_size"] == "4"
    assert found["holdfast_nodes"] == "2"
    assert found["holdfast_generation"] == "1"
    assert found["holdfast_restarts_total"] == "1"
    assert found["holdfast_restarts_limit"] == "9"
    assert found["holdfast_saving_seconds_total"] == "0.5"  # of the world that runs, too
    assert found["holdfast_faults_injected_total"] == "1"
    assert found['holdfast_rank_steps{rank="3",node="n2"}'] == "60"
    assert found['holdfast_rank_step_duration_seconds{rank="1",node="n1"}'] == "0.25"
    assert found['holdfast_rank_own_duration_seconds{rank="3",node="n2"}'] == "0.125"
    assert found['holdfast_rank_section_duration_seconds{rank="2",node="n2"}'] == "0.03125"
    assert found["holdfast_standby_processes"] == "1"
    assert found['holdfast_standby_memory_bytes{memory="host"}'] == "4096"
    assert found['holdfast_standby_memory_bytes{memory="gpu"}'] == "1024"
    straggles = {name: value for name, value in found.items() if "straggles" in name}
    assert straggles == {f'holdfast_rank_straggles{{rank="{n}",node="n{n // 2 + 1}"}}': "01"[n == 3] for n in range(4)}


def test_times_are_those_of_the_wall_clock() -> None:
    found = values(full("r", BEGAN_S).state)
    assert float(found["holdfast_last_progress_timestamp_seconds"]) == BEGAN_S + 55
    assert float(found["holdfast_checkpoint_last_timestamp_seconds"]) == BEGAN_S + 20
    assert float(found["holdfast_last_event_timestamp_seconds"]) == BEGAN_S + 57
    assert float(found['holdfast_node_last_event_timestamp_seconds{node="n2"}']) == BEGAN_S + 56


def test_lost_time_and_incidents_are_those_of_the_record() -> None:
    told = full("r", BEGAN_S)
    told.fail(60.0, 1, Kind.LOST_NODE)
    found = values(told.state)
    phases = {"detect": 4.0, "stop": 2.0, "wait": 1.0, "start": 0.5, "first step": 8.0, "failed again": 0.0}
    assert {phase: float(found[f'holdfast_lost_seconds_total{{phase="{phase}"}}']) for phase in phases} == phases
    assert sum(phases.values()) == told.state.lost_s
    kinds = {kind.value: found[f'holdfast_incidents_total{{kind="{kind.value}"}}'] for kind in Kind}
    assert kinds == {kind.value: "1" if kind in (Kind.HANG, Kind.LOST_NODE) else "0" for kind in Kind}


def test_checkpoints() -> None:
    told = Told("r", BEGAN_S)
    assert not [name for name in values(told.state) if "checkpoint_last" in name]
    told.save(20.0, 40)
    told.note(25.0, record.CheckpointFailed(45, "no space left on device"))
    found = values(told.state)
    assert found["holdfast_checkpoint_last_step"] == "40"
    assert found["holdfast_checkpoint_last_size_bytes"] == "4096"
    assert found["holdfast_checkpoint_last_duration_seconds"] == "1.5"
    assert found["holdfast_checkpoint_failures_total"] == "1"


@pytest.mark.parametrize(
    ("outcome", "state"),
    [("succeeded", "succeeded"), ("preempted", "preempted"), ("out-of-memory", "failed"), ("error", "failed")],
)
def test_an_end(outcome: str, state: str) -> None:
    told = full("r", BEGAN_S)
    told.end(60.0, outcome)
    found = values(told.state, BEGAN_S + 1_000)
    assert found["holdfast_up"] == "0"
    assert [name for name, value in found.items() if name.startswith("holdfast_state{") and value == "1"] == [
        f'holdfast_state{{state="{state}"}}'
    ]
    assert found[f'holdfast_outcome_info{{outcome="{outcome}"}}'] == "1"
    assert found["holdfast_wall_seconds_total"] == "60.0"  # it does not run on


def test_an_agent_that_is_gone_without_a_word() -> None:
    told = full("r", BEGAN_S)
    found = {line.partition(" ")[0]: line for line in render(told.state, BEGAN_S + 60, is_gone=True).splitlines()}
    assert found['holdfast_up{run_id="r"}'].endswith(" 0")
    assert found['holdfast_state{run_id="r",state="failed"}'].endswith(" 1")
    told.end(60.0, "succeeded")
    assert 'state="succeeded"} 1' in render(told.state, is_gone=True), "unless there is a word"


def test_the_job_is_as_long_as_its_record_or_until_now() -> None:
    told = Told("r", BEGAN_S)
    assert values(told.state)["holdfast_wall_seconds_total"] == "10.0"
    assert values(told.state, BEGAN_S + 100)["holdfast_wall_seconds_total"] == "100.0"
    assert values(told.state, BEGAN_S - 100)["holdfast_wall_seconds_total"] == "10.0"  # the clock was set back


def test_states_of_a_job_under_way() -> None:
    def standing(state: State) -> list[str]:
        return [name for name, value in values(state).items() if name.startswith("holdfast_state{") and value == "1"]

    assert standing(State()) == ['holdfast_state{state="starting"}']
    told = Told("r", BEGAN_S)
    assert standing(told.state) == ['holdfast_state{state="training"}']
    opened = record.IncidentOpened(
        0, 0, Kind.ERROR, "x", "restart", True, failed_at_s=CLOCK_S + 12, stopped_at_s=CLOCK_S + 13
    )
    told.note(13.0, opened)
    assert standing(told.state) == ['holdfast_state{state="recovering"}']


def test_progress_is_a_step_and_not_a_look() -> None:
    """A hung job is looked at, too: its ranks go from training to saving, say, without a step."""
    told = Told("r", BEGAN_S)
    before = values(told.state)["holdfast_last_progress_timestamp_seconds"]
    told.note(40.0, record.Progress(0, 0, 50, (50, 50), 0, (0, 0), (), 0.25, "33"))
    assert values(told.state)["holdfast_last_progress_timestamp_seconds"] == before
    assert values(told.state)['holdfast_ranks{state="saving"}'] == "2"
    told.progress(41.0, 0, 51)
    assert float(values(told.state)["holdfast_last_progress_timestamp_seconds"]) == BEGAN_S + 41


def test_of_what_is_unknown_nothing_is_said() -> None:
    """A 0 would be believed: a loss of 0, a checkpoint in 1970."""
    found = values(State())
    assert not [name for name in found if re.search("loss|timestamp|checkpoint_last|world_size|rank_|duration", name)]
    assert found["holdfast_step"] == "0"
    middle = State()  # of a record whose beginning is lost
    middle.take(record.Noted(record.CheckpointSaved(3), 7.0, "", "n1", 9))
    assert values(middle)["holdfast_checkpoint_last_step"] == "3"
    assert not [name for name in values(middle) if "timestamp" in name]


def test_counters_never_go_back_while_a_job_goes_on() -> None:
    told = Told("r", BEGAN_S)
    before: dict[str, float] = {}

    def grown() -> None:
        for family in families(told.state):
            for labels, value in family.samples if family.grows else ():
                key = f"{family.name}{labels}"
                assert value >= before.get(key, 0.0), key
                before[key] = value

    for generation in range(3):
        at_s = 100.0 * (generation + 1)
        told.progress(at_s, generation, 20, saving_s=0.5)
        grown()
        told.fail(at_s + 10, generation)
        grown()
        told.progress(at_s + 20, generation + 1, 5, saving_s=0.125)
        grown()


def rendered(name: str) -> str:
    """A job and a node of that name."""
    told = Told(name, BEGAN_S)
    told.note(11.0, record.JobStarted(name, name, 1, {"path": name}, 8), name)
    launched = record.WorldLaunched(1, 1, 1, 0, 0, 1, local_size=1)
    told.note(12.0, launched, name)
    return render(told.state)


@pytest.mark.parametrize(
    "name", ['a"b', "a\\b", "a\nb", 'x"} 1\nholdfast_up{run_id="y', "\\n", "é🙂", "\udce9", "\r\x00", ""]
)
def test_a_hostile_name_stays_a_name(name: str) -> None:
    text, plain = rendered(name), rendered("plain")
    text.encode()
    assert text.count("\nholdfast_up{") == text.count("# TYPE holdfast_up") == 1
    assert len(text.split("\n")) == len(plain.split("\n")), "no line is broken in two"
    checked = promtool("check", "metrics", given=text)
    assert checked.returncode == 0, checked.stderr


def test_numbers_that_are_none() -> None:
    told = Told("r", BEGAN_S)
    for loss, shown in ((float("nan"), "NaN"), (float("inf"), "+Inf"), (float("-inf"), "-Inf"), (1e-9, "1e-09")):
        told.train(20.0, 50, loss)
        assert values(told.state)["holdfast_loss"] == shown


def test_prometheus_finds_nothing_to_say_against_it() -> None:
    told = full("r", BEGAN_S)
    told.end(60.0, "succeeded")
    checked = promtool("check", "metrics", given=render(told.state, BEGAN_S + 60))
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def test_a_record_in_a_file_is_told_as_well(tmp_path: Path) -> None:
    """By the same types, encoded and read again."""
    lines = [
        record.JobStarted("r", "n1", 1, {"path": "train.py"}, 7, clock_s=CLOCK_S),
        record.WorldLaunched(0, 1, 0, local_size=1),
        record.Progress(0, 0, 5, (5,), 0, (500_000,), (250_000,), 0.0, "1"),
    ]
    with open(tmp_path / record.NAME, "wb") as file:
        for seq, what in enumerate(lines):
            line = {
                "v": 1,
                "node": "n1",
                "seq": seq,
                "name": what.NAME,
                "at_s": float(seq),
                "time": "2027-01-15T08:00:00.000Z",
            }
            file.write(msgspec.json.encode({**line, "data": what}) + b"\n")
    found = values(fold(record.read(tmp_path / record.NAME)))
    assert found['holdfast_rank_own_duration_seconds{rank="0",node="n1"}'] == "0.25"
    assert float(found["holdfast_last_progress_timestamp_seconds"]) == BEGAN_S + 2


def test_the_document_names_all_and_no_other() -> None:
    told = full("r", BEGAN_S)
    told.end(60.0, "succeeded")
    ours = {family.name for family in families(told.state)}
    rows = re.findall(r"(?m)^\| `(holdfast_\w+)`", (ROOT / "docs" / "metrics.md").read_text())
    assert sorted(rows) == sorted(ours)
    for path in (ROOT / "monitoring").iterdir():
        assert set(re.findall(r"\bholdfast_\w+", path.read_text())) <= ours, path
