"""Workflow files: what is read, and what is refused, with file and line."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from holdfast.workflow import templates
from holdfast.workflow.reading import read, rendering
from holdfast.workflow.spec import COMPLETE, FAIL, RESCHEDULE, Problem, Workflow

SEED = """\
# As in the tutorial of the seed.
workflow:
  name: train
  resources:
    default: {gpu: 0, cpu: 1, memory: 1Gi}
  groups:
  - name: training
    ignoreNonleadStatus: false
    tasks:
    {% for item in range(n_nodes) %}
    - name: {{ 'master' if item == 0 else 'worker_' ~ item }}
      {% if item == 0 %}
      lead: true
      checkpoint:
      - path: /tmp/models
        url: {{upload_location}}
        frequency: {{checkpoint_cadence}}
      {% endif %}
      image: pytorch
      command: [bash]
      args: [/tmp/run.sh]
      exitActions:
        RESCHEDULE: {{ reschedule_code }}
      inputs:
      - url: {{upload_location}}/models
      files:
      - path: /tmp/run.sh
        contents: |
          echo {{item}} of {{n_nodes}} at {{host:master}} reads {{input:0}}, in {{workflow_id}}
          exit {{ reschedule_code }}
      - path: /tmp/train.py
        localpath: train.py
    {% endfor %}
default-values:
  n_nodes: 3
  checkpoint_cadence: 1m
  upload_location: file:///data/run
  reschedule_code: 3
