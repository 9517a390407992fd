"""`holdfast report`: where the wall clock of a job went, in a terminal, on a page, or as a trace."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence

from holdfast.cli.flags import open_parser
from holdfast.observe import find, goodput, record, report, screen

ANY = 200  # columns, where nobody has a terminal that says how many it has


def main(argv: Sequence[str]) -> int:
    parser = open_parser(
        "holdfast report", "Divide a job's wall clock: training, and what its start, its failures and its saves took."
    )
    parser.add_argument(
        "job",
        nargs="?",
        default="",
        metavar="JOB",
        help="its run id, its agent's pid, or the path of its run directory",
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument("--html", default="", metavar="FILE", help="also write a page of its own, to keep or to send")
    parser.add_argument("--trace", default="", metavar="FILE", help="also write a trace for ui.perfetto.dev")
    args = parser.parse_args(list(argv))
    try:
        found = find.find(args.job)
    except find.NotFound as failure:
        return find.complain("report", failure)
    try:
        notes = record.read(found.record)
    except OSError as failure:
        return _complain(f"cannot read {found.record}: {failure.strerror}")
    if not notes:
        return _complain(f"{found.record} has no line that this version understands")
    divided, peers = goodput.divide(notes), report.peers()
    written = []
    if args.html:
        from holdfast.observe import report_html

        written.append((args.html, report_html.page(divided, peers).encode()))
    if args.trace:
        from holdfast.observe import trace

        written.append((args.trace, trace.encode(notes, divided)))
    for path, content in written:
        if why := _write(path, content):
            return _complain(f"cannot write {path}: {why}")
    if args.json:
        screen.show([report.as_json(divided, peers).decode()])
        return 0
    columns = shutil.get_terminal_size((ANY, 24)).columns if sys.stdout.isatty() else 0
    screen.show(report.text(divided, peers, columns))
    for path, _ in written:
        print(f"holdfast report: wrote {path}", file=sys.stderr)
    return 0


def _write(path: str, content: bytes) -> str:
    """Whole or not at all; why not. A device or a pipe, which cannot be replaced, is written as it is."""
    try:
        if os.path.exists(path) and not os.path.isfile(path):
            with open(path, "wb") as file:
                file.write(content)
            return ""
        part = f"{path}.{os.getpid()}.part"
        try:
            with open(part, "wb") as file:
                file.write(content)
            os.replace(part, path)
        finally:
            if os.path.exists(part):
                os.remove(part)
    except OSError as failure:
        return failure.strerror or str(failure)
    return ""


def _complain(message: str) -> int:
    print(f"holdfast report: {screen.clean(message)}", file=sys.stderr)
    return 1
