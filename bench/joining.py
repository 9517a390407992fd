"""How long N nodes take to join a job and get their world: ours, and torch's c10d rendezvous at the sizes it finishes.

    python -m bench.joining [--sizes 100,1000,10000] [--torch 8,16,32,64] [--runs 3]

Ours: the coordinator in one process, as in an agent; N connections in another, each with the full handshake, a hello
and a wait for its own share of the world. The clock runs from the first connect to the last share. Torch's: N handlers
in threads of one process on one store, as its own tests do it, each calling `next_rendezvous`.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import resource
import socket
import statistics
import threading
import time
from multiprocessing.connection import Connection

from bench.launchers import versions
from holdfast.control import protocol
from holdfast.control.coordinator import Coordinator
from holdfast.control.membership import Settings
from holdfast.coordinator.desk import Desk
from holdfast.coordinator.host import Host
from holdfast.coordinator.ledger import Memory
from holdfast.wire import peer as wire
from holdfast.wire.secret import Secret

SECRET = Secret(b"k" * 32, "the benchmark")
AT_ONCE = 512  # connections being made at a time; a single client machine stands in for all nodes


def serve(nodes: int, ready: Connection) -> None:
    async def run() -> None:
        settings = Settings(run_id="bench", min_nodes=nodes, max_nodes=nodes, node_timeout_s=60.0)
        host = Host(asyncio.get_running_loop(), Coordinator(settings, 0, None), Memory(), print)
        desk = Desk("bench", host, SECRET, print)
        listener = socket.create_server(("127.0.0.1", 0), backlog=wire.BACKLOG)
        port = listener.getsockname()[1]
        await desk.open(listener)
        host.begin()
        ready.send(port)
        while not await asyncio.get_running_loop().run_in_executor(None, ready.poll, 1.0):
            pass
        desk.close()

    _allow_many_files()
    asyncio.run(run())


async def join(port: int, nodes: int) -> float:
    """Seconds until every node has its share of the world."""
    loop = asyncio.get_running_loop()
    have_all = loop.create_future()
    left = nodes
    peers: list[wire.Peer] = []
    slots = asyncio.Semaphore(AT_ONCE)

    def heard(peer: wire.Peer, message: protocol.ToAgent) -> None:
        nonlocal left
        if isinstance(message, protocol.Launch):
            left -= 1
            if left == 0:
                have_all.set_result(time.monotonic())

    async def one(number: int) -> None:
        def make() -> wire.Peer:
            return wire.Peer(
                "client",
                SECRET,
                protocol.ToAgent,
                on_ready=lambda peer: None,
                on_message=heard,
                on_closed=lambda peer, why: None,
            )

        async with slots:
            peer = await wire.connect("127.0.0.1", port, make)
        peers.append(peer)
        peer.send(protocol.Seek("bench"))
        peer.send(protocol.Hello(protocol.VERSION, f"{number:032x}", f"n{number}", "127.0.0.1", 8, 1, order=number))

    began_s = time.monotonic()
    await asyncio.gather(*(one(number) for number in range(nodes)))
    took_s = float(await have_all) - began_s
    for peer in peers:
        peer.abort()
    return took_s


def ours_s(nodes: int) -> float:
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(nodes, theirs))
    server.start()
    try:
        if not ours.poll(30.0):
            raise RuntimeError("the coordinator did not start")
        return asyncio.run(asyncio.wait_for(join(ours.recv(), nodes), 120.0))
    finally:
        ours.send("end")
        server.join(10)


def torch_s(nodes: int, within_s: float) -> float | None:
    """None if it is not done within that time. In a process of its own, which is then killed: its threads go on."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=rendezvous, args=(nodes, theirs), daemon=True)
    process.start()
    try:
        return float(ours.recv()) if ours.poll(within_s + 5.0) else None  # 5 s to import torch
    finally:
        process.kill()
        process.join()


def rendezvous(nodes: int, report: Connection) -> None:
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    done = threading.Semaphore(0)

    def one() -> None:
        client = TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
        params = RendezvousParameters("c10d", f"127.0.0.1:{store.port}", "bench", nodes, nodes, last_call_timeout="1")
        create_handler(client, C10dRendezvousBackend(client, "bench"), params).next_rendezvous()
        done.release()

    began_s = time.monotonic()
    for _ in range(nodes):
        threading.Thread(target=one, daemon=True).start()
    for _ in range(nodes):
        done.acquire()
    report.send(time.monotonic() - began_s)


def _allow_many_files() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", default="100,1000,10000")
    parser.add_argument("--torch", default="8,16,32,64")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--torch-limit", type=float, default=60.0, help="seconds to give each run of torch's")
    args = parser.parse_args()
    _allow_many_files()
    print(f"joining: {args.runs} runs each; {versions()}")
    print("\n| nodes | holdfast | torch's c10d rendezvous |\n|---|---|---|")
    for nodes in [int(n) for n in args.torch.split(",") if n]:
        took = [torch_s(nodes, args.torch_limit)]
        ours = statistics.median(ours_s(nodes) for _ in range(args.runs))
        theirs = f"{took[0]:.1f} s" if took[0] is not None else f"not in {args.torch_limit:g} s"
        print(f"| {nodes} | {ours * 1000:.0f} ms | {theirs} |", flush=True)
    for nodes in [int(n) for n in args.sizes.split(",") if n]:
        ours = statistics.median(ours_s(nodes) for _ in range(args.runs))
        print(f"| {nodes} | {ours:.2f} s ({ours / nodes * 1e6:.0f} µs a node) | |", flush=True)


if __name__ == "__main__":
    main()
