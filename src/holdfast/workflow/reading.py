"""From a workflow file to a checked `Workflow`. What is wrong is told with file and line, before anything starts."""

from __future__ import annotations

import difflib
import os
import posixpath
import re
from collections.abc import Mapping
from typing import Any

from holdfast.workflow import templates
from holdfast.workflow.addresses import url_of
from holdfast.workflow.fields import Field, parse
from holdfast.workflow.spec import (
    ACTIONS,
    Checkpoint,
    ExitActions,
    File,
    Group,
    Input,
    Output,
    Problem,
    Resource,
    Task,
    Workflow,
)

_NAME = re.compile(r"[A-Za-z](?:[A-Za-z0-9_-]*[A-Za-z0-9])?")
_RANGE = re.compile(r"(\d{1,9})(?:\s*-\s*(\d{1,9}))?")
OFTEN_S = 0.1  # more often than this nobody writes checkpoints
MOST_VALUES = 10_000
MOST_BYTES = 16 * 1024 * 1024

_TASK = (
    "name", "lead", "command", "args", "environment", "files", "inputs", "outputs", "checkpoint", "exitActions",
    "resource", "maxReschedules", "image",
)  # fmt: skip


def read(path: str | os.PathLike[str], values: Mapping[str, Any] | None = None) -> Workflow:
    """`values` are those of `--set`, before the file's own."""
    file = os.fspath(path)
    rendered = rendering(content(file), file, values or {})
    document = parse(rendered.text, file, rendered.lines)
    return _Reader(file).workflow(document.mapping(("workflow",))["workflow"])


def content(file: str) -> str:
    try:
        with open(file, "rb") as opened:
            found = opened.read(MOST_BYTES + 1)
    except OSError as failure:
        raise Problem(failure.strerror or str(failure), file) from None
    if len(found) > MOST_BYTES:
        raise Problem(f"it is larger than {MOST_BYTES >> 20} MiB", file)
    try:
        return found.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as wrong:
        raise Problem("it is no text in UTF-8", file, found.count(b"\n", 0, wrong.start) + 1) from None


def rendering(content: str, file: str, values: Mapping[str, Any]) -> templates.Rendered:
    """What `--dry-run` shows: the workflow with its values in place."""
    parts = templates.split(content, file)
    if "version" in parts:
        line, text = parts["version"]
        version = parse(text, file, _from(line, text)).mapping()["version"]
        if version.count() != 2:
            raise version.problem("this Holdfast knows version 2")
    known: dict[str, Any] = {}
    if "default-values" in parts:
        line, text = parts["default-values"]
        known = _plain(parse(text, file, _from(line, text)).mapping()["default-values"], file)
    line, text = parts["workflow"]
    used = known.keys() | (templates.names_in(text) if values else set())
    if unknown := sorted(values.keys() - used):
        near = difflib.get_close_matches(unknown[0], used, 1)
        meant = f"; {near[0]} is meant?" if near else f"; it has {', '.join(sorted(used)) or 'none'}"
        raise Problem(f"--set {unknown[0]}: the workflow has no such name{meant}", file)
    # `false` in the place of a truth is one, and no text, which would be true.
    given = {
        name: value == "true" if isinstance(known.get(name), bool) and value in ("true", "false") else value
        for name, value in values.items()
    }
    return templates.render(text, line, {**known, **given}, file)


def _from(line: int, text: str) -> list[int]:
    return list(range(line, line + text.count("\n") + 1))


def _plain(field: Field, file: str) -> dict[str, Any]:
    import yaml

    found = {}
    for name, value in field.mapping().items():
        if value.count_all(MOST_VALUES) > MOST_VALUES:
            raise value.problem(f"with all of its aliases it is more than {MOST_VALUES} values")
        try:
            found[name] = yaml.safe_load(yaml.serialize(value.node))
        except yaml.YAMLError as wrong:
            raise value.problem(str(wrong).replace("\n", " ")) from None
    return found


