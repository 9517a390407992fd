"""The page of a job with 1,000 ranks and 10,000 incidents, in a real browser: how soon it is there, and how smooth."""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

from bench.launchers import table, versions

TESTS = Path(__file__).resolve().parent.parent / "tests"
LIVE = "document.querySelector('#line').dataset.is === 'live'"
FRAMES = """
new Promise(done => {
  const times = [];
  const began = performance.now();
  const next = now => {
    times.push(now);
    if (now - began < SECONDS * 1000) requestAnimationFrame(next); else done(times);
  };
  requestAnimationFrame(next);
})
"""


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.page", description=__doc__)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--seconds", type=int, default=10)
    args = parser.parse_args(argv)
    sys.path.insert(0, str(TESTS))
    from dashboard.chromium import Browser
    from dashboard.conftest import Page
    from dashboard.made_records import LEAD, large

    with tempfile.TemporaryDirectory(prefix="holdfast-bench-", ignore_cleanup_errors=True) as folder:
        made = large(Path(folder, "job_ab"))
        began_s = time.monotonic()
        page = Page(made.run_dir)
        ready_s = time.monotonic() - began_s
        browser = Browser(Path(folder, "browser"))
        opened = []
        for _ in range(args.runs + 1):
            tab = browser.tab()
            began_s = time.monotonic()
            tab.open(page.url)
            tab.until(LIVE)
            opened.append(time.monotonic() - began_s)
            tab.close()
        tab = browser.tab()
        tab.open(page.url)
        tab.until(LIVE)
        over = threading.Event()

        def train() -> None:
            """All ranks, four times a second."""
            nodes = [LEAD, *(f"gpu-{at:03}:{4100 + at}" for at in range(1, 125))]
            step = 1_000_000
            while not over.wait(0.25):
                step += 1
                made.progress(10_000, nodes, 8, time.time() - made.began, step, 0)

        trainer = threading.Thread(target=train)
        trainer.start()
        times = tab.eval(FRAMES.replace("SECONDS", str(args.seconds)))
        over.set()
        trainer.join()
        frames = sorted(after - before for before, after in itertools.pairwise(times))
        tab.close()
        browser.close()
        page.close()
    first, *warm = opened
    rows = [
        ["the page's process, until it answers", f"{ready_s:.2f} s"],
        [f"open until live, median of {args.runs}", f"{statistics.median(warm):.2f} s"],
        ["  worst", f"{max(warm):.2f} s"],
        ["  the very first, in a browser that has just started", f"{first:.2f} s"],
        [
            f"a frame, ranks changing 4 times a second, median of {len(frames)}",
            f"{statistics.median(frames):.0f} ms",
        ],
        ["  99th percentile", f"{frames[int(len(frames) * 0.99)]:.0f} ms"],
        ["  worst", f"{frames[-1]:.0f} ms"],
    ]
    print(f"1,000 ranks, 10,000 incidents; {versions()}\n")
    print(table(["what", "figure"], rows))


if __name__ == "__main__":
    main()
