"""The documents against the program: every example runs, every link leads somewhere, every flag exists."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from _pytest.mark import ParameterSet

from holdfast.cli.flags import make_parser

ROOT = Path(__file__).resolve().parents[2]
TRAIN = Path(__file__).with_name("train.py")
WAIT_S = 60.0
README_LINES = 150

DOCUMENTS = sorted(path for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")] if path.stat().st_size > 0)
# Those with examples: a changelog or a security policy has none to run.
GUIDES = [path for path in DOCUMENTS if path.parent.name == "docs" or path.name in ("README.md", "CONTRIBUTING.md")]

# Flags that the documents name and that are not of `holdfast run`, with the program they belong to.
FLAGS_OF_OTHERS = {
    "--help": "argparse",
    "--strict": "mypy",
    "--kills": "bench.recovery",
    "--pause": "bench.survivors_gpu",
    "--nccl": "bench.survivors_gpu",
    "--seconds": "bench.goodput",
    "--times": "bench.scaling",
    "--undisturbed": "bench.goodput",
    "--only": "bench.snapshots",
    "--peer-kills": "bench.recovery",
    "--rounds": "bench.snapshots",
    "--timeout": "bench.recovery",
    "--runs": "bench.start",
    "--workers-stop-timeout": "ft_launcher",
    "--local-rank": "torch.distributed.launch",
    "--use-env": "torch.distributed.launch",
    "--all": "holdfast ls",
    "--generation": "holdfast logs",
    "--grep": "holdfast logs",
    "--html": "holdfast report",
    "--lift": "holdfast nodes",
    "--limit": "holdfast doctor",
    "--listen": "holdfast dashboard",
    "--no-twin": "holdfast chaos run",
    "--peer": "holdfast doctor",
    "--port": "holdfast doctor",
    "--serve": "holdfast doctor",
    "--shm-size": "docker",
    "--token-file": "holdfast dashboard",
    "--rank": "holdfast logs",
    "--trace": "holdfast report",
    "--json": "holdfast nodes",
    "--seed": "holdfast simulate",
    "--seeds": "holdfast simulate",
    "--jobs": "holdfast simulate",
    "--first": "holdfast simulate",
    "--torch": "bench.joining",
    "--torch-limit": "bench.joining",
    "--etcd-runs": "bench.cluster",
    "--no-kill": "sbatch, srun",
    "--kill-on-bad-exit": "srun",
    "--nodes": "sbatch, holdfast simulate, holdfast workflow",
    "--ntasks-per-node": "sbatch",
    "--gpus-per-node": "sbatch",
    "--cpus-per-task": "sbatch",
    "--signal": "sbatch",
    "--ft-NAME": "any key of fault tolerance",
    "--ft-param-NAME": "the same",
    "--hangs": "bench.hangs",
    "--peer-hangs": "bench.hangs",
    "--hours": "bench.soak",
    "--ranks": "bench.soak",
    "--undo": "holdfast checkpoint pin",
    "--force": "holdfast checkpoint rm",
    "--metric": "holdfast checkpoint",
    "--mode": "holdfast checkpoint",
    "--requeue": "sbatch",
    "--name": "holdfast render",
    "--gpus": "holdfast render",
    "--time": "holdfast render, sbatch",
    "--partition": "holdfast render, sbatch",
    "--cpus": "holdfast render",
    "--image": "holdfast render",
    "--volume": "holdfast render",
    "--secret": "holdfast render",
    "--account": "sbatch",
    "--batch": "scancel",
    "--from-literal": "kubectl",
    "--set": "holdfast workflow",
    "--backend": "holdfast workflow",
    "--exclude": "sbatch",
    "--dry-run": "holdfast workflow",
    "--epochs": "train_pytorch_fsdp_elastic.py",
    "--checkpoint-dir": "train_pytorch_fsdp_elastic.py",
    "--save-every-steps": "train_pytorch_fsdp_elastic.py",
    "--save-every-minutes": "train_pytorch_fsdp_elastic.py",
    "--health-check-every": "train_pytorch_fsdp_elastic.py",
    "--health-check-timeout": "train_pytorch_fsdp_elastic.py",
}

# What an example only shows: it sets up a checkout or an environment, which tests cannot do in theirs.
SET_UP = re.compile(r"(?m)(?:^|&&|;)\s*(?:\S*/)?(?:make|git clone|pip3? install|python3? -m (?:venv|pip))(?:\s|$)")
MAKE = re.compile(r"(?m)(?:^|&&|;)\s*make\b([^&;|#\n]*)")
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)|^\[[^\]]+\]:\s*(\S+)", re.M)
# Ports at which the examples' nodes meet. Tests take free ones, so that they run beside each other.
PORT = re.compile(r"\b29[45]00\b")
# A campaign is shown at a size that finds something. Here it only has to run; tests/simulate has the many seeds.
SEEDS = re.compile(r"--seeds \d+")
FLAG = re.compile(r"(?<![\w#-])--[a-z][\w-]*")


class Block(NamedTuple):
    """A fenced block of a document."""

    document: Path
    line: int
    info: str
    text: str

    @property
    def language(self) -> str:
        return self.info.split(" ")[0] if re.fullmatch(r"(bash|python)( exits=\d+)?", self.info) else ""

    @property
    def lines(self) -> range:
        return range(self.line, self.line + self.text.count("\n") + 2)

    @property
    def exits(self) -> int:
        return int(self.info.partition("exits=")[2] or "0")

    @property
    def is_set_up(self) -> bool:
        return self.language == "bash" and SET_UP.search(self.text) is not None

    def __str__(self) -> str:
        return f"{self.document.relative_to(ROOT)}:{self.line}"


def blocks_of(document: Path) -> Iterator[Block]:
    opened: tuple[str, str, int] | None = None
    lines: list[str] = []
    for number, line in enumerate(document.read_text().splitlines(), 1):
        fence = re.match(r"\s*(`{3,})(.*)$", line)
        if opened is None and fence is not None:
            opened, lines = (fence[1], fence[2].strip(), number), []
        elif opened is not None and line.strip() == opened[0]:
            text = textwrap.dedent("".join(f"{line}\n" for line in lines))
            yield Block(document, opened[2], opened[1], text)
            opened = None
        elif opened is not None:
            lines.append(line)
    assert opened is None, f"{document.name}:{opened and opened[2]}: a block without an end"


def prose_of(document: Path) -> str:
    """The text without its fenced blocks and inline code."""
    lines = document.read_text().splitlines()
    for block in blocks_of(document):
        for number in block.lines:
            lines[number - 1] = ""
    return re.sub(r"`[^`\n]*`", "", "\n".join(lines))


def anchors_of(document: Path) -> set[str]:
    """The headings' anchors, by GitHub's rule: lower case, no punctuation, dashes for spaces, a number if repeated."""
    seen: dict[str, int] = {}
    in_blocks = {number for block in blocks_of(document) for number in block.lines}
    for number, line in enumerate(document.read_text().splitlines(), 1):
        if number not in in_blocks and (heading := re.match(r"#{1,6}\s+(.*)$", line)):
            slug = re.sub(r"[^\w\- ]", "", heading[1].strip().lower()).replace(" ", "-")
            seen[slug] = seen.get(slug, 0) + 1
    return {slug if n == 0 else f"{slug}-{n}" for slug, count in seen.items() for n in range(count)}


BLOCKS = [block for document in GUIDES for block in blocks_of(document)]
EXAMPLES = [block for block in BLOCKS if block.language and not block.is_set_up]


LONG_EXAMPLES = {("chaos.md", 0), ("checkpoints.md", 2), ("getting-started.md", 2)}


def _example(block: Block, index: int) -> ParameterSet:
    """Some are whole stories of half a minute, which other tests tell too: those are for who has the time."""
    long = str(block).startswith("docs/failures.md") or (block.document.name, index) in LONG_EXAMPLES
    return pytest.param(block, id=str(block), marks=[pytest.mark.long] if long else [])


def _examples() -> list[ParameterSet]:
    seen = Counter[str]()
    found = []
    for block in EXAMPLES:
        found.append(_example(block, seen[block.document.name]))
        seen[block.document.name] += 1
    return found


@pytest.mark.parametrize("block", _examples())
def test_an_example_runs(block: Block, tmp_path: Path) -> None:
    folder, temporary = tmp_path / "here", tmp_path / "tmp"
    folder.mkdir()
    temporary.mkdir()
    text = SEEDS.sub("--seeds 10", PORT.sub(str(free_port()), block.text))
    shutil.copy(TRAIN, folder)
    (folder / "examples").symlink_to(ROOT / "examples")
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PET_", "TORCHELASTIC_"))}
    env |= {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}", "TMPDIR": str(temporary)}
    env["XDG_CONFIG_HOME"] = str(tmp_path / "config")  # the nodes' secret is not the user's
    env["OMP_NUM_THREADS"] = "1"  # threads of several tests that spin for the same cores take ten times as long
    if block.language == "python":
        (folder / "example.py").write_text(text)
        command = ["python", "example.py"]
    else:
        command = ["bash", "-eu", "-c", text]
    code, output = run(command, folder, env)
    assert code == block.exits, f"{block}\n{block.text}\nprinted:\n{output}"


def run(command: list[str], folder: Path, env: dict[str, str]) -> tuple[int | None, str]:
    """Its exit code and all it printed; no code if it took too long. Nothing of it is left, nodes in the background
    included."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=WAIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return None, process.communicate()[0]
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, output


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.is_set_up], ids=str)
def test_set_up_names_only_targets_that_exist(block: Block) -> None:
    targets = set(re.findall(r"(?m)^([A-Za-z][\w-]*):", (ROOT / "Makefile").read_text()))
    named = {word for words in MAKE.findall(block.text) for word in words.split() if "=" not in word}
    assert {word for word in named if not word.startswith("-")} <= targets


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    broken: list[str] = []
    for inline, reference in LINK.findall(prose_of(document)):
        link = inline or reference
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        if not target.exists() or (anchor and anchor not in anchors_of(target)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_flags_exist(document: Path) -> None:
    ours = {spelling for action in make_parser()._actions for spelling in action.option_strings}
    unknown = set(FLAG.findall(document.read_text())) - ours - FLAGS_OF_OTHERS.keys()
    assert unknown == set(), "no flag of `holdfast run`; another program's belongs in FLAGS_OF_OTHERS"


def test_getting_started_shows_the_scripts_as_they_are() -> None:
    shown = {block.info: block.text for block in BLOCKS if block.document.name == "getting-started.md"}
    assert shown["py"] == (ROOT / "examples" / "ddp_plain.py").read_text()
    names = ("ddp_plain.py", "ddp_minimal.py")
    plain, minimal = ((ROOT / "examples" / name).read_text().splitlines(keepends=True) for name in names)
    diff = [line.rstrip() for line in difflib.unified_diff(plain, minimal, *names)]
    assert [line.rstrip() for line in shown["diff"].splitlines()] == diff


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES


def test_examples_are_found() -> None:
    """Should the finder go blind, nothing would fail."""
    assert {block.language for block in EXAMPLES} == {"bash", "python"}
    guides = {"run.md", "api.md", "cluster.md", "hangs.md", "checkpoints.md", "getting-started.md", "failures.md"}
    assert {block.document.name for block in EXAMPLES} >= guides
