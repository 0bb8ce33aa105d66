"""What a trainer does between two steps, named by the lines of its own code where one ended and the next began.

Nothing samples or traces the program: only at the ends of steps, and where a module is put into another one, somebody
looks where the program is. So a name is a range of lines, and `model` is the time from the first to the last module.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from traceback import walk_stack, walk_tb
from types import FrameType

from initopt.imports import Places

MODEL = "model"
"""The step that puts modules together."""

_SHORTEST = 0.01
"""Seconds. A shorter time between steps gets no name."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the trainer's own code that is being run; `call` tells calls of one function apart."""

    call: int
    file: str
    number: int


@dataclass(frozen=True, slots=True)
class Moment:
    """When (`time.perf_counter`), with how many CPU seconds of the thread, and in which lines, the outermost first."""

    time: float
    cpu: float
    lines: tuple[Line, ...] = ()


class Own:
    """Finds the lines of the trainer's own code that a thread is in."""

    def __init__(self) -> None:
        self._places = Places()

    def now(self) -> Moment:
        """This moment, on the calling thread."""
        at, cpu = time.perf_counter(), time.thread_time()
        return Moment(at, cpu, self._lines(reversed(list(walk_stack(sys._getframe(1))))))

    def outermost(self) -> FrameType | None:
        """The first frame of the calling thread that runs the trainer's own code."""
        package = self._package()
        return next((f for f, _ in reversed(list(walk_stack(sys._getframe(1)))) if self._is_own(f, package)), None)

    def of_thread(self, ident: int) -> tuple[Line, ...]:
        """The lines that a thread is in at this moment, the outermost first."""
        # Private by its name, and documented.
        frame = sys._current_frames().get(ident)
        return self._lines(reversed(list(walk_stack(frame)))) if frame is not None else ()

    def raised(self, error: BaseException) -> tuple[Line, ...]:
        """The lines in which an exception that has come up to here was raised, the outermost first."""
        return self._lines(walk_tb(error.__traceback__))

    def _lines(self, frames: Iterable[tuple[FrameType, int]]) -> tuple[Line, ...]:
        package = self._package()
        return tuple(
            Line(id(frame), os.path.basename(frame.f_code.co_filename), number)
            for frame, number in frames
            if self._is_own(frame, package)
        )

    def _package(self) -> str:
        """The package of a program that `python -m` runs: it is the trainer's own, although it may be installed."""
        spec = getattr(sys.modules.get("__main__"), "__spec__", None)
        return spec.name.partition(".")[0] if spec is not None else ""

    def _is_own(self, frame: FrameType, package: str) -> bool:
        if self._places.is_own_frame(frame):
            return True
        name = frame.f_globals.get("__name__", "")
        if frame.f_code.co_filename.startswith("<"):
            return False
        return bool(package) and isinstance(name, str) and (name == "__main__" or name.partition(".")[0] == package)


class Between:
    """The time between the steps of the main thread. `add` gets what is found, one piece after the other.

    It gets its name, start, end, and the error in which it ended, mostly none.
    """

    def __init__(self, add: Callable[[str, Moment, Moment, str], None]) -> None:
        self._add = add
        self._since: Moment | None = None
        self._first: Moment | None = None
        self._last: Moment | None = None
        self.model_is_made = False
        """Whether what is put in from here on is no model any more, such as a wrapper, or what a first batch makes."""

    def begins(self, at: Moment) -> None:
        """A step has ended."""
        self._since, self._first, self._last = at, None, None

    def module_put_in(self, at: Moment) -> None:
        """A module was put into another one."""
        if self._since is not None and not self.model_is_made:
            self._first, self._last = self._first or at, at

    def ends(self, at: Moment, error: str = "") -> None:
        """A step begins, or the program has ended with this error."""
        since, self._since = self._since, None
        if since is None:
            return
        if self._first is None or self._last is None or self._last.time - self._first.time < _SHORTEST:
            pieces = [(name(since, at), since, at)]
        else:
            before, after = (name(since, self._first), since, self._first), (name(self._last, at), self._last, at)
            pieces = [before, (MODEL, self._first, self._last), after]
        for called, start, end in pieces:
            why = error if end is at else ""
            if called and (why or end.time - start.time >= _SHORTEST):
                self._add(called, start, end, why)


def name(start: Moment, end: Moment) -> str:
    """The lines between two moments: those of the innermost call that both are in. Empty where none is known."""
    if not end.lines:
        return ""
    both = [pair for pair in zip(start.lines, end.lines, strict=False) if pair[0].call == pair[1].call]
    if not both:
        return f"until {end.lines[0].file}:{end.lines[0].number}"
    one, other = both[-1]
    numbers = sorted({one.number, other.number})
    return f"{other.file}:{'-'.join(map(str, numbers))}"
