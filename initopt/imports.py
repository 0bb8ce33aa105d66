"""What it costs to import each package, who asked for it, and whether the first batch needed it.

While it is on, each module that a loader of the standard library executes is timed. The loaders' methods are replaced
on their classes: a module's loader and its spec, and all that is read off them, are as ever. Code that another loader
executes, or that is built in or frozen, counts for the module that imported it, and so does looking for a module.

With `INITOPT_IMPORTS=used` it also notes whose code ran after its import. That slows every call down, so the times of
such a run mean nothing. This file does not write (see `record`).
"""

from __future__ import annotations

import builtins
import functools
import os
import sys
import sysconfig
import threading
import time
import zipimport
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.machinery import ExtensionFileLoader, SourceFileLoader, SourcelessFileLoader
from importlib.util import resolve_name
from types import FrameType, ModuleType
from typing import Any, Literal

Needed = Literal["yes", "no", ""]
"""Whether something of it ran until the first batch was done; "" where that was not watched."""

SWITCH = "INITOPT_IMPORTS"
NOT_TO_BE_USED = "imports watched in use: this run is slower, its times mean nothing"

_SHORT = 0.005
"""Seconds. What takes less is not worth a line of its own."""
_MOST = 200
"""Packages, and lines, that are kept one by one; the others count together."""
_OTHERS = "(others)"

_TIMED = (
    (SourceFileLoader, "exec_module"),
    (SourcelessFileLoader, "exec_module"),
    (zipimport.zipimporter, "exec_module"),
    # An extension in the old style does everything as it is made.
    (ExtensionFileLoader, "create_module"),
    (ExtensionFileLoader, "exec_module"),
)


@dataclass(frozen=True, slots=True)
class Imported:
    """A top-level package as one process imported it. Times are seconds.

    `seconds` and `cpu` (of the thread) are those of its own `modules`, `total` is the wall time with all that they
    imported. `asked` is the `file:line` that imported it first, `importer` the package of that line, empty for the
    trainer's own code; `line` the innermost line of the trainer's own code that led to it, or `asked` where
    none did, as on a library's thread. `slowest` are its modules
    that took longest, each with its own seconds.
    """

    package: str
    modules: int
    seconds: float
    cpu: float
    total: float
    asked: str = ""
    importer: str = ""
    line: str = ""
    needed: Needed = ""
    slowest: tuple[tuple[str, float], ...] = ()
    rank: int = 0


@dataclass(frozen=True, slots=True)
class ImportLine:
    """A line, of the trainer's `own` code where there is one, and what it was the first to import.

    `packages` have the seconds that their modules took. `needed` is "no" where no code of these modules ran, and no
    module whose code ran has imported one of them. `unneeded` are the packages of which that holds, `kept` are the
    others: both are empty where it was not watched. `step` is the step that it happened in.
    """

    line: str
    seconds: float
    packages: tuple[tuple[str, float], ...]
    needed: Needed = ""
    step: str = ""
    own: bool = True
    rank: int = 0
    unneeded: tuple[tuple[str, float], ...] = ()
    kept: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ImportSpan:
    """One package imported by the trainer's own code, without a pause. Seconds of `time.perf_counter`."""

    package: str
    start: float
    end: float
    cpu: float
    lane: str
    step: str
    line: str


@dataclass(frozen=True, slots=True)
class Imports:
    """All that was recorded. `cost` is about what recording took while it was on, in CPU seconds."""

    spans: tuple[ImportSpan, ...]
    packages: tuple[Imported, ...]
    lines: tuple[ImportLine, ...]
    cost: float


def record_imports() -> None:
    """Time every import from here on, until the end of the first training step. A second call does nothing.

    Call it at the top of a script, before its other imports; a `Recorder` made later writes what was found. What was
    imported before is not seen. Raises ValueError where INITOPT_IMPORTS is neither empty nor `used`.
    """
    global _recording
    wanted = os.environ.get(SWITCH, "")
    if wanted not in ("", "used"):
        raise ValueError(
            f"{SWITCH} is {wanted!r}: leave it empty, or set it to used to see what the first batch needed"
        )
    if _recording is None:
        _recording = Recording(used=wanted == "used")
        _recording.begin()


