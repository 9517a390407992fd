"""C frames of stuck ranks, by py-spy where it is installed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
from collections.abc import Mapping

LIMIT_S = 3.0
MAX_PROCESSES = 8  # each takes some tenths of a second of a core, to read the symbols of libtorch
MAX_LINE_CHARS = 300


def tool() -> str | None:
    return shutil.which("py-spy") or shutil.which("py-spy", path=os.path.dirname(sys.executable))


async def append(files: Mapping[int, str]) -> None:
    """Add the C frames of the first of these processes to their files, in 3 s at most for all of them."""
    if (program := tool()) is None:
        return
    chosen = list(files.items())[:MAX_PROCESSES]
    texts = await asyncio.gather(*(_dump(program, pid) for pid, _ in chosen))
    for (_, path), text in zip(chosen, texts, strict=True):
        _add(path, text)


def _add(path: str, text: str) -> None:
    with contextlib.suppress(OSError), open(path, "a", errors="replace") as file:
        file.write(f"\n-- with C frames, by py-spy\n\n{text}\n")


async def _dump(program: str, pid: int) -> str:
    try:
        process = await asyncio.create_subprocess_exec(
            program,
            *("dump", "--native", "--pid", str(pid)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
    except OSError as failure:
        return f"{program} cannot be run: {failure.strerror}"
    try:
        output, _ = await asyncio.wait_for(process.communicate(), LIMIT_S)
    except TimeoutError:
        return f"py-spy took more than {LIMIT_S:g} s"
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()  # the kernel lets go of what it traced
            await process.wait()
    text = output.decode(errors="replace").strip()
    if process.returncode == 0:
        return text
    return f"py-spy failed: {text.partition(os.linesep)[0][:MAX_LINE_CHARS]}"
