"""One Slurm for all tests of a process, and a place for workflows in each."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from slurm.slurm_cluster import Slurm, slurm
from slurm.workflows import Workflows


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm(tmp_path_factory.mktemp("slurm")) as made:
        yield made


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A Slurm that has done something unexpected says so in its own logs."""
    report = yield
    here = getattr(item, "funcargs", {}).get("here")
    if report.when == "call" and report.failed and isinstance(here, Workflows):
        report.sections.append(("Slurm", here.why()))
    return report


@pytest.fixture
def here(cluster: Slurm, tmp_path: Path) -> Iterator[Workflows]:
    made = Workflows(cluster, tmp_path)
    yield made
    made.end()
