"""The imports that a trainer begins with, run once, with a look after each at what a fork would share or lack."""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
import textwrap
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from itertools import islice
from types import CodeType
from typing import Any

from initopt.launch import as_script
from initopt.launch.leftovers import Traces
from initopt.launch.own_state import main_users
from initopt.launch.prefix import changes_settings, imports, prefix_of


@dataclass(slots=True)
class Imported:
    """What came of the imports.

    `modules` are those that were named and imported, without those of Python. `rest` says what each rank imports
    itself, and why. With `refused` nothing may be forked from this process; with `failed` neither, since a module broke
    in the middle, but a new process may import what came before the step of that number (-1: none failed). `folders`
    were added to `sys.path` by the script's own statements, which each rank runs again. `brought` are, for each step,
    those of `modules` that it named, and all that it was the first to import.
    """

    modules: list[str] = field(default_factory=list)
    rest: str = ""
    refused: str = ""
    failed: int = -1
    folders: list[str] = field(default_factory=list)
    brought: list[tuple[list[str], set[str]]] = field(default_factory=list)

    def without(self, modules: Collection[str]) -> list[str]:
        """Those of `modules` that were not the first to import one of these; all of them if none was."""
        left_out: list[str] = []
        for names, new in self.brought:
            if found := new.intersection(modules):
                left_out += [name for name in names if any(_within(one, name) for one in found)] or names
        return _outside(self.modules, left_out)


def import_first(script: str, *, module: bool, preload: str | None, until: int | None) -> Imported:
    """Import what the script begins with, or the modules of `preload` (with commas between), with its settings.

    `until`: only so many steps. `sys.path` must be the script's. Raises OSError where there is no /proc.
    """
    found = Imported()
    space: dict[str, Any] = {"__name__": "__main__"}
    before = Traces.now()
    at = -1
    try:
        if preload is None:
            steps = _of_script(script, module, space, found)
        else:
            steps = _named([*filter(None, map(str.strip, preload.split(",")))], script, module, space)
        steps = islice(steps, until)
        for at, step in enumerate(steps):
            path, known = list(sys.path), set(sys.modules)
            try:
                with main_users() as used:
                    exec(step.code, space)
            except ModuleNotFoundError as error:
                if preload is None and error.name in step.needed:
                    break  # nothing of it has run; each rank says so where it imports it
                raise
            except Exception as error:
                if preload is not None and step.statement is not None:
                    # It needs something that was left out.
                    if changes_settings(step.statement) and not found.rest:
                        found.rest = f"--preload: {step.words} does not hold for it, as it raised {_text(error)}"
                    continue
                if step.names or not isinstance(error, NameError):
                    raise
                break  # it needs something that was left out
            if not step.names:
                found.folders += [folder for folder in sys.path if folder not in path]
            if traces := Traces.now().since(before):
                found.refused = _refusal(step, traces, found.modules, [name for later in steps for name in later.names])
                break
            if used:
                if preload is not None:
                    found.refused = f"--preload: {step.words}: {used[0]}, which only a rank has: leave it out"
                else:
                    found.failed = at
                    found.rest = f"{step.words}: {used[0]}, so each rank imports that and the rest itself"
                break
            imported = step.names if step.statement is None else imports([step.statement], sys.modules)
            named = [name for name in imported if not _standard(name)]
            found.modules += named
            found.brought.append((named, set(sys.modules) - known))
    except (Exception, SystemExit) as error:
        why = _text(error)
        if preload is not None:
            found.refused = f"--preload: {step.words} raised {why}" + (f" ({found.rest})" if found.rest else "")
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

    @property
    def perhaps(self) -> set[str]:
        """What stands behind `from x import`: modules or not."""
        if not isinstance(self.statement, ast.ImportFrom):
            return set()
        return {f"{self.statement.module}.{alias.name}" for alias in self.statement.names}


def _named(wanted: Sequence[str], script: str, module: bool, space: dict[str, Any]) -> Iterator[_Step]:
    """The settings of the script, each of the modules `wanted` at its place among them, and then the others."""
    done: set[str] = set()
    for step in _of_script(script, module, space, Imported(), wanted):
        if step.statement is None or all(map(_standard, step.names)):
            yield step
            continue
        for name in wanted:
            if name in step.needed | step.perhaps and name not in done:
                done.add(name)
                yield _import(name)
    yield from (_import(name) for name in wanted if name not in done)


