"""Plugins: the hooks they can implement, and how they are found (entry points of the group `initopt.plugins`).

A plugin is a module or object whose functions are marked with `hookimpl`. It may take fewer arguments than the hook
has. For what a library calls of its user's there is `Phases`, for what a library's program calls itself `NamedCall`.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import warnings
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pluggy

from initopt.record import FIRST_STEP, step

if TYPE_CHECKING:
    from initopt.overlap import Startup
    from initopt.record import Span

GROUP = "initopt.plugins"
PREFIX = "initopt_"

hookspec = pluggy.HookspecMarker("initopt")
hookimpl = pluggy.HookimplMarker("initopt")


class PluginError(ValueError):
    """A plugin that can't be used. The message names the plugin, the hook and what to change."""


class Hooks:
    """The hooks, in the order in which a start-up calls them."""

    @hookspec
    def initopt_declare(self, startup: Startup) -> None:
        """Add, replace or order steps of `startup`, before its graph is built."""

    @hookspec(firstresult=True)
    def initopt_lane_context(self, lane: str) -> AbstractContextManager[object] | None:
        """Return a context manager to run a step of `lane` in, or None if the lane is not this plugin's."""

    @hookspec
    def initopt_step_ended(self, span: Span) -> None:
        """See the span of a step that ended. Called on the step's own thread, so keep it short."""

    @hookspec
    def initopt_run_ended(self, path: Path) -> None:
        """See the folder of a run whose record is closed, on each rank."""


@dataclass(frozen=True, slots=True)
class NamedCall:
    """A function of a library, each call of which is a step in what `initopt.run` records.

    `function` stands in `module`: its own name, or its class's with a dot. `version_of` is the module whose
    `__version__` must begin with one of `versions`, else all calls of the library are left alone.

    An entry point of the group `initopt.calls`, named like the library's package, leads to a tuple of these. It is
    loaded once that package is imported after torch.
    """

    module: str
    function: str
    step: str
    stage: str
    version_of: str
    versions: tuple[str, ...]


class Phases:
    """Steps one after the other, for a library that calls where one ends and the next begins.

    Of `library` the versions that begin with one of `versions` are known. With another `version` no step is named, and
    a warning says so.
    """

    def __init__(self, library: str, version: str, versions: tuple[str, ...]) -> None:
        self.over = not version.startswith(versions)
        """Whether no more steps are named: the start-up has ended."""
        self.name = ""
        """The step that is under way, empty between two."""
        self._block: AbstractContextManager[None] | None = None
        if self.over:
            warnings.warn(
                f"initopt: {library} {version} is not known, so the callback names no steps of its start-up: use "
                f"{' or '.join(known + 'x' if known.endswith('.') else known for known in versions)}, or leave the "
                "callback out",
                stacklevel=3,
            )

    def begin(self, name: str, stage: str) -> None:
        """End the step that is under way, and begin this one."""
        self.end()
        if not self.over:
            self._block, self.name = step(name, stage), name
            self._block.__enter__()

    def end(self, error: BaseException | None = None) -> None:
        """End the step that is under way, with the error that ended it. The step `first_step` ends the start-up."""
        block, self._block = self._block, None
        if block is None:
            return
        self.over, self.name = self.name == FIRST_STEP and error is None, ""
        if error is None:
            block.__exit__(None, None, None)
        else:
            trace = error.__traceback__
            block.__exit__(type(error), error, trace)
            # Python 3.10 leaves the frames of the block in it.
            error.__traceback__ = trace


def register(manager: pluggy.PluginManager, plugin: object, name: str) -> None:
    """Add `plugin` to `manager`. Raises PluginError, in its author's terms, if its hooks don't fit."""
    known = [attribute for attribute in vars(Hooks) if attribute.startswith(PREFIX)]
    for attribute in dir(plugin):
        if not attribute.startswith(PREFIX) or not callable(getattr(plugin, attribute)):
            continue
        function = getattr(plugin, attribute)
        where = _place(function)
        if attribute not in known:
            # Without the prefix, which alone makes all of them alike.
            near = difflib.get_close_matches(attribute[len(PREFIX) :], [each[len(PREFIX) :] for each in known], 1)
            hint = f"did you mean {PREFIX + near[0]!r}?" if near else f"the hooks are {', '.join(known)}"
            raise PluginError(f"{where}: plugin {name!r} implements {attribute!r}, which is not a hook ({hint})")
        if not hasattr(function, "initopt_impl"):
            raise PluginError(
                f"{where}: {attribute!r} of plugin {name!r} is not marked; write @initopt.plugins.hookimpl above it"
            )
        offered = [p for p in inspect.signature(getattr(Hooks, attribute)).parameters if p != "self"]
        for parameter in inspect.signature(function).parameters:
            if parameter not in offered:
                raise PluginError(
                    f"{where}: {attribute!r} of plugin {name!r} takes {parameter!r}, but the hook gives "
                    f"{', '.join(offered)}"
                )
    manager.register(plugin, name)


@functools.cache
def installed() -> pluggy.PluginManager:
    """Return a manager with all installed plugins. They are looked up once per process.

    Raises PluginError if one can't be imported or does not fit.
    """
    from importlib.metadata import entry_points

    manager = pluggy.PluginManager("initopt")
    manager.add_hookspecs(Hooks)
    for point in entry_points(group=GROUP):
        try:
            plugin = point.load()
        except Exception as error:
            package = point.dist.name if point.dist else "an unknown package"
            raise PluginError(
                f"plugin {point.name!r} of {package} can't be loaded from {point.value!r}: "
                f"{type(error).__name__}: {error}. Repair or uninstall that package"
            ) from error
        register(manager, plugin, point.name)
    return manager


def _place(function: Any) -> str:
    try:
        return f"{inspect.getsourcefile(function)}:{inspect.getsourcelines(function)[1]}"
    except (OSError, TypeError):
        return repr(function)
