"""Checks of the machine itself: limits, /dev/shm, its name, the ports at which nodes meet."""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import resource
import socket
import tempfile

from holdfast import linux
from holdfast.doctor.finding import Asked, Finding, combine, fail, ok, plural, size, warn

FEW_FILES = 512  # an agent of eight ranks, each with some data loaders, is over this
GOOD_FILES = 4096
SHM = "/dev/shm"
SHM_PROBE_BYTES = 16 << 20
SMALL_SHM_BYTES = 1 << 30  # Docker gives 64 MiB unless told otherwise
LOW_SHM_BYTES = 256 << 20
PORTS = (29400, 29500)  # where c10d and static jobs meet, if nobody says otherwise

_LISTENING = "0A"  # TCP_LISTEN in /proc/net/tcp


def limits(asked: Asked) -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    room = hard == resource.RLIM_INFINITY or hard >= GOOD_FILES
    cure = "ulimit -n 65536" if room else "raise the hard limit: LimitNOFILE= of the service, or limits.conf"
    text = f"a process may open {plural(soft, 'file')}"
    figures = {"open_files": soft, "open_files_hard": hard}
    if soft < FEW_FILES:
        files = fail(f"{text}, too few for ranks and their data loaders", cure, **figures)
    elif soft < GOOD_FILES:
        files = warn(f"{text}; data loaders that share tensors may need more", cure, **figures)
    else:
        files = ok(text, **figures)
    return combine([files, *_locked_memory()])


def _locked_memory() -> list[Finding]:
    """Only network cards that read a process's memory by themselves want it locked."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or not os.path.exists("/dev/infiniband"):
        return []
    text = f"InfiniBand is here, and a process may lock only {size(soft)} of its memory"
    return [warn(text, "ulimit -l unlimited, or LimitMEMLOCK=infinity of the service", locked_bytes=soft)]


def shm(asked: Asked) -> Finding:
    larger = "docker run --shm-size=16g, a memory volume in Kubernetes, or mount -o remount,size=16G /dev/shm"
    try:
        space = os.statvfs(SHM)
        with tempfile.TemporaryFile(dir=SHM) as file:
            os.posix_fallocate(file.fileno(), 0, SHM_PROBE_BYTES)
    except OSError as failure:
        full = failure.errno == errno.ENOSPC
        cure = f"remove what is left there, or make it larger: {larger}" if full else "see its mount, its mode, ulimit"
        return fail(f"{SHM} does not take {size(SHM_PROBE_BYTES)}: {os.strerror(failure.errno or 0)}", cure)
    total, free = space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize
    figures = {"bytes": total, "free_bytes": free}
    text = f"{size(free)} of {size(total)} are free in {SHM}"
    if total < SMALL_SHM_BYTES:
        return warn(f"{text}, little for data loaders", larger, **figures)
    if free < LOW_SHM_BYTES:
        return warn(text, "remove what ended jobs have left there", **figures)
    return ok(text, **figures)


def names(asked: Asked) -> Finding:
    from holdfast.agent.meeting import leads_home

    host = socket.gethostname()
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as failure:
        why = failure.strerror if isinstance(failure, socket.gaierror) else str(failure)
        cure = "put it into DNS or /etc/hosts, with the address that other nodes reach"
        return fail(f"this machine's own name {host!r} cannot be resolved: {why}", cure)
    address = str(found[0][4][0])
    if leads_home(host, found):
        text = f"{host} is {address} on this machine, where other machines cannot reach it"
        return warn(text, "correct its /etc/hosts, or give --local-addr; one node alone needs nothing", address=address)
    return ok(f"{host} is {address}", address=address)


def ports(asked: Asked) -> Finding:
    return combine([_port(port, bool(asked.ports)) for port in asked.ports or PORTS])


def _port(port: int, is_wanted: bool) -> Finding:
    failure = _bind(port)
    if failure is None:
        return ok(f"port {port} is free")
    if failure.errno != errno.EADDRINUSE:
        return fail(f"port {port} cannot be had: {os.strerror(failure.errno or 0)}", "choose one above 1023")
    text = f"port {port} is taken{_owner(port)}"
    if is_wanted:
        return fail(text, "end that, or choose another port for the job")
    return warn(text, f"a job that is to meet here needs another: --rdzv-endpoint=HOST:{port + 1}")


def _bind(port: int) -> OSError | None:
    for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind((address, port))
        except OSError as failure:
            if failure.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):  # many machines have no IPv6
                return failure
    return None


def _owner(port: int) -> str:
    """Who listens there, as far as this user may see."""
    inodes = set()
    for path in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in linux.read(path).splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                    inodes.add(f"socket:[{fields[9]}]")
    for path in glob.iglob("/proc/[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if os.readlink(path) in inodes:
                pid = path.split("/")[2]
                return f" by process {pid} ({linux.read(f'/proc/{pid}/comm').strip()})"
    return ""