"""


def written(folder: Path, text: str) -> Path:
    (folder / "train.py").write_text("print()\n")
    (folder / "flow.yaml").write_text(text)
    return folder / "flow.yaml"


def made(folder: Path, tasks: str, rest: str = "") -> Workflow:
    text = "workflow:\n  name: w\n" + textwrap.indent(textwrap.dedent(rest), "  ")
    return read(written(folder, text + "  tasks:\n" + textwrap.indent(textwrap.dedent(tasks).strip("\n"), "  ") + "\n"))


def test_the_workflow_of_the_seed(tmp_path: Path) -> None:
    flow = read(written(tmp_path, SEED), {"checkpoint_cadence": "90s"})
    [group] = flow.groups
    assert [task.name for task in group.tasks] == ["master", "worker_1", "worker_2"]
    assert group.lead.name == "master" and not group.ignore_nonlead and group.barrier
    [checkpoint] = group.lead.checkpoints
    assert (checkpoint.path, checkpoint.url, checkpoint.frequency_s) == ("/tmp/models", "file:///data/run", 90.0)
    assert not group.tasks[1].checkpoints
    task = group.tasks[2]
    assert (task.command, task.args, task.max_reschedules) == (("bash",), ("/tmp/run.sh",), 3)
    assert [task.exit_actions.of(code) for code in (0, 1, 3, 137)] == [COMPLETE, FAIL, RESCHEDULE, FAIL]
    assert task.inputs[0].url == "file:///data/run/models"
    assert task.files[1].local == str(tmp_path / "train.py")
    script = task.files[0].contents
    assert script == "echo 2 of 3 at {{host:master}} reads {{input:0}}, in {{workflow_id}}\nexit 3\n"
    known = {"host:master": "127.0.0.2", "input:0": "/in/0", "workflow_id": "w-1"}
    assert templates.fill(script, known).startswith("echo 2 of 3 at 127.0.0.2 reads /in/0, in w-1\n")
    assert task.line == 11


def test_tasks_alone_are_groups_of_one_and_may_wait_for_each_other(tmp_path: Path) -> None:
    flow = made(
        tmp_path,
        """
        - {name: first, command: [echo, "{{output}}"]}
        - name: second
          command: cat
          args: ["{{input:first}}", ""]
          inputs: [{task: first, regex: "a.*"}]
          environment: {A: 1, B: ""}
        """,
        "timeout: {exec_timeout: 2h, queue_timeout: 30}\n",
    )
    assert [group.name for group in flow.groups] == ["first-group", "second-group"]
    assert flow.groups[1].after == ("first",)
    second = flow.task("second")
    assert second.lead and second.command == ("cat",) and second.environment == {"A": "1", "B": ""}
    assert (flow.run_timeout_s, flow.queue_timeout_s) == (7200.0, 30.0)


@pytest.mark.parametrize(
    ("text", "codes"),
    [
        ("{RESCHEDULE: 3}", {2: FAIL, 3: RESCHEDULE, 4: FAIL}),
        ("{reschedule: '3,10-12', COMPLETE: [15, '20-29']}", {9: FAIL, 10: RESCHEDULE, 12: RESCHEDULE, 13: FAIL}),
        ("{COMPLETE: [15, '20-29']}", {15: COMPLETE, 19: FAIL, 20: COMPLETE, 29: COMPLETE, 30: FAIL, 0: COMPLETE}),
        ("{FAIL: 0, RESCHEDULE: 1-255}", {0: FAIL, 1: RESCHEDULE, 255: RESCHEDULE}),
    ],
)
def test_exit_actions(tmp_path: Path, text: str, codes: dict[int, str]) -> None:
    flow = made(tmp_path, f"- {{name: a, command: [x], exitActions: {text}}}")
    assert {code: flow.task("a").exit_actions.of(code) for code in codes} == codes


A = "- {name: a, command: [x]"


@pytest.mark.parametrize(
    ("tasks", "line", "said"),
    [
        (A + ", comand: y}", 4, "unknown key 'comand'"),
        (A + "}\n" + A + "}", 5, "'a' is a name already, in line 4"),
        (A + "}\n- {name: A, command: [x]}", 5, "is a name already"),
        ("- {name: 1a, command: [x]}", 4, "is no name"),
        ("- {name: a}", 4, "'command' is missing"),
        (A + ", lead: maybe}", 4, "true or false is meant, not 'maybe'"),
        (A + ", exitActions: {RESTART: 3}}", 4, "'RESTART' is no action"),
        (A + ", exitActions: {RESCHEDULE: 1-10, FAIL: 10}}", 4, "10 overlaps 1-10, which is RESCHEDULE"),
        (A + ", exitActions: {RESCHEDULE: 300}}", 4, "exit codes are 0 to 255"),
        (A + ", exitActions: {RESCHEDULE: 9-3}}", 4, "the smaller first"),
        (A + ", exitActions: {RESCHEDULE: x}}", 4, "'x' is no exit code"),
        (A + ", inputs: [{url: ftp://x/y}]}", 4, "'ftp://x/y' is no address"),
        (A + ", inputs: [{url: data/x}]}", 4, "is no address"),
        (A + ", inputs: [{url: file://data}]}", 4, "absolute"),
        (A + ", inputs: [{task: b}]}", 4, "there is no task 'b'"),
        (A + ", inputs: [{url: file:///x, regex: '('}]}", 4, "no regular expression"),
        (A + ", files: [{path: x, contents: y}]}", 4, "an absolute path without '..' is meant, not 'x'"),
        (A + ", files: [{path: /tmp/x, localpath: gone.py}]}", 4, "gone.py is not there"),
        (A + ", files: [{path: /tmp/x}]}", 4, "either contents or localpath"),
        (A + ", args: ['{{host:b}}']}", 4, "{{host:b}}: group a-group has no task 'b'"),
        (A + ", args: ['{{input:0}}']}", 4, "{{input:0}}: a has 0 inputs"),
        (A + ", resource: big}", 4, "there is no 'big' in resources"),
        (A + ", maxReschedules: -1}", 4, "a whole number of at least 0"),
        (A + ", checkpoint: [{path: /m, url: file:///x, frequency: 5y}]}", 4, "a time such as 30s"),
        (
            A + ", checkpoint: [{path: m, url: file:///x, frequency: 5m}]}",
            4,
            "an absolute path without '..' is meant, not 'm'",
        ),
        (A + ", inputs: [{task: b}]}\n- {name: b, command: [x], inputs: [{task: a}]}", 4, "in a circle"),
        ("- {name: a, command: [x]", 5, "this is no YAML"),
        ("- a", 4, "keys and values are meant"),
    ],
)
def test_what_is_wrong_is_told_with_its_line(tmp_path: Path, tasks: str, line: int, said: str) -> None:
    with pytest.raises(Problem) as raised:
        made(tmp_path, tasks)
    assert said in str(raised.value) and "\n" not in str(raised.value)
    assert raised.value.line == line, str(raised.value)
    assert str(raised.value).startswith(f"{tmp_path}/flow.yaml:{line}: ")


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("workflow:\n  name: {{ nobody }}\n", 2, "'nobody' is undefined; give it in default-values or with --set"),
        ("workflow:\n  name: {{ nobody\n", 2, "unexpected end of template"),
        ("workflow:\n  name: x\n  {% for a in b %}\n  {% endfor %}\n", 3, "'b' is undefined"),
        ("workflow:\n  name: {% for a in [1] %}\n", 2, "endfor"),
        ("workflow:\n  name: {{ ''.__class__ }}\n", 2, "unsafe"),
        ("workflow:\n  name: {{ 1 / 0 }}\n", 2, "division by zero"),
        ("workflow:\n  name: x\nworkflow:\n  name: y\n", 3, "'workflow' is there twice; the first is in line 1"),
        ("tasks:\n- x\n", 1, "unknown key 'tasks'"),
        ("name: x\n", 1, "unknown key 'name'"),
        ("hello\n", 1, "stands before any of"),
        ("", None, "it has no 'workflow'"),
        ("version: 3\nworkflow:\n  name: x\n", 1, "this Holdfast knows version 2"),
        ("workflow:\n  name: x\n  groups: []\n  tasks: []\n", 2, "either groups or tasks is meant, not both"),
        ("workflow:\n  name: x\n  groups: []\n", 2, "there is nothing to run"),
        (
            "workflow:\n  name: x\n  groups:\n  - name: g\n    tasks:\n    - {name: a, command: [x], lead: true}\n"
            "    - {name: b, command: [x], lead: true}\n",
            7,
            "b is the second lead of group g; a is one already",
        ),
        (
            "workflow:\n  name: x\n  groups:\n  - name: g\n    tasks:\n    - {name: a, command: [x]}\n"
            "    - {name: b, command: [x]}\n",
            4,
            "several tasks and no lead",
        ),
    ],
)
def test_a_file_that_is_no_workflow(tmp_path: Path, text: str, line: int | None, said: str) -> None:
    with pytest.raises(Problem) as raised:
        read(written(tmp_path, text))
    assert said in str(raised.value)
    assert raised.value.line == line, str(raised.value)


def test_lines_are_those_of_the_file_after_loops_and_tags_over_several_lines(tmp_path: Path) -> None:
    text = SEED.replace("    - name: {{ 'master'", "    {% set x =\n       1 %}\n    - name: {{ 'master'")
    text = text.replace("image: pytorch", "imagine: pytorch")
    with pytest.raises(Problem, match=r"flow.yaml:21: .*unknown key 'imagine'"):
        read(written(tmp_path, text))


def test_a_name_that_nobody_knows_cannot_be_set(tmp_path: Path) -> None:
    with pytest.raises(Problem, match=r"--set n_node: the workflow has no such name; n_nodes is meant\?"):
        read(written(tmp_path, SEED), {"n_node": 2})
    values = {
        "2": 2,
        "-0.5": -0.5,
        "1e3": 1000.0,
        "007": "007",
        "false": "false",
        "s3://x": "s3://x",
        "nan": "nan",
        "": "",
    }
    assert {text: templates.as_value(text) for text in values} == values
    flow = read(written(tmp_path, "workflow:\n  name: w\n  tasks: [{name: a, command: ['{{ x }}']}]\n"), {"x": 7})
    assert flow.task("a").command == ("7",)  # a name without a default may be given
    text = "workflow: {name: w, tasks: [{name: a, command: [{{ 'yes' if x else 'no' }}]}]}\ndefault-values: {x: true}\n"
    flows = [read(written(tmp_path, text), {"x": given}) for given in ("true", "false")]
    assert [flow.task("a").command for flow in flows] == [("yes",), ("no",)]


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(Problem, match=r"no\.yaml: No such file"):
        read(tmp_path / "no.yaml")


def test_what_a_dry_run_shows(tmp_path: Path) -> None:
    shown = rendering(SEED, "flow.yaml", {"n_nodes": 1}).text
    assert "name: master" in shown and "worker" not in shown and "{{host:master}}" in shown
