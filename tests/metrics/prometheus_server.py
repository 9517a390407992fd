"""A real Prometheus on this machine, of one test run alone, and a page for it to scrape."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeVar
from urllib.error import HTTPError, URLError
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest

from holdfast import linux
from holdfast.observe.metrics import CONTENT_TYPE
from ports import free_port

RULES = Path(__file__).resolve().parents[2] / "monitoring" / "holdfast.rules.yml"
DEADLINE_S = 30.0

# A scrape that a busy machine holds up for longer has failed, and its series are gone until the next one.
CONFIG = """
global: {{scrape_interval: 500ms, scrape_timeout: 500ms, evaluation_interval: 200ms}}
rule_files: [rules.yml]
scrape_configs:
  - job_name: holdfast
    static_configs: [{{targets: {targets}}}]
"""

Found = TypeVar("Found")


def needed(program: str) -> str:
    """Its path; the test is skipped where there is none."""
    path = shutil.which(program)
    if path is None:
        if os.environ.get("HOLDFAST_CI") == "1":
            pytest.fail(f"HOLDFAST_CI=1 and no {program}: tools/system-packages installs Prometheus")
        pytest.skip(f"there is no {program}: tools/system-packages installs Prometheus where it may")
    return path


def promtool(*args: str, given: str = "", folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [needed("promtool"), *args]
    return subprocess.run(
        command, input=given, cwd=folder, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )


class Page:
    """Shows the text that it was given last; without one, it fails."""

    def __init__(self) -> None:
        self.text: str | None = None
        page = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                text = page.text
                self.send_response(500 if text is None else 200)
                self.send_header("Content-Type", CONTENT_TYPE)
                self.end_headers()
                self.wfile.write((text or "").encode())

            def log_message(self, format: str, *args: Any) -> None:
                """Nobody reads it."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class Prometheus:
    def __init__(self, folder: Path, other: str) -> None:
        """It scrapes `page`, and the other address."""
        program = needed("prometheus")
        self.page = Page()
        targets = json.dumps([f"127.0.0.1:{self.page.port}", other])
        folder.joinpath("prometheus.yml").write_text(CONFIG.format(targets=targets))
        # What an alert waits for is shortened, and nothing else.
        shortened = re.sub(r"for: \d+m\b", "for: 1s", RULES.read_text())
        folder.joinpath("rules.yml").write_text(shortened)
        port = free_port()
        self._address = f"http://127.0.0.1:{port}"
        self._log = folder / "log"
        command = [program, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                [*command, f"--web.listen-address=127.0.0.1:{port}"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=partial(linux.die_with_parent, os.getpid()),  # also of one that is killed
            )
        self.until(self._is_ready, "Prometheus")

    def query(self, expression: str) -> list[dict[str, Any]]:
        """What it answers: each with `metric`, its labels, and `value`, or `values` of a range."""
        found = self._get("/api/v1/query?" + urlencode({"query": expression}))
        result: list[dict[str, Any]] = found["data"]["result"]
        return result

    def value(self, expression: str) -> float | None:
        found = self.query(expression)
        assert len(found) <= 1, found
        return float(found[0]["value"][1]) if found else None

    def becomes(self, expression: str, value: float) -> None:
        self.until(lambda: self.value(expression) == value, f"{expression} of {value}")

    def alerts(self, run_id: str) -> dict[str, dict[str, Any]]:
        """Those of a job that fire, by name."""
        found = self._get("/api/v1/alerts")["data"]["alerts"]
        mine = [alert for alert in found if alert["labels"].get("run_id") == run_id and alert["state"] == "firing"]
        return {alert["labels"]["alertname"]: alert for alert in mine}

    def evaluate(self) -> None:
        """Wait until the rules have been, once more and wholly."""
        for _ in range(2):  # one may be under way
            self.until(partial(self._is_later_than, self._evaluated()), "evaluation")

    def until(self, asked: Callable[[], Found | None], what: str) -> Found:
        """It has no event to wait for."""
        end_s = time.monotonic() + DEADLINE_S
        while not (found := asked()):
            assert self._process.poll() is None and time.monotonic() < end_s, f"no {what}:\n{self._log.read_text()}"
            time.sleep(0.05)
        return found

    def close(self) -> None:
        self._process.kill()
        self._process.wait(DEADLINE_S)
        self.page.close()

    def _evaluated(self) -> str:
        return str(self._get("/api/v1/rules")["data"]["groups"][0]["lastEvaluation"])

    def _is_later_than(self, before: str) -> bool:
        return self._evaluated() != before

    def _is_ready(self) -> bool:
        try:
            with urlopen(f"{self._address}/-/ready", timeout=DEADLINE_S) as answer:
                return bool(answer.status == 200)
        except (URLError, ConnectionError):
            return False

    def _get(self, path: str) -> Any:
        try:
            with urlopen(self._address + path, timeout=DEADLINE_S) as answer:
                return json.load(answer)
        except HTTPError as failure:
            raise AssertionError(f"{path}: {failure.read().decode()}") from None


@contextmanager
def prometheus(folder: Path, other: str) -> Iterator[Prometheus]:
    made = Prometheus(folder, other)
    try:
        yield made
    finally:
        made.close()
