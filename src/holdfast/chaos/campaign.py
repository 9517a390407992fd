"""From a plan and a command to a verdict: a folder, an undisturbed twin, the disturbed job, and what both have left."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from holdfast.chaos import disk, plan, verdict, weights
from holdfast.chaos.conductor import ENDED, LAST, Conductor
from holdfast.chaos.hands import Etcd, Hands, Links
from holdfast.chaos.inside import VARIABLE
from holdfast.chaos.job import LIVES, Job
from holdfast.chaos.kinds import ETCD, KINDS, ROOT, Hand
from holdfast.chaos.network import Network, NetworkError
from holdfast.chaos.plan import Plan, Wrong
from holdfast.chaos.verdict import WEIGHTS, Verdict, Weights

OVER = "HOLDFAST_CHAOS_OVER"  # names what is there once no fault is left to come, for a program that paces itself
VERDICT = "verdict.json"
UNLIMITED = 1_000_000
POLL_S = 0.1

Say = Callable[[str], None]


class Stop:
    """Whether somebody wants the campaign to end. Signals only leave a mark, and loops look at it."""

    def __init__(self) -> None:
        self.asked = False
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, self._ask)

    def _ask(self, signum: int, frame: object) -> None:
        self.asked = True


class Failed(Exception):
    """The campaign cannot be run; the text says why, and what next."""


def missing(planned: Plan) -> list[str]:
    """What a plan needs and this machine or this user has not."""
    needs = {need for name in plan.kinds_of(planned) for need in KINDS[name].needs}
    found = []
    if ROOT in needs and os.geteuid() != 0:
        rooted = sorted(name for name in plan.kinds_of(planned) if ROOT in KINDS[name].needs)
        found.append(f"root, for {', '.join(rooted)}")
    if (ETCD in needs or planned.backend == "etcd") and shutil.which("etcd") is None:
        found.append("the program etcd")
    if any(KINDS[name].hand is Hand.LINK for name in plan.kinds_of(planned)):
        found += [f"the program {name}" for name in ("ip", "bridge", "nsenter") if shutil.which(name) is None]
    return found


def make_folder(log_dir: str) -> Path:
    """Raises Failed."""
    try:
        os.makedirs(log_dir, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix="chaos_", dir=log_dir)).resolve()
    except OSError as failure:
        raise Failed(f"{log_dir}: {failure.strerror}; give another --log-dir") from None


def run(folder: Path, path: str, planned: Plan, seed: int, argv: Sequence[str], twin: bool, say: Say) -> Verdict:
    """Raises Failed and Wrong."""
    if lacks := missing(planned):
        raise Failed(f"{path} needs {' and '.join(lacks)}; holdfast chaos kinds says what each kind needs")
    stop = Stop()
    try:
        shutil.copy(path, folder / "plan.toml")
        twins = _run_twin(folder, argv, planned.nodes, say, stop) if twin else None
        ended = _run_job(folder, planned, seed, argv, say, stop)
    except OSError as failure:
        what = f"{failure.filename}: {failure.strerror}" if failure.filename else str(failure)
        raise Failed(f"the campaign was ended: {what}; {folder} has what there is") from None
    if stop.asked:
        raise Failed(f"interrupted; the job was ended, and {folder} has what there is")
    if not (folder / "job" / LIVES).exists():
        raise Failed(f"the job has ended before it began{_last_words(folder / 'job' / 'err')}")
    if twins is not None:
        with contextlib.suppress(OSError):
            _write(folder / WEIGHTS, _weights(folder, twins, ended))
    judged = verdict.judge(verdict.load(folder))
    _write(folder / VERDICT, judged)
    return judged


def _run_twin(folder: Path, argv: Sequence[str], nodes: int, say: Say, stop: Stop) -> str:
    """Its own word on its weights, if it has one. Raises Failed."""
    say("the undisturbed twin runs first")
    checkpoints = folder / "twin" / "checkpoints"
    checkpoints.mkdir(parents=True)
    env = {**_environment(checkpoints), OVER: str(checkpoints)}
    job = Job(folder / "twin", _command(argv, nodes, None), env, nodes)
    began_s = time.monotonic()
    job.begin()
    try:
        while job.code is None and not stop.asked:
            job.take()
            time.sleep(POLL_S)
        job.take()
        code = job.code
    finally:
        job.kill()
    if stop.asked:
        raise Failed("interrupted; the twin was ended")
    if code != 0:
        raise Failed(f"the undisturbed job itself ended with exit code {code}{_last_words(folder / 'twin' / 'err')}")
    say(f"the twin was done in {time.monotonic() - began_s:.1f} s")
    return job.digest


def _run_job(folder: Path, planned: Plan, seed: int, argv: Sequence[str], say: Say, stop: Stop) -> str:
    """The program's own word on its weights, if it has one. Raises Failed."""
    dues = plan.draw(planned, seed)
    checkpoints = folder / "job" / "checkpoints"
    checkpoints.mkdir(parents=True)
    with contextlib.ExitStack() as undo:
        if "full-disk" in plan.kinds_of(planned):
            try:
                disk.own_disk(checkpoints, planned.disk_mb)
            except disk.NotHere as why:
                raise Failed(str(why)) from None
        links = _links(planned, undo)
        etcd = _etcd(folder, planned, undo)
        env = {**_environment(checkpoints), VARIABLE: str(folder / "orders.json"), OVER: str(folder / LAST)}
        if links is not None:
            env["GLOO_SOCKET_IFNAME"] = "eth0"  # names lead to the machine's own loopback in there
        endpoint = etcd.endpoints if etcd is not None else ""
        namespace = links.namespace if links is not None else lambda node: ""
        job = Job(folder / "job", _command(argv, planned.nodes, links, endpoint), env, planned.nodes, namespace)
        hands = Hands(folder, job, checkpoints, links, etcd)
        say(f"{len(dues)} faults from seed {seed}; {folder / 'faults.jsonl'} has each as it is done")
        try:
            ended = Conductor(folder, job, hands, dues, planned.limit_s, say, lambda: stop.asked).run(seed)
        except NetworkError as failure:
            raise Failed(f"the network between the nodes: {failure}; {folder} has what there is") from None
        _write(folder / ENDED, ended)
    return ended.digest


