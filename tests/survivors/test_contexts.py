"""Who takes the place of a rank that was on a GPU has its context opened at once; nobody else has."""

from __future__ import annotations

from pathlib import Path

from harness import Job
from survivors.stories import run, stayed

# In each Python process of the job: a CUDA that notes for whom it is called.
CUSTOM = """
import ctypes, os
real = ctypes.CDLL

class Cuda:
    def cuInit(self, _): return 0
    def cuDeviceGet(self, found, number): found._obj.value = number; return 0
    def cuDevicePrimaryCtxRetain(self, _, device):
        with open(os.path.join(os.environ["STATE"], "opened"), "a") as file:
            file.write(f"{os.environ['RANK']} {os.environ['HOLDFAST_GENERATION']} {device.value}\\n")
        return 0

ctypes.CDLL = lambda *args, **kwargs: Cuda() if args == ("libcuda.so.1",) else real(*args, **kwargs)
"""


def test_a_new_rank_in_the_place_of_one_on_a_gpu_has_its_context_opened(job: Job) -> None:
    folder = Path(job.folder, "custom")
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(CUSTOM)
    env = {"PYTHONPATH": str(folder)}
    kills = [{"rank": 1, "step": 10, "at": "forward"}]
    assert run(job, kills, "--gpu=3", nproc=2, env=env) == 0, job.err
    assert stayed(job)[1:] == [[0]]
    assert Path(job.folder, "opened").read_text() == "1 1 3\n"
