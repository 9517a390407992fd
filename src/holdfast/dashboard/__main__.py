"""`python -m holdfast.dashboard RUN_DIR`: the page of a job, as its agent starts it."""

from __future__ import annotations

import argparse
import sys

from holdfast.dashboard.serving import NoPage, serve


def main() -> int:
    parser = argparse.ArgumentParser(prog="holdfast.dashboard")
    parser.add_argument("run_dir")
    parser.add_argument("--listen")
    parser.add_argument("--token-file")
    parser.add_argument("--parent", type=int, help="end with this process, and with its job")
    args = parser.parse_args()
    try:
        serve(args.run_dir, args.listen, args.token_file, args.parent)
    except NoPage as failure:
        print(f"holdfast: no page: {failure}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
