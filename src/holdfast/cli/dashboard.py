"""`holdfast dashboard`: a job on a web page, running or ended, and its metrics for Prometheus."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from holdfast.cli.flags import open_parser
from holdfast.dashboard.serving import HOST, PORT, NoPage, parse_listen, serve
from holdfast.observe import find

_EPILOG = f"""\
/ is the page, /state the same as JSON, /metrics for Prometheus. On {HOST} everybody on this machine may read it; with
any other address, or with --token-file, only who has the token. To drain the job or kill a rank takes another one.
"""


def main(argv: Sequence[str]) -> int:
    parser = open_parser("holdfast dashboard", "Show a job on a web page until Ctrl-C. The job does not notice.")
    parser.epilog = _EPILOG
    parser.add_argument("job", nargs="?", default="", metavar="JOB", help="its run id, agent's pid or run directory")
    parser.add_argument(
        "--listen", metavar="[HOST:]PORT", help=f"where (default {HOST}:{PORT}, or a free port if that is taken)"
    )
    parser.add_argument("--token-file", metavar="FILE", help="with the token for readers (default: a new one, printed)")
    args = parser.parse_args(list(argv))
    if args.listen is not None:
        try:
            parse_listen(args.listen)
        except ValueError as failure:
            parser.error(f"argument --listen: {failure}")
    try:
        found = find.find(args.job)
    except find.NotFound as failure:
        return find.complain("dashboard", failure)
    try:
        serve(str(found.run_dir), args.listen, args.token_file, record=str(found.record))
    except NoPage as failure:
        print(f"holdfast dashboard: {failure}", file=sys.stderr)
        return 1
    return 0
