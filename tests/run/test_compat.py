"""What a torchrun user relies on, seen from inside a worker and from outside the job."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from harness import TRAINS, Job

PRINTS_ENV = """
import json, os, sys
with open(os.path.join(os.environ["STATE"], "env-" + os.environ["RANK"]), "w") as file:
    told = {"env": dict(os.environ), "argv": sys.argv, "path0": sys.path[0], "name": __name__, "file": __file__}
    json.dump(told, file)
"""


def seen(job: Job, rank: int) -> dict[str, object]:
    found: dict[str, object] = json.loads((job.folder / f"env-{rank}").read_text())
    return found


def test_workers_get_every_variable_that_torchrun_gives_and_a_script_is_main_in_its_own_directory(job: Job) -> None:
    package = job.folder / "apart"
    package.mkdir()
    script = package / "prints_env.py"
    script.write_text("import beside\n" + PRINTS_ENV)
    (package / "beside.py").write_text("")
    theirs = job.folder / "theirs"
    theirs.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=2", str(script)]
    not_its_own = ("OMP_NUM_THREADS", "PYTHONUNBUFFERED")  # the job is started without the second, see harness.py
    clean = {key: value for key, value in os.environ.items() if key not in not_its_own}
    subprocess.run(command, env={**clean, "STATE": str(theirs)}, check=True, capture_output=True)
    assert job.run(script, "--flag", "${local_rank}", "a b", max_restarts=2) == 0
    torchrun = json.loads((theirs / "env-1").read_text())["env"]
    ours = seen(job, 1)["env"]
    assert isinstance(ours, dict)
    # It hands its own setting down by inheritance, which is of no use to a worker.
    missing = set(torchrun) - set(ours) - {"TORCHELASTIC_SIGNALS_TO_HANDLE"}
    assert missing == set()
    ours_alone = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "STATE"}
    same = {
        key: value for key, value in torchrun.items() if key.startswith(("TORCH", "ROLE", "GROUP")) or "RANK" in key
    }
    for key, value in same.items():
        if key not in ours_alone | {"TORCHELASTIC_SIGNALS_TO_HANDLE"}:
            assert ours[key] == value, key
    assert ours["WORLD_SIZE"] == "2"
    told = seen(job, 1)
    assert told["argv"] == [str(script), "--flag", "1", "a b"]
    assert (told["path0"], told["name"], told["file"]) == (str(package), "__main__", str(script))


@pytest.mark.parametrize(
    ("flag", "command"),
    [
        ("-m", ("holdfast", "run")),
        ("--run-path", ("holdfast.run",)),
        ("--no-python", ("holdfast", "run")),
    ],
)
def test_other_ways_to_start_a_program(job: Job, flag: str, command: tuple[str, ...]) -> None:
    """And with one of them, the module form of the command itself."""
    script = job.folder / "prints_env.py"
    script.write_text(f"#!{sys.executable}\n{PRINTS_ENV}")
    script.chmod(0o755)
    target = "prints_env" if flag == "-m" else script
    assert job.run(target, "x", flags=(flag,), program=(sys.executable, "-m", *command)) == 0
    told = seen(job, 1)
    assert (told["argv"], told["name"]) == ([str(script), "x"], "__main__")


def test_a_rank_may_have_children_of_every_kind(job: Job) -> None:
    script = job.folder / "loads.py"
    script.write_text(
        "import torch\n"
        "from torch.utils.data import DataLoader, TensorDataset\n"
        "if __name__ == '__main__':\n"
        "    data = TensorDataset(torch.arange(8.0))\n"
        "    for way in ('fork', 'spawn', 'forkserver'):\n"
        "        loader = DataLoader(data, num_workers=1, multiprocessing_context=way)\n"
        "        print(way, sum(float(x) for (x,) in loader), flush=True)\n"
    )
    assert job.run(script, nproc=1) == 0
    assert job.out.splitlines() == ["fork 28.0", "spawn 28.0", "forkserver 28.0"]
    assert job.leftovers() == []


ODD = b"caf\xe9 \x80\xff"
LOOKS_AROUND = """
import json, os, random, sys
import numpy, torch
def f(x: int): ...
found = {
    "odd": list(os.fsencode(sys.argv[1])),
    "count": len(sys.argv),
    "last": sys.argv[-1],
    "annotation": str(f.__annotations__),
    "random": [random.random(), numpy.random.rand(), torch.rand(()).item()],
}
with open(os.path.join(os.environ["STATE"], "found-" + os.environ["RANK"]), "w") as file:
    json.dump(found, file)
