"""Running a user's program in this very process: a script, a module or a function, each as its own `__main__`."""

from __future__ import annotations

import builtins
import contextlib
import importlib.machinery
import io
import os
import pickle
import runpy
import site
import sys
import sysconfig
import types
from collections.abc import Iterable
from multiprocessing import spawn

from holdfast.wire import messages

loading = False  # while a rank imports the script that holds its function
_preloaded: frozenset[str] = frozenset()
_compiled: tuple[str, tuple[int, ...], types.CodeType] | None = None


def preloaded() -> None:
    """Remember what is imported by now. In the zygote: to list it in a fork would write to each name, and so copy a
    thousand pages, 8 ms of a restart."""
    global _preloaded
    _preloaded = frozenset(sys.modules)


def prepare(program: messages.Program) -> None:
    """Compile a script while there is time. It is looked at again when it is to run: who mends it gets what is there
    then."""
    global _compiled
    if isinstance(program, messages.Script):
        path = os.path.abspath(messages.native(program.path))
        with contextlib.suppress(OSError, SyntaxError, ValueError):  # then that is said when it runs
            was = _looks(path)
            _compiled = path, was, _compile(path)


def _compile(path: str) -> types.CodeType:
    with io.open_code(path) as source:
        return compile(source.read(), path, "exec", dont_inherit=True)  # not this file's __future__


def _looks(path: str) -> tuple[int, ...]:
    status = os.stat(path)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def run(program: messages.Program, rank: int) -> None:
    match program:
        case messages.Script(path=path, args=args):
            _run_script(messages.native(path), tuple(map(messages.native, args)))
        case messages.Module(name=name, args=args):
            _run_module(name, tuple(map(messages.native, args)))
        case messages.Function(path=path):
            _run_function(path, rank)


def _run_script(path: str, args: tuple[str, ...]) -> None:
    """What `python path args` does."""
    sys.argv = [path, *args]
    sys.orig_argv = [sys.executable, "-u", *sys.argv]
    path = os.path.abspath(path)
    if not os.path.isfile(path) or not path.endswith(".py"):
        with contextlib.suppress(ValueError, OSError):
            if _is_archive(path):
                runpy.run_path(path, run_name="__main__")
                return
    if not sys.flags.safe_path:
        sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    main = _new_main()
    main.__file__ = path
    main.__dict__["__cached__"] = None
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    exec(_code(path), main.__dict__)


def _code(path: str) -> types.CodeType:
    if _compiled is not None and _compiled[:2] == (path, _looks(path)):
        return _compiled[2]
    return _compile(path)


def _is_archive(path: str) -> bool:
    """A directory or zip file with a `__main__.py`."""
    import zipfile

    return os.path.isdir(path) or zipfile.is_zipfile(path)


def _run_module(name: str, args: tuple[str, ...]) -> None:
    """What `python -m name args` does."""
    sys.argv = [name, *args]
    sys.orig_argv = [sys.executable, "-u", "-m", *sys.argv]
    if not sys.flags.safe_path:
        sys.path.insert(0, os.getcwd())
    _new_main()
    runpy._run_module_as_main(name)  # type: ignore[attr-defined]  # the function behind `python -m`


def _run_function(path: str, rank: int) -> None:
    """Call a pickled function and leave what it returns. The file is private to the user who started the job."""
    global loading
    result = os.path.join(os.path.dirname(path), f"result-{rank}")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(result)  # of an earlier generation
    with open(path, "rb") as payload:
        preparation: dict[str, object] = pickle.load(payload)
        loading = True
        spawn.prepare(preparation)
        function, args, kwargs = pickle.load(payload)
        loading = False
    value = function(*args, **kwargs)
    try:
        dump = pickle.dumps(value)
    except Exception as unpicklable:
        kind = type(value).__name__
        raise TypeError(f"rank {rank} returned a {kind} that cannot be sent back: {unpicklable}") from None
    with open(result + ".part", "wb") as file:
        file.write(dump)
    os.replace(result + ".part", result)


def _new_main() -> types.ModuleType:
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    return main


def installed_modules() -> tuple[str, ...]:
    """The installed modules imported since the fork, in order. The user's own files are not among them: they may read
    the rank from the environment as they are imported, and they may change between two worlds."""
    roots = _installed_roots()
    new = [(name, module) for name, module in list(sys.modules.items()) if name not in _preloaded]
    return tuple(name for name, module in new if _under(module, roots))


def _installed_roots() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    ours = os.path.dirname(os.path.dirname(__file__))  # also where it is used from its sources
    roots: Iterable[str] = [paths["stdlib"], paths["platstdlib"], paths["purelib"], paths["platlib"], ours]
    user = site.getusersitepackages() if site.ENABLE_USER_SITE else None
    return tuple(os.path.realpath(root) + os.sep for root in [*roots, *([user] if user else [])])


def _under(module: object, roots: tuple[str, ...]) -> bool:
    spec = getattr(module, "__spec__", None)
    origin = getattr(spec, "origin", None)
    return isinstance(origin, str) and os.path.realpath(origin).startswith(roots)
