"""Where libraries are entered: the table of functions that mean a step of start-up, and how they are hooked and freed.

A row is put in right after its module was imported, if the library's version is one that it knows, and taken out with
all others. What is hooked calls on: the same arguments, the same result, the same exception with the same traceback.
This file does not know what a call means for a record (see `watched_run`).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any, Literal, NoReturn, Protocol

from initopt.hooks import HIDDEN, drop_frame, namespaces

Event = Literal[
    "backward",
    "batch",
    "checkpoint",
    "derived",
    "dmp",
    "group",
    "loader",
    "loader_made",
    "named",
    "new_group",
    "plan",
    "progress",
    "rendezvous",
]

NAMED_CALLS = "initopt.calls"
"""The group of (packaging's) entry points under which plugins name the calls of libraries: see `plugins.NamedCall`."""


@dataclass(frozen=True, slots=True)
class EntryPoint:
    """A function of the module `module`: `name` is its own, or its class's with a dot; `*` stands for every class.

    `version_of` is the module that has the library's version, where that is not the one of `_VERSION_OF`. A `step` is
    what a plugin calls it, of the stage `stage`; its event is `named`.
    """

    module: str
    name: str
    event: Event
    versions: tuple[str, ...]
    version_of: str = ""
    step: str = ""
    stage: str = ""


_TORCH = ("2.13.",)
_TORCHREC = ("1.8.", "1.9.")
_C10D = "torch.distributed.distributed_c10d"
_PIPELINES = "torchrec.distributed.train_pipeline"

ENTRY_POINTS = (
    EntryPoint(_C10D, "init_process_group", "group", _TORCH),
    EntryPoint(_C10D, "rendezvous", "rendezvous", _TORCH),
    EntryPoint(_C10D, "new_group", "new_group", _TORCH),
    EntryPoint("torch.utils.data.dataloader", "DataLoader.__init__", "loader_made", _TORCH),
    EntryPoint("torch.utils.data.dataloader", "DataLoader.__iter__", "loader", _TORCH),
    # Private, as is all that a loader's iterator is.
    EntryPoint("torch.utils.data.dataloader", "_BaseDataLoaderIter.__next__", "batch", _TORCH),
    # Private: the compiler knows the public ways to a backward pass by what they are, and all of them lead here.
    EntryPoint("torch.autograd", "_engine_run_backward", "backward", _TORCH),
    EntryPoint("torch.nn.modules.module", "Module.load_state_dict", "checkpoint", _TORCH),
    EntryPoint("torch.optim.optimizer", "Optimizer.load_state_dict", "checkpoint", _TORCH),
    EntryPoint("torch.distributed.checkpoint.state_dict_loader", "load", "checkpoint", _TORCH),
    EntryPoint("torchrec.optim.keyed", "KeyedOptimizer.load_state_dict", "checkpoint", _TORCHREC),
    EntryPoint(
        "torchrec.distributed.model_parallel", "DistributedModelParallel.load_state_dict", "checkpoint", _TORCHREC
    ),
    EntryPoint("torchrec.distributed.model_parallel", "DistributedModelParallel.__init__", "dmp", _TORCHREC),
    # A class of the script's own may fail before it comes to that.
    EntryPoint(
        "torchrec.distributed.model_parallel", "DistributedModelParallel.__init_subclass__", "derived", _TORCHREC
    ),
    # Of a collection, which is one that is divided in two dimensions, first its own and then that of the other.
    EntryPoint("torchrec.distributed.model_parallel", "DMPCollection.__init__", "dmp", _TORCHREC),
    EntryPoint("torchrec.distributed.planner.planners", "EmbeddingPlannerBase.collective_plan", "plan", _TORCHREC),
    EntryPoint("torchrec.distributed.planner.planners", "EmbeddingShardingPlanner.collective_plan", "plan", _TORCHREC),
    EntryPoint("torchrec.distributed.planner.planners", "EmbeddingShardingPlanner.plan", "plan", _TORCHREC),
    EntryPoint(f"{_PIPELINES}.train_pipelines", "*.progress", "progress", _TORCHREC),
    EntryPoint(f"{_PIPELINES}.experimental_pipelines", "*.progress", "progress", _TORCHREC),
)
"""The whole table. A class that has replaced a method by its own is not hooked, unless that calls this one."""

_VERSION_OF = {"torch": "torch", "torchrec": "torchrec.version"}


class Watcher(Protocol):
    """Who wants to know."""

    def here(self) -> bool:
        """Whether this process is watched: one that was forked from it has its hooks, too."""

    def around(self, event: Event, arguments: tuple[Any, ...]) -> AbstractContextManager[None]:
        """What is entered before the call and left after it. May only raise what the call raises."""

    def named(self, step: str, stage: str) -> AbstractContextManager[None]:
        """The same for a call that a plugin has named."""

    def instead(self, event: Event, function: Callable[..., Any]) -> Callable[..., Any]:
        """What is called in place of `function`, mostly itself."""

    def becomes_rank(self) -> bool:
        """The default group is about to be made. Whether its function is to be looked up anew."""

    def optimizer_stepped(self, optimizer: Any) -> None:
        """An optimizer has stepped."""

    def module_put_in(self) -> None:
        """A module was put into another one."""

    def exits(self, raised: SystemExit) -> None:
        """`sys.exit` was called, and is about to raise this."""


class Hooks:
    """The entry points of the libraries that this process has imported, as long as they are hooked."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self._rows: dict[str, list[EntryPoint]] = {}
        for row in ENTRY_POINTS:
            self._rows.setdefault(row.module, []).append(row)
        self._replaced: list[tuple[Any, str, Any, Any]] = []
        self._handles: list[Any] = []
        self._calls: dict[str, Any] = {}
        self.on = True
        self.unknown: dict[str, str] = {}
        """The libraries whose version no row knows, each with that version."""
        self._known: dict[str, tuple[str, ...]] = {}
        ours = self._exit(sys.exit)
        self._replaced.append((sys, "exit", sys.exit, ours))
        sys.exit = ours

    def wants(self, name: str) -> bool:
        """Whether there is something to do when this module was imported."""
        return name in self._rows or name == "torch" or name.partition(".")[0] in self._calls

    def imported(self, name: str) -> None:
        """Hook what belongs to this module, which was just imported."""
        library = name.partition(".")[0]
        if library in self._calls:
            self._take_calls(self._calls.pop(library).load())
        rows = self._rows.pop(name, ())
        module = sys.modules.get(name)
        if not self.on or module is None:
            return
        for row in rows:
            if self._knows(row.module, row.versions, row.version_of):
                self._put(module, row)
        # torch has its own hooks for these. Nothing of it may be imported before it is there as a whole.
        if name == "torch" and self._knows(name, _TORCH):
            self._handles += [
                module.nn.modules.module.register_module_module_registration_hook(self._module_put_in),
                # torch.optim takes the name of this module away.
                sys.modules["torch.optim.optimizer"].register_optimizer_step_post_hook(self._stepped(module)),
            ]
        if name == "torch":
            # It has imported this, and just looked through all packages for entry points of its own.
            from importlib.metadata import entry_points

            self._calls = {point.name: point for point in entry_points(group=NAMED_CALLS)}

    def imported_before(self) -> None:
        """What was imported before its functions were hooked, as before a fork, calls the hooked ones, too."""
        functions = [one for one in self._replaced if isinstance(one[0], ModuleType)]
        _bind({(name, id(original)): ours for _, name, original, ours in functions})

    def _take_calls(self, calls: Iterable[Any]) -> None:
        for call in calls:
            row = EntryPoint(call.module, call.function, "named", call.versions, call.version_of, call.step, call.stage)
            self._rows.setdefault(row.module, []).append(row)

    def take_out(self) -> None:
        """Leave every module and class as it was. Who has replaced a function of ours since keeps his."""
        self.on = False
        for handle in self._handles:
            handle.remove()
        functions = [one for one in self._replaced if isinstance(one[0], ModuleType)]
        for owner, name, original, ours in reversed(self._replaced):
            if vars(owner).get(name) is ours:
                setattr(owner, name, original)
        self._replaced, self._handles, self._rows = [], [], {}
        _bind({(name, id(ours)): original for _, name, original, ours in functions})

    def _knows(self, module: str, versions: tuple[str, ...], version_of: str = "") -> bool:
        library = module.partition(".")[0]
        version_of = version_of or _VERSION_OF[library]
        if library != "torch":
            with suppress(ImportError):
                __import__(version_of)
        version = str(getattr(sys.modules.get(version_of), "__version__", "?"))
        if version.startswith(versions):
            return True
        self.unknown[library] = version
        self._known[library] = versions
        return False

    def unknown_versions(self) -> str:
        """What is said of `unknown`, a part of a sentence; empty where there are none."""
        return "; ".join(
            f"{library} {version} is not a known version ({', '.join(one.rstrip('.') for one in self._known[library])})"
            for library, version in self.unknown.items()
        )

    def _put(self, module: ModuleType, row: EntryPoint) -> None:
        owner, _, name = row.name.rpartition(".")
        if owner == "*":
            own = [kind for kind in vars(module).values() if isinstance(kind, type) and kind.__module__ == row.module]
            owners: list[Any] = [kind for kind in own if "Eval" not in kind.__name__]
        else:
            owners = [getattr(module, owner, None) if owner else module]
        if row.event == "derived":
            self._watch_derived(owners[0], row, module)
            return
        for one in owners:
            original = vars(one).get(name) if one is not None else None
            # An attribute that is missing, or is no plain function any more, is left alone.
            if callable(original):
                ours = self._hooked(original, row, module)
                setattr(one, name, ours)
                self._replaced.append((one, name, original, ours))

    def _watch_derived(self, owner: Any, row: EntryPoint, module: ModuleType) -> None:
        """Hook the `__init__` of each class that is derived from this one from now on, if it has its own."""
        if not isinstance(owner, type) or "__init_subclass__" in vars(owner):
            return
        kind: Any = owner

        def derived(one: Any, /, **words: Any) -> None:
            super(kind, one).__init_subclass__(**words)
            original = vars(one).get("__init__")
            if self.on and isinstance(original, FunctionType):
                one.__init__ = ours = self._hooked(original, row, module)
                self._replaced.append((one, "__init__", original, ours))

        kind.__init_subclass__ = classmethod(derived)
        self._handles.append(_Put(kind))

    def _hooked(self, function: Callable[..., Any], row: EntryPoint, module: ModuleType) -> Callable[..., Any]:
        watcher, event = self._watcher, row.event
        if event == "group":
            return _disguised(self._group(function, row.name, module), function)
        if event == "rendezvous":
            return _disguised(self._rendezvous(function), function)

        def call(*args: Any, **kwargs: Any) -> Any:
            if not self.on or not watcher.here():
                return function(*args, **kwargs)
            try:
                named = watcher.named(row.step, row.stage) if row.step else None
                with named or watcher.around(event, (*args, *kwargs.values())):
                    return watcher.instead(event, function)(*args, **kwargs)
            except BaseException as raised:
                drop_frame(raised)
                raise

        return _disguised(call, function)

    def _group(self, function: Callable[..., Any], name: str, module: ModuleType) -> Callable[..., Any]:
        watcher = self._watcher

        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                if self.on and watcher.becomes_rank():
                    with watcher.around("group", args):
                        # Collectives are watched from now on, and this is the first.
                        return vars(module)[name](*args, **kwargs)
                return function(*args, **kwargs)
            except BaseException as raised:
                drop_frame(raised)
                raise

        return call

    def _rendezvous(self, function: Callable[..., Any]) -> Callable[..., Any]:
        watcher = self._watcher

        def timed(found: Any) -> Any:
            try:
                with watcher.around("rendezvous", ()):
                    first = next(found)
            except BaseException as raised:
                drop_frame(raised)
                raise
            yield first
            yield from found

        timed.__code__ = timed.__code__.replace(co_filename=HIDDEN)

        def call(*args: Any, **kwargs: Any) -> Any:
            if not self.on or not watcher.here():
                return function(*args, **kwargs)
            return timed(watcher.instead("rendezvous", function)(*args, **kwargs))

        return call

    def _exit(self, function: Callable[..., NoReturn]) -> Callable[..., NoReturn]:
        watcher = self._watcher

        def call(*args: Any, **kwargs: Any) -> NoReturn:
            try:
                function(*args, **kwargs)
            except BaseException as raised:
                drop_frame(raised)
                if isinstance(raised, SystemExit) and self.on and watcher.here():
                    watcher.exits(raised)
                raise

        return _disguised(call, function)

    def _stepped(self, torch: Any) -> Callable[..., None]:
        compiles = torch.compiler.is_dynamo_compiling

        def stepped(optimizer: Any, *_: Any) -> None:
            # A compiler that traces an optimizer through here leaves the rest out.
            if not compiles() and self.on and self._watcher.here():
                self._watcher.optimizer_stepped(optimizer)

        return stepped

    def _module_put_in(self, *_: Any) -> None:
        if self.on and self._watcher.here():
            self._watcher.module_put_in()


def _bind(functions: Mapping[tuple[str, int], Any]) -> None:
    """Bind each name that is bound to a function, which is given by its `id`, to another one.

    All modules are gone through since `from torch.distributed import new_group` makes a name of its own.
    """
    names = {name for name, _ in functions}
    for space in namespaces() if names else ():
        for name in names & space.keys():
            if (name, id(space[name])) in functions:
                space[name] = functions[name, id(space[name])]


class _Put:
    """An `__init_subclass__` that was put into a class."""

    def __init__(self, kind: Any) -> None:
        self._kind = kind

    def remove(self) -> None:
        """Take it out."""
        del self._kind.__init_subclass__


def _disguised(ours: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """Ours with the name and signature of the function, and without a place that a `stacklevel` could count."""
    ours.__code__ = ours.__code__.replace(co_filename=HIDDEN)
    wrapped: Callable[..., Any] = functools.wraps(function)(ours)
    return wrapped
