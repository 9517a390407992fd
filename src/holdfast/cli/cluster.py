"""The flags by which several nodes make one job: checked, and turned into settings."""

from __future__ import annotations

import os
import socket
import uuid
from argparse import Namespace

from holdfast.agent import preflight
from holdfast.agent.options import Cluster, EtcdAccess
from holdfast.agent.preflight import Refused
from holdfast.cli.fault_tolerance import truth
from holdfast.cli.usage import Usage, one_of
from holdfast.control.membership import Assignment, Budget, Policy, Settings
from holdfast.fault_tolerance import FaultToleranceConfig
from holdfast.wire import secret

C10D_PORT = 29400
STATIC_PORT = 29500
ETCD_PORT = 2379
BACKENDS = ("static", "c10d", "etcd", "etcd-v2")

# What torch's rendezvous backends understand (2.13), of which ours use the first two lines.
RDZV_KEYS = (
    *("join_timeout", "last_call_timeout", "close_timeout", "is_host", "timeout"),
    *("user", "cacert", "ssl_cert", "ssl_cert_key", "protocol"),
    *("heartbeat_timeout", "keep_alive_interval", "keep_alive_max_attempt", "store_type", "read_timeout", "rank"),
    *("min_workers", "max_workers"),
)
WITHOUT_EFFECT = RDZV_KEYS[-8:]


def check(args: Namespace) -> None:
    """Refuse what cannot be meant, before anything is started."""
    smallest, largest = nodes(args.nnodes)
    check_contact(args)
    if args.standalone:
        if smallest > 1:
            raise Usage(f"--standalone is one node, --nnodes={args.nnodes} is not; leave one of them out")
        _check_addresses(args)
        return
    if args.rdzv_endpoint:
        endpoints(args)
    if smallest > 1 and args.rdzv_backend in ("c10d", "etcd") and not args.rdzv_endpoint:
        raise Usage(f"--rdzv-backend={args.rdzv_backend} needs --rdzv-endpoint, the same on every node")
    if args.rdzv_backend == "static" and smallest != largest and (smallest > 1 or args.rdzv_endpoint):
        raise Usage(f"--nnodes={args.nnodes}: a range needs --rdzv-backend=c10d or etcd, and --rdzv-endpoint")
    if args.rdzv_backend == "static" and args.node_rank >= largest > 1:
        raise Usage(f"--node-rank={args.node_rank} is not below --nnodes={largest}")
    _check_addresses(args)


def check_contact(args: Namespace) -> None:
    """Of how nodes find and trust each other, what can be wrong whatever their number."""
    one_of("--rdzv-backend", args.rdzv_backend, BACKENDS)
    if args.rdzv_backend == "etcd-v2":
        raise Usage("--rdzv-backend=etcd-v2: etcd 3.6 has no v2 any more; use --rdzv-backend=etcd")
    conf(args)
    if (args.tls_cert is None) != (args.tls_key is None):
        raise Usage("--tls-cert and --tls-key belong together")
    if args.tls_cert is not None and args.tls_ca is None:
        raise Usage("--tls-cert needs --tls-ca, so that the other end can be checked")
    if args.tls_ca is not None and args.tls_cert is None:
        raise Usage("--tls-ca needs --tls-cert and --tls-key: every node shows who it is")
    if args.insecure and args.secret_file is not None:
        raise Usage("--insecure and --secret-file exclude each other")


def _check_addresses(args: Namespace) -> None:
    _resolve("--local-addr", args.local_addr)
    if not _several(args) or "master_addr" not in args.given:
        _resolve("--master-addr", args.master_addr)


