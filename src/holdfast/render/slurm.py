"""The sbatch file of a job: one agent a node, a warning before the time is over, and a requeue after it."""

from __future__ import annotations

import shlex

import msgspec

from holdfast.control.causes import EXIT_DO_NOT_REQUEUE
from holdfast.render.job import Job

WARNING_S = 120  # at least; Slurm may be a minute early


class Batch(msgspec.Struct, frozen=True):
    """What Slurm is asked for besides nodes and GPUs."""

    name: str = "holdfast"
    time: str = ""  # the partition's limit
    partition: str = ""  # the default one
    cpus: int | None = None  # of each node; None: whole nodes


def warning_s(job: Job) -> int:
    """How long before its end the job is told of it."""
    return max(WARNING_S, job.leaves_s)


def render(job: Job, batch: Batch) -> str:
    parts = [_head(job, batch), _SIGNALS]
    if job.needs_secret:
        parts.append(_SECRET)
    if job.at_first:
        parts.append(_MEETING)
    parts += [_step(job), _REQUEUE]
    return "\n\n".join(parts) + "\n"


def _head(job: Job, batch: Batch) -> str:
    lines = [
        "#!/bin/bash",
        "# By `holdfast render slurm`, for sbatch. What is given to sbatch itself counts more than the lines below.",
        *(f"#SBATCH --{option}" for option in _options(job, batch)),
    ]
    return "\n".join(lines)


def _options(job: Job, batch: Batch) -> list[str]:
    least, most = job.min_nodes + job.spares, job.most_nodes
    return [
        f"job-name={batch.name}",
        *([f"partition={batch.partition}"] if batch.partition else []),
        *([f"time={batch.time}"] if batch.time else []),
        # Without --ntasks-per-node, with which Slurm gives the least of them: srun says that, below.
        f"nodes={most}" if least == most else f"nodes={least}-{most}",
        *([f"gpus-per-node={job.gpus}"] if job.gpus else []),
        # All ranks of a node are below one task, which has one CPU if nothing is said.
        *(["exclusive", "mem=0"] if batch.cpus is None else [f"cpus-per-task={batch.cpus}"]),
        "output=%x-%j.log",
        "open-mode=append",
        "requeue",
        # Without it the loss of a node ends the job, and Slurm requeues it: better, where none can be spared.
        *(["no-kill"] if job.can_lose else []),
        f"signal=B:USR1@{warning_s(job)}",
    ]


_SIGNALS = """\
# SIGUSR1: the time is nearly over. All ranks save and end, and the job goes back into the queue.
# SIGTERM: somebody has cancelled it. All ranks save and end, and that is all.
warned='' cancelled='' step=''
drain() {
    # By scancel and not by a signal to srun, which would kill its tasks. It fails where the job is ending already.
    [[ -z $step ]] || scancel --signal=TERM "$SLURM_JOB_ID" 2>/dev/null
}
trap 'warned=yes; drain' USR1
trap 'cancelled=yes; drain' TERM"""

_SECRET = """\
# By this the nodes know each other: new at every start, and in the environment, where no other user sees it.
HOLDFAST_SECRET=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')
export HOLDFAST_SECRET"""

_MEETING = """\
# Where they meet: the first node, at a port of this job's own, since others may run there too.
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
endpoint=$first:$((20000 + SLURM_JOB_ID % 10000))"""


def _step(job: Job) -> str:
    """Words that the shell is to read are quoted here, by hand; the user's are not for it."""
    count = '"$SLURM_JOB_NUM_NODES"'  # of a range, what was granted
    words = [
        f"srun --nodes={count} --ntasks={count} --ntasks-per-node=1 --export=ALL --cpu-bind=none",
        f"{'--no-kill ' if job.can_lose else ''}--kill-on-bad-exit=0 --wait=0",
        shlex.join(("holdfast", "run", *job.added)),
    ]
    if job.at_first:
        words.append('--rdzv-backend=c10d --rdzv-endpoint="$endpoint"')
    if job.several and not job.has_id:
        # Each start is a job of its own: nothing of the last one, lost nodes say, is waited for.
        words.append('--rdzv-id="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"')
    words.append(shlex.join(job.command))
    return _STEP.replace("SRUN", " \\\n        ".join(words))


# With signals that came within milliseconds of the step's end, bash 5.2's `wait`, asked as often as one likes, lost its
# code in 4 scripts of 1,000. The pipe lost none in 3,344.
_STEP = """\
# The step's code comes by a pipe: where a signal and the end come together, that of `wait` may be the signal's.
exec 3<> <(:)
(
    trap : USR1 TERM
    SRUN
    echo "$?" >&3
) &
step=$!
[[ -z $warned$cancelled ]] || drain
while kill -0 "$step" 2>/dev/null; do
    wait "$step" # until the end, or a signal
done
read -r -t 1 -u 3 code || code=137"""

_REQUEUE = f"""\
# 0: the training is over. {EXIT_DO_NOT_REQUEUE}: a rank has asked not to be started again.
if [[ -n $warned && -z $cancelled && $code -ne 0 && $code -ne {EXIT_DO_NOT_REQUEUE} ]]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code\""""
