"""The Kubernetes file against the API's own schemas, and what its pods would do."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kubernetes_validate.utils import all_versions

from holdfast.cli import cluster, flags
from holdfast.cli.render import read
from holdfast.render.k8s import Pods, render
from holdfast.wire import secret

SECRET = "0123456789abcdef" * 4
VERSIONS = [version for version in all_versions() if int(version.split(".")[1]) >= 31]
ETCD = ("--rdzv-backend=etcd", "--rdzv-endpoint=e1,e2", "--rdzv-id=mine", "--secret-file=/s")
COMMANDS = {
    "one": ["train.py"],
    "several": ["--nnodes=2:4", "--spares=1", "--nproc-per-node=8", "--max-restarts=10", "train.py"],
    "words": [
        "--nnodes=2",
        "-m",
        "my.train",
        "a b",
        "$(HOME)",
        "$$",
        "${local_rank}",
        "it's",
        '"',
        "",
        "yes",
        "a\nb",
        "ü",
    ],
    "etcd": ["--nnodes=3", *ETCD, "train.py"],
}


def objects(command: list[str], **pods: str) -> dict[str, Any]:
    text = render(read(command), Pods("registry.example/train:7", **pods), SECRET)
    return {made["kind"]: made for made in yaml.safe_load_all(text)}


def pod_of(made: dict[str, Any]) -> Any:
    return made["Job"]["spec"]["template"]["spec"]


# -- the schemas ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("which", COMMANDS)
def test_the_api_accepts_it(version: str, which: str) -> None:
    for made in objects(COMMANDS[which], name="run7", claim="runs", mount="/runs").values():
        assert kubernetes_validate.validate(made, version, strict=True) == version.rpartition(".")[0]


@pytest.mark.parametrize(
    "path", ["spec.backoffLimitPerIndx", "spec.template.spec.subDomain", "spec.successPolicy.rule"]
)
def test_a_field_that_does_not_exist_is_found(path: str) -> None:
    made = copy.deepcopy(objects(COMMANDS["several"])["Job"])
    *way, last = path.split(".")
    at = made
    for key in way:
        at = at[key]
    at[last] = "x"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(made, "1.31", strict=True)


SPOILED: dict[str, Callable[[Any], object]] = {
    "a wrong type": lambda spec: spec.update(completions="4"),
    "a rule without action": lambda spec: spec["podFailurePolicy"]["rules"][0].pop("action"),
    "a container without name": lambda spec: spec["template"]["spec"]["containers"][0].pop("name"),
}


@pytest.mark.parametrize("how", SPOILED)
def test_what_is_wrong_or_missing_is_found(how: str) -> None:
    made = copy.deepcopy(objects(COMMANDS["several"])["Job"])
    SPOILED[how](made["spec"])
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(made, "1.31", strict=True)


# -- what schemas do not say ------------------------------------------------------------------------------------------


def test_pods_are_named_where_they_meet() -> None:
    made = objects(COMMANDS["several"], name="run7")
    assert list(made) == ["Secret", "Service", "Job"]
    service, env = made["Service"]["spec"], env_of(made)
    assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)
    assert service["selector"] == {"batch.kubernetes.io/job-name": made["Job"]["metadata"]["name"]}
    # An indexed Job's pod has the host name JOB-INDEX, below the subdomain that a headless Service gives.
    assert env["PET_RDZV_ENDPOINT"] == f"run7-0.{pod_of(made)['subdomain']}:{service['ports'][0]['port']}"
    assert pod_of(made)["subdomain"] == made["Service"]["metadata"]["name"]
    assert env["GROUP_RANK"] == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    assert env["PET_RDZV_ID"] == "metadata.labels['batch.kubernetes.io/controller-uid']"


def test_the_size_and_what_may_be_lost() -> None:
    spec = objects(COMMANDS["several"])["Job"]["spec"]
    sizes = {"completions": 5, "parallelism": 5, "maxFailedIndexes": 3}
    assert {key: spec[key] for key in sizes} == sizes
    assert spec["completionMode"] == "Indexed"
    assert spec["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}
    [container] = spec["template"]["spec"]["containers"]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 8}}


def test_which_ends_are_ignored_retried_and_final() -> None:
    spec = objects(COMMANDS["several"])["Job"]["spec"]
    actions = {
        code: rule["action"]
        for rule in spec["podFailurePolicy"]["rules"]
        for code in rule.get("onExitCodes", {}).get("values", ["disruption"])
    }
    assert actions == {"disruption": "Ignore", 87: "Ignore", 2: "FailJob", 81: "FailJob", 84: "FailJob", 93: "FailJob"}
    for rule in spec["podFailurePolicy"]["rules"][1:]:
        codes = rule["onExitCodes"]["values"]
        assert codes == sorted(set(codes)) and 0 not in codes  # the API wants it so
        assert rule["onExitCodes"]["containerName"] == spec["template"]["spec"]["containers"][0]["name"]
    assert spec["template"]["spec"]["restartPolicy"] == "Never"
    assert "--exit-code-from-cause" in spec["template"]["spec"]["containers"][0]["command"]


@pytest.mark.parametrize(("flag", "grace_s"), [([], 120), (["--shutdown-timeout=600"], 630)])
def test_pods_may_save_before_they_are_killed(flag: list[str], grace_s: int) -> None:
    made = objects([*flag, "train.py"])
    assert pod_of(made)["terminationGracePeriodSeconds"] == grace_s
    assert flags.parse(words_of(made)).shutdown_timeout == grace_s - 30


def test_memory_is_shared_and_a_volume_is_mounted() -> None:
    pod = pod_of(objects(["train.py"], claim="runs", mount="/runs"))
    assert pod["volumes"] == [
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
        {"name": "data", "persistentVolumeClaim": {"claimName": "runs"}},
    ]
    mounts = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounts == {"shm": "/dev/shm", "data": "/runs"}


def test_one_node_needs_neither_names_nor_a_secret() -> None:
    made = objects(["--nproc-per-node=cpu", "train.py"])
    assert list(made) == ["Job"]
    assert "successPolicy" not in made["Job"]["spec"] and "subdomain" not in pod_of(made)
    assert not {"env", "ports", "resources"} & pod_of(made)["containers"][0].keys()


# -- the secret -------------------------------------------------------------------------------------------------------


def test_the_secret_is_made_or_is_there() -> None:
    made = objects(COMMANDS["several"], name="run7")
    assert made["Secret"]["stringData"] == {"secret": SECRET} and made["Secret"]["immutable"] is True
    assert env_of(made)["HOLDFAST_SECRET"] == ("run7", "secret")
    theirs = objects(COMMANDS["several"], secret_name="ours")
    assert "Secret" not in theirs and env_of(theirs)["HOLDFAST_SECRET"] == ("ours", "secret")
    assert SECRET not in render(read(COMMANDS["several"]), Pods("i", secret_name="ours"), SECRET)


def test_who_brings_a_secret_or_an_etcd_keeps_it() -> None:
    made = objects(COMMANDS["etcd"])
    assert list(made) == ["Service", "Job"]
    assert env_of(made).keys() == {"GROUP_RANK"}


# -- in a pod ---------------------------------------------------------------------------------------------------------


def test_a_pod_runs_what_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    made = objects(COMMANDS["words"], name="run7")
    assert words_of(made)[-len(COMMANDS["words"]) :] == COMMANDS["words"]
    for name, value in env_of(made).items():
        monkeypatch.setenv(name, value if isinstance(value, str) else SECRET)
    monkeypatch.setenv("GROUP_RANK", "1")
    args = flags.parse(words_of(made))
    cluster.check(args)
    found = cluster.read(args)
    assert found.endpoints == (("run7-0.run7", 29400),)
    assert (found.order, found.secret) == (1, secret.load(environ={"HOLDFAST_SECRET": SECRET}))


def env_of(made: dict[str, Any]) -> dict[str, Any]:
    """A value, the path of a field, or the name and the key of a secret."""
    found: dict[str, Any] = {}
    for item in pod_of(made)["containers"][0]["env"]:
        source = item.get("valueFrom", {})
        ref = source.get("secretKeyRef", {})
        path = source.get("fieldRef", {}).get("fieldPath")
        found[item["name"]] = item.get("value") or path or (ref["name"], ref["key"])
    return found


def words_of(made: dict[str, Any]) -> list[str]:
    """The command after what Kubernetes does to it: $$ is a dollar, and $(NAME) would be the variable's value."""
    command = pod_of(made)["containers"][0]["command"]
    assert command[:2] == ["holdfast", "run"]

    def expand(found: re.Match[str]) -> str:
        return "$" if found[0] == "$$" else "replaced"

    return [re.sub(r"\$\$|\$\([^)]*\)", expand, word) for word in command[2:]]


def test_it_needs_neither_pyyaml_nor_torch() -> None:
    program = (
        "import sys; sys.modules['yaml'] = None; from holdfast.cli.render import main; "
        "code = main(['k8s', '--image=i', '--', '--nnodes=2', 'train.py']); sys.exit(code or 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(list(yaml.safe_load_all(done.stdout))) == 3
