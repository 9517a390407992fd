"""The notice that a spot machine gets before its cloud takes it back, read from the machine's metadata.

AWS gives two minutes, and has to be asked: every 5 s, as its documentation has it. Google gives 30 s, and answers when
there is something to tell. Where to ask can be set by the variables that their own libraries know."""

from __future__ import annotations

import http.client
import json
import os
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

ADDRESS = "169.254.169.254"
ASK_S = 5.0  # from one question to the next
ANSWER_S = 5.0
CHANGE_S = 60.0  # for so long Google keeps a question
PAUSE_S = 0.5  # also from one that was answered at once
TOKEN_S = 21600


class Notices:
    """A thread that asks until there is a notice, or `close`."""

    def __init__(self, cloud: str, noticed: Callable[[str], None], unheard: Callable[[str], None]) -> None:
        """`noticed` is called once, and `unheard` once, if the cloud cannot be asked; both in the thread."""
        self._next = _Aws().ask if cloud == "aws" else _Gcp().ask
        self._noticed, self._unheard = noticed, unheard
        self._ended = threading.Event()
        threading.Thread(target=self._watch, name="holdfast-notices", daemon=True).start()

    def close(self) -> None:
        """Nobody is told any more. A question that is being asked is not waited for."""
        self._ended.set()

    def _watch(self) -> None:
        told = False
        while not self._ended.is_set():
            try:
                notice, wait_s = self._next()
            except (OSError, ValueError, http.client.HTTPException) as failure:
                notice, wait_s = "", ASK_S
                if not told and not self._ended.is_set():
                    told = True
                    self._unheard(str(getattr(failure, "reason", "") or failure) or type(failure).__name__)
            if notice and not self._ended.is_set():
                self._noticed(notice)
                return
            self._ended.wait(wait_s)


class _Aws:
    """https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html"""

    def __init__(self) -> None:
        self._base = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", f"http://{ADDRESS}").rstrip("/")
        self._token = ""

    def ask(self) -> tuple[str, float]:
        """What it says, if anything, and when to ask again."""
        if not self._token:
            ttl = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_S)}
            self._token = _get(f"{self._base}/latest/api/token", ttl, method="PUT")[0]
        try:
            answer, _ = _get(
                f"{self._base}/latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": self._token}
            )
        except urllib.error.HTTPError as refused:
            if refused.code == 401:
                self._token = ""  # it is too old
                return "", PAUSE_S
            if refused.code == 404:  # no notice
                return "", ASK_S
            raise
        told: dict[str, Any] = json.loads(answer)
        return f"AWS is to {told.get('action', 'stop')} this machine at {told.get('time', 'an unknown time')}", 0.0


class _Gcp:
    """https://cloud.google.com/compute/docs/instances/create-use-spot#detect-preemption"""

    def __init__(self) -> None:
        host = os.environ.get("GCE_METADATA_HOST", ADDRESS)
        self._url = f"http://{host}/computeMetadata/v1/instance/preempted"
        self._etag = ""

    def ask(self) -> tuple[str, float]:
        wait = f"?wait_for_change=true&last_etag={self._etag}&timeout_sec={CHANGE_S:.0f}" if self._etag else ""
        answer, headers = _get(self._url + wait, {"Metadata-Flavor": "Google"}, ANSWER_S + (CHANGE_S if wait else 0.0))
        self._etag = headers.get("etag", "")
        if answer.strip().upper() == "TRUE":
            return "Google Cloud takes this machine back within 30 s", 0.0
        return "", PAUSE_S if self._etag else ASK_S


def _get(
    url: str, headers: Mapping[str, str], timeout_s: float = ANSWER_S, method: str = "GET"
) -> tuple[str, Mapping[str, str]]:
    """Never by a proxy, which has metadata of its own."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(urllib.request.Request(url, headers=dict(headers), method=method), timeout=timeout_s) as response:
        found = {name.lower(): value for name, value in response.headers.items()}
        return response.read(65536).decode(errors="replace"), found
