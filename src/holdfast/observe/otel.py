"""The same metrics by OpenTelemetry's protocol, OTLP over HTTP, for whoever collects them so. An extra, `otel`.

Names are OpenTelemetry's: `holdfast_lost_seconds_total` is `holdfast.lost` in seconds. A collector that hands them on
to Prometheus makes the one of the other, so rules and dashboards fit both.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias
from urllib.parse import urlsplit

from holdfast._version import __version__
from holdfast.observe import metrics
from holdfast.observe.state import State

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import Metric, MetricsData

EVERY_S = 15.0
TIMEOUT_S = 5.0  # of one try
PATH = "/v1/metrics"  # where collectors listen for metrics, if the address names no path

# Calls what it is given with the state, and with the rest of what `metrics.families` takes.
Source: TypeAlias = "Callable[[Callable[[State, float | None, bool], MetricsData]], MetricsData]"

_UNITS = {"_seconds": "s", "_bytes": "By"}


class NoExport(Exception):
    """There is no OpenTelemetry here, or no such address."""


class Export:
    """Under way in a thread of its own. A collector that is slow, or gone, costs the job nothing."""

    def __init__(self, send: Callable[[], str], every_s: float, complain: Callable[[str], None]) -> None:
        """`send` says what went wrong, or ''."""
        self._send, self._every_s, self._complain = send, every_s, complain
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="holdfast-otel")
        self._thread.start()

    def close(self) -> None:
        """How the job ended is told before; a dead collector is not waited for any longer than once."""
        self._closing.set()
        self._thread.join(2 * TIMEOUT_S)

    def _run(self) -> None:
        told = ""
        while True:
            last = self._closing.is_set()
            try:
                wrong = self._send()
            except Exception as failure:  # a page that shows less is better than one that is gone
                wrong = f"{type(failure).__name__}: {failure}"
            if wrong and not told:
                self._complain(f"metrics do not get through: {wrong}; trying on")
            told = wrong
            if last:
                return
            self._closing.wait(self._every_s)


def export(
    source: Source,
    endpoint: str,
    every_s: float = EVERY_S,
    complain: Callable[[str], None] = lambda text: None,
) -> Export:
    """Send how the job stands to a collector as `http://localhost:4318`, now, every so often, and at the end. The
    source is called in the export's thread, and keeps the state as it is while it is read. Raises NoExport."""
    try:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics.export import MetricExportResult
    except ImportError:
        raise NoExport("OpenTelemetry is not installed: pip install 'holdfast[otel]'") from None
    # It would print every try that fails. Who listens to it still hears it.
    logging.getLogger("opentelemetry.exporter.otlp").addHandler(logging.NullHandler())
    exporter = OTLPMetricExporter(endpoint=_address(endpoint), timeout=TIMEOUT_S)

    def send() -> str:
        result = exporter.export(source(data_of))
        return "" if result is MetricExportResult.SUCCESS else f"no success at {endpoint}"

    return Export(send, every_s, complain)


def data_of(state: State, now_s: float | None, is_gone: bool) -> MetricsData:
    """`now_s` and `is_gone` as in `metrics.families`."""
    from opentelemetry.sdk.metrics.export import MetricsData, ResourceMetrics, ScopeMetrics
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    resource = Resource.create({"service.name": "holdfast", "service.instance.id": state.run_id})
    began_s = metrics.wall_start_s(state) or 0.0
    at_s = time.time()
    each = [_metric(family, state.run_id, began_s, at_s) for family in metrics.families(state, now_s, is_gone)]
    scope = InstrumentationScope("holdfast", __version__)
    return MetricsData([ResourceMetrics(resource, [ScopeMetrics(scope, each, "")], "")])


def _metric(family: metrics.Family, run_id: str, began_s: float, at_s: float) -> Metric:
    from opentelemetry.sdk.metrics.export import AggregationTemporality, Gauge, Metric, NumberDataPoint, Sum

    begin_ns, now_ns = int(began_s * 1e9), int(at_s * 1e9)
    points = [
        NumberDataPoint({"run_id": run_id, **dict(labels)}, begin_ns if family.grows else 0, now_ns, +value)
        for labels, value in family.samples
    ]
    name, unit = _named(family.name)
    if family.grows:
        return Metric(name, family.help, unit, Sum(points, AggregationTemporality.CUMULATIVE, is_monotonic=True))
    return Metric(name, family.help, unit, Gauge(points))


def _named(name: str) -> tuple[str, str]:
    """The name and the unit."""
    name = name.removesuffix("_total").replace("_", ".", 1)
    for ending, unit in _UNITS.items():
        if name.endswith(ending):
            return name.removesuffix(ending), unit
    return name, ""


def _address(endpoint: str) -> str:
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise NoExport(f"{endpoint!r} is no address of a collector; http://HOST:4318 is meant")
    return endpoint if parts.path.strip("/") else endpoint.rstrip("/") + PATH
