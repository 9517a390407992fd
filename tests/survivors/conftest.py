"""Fixtures for jobs whose ranks stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from harness import Job
from survivors.stories import run


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The state that a training with these flags ends with."""
    known: dict[tuple[Any, ...], Any] = {}

    def state(*flags: str, nproc: int = 3) -> Any:
        if (flags, nproc) not in known:
            twin = Job(tmp_path_factory.mktemp("twin"))
            try:
                assert run(twin, [], *flags, nproc=nproc) == 0, twin.err
                known[flags, nproc] = torch.load(twin.folder / "weights.pt")
            finally:
                twin.end()
        return known[flags, nproc]

    return state
