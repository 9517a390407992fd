"""The Kubernetes objects of a job: an indexed Job with one agent a pod, the Service by which pods have names, a Secret.

Of Kubernetes 1.31 or newer: before, some of the fields are not there, or have to be switched on.
"""

from __future__ import annotations

import msgspec

from holdfast.control.causes import EXIT_CODES, Kind, is_worth_rescheduling
from holdfast.render.job import Job
from holdfast.render.yaml_text import Value, document

PORT = 29400
KEY = "secret"  # of the Secret
CONTAINER = "holdfast"
RETRIES = 10  # of one pod, before its node's place is given up

# Another pod would end in the same way: flags that cannot be meant, the program's own error, its want of memory, and
# what a rank asked for. All of them come after the restarts that `holdfast run` makes by itself.
FINAL = (2, *sorted(code for kind, code in EXIT_CODES.items() if not is_worth_rescheduling(kind)))


class Pods(msgspec.Struct, frozen=True):
    """What Kubernetes has to know besides numbers."""

    image: str
    name: str = "holdfast"
    secret_name: str = ""  # one that is there; else one is made
    claim: str = ""  # a PersistentVolumeClaim,
    mount: str = ""  # and where it is seen


def render(job: Job, pods: Pods, secret: str) -> str:
    """`secret` is what the nodes share, if they need one and none is there."""
    objects = [_job(job, pods)]
    makes_secret = job.needs_secret and not pods.secret_name
    if job.several:
        objects.insert(0, _service(pods))
    if makes_secret:
        objects.insert(0, _secret(pods, secret))
    return _HEAD + (_PRIVATE if makes_secret else "") + "---\n".join(map(document, objects))


_HEAD = "# By `holdfast render k8s`, for kubectl apply. Kubernetes 1.31 or newer.\n"
_PRIVATE = (
    "# The secret in it is of one job. Keep this file to yourself, or name a Secret that is there: --secret NAME.\n"
)


def _secret(pods: Pods, secret: str) -> dict[str, Value]:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": pods.name},
        # A file that is rendered anew has another one, which pods that are replaced later would come with.
        "immutable": True,
        "stringData": {KEY: secret},
    }


def _service(pods: Pods) -> dict[str, Value]:
    """Headless: it only gives names to pods, and does so before they are ready."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": pods.name},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"batch.kubernetes.io/job-name": pods.name},
            "ports": [{"name": "rendezvous", "port": PORT}],
        },
    }


def _job(job: Job, pods: Pods) -> dict[str, Value]:
    spec: dict[str, Value] = {
        "completionMode": "Indexed",
        "completions": job.most_nodes,
        "parallelism": job.most_nodes,
        "backoffLimitPerIndex": RETRIES,
        "maxFailedIndexes": job.can_lose,
        "podReplacementPolicy": "Failed",  # never two pods with one place
        "podFailurePolicy": {"rules": _rules()},
    }
    if job.several:
        # Where the first ranks have ended well, so has the training. A pod that is late, or was about to come back, has
        # nobody to join.
        spec["successPolicy"] = {"rules": [{"succeededIndexes": "0"}]}
    spec["template"] = {"spec": _pod(job, pods)}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": pods.name}, "spec": spec}


def _rules() -> list[Value]:
    """What is no rule's is retried, and counts."""

    def on_codes(*codes: int) -> dict[str, Value]:
        return {"containerName": CONTAINER, "operator": "In", "values": codes}

    return [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "Ignore", "onExitCodes": on_codes(EXIT_CODES[Kind.PREEMPTED])},
        {"action": "FailJob", "onExitCodes": on_codes(*FINAL)},
    ]


def _pod(job: Job, pods: Pods) -> dict[str, Value]:
    volumes: list[Value] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    if pods.claim:
        volumes.append({"name": "data", "persistentVolumeClaim": {"claimName": pods.claim}})
    return {
        **({"subdomain": pods.name} if job.several else {}),
        "restartPolicy": "Never",  # by the Job and not on the spot: it may have been the machine
        "terminationGracePeriodSeconds": job.leaves_s,
        "enableServiceLinks": False,  # variables of other people's Services, HOLDFAST_PORT say
        "containers": [_container(job, pods)],
        "volumes": volumes,
    }


def _container(job: Job, pods: Pods) -> dict[str, Value]:
    made: dict[str, Value] = {
        "name": CONTAINER,
        "image": pods.image,
        "command": [_literally(word) for word in ("holdfast", "run", *job.added, *job.command)],
    }
    if job.several:
        made["env"] = _env(job, pods)
        made["ports"] = [{"name": "rendezvous", "containerPort": PORT}]
    if job.gpus:
        made["resources"] = {"limits": {"nvidia.com/gpu": job.gpus}}
    mounts: list[Value] = [{"name": "shm", "mountPath": "/dev/shm"}]
    made["volumeMounts"] = [*mounts, {"name": "data", "mountPath": pods.mount}] if pods.claim else mounts
    return made


def _literally(word: str) -> str:
    """Kubernetes replaces $(NAME) in a command, and $$ is a dollar."""
    return word.replace("$", "$$")


def _env(job: Job, pods: Pods) -> list[Value]:
    """By variables, so that `kubectl exec POD -- holdfast nodes` knows as much as the job does."""
    env: list[Value] = [_field("GROUP_RANK", "annotations", "job-completion-index")]
    if job.at_first:
        env.append({"name": "PET_RDZV_BACKEND", "value": "c10d"})
        env.append({"name": "PET_RDZV_ENDPOINT", "value": f"{pods.name}-0.{pods.name}:{PORT}"})
    if not job.has_id:
        # The name would be that of the next Job, too, and pods of this one may take minutes to end.
        env.append(_field("PET_RDZV_ID", "labels", "controller-uid"))
    if job.needs_secret:
        ref: Value = {"name": pods.secret_name or pods.name, "key": KEY}
        env.append({"name": "HOLDFAST_SECRET", "valueFrom": {"secretKeyRef": ref}})
    return env


def _field(name: str, kind: str, key: str) -> dict[str, Value]:
    path = f"metadata.{kind}['batch.kubernetes.io/{key}']"
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
