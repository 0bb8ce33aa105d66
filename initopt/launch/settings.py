"""What modules change of the process while they are imported: taken back in a rank, and changed again as it imports.

The statements between a script's imports read and change the same: the environment, paths, the folder, arguments and
filters of warnings. A rank runs them a second time, and must find each as the first time.
"""

from __future__ import annotations

import builtins
import os
import sys
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Settings:
    """What they are at one moment; the folder is empty where it is gone."""

    environment: Mapping[str, str]
    folder: str
    path: list[str]
    arguments: list[str]
    filters: list[Any]

    @classmethod
    def now(cls) -> Settings:
        """As they are at this moment."""
        folder = ""
        with suppress(FileNotFoundError):
            folder = os.getcwd()
        return cls(dict(os.environ), folder, list(sys.path), list(sys.argv), list(warnings.filters))

    def restore(self) -> None:
        """Make them so again."""
        now = Settings.now()
        for name in changed_variables(now.environment, self.environment):
            if name in self.environment:
                os.environ[name] = self.environment[name]
            else:
                del os.environ[name]
        if self.folder != now.folder and self.folder:
            os.chdir(self.folder)
        sys.path[:], sys.argv[:] = self.path, self.arguments
        if self.filters != now.filters:
            warnings.filters[:] = self.filters  # type: ignore[index]
            # Tells all modules that what they have shown or not is no longer to go by.
            with warnings.catch_warnings():
                pass


@dataclass(frozen=True, slots=True)
class Change:
    """What the statement of the script in `line` changed by what it imported; 0 for imports that none made."""

    line: int
    before: Settings
    after: Settings

    def make(self) -> None:
        """Change it once more, whatever else has changed."""
        now, before, after = Settings.now(), self.before, self.after
        environment = dict(now.environment)
        for name in changed_variables(before.environment, after.environment):
            environment.pop(name, None)
            if name in after.environment:
                environment[name] = after.environment[name]
        Settings(
            environment,
            after.folder if after.folder != before.folder else now.folder,
            _changed(now.path, before.path, after.path),
            _changed(now.arguments, before.arguments, after.arguments),
            _changed(now.filters, before.filters, after.filters),
        ).restore()


def make_at_imports(changes: Sequence[Change]) -> None:
    """Make each change when `__main__` has imported what stands in its line, and those without a line now."""
    real = [change for change in changes if change.before != change.after]
    waiting = deque(sorted(real, key=lambda change: change.line))
    while waiting and not waiting[0].line:
        waiting.popleft().make()
    if not waiting:
        return
    plain = builtins.__import__
    script = vars(sys.modules["__main__"])

    def __import__(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        module = plain(name, globals, locals, fromlist, level)
        if globals is script:
            frame = sys._getframe(1)
            while frame.f_globals is not script and frame.f_back is not None:
                frame = frame.f_back
            while waiting and waiting[0].line <= frame.f_lineno:
                waiting.popleft().make()
        if not waiting and builtins.__import__ is __import__:
            builtins.__import__ = plain
        return module

    builtins.__import__ = __import__


def changed_variables(before: Mapping[str, str], after: Mapping[str, str]) -> set[str]:
    """The variables that differ."""
    return {name for name in (*before, *after) if before.get(name) != after.get(name)}


def _changed(now: list[Any], before: list[Any], after: list[Any]) -> list[Any]:
    """The list `now` with what makes `before` to `after`."""
    if now == before:
        return after
    new = [one for one in after if one not in before]
    first = next((at for at, one in enumerate(after) if one in before), 0)
    front = [one for one in after[:first] if one in new]
    gone = [one for one in before if one not in after]
    return [*front, *(one for one in now if one not in new + gone), *(one for one in new if one not in front)]
