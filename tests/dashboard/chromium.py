"""A real browser: Debian's Chromium without a window, spoken to over a pipe in its own protocol."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from holdfast import linux

WAIT_S = 30.0
FLAGS = (
    "--headless=new", "--remote-debugging-pipe", "--no-first-run", "--disable-gpu", "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
    "--no-default-browser-check", "--mute-audio", "--no-proxy-server", "--hide-scrollbars",
)  # fmt: skip


class Browser:
    def __init__(self, folder: Path) -> None:
        path = shutil.which("chromium")
        if path is None:
            if os.environ.get("HOLDFAST_CI") == "1":
                pytest.fail("HOLDFAST_CI=1 and no chromium: tools/system-packages installs it")
            pytest.skip("there is no chromium: tools/system-packages installs it where it may")
        theirs, self._out = os.pipe()
        self._in, their_out = os.pipe()
        # Chromium has no sandbox for root, who runs tests in containers; it is shown nothing but this page.
        flags = [*FLAGS, f"--user-data-dir={folder}", *(["--no-sandbox"] if os.geteuid() == 0 else []), "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{theirs} 4>&{their_out}', "chromium", path, *flags],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(theirs, their_out),
            preexec_fn=partial(linux.die_with_parent, os.getpid()),
        )
        os.close(theirs)
        os.close(their_out)
        self._rest = b""
        self._number = 0
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": params, **({"sessionId": session} if session else {})}
        os.write(self._out, json.dumps(message).encode() + b"\0")
        answer = self.next(lambda found: found.get("id") == number, method)
        assert "error" not in answer, f"{method}: {answer['error']}"
        result: dict[str, Any] = answer["result"]
        return result

    def next(self, wanted: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
        """The next message that is wanted. What comes before it is kept in `events`."""
        until_s = time.monotonic() + WAIT_S
        while True:
            while b"\0" in self._rest:
                line, self._rest = self._rest.split(b"\0", 1)
                found: dict[str, Any] = json.loads(line)
                if wanted(found):
                    return found
                self.events.append(found)
            left_s = until_s - time.monotonic()
            if left_s <= 0 or not select.select([self._in], [], [], left_s)[0]:
                raise AssertionError(f"Chromium did not answer {what} within {WAIT_S} s")
            piece = os.read(self._in, 1 << 20)
            assert piece, f"Chromium has ended during {what}"
            self._rest += piece

    def tab(self, width: int = 1280, height: int = 900, dark: bool = False) -> Tab:
        return Tab(self, width, height, dark)

    def close(self) -> None:
        with contextlib.suppress(AssertionError, OSError):
            self.call("Browser.close")
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)
        os.close(self._out)


class Tab:
    def __init__(self, browser: Browser, width: int, height: int, dark: bool) -> None:
        self._browser = browser
        context = browser.call("Target.createBrowserContext")["browserContextId"]  # without the cookies of others
        self._target = browser.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        self._context = context
        self._session = browser.call("Target.attachToTarget", targetId=self._target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        phone = width < 600
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **params)

    def open(self, url: str) -> None:
        """And wait until all that its HTML names is there."""

        def loaded(event: dict[str, Any]) -> bool:
            return event.get("method") == "Page.loadEventFired" and event.get("sessionId") == self._session

        before = len(self._browser.events)
        self.call("Page.navigate", url=url)
        if not any(loaded(event) for event in self._browser.events[before:]):
            self._browser.next(loaded, f"to open {url}")

    def eval(self, expression: str) -> Any:
        found = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, condition: str) -> None:
        """As soon as it is so, looked at before each picture that the page draws."""
        try:
            self.eval(
                "new Promise((done) => { const look = () => { let is = false; try { is = "
                f"{condition}; }} catch {{}} is ? done(true) : requestAnimationFrame(look); }}; look(); }})"
            )
        except AssertionError as failure:
            raise AssertionError(f"never: {condition}\n{failure}\n{self.complaints()}") from None

    def text(self, selector: str) -> str:
        return str(self.eval(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def click(self, selector: str) -> None:
        self.eval(f"document.querySelector({json.dumps(selector)}).click()")

    def key(self, name: str, code: int) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=name, code=name, windowsVirtualKeyCode=code)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def picture(self, path: Path, whole: bool = False) -> None:
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))

    def complaints(self) -> list[str]:
        """What the page's scripts and the browser complained of: exceptions, blocked content, failed requests."""
        mine = [event for event in self._browser.events if event.get("sessionId") == self._session]
        thrown = [event["params"]["exceptionDetails"] for event in mine if event["method"] == "Runtime.exceptionThrown"]
        logged = [event["params"]["entry"] for event in mine if event["method"] == "Log.entryAdded"]
        return [str(each) for each in thrown] + [str(each) for each in logged if each["level"] == "error"]

    def close(self) -> None:
        self._browser.call("Target.disposeBrowserContext", browserContextId=self._context)