def settings(args: Namespace, ft: FaultToleranceConfig) -> Settings:
    smallest, largest = nodes(args.nnodes)
    several = _several(args)
    given = conf(args)
    anonymous = args.standalone or (not several and args.rdzv_id == "none")
    return Settings(
        run_id=str(uuid.uuid4()) if anonymous else args.rdzv_id,
        min_nodes=smallest,
        max_nodes=largest if several else 1,
        spares=args.spares,
        max_restarts=args.max_restarts,
        budget=Budget(args.restart_budget),
        refill_steps=args.restart_refill or 0,
        policy=_policy(args, ft),
        assignment=_assignment(args, ft),
        static=several and args.rdzv_backend == "static",
        alone=not several,
        elected=several and args.rdzv_backend == "etcd",
        join_timeout_s=_number(given, "join_timeout", _number(given, "timeout", 600.0)),
        last_call_s=_number(given, "last_call_timeout", 0.0),
        node_timeout_s=args.node_timeout,
        replaces_stragglers=args.on_straggler == "replace",
        max_no_progress=ft.max_no_progress_restarts,
    )


def read(args: Namespace) -> Cluster:
    """How this node finds and trusts the others. Raises Refused where the secret or a certificate cannot be had."""
    given = conf(args)
    static = args.rdzv_backend == "static"
    try:
        shared = secret.INSECURE if args.insecure else secret.load(args.secret_file)
    except secret.SecretError as missing:
        raise Refused(str(missing)) from None
    found = Cluster(
        backend="etcd" if args.rdzv_backend == "etcd" else "c10d",
        endpoints=endpoints(args),
        secret=shared,
        order=args.node_rank if static else _infrastructure_rank(),
        local_addr=unbracketed(args.local_addr or ""),
        is_host=args.node_rank == 0 if static else _truth(given.get("is_host")),
        close_timeout_s=_number(given, "close_timeout", 30.0),
        tls=(args.tls_cert, args.tls_key, args.tls_ca) if args.tls_cert is not None else None,
        etcd=EtcdAccess(
            tls=given.get("protocol") == "https" or "https://" in args.rdzv_endpoint,
            ca=given.get("cacert"),
            cert=given.get("ssl_cert"),
            key=given.get("ssl_cert_key"),
            user=given.get("user"),
            password=_etcd_password(given),
        ),
    )
    preflight.tls(found)
    return found


def _etcd_password(given: dict[str, str]) -> str | None:
    if "user" not in given:
        return None
    if not (password := os.environ.get("HOLDFAST_ETCD_PASSWORD")):
        raise Refused(f"--rdzv-conf user={given['user']} needs the password in HOLDFAST_ETCD_PASSWORD")
    return password


def notes(args: Namespace) -> list[str]:
    """What was asked for and has no effect. Nothing is ignored in silence."""
    said: list[str] = []
    several = _several(args)
    if args.standalone:
        said += [f"{flag} is not used with --standalone" for flag in _given(args, "rdzv_id", "master_port")]
    if not several:
        if nodes(args.nnodes)[1] > 1:
            said.append(
                f"--nnodes={args.nnodes}: nobody can join without --rdzv-backend=c10d --rdzv-endpoint=HOST; "
                "this node starts alone"
            )
        names = ("rdzv_backend", "rdzv_endpoint", "rdzv_conf", "node_rank", "spares", "rank_assignment", "node_timeout")
        if given := _given(args, *names, "secret_file", "insecure", "tls_cert", "tls_key", "tls_ca"):
            said.append(f"{', '.join(given)} {'have' if len(given) > 1 else 'has'} no effect on a single node")
        return said
    if args.rdzv_backend != "static" and (given := _given(args, "node_rank", "master_addr", "master_port")):
        verb = "have" if len(given) > 1 else "has"
        said.append(f"{', '.join(given)} {verb} no effect with --rdzv-backend={args.rdzv_backend}")
    if ignored := [key for key in conf(args) if key in WITHOUT_EFFECT]:
        said.append(f"--rdzv-conf {', '.join(ignored)} {'have' if len(ignored) > 1 else 'has'} no effect here")
    if args.insecure:
        said.append("--insecure: whoever reaches the coordinator's port can join or end this job")
    return said


def nodes(text: str) -> tuple[int, int]:
    try:
        numbers = [int(part) for part in text.split(":")]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2) or not 0 < numbers[0] <= numbers[-1]:
        raise Usage(f"--nnodes={text}: a number or MIN:MAX with 0 < MIN <= MAX is meant, for example 2 or 2:4")
    return numbers[0], numbers[-1]