def _import(name: str) -> _Step:
    text = f"import {name}"
    return _Step(f"`{text}`", compile(text, "<initopt launch>", "exec", dont_inherit=True), (name,))


def _of_script(
    script: str, module: bool, space: dict[str, Any], found: Imported, wanted: Sequence[str] | None = None
) -> Iterator[_Step]:
    """What the script begins with; no package whose module it is, unless it is `wanted` (None: all are)."""
    if not module:
        yield from _of_file(as_script.script_file(script), space, found)
        return
    # A module's text is known only when its package is imported.
    package = script.rpartition(".")[0]
    if package:
        if not _is_wanted(package, wanted):
            return
        yield _import(package)
    spec = _spec(script)
    if spec is not None and spec.submodule_search_locations is not None:
        if not _is_wanted(script, wanted):
            return
        yield _import(script)
        package, spec = script, _spec(f"{script}.__main__")
    if spec is not None and spec.origin is not None:
        sys.argv[0] = sys.modules["__main__"].__file__ = spec.origin
        space["__package__"] = package
        yield from _of_file(spec.origin, space, found)


def _is_wanted(package: str, wanted: Sequence[str] | None) -> bool:
    return wanted is None or any(_within(name, package) for name in wanted)


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
    for statement in _one_by_one(prefix.statements):
        _make_absolute(statement, space.get("__package__"))
        code = compile(ast.Module([statement], []), file, "exec", dont_inherit=True)
        text = textwrap.shorten(ast.unparse(statement).splitlines()[0], 80, placeholder=" ...")
        yield _Step(f"`{text}` ({name}, line {statement.lineno})", code, tuple(imports([statement])), statement)
    rest = [module for module in prefix.rest if not _standard(module)]
    early = [module for module in prefix.early if not _standard(module)]
    late = [module for module in rest if module not in early]
    if rest:
        found.rest = (
            f"{name} runs line {prefix.stopped} before it imports {_few(rest)}, so each rank imports that itself."
        )
    if early:
        found.rest += (
            f" If the order does not matter, name what to import once: --preload {_option(found.modules + early)}"
        )
    if late:
        found.rest += (
            f"{'.' if early else ''} Line {prefix.sets} seems to set paths, the environment or filters before it "
            f"imports {_few(late)}, which --preload would lack: move that up, before line {prefix.stopped}, if you can"
        )


def _one_by_one(statements: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """These statements, with `import a, b` as two, so that a message can tell which."""
    for statement in statements:
        if isinstance(statement, ast.Import):
            yield from (ast.copy_location(ast.Import([alias]), statement) for alias in statement.names)
        else:
            yield statement


def _make_absolute(statement: ast.stmt, package: str | None) -> None:
    for node in ast.walk(statement):
        if package and isinstance(node, ast.ImportFrom) and node.level:
            with suppress(ImportError):
                name = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
                node.module, node.level = name.rstrip("."), 0


def _refusal(step: _Step, traces: list[str], before: list[str], after: list[str]) -> str:
    left_out = [name for name in step.names if name not in before]
    rest = before + _outside([name for name in after if not _standard(name)], left_out)
    return (
        f"{step.words} {' and '.join(traces)}: ranks that are forked after it would lack or share that. "
        f"Let each rank import it: {leave_out(rest)}; or use torchrun"
    )


def leave_out(rest: list[str]) -> str:
    """The words that say how to import only `rest`."""
    return f"leave it out with --preload {_option(rest)}"


def _within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def _outside(modules: list[str], packages: list[str]) -> list[str]:
    return [module for module in modules if not any(_within(module, package) for package in packages)]


def _standard(name: str) -> bool:
    return name.partition(".")[0] in sys.stdlib_module_names or name == "__future__"


def _option(names: list[str]) -> str:
    return ",".join(dict.fromkeys(names)) or "''"


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _few(names: list[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
