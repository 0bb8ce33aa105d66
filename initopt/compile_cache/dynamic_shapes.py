"""Which sizes of the inputs of compiled code vary, so that the next start compiles for all of them at once.

torch compiles for the sizes of the first batch, and again when another size comes: a smaller last batch, other numbers
of values in a KeyedJaggedTensor. What varied is read from Dynamo: its frame state (the sizes of each source of a
frame, and which it has marked dynamic) and the reasons of its recompiles. Applied to the next start, the first compile
makes those sizes symbols. It is an opt-in: code for symbolic sizes may add up in another order than code for one size,
so its results may differ from stock's in the last bits.

Not known here: which sizes will come. Sizes 0 and 1 get code of their own from Dynamo, whatever is recorded.
"""

from __future__ import annotations

import importlib.metadata
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    from torch import nn

FORMAT = 1
"""Version of the JSON data. It changes when a key is renamed or changes its meaning."""

_KIND = "dynamic sources"
_MOST = 512
"""Rows that are kept: a whole sharded model had 89."""
_SIZES = 16
"""Sizes that are kept of each."""

_MISMATCH = re.compile(r"tensor '(.+?)' size mismatch at index (\d+)\. expected (\d+), actual (\d+)")
_SMALL = re.compile(r"2 <= (\S+)\.size\(\)\[(\d+)\]")
_LOCAL = re.compile(r"L\[['\"](.+?)['\"]\]")


@dataclass(frozen=True)
class Varying:
    """One size that varied: dimension `dim` of a tensor, or a number (`dim` is None).

    `name` is Dynamo's for it, such as `L['features']._values`, in the function `frame` that starts at `line` of
    `file`. `seen` are sizes it had, ascending, not all of them; `small` says that it was 0 or 1 once.
    """

    name: str
    frame: str
    file: str
    line: int
    dim: int | None
    seen: tuple[int, ...] = ()
    small: bool = False

    @property
    def entry(self) -> str:
        """This size in torch's setting `dynamic_sources`."""
        # The setting is cut at commas and loses its blanks, but an entry may be a regular expression.
        pieces = re.split(r"[,\s]", self.name)
        name = self.name if len(pieces) == 1 else ".".join(map(re.escape, pieces)) + "$"
        return name if self.dim is None else f"{name}:{self.dim}"

    @property
    def argument(self) -> str:
        """The source as the function that was compiled writes it, such as `features._values`."""
        return _LOCAL.sub(r"\1", self.name)


_FIELDS = {one.name for one in fields(Varying)}


@dataclass(frozen=True)
class DynamicSources:
    """What varied, and the versions of the libraries, on which the names depend."""

    varying: tuple[Varying, ...] = ()
    versions: Mapping[str, str] = field(default_factory=lambda: versions())

    @property
    def value(self) -> str:
        """The value of TORCH_COMPILE_DYNAMIC_SOURCES."""
        return ",".join(dict.fromkeys(one.entry for one in self.varying))

    @property
    def remaining(self) -> tuple[Varying, ...]:
        """Those that were seen with size 0 or 1, for each of which torch still compiles anew."""
        return tuple(one for one in self.varying if one.small)

    def named(self, parts: Mapping[str, nn.Module]) -> tuple[str, ...]:
        """Each of them in few words: the part (or function), the argument, the dimension."""
        names = _parts_by_code(parts)
        found = []
        for one in self.varying:
            where = " and ".join(names.get((one.file, one.line), [])) or one.frame
            found.append(f"{where}: {one.argument}" + ("" if one.dim is None else f".size({one.dim})"))
        return tuple(found)

    def advice(self, parts: Mapping[str, nn.Module] | None = None) -> str:
        """The same for a trainer without initopt, as text; `parts` are the compiled modules, to name them."""
        if not self.varying:
            return "no size varied"
        names = _parts_by_code(parts or {})
        lines = [f'TORCH_COMPILE_DYNAMIC_SOURCES="{self.value}"', "or, on the inputs of the first call:"]
        for one in self.varying:
            where = " and ".join(names.get((one.file, one.line), [])) or f"{one.frame} ({one.file}:{one.line})"
            seen = f"  # seen: {', '.join(map(str, one.seen))}" if one.seen else ""
            if one.dim is None:
                lines.append(f"  {where}: {one.argument} is a number, which can't be marked{seen}")
            else:
                lines.append(f"  {where}: torch._dynamo.mark_dynamic({one.argument}, {one.dim}){seen}")
        for one in self.remaining:
            lines.append(
                f"{one.argument} had a size of 0 or 1, which still compiles anew: drop such a batch, or pad it"
            )
        return "\n".join(lines)

    def to_data(self) -> dict[str, Any]:
        """Everything as JSON data."""
        rows = [{**asdict(one), "seen": list(one.seen)} for one in self.varying]
        return {"initopt": _KIND, "format": FORMAT, "versions": dict(self.versions), "varying": rows}

    @classmethod
    def from_data(cls, data: Any) -> DynamicSources:
        """The sources in JSON data. Raises ValueError that says what is wrong with it."""
        if not isinstance(data, Mapping) or data.get("initopt") != _KIND:
            raise ValueError("this is no record of dynamic sources")
        if data.get("format") != FORMAT:
            raise ValueError(
                f"this record of dynamic sources has format {data.get('format')!r}, this initopt reads format {FORMAT}"
            )
        rows, made = data.get("varying"), data.get("versions")
        if not isinstance(rows, list) or len(rows) > _MOST or not _is_versions(made):
            raise ValueError(
                f"a record of dynamic sources has 'versions' and a list 'varying' of at most {_MOST}; this has not"
            )
        return cls(tuple(_row(row) for row in rows), dict(made))