def _last_words(err: Path) -> str:
    with contextlib.suppress(OSError):
        if lines := err.read_text(errors="replace").strip().splitlines():
            return f": {lines[-1].strip()}; see {err}"
    return "; it has said nothing"


def _weights(folder: Path, twins: str, ours: str) -> Weights:
    if ours or twins:
        return Weights(ours, twins)
    try:
        return Weights(*weights.digests(folder / "job" / "checkpoints", folder / "twin" / "checkpoints"))
    except (ValueError, OSError) as failure:
        return Weights(why_not=str(failure))


def _environment(checkpoints: Path) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PET_", "TORCHELASTIC_"))}
    return env | {"CHECKPOINT_DIR": str(checkpoints)}


# -- the command of a node --------------------------------------------------------------------------------------------


def _command(argv: Sequence[str], nodes: int, links: Links | None, etcd: str = "") -> Callable[[int, str], list[str]]:
    """What stands in the user's own flags beats ours, but for the folder, which we have to find."""
    free = f"--max-restarts={UNLIMITED}"
    if nodes == 1:
        return lambda node, log_dir: [free, f"--log-dir={log_dir}", *argv]
    run_id = f"chaos-{random.SystemRandom().randrange(1 << 32):08x}"
    addresses = links.addresses if links is not None else [_loopback(run_id, node) for node in range(nodes)]
    meeting = ["--rdzv-backend=etcd", f"--rdzv-endpoint={etcd}"] if etcd else ["--rdzv-backend=c10d"]
    port = 29400 if links is not None else _free_port(addresses[0])

    def command(node: int, log_dir: str) -> list[str]:
        ours = [free, f"--log-dir={log_dir}", f"--nnodes={nodes}", f"--rdzv-id={run_id}", *meeting]
        ours += [f"--local-addr={addresses[node]}", "--restart-budget=failures"]
        if not etcd:
            ours += [f"--rdzv-endpoint={addresses[0]}:{port}", f"--rdzv-conf=is_host={str(node == 0).lower()}"]
        return [*ours, *argv]

    return command


def _loopback(run_id: str, node: int) -> str:
    """An address of this machine alone that no other campaign has."""
    number = int(run_id[-8:], 16)
    return f"127.{1 + number % 250}.{1 + number // 250 % 250}.{node + 1}"


def _free_port(address: str) -> int:
    with socket.create_server((address, 0)) as listener:
        return int(listener.getsockname()[1])


def _links(planned: Plan, undo: contextlib.ExitStack) -> Links | None:
    if not any(KINDS[name].hand is Hand.LINK for name in plan.kinds_of(planned)):
        return None
    try:
        return undo.enter_context(Network(planned.nodes))
    except (NetworkError, OSError) as failure:
        raise Failed(f"a network of {planned.nodes} nodes cannot be made: {failure}") from None


def _etcd(folder: Path, planned: Plan, undo: contextlib.ExitStack) -> Etcd | None:
    if planned.backend != "etcd":
        return None
    if any(KINDS[name].hand is Hand.LINK for name in plan.kinds_of(planned)):
        raise Wrong("faults of links and an etcd in one plan are not supported; make two plans")
    from holdfast.chaos.etcd import EtcdError, Members

    try:
        return undo.enter_context(Members(folder / "etcd"))
    except EtcdError as failure:
        raise Failed(str(failure)) from None


def _write(path: Path, value: msgspec.Struct) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")
