"""The same metrics by OTLP: a real exporter sends to a receiver of a few lines that reads the protocol's messages."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from holdfast.observe import record
from holdfast.observe.events import EventLog
from holdfast.observe.metrics import families
from holdfast.observe.otel import NoExport, Source, export
from metrics.told import Told, full

try:
    from opentelemetry.exporter.otlp.proto.http import metric_exporter  # noqa: F401
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
except ImportError:
    if os.environ.get("HOLDFAST_CI") == "1":
        raise
    pytest.skip("there is no OpenTelemetry: pip install 'holdfast[otel]'", allow_module_level=True)

WAIT_S = 20.0


class Receiver:
    """Keeps what it was sent; answers with `code`."""

    def __init__(self) -> None:
        self.got: queue.Queue[tuple[str, Any]] = queue.Queue()
        self.code = 200
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.got.put((self.path, ExportMetricsServiceRequest.FromString(body)))
                self.send_response(receiver.code)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                """Nobody reads it."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.close()


def metrics_of(request: Any) -> dict[str, Any]:
    return {metric.name: metric for metric in request.resource_metrics[0].scope_metrics[0].metrics}


def points_of(metric: Any) -> dict[tuple[tuple[str, str], ...], float]:
    found = {}
    for point in (metric.sum if metric.HasField("sum") else metric.gauge).data_points:
        labels = tuple((each.key, each.value.string_value) for each in point.attributes)
        found[labels] = point.as_double if point.HasField("as_double") else float(point.as_int)
    return found


def shown(told: Told) -> Source:
    return lambda make: make(told.state, time.time(), False)


def test_a_collector_gets_all_that_prometheus_gets(receiver: Receiver) -> None:
    told = full("r", time.time() - 60.0)
    running = export(shown(told), receiver.address, every_s=3600.0)
    path, request = receiver.got.get(timeout=WAIT_S)
    running.close()
    assert path == "/v1/metrics"
    resource = {each.key: each.value.string_value for each in request.resource_metrics[0].resource.attributes}
    assert resource["service.name"] == "holdfast" and resource["service.instance.id"] == "r"
    theirs = metrics_of(request)
    ours = families(told.state)
    assert len(theirs) == len(ours)
    for family, metric in zip(ours, theirs.values(), strict=True):
        # The rule by which a collector makes Prometheus's name of it again.
        unit = {"s": "_seconds", "By": "_bytes", "": ""}[metric.unit]
        total = "_total" if metric.HasField("sum") else ""
        assert metric.name.replace(".", "_") + unit + total == family.name
        assert metric.HasField("sum") == family.grows
        if family.name != "holdfast_wall_seconds_total":  # which goes on
            assert points_of(metric) == {(("run_id", "r"), *labels): value for labels, value in family.samples}


def test_counters_say_since_when(receiver: Receiver) -> None:
    told = full("r", 1_800_000_000.0)
    running = export(shown(told), f"{receiver.address}/somewhere/else", every_s=3600.0)
    path, request = receiver.got.get(timeout=WAIT_S)
    running.close()
    assert path == "/somewhere/else"
    lost = metrics_of(request)["holdfast.lost"].sum
    assert lost.is_monotonic and lost.aggregation_temporality == 2  # cumulative
    assert {point.start_time_unix_nano for point in lost.data_points} == {1_800_000_000 * 10**9}
    assert points_of(metrics_of(request)["holdfast.lost"])[("run_id", "r"), ("phase", "first step")] == 4.0


def test_the_end_is_told_before_it_closes(receiver: Receiver) -> None:
    told = Told("r", time.time() - 60.0)
    running = export(shown(told), receiver.address, every_s=3600.0)
    _, request = receiver.got.get(timeout=WAIT_S)
    assert points_of(metrics_of(request)["holdfast.up"]) == {(("run_id", "r"),): 1.0}
    told.end(61.0, "succeeded")
    running.close()
    _, request = receiver.got.get_nowait()
    assert points_of(metrics_of(request)["holdfast.up"]) == {(("run_id", "r"),): 0.0}


def test_a_collector_that_refuses_is_told_of_once(receiver: Receiver) -> None:
    told, said = Told("r", time.time() - 60.0), queue.Queue[str]()
    receiver.code = 400  # which is not tried again
    running = export(shown(told), receiver.address, every_s=0.01, complain=said.put)
    text = said.get(timeout=WAIT_S)
    assert text == f"metrics do not get through: no success at {receiver.address}; trying on"
    for _ in range(3):
        receiver.got.get(timeout=WAIT_S)
    receiver.code = 200
    running.close()
    assert said.empty()


def test_a_source_that_fails_does_not_end_it(receiver: Receiver) -> None:
    told, said = Told("r", time.time() - 60.0), queue.Queue[str]()
    failures = iter([OSError("no record")])

    def source(make: Any) -> Any:
        for failure in failures:
            raise failure
        return shown(told)(make)

    running = export(source, receiver.address, every_s=0.01, complain=said.put)
    assert said.get(timeout=WAIT_S) == "metrics do not get through: OSError: no record; trying on"
    receiver.got.get(timeout=WAIT_S)
    running.close()


@pytest.mark.parametrize("endpoint", ["localhost:4318", "grpc://localhost:4317", "http://", ""])
def test_an_address_that_is_none(endpoint: str) -> None:
    with pytest.raises(NoExport, match="http://HOST:4318 is meant"):
        export(shown(Told("r", 0.0)), endpoint)


def test_a_page_sends_them_where_the_variable_of_opentelemetry_says(receiver: Receiver, tmp_path: Path) -> None:
    log = EventLog(str(tmp_path / record.NAME), [], print, "n1:1")
    log.emit(record.JobStarted("told", "id", 1, None, 1))
    env = {**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.address}
    command = [sys.executable, "-m", "holdfast.dashboard", str(tmp_path), "--listen", "127.0.0.1:0"]
    page = subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL)
    try:
        _, request = receiver.got.get(timeout=WAIT_S)
        assert "holdfast.up" in metrics_of(request)
        log.emit(record.JobEnded("succeeded", "", 5, 1.0, 0.0))
    finally:
        page.terminate()
        page.wait(WAIT_S)
    last = request
    while not receiver.got.empty():
        _, last = receiver.got.get()
    assert points_of(metrics_of(last)["holdfast.state"])[("run_id", "told"), ("state", "succeeded")] == 1.0
