"""What a spot machine's cloud says before it takes it back."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import pytest

from holdfast.agent import notices
from holdfast.agent.notices import Notices

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from metadata import Metadata, serving

WAIT_S = 30.0
AWS = "/latest/meta-data/spot/instance-action"
TOKEN = "/latest/api/token"
GCP = "/computeMetadata/v1/instance/preempted"


@pytest.fixture
def metadata(monkeypatch: pytest.MonkeyPatch) -> Iterator[Metadata]:
    with serving() as found:
        for name, value in found.env.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(notices, "ASK_S", 0.02)
        yield found


def watch(cloud: str) -> tuple[Notices, SimpleQueue[str], SimpleQueue[str]]:
    noticed: SimpleQueue[str] = SimpleQueue()
    unheard: SimpleQueue[str] = SimpleQueue()
    return Notices(cloud, noticed.put, unheard.put), noticed, unheard


def test_aws_is_asked_until_it_says_something(metadata: Metadata) -> None:
    _, noticed, unheard = watch("aws")
    metadata.was_asked(AWS, 3)
    assert noticed.empty()
    metadata.notice()
    assert noticed.get(timeout=WAIT_S) == "AWS is to terminate this machine at 2026-11-18T08:22:00Z"
    assert unheard.empty() and metadata.asked.count(TOKEN) == 1


def test_a_token_that_is_too_old_is_replaced(metadata: Metadata) -> None:
    _, noticed, unheard = watch("aws")
    metadata.was_asked(AWS, 1)
    metadata.token = "second"
    metadata.was_asked(TOKEN, 2)
    metadata.notice()
    assert noticed.get(timeout=WAIT_S).startswith("AWS is to terminate")
    assert unheard.empty()


def test_google_answers_when_there_is_something_to_tell(metadata: Metadata) -> None:
    _, noticed, unheard = watch("gcp")
    metadata.was_asked(GCP, 2)  # the second question waits there
    assert noticed.empty()
    metadata.notice()
    assert noticed.get(timeout=WAIT_S) == "Google Cloud takes this machine back within 30 s"
    assert unheard.empty() and metadata.asked.count(GCP) == 2


@pytest.mark.parametrize("cloud", ["aws", "gcp"])
def test_a_cloud_that_does_not_answer_is_said_once_and_asked_again(
    metadata: Metadata, monkeypatch: pytest.MonkeyPatch, cloud: str
) -> None:
    asked: list[None] = []
    again: SimpleQueue[None] = SimpleQueue()

    def fails(*_: object, **__: object) -> None:
        asked.append(None)
        if len(asked) == 3:
            again.put(None)
        raise ConnectionRefusedError("nobody is there")

    monkeypatch.setattr(notices, "_get", fails)
    watching, noticed, unheard = watch(cloud)
    again.get(timeout=WAIT_S)
    watching.close()
    assert unheard.get(timeout=WAIT_S) == "nobody is there"
    assert unheard.empty() and noticed.empty()
