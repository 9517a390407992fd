"""What makes an agent a node of a job: its machine, and its line to the coordinator."""

from __future__ import annotations

import math
import os
import socket

from holdfast.agent import preflight
from holdfast.agent.line import Line
from holdfast.agent.link import Alone, Post, Say
from holdfast.agent.options import Options
from holdfast.agent.rundir import RunDirectory
from holdfast.control import node as nodes
from holdfast.control import protocol
from holdfast.control.restarts import Decide
from holdfast.coordinator import ledger
from holdfast.coordinator.host import Merge


def host(options: Options) -> str:
    """By which people know this machine."""
    cluster = options.cluster
    return cluster.local_addr if cluster is not None and cluster.local_addr else socket.gethostname()


def make_node(options: Options, node: str, nproc: int) -> nodes.Node:
    settings, cluster = options.settings, options.cluster
    hello = protocol.Hello(
        version=protocol.VERSION,
        node=node,
        host=host(options),
        addr="",
        local_size=nproc,
        store_port=0,
        role=options.role,
        order=cluster.order if cluster is not None else None,
        settings=f"--nnodes={settings.min_nodes}:{settings.max_nodes} --max-restarts={settings.max_restarts}",
    )
    return nodes.Node(
        hello,
        options.shutdown_timeout_s,
        join_timeout_s=settings.join_timeout_s if cluster is not None else math.inf,
        close_timeout_s=cluster.close_timeout_s if cluster is not None else 0.0,
        beat_s=settings.beat_s,
        hang_mode=options.rules.mode,
        hang_signal=options.ft.rank_termination_signal,
    )


def make_link(
    options: Options, node: str, decide: Decide, post: Post, say: Say, run_dir: RunDirectory, merge: Merge
) -> Alone | Line:
    if options.cluster is None:
        return Alone(options.master_addr, node, options.settings, decide, post)
    return Line(
        options.cluster,
        options.settings,
        node,
        decide,
        post,
        say,
        run_dir.join(ledger.NAME),
        os.path.join(run_dir.siblings, ledger.NAME),
        preflight.tls(options.cluster),
        merge,
    )
