"""The example's training, in a rank that has the faults of a plan in it however it was started."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from holdfast.chaos import inside

inside.install()
sys.argv[0] = str(Path(__file__).resolve().parents[3] / "examples" / "chaos" / "train_paced.py")
kept = runpy.run_path(sys.argv[0], run_name="__main__")