class _Reader:
    """Of one file: names are known across all of it."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._names: dict[str, Field] = {}
        self._resources: dict[str, Resource] = {}
        self._texts: dict[str, list[Field]] = {}  # of tasks, in which tokens may be
        self._waits: dict[tuple[str, str], Field] = {}  # a task for another

    def workflow(self, field: Field) -> Workflow:
        given = field.mapping(("name", "groups", "tasks", "resources", "timeout"))
        name = self._name(_wanted(given, "name", field))
        if "resources" in given:
            self._resources = {key: _resource(value) for key, value in given["resources"].mapping().items()}
        if ("groups" in given) == ("tasks" in given):
            raise field.problem("either groups or tasks is meant" + (", not both" if "groups" in given else ""))
        if "groups" in given:
            groups = given["groups"].each(self._group)
        else:
            groups = given["tasks"].each(lambda one: self._alone(self._task(one), one.line))
        if not groups:
            raise field.problem("there is nothing to run")
        timeout = given["timeout"].mapping(("exec_timeout", "queue_timeout")) if "timeout" in given else {}
        times = {
            ours: timeout[theirs].duration_s()
            for ours, theirs in (("run_timeout_s", "exec_timeout"), ("queue_timeout_s", "queue_timeout"))
            if theirs in timeout
        }
        made = Workflow(name, groups, file=self._file, **times)
        self._check_tokens(made)
        self._check_order(made)
        return made

    # -- groups and tasks ---------------------------------------------------------------------------------------------

    def _group(self, field: Field) -> Group:
        given = field.mapping(("name", "tasks", "ignoreNonleadStatus", "barrier"))
        name = self._name(_wanted(given, "name", field))
        fields = _wanted(given, "tasks", field).items()
        tasks = [self._task(one) for one in fields]
        if not tasks:
            raise field.problem(f"group {name} has no tasks")
        leads = [at for at, task in enumerate(tasks) if task.lead]
        if len(leads) > 1:
            raise fields[leads[1]].problem(
                f"{tasks[leads[1]].name} is the second lead of group {name}; {tasks[leads[0]].name} is one already"
            )
        if not leads:
            if len(tasks) > 1:
                raise field.problem(f"group {name} has several tasks and no lead; one of them needs lead: true")
            tasks[0] = _as_lead(tasks[0])
        return Group(
            name,
            tuple(tasks),
            given["ignoreNonleadStatus"].flag() if "ignoreNonleadStatus" in given else True,
            given["barrier"].flag() if "barrier" in given else True,
            field.line,
        )

    def _alone(self, task: Task, line: int) -> Group:
        return Group(f"{task.name}-group", (_as_lead(task),), line=line)

    def _task(self, field: Field) -> Task:
        given = field.mapping(_TASK)
        name = self._name(_wanted(given, "name", field))
        self._keep(name, given)
        checkpoints = given["checkpoint"].each(_checkpoint) if "checkpoint" in given else ()
        command = _wanted(given, "command", field)
        return Task(
            name=name,
            command=command.each(Field.text) if command.is_list else (command.text(),),
            args=given["args"].each(lambda one: one.text(empty=True)) if "args" in given else (),
            lead=given["lead"].flag() if "lead" in given else False,
            environment=_environment(given["environment"]) if "environment" in given else {},
            files=self._files(given["files"]) if "files" in given else (),
            inputs=given["inputs"].each(_input) if "inputs" in given else (),
            outputs=given["outputs"].each(_output) if "outputs" in given else (),
            checkpoints=checkpoints,
            exit_actions=exit_actions(given["exitActions"]) if "exitActions" in given else ExitActions(),
            resource=self._resource_of(given.get("resource"), field),
            max_reschedules=given["maxReschedules"].count() if "maxReschedules" in given else 3,
            image=given["image"].text() if "image" in given else "",
            line=field.line,
        )

    def _keep(self, name: str, given: Mapping[str, Field]) -> None:
        """For what is found out at the end."""
        found = [one for key in ("command", "args") if key in given for one in given[key].all()]
        found += [one for key in ("environment",) if key in given for one in given[key].mapping().values()]
        for file in given["files"].items() if "files" in given else ():
            found += [value for key, value in file.mapping().items() if key == "contents"]
        self._texts[name] = found
        for one in given["inputs"].items() if "inputs" in given else ():
            if (other := one.mapping().get("task")) is not None:
                self._waits[name, other.text()] = other

    def _name(self, field: Field) -> str:
        name = field.text()
        if not _NAME.fullmatch(name):
            raise field.problem(f"{name!r} is no name: letters, digits, - and _ are meant, beginning with a letter")
        key = name.lower().replace("_", "-")
        if key in self._names:
            raise field.problem(f"{name!r} is a name already, in line {self._names[key].line}")
        self._names[key] = field
        return name

    def _resource_of(self, field: Field | None, task: Field) -> Resource:
        name = field.text() if field is not None else "default"
        if name not in self._resources and field is not None:
            raise field.problem(f"there is no {name!r} in resources ({', '.join(self._resources) or 'it is empty'})")
        return self._resources.get(name, Resource())

    def _files(self, field: Field) -> tuple[File, ...]:
        found: dict[str, File] = {}
        for one in field.items():
            file = self._file_of(one)
            if file.path in found:
                raise one.problem(f"{file.path} is there twice")
            found[file.path] = file
        return tuple(found.values())

    def _file_of(self, field: Field) -> File:
        given = field.mapping(("path", "contents", "localpath"))
        path = _path(_wanted(given, "path", field))
        if not path.startswith("/tmp/"):
            raise given["path"].problem(f"a path below /tmp is meant, not {path!r}: only that is a task's own")
        if ("contents" in given) == ("localpath" in given):
            raise field.problem("either contents or localpath is meant")
        if "contents" in given:
            return File(path, contents=given["contents"].text(empty=True))
        local = os.path.join(os.path.dirname(os.path.abspath(self._file)), given["localpath"].text())
        if not os.path.isfile(local):
            raise given["localpath"].problem(
                f"{given['localpath'].text()} is not there; paths are from this file's folder"
            )
        return File(path, local=local)

    # -- what holds for all of it -------------------------------------------------------------------------------------

    def _check_tokens(self, made: Workflow) -> None:
        for group in made.groups:
            here = {task.name for task in group.tasks}
            for task in group.tasks:
                for field in self._texts[task.name]:
                    for token, at in templates.tokens_in(field.text(empty=True)):
                        kind, _, name = token.partition(":")
                        if kind == "host" and name not in here:
                            raise field.problem(f"{{{{host:{name}}}}}: group {group.name} has no task {name!r}", at)
                        if kind == "input" and not _is_input(task, name):
                            raise field.problem(f"{{{{input:{name}}}}}: {task.name} has {len(task.inputs)} inputs", at)

    def _check_order(self, made: Workflow) -> None:
        of = {task.name: group for group in made.groups for task in group.tasks}
        for (name, other), field in self._waits.items():
            if other not in of:
                raise field.problem(f"there is no task {other!r} to wait for")
            if of[other] is of[name]:
                raise field.problem(f"{name} waits for {other}, which runs beside it in group {of[name].name}")
        done: set[str] = set()
        while left := [group for group in made.groups if group.name not in done]:
            ready = [group for group in left if all(of[name].name in done for name in group.after)]
            if not ready:
                field = next(field for (name, _), field in self._waits.items() if of[name] is left[0])
                raise field.problem(
                    f"the groups {', '.join(group.name for group in left)} wait for each other in a circle"
                )
            done |= {group.name for group in ready}


# -- parts ------------------------------------------------------------------------------------------------------------


def _wanted(given: Mapping[str, Field], key: str, parent: Field) -> Field:
    if key not in given:
        raise parent.problem(f"{key!r} is missing")
    return given[key]


def _as_lead(task: Task) -> Task:
    import msgspec

    return msgspec.structs.replace(task, lead=True)


def _environment(field: Field) -> dict[str, str]:
    found = {}
    for name, value in field.mapping().items():
        if not name or "=" in name or "\0" in name:
            raise value.problem(f"{name!r} is no name of a variable")
        found[name] = value.text(empty=True)
    return found


def _input(field: Field) -> Input:
    given = field.mapping(("url", "task", "regex"))
    if ("url" in given) == ("task" in given):
        raise field.problem("either url or task is meant")
    regex = given["regex"].pattern() if "regex" in given else ""
    if "task" in given:
        return Input(task=given["task"].text(), regex=regex)
    return Input(url=url_of(given["url"]), regex=regex)


def _output(field: Field) -> Output:
    given = field.mapping(("url", "regex"))
    return Output(url_of(_wanted(given, "url", field)), given["regex"].pattern() if "regex" in given else "")


def _checkpoint(field: Field) -> Checkpoint:
    given = field.mapping(("path", "url", "frequency", "regex"))
    path = _wanted(given, "path", field)
    return Checkpoint(
        _path(path),
        url_of(_wanted(given, "url", field)),
        _wanted(given, "frequency", field).duration_s(OFTEN_S),
        given["regex"].pattern() if "regex" in given else "",
    )


def _path(field: Field) -> str:
    """Of a task, whose working folder nobody knows."""
    path = posixpath.normpath(field.text())
    if not field.text().startswith("/") or ".." in field.text().split("/") or path == "/":
        raise field.problem(f"an absolute path without '..' is meant, not {field.text()!r}")
    return path


def _resource(field: Field) -> Resource:
    given = field.mapping(("cpu", "gpu", "memory", "storage", "platform", "nodesExcluded"))
    return Resource(
        cpu=given["cpu"].number() if "cpu" in given else 0,
        gpu=given["gpu"].count() if "gpu" in given else 0,
        memory_bytes=given["memory"].size_bytes() if "memory" in given else 0,
        storage_bytes=given["storage"].size_bytes() if "storage" in given else 0,
        nodes_excluded=given["nodesExcluded"].each(Field.text) if "nodesExcluded" in given else (),
    )


def exit_actions(field: Field) -> ExitActions:
    ranges: list[tuple[int, int, str]] = []
    for name, value in field.mapping().items():
        action = name.upper()
        if action not in ACTIONS:
            raise value.problem(f"{name!r} is no action; {', '.join(ACTIONS)} are")
        texts = [one.text() for one in value.items()] if value.is_list else [value.text()]
        for part in (part.strip() for text in texts for part in text.split(",")):
            match = _RANGE.fullmatch(part)
            if match is None:
                raise value.problem(f"{part!r} is no exit code and no range such as 10-19")
            first, last = int(match[1]), int(match[2] or match[1])
            if first > last or last > 255:
                raise value.problem(f"{part}: exit codes are 0 to 255, the smaller first")
            for low, high, other in ranges:
                if first <= high and low <= last:
                    raise value.problem(f"{part} overlaps {_told(low, high)}, which is {other}")
            ranges.append((first, last, action))
    return ExitActions(tuple(sorted(ranges)))


def _told(low: int, high: int) -> str:
    return str(low) if low == high else f"{low}-{high}"


def _is_input(task: Task, name: str) -> bool:
    if name.isdigit():
        return int(name) < len(task.inputs)
    return any(given.task == name for given in task.inputs)