def _several(args: Namespace) -> bool:
    """Whether other nodes can ever take part."""
    smallest, largest = nodes(args.nnodes)
    if args.standalone or largest + args.spares == 1:
        return False
    return smallest > 1 or bool(args.rdzv_endpoint)


def conf(args: Namespace) -> dict[str, str]:
    found: dict[str, str] = {}
    for pair in filter(None, args.rdzv_conf.split(",")):
        key, equals, value = pair.partition("=")
        if not equals:
            raise Usage(f"--rdzv-conf: {pair!r} is not of the form key=value")
        found[one_of("--rdzv-conf", key.strip(), RDZV_KEYS)] = value.strip()
    for key in ("join_timeout", "last_call_timeout", "close_timeout", "timeout"):
        _number(found, key, 0.0)
    _truth(found.get("is_host"))
    return found


def endpoints(args: Namespace) -> tuple[tuple[str, int], ...]:
    """Hosts and ports to meet at. Names are resolved when they are needed: DNS may be later than we are."""
    if args.rdzv_backend == "static" and not args.rdzv_endpoint:
        return ((unbracketed(args.master_addr), args.master_port or STATIC_PORT),)
    default = {"c10d": C10D_PORT, "etcd": ETCD_PORT}.get(args.rdzv_backend, args.master_port or STATIC_PORT)
    texts = args.rdzv_endpoint.split(",") if args.rdzv_backend == "etcd" else [args.rdzv_endpoint]
    return tuple(_endpoint(text.strip(), default) for text in texts)


def _endpoint(text: str, default: int) -> tuple[str, int]:
    text = text.partition("://")[2] or text
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]") or (text.count(":") > 1 and not text.startswith("[")):
        host, port = text, str(default)
    if not host or "," in host or not port.isdigit() or not 0 < int(port) < 65536:
        raise Usage(f"--rdzv-endpoint={text}: HOST or HOST:PORT is meant, for example node1:29400")
    return unbracketed(host), int(port)


def _policy(args: Namespace, ft: FaultToleranceConfig) -> Policy:
    """A flag of either name beats the file."""
    if args.ft_restart_policy is None and "restart_policy" in args.given:
        return Policy(args.restart_policy)
    return Policy(ft.restart_policy or args.restart_policy)


def _assignment(args: Namespace, ft: FaultToleranceConfig) -> Assignment:
    by_flag = args.ft_use_infra_group_rank is None and "rank_assignment" in args.given
    if by_flag or ft.use_infra_group_rank is None:
        return Assignment(args.rank_assignment)
    return Assignment.INFRASTRUCTURE if ft.use_infra_group_rank else Assignment.DETERMINISTIC


def _infrastructure_rank() -> int | None:
    for name in ("SLURM_PROCID", "GROUP_RANK"):
        if (text := os.environ.get(name)) is not None and text.isdigit():
            return int(text)
    return None


def _number(given: dict[str, str], key: str, default: float) -> float:
    try:
        value = float(given.get(key, default))
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e9:
        raise Usage(f"--rdzv-conf {key}={given[key]}: a number of seconds is meant")
    return value


def _truth(text: str | None) -> bool | None:
    found = None if text is None else truth(text)
    if isinstance(found, str):
        raise Usage(f"--rdzv-conf is_host={text}: true or false is meant")
    return found


def _resolve(flag: str, host: str | None) -> None:
    if not host:
        return
    try:
        socket.getaddrinfo(unbracketed(host), None)
    except (socket.gaierror, UnicodeError) as failure:
        reason = failure.strerror if isinstance(failure, socket.gaierror) else "not a host name"
        raise Refused(f"{flag}: cannot resolve the host name {host!r}: {reason}; check its spelling and DNS") from None


def unbracketed(host: str) -> str:
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def _given(args: Namespace, *names: str) -> list[str]:
    return [f"--{name.replace('_', '-')}" for name in names if name in args.given]
