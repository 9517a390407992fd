"""The janitor: a few kilobytes of process between the agent and everything it starts, so that nothing is ever left.

It adopts every orphan below it. When the agent ends, however it ends, or closes the lifeline, the janitor ends all that
is left and itself. If the janitor is the one that is killed, the kernel kills its zygote and with it the workers, and
the agent, which adopts orphans too, ends the rest.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time

from holdfast import linux

# Orphans that clean up behind a dead worker (multiprocessing's resource tracker, torch's shm manager) need a moment.
ORPHAN_EXIT_S = 0.25
# Data loaders end by a SIGTERM, and what cleans up their shared memory, which ignores it, ends after the last of them.
ORPHAN_TERM_S = 1.0


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # whoever started the agent may have had it ignored
    agent, channel_fd, lifeline_fd = (int(argument) for argument in sys.argv[1:4])
    linux.adopt_orphans()
    janitor = os.getpid()
    if os.fork() == 0:
        os.close(lifeline_fd)
        linux.die_with_parent(janitor)
        from holdfast.agent import zygote as zygote_process

        zygote_process.main(channel_fd)
        return
    os.close(channel_fd)
    linux.set_title("holdfast janitor")
    _watch(agent, lifeline_fd)
    os._exit(0)


def _watch(agent: int, lifeline_fd: int) -> None:
    """Reap until the agent is gone, or says that it is done; then end everything below."""
    wakeup_r, wakeup_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wakeup_w, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    # SIGUSR1 is Slurm's warning, which some sites send to every process of a job.
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
        signal.signal(ignored, signal.SIG_IGN)
    poll = select.poll()
    poll.register(wakeup_r, select.POLLIN)
    poll.register(lifeline_fd, select.POLLIN)
    with contextlib.suppress(ProcessLookupError):
        agent_fd = os.pidfd_open(agent)
        if os.getppid() == agent:
            poll.register(agent_fd, select.POLLIN)
            _reap()
            while {fd for fd, _ in poll.poll()} == {wakeup_r}:
                os.read(wakeup_r, 512)
                _reap()
    _end_all(wakeup_r)


def _end_all(wakeup_r: int) -> None:
    """The zygotes have lost their agent too and end with their workers. What those leave is given time to clean up."""
    poll = select.poll()
    poll.register(wakeup_r, select.POLLIN)
    # A process that forks while it is killed is behind the list that was made of it, hence the many last rounds.
    rounds = [(0, ORPHAN_EXIT_S), (signal.SIGTERM, ORPHAN_TERM_S), *[(signal.SIGKILL, 0.05)] * 40]
    for signum, wait_s in rounds:
        linux.signal_all(list(linux.descendants(os.getpid())), signum)
        if _wait_until_alone(poll, wakeup_r, wait_s):
            return


def _wait_until_alone(poll: select.poll, wakeup_r: int, wait_s: float) -> bool:
    until = time.monotonic() + wait_s
    while True:
        _reap()
        if not linux.children(os.getpid()):
            return True
        left_s = until - time.monotonic()
        if left_s <= 0:
            return False
        if poll.poll(left_s * 1000):
            os.read(wakeup_r, 512)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0] != 0:
            pass