def recording() -> Recording | None:
    """Return what `record_imports` has switched on, None where it is off."""
    return _recording


class _Module:
    """A module that is being executed, or was."""

    __slots__ = (
        "asked",
        "asker",
        "cpu",
        "importer",
        "inner",
        "inner_cpu",
        "lane",
        "line",
        "name",
        "outermost",
        "own",
        "owned",
        "package",
        "start",
        "step",
        "took",
        "took_cpu",
        "writes",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.package = name.partition(".")[0]
        self.inner = self.inner_cpu = 0.0
        self.asked = self.asker = self.importer = self.line = self.lane = self.step = ""
        self.own = self.owned = self.writes = False
        self.start = self.cpu = self.took = self.took_cpu = 0.0
        self.outermost = True


class Recording:
    """The imports of this process while it is on."""

    def __init__(self, *, used: bool) -> None:
        self.step_here: Callable[[], tuple[str, str]] = _before_any_recorder
        """Which step, on which lane, the calling thread is in."""
        self.imported: Callable[[str], None] = _nobody
        """Told the name of each module that was executed, before whoever imports it goes on. Must not raise."""
        self.outermost: Callable[[bool], None] = _nobody
        """Told True when the main thread begins to import what is not the trainer's own, False when that has ended.

        What is imported inside of that is part of it. As above.
        """
        self.last = 0.0, 0.0
        """When the main thread was last done with an import: `time.perf_counter`, and its CPU seconds."""
        self.watched = used and sys.getprofile() is None
        self.before = _imported_packages()
        """The packages that were imported before it was on."""
        self._on = False
        self._pid = os.getpid()
        self._done: list[_Module] = []
        self._thread = threading.local()
        self._replaced: list[tuple[Any, str, Any, Any]] = []
        self._places = Places()
        self._use = _Use(self.module_here, self._places) if self.watched else None

    def begin(self) -> None:
        """Switch it on."""
        self._on = True
        for owner, name in _TIMED:
            method = getattr(owner, name)
            timed = self._timed(method)
            self._replaced.append((owner, name, vars(owner).get(name), timed))
            setattr(owner, name, timed)
        if self._use is not None:
            self._use.begin()

    def end(self) -> Imports:
        """Switch it off, leaving the loaders as they were, and say what was found.

        A forked process has only its own imports.
        """
        global _recording
        self._on = False
        if self._use is not None:
            self._use.end()
        for owner, name, before, timed in self._replaced:
            # Somebody who has replaced it since may call ours: it stays, and does nothing any more.
            if vars(owner).get(name) is timed:
                if before is None:
                    delattr(owner, name)
                else:
                    setattr(owner, name, before)
        if _recording is self:
            _recording = None
        self._begin_anew_when_forked()
        found = sorted(self._done, key=lambda module: module.start)
        needed = self._use.needed() if self._use is not None else None
        packages, lines = _packages(found, needed), _lines(found, needed)
        return Imports(_spans(found), packages, lines, len(found) * self._cost_of_one())

    def _timed(self, method: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def timed(loader: Any, subject: Any) -> Any:
            if not self._on:
                return method(loader, subject)
            module = self._begins(subject)
            try:
                done = method(loader, subject)
                self.imported(module.name)
                return done
            finally:
                self._ends(module)

        # Under the name of the loader's own file the interpreter leaves this frame out, as it does those around it: of
        # the traceback of an import that fails, and of the `stacklevel` of a warning.
        code = getattr(method, "__code__", None)
        file = code.co_filename if code is not None else SourceFileLoader.get_code.__code__.co_filename
        timed.__code__ = timed.__code__.replace(co_filename=file, co_name=method.__name__)
        return functools.wraps(method)(timed)

    def _begins(self, subject: Any) -> _Module:
        # A module, or the spec of one that is yet to be made.
        spec = getattr(subject, "__spec__", None) or subject
        module = _Module(getattr(spec, "name", None) or subject.__name__)
        stack = self._stack()
        outer = stack[-1] if stack else None
        if outer is not None and outer.package == module.package and not outer.own:
            module.line, module.owned, module.outermost = outer.line, outer.owned, False
            module.asker = outer.name
        else:
            self._places.find(module, outer, sys._getframe(2))
            module.own = self._places.is_own(getattr(spec, "origin", None) or "", module.name)
            module.outermost = all(around.package != module.package for around in stack)
        # What the record is written with is no part of what it is about.
        module.writes = module.package == "msgspec" and module.importer == "initopt"
        module.writes |= outer is not None and outer.writes
        if self._use is not None and module.asker:
            self._use.imports(module.asker, module.name)
        if outer is None or outer.own:
            module.step, module.lane = self.step_here()
        else:
            module.step, module.lane = outer.step, outer.lane
        if self._is_outermost(module, stack):
            self.outermost(True)
        stack.append(module)
        module.cpu = time.thread_time()
        module.start = time.perf_counter()
        return module

    def _ends(self, module: _Module) -> None:
        module.took = time.perf_counter() - module.start
        module.took_cpu = time.thread_time() - module.cpu
        stack = self._stack()
        stack.pop()
        if not stack and threading.current_thread() is threading.main_thread():
            self.last = module.start + module.took, module.cpu + module.took_cpu
        if self._is_outermost(module, stack):
            self.outermost(False)
        if stack:
            stack[-1].inner += module.took
            stack[-1].inner_cpu += module.took_cpu
        self._begin_anew_when_forked()
        if not module.writes:
            self._done.append(module)

    def _is_outermost(self, module: _Module, around: list[_Module]) -> bool:
        # Mostly the first of them that is looked at says no.
        begins = not module.own and all(one.own for one in reversed(around))
        return begins and threading.current_thread() is threading.main_thread()

    def _begin_anew_when_forked(self) -> None:
        if os.getpid() != self._pid:
            self._pid = os.getpid()
            self._done = []

    def _stack(self) -> list[_Module]:
        try:
            stack: list[_Module] = self._thread.stack
        except AttributeError:
            stack = self._thread.stack = []
        return stack

    def module_here(self) -> str:
        """The module whose import the calling thread is in, empty outside of one."""
        stack = self._stack()
        return stack[-1].name if stack else ""

    def _cost_of_one(self) -> float:
        """CPU seconds that timing one module takes, measured on nothing."""
        trial, subject = Recording(used=False), ModuleType("initopt")
        trial._on = True
        timed = trial._timed(_nothing)
        # The median: right after a fork, as of a loader's workers, what is written to first is copied.
        tries = []
        for _ in range(11):
            entered = time.thread_time()
            for _ in range(10):
                timed(None, subject)
            tries.append((time.thread_time() - entered) / 10)
        return sorted(tries)[5]


def _nobody(_: object) -> None:
    """Who is told of imports where nobody wants to know."""


def _nothing(loader: Any, subject: Any) -> None:
    """What is executed to see what timing it costs."""


def _imported_packages() -> tuple[str, ...]:
    """The packages that are imported, without those of the interpreter, of its set-up and of initopt."""
    tops = dict.fromkeys(name.partition(".")[0] for name in list(sys.modules))
    known = {*sys.stdlib_module_names, *sys.builtin_module_names, "initopt", "sitecustomize", "usercustomize"}
    # What `.pth` files load begins with an underscore.
    return tuple(name for name in tops if name not in known and not name.startswith("_"))


def _before_any_recorder() -> tuple[str, str]:
    thread = threading.current_thread()
    return "imports", "main" if thread is threading.main_thread() else thread.name


class Places:
    """Tells the trainer's own code from that of others, and finds who asked for an import."""

    def __init__(self) -> None:
        paths = sysconfig.get_paths()
        ours = os.path.dirname(os.path.abspath(__file__))
        folders = {paths["stdlib"], paths["platstdlib"], ours}
        self._others = (*(folder + os.sep for folder in folders), "<")
        try:
            self._here = os.getcwd() + os.sep
        except OSError:  # the working directory was removed
            self._here = ""
        self._cut = (self._here, paths["stdlib"] + os.sep, os.path.dirname(ours) + os.sep)
        self._own: dict[str, bool] = {}

    def is_own(self, path: str, name: str) -> bool:
        """Whether module `name` in this file is the trainer's own: not installed, the standard library's or ours."""
        own = self._own.get(path)
        if own is None:
            own = self._is_elsewhere(path)
            package = name.partition(".")[0]
            if own and package != name:
                # Code that a library has generated may lie anywhere; it goes by the library's name.
                own = self._is_elsewhere(getattr(sys.modules.get(package), "__file__", None) or path)
            self._own[path] = own
        return own

    def _is_elsewhere(self, path: str) -> bool:
        installed = f"{os.sep}site-packages{os.sep}" in path or f"{os.sep}dist-packages{os.sep}" in path
        return path not in ("", "built-in", "frozen") and not installed and not path.startswith(self._others)

    def is_own_frame(self, frame: FrameType) -> bool:
        """Whether this runs the trainer's own code."""
        return self.is_own(frame.f_code.co_filename, str(frame.f_globals.get("__name__", "")))

    def find(self, module: _Module, outer: _Module | None, frame: FrameType | None) -> None:
        """Set who asked for a module: the first line that is not the import system's, and that of own code."""
        while frame is not None and _is_machinery(frame):
            frame = frame.f_back
        if frame is not None:
            module.asked = self._place(frame)
            if not self.is_own_frame(frame):
                module.asker = str(frame.f_globals.get("__name__", ""))
                module.importer = module.asker.partition(".")[0]
        if outer is not None and not outer.own:
            module.line, module.owned = outer.line, outer.owned
            return
        while frame is not None and not self.is_own_frame(frame):
            frame = frame.f_back
        module.owned = frame is not None
        module.line = self._place(frame) if frame is not None else module.asked

    def _place(self, frame: FrameType) -> str:
        path = frame.f_code.co_filename
        _, packages, inside = path.rpartition(f"{os.sep}site-packages{os.sep}")
        folder = next((folder for folder in self._cut if folder and path.startswith(folder)), "")
        return f"{inside if packages else path.removeprefix(folder)}:{frame.f_lineno}"


_HANDS_ON = (__name__, "initopt.launch.settings")
"""Here an import statement is handed on."""


def _is_machinery(frame: FrameType) -> bool:
    name = frame.f_globals.get("__name__", "")
    return name in _HANDS_ON or (isinstance(name, str) and name.partition(".")[0] == "importlib")


class _Use:
    """Notes whose code ran: outside of every import, or during the import of another module."""

    def __init__(self, module_here: Callable[[], str], places: Places) -> None:
        self._module_here = module_here
        self._places = places
        self._on = False
        self._import = builtins.__import__
        self._replacement: Any = None
        # From a module whose code ran, and to what it needs; "" is the trainer itself.
        self._edges: set[tuple[str, str]] = set()

    def begin(self) -> None:
        self._on = True
        # Statements that find their module imported already call nothing else.
        replacement = self._noting(self._import)
        self._replacement = builtins.__import__ = replacement
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    def end(self) -> None:
        self._on = False
        threading.setprofile(None)
        sys.setprofile(None)
        if builtins.__import__ is self._replacement:
            builtins.__import__ = self._import

    def imports(self, importer: str, name: str) -> None:
        """Note an import that no statement need have made."""
        if self._on and importer != "__main__":
            self._edges.add((importer, name))

    def needed(self) -> set[str]:
        """The modules whose code ran outside of imports, and all that those need."""
        import networkx as nx

        graph: nx.DiGraph[str] = nx.DiGraph(self._edges)
        # A part of a package can't be had without the package.
        for name in list(graph):
            parts = name.split(".")
            graph.add_edges_from((name, ".".join(parts[:end])) for end in range(1, len(parts)))
        return set(nx.descendants(graph, "")) if "" in graph else set()

    def _profile(self, frame: FrameType, event: str, argument: object) -> None:
        if not self._on:
            sys.setprofile(None)
            return
        if event == "call":
            name = frame.f_globals.get("__name__")
            here = self._module_here()
            if name != here and isinstance(name, str):
                self._edges.add((here, name))

    def _noting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def __import__(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
            found = original(name, globals, locals, fromlist, level)
            if self._on and globals:
                self._states(globals, name, fromlist or (), level)
            return found

        code = __import__.__code__.replace(co_filename=SourceFileLoader.get_code.__code__.co_filename)
        __import__.__code__ = code
        return __import__

    def _states(self, namespace: Any, name: str, parts: Iterable[str], level: int) -> None:
        # What the trainer's own code imports it may also leave out; what others import comes with them.
        importer = namespace.get("__name__")
        if not isinstance(importer, str) or importer == "__main__":
            return
        if self._places.is_own(namespace.get("__file__") or "", importer):
            return
        if level:
            name = resolve_name("." * level + name, namespace.get("__package__") or importer.rpartition(".")[0])
        self._edges.add((importer, name))
        self._edges |= {(importer, f"{name}.{part}") for part in parts if f"{name}.{part}" in sys.modules}


def _packages(found: Iterable[_Module], needed: set[str] | None) -> tuple[Imported, ...]:
    by_package: defaultdict[str, list[_Module]] = defaultdict(list)
    for module in found:
        by_package[module.package].append(module)
    packages = []
    for package, modules in by_package.items():
        own: defaultdict[str, float] = defaultdict(float)
        for module in modules:
            own[module.name] += module.took - module.inner
        slowest = sorted(own.items(), key=lambda item: -item[1])[:5]
        first = modules[0]
        packages.append(
            Imported(
                package,
                len(own),
                sum(own.values()),
                sum(module.took_cpu - module.inner_cpu for module in modules),
                sum(module.took for module in modules if module.outermost),
                first.asked,
                first.importer,
                first.line,
                _verdict(own, needed),
                tuple(item for item in slowest if item[1] > _SHORT / 5),
            )
        )
    packages.sort(key=lambda one: -one.seconds)
    rest = packages[_MOST:]
    if rest:
        modules_left, seconds, cpu = (sum(getattr(one, name) for one in rest) for name in ("modules", "seconds", "cpu"))
        # What they took with all that they imported can't be added up: some of it is in others.
        packages[_MOST:] = [Imported(_OTHERS, modules_left, seconds, cpu, seconds)]
    return tuple(packages)


def _lines(found: Iterable[_Module], needed: set[str] | None) -> tuple[ImportLine, ...]:
    by_line: defaultdict[tuple[str, str, bool], list[_Module]] = defaultdict(list)
    for module in found:
        by_line[module.line, module.step, module.owned].append(module)
    lines = []
    for (line, step, own), modules in by_line.items():
        packages: defaultdict[str, float] = defaultdict(float)
        for module in modules:
            packages[module.package] += module.took - module.inner
        taken = sorted(packages.items(), key=lambda item: -item[1])
        seconds = sum(packages.values())
        if seconds > _SHORT:
            names = {module.name for module in modules}
            used = {module.package for module in modules if needed is not None and module.name in needed}
            unneeded = tuple(item for item in taken if needed is not None and item[0] not in used)
            kept = tuple(name for name, _ in taken if name in used)
            longest = tuple(item for item in taken[:8] if item[1] > _SHORT / 5)
            verdict = _verdict(names, needed)
            lines.append(ImportLine(line, seconds, longest, verdict, step, own, unneeded=unneeded, kept=kept))
    return tuple(sorted(lines, key=lambda one: -one.seconds)[:_MOST])


def _verdict(modules: Iterable[str], needed: set[str] | None) -> Needed:
    if needed is None:
        return ""
    return "no" if needed.isdisjoint(modules) else "yes"


def _spans(found: Iterable[_Module]) -> tuple[ImportSpan, ...]:
    spans: list[ImportSpan] = []
    last: dict[str, int] = {}
    for module in _entered(found):
        span = ImportSpan(
            module.package,
            module.start,
            module.start + module.took,
            module.took_cpu,
            module.lane,
            module.step,
            module.line,
        )
        at = last.get(span.lane)
        if at is not None:
            before = spans[at]
            alike = (before.package, before.step) == (span.package, span.step)
            if alike and span.start - before.end < _SHORT:
                cpu = before.cpu + span.cpu
                spans[at] = ImportSpan(span.package, before.start, span.end, cpu, span.lane, span.step, before.line)
                continue
        last[span.lane] = len(spans)
        spans.append(span)
    return tuple(span for span in spans if span.end - span.start > _SHORT)


def _entered(found: Iterable[_Module]) -> Iterator[_Module]:
    """The modules through which the trainer's own code came into the code of others, by start."""
    end: dict[str, float] = {}
    for module in found:
        if not module.own and module.start >= end.get(module.lane, 0.0):
            end[module.lane] = module.start + module.took
            yield module


_recording: Recording | None = None
