"""Become what `python -u SCRIPT ARGS` or `python -u -m MODULE ARGS` is, in a process that Python runs already.

`runpy.run_path` would not do: it puts the old `__main__` back when the script ends, while threads, exit handlers and
pickles still look for the script's, and a traceback would begin with lines that no user wrote.
"""

from __future__ import annotations

import builtins
import gc
import importlib.machinery
import os
import runpy
import sys
import types
from collections.abc import Sequence
from types import TracebackType
from typing import NoReturn


def program(words: Sequence[str]) -> tuple[str, bool]:
    """The script or module of the command line `words`, and whether it's a module."""
    module = words[2] == "-m"
    return words[3 if module else 2], module


def script_file(script: str) -> str:
    """The script's `__file__`."""
    return os.path.join(os.getcwd(), script)


def prepare(words: Sequence[str]) -> None:
    """Make the command line `words` (interpreter, `-u`, perhaps `-m`, script, arguments) this process's own.

    What is imported from now on sees `sys.argv`, `sys.path` and a `__main__` as the program's own imports would.
    """
    script, module = program(words)
    sys.orig_argv[:] = words
    sys.argv[:] = words[2:] if not module else ["-m", *words[4:]]
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.getcwd() if module else os.path.dirname(os.path.realpath(script))
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    main.__annotations__ = {}
    if not module:
        main.__file__ = script_file(script)
        main.__cached__ = None  # type: ignore[attr-defined]
        main.__loader__ = importlib.machinery.SourceFileLoader("__main__", main.__file__)
    sys.modules["__main__"] = main


def run(words: Sequence[str]) -> NoReturn:
    """Run the program for which `prepare` was called.

    Leaves by SystemExit or KeyboardInterrupt, which must reach the interpreter's top, or by another BaseException.
    """
    script, module = program(words)
    try:
        if module:
            # Not public, but what `python -m` itself calls; it runs in the `__main__` that is there.
            runpy._run_module_as_main(script)  # type: ignore[attr-defined]
        elif os.path.isdir(script) or script.endswith((".zip", ".pyz")):
            sys.path.insert(0, script)
            runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
        else:
            # Not from the current folder, which a module may have changed.
            _run_file(str(sys.modules["__main__"].__file__))
    except SystemExit:
        raise
    except Exception as error:
        kind, trace = type(error), _without_us(error.__traceback__)
        # As the interpreter leaves them.
        sys.last_type, sys.last_value, sys.last_traceback = kind, error, trace
        sys.last_exc = error  # type: ignore[attr-defined]
        sys.excepthook(kind, error.with_traceback(trace), trace)
        sys.exit(1)
    except BaseException as error:
        # Of some the interpreter does more than to tell them, such as to end by SIGINT.
        _tell_without_us(_without_us(error.__traceback__))
        raise
    finally:
        # What was frozen before the fork takes part in the last collection, as ever.
        gc.unfreeze()
    sys.exit(0)


def _run_file(path: str) -> None:
    try:
        with open(path, "rb") as file:
            source = file.read()
    except OSError as error:
        # Python's own words and exit code.
        print(f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}", file=sys.stderr)
        sys.exit(2)
    exec(compile(source, path, "exec", dont_inherit=True), vars(sys.modules["__main__"]))


def _tell_without_us(trace: TracebackType | None) -> None:
    """Let the interpreter tell what ends the script with this traceback."""
    hook = getattr(sys, "excepthook", None)
    if hook is None:
        return

    def tell(kind: type[BaseException], error: BaseException, _: TracebackType | None) -> None:
        sys.excepthook = hook
        hook(kind, error.with_traceback(trace), trace)

    sys.excepthook = tell


def _without_us(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_frame.f_globals.get("__name__") == __name__:
        trace = trace.tb_next
    return trace
