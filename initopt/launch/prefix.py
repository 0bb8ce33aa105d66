"""What a script imports before it does anything else, found in its text without running it."""

from __future__ import annotations

import ast
import builtins
import re
import sys
from collections.abc import Container, Iterator, Mapping, Sequence
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
"""Calls that may stand between imports and mean something to them; a rank makes them again, see `settings.py`."""

_SETTINGS = ("os.environ", "os.chdir", "os.putenv", "site.addsitedir", "sys.path", "warnings.")
"""How what changes paths, the environment or filters begins, as imports may depend on them."""

_ONLY_ASK = frozenset({"copy", "count", "get", "index", "items", "keys", "values", "warn"})

_ONLY_A_RANK_S = re.compile(r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|GROUP_WORLD_SIZE|MASTER_(ADDR|PORT)|ROLE_NAME")

_PLAIN_CALLS = frozenset(
    {"Path", "absolute", "abspath", "cwd", "dirname", "getLogger", "getcwd", "join", "joinpath", "realpath", "resolve"}
    | {"str"}
)
"""The last names of calls that only make a value: of a path, mostly."""

_VALUES = frozenset({"dataclasses.field", "enum.auto", "typing.NewType", "typing.TypeVar"})
"""More of them, by the absolute name of what is called."""

_DECORATORS = frozenset(
    {
        *("abc.abstractmethod", "builtins.classmethod", "builtins.property", "builtins.staticmethod"),
        *("contextlib.asynccontextmanager", "contextlib.contextmanager", "dataclasses.dataclass", "enum.unique"),
        *("functools.cache", "functools.cached_property", "functools.lru_cache", "functools.singledispatch"),
        *("functools.total_ordering", "functools.wraps", "initopt.step", "torch.enable_grad", "torch.inference_mode"),
        *("torch.distributed.elastic.multiprocessing.errors.record", "torch.no_grad", "typing.final"),
        *("typing.no_type_check", "typing.overload", "typing.runtime_checkable"),
    }
)
"""Decorators that change the definition and nothing else."""

_OF_A_PROPERTY = ("deleter", "getter", "setter")

_BASES = ("builtins", "numpy", "torch", "torchrec", "__main__")
"""Where classes come from, besides Python's own, that do nothing when another class is derived from them."""

_ACTS = "?"
"""The meaning of a class of the script's own that runs code of its own where it is derived from, or subscripted."""

_RUN_BY_ENUM = frozenset(
    {
        *("__eq__", "__getattr__", "__hash__", "__init__", "__init_subclass__", "__new__", "__set_name__"),
        *("_generate_next_value_", "_missing_"),
    }
)
"""What an enumeration may define that runs while its members, or those of a class derived from it, are made."""

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
    names: dict[str, str] = {}
    for at, statement in enumerate(body):
        if not _only_defines(statement, names) and not _only_records(statement, names):
            if not _may_run_before(statement, names):
                sets = next((other for other in body[at:] if changes_settings(other, names)), None)
                early = body[at : body.index(sets)] if sets is not None else body[at:]
                return Prefix(
                    tuple(run), _modules(body[at:]), statement.lineno, _modules(early), sets.lineno if sets else 0
                )
            if not _sets_a_rank_s(statement):
                run.append(statement)
        names.update(_meanings(statement, names))
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


def _meanings(statement: ast.AST, names: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The names that a statement binds, each with the absolute name of what it means; empty where that isn't known."""
    if isinstance(statement, ast.Import):
        for alias in statement.names:
            yield (alias.asname, alias.name) if alias.asname else (alias.name.partition(".")[0],) * 2
    elif isinstance(statement, ast.ImportFrom):
        for alias in statement.names:
            yield alias.asname or alias.name, "" if statement.level else f"{statement.module}.{alias.name}"
    elif isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
        yield statement.name, ""
    elif isinstance(statement, ast.ClassDef):
        acts = _defined(statement) & {"__init_subclass__", "__class_getitem__"}
        home = "enum" if _is_enum(statement, names) else "__main__"
        yield statement.name, _ACTS if acts else f"{home}.{statement.name}"
    elif isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Name | ast.Attribute):
        for target in statement.targets:
            yield from ((name, _meaning(statement.value, names)) for name, _ in _meanings(target, names))
    elif isinstance(statement, ast.Name):
        if isinstance(statement.ctx, ast.Store):
            yield statement.id, ""
    else:
        for child in ast.iter_child_nodes(statement):
            yield from _meanings(child, names)


def _defined(kind: ast.ClassDef) -> set[str]:
    """The names that the body of a class defines."""
    return {getattr(inner, "name", "") for inner in kind.body} | {
        name for inner in kind.body for name, _ in _meanings(inner, {})
    }


def _is_enum(kind: ast.ClassDef, names: Mapping[str, str]) -> bool:
    return any(_meaning(base, names).startswith("enum.") for base in kind.bases)


def _meaning(value: ast.expr, names: Mapping[str, str]) -> str:
    """The absolute name of what an expression like `a.b` stands for, empty where that isn't known."""
    if isinstance(value, ast.Name):
        # Any other name may be of a module of which all was imported.
        return names.get(value.id, f"builtins.{value.id}" if hasattr(builtins, value.id) else "")
    if isinstance(value, ast.Attribute) and (place := _meaning(value.value, names)):
        return f"{place}.{value.attr}"
    return ""


def _only_defines(statement: ast.stmt, names: Mapping[str, str]) -> bool:
    """Whether it can be walked past: no module that is imported after it could tell, as far as its text says.

    A decorator, a default value, a base or the body of a class may do anything, so these are only what makes values.
    `names` has what names mean in the script.
    """
    if isinstance(statement, ast.If):
        return ast.unparse(statement.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING") and not statement.orelse
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
        arguments = statement.args
        each = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg)
        values = [*arguments.defaults, *arguments.kw_defaults]
        if names.get("annotations") != "__future__.annotations":
            values += [statement.returns, *(one.annotation for one in each if one is not None)]
        return _plain_decorators(statement.decorator_list, names) and all(_plain(value, names) for value in values)
    if isinstance(statement, ast.ClassDef):
        return (
            _plain_decorators(statement.decorator_list, names)
            and all(_plain_base(base, names) for base in statement.bases)
            and all(
                _meaning(word.value, names) == "abc.ABCMeta" if word.arg == "metaclass" else _plain(word, names)
                for word in statement.keywords
            )
            and all(_only_defines(inner, names) or _only_names(inner, names) for inner in statement.body)
            and not any(_brings_code(inner, names) for inner in statement.body)
            and not (_is_enum(statement, names) and _makes_members_itself(statement, names))
        )
    return isinstance(statement, ast.Pass) or (
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    )


def _brings_code(inner: ast.stmt, names: Mapping[str, str]) -> bool:
    """Whether a class gets an attribute from elsewhere, whose `__set_name__` would run as the class is made."""
    value = inner.value if isinstance(inner, ast.Assign | ast.AnnAssign) else None
    if not isinstance(value, ast.Name | ast.Attribute | ast.Subscript | ast.IfExp | ast.BoolOp):
        return False
    places = {names.get(node.id, "builtins") for node in ast.walk(value) if isinstance(node, ast.Name)}
    return any(place and not _from_plain(place) for place in places)


def _makes_members_itself(kind: ast.ClassDef, names: Mapping[str, str]) -> bool:
    """Whether an enumeration runs code of the script's own, or of a class of its own, while its members are made."""
    mixed = any(_meaning(base, names).startswith("__main__.") for base in kind.bases)
    return mixed or bool(_defined(kind) & _RUN_BY_ENUM)


def _from_plain(place: str) -> bool:
    root = place.partition(".")[0]
    return root in _BASES or root in sys.stdlib_module_names


def _plain_decorators(decorators: Sequence[ast.expr], names: Mapping[str, str]) -> bool:
    for decorator in decorators:
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        meaning = _meaning(called, names).replace("typing_extensions.", "typing.")
        if meaning not in _DECORATORS and not _of_a_property(called, names):
            return False
        if isinstance(decorator, ast.Call) and not all(
            _plain(one, names) for one in (*decorator.args, *decorator.keywords)
        ):
            return False
    return True


def _of_a_property(decorator: ast.expr, names: Mapping[str, str]) -> bool:
    """Whether it is that of a property of the class: a name that the script does not have."""
    return (
        isinstance(decorator, ast.Attribute)
        and decorator.attr in _OF_A_PROPERTY
        and isinstance(decorator.value, ast.Name)
        and decorator.value.id not in names
    )


def _plain_base(base: ast.expr, names: Mapping[str, str]) -> bool:
    place = _meaning(base.value if isinstance(base, ast.Subscript) else base, names)
    return _from_plain(place) and _plain(base, names)


def _only_names(statement: ast.stmt, names: Mapping[str, str]) -> bool:
    """Whether it gives values to names and does nothing else."""
    if not isinstance(statement, ast.Assign | ast.AnnAssign):
        return False
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    annotation = statement.annotation if isinstance(statement, ast.AnnAssign) else None
    return (
        all(isinstance(target, ast.Name) for target in targets)
        and _plain(statement.value, names)
        and _plain(annotation, names)
    )


def _only_records(statement: ast.stmt, names: Mapping[str, str]) -> bool:
    """Whether it is `initopt.record_imports()`, which each rank calls for its own imports."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    return (
        isinstance(call, ast.Call)
        and _meaning(call.func, names) == "initopt.record_imports"
        and not call.args + call.keywords
    )


def _sets_a_rank_s(statement: ast.stmt) -> bool:
    """Whether it sets what torchrun sets for a rank: it is left to the ranks, which have that already."""
    name: ast.expr | None = None
    if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Subscript):
        name = statement.targets[0].slice
    elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call) and statement.value.args:
        name = statement.value.args[0]
    return isinstance(name, ast.Constant) and _ONLY_A_RANK_S.fullmatch(str(name.value)) is not None


def changes_settings(statement: ast.stmt, names: Mapping[str, str]) -> bool:
    """Whether it changes, as far as its text says, a setting that imports may depend on."""
    if _only_defines(statement, names):
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


def _may_run_before(statement: ast.stmt, names: Mapping[str, str]) -> bool:
    """Whether it may run before the script does, and once more with it."""
    if isinstance(statement, ast.Import | ast.ImportFrom) or _only_names(statement, names):
        return True
    if isinstance(statement, ast.Try):
        # In a rank the imports come out as they did, and then what they changed is there at once: see `settings.py`.
        blocks = (*statement.body, *statement.orelse, *statement.finalbody)
        handled = [inner for handler in statement.handlers for inner in handler.body]
        return all(
            _only_defines(inner, names) or (_may_run_before(inner, names) and not changes_settings(inner, names))
            for inner in blocks
        ) and all(_only_defines(inner, names) or _may_run_before(inner, names) for inner in handled)
    return _sets(statement, names)


def _sets(statement: ast.stmt, names: Mapping[str, str]) -> bool:
    """Whether it only changes a setting that imports may depend on, to a plain value."""
    if isinstance(statement, ast.Assign):
        return all(
            isinstance(target, ast.Name)
            or (
                isinstance(target, ast.Subscript)
                and ast.unparse(target.value) == "os.environ"
                and _plain(target.slice, names)
            )
            for target in statement.targets
        ) and _plain(statement.value, names)
    call = statement.value if isinstance(statement, ast.Expr) else None
    return (
        isinstance(call, ast.Call)
        and ast.unparse(call.func) in _QUIET_CALLS
        and all(_plain(one, names) for one in (*call.args, *call.keywords))
    )


def _plain(value: ast.AST | None, names: Mapping[str, str]) -> bool:
    """Whether evaluating it makes a value and does nothing else, as far as its text says."""
    if value is None:
        return True
    if isinstance(value, ast.Lambda):
        return all(_plain(default, names) for default in (*value.args.defaults, *value.args.kw_defaults))
    if isinstance(value, ast.Call):
        meaning = _meaning(value.func, names)
        # Something of the script's own may have such a name, too.
        own = meaning.startswith(("__main__.", _ACTS)) or (isinstance(value.func, ast.Name) and not meaning)
        called = (ast.unparse(value.func).rpartition(".")[2] in _PLAIN_CALLS and not own) or meaning in _VALUES
    else:
        acts = isinstance(value, ast.Subscript) and _meaning(value.value, names).startswith(_ACTS)
        called = isinstance(value, _PLAIN) and not acts
    return called and all(_plain(child, names) for child in ast.iter_child_nodes(value))
