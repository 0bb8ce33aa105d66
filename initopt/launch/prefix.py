"""What a script imports before it does anything else, found in its text without running it."""

from __future__ import annotations

import ast
import re
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

_QUIET_CALLS = frozenset(
    {
        "os.environ.pop",
        "os.environ.setdefault",
        "sys.path.append",
        "sys.path.insert",
        "warnings.filterwarnings",
        "warnings.simplefilter",
    }
)
"""Calls that may stand between imports and mean something to them; run twice they do no more than once."""

_SETTINGS = ("os.environ", "os.chdir", "os.putenv", "site.addsitedir", "sys.path", "warnings.")
"""How what changes paths, the environment or filters begins, as imports may depend on them."""

_ONLY_ASK = frozenset({"copy", "count", "get", "index", "items", "keys", "values", "warn"})

_ONLY_A_RANK_S = re.compile(r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|GROUP_WORLD_SIZE|MASTER_(ADDR|PORT)|ROLE_NAME")

_PLAIN_CALLS = frozenset(
    {"Path", "absolute", "abspath", "cwd", "dirname", "getLogger", "getcwd", "join", "joinpath", "realpath", "resolve"}
    | {"str"}
)
"""The last names of calls that only make a value: of a path, mostly."""

_PLAIN = (
    *(ast.Constant, ast.Name, ast.Attribute, ast.Subscript, ast.Slice, ast.Tuple, ast.List, ast.Dict, ast.Set),
    *(ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.JoinedStr, ast.FormattedValue, ast.keyword),
    *(ast.expr_context, ast.operator, ast.unaryop, ast.boolop, ast.cmpop),
)


@dataclass(frozen=True, slots=True)
class Prefix:
    """The statements to run for a script's first imports, in order, and what it imports later.

    Among the statements are those that set what imports may depend on: `sys.path`, the environment, filters of
    warnings. They end before line `stopped`, which does something else, since imports after it may depend on that:
    `rest` are the modules of those. If a later line changes such a setting, the first is `sets`, and `early` are the
    modules of `rest` that are imported before it.
    """

    statements: tuple[ast.stmt, ...]
    rest: tuple[str, ...] = ()
    stopped: int = 0
    early: tuple[str, ...] = ()
    sets: int = 0


def prefix_of(source: str | bytes, name: str) -> Prefix:
    """The prefix of the script `name` with this text. Raises SyntaxError."""
    body = ast.parse(source, name).body
    run: list[ast.stmt] = []
    recorders: set[str] = set()
    for at, statement in enumerate(body):
        if _only_defines(statement) or _only_records(statement, recorders):
            continue
        if not _may_run_before(statement):
            sets = next((other for other in body[at:] if changes_settings(other)), None)
            early = body[at : body.index(sets)] if sets is not None else body[at:]
            return Prefix(
                tuple(run), _modules(body[at:]), statement.lineno, _modules(early), sets.lineno if sets else 0
            )
        if not _sets_a_rank_s(statement):
            run.append(statement)
        recorders.update(_recorders(statement))
    return Prefix(tuple(run))


def _modules(statements: Sequence[ast.stmt]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(imports(statements)))


def imports(statements: Sequence[ast.stmt], known: Container[str] = ()) -> Iterator[str]:
    """The absolute names of the modules that these statements import, those inside of `try` among them.

    What stands behind `from x import` may be a module, too: it is if `known` (such as `sys.modules`) has it.
    """
    for statement in statements:
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            parts = [name for alias in statement.names if (name := f"{statement.module}.{alias.name}") in known]
            yield from parts or [statement.module]
        elif isinstance(statement, ast.Try):
            yield from imports(
                [child for child in ast.iter_child_nodes(statement) if isinstance(child, ast.stmt)], known
            )


def _only_defines(statement: ast.stmt) -> bool:
    """Whether it can be left out: nothing that is imported after it depends on it."""
    if isinstance(statement, ast.If):
        return ast.unparse(statement.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING") and not statement.orelse
    return isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Pass) or (
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    )


def _recorders(statement: ast.stmt) -> Iterator[str]:
    """The names by which the script can call `record_imports` after this statement."""
    if isinstance(statement, ast.Import):
        yield from (f"{one.asname or one.name}.record_imports" for one in statement.names if one.name == "initopt")
    elif isinstance(statement, ast.ImportFrom) and statement.module == "initopt" and not statement.level:
        yield from (one.asname or one.name for one in statement.names if one.name == "record_imports")


def _only_records(statement: ast.stmt, recorders: Container[str]) -> bool:
    """Whether it is `initopt.record_imports()`, which each rank calls for its own imports."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(call, ast.Call) and ast.unparse(call.func) in recorders and not call.args + call.keywords


def _sets_a_rank_s(statement: ast.stmt) -> bool:
    """Whether it sets what torchrun sets for a rank: it is left to the ranks, which have that already."""
    name: ast.expr | None = None
    if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Subscript):
        name = statement.targets[0].slice
    elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call) and statement.value.args:
        name = statement.value.args[0]
    return isinstance(name, ast.Constant) and _ONLY_A_RANK_S.fullmatch(str(name.value)) is not None


def changes_settings(statement: ast.stmt) -> bool:
    """Whether it changes, as far as its text says, a setting that imports may depend on."""
    if _only_defines(statement):
        return False
    for node in ast.walk(statement):
        if isinstance(node, ast.Call):
            changed = ast.unparse(node.func)
            if changed.rpartition(".")[2] in _ONLY_ASK:
                continue
        elif isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
            changed = ast.unparse(node)
        else:
            continue
        if changed.startswith(_SETTINGS):
            return True
    return False


def _may_run_before(statement: ast.stmt) -> bool:
    """Whether it may run before the script does, and once more with it."""
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return True
    if isinstance(statement, ast.Assign | ast.AnnAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        return all(_settable(target) for target in targets) and _plain(statement.value)
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        call = statement.value
        return ast.unparse(call.func) in _QUIET_CALLS and all(map(_plain, (*call.args, *call.keywords)))
    if isinstance(statement, ast.Try):
        blocks = (*statement.body, *statement.orelse, *statement.finalbody)
        handled = (inner for handler in statement.handlers for inner in handler.body)
        return all(_only_defines(inner) or _may_run_before(inner) for inner in (*blocks, *handled))
    return False


def _settable(target: ast.expr) -> bool:
    if isinstance(target, ast.Subscript):
        return ast.unparse(target.value) == "os.environ" and _plain(target.slice)
    return isinstance(target, ast.Name)


def _plain(value: ast.AST | None) -> bool:
    """Whether evaluating it makes a value and does nothing else, as far as its text says."""
    for node in () if value is None else ast.walk(value):
        if isinstance(node, ast.Call):
            if ast.unparse(node.func).rpartition(".")[2] not in _PLAIN_CALLS:
                return False
        elif not isinstance(node, _PLAIN):
            return False
    return True
