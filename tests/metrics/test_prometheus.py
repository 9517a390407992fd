"""A real Prometheus scrapes our page, evaluates our rules, and answers what the Grafana dashboard asks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from holdfast.control.causes import Kind
from holdfast.observe import record
from holdfast.observe.events import EventLog
from holdfast.observe.metrics import families, render
from metrics.prometheus_server import RULES, Prometheus, needed, prometheus, promtool
from metrics.told import Told, full

GRAFANA = RULES.with_name("grafana.json")
ALERTS_TEST = Path(__file__).with_name("alerts.yml")
HOURS_S = 3 * 3600.0  # that the jobs here have run


class Live:
    """A job's record that is being written, and the page that `--dashboard` would show of it."""

    def __init__(self, folder: Path) -> None:
        self.events = EventLog(str(folder / record.NAME), (), pytest.fail, "n1")
        self.events.emit(record.JobStarted("live", "n1", 1, {"path": "train.py"}, os.getpid()))
        self.events.emit(record.WorldLaunched(0, 1, 0, local_size=1))
        command = [sys.executable, "-m", "holdfast.dashboard", str(folder), "--listen", "127.0.0.1:0"]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self._process.stderr is not None
        said = self._process.stderr.readline()
        found = re.search(r"http://(127\.0\.0\.1:\d+)/", said)
        assert found is not None, said
        self.address = found[1]

    def close(self) -> None:
        self._process.terminate()
        self._process.communicate(timeout=30)
        self.events.close()


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    needed("prometheus")
    made = Live(tmp_path_factory.mktemp("live"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def server(live: Live, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    with prometheus(tmp_path_factory.mktemp("prometheus"), live.address) as made:
        yield made


def show(server: Prometheus, told: Told) -> None:
    """And wait until it was scraped."""
    before_s = time.time()
    server.page.text = render(told.state, time.time())
    up = f'holdfast_up{{run_id="{told.state.run_id}"}}'
    server.until(lambda: (server.value(f"timestamp({up})") or 0.0) > before_s, "scrape")


def fires(server: Prometheus, told: Told, name: str) -> dict[str, Any]:
    """The alert, once it fires."""
    return server.until(lambda: server.alerts(told.state.run_id).get(name), f"{name} that fires")


def noticed(server: Prometheus, told: Told) -> set[str]:
    """The alerts that were on their way, or have fired, since the start."""
    found = server.query(f'ALERTS{{run_id="{told.state.run_id}"}}[10m]')
    return {one["metric"]["alertname"] for one in found}


def test_rules_are_right() -> None:
    checked = promtool("check", "rules", str(RULES))
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "6 rules found" in checked.stdout


def test_each_alert_is_for_whom_it_should_be_and_nobody_else() -> None:
    tested = promtool("test", "rules", str(ALERTS_TEST))
    assert tested.returncode == 0, tested.stdout + tested.stderr
    alerts = set(re.findall(r"alert: (\w+)", RULES.read_text()))
    assert alerts == set(re.findall(r'alertname="(\w+)"', ALERTS_TEST.read_text()))


def test_it_has_what_we_said(server: Prometheus) -> None:
    told = full('with "quotes" \\ and\nlines', time.time() - HOURS_S)
    now_s = time.time()
    server.page.text = render(told.state, now_s)
    ours = {
        (family.name, *sorted(labels)): float(value)
        for family in families(told.state, now_s)
        for labels, value in family.samples
    }

    def theirs() -> dict[tuple[object, ...], float]:
        found = {}
        for one in server.query('{job="holdfast", __name__=~"holdfast_.*"}'):
            labels = {key: text for key, text in one["metric"].items() if key not in ("job", "instance", "__name__")}
            if labels.pop("run_id") == told.state.run_id:
                found[one["metric"]["__name__"], *sorted(labels.items())] = float(one["value"][1])
        return found

    assert server.until(lambda: found if len(found := theirs()) == len(ours) else None, "scrape") == ours
    server.becomes(f'count(holdfast_up{{instance="127.0.0.1:{server.page.port}"}})', 1.0)


def test_the_page_of_a_job_is_scraped_as_it_is_written(live: Live, server: Prometheus) -> None:
    mine = f'{{run_id="live", instance="{live.address}"}}'
    server.becomes(f"holdfast_world_size{mine}", 1.0)
    live.events.emit(record.Progress(0, 0, 7, (7,), 0, (500_000,), (250_000,), 0.0, "1"))
    server.becomes(f"holdfast_step{mine}", 7.0)
    server.becomes(f"holdfast_rank_own_duration_seconds{mine}", 0.25)
    server.becomes(f"time() - holdfast_last_progress_timestamp_seconds{mine} < bool 60", 1.0)
    live.events.emit(record.JobEnded("succeeded", "", 7, 9.5, 0.0))
    server.becomes(f"holdfast_up{mine}", 0.0)


def test_nothing_is_wrong_with_a_job_that_trains(server: Prometheus) -> None:
    """Also before its first step, and of one that saves in its own way."""
    for told in (Told("young", time.time() - 12.0), full("trains", time.time() - 60.0)):
        told.note(58.0, record.StragglerGone(1, 3), "n2")
        show(server, told)
        server.evaluate()
        # Nor is any on its way, but for that of a page that a busy machine has kept from answering.
        assert noticed(server, told) <= {"HoldfastDown"}


def test_no_progress_checkpoint_age_and_straggler(server: Prometheus) -> None:
    told = full("stuck", time.time() - HOURS_S)
    show(server, told)
    alert = fires(server, told, "HoldfastNoProgress")
    assert re.fullmatch(r"stuck: no step for 2h 59m .*s", alert["annotations"]["summary"])
    assert "holdfast stacks stuck" in alert["annotations"]["description"]
    assert alert["labels"]["severity"] == "critical"
    alert = fires(server, told, "HoldfastStraggler")
    assert alert["annotations"]["summary"] == "stuck: rank 3 on n2 holds the others up"
    alert = fires(server, told, "HoldfastCheckpointAge")
    assert re.fullmatch(r"stuck: nothing saved for 2h 59m .*s", alert["annotations"]["summary"])
    for name in ("HoldfastNoProgress", "HoldfastStraggler", "HoldfastCheckpointAge"):  # none fires at once
        assert server.query(f'ALERTS{{alertname="{name}", alertstate="pending", run_id="stuck"}}[5m]') != []
    told.progress(HOURS_S, 1, 70)
    told.save(HOURS_S, 70)
    told.note(HOURS_S, record.StragglerGone(1, 3), "n2")
    show(server, told)
    server.until(lambda: server.alerts("stuck") == {}, "end of the alerts")


def test_many_restarts(server: Prometheus) -> None:
    told = Told("restarts", time.time() - 120.0)
    show(server, told)
    for generation in range(7):
        told.fail(12.0 + 10 * generation, generation, Kind.SIGNAL)
    show(server, told)
    alert = fires(server, told, "HoldfastRestartRate")
    assert re.fullmatch(r"restarts: \d+ restarts within an hour", alert["annotations"]["summary"])


def test_a_failed_job_and_one_that_is_gone(server: Prometheus) -> None:
    told = full("failed", time.time() - HOURS_S)
    told.end(60.0, "error")
    show(server, told)
    fires(server, told, "HoldfastFailed")
    server.evaluate()
    assert noticed(server, told) == {"HoldfastFailed"}  # it is over: nobody waits for steps or saves
    gone = Told("gone", time.time() - 12.0)
    show(server, gone)
    server.page.text = None
    alert = fires(server, gone, "HoldfastDown")
    assert alert["annotations"]["summary"] == f"gone: its page at 127.0.0.1:{server.page.port} is gone"
    assert noticed(server, told) == {"HoldfastFailed"}


# -- Grafana ----------------------------------------------------------------------------------------------------------


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(GRAFANA.read_text())["panels"]
    return found


def test_the_dashboard_can_be_taken_by_any_grafana() -> None:
    """By what it asks of a file: the source of data is the reader's choice, and no panel hides another."""
    dashboard = json.loads(GRAFANA.read_text())
    assert dashboard["id"] is None and dashboard["uid"] == "holdfast" and dashboard["schemaVersion"] >= 39
    source = {"type": "prometheus", "uid": "${datasource}"}
    variables = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource" and variables["run_id"]["datasource"] == source
    assert all(panel["datasource"] == source for panel in panels())
    assert len({panel["id"] for panel in panels()}) == len(panels())
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken and all(x < 24 for x, _ in cells), panel["title"]
        taken |= cells


def test_each_panel_shows_something(server: Prometheus) -> None:
    told = full("shown", time.time() - 60.0)
    told.note(60.0, record.StragglerFound(1, 0, 0.5, 0.125, 6.0, 3))
    server.page.text = render(told.state)  # as long as its record
    expressions = [target["expr"] for panel in panels() for target in panel["targets"]]
    for expression in expressions:
        asked = expression.replace("$run_id", "shown").replace("$__rate_interval", "1m")
        assert "$" not in asked
        server.until(partial(server.query, asked), f"series for {asked}")
    not_lost = next(expression for expression in expressions if "wall" in expression).replace("$run_id", "shown")
    server.becomes(not_lost, 1 - 7.75 / 60)


def test_the_jobs_to_choose_from(server: Prometheus) -> None:
    variable = json.loads(GRAFANA.read_text())["templating"]["list"][1]
    found = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["definition"])
    assert found is not None
    server.page.text = render(Told("chosen", time.time() - 12.0).state)
    server.until(lambda: "chosen" in {one["metric"][found[2]] for one in server.query(found[1])}, "job to choose")
