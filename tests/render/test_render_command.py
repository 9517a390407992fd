"""`holdfast render` as it is called: a file on stdout, or one line that says what is wrong."""

from __future__ import annotations

import os
from typing import Any

import pytest
import yaml

from holdfast.cli.render import main, make_parser, read

# Every flag there is. Few on purpose: sbatch has its own, and a file can be edited.
FLAGS = {
    "slurm": {"--name", "--gpus", "--time", "--partition", "--cpus"},
    "k8s": {"--name", "--gpus", "--image", "--volume", "--secret"},
}


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PET_")]:
        monkeypatch.delenv(name)


def test_the_flags_are_these() -> None:
    [kinds] = [action for action in make_parser()._actions if isinstance(action.choices, dict)]
    parsers: dict[str, Any] = kinds.choices  # type: ignore[assignment]
    found = {name: set(one._option_string_actions) - {"-h", "--help"} for name, one in parsers.items()}
    assert found == FLAGS


def test_it_prints_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["slurm", "--time=2-00", "--gpus=0", "--", "--nnodes=2:4", "--nproc-per-node=gpu", "train.py"]) == 0
    assert "#SBATCH --time=2-00\n#SBATCH --nodes=2-4\n" in capsys.readouterr().out
    assert main(["k8s", "--image=a/b:1", "--volume=runs:/runs", "--", "--nnodes=2", "train.py", "--", "x"]) == 0
    *_, job = yaml.safe_load_all(capsys.readouterr().out)
    assert job["spec"]["template"]["spec"]["containers"][0]["command"][-3:] == ["train.py", "--", "x"]


def test_each_file_has_a_secret_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    seen = set()
    for _ in range(2):
        main(["k8s", "--image=i", "--", "--nnodes=2", "train.py"])
        seen.add(next(yaml.safe_load_all(capsys.readouterr().out))["stringData"]["secret"])
    assert len(seen) == 2 and {len(secret) for secret in seen} == {64}


@pytest.mark.parametrize("program", [["holdfast", "run"], ["torchrun"]])
def test_a_whole_line_is_understood(program: list[str]) -> None:
    command = ["--nnodes=2", "train.py", "holdfast", "run"]
    assert read([*program, *command]) == read(command)


WRONG = {
    "slurm": "after -- the flags and the script of holdfast run are meant; example: holdfast render slurm",
    "slurm train.py": "after -- the flags and the script",
    "slurm --": "after -- the flags and the script",
    "slurm -- --nnodes=3:2 t.py": "--nnodes=3:2: a number or MIN:MAX",
    "slurm -- --nnodes=2 --node-rank=1 t.py": "--node-rank: the scheduler gives every node its place; leave it out",
    "slurm -- --nnodes=2 --local_addr=h t.py": "--local-addr: the scheduler gives every node",
    "slurm -- --nnodes=2 --rdzv-endpoint=h t.py": "--rdzv-endpoint: nodes meet at the first of them",
    "slurm -- --nnodes=2 --rdzv-backend=static t.py": "--rdzv-backend=static needs a flag of its own on every node",
    "slurm -- --nnodes=2 --rdzv-backend=etcd t.py": "--rdzv-backend=etcd needs --rdzv-endpoint",
    "slurm -- --nnodes=2 --rdzv-backend=c11d t.py": "--rdzv-backend: 'c11d' is not known (did you mean c10d?)",
    "slurm -- --nnodes=2 --standalone t.py": "--standalone is one node",
    "slurm -- --nnodes=2 --rdzv-conf=x=1 t.py": "--rdzv-conf: 'x' is not known",
    "slurm -- --nproc-per-node=gpu t.py": "--nproc-per-node=gpu: how many GPUs has a node? Say so by --gpus",
    "slurm --gpus=2 -- --nproc-per-node=0 t.py": "--nproc-per-node=0: a number of at least 1",
    "slurm --gpus=2 -- --nproc-per-node=2.5 t.py": "--nproc-per-node=2.5: a number of at least 1",
    "slurm --time=4h -- t.py": "--time=4h: 4:00:00, or 2-00 for two days, is meant",
    "slurm --time=3:59 -- t.py": "--time=3:59: it is warned 120 s before that; ask for more",
    "slurm --time=1:00:00 -- --shutdown-timeout=1800 t.py": "--time=1:00:00: it is warned 1830 s before that",
    "slurm --name=a#b -- t.py": "--name=a#b: letters, digits, dashes and dots are meant",
    "slurm --partition=a;b -- t.py": "--partition=a;b: the name of a partition is meant",
    "k8s --image=i --name=Train -- t.py": "--name=Train: at most 61 small letters",
    "k8s --image=i --name=7x -- t.py": "--name=7x: at most 61 small letters",
    f"k8s --image=i --name={'a' * 61} -- --nnodes=11 t.py": "at most 60 small letters",
    "k8s --image=: -- t.py": "--image=:: the name of an image is meant",
    "k8s --image=i --volume=runs:data -- t.py": "--volume=runs:data: CLAIM:PATH is, such as runs:/runs, meant",
    "k8s --image=i --secret=s -- t.py": "--secret: this job needs none; leave it out",
    "k8s --image=i --secret=s -- --nnodes=2 --insecure t.py": "--secret: this job needs none; leave it out",
}


@pytest.mark.parametrize("line", WRONG)
def test_what_cannot_be_meant_is_one_line(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith("holdfast render: ") and WRONG[line] in err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("slurm --tme=1 -- t.py", "holdfast render: there is no flag --tme"),
        ("slurm -- --nnods=2 t.py", "holdfast run: there is no flag --nnods (did you mean --nnodes?)"),
        ("slurm -- --nnodes=2", "holdfast run: the following arguments are required: training_script"),
        ("k8s -- t.py", "holdfast render k8s: the following arguments are required: --image"),
        ("nomad -- t.py", "holdfast render: argument slurm|k8s: invalid choice: 'nomad'"),
    ],
)
def test_a_flag_that_does_not_exist_is_one_line(line: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    out, err = capsys.readouterr()
    assert (ended.value.code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(said)


def test_variables_of_this_machine_are_not_taken_along(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PET_NNODES", "2")
    assert main(["slurm", "--", "train.py"]) == 2
    assert "PET_NNODES is set here, and would not be there" in capsys.readouterr().err


def test_a_word_that_is_no_text_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["slurm", "--", "train.py", os.fsdecode(b"\xff")]) == 2
    assert "is no text; a file cannot hold it" in capsys.readouterr().err
