"""The imports that a trainer begins with, run once, with a look after each at what a fork would share or lack."""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from itertools import islice
from types import CodeType
from typing import Any

from initopt.launch import as_script
from initopt.launch.leftovers import Traces
from initopt.launch.own_state import OF_A_RANK, EnvironmentUse, main_users
from initopt.launch.prefix import changes_settings, imports, prefix_of
from initopt.launch.settings import Change, Settings


@dataclass(slots=True)
class Imported:
    """What came of the imports.

    `modules` are those that were named and imported, without those of Python, `changes` is what they changed. `rest`
    says what each rank imports itself, and why. With `refused` nothing may be forked from this process; with `failed`
    neither, but a new process may import what came before the step of that number (-1: none failed).
    """

    modules: list[str] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    rest: str = ""
    refused: str = ""
    failed: int = -1


def import_first(
    script: str,
    *,
    module: bool,
    preload: str | None,
    until: int | None,
    use: EnvironmentUse,
    begin: Callable[[int, str], None],
) -> Imported:
    """Import what the script begins with, or the modules of `preload` (with commas between), with its settings.

    `until`: only so many steps. `use` watches the environment, `begin` is called with the number and the words of each
    step. `sys.path` must be the script's. Raises OSError where there is no /proc.
    """
    found = Imported()
    space: dict[str, Any] = {"__name__": "__main__"}
    before = Traces.now()
    if preload is None:
        steps = _of_script(script, module, space, found)
    else:
        steps = _named(_names(preload), script, module, space)
    first = Settings.now()
    done: list[_Done] = []
    for at, step in enumerate(islice(steps, until)):
        begin(at, step.words)
        earlier = Settings.now()
        reason = ""
        try:
            with main_users(space) as used:
                taken = step.taken(space)
                exec(step.code, space)
        except (Exception, SystemExit) as error:
            if preload is None:
                missing = isinstance(error, ModuleNotFoundError) and error.name in step.needed
                if missing or (isinstance(error, NameError) and not step.names):
                    break  # nothing of it has run; each rank says so where it imports it, or has what was left out
            elif step.statement is not None:
                # It needs something that was left out.
                if changes_settings(step.statement, {}) and not found.rest:
                    found.rest = f"--preload: {step.words} does not hold for it, as it raised {_text(error)}"
                continue
            reason = f" raised {_text(error)} before there was a rank"
        else:
            if traces := Traces.now().since(before):
                reason = f" {' and '.join(traces)}, which ranks that are forked after it would lack or share"
            elif used:
                reason = f": {used[0]}, which only a rank has"
            elif asked := next(use.reasons(OF_A_RANK), ""):
                reason = f": {asked}, which only a rank has"
        if reason:
            _leave_to_ranks(found, at, step, reason, steps, preload)
            break
        change = Change(step.line, earlier, Settings.now())
        if step.imports:
            found.changes.append(change)
        done.append(_Done(at, step, taken, change))
        imported = step.names if step.statement is None else imports([step.statement], sys.modules)
        # Some of a `try` are not there.
        found.modules += [name for name in imported if not _standard(name) and name in sys.modules]
    if not found.refused and found.failed < 0:
        _rehearse(done, first, space, found, preload)
    return found


@dataclass(frozen=True, slots=True)
class _Done:
    """A step that was run: its number, the values that it took from others, and what it changed."""

    at: int
    step: _Step
    taken: tuple[Any, ...]
    change: Change


def _rehearse(
    done: Sequence[_Done], first: Settings, space: Mapping[str, Any], found: Imported, preload: str | None
) -> None:
    """Run the script's statements as a rank will, with all modules there: none may come to another value."""
    last = Settings.now()
    first.restore()
    stage = {name: value for name, value in space.items() if name[:2] == "__"}
    for one in done:
        if not all(map(_same, one.step.taken(stage), one.taken)):
            reason = ": what it takes is changed by a module that is imported later"
            _leave_to_ranks(found, one.at, one.step, reason, iter(()), preload)
            break
        exec(one.step.code, stage)
        if one.step.imports:
            one.change.make()
    last.restore()


