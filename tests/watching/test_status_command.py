"""`holdfast status` and `holdfast ls`, on records of jobs that never ran."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from holdfast.agent import doorbell
from holdfast.cli import logs, ls, status, top
from holdfast.control.causes import Kind
from holdfast.observe import record
from watching.jobs_on_disk import Written, here

HOSTILE = "\x1b]0;owned\x07\x1b[2J\u202egnp\r\n\x9b31m"


def shown(capsys: pytest.CaptureFixture[str], job: Written | Path, *flags: str) -> tuple[int, str]:
    code = status.main([str(job.run_dir if isinstance(job, Written) else job), *flags])
    return code, capsys.readouterr().out


def told(capsys: pytest.CaptureFixture[str], job: Written) -> dict[str, Any]:
    code, text = shown(capsys, job, "--json")
    found: dict[str, Any] = json.loads(text)
    assert found["exit_code"] == code
    return found


def dead_pid() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


# -- what it says -----------------------------------------------------------------------------------------------------


def test_a_job_that_trains(alone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = Written(tmp_path).trains()
    job.note(3591, record.Trained(step=40, epoch="2", loss=1.25, samples_per_s=512.0, steps_left=960))
    job.note(3580, record.CheckpointSaved(step=38, bytes=1_200_000_000, seconds=1.5))
    code, text = shown(capsys, job)
    assert code == 0
    *lines, top, report = text.splitlines()
    assert lines == [
        "train.py, job made: training for 59 min",
        "  step        40 of 1,000, 250 ms each, 512 samples/s, loss 1.25, epoch 2, about 4 min left",
        "  world       generation 0, 2 ranks: 2 training",
        "  restarts    0 of 3",
        "  lost        nothing, no incident",
        "  checkpoint  step 38, 20 s ago, 1.2 GB of a rank in 1.5 s",
        "",
    ]
    assert top.split("  ")[1] == f"holdfast top {job.run_dir}"
    assert report.split("  ")[1] == f"holdfast report {job.run_dir}"


def test_an_incident_has_a_cause_someone_to_blame_and_a_cost(
    alone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Written(tmp_path).trains().fails(1800).launches(1801, 1).steps(1802, 1)
    job.progresses(3595, (9, 9), 1, base=20, step_us=(500_000, 400_000))
    code, text = shown(capsys, job)
    assert code == 0
    assert "  step        29, 500 ms each\n" in text
    assert "  restarts    1 of 3\n  lost        2.0 s in 1 incident, 0.056 % of the time\n" in text
    assert ", generation 0, signal: rank 1: killed by SIGKILL at step 27\n" in text
    assert "  1. 30 min ago, " in text
    assert "      restart 1 of 3; took rank 0 with it; back after 2.0 s\n" in text


def test_a_job_that_recovers_says_for_how_long(alone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = shown(capsys, Written(tmp_path).trains().fails(3590, back_s=None))
    assert code == 3
    assert text.startswith("train.py, job made: recovering for 10.0 s: rank 1: killed by SIGKILL\n")
    assert "lost so far" in text


def test_the_rank_to_blame_has_a_log(alone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = Written(tmp_path).trains().fails(3590, back_s=None, restarted=False).prints(0, 1, {"stdout": b"x\n"})
    job.ends(3600, "signal", "rank 1: killed by SIGKILL")
    code, text = shown(capsys, job)
    assert code == 1
    assert "failed (signal) 0 s ago, after 60 min: rank 1: killed by SIGKILL\n" in text
    assert f"  holdfast logs {job.run_dir} --rank 1 --generation 0  " in text


def test_stragglers_and_spares_are_named(alone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = Written(tmp_path).starts().starts(node="n2:5").launches(5, size=3).steps(8, ranks=(0, 1, 2))
    job.progresses(3590, (40, 40, 40), step_us=(900_000,) * 3, own_us=(200_000, 800_000, 200_000))
    job.note(3591, record.StragglerFound(0, 1, 0.8, 0.2, 9.0, 5))
    code, text = shown(capsys, job)
    assert code == 0
    assert "  world       generation 0, 3 ranks on 1 node: 3 training; 1 spare node\n" in text
    assert "  stragglers  rank 1; rank 1 on n1 takes 800 ms a step for itself, where most take 200 ms\n" in text
    job.progresses(3592, (41,) * 3, section_us=(90_000, 10_000, 10_000)).note(3593, record.StragglerGone(0, 1))
    job.note(3594, record.StragglerFound(0, 0, 0.09, 0.01, 9.0, 3, by="section"))
    assert (
        "  stragglers  rank 0; rank 0 on n1 takes 90 ms a step in its sections, where most take 10 ms\n"
        in shown(capsys, job)[1]
    )


def test_processes_that_stand_by_are_counted(alone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = Written(tmp_path).trains().note(3591, record.StandbyReady(0, 77, 312_000_000))
    assert "2 training\n  standby     1 process, 312 MB of memory\n" in shown(capsys, job)[1]
    job.note(3592, record.StandbyReady(1, 78, 312_000_000, 1_500_000_000))
    assert "  standby     2 processes, 624 MB of memory, 1.5 GB on GPUs\n" in shown(capsys, job)[1]
    assert [each["pid"] for each in told(capsys, job)["standbys"]] == [77, 78]


def test_a_job_without_steps_for_long_does_not_just_train(
    alone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Written(tmp_path).starts().launches(5).steps(8).progresses(3000, (40, 40), step_us=(250_000, 250_000))
    assert shown(capsys, job)[1].startswith(
        "train.py, job made: training for 59 min, but no step was seen for 10 min\n"
    )


def test_of_many_incidents_the_last_are_shown(alone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = Written(tmp_path).trains()
    for number in range(1, 2001):
        job.fails(number * 1.5, number, back_s=1.0)
    text = shown(capsys, job)[1]
    assert "the last 4 of 2,000 incidents:\n  1997. " in text
    assert len(text.splitlines()) <= 24


# -- its exit code ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outcome", "standing", "code"),
    [("succeeded", "succeeded", 0), ("error", "failed", 1), ("preempted", "stopped", 1), ("lost-node", "failed", 1)],
)
def test_the_code_of_a_job_that_ended(
    alone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], outcome: str, standing: str, code: int
) -> None:
    found = told(capsys, Written(tmp_path).trains().ends(3599, outcome))
    assert (found["standing"], found["exit_code"], found["is_training"]) == (standing, code, False)


def test_the_code_of_a_job_that_starts(alone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = Written(tmp_path).starts()
    assert (told(capsys, job)["standing"], told(capsys, job)["exit_code"]) == ("starting", 3)
    job.launches(5).note(6, record.CoordinatorSaid("1 of 2 nodes are here"))
    code, text = shown(capsys, job)
    assert (code, text.splitlines()[0]) == (3, "train.py, job made: starting for 59 min, no step seen yet")
    assert "  said        1 of 2 nodes are here\n" in text
    assert "said" not in shown(capsys, job.steps(8))[1]


def test_an_agent_that_was_killed_is_lost(alone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = Written(tmp_path, node=here(dead_pid())).trains()
    code, text = shown(capsys, job)
    assert code == 1
    assert text.startswith("train.py, job made: lost: its agent has ended without a word; its record ends 10 s ago\n")


def test_an_agent_that_is_there_and_silent_is_not_lost(
    alone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doorbell, "find", lambda: [os.getpid()])
    job = Written(tmp_path, node=here(os.getpid())).trains()
    code, text = shown(capsys, job)
    assert code == 0
    assert "; its agent does not answer, so this is what its record says\n" in text


def test_no_such_job(alone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status.main(["nobody's"]) == 2
    assert capsys.readouterr().err.startswith('holdfast status: there is no job "nobody\'s" on this machine')


# -- records that are not as they should be ---------------------------------------------------------------------------


def test_a_torn_last_line_is_left_for_later(alone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = Written(tmp_path).trains()
    whole = job.record.read_bytes()
    job.progresses(3595, (41, 41))
    job.record.write_bytes(job.record.read_bytes()[:-9])
    assert told(capsys, job)["step"] == 40
    job.record.write_bytes(whole)
    job.progresses(3595, (41, 41))
    assert told(capsys, job)["step"] == 41


def test_a_line_torn_in_the_middle_costs_only_itself(
    alone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Written(tmp_path).starts().launches(5).steps(8).append(b'{"v":1,"node":"n1:100","se\n')
    job.append(b"\xff\xfe\x00\n[]\n\n").progresses(3590, (40, 40))
    assert told(capsys, job)["step"] == 40


def test_a_record_whose_beginning_is_lost(alone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = Written(tmp_path).trains()
    text = job.record.read_bytes()
    job.record.write_bytes(text[60:])  # into the first line
    found = told(capsys, job)
    assert (found["run_id"], found["standing"], found["step"]) == ("made", "training", 40)
    assert found["wall_s"] == pytest.approx(3600, abs=60)
    job.fails(3595, back_s=None)
    assert told(capsys, job)["standing"] == "recovering"
    job.ends(3600, "error")
    assert told(capsys, job)["standing"] == "failed"


def test_the_first_version_of_the_record(alone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = Written(tmp_path, node="").trains().fails(1800).launches(1801, 1).steps(1802, 1)
    job.ends(3600)
    lines = [json.loads(line) for line in job.record.read_text().splitlines()]
    new = ("clock_s", "version", "host", "max_restarts", "nodes", "local_size")
    old = [
        {"name": line["name"], "at_s": line["at_s"], "time": line["time"]}
        | {"data": {name: value for name, value in line["data"].items() if name not in new}}
        for line in lines
        if line["name"] != "progress"
    ]
    job.record.write_text("".join(json.dumps(line) + "\n" for line in old))
    code, text = shown(capsys, job)
    assert code == 0
    assert text.startswith("train.py, job made: succeeded 0 s ago, after 60 min\n")
    assert "  1. 30 min ago, " in text and "back after 2.0 s" in text


def test_lines_of_a_newer_version_are_passed_over(
    alone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Written(tmp_path).trains()
    job.append(b'{"v":9,"node":"n1:100","seq":99,"name":"world.dreamt","at_s":3599.0,"time":"","data":{"of":[1]}}\n')
    assert told(capsys, job)["standing"] == "training"


def test_a_record_that_cannot_be_read(alone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "events.jsonl").mkdir()
    assert status.main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("holdfast status: ")


def test_nothing_that_a_rank_says_moves_the_cursor(
    alone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Written(tmp_path, "evil", node=f"{HOSTILE}:7").starts(
        program={"path": f"/x{HOSTILE}y.py"}, node=f"{HOSTILE}:7"
    )
    job.starts(node="n2:7").launches(5).steps(8)
    job.progresses(9, (1, 1), own_us=(100_000, 900_000)).note(10, record.StragglerFound(0, 1, 0.9, 0.1, 9.0, 5))
    job.note(11, record.CoordinatorSaid(HOSTILE)).note(12, record.Trained(1, epoch=HOSTILE))
    job.fails(13, headline=HOSTILE, action=HOSTILE, node=HOSTILE, kind=Kind.ERROR)
    for ending in (None, "error"):
        if ending:
            job.ends(20, ending, HOSTILE)
        text = shown(capsys, job)[1]
        assert r"\x1b]0;owned" in text
        assert all(line.isprintable() for line in text.split("\n"))
    assert ls.main([str(tmp_path)]) == 0
    assert all(line.isprintable() for line in capsys.readouterr().out.split("\n"))


@pytest.mark.parametrize("command", [status, top, logs, ls])
def test_they_all_say_what_they_do(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        command.main(["--help"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: {command.__name__.replace('.cli.', ' ')} ")


# -- the list ---------------------------------------------------------------------------------------------------------


def test_the_list_has_all_jobs(alone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Written(tmp_path / "logs", "one").trains().fails(1800).launches(1801, 1).steps(1802, 1).ends(3600)
    Written(tmp_path / "logs", "two").trains(1234)
    left = Written(alone / "holdfast_x", "left", node=here(dead_pid())).trains()
    assert ls.main([str(tmp_path / "logs")]) == 0
    first, *rows = capsys.readouterr().out.splitlines()
    assert first.split("  ")[0] == "RUN ID"
    cells = {row.split()[0]: row.split() for row in rows}
    assert cells["one"][1:7] == ["succeeded", "train.py", "1", "2", "40", "1"]
    assert cells["two"][1:9] == ["training", "train.py", "1", "2", "1,234", "0", "60", "min"]
    assert cells["left"][1] == "lost" and cells["left"][-1] == str(left.run_dir)
    assert ls.main([str(tmp_path / "logs"), "--json"]) == 0
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {row["run_id"]: row["step"] for row in told} == {"one": 40, "two": 1234, "left": 40}


def test_a_long_list_is_cut(alone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(23):
        Written(tmp_path, f"job{number}").trains().ends(3600)
    ls.main([str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 22 and lines[-1] == "there are older ones; holdfast ls --all shows them"
    ls.main([str(tmp_path), "--all"])
    assert len(capsys.readouterr().out.splitlines()) == 24


def test_an_empty_list_says_so(alone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ls.main([]) == 0
    assert capsys.readouterr().out.startswith("no job runs here, and none has left a record")
    assert ls.main([str(tmp_path / "nowhere")]) == 2
    assert "is no folder" in capsys.readouterr().err