def versions() -> dict[str, str]:
    """The versions, as installed, of the libraries whose code the names of sources come from."""
    found = {}
    for name in ("torch", "torchrec"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = ""
    return found


def found(known: DynamicSources | None = None) -> DynamicSources:
    """What has varied in this process until now, as Dynamo knows it, in addition to what is `known`."""
    return _Observer(known).look()


def watch(tell: Callable[[DynamicSources], object], known: DynamicSources | None = None) -> Callable[[], None]:
    """Look again whenever torch has compiled, and `tell` what has varied when that is more. Returns what ends it.

    A step that compiles nothing costs nothing. `tell` is called in the thread that compiled, with the compiler's lock
    held; if it raises, the watch ends with a warning. It also ends with `torch._dynamo.reset()`.
    """
    from torch._dynamo.callback import callback_handler

    observer = _Observer(known)
    last = observer.look()
    ended = False

    def compiled(_: object) -> None:
        nonlocal last, ended
        if ended:
            return
        try:
            now = observer.look()
            if now != last:
                last = now
                tell(now)
        except Exception as error:
            ended = True
            warnings.warn(
                f"initopt: what varies in the sizes of compiled code is no longer recorded "
                f"({type(error).__name__}: {error}); training goes on as it is",
                stacklevel=2,
            )

    def end() -> None:
        nonlocal ended
        ended = True
        if compiled in callback_handler.end_callbacks:
            callback_handler.remove_end_callback(compiled)

    callback_handler.register_end_callback(compiled)
    return end


@contextmanager
def applied(sources: DynamicSources) -> Iterator[bool]:
    """Let what is compiled inside have symbols for the sizes in `sources`; yields whether it does.

    It holds for this thread, and for those that are started with a copy of its context (a lane of a start-up which
    began inside): every thread that compiles must be inside. A name counts in every frame that has it. Sources of
    other versions are left alone, with a warning.
    """
    settings = _settings(sources)
    if settings is None:
        yield False
        return
    with settings.patch(dynamic_sources=_with(settings, sources)):
        yield bool(sources.varying)


def apply(sources: DynamicSources) -> bool:
    """Let what this thread compiles from now on have symbols for the sizes in `sources`; say whether it will.

    See `applied`.
    """
    settings = _settings(sources)
    if settings is None:
        return False
    settings.dynamic_sources = _with(settings, sources)
    return bool(sources.varying)


def _with(settings: Any, sources: DynamicSources) -> str:
    return ",".join(filter(None, (settings.dynamic_sources, sources.value)))


def _settings(sources: DynamicSources) -> Any:
    """torch's settings that the sources go into, None (after a warning) where they can't."""
    import torch

    here = versions()
    if dict(sources.versions) != here:
        warnings.warn(
            f"initopt: the sizes that vary were recorded with {_text(sources.versions)} and this is {_text(here)}: "
            "they are not used, and are recorded anew",
            stacklevel=4,
        )
        return None
    # A setting of torch.compiler, but without a public way to be set for a while.
    settings = getattr(torch.compiler, "config", None)
    if not hasattr(settings, "dynamic_sources"):
        warnings.warn("initopt: this torch has no setting dynamic_sources: sizes are left to it", stacklevel=4)
        return None
    return settings


class _Observer:
    """Adds up what Dynamo knows at several moments: with `dynamic=False` its frame state has the last sizes only."""

    def __init__(self, known: DynamicSources | None = None) -> None:
        self._sizes: dict[tuple[str, str, str, int], dict[int | None, set[int]]] = {}
        self._marked: set[tuple[tuple[str, str, str, int], int | None]] = set()
        self._small: set[tuple[tuple[str, str, str, int], int | None]] = set()
        self._blind = False
        here = versions()
        for one in known.varying if known is not None and dict(known.versions) == here else ():
            key = (one.name, one.frame, one.file, one.line)
            self._sizes.setdefault(key, {}).setdefault(one.dim, set()).update(one.seen)
            self._marked.add((key, one.dim))
            if one.small:
                self._small.add((key, one.dim))

    def look(self) -> DynamicSources:
        """What has varied until now."""
        try:
            if not self._blind:
                self._add_frame_state()
                self._add_reasons()
        except (ImportError, AttributeError) as error:
            self._blind = True
            warnings.warn(
                f"initopt: this torch does not say which sizes vary ({error}): they are not recorded", stacklevel=4
            )
        rows = []
        for key, sizes in self._sizes.items():
            for dim, seen in sizes.items():
                if len(seen) > 1 or (key, dim) in self._marked:
                    name, frame, file, line = key
                    rows.append(Varying(name, frame, file, line, dim, tuple(sorted(seen)), (key, dim) in self._small))
        # The order in which Dynamo met them differs from start to start.
        rows.sort(key=lambda one: (one.file, one.line, one.frame, one.name, -1 if one.dim is None else one.dim))
        return DynamicSources(tuple(rows[:_MOST]))

    def _add_frame_state(self) -> None:
        # There is no public way to read it; torch's own advice is printed from it.
        from torch._dynamo import pgo

        # Not by get_code_state(), which would read a profile from disk before anything is compiled.
        state = pgo._CODE_STATE
        for code, frame in list(state.items()) if state is not None else ():
            for name, entry in list(frame.automatic_dynamic.items()):
                self._add_entry((name, code.name, code.filename, code.firstlineno), entry, pgo.auto_dynamic)

    def _add_entry(self, key: tuple[str, str, str, int], entry: Any, dynamic: object) -> None:
        if isinstance(entry.size, tuple):
            for sizes in (entry.size, getattr(entry, "excluded_sizes", None) or ()):
                for dim, size in enumerate(sizes):
                    self._add(key, dim, size)
            self._marked.update((key, dim) for dim, size in enumerate(entry.size) if size is dynamic)
        elif any(dim is not None for dim in self._sizes.get(key, ())):
            # Its number of dimensions changed, for which no code is made.
            self._sizes[key] = {}
        else:
            self._add(key, None, entry.scalar)
            self._add(key, None, getattr(entry, "excluded_scalar", None))
            if entry.scalar is dynamic:
                self._sizes.setdefault(key, {}).setdefault(None, set())
                self._marked.add((key, None))

    def _add(self, key: tuple[str, str, str, int], dim: int | None, size: object) -> None:
        # bool is an int, too, and no size.
        seen = self._sizes.setdefault(key, {}).setdefault(dim, set()) if dim is not None or type(size) is int else set()
        if type(size) is int:
            if size < 2 and dim is not None:
                self._small.add((key, dim))
            if len(seen) < _SIZES:
                seen.add(size)

    def _add_reasons(self) -> None:
        from torch._dynamo.utils import get_compilation_metrics

        for compiled in get_compilation_metrics():
            place = (compiled.co_name, compiled.co_filename, compiled.co_firstlineno)
            reason = compiled.recompile_reason or ""
            # The reason has the name without its L[...].
            here = {_LOCAL.sub(r"\1", key[0]): key for key in self._sizes if key[1:] == place}
            for argument, dim, *sizes in _MISMATCH.findall(reason):
                if argument in here and int(dim) in self._sizes[here[argument]]:
                    for size in sizes:
                        self._add(here[argument], int(dim), int(size))
            self._small.update((here[name], int(dim)) for name, dim in _SMALL.findall(reason) if name in here)


def _parts_by_code(parts: Mapping[str, nn.Module]) -> dict[tuple[str, int], list[str]]:
    names: dict[tuple[str, int], list[str]] = {}
    for name, part in parts.items():
        code = type(part).forward.__code__
        names.setdefault((code.co_filename, code.co_firstlineno), []).append(name)
    return names


def _row(row: Any) -> Varying:
    if not isinstance(row, Mapping) or set(row) != _FIELDS:
        raise ValueError(f"a row of 'varying' has {', '.join(sorted(_FIELDS))}; this is {row!r}")
    texts = (row["name"], row["frame"], row["file"])
    numbers = [row["line"], *([] if row["dim"] is None else [row["dim"]])]
    seen = row["seen"]
    named = all(isinstance(text, str) and text for text in texts) and isinstance(row["small"], bool)
    if not named or not _are_sizes(numbers) or not _are_sizes(seen):
        raise ValueError(f"a row of 'varying' has texts and numbers that are not negative; this is {row!r}")
    return Varying(*texts, row["line"], row["dim"], tuple(seen), row["small"])


def _are_sizes(numbers: Any) -> bool:
    many = isinstance(numbers, list) and len(numbers) <= _SIZES
    return many and all(type(number) is int and number >= 0 for number in numbers)


def _is_versions(value: Any) -> TypeGuard[Mapping[str, str]]:
    return isinstance(value, Mapping) and all(isinstance(text, str) for pair in value.items() for text in pair)


def _text(names: Mapping[str, str]) -> str:
    return " and ".join(_pairs(sorted(names.items()))) or "no version"


def _pairs(items: Iterable[tuple[str, str]]) -> list[str]:
    return [f"{name} {version or '(not installed)'}" for name, version in items]