"""


def test_what_a_script_is_given(job: Job) -> None:
    script = job.folder / "looks_around.py"
    script.write_text(LOOKS_AROUND)
    assert job.run("looks_around.py", os.fsdecode(ODD), *map(str, range(100_000)), nproc=8) == 0
    ranks = [json.loads((job.folder / f"found-{rank}").read_text()) for rank in range(8)]
    assert [bytes(found["odd"]) for found in ranks] == [ODD] * 8, "bytes that are no text"
    assert [(found["count"], found["last"]) for found in ranks] == [(100_002, "99999")] * 8, "megabytes"
    # Compiled as if alone: not under the `__future__` imports of the file that runs it.
    assert {found["annotation"] for found in ranks} == {"{'x': <class 'int'>}"}
    assert len({number for found in ranks for number in found["random"]}) == 8 * 3, "randomness of its own"


def test_a_script_that_is_started_cold_is_main_gets_bytes_that_are_no_text_and_is_restarted_too(job: Job) -> None:
    """Without torch: each rank would have to import it, and that is all that would be different."""
    script = job.folder / "prints_env.py"
    script.write_text(
        "import os, signal\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        f"    os.kill(os.getpid(), signal.SIGKILL) if os.environ['RANK'] == '1' else signal.pause()\n{PRINTS_ENV}"
    )
    assert job.run(script, "x", os.fsdecode(ODD), max_restarts=1, flags=("--cold-start",)) == 0
    told = seen(job, 1)
    assert (told["argv"], told["name"]) == ([str(script), "x", os.fsdecode(ODD)], "__main__")
    assert [incident["headline"] for incident in job.incidents()] == ["killed by SIGKILL"]


def test_a_script_may_close_every_descriptor_it_does_not_know(job: Job) -> None:
    script = job.folder / "closes.py"
    script.write_text(
        "import os, torch\n"
        "os.closerange(3, 1000)\n"
        "mine = os.open(os.environ['STATE'] + '/mine', os.O_WRONLY | os.O_CREAT)\n"
        "others = [os.dup(mine) for _ in range(20)]\n"
        "model = torch.nn.Linear(2, 2)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "model(torch.ones(2)).sum().backward()\n"
        "optimizer.step()\n"
        "raise ValueError('on purpose')\n"
    )
    assert job.run(script, nproc=1) == 1
    assert (job.folder / "mine").read_bytes() == b""


def test_closed_streams_ignored_child_signals_and_a_module_that_shadows_pythons_own_do_no_harm(job: Job) -> None:
    (job.folder / "random.py").write_text("raise SystemExit('shadowed')\n")
    script = job.folder / "apart" / "fine.py"
    script.parent.mkdir()
    script.write_text(f"import random\nopen({str(job.folder / 'ran')!r}, 'w').write('yes')\n")
    alone = 'trap \'\' CHLD; exec "$0" "$@" <&- >&- 2>&-'
    command = str(Path(sys.executable).parent / "holdfast")
    assert job.run(script, nproc=1, program=("/bin/sh", "-c", alone, command, "run")) == 0
    assert (job.folder / "ran").read_text() == "yes"


def test_elastic_is_seen_and_an_error_file_is_left_without_record_and_with_it(job: Job) -> None:
    script = job.folder / "records.py"
    script.write_text(
        "import os\n"
        "import torch.distributed as dist\n"
        "from torch.distributed.elastic.multiprocessing.errors import record\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "    raise KeyError('gone')\n"
        "@record\n"
        "def main():\n"
        "    assert dist.is_torchelastic_launched()\n"
        "    raise KeyError('gone again')\n"
        "main()\n"
    )
    own = job.folder / "own-error.json"
    assert job.run(script, nproc=1, max_restarts=1, env={"TORCHELASTIC_ERROR_FILE": str(own)}) == 1
    files = [job.run_dir / f"attempt_{generation}" / "0" / "error.json" for generation in (0, 1)]
    without, recorded = (json.loads(file.read_text())["message"] for file in files)
    assert without["message"] == "KeyError: 'gone'"
    assert int(without["extraInfo"]["timestamp"]) > 1_700_000_000
    assert recorded["message"] == "KeyError: 'gone again'"
    assert "raise KeyError" in recorded["extraInfo"]["py_callstack"]
    forwarded = json.loads(own.read_text())["message"]
    assert forwarded["errorCode"] == 1
    assert forwarded["message"] == recorded["message"]


def test_numa_binding_needs_a_gpu_and_says_so_before_training(job: Job) -> None:
    script = job.folder / "fine.py"
    script.write_text("print('fine', flush=True)\n")
    assert job.run(script, nproc=1, flags=("--numa-binding=node",)) == 1
    assert job.err == (
        "holdfast run: --numa-binding=node: there is no CUDA device here; leave it out, or use a number or cpu\n"
    )
    assert job.out == ""


def test_virtual_local_ranks_events_on_the_console_and_a_logs_specs_plugin(job: Job) -> None:
    """Flags that have nothing to do with each other, each with its own effect."""
    site = job.folder / "site"
    (site / "placed-1.dist-info").mkdir(parents=True)
    (site / "placed-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: placed\nVersion: 1\n")
    (site / "placed-1.dist-info" / "entry_points.txt").write_text("[torchrun.logs_specs]\nplaced = placed:Placed\n")
    (site / "placed.py").write_text(
        "from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs\n"
        "class Placed(DefaultLogsSpecs):\n"
        "    def reify(self, envs):\n"
        "        dest = super().reify(envs)\n"
        f"        dest.stdouts = {{rank: {str(job.folder)!r} + f'/placed-{{rank}}' for rank in envs}}\n"
        "        return dest\n"
    )
    script = job.folder / "prints.py"
    script.write_text(f"{PRINTS_ENV}\nprint('rank', os.environ['RANK'], flush=True)\n")
    flags = ("--logs-specs=placed", "--virtual-local-rank", "--event-log-handler=console")
    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    assert job.run(script, flags=flags, env={"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "4,7"}) == 0
    assert [(job.folder / f"placed-{rank}").read_text() for rank in (0, 1)] == ["rank 0\n", "rank 1\n"]
    envs = [seen(job, rank)["env"] for rank in (0, 1)]
    assert [(env["LOCAL_RANK"], env["CUDA_VISIBLE_DEVICES"]) for env in envs if isinstance(env, dict)] == [
        ("0", "4"),
        ("0", "7"),
    ]
    events = [json.loads(line) for line in job.err.splitlines() if line.startswith("{")]
    assert [(event["name"].rpartition(".")[2], event["source"]) for event in events] == [
        ("STARTED", "WORKER"),
        ("STARTED", "WORKER"),
        ("SUCCEEDED", "WORKER"),
        ("SUCCEEDED", "WORKER"),
        ("SUCCEEDED", "AGENT"),
    ]


def test_an_unknown_logs_specs_plugin_is_one_line(job: Job) -> None:
    assert job.run(TRAINS, "1", flags=("--logs-specs=nobody",)) == 1
    assert "torchrun.logs_specs[nobody]" in job.err
    assert "Traceback" not in job.err


def test_a_fixed_port_is_used_by_every_world(job: Job) -> None:
    with_port = ("--master-port=29517",)
    faults = [json.dumps({"rank": 1, "step": s, "how": "SIGKILL", "generations": [s - 2]}) for s in (2, 3, 4)]
    script = job.folder / "prints_port.py"
    script.write_text(
        TRAINS.read_text().replace("\nmain()", "\nos.write(1, os.environ['MASTER_PORT'].encode() + b'\\n')\nmain()")
    )
    assert job.run(script, "8", *faults, max_restarts=3, flags=with_port) == 0
    assert job.out.split() == ["29517"] * 8
    assert len(job.incidents()) == 3


@pytest.mark.long
def test_modules_of_the_first_world_are_there_in_the_second_but_for_one_that_leaves_a_thread(job: Job) -> None:
    site = Path(
        subprocess.check_output(
            [sys.executable, "-c", "import sysconfig;print(sysconfig.get_paths()['purelib'])"], text=True
        ).strip()
    )
    module = site / f"holdfast_test_threads_{os.getpid()}.py"
    module.write_text("import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n")
    try:
        script = job.folder / "imports.py"
        imports = f"import torch\nHAD = 'wave' in __import__('sys').modules\nimport wave\nimport {module.stem}\n"
        script.write_text(
            TRAINS.read_text()
            .replace("import torch\n", imports, 1)
            .replace("tell(step=step)", "tell(step=step, had=HAD)")
        )
        job.start(script, "1000000", max_restarts=1, env={"PACE_S": "0.003"})
        job.wait_event("zygote.grown")
        step = job.news.wait(lambda line: line["rank"] == 1)
        os.kill(step["pid"], signal.SIGKILL)
        assert job.wait_step(1, step["step"] + 5, generation=1)["had"] is True
        assert step["had"] is False
        job.signal(signal.SIGTERM)
        job.wait()
        assert job.events("zygote.not_grown") == [{"refused": {module.stem: "it leaves a thread running"}}]
    finally:
        module.unlink()
        Path(importlib.util.cache_from_source(str(module))).unlink(missing_ok=True)
