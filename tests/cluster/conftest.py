"""Fixtures for jobs on several nodes: networks and clusters, as many as a test asks for."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.cluster import Cluster, MakeCluster
from cluster.net import MakeNet, Net, why_not


@pytest.fixture
def net() -> Iterator[MakeNet]:
    """`net(3)`: a network of three nodes. Where there can be none, the test is skipped; in CI, it fails."""
    with contextlib.ExitStack() as nets:

        def make(nodes: int) -> Net:
            if reason := _why_not():
                if os.environ.get("HOLDFAST_CI") == "1":
                    pytest.fail(f"{reason}, and CI must have them", pytrace=False)
                pytest.skip(reason)
            return nets.enter_context(Net(nodes))

        yield make


@pytest.fixture
def cluster(tmp_path: Path, net: MakeNet) -> Iterator[MakeCluster]:
    """`cluster(net(3))`: agents on the nodes of a network. `cluster()`: agents on loopback. It ends before its net."""
    with contextlib.ExitStack() as clusters:
        made: list[Cluster] = []

        def make(network: Net | None = None) -> Cluster:
            folder = tmp_path / f"cluster-{len(made)}"
            folder.mkdir()
            made.append(Cluster(folder, network))
            clusters.callback(made[-1].end)
            return made[-1]

        yield make


_why_not = functools.cache(why_not)
