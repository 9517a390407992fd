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
    parser.add_argument("--token-on-stdin", action="store_true", help="a line; used where a page needs one")
    args = parser.parse_args()
    try:
        token = sys.stdin.readline().strip() if args.token_on_stdin else ""
        serve(args.run_dir, args.listen, args.token_file, args.parent, token=token)
    except NoPage as failure:
        print(f"holdfast: no page: {failure}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