def _same(one: Any, other: Any) -> bool:
    with suppress(Exception):  # such as an array, of which each number may be the same or not
        return one is other or bool(type(one) is type(other) and one == other)
    return False


def left_to_ranks(step: str, reason: str, others: Sequence[str]) -> str:
    """The words for a step that each rank does itself, with all after it, and how to import `others` once."""
    how = f". To import all others once: --preload {_option(others)}" if others else ""
    return f"{step}{reason}, so each rank imports that and the rest itself{how}"


def _leave_to_ranks(
    found: Imported, at: int, step: _Step, reason: str, later: Iterator[_Step], preload: str | None
) -> None:
    left_out = [name for name in step.names if name not in found.modules]
    if preload is not None:
        others = _outside(_names(preload), left_out)
        found.refused = f"--preload: {step.words}{reason}" + (f" ({found.rest})" if found.rest else "")
        found.refused += f". Without it: --preload {_option(others)}" if left_out and others else ""
        return
    # What stands behind a package that is not there can't be told.
    after = [name for one in later for name in one.names] if step.statement is not None else []
    others = found.modules + _outside([name for name in after if not _standard(name)], left_out)
    found.failed, found.rest = at, left_to_ranks(step.words, reason, others if left_out else ())


@dataclass(frozen=True, slots=True)
class _Step:
    """Something to run. `words` is what a message calls it, `names` are the modules that it imports.

    `line` is that of the script at which it is done, 0 for none.
    """

    words: str
    code: CodeType
    names: tuple[str, ...]
    line: int = 0
    statement: ast.stmt | None = None

    @property
    def imports(self) -> bool:
        """Whether modules may be imported."""
        return self.statement is None or isinstance(self.statement, ast.Import | ast.ImportFrom | ast.Try)

    def taken(self, space: dict[str, Any]) -> tuple[Any, ...]:
        """The values that the script's statement takes, in this namespace, without those of a `try`."""
        parts: list[ast.expr | None] = []
        if isinstance(self.statement, ast.Assign | ast.AnnAssign):
            parts = [self.statement.value]
        elif isinstance(self.statement, ast.Expr) and isinstance(self.statement.value, ast.Call):
            parts = [*self.statement.value.args, *(word.value for word in self.statement.value.keywords)]
        plain = [
            part for part in parts if part is not None and not any(isinstance(n, ast.Lambda) for n in ast.walk(part))
        ]
        return tuple(value for part in plain for value in _values(part, space))

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


def _values(part: ast.expr, space: dict[str, Any]) -> Iterator[Any]:
    value = eval(compile(ast.Expression(part), "<initopt launch>", "eval"), space)
    if isinstance(part, ast.Call) and not any("__eq__" in vars(kind) for kind in type(value).__mro__[:-1]):
        # Made anew each time, such as a TypeVar: equal is what it is made of.
        for one in (part.func, *part.args, *(word.value for word in part.keywords)):
            yield from _values(one, space)
    else:
        yield value


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
                yield _import(name, step.line)
    yield from (_import(name) for name in wanted if name not in done)


def _import(name: str, line: int = 0) -> _Step:
    text = f"import {name}"
    return _Step(f"`{text}`", compile(text, "<initopt launch>", "exec", dont_inherit=True), (name,), line)


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
        words = f"`{text}` ({name}, line {statement.lineno})"
        yield _Step(words, code, tuple(imports([statement])), statement.lineno, statement)
    rest = [module for module in prefix.rest if not _standard(module)]
    early = [module for module in prefix.early if not _standard(module)]
    late = [module for module in rest if module not in early]
    early = [module for module in early if _spec(module.partition(".")[0]) is not None]
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


def _names(preload: str) -> list[str]:
    return [*filter(None, map(str.strip, preload.split(",")))]


def _within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def _outside(modules: list[str], packages: list[str]) -> list[str]:
    return [module for module in modules if not any(_within(module, package) for package in packages)]


def _standard(name: str) -> bool:
    return name.partition(".")[0] in sys.stdlib_module_names or name == "__future__"


def _option(names: Sequence[str]) -> str:
    return ",".join(dict.fromkeys(names)) or "''"


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _few(names: list[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
