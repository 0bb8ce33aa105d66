"""Become what `python -u SCRIPT ARGS` or `python -u -m MODULE ARGS` is, in a process that Python runs already.

`runpy.run_path` would not do: it puts the old `__main__` back when the script ends, while threads, exit handlers and
pickles still look for the script's, and a traceback would begin with lines that no user wrote.
"""

from __future__ import annotations

import builtins
import importlib.machinery
import os
import runpy
import sys
import types
from collections.abc import Sequence
from types import TracebackType
from typing import NoReturn


def program(words: Sequence[str]) -> tuple[str, bool]:
    """The script or module of the command line `words` (interpreter, `-u`, perhaps `-m`), and whether it's a module."""
    module = words[2] == "-m"
    return words[3 if module else 2], module


def own_folder(script: str, *, module: bool) -> str:
    """What Python would put first on `sys.path`: the script's folder, for a module the current one."""
    return os.getcwd() if module else os.path.dirname(os.path.realpath(script))


def script_file(script: str) -> str:
    """The script's `__file__`."""
    return os.path.join(os.getcwd(), script)


def run(words: Sequence[str]) -> NoReturn:
    """Run the command line `words` (interpreter, options, script, arguments) as the main program.

    Leaves by SystemExit or KeyboardInterrupt, which must reach the interpreter's top, or by another BaseException.
    """
    script, module = program(words)
    sys.orig_argv[:] = words
    sys.argv[:] = words[3 if module else 2 :]
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    main.__annotations__ = {}
    sys.modules["__main__"] = main
    try:
        if module:
            # Not public, but what `python -m` itself calls; it runs in the `__main__` that is there.
            runpy._run_module_as_main(script)  # type: ignore[attr-defined]
        elif os.path.isdir(script) or script.endswith((".zip", ".pyz")):
            sys.path.insert(0, script)
            runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
        else:
            _run_file(script, main)
    except Exception as error:
        kind, trace = type(error), _without_us(error.__traceback__)
        sys.excepthook(kind, error.with_traceback(trace), trace)
        sys.exit(1)
    sys.exit(0)


def _run_file(script: str, main: types.ModuleType) -> None:
    path = script_file(script)
    try:
        with open(path, "rb") as file:
            source = file.read()
    except OSError as error:
        # Python's own words and exit code.
        print(f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}", file=sys.stderr)
        sys.exit(2)
    main.__file__ = path
    main.__cached__ = None  # type: ignore[attr-defined]
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)


def _without_us(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_frame.f_globals.get("__name__") == __name__:
        trace = trace.tb_next
    return trace
