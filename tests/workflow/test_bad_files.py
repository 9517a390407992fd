"""What is wrong with a workflow file is told in one line, with file and line, before anything starts."""

from __future__ import annotations

import importlib.util
import os
import textwrap
from pathlib import Path

import pytest

from holdfast.cli import workflow
from holdfast.workflow.reading import read
from holdfast.workflow.spec import Problem


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOLDFAST_WORKFLOWS", str(tmp_path / "workflows"))
    for name in os.environ:
        if name.startswith(("AWS_", "AZURE_", "GOOGLE_", "CUDA_")):
            monkeypatch.delenv(name)
    return tmp_path


def told(content: str | bytes, capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """What `submit` says to it. It starts nothing."""
    given = content if isinstance(content, bytes) else textwrap.dedent(content).lstrip("\n").encode()
    Path("flow.yaml").write_bytes(given)
    assert workflow.main(["submit", "flow.yaml", *args]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("holdfast workflow: flow.yaml") and err.count("\n") == 1
    assert not Path("workflows").exists()
    return err.removeprefix("holdfast workflow: ").rstrip("\n")


GROUP = """
workflow:
  name: w
  groups:
  - name: g
    tasks:
"""


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            """
            workflow:
              name: w
              tasks:
              - {name: a, command: [x], inputs: [{url: file:///x}]}
              - name: b
                command: [x]
                inputs:
                - task: c
              - name: c
                command: [x]
                inputs: [{task: b}]
            """,
            "flow.yaml:8: workflow.tasks[1].inputs[0].task: the groups b-group, c-group wait for each other in a "
            "circle",
        ),
        (
            GROUP + "    - {name: a, command: [x], lead: true}\n    - {name: b, command: [x], lead: true}\n",
            "flow.yaml:7: workflow.groups[0].tasks[1]: b is the second lead of group g; a is one already",
        ),
        (
            GROUP + "    - name: a\n      command: [x]\n      lede: true\n",
            "flow.yaml:8: workflow.groups[0].tasks[0]: unknown key 'lede'; there may be name, lead, command, args, "
            "environment, files, inputs, outputs, checkpoint, exitActions, resource, maxReschedules, image",
        ),
        (
            GROUP
            + "    - name: a\n      command: [x]\n      exitActions:\n        FAIL: 5\n        RESCHEDULE: 3,4-9\n",
            "flow.yaml:10: workflow.groups[0].tasks[0].exitActions.RESCHEDULE: 4-9 overlaps 5, which is FAIL",
        ),
        (
            GROUP + "    - name: a\n      command: [x]\n      args:\n      - '{{host:a'\n",
            "flow.yaml:9: '{{' does not close: unexpected char \"'\"",
        ),
        (
            GROUP + "    {% for i in range(3) %}\n    - {name: a, command: [x]}\n",
            "flow.yaml:6: Unexpected end of template. Jinja was looking for the following tags: 'endfor' or 'else'. "
            "The innermost block that needs to be closed is 'for'.",
        ),
        (
            GROUP
            + "    - name: a\n      command: [x]\n      files:\n      - path: /tmp/x\n        localpath: gone.py\n",
            "flow.yaml:10: workflow.groups[0].tasks[0].files[0].localpath: gone.py is not there; paths are from this "
            "file's folder",
        ),
        (
            GROUP + "    - name: a\n      command: [x]\n      resource: big\n  resources: {big: {gpu: 9}}\n",
            "flow.yaml:6: a wants 9 GPUs, and no node has more than 0",
        ),
    ],
)
def test_each_of_those_that_were_named(content: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert told(content, capsys) == said


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
def test_an_address_whose_extra_is_not_installed(
    scheme: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "obstore" else real(name))
    content = GROUP + f"    - name: a\n      command: [x]\n      outputs:\n      - url: {scheme}://bucket/x\n"
    assert told(content, capsys) == (
        f"flow.yaml:9: workflow.groups[0].tasks[0].outputs[0].url: {scheme}:// needs the extra: pip install "
        "'holdfast[cloud]'"
    )


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("inputs: [{url: s3://key@bucket/x}]", "credentials go into the environment"),
        ("inputs: [{url: s3:///x}]", "not a url of a bucket"),
        ("inputs: [{url: az://bucket/x}]", "set AZURE_STORAGE_ACCOUNT_NAME"),
        ("checkpoint: [{path: m, url: file:///x, frequency: 1s}]", "an absolute path"),
        ("checkpoint: [{path: /tmp/../m, url: file:///x, frequency: 1s}]", "an absolute path without '..'"),
        ("checkpoint: [{path: /tmp/m, url: file:///x, frequency: 0}]", "a time such as 30s"),
        ("checkpoint: [{path: /tmp/m, url: file:///x, frequency: 1us}]", "at least 0.1s is meant, not '1us'"),
        ("checkpoint: [{path: /tmp/m, url: file:///x, frequency: 9999999999d}]", "a time such as 30s"),
        ("files: [{path: /etc/x, contents: y}]", "a path below /tmp is meant, not '/etc/x'"),
        ("files: [{path: /tmp/../etc/x, contents: y}]", "an absolute path without '..'"),
        ("files: [{path: /tmp, contents: y}]", "a path below /tmp is meant"),
        ("files: [{path: /tmp/x, contents: a}, {path: /tmp//x, contents: b}]", "/tmp/x is there twice"),
        ("exitActions: {RESCHEDULE: 256}", "exit codes are 0 to 255"),
        ("exitActions: {RESCHEDULE: -1}", "'-1' is no exit code"),
        ("environment: {A=B: c}", "'A=B' is no name of a variable"),
        ("environment: {'': c}", "'' is no name of a variable"),
        ("command: [y]", "'command' is there twice"),
        (r'args: ["a\x00b"]', r"no program can be given the character '\x00'"),
        (r'args: ["\ud800"]', r"no program can be given the character '\ud800'"),
        ("maxReschedules: 99999999999999999999", "a whole number"),
        ("? [a, b]\n    : c", "a text is meant, not a list"),
        ("args: &a [*a]", "a text is meant, not a list"),
    ],
)
def test_a_task_with(key: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = told(f"workflow:\n  name: w\n  tasks:\n  - name: a\n    command: [x]\n    {key}\n", capsys)
    assert text.startswith("flow.yaml:6: ") and said in text, text


def test_a_token_is_found_in_the_line_where_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    content = GROUP + "    - name: a\n      command: [x]\n      files:\n      - path: /tmp/x\n        contents: |\n"
    content += "          {% for i in range(3) %}\n          echo {{i}}\n          {% endfor %}\n          {{host:b}}\n"
    assert told(content, capsys).startswith("flow.yaml:14: workflow.groups[0].tasks[0].files[0].contents: {{host:b}}: ")


LAUGHS = (
    "workflow:\n  name: w\n  tasks: [{name: a, command: [x]}]\ndefault-values:\n  a0: &a0 [x, x, x, x, x, x, x, x]\n"
)
LAUGHS += "".join(f"  a{at}: &a{at} [{', '.join([f'*a{at - 1}'] * 8)}]\n" for at in range(1, 12))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "flow.yaml: it has no 'workflow'"),
        (b"\x7fELF\x00\nworkflow: \xff", "flow.yaml:2: it is no text in UTF-8"),
        ("workflow:\n  name: a\0b\n", r"flow.yaml:2: this is no YAML: '\x00' is not allowed in it"),
        ("workflow: [\n", "flow.yaml:2: this is no YAML: "),
        ("workflow: 5\n", "flow.yaml:1: workflow: keys and values are meant, not '5'"),
        ("workflow: " + "[" * 3000, "flow.yaml:1: it is nested too deeply"),
        ("workflow:\n  name: w\n\ttasks: []\n", "flow.yaml:3: this is no YAML: "),
        (LAUGHS, "flow.yaml:9: default-values.a4: with all of its aliases it is more than 10000 values"),
        ("workflow:\n  # {{ range(10**9) }}\n", "flow.yaml:2: Range too big."),
        (
            "workflow:\n  # {% for i in range(9999) %}{% for i in range(9999) %}x{% endfor %}{% endfor %}\n",
            "flow.yaml:2: the template makes more text than a workflow can be",
        ),
        ("workflow:\n  # {% macro f() %}{{ f() }}{% endmacro %}{{ f() }}\n", "flow.yaml:2: the template is nested too"),
        ("workflow:\n  # {% include '/etc/passwd' %}\n", "flow.yaml:2: no loader"),
        ("workflow:\n  # {{ ''.__class__.__mro__ }}\n", "flow.yaml:2: access to attribute '__class__'"),
    ],
)
def test_no_workflow_at_all(content: str | bytes, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert told(content, capsys).startswith(said)


def test_no_file_at_all(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for name, said in (("folder", "Is a directory"), ("gone", "No such file"), ("/dev/zero", "larger than 16 MiB")):
        with pytest.raises(Problem, match=f"{name}: .*{said}"):
            read(name)


def test_a_file_of_another_system(tmp_path: Path) -> None:
    """A mark at its beginning, and lines that end in two characters."""
    text = "workflow:\r\n  name: w\r\n  tasks:\r\n  - name: a\r\n    command: |\r\n      x\r\n"
    Path("flow.yaml").write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert read("flow.yaml").task("a").command == ("x\n",)


def test_values_that_nobody_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    content = "workflow:\n  name: w\n  tasks: [{name: a, command: ['{{ steps }}']}]\ndefault-values: {steps: 5}\n"
    assert told(content, capsys, "--set", "step=6") == (
        "flow.yaml: --set step: the workflow has no such name; steps is meant?"
    )
    assert told(content, capsys, "--set", "other=6") == (
        "flow.yaml: --set other: the workflow has no such name; it has steps"
    )


def test_workflows_in_a_place_that_cannot_be(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("file").touch()
    monkeypatch.setenv("HOLDFAST_WORKFLOWS", str(Path("file").resolve() / "workflows"))
    Path("flow.yaml").write_text("workflow:\n  name: w\n  tasks: [{name: a, command: [x]}]\n")
    assert workflow.main(["submit", "flow.yaml"]) == 1
    assert "Not a directory" in capsys.readouterr().err
