"""The process of one check. Its last line on what was its standard output is the finding; all else goes to stderr."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable

import msgspec

from holdfast import linux
from holdfast.doctor.finding import Asked, Finding, fail, first_line


class Order(msgspec.Struct, frozen=True):
    run: str  # module:function
    asked: Asked
    parent: int


def main() -> None:
    order = msgspec.json.decode(sys.argv[1], type=Order)
    linux.die_with_parent(order.parent)
    answer = os.dup(1)  # libraries print, and a rank that is forked from here prints as well
    os.dup2(2, 1)
    module, _, function = order.run.partition(":")
    check: Callable[[Asked], Finding] = getattr(importlib.import_module(module), function)
    try:
        finding = check(order.asked)
    except Exception as failure:
        finding = fail(first_line(failure), "this is not foreseen here; please report it with this line")
        sys.excepthook(type(failure), failure, failure.__traceback__)
    os.write(answer, msgspec.json.encode(finding) + b"\n")
    sys.stdout.flush()
    os._exit(0)  # what a library does at its end, or waits for, is of no interest any more


if __name__ == "__main__":
    main()
