"""The imports that a trainer begins with, run once, with a look after each at what a fork would share or lack."""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
import textwrap
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from itertools import islice
from types import CodeType
from typing import Any

from initopt.launch import as_script
from initopt.launch.leftovers import Traces
from initopt.launch.own_state import main_users
from initopt.launch.prefix import imports, prefix_of


@dataclass(slots=True)
class Imported:
    """What came of the imports.

    `modules` are those that were named and imported, without those of Python. `rest` says what each rank imports
    itself, and why. With `refused` nothing may be forked from this process; with `failed` neither, since a module broke
    in the middle, but a new process may import what came before the step of that number (-1: none failed). `folders`
    were added to `sys.path` by the script's own statements, which each rank runs again.
    """

    modules: list[str] = field(default_factory=list)
    rest: str = ""
    refused: str = ""
    failed: int = -1
    folders: list[str] = field(default_factory=list)


def import_first(script: str, *, module: bool, preload: str | None, until: int | None) -> Imported:
    """Import what the script begins with, or the modules of `preload` (with commas between).

    `until`: only so many steps. `sys.path` must be the script's. Raises OSError where there is no /proc.
    """
    found = Imported()
    space: dict[str, Any] = {"__name__": "__main__"}
    before = Traces.now()
    at = -1
    try:
        steps = _named(preload) if preload is not None else _of_script(script, module, space, found)
        for at, step in enumerate(islice(steps, until)):
            path = list(sys.path)
            try:
                with main_users() as used:
                    exec(step.code, space)
            except ModuleNotFoundError as error:
                if preload is None and error.name in step.needed:
                    break  # nothing of it has run; each rank says so where it imports it
                raise
            except NameError:
                if step.names:
                    raise
                break  # it needs something that was left out
            if not step.names:
                found.folders += [folder for folder in sys.path if folder not in path]
            if traces := Traces.now().since(before):
                found.refused = _refusal(step, traces, found.modules)
                break
            if used:
                if preload is not None:
                    found.refused = f"--preload: {step.words}: {used[0]}, which only a rank has: leave it out"
                else:
                    found.failed = at
                    found.rest = f"{step.words}: {used[0]}, so each rank imports that and the rest itself"
                break
            imported = step.names if step.statement is None else imports([step.statement], sys.modules)
            found.modules += [name for name in imported if not _standard(name)]
    except (Exception, SystemExit) as error:
        why = f"{type(error).__name__}: {error}"
        if preload is not None:
            found.refused = f"--preload: {step.words} raised {why}"
        else:
            found.failed = at
            found.rest = f"{step.words} raised {why} before there was a rank, so each imports that and the rest itself"
    return found


@dataclass(frozen=True, slots=True)
class _Step:
    """Something to run. `words` is what a message calls it, `names` are the modules that it imports."""

    words: str
    code: CodeType
    names: tuple[str, ...]
    statement: ast.stmt | None = None

    @property
    def needed(self) -> set[str]:
        """The names and those of the packages that they are in."""
        return {".".join(name.split(".")[:depth]) for name in self.names for depth in range(1, name.count(".") + 2)}


def _named(preload: str) -> Iterator[_Step]:
    for name in filter(None, map(str.strip, preload.split(","))):
        yield _import(name)


def _import(name: str) -> _Step:
    text = f"import {name}"
    return _Step(f"`{text}`", compile(text, "<initopt launch>", "exec", dont_inherit=True), (name,))


def _of_script(script: str, module: bool, space: dict[str, Any], found: Imported) -> Iterator[_Step]:
    if not module:
        yield from _of_file(as_script.script_file(script), space, found)
        return
    # A module's text is known only when its package is imported.
    package = script.rpartition(".")[0]
    if package:
        yield _import(package)
    spec = _spec(script)
    if spec is not None and spec.submodule_search_locations is not None:
        yield _import(script)
        package, spec = script, _spec(f"{script}.__main__")
    if spec is not None and spec.origin is not None:
        sys.argv[0] = sys.modules["__main__"].__file__ = spec.origin
        space["__package__"] = package
        yield from _of_file(spec.origin, space, found)


def _spec(module: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(module)
    except (ImportError, AttributeError, ValueError):
        return None  # each rank says what is wrong with it


def _of_file(file: str, space: dict[str, Any], found: Imported) -> Iterator[_Step]:
    name = os.path.basename(file)
    try:
        with open(file, "rb") as opened:
            prefix = prefix_of(opened.read(), name)
    except (OSError, SyntaxError, ValueError):
        return  # each rank says what is wrong with it
    space["__file__"] = file
    for statement in prefix.statements:
        _make_absolute(statement, space.get("__package__"))
        code = compile(ast.Module([statement], []), file, "exec", dont_inherit=True)
        text = textwrap.shorten(ast.unparse(statement).splitlines()[0], 80, placeholder=" ...")
        yield _Step(f"`{text}` ({name}, line {statement.lineno})", code, tuple(imports([statement])), statement)
    rest = [module for module in prefix.rest if not _standard(module)]
    if rest:
        found.rest = (
            f"{name} runs line {prefix.stopped} before it imports {_few(rest)}, so each rank imports that itself. If "
            f"the order does not matter, name what to import once: --preload {_option(found.modules + rest)}"
        )


def _make_absolute(statement: ast.stmt, package: str | None) -> None:
    for node in ast.walk(statement):
        if package and isinstance(node, ast.ImportFrom) and node.level:
            with suppress(ImportError):
                name = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
                node.module, node.level = name.rstrip("."), 0


def _refusal(step: _Step, traces: list[str], safe: list[str]) -> str:
    instead = f"leave it out with --preload {_option(safe)}" if safe else "leave it out with --preload ''"
    return (
        f"{step.words} {' and '.join(traces)}: ranks that are forked after it would lack or share that. "
        f"Let each rank import it: {instead}; or use torchrun"
    )


def _standard(name: str) -> bool:
    return name.partition(".")[0] in sys.stdlib_module_names or name == "__future__"


def _option(names: list[str]) -> str:
    return ",".join(dict.fromkeys(names))


def _few(names: list[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
