"""`holdfast report` on the records of real jobs, and on files that are none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness import TRAINS, Job
from holdfast.agent import doorbell
from holdfast.cli import report as report_command
from holdfast.observe import record

REDOES = Path(__file__).with_name("redoes.py")
STEPS, EVERY, FATAL = 30, 10, 14  # as there
KILL = json.dumps({"rank": 1, "step": 10, "how": "SIGKILL"})


def report(*argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "holdfast", "report", *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def as_json(path: Path) -> dict[str, Any]:
    ran = report(str(path), "--json")
    assert ran.returncode == 0, ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def test_a_killed_rank_costs_what_its_incident_says(job: Job) -> None:
    assert job.run(TRAINS, "20", KILL, max_restarts=2) == 0, job.err
    found = as_json(job.run_dir)
    [incident], [told] = found["incidents"], job.incidents()
    assert (incident["kind"], incident["rank"], incident["restarted"]) == ("signal", 1, True)
    # SGD does not count its steps, so nothing is called redone and the launcher's own account is all there is.
    assert found["redone_unknown"] == [1]
    assert incident["lost_s"] == pytest.approx(told["lost_s"], abs=0.001)
    assert incident["phases_s"]["stopping"] == pytest.approx(told["phases_s"]["stop"], abs=0.001)
    ended = [noted for noted in record.read(job.run_dir / record.NAME) if isinstance(noted.what, record.JobEnded)]
    assert found["wall_s"] == ended[0].at_s
    assert round(sum(found["phases_s"].values()), 6) == found["wall_s"]
    assert 0 < found["ratio"] < 1 and found["phases_s"]["first start"] > 0


def test_steps_that_were_done_again_are_counted(job: Job, tmp_path: Path) -> None:
    assert job.run(REDOES, max_restarts=2) == 0, job.err
    found = as_json(job.run_dir / record.NAME)
    assert found["redone_unknown"] == []
    assert found["steps_redone"] == FATAL - EVERY
    assert found["steps"] == STEPS + FATAL - EVERY
    assert [world["base"] for world in found["worlds"]] == [0, EVERY]
    page, trace = tmp_path / "a.html", tmp_path / "a.json"
    ran = report(str(job.run_dir), "--html", str(page), "--trace", str(trace))
    assert ran.returncode == 0, ran.stderr
    assert f"{FATAL - EVERY} of them again" in ran.stdout and "killed by SIGKILL" in ran.stdout
    assert "torchrun (best setting)" in ran.stdout and "bench.recovery" in ran.stdout
    assert page.read_text().startswith("<!doctype html>") and "redoes.py" in page.read_text()
    ranks = {each["args"]["name"] for each in json.loads(trace.read_text())["traceEvents"] if each["ph"] == "M"}
    assert {"rank 0", "rank 1", "wall clock"} <= ranks
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix == ".part") == []


# -- what is no record ------------------------------------------------------------------------------------------------


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = report_command.main(argv)
    told = capsys.readouterr()
    return code, told.out, told.err


def write(folder: Path, content: str) -> str:
    path = folder / record.NAME
    path.write_text(content)
    return str(path)


STARTED = '{"name":"job.started","at_s":0.0,"time":"","data":{"run_id":"r","node":"a","nproc":1,"program":1,"pid":1}}\n'


def test_nothing_there(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doorbell, "find", list)  # another test's agent may be there, and silent
    code, _, err = run(capsys, str(tmp_path / "none"))
    assert code == 2
    assert err.startswith("holdfast report: there is no job") and err.count("\n") == 1


def test_nothing_understood(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, write(tmp_path, "what\n{}\n"))
    assert code == 1
    assert "has no line that this version understands" in err and err.count("\n") == 1


def test_a_torn_record_is_reported_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, write(tmp_path, f'{STARTED}{{"name":"world.la'))
    assert code == 0
    assert "note: the record has no end" in out


def test_a_file_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = str(tmp_path / "no" / "such.html")
    code, out, err = run(capsys, write(tmp_path, STARTED), "--html", page)
    assert code == 1
    assert err == f"holdfast report: cannot write {page}: No such file or directory\n" and out == ""


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert run(capsys, write(tmp_path, STARTED), "--trace", str(tmp_path / "pipe"))[0] == 0
        assert json.loads(os.read(reader, 1 << 16))["traceEvents"]
    finally:
        os.close(reader)
    assert (tmp_path / "pipe").is_fifo()


def test_a_wrong_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        report_command.main(["--htm1", "x"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
