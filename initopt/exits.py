"""Whether a SystemExit has ended the program, and with which exit code: the interpreter tells nobody.

It lets go of the exception before it calls exit handlers. So the exception is given something that dies with it: if no
Python code runs at that moment, nobody has caught it. Of one that was raised unseen (`raise SystemExit`, outside of a
step) only the line is known where the program's first frame was left.
"""

from __future__ import annotations

import opcode
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

from initopt.own_lines import Line

_NAME = "_initopt_fate"


@dataclass(slots=True)
class Exit:
    """A SystemExit: the exit code that it means, its words, and when it was raised (`time.perf_counter`).

    It was raised in `lines`, the outermost first, while the program's first frame was in line `through`. `after` is
    what was being handled then, and `kept` says that a step has this or that as its error.
    """

    code: int
    words: str
    at: float
    lines: tuple[Line, ...] = ()
    through: Line | None = None
    after: str = ""
    kept: bool = False


class Exits:
    """Follows the exits of this process's main thread."""

    def __init__(self) -> None:
        self.ended: Exit | None = None
        """The one that has ended the program, unless that is `finished`."""
        self.finished = self.raised_again = False
        """Whether the program's first frame is known to have come to its end; and to have raised what it had caught."""
        self._outermost: FrameType | None = None
        self.handed_on: Exit | None = None
        """The one that `multiprocessing` has caught, whose code the process will end with."""

    def follow(self, raised: SystemExit, at: float) -> Exit | None:
        """Learn what becomes of this exception; the same `Exit` each time. None on other threads, which it ends.

        A process that `multiprocessing` has spawned exits a second time with the code of the first.
        """
        if threading.current_thread() is not threading.main_thread():
            return None
        known = vars(raised).get(_NAME)
        if not isinstance(known, _Fate):
            code, words = _code(raised.code)
            last = self.handed_on
            again = last is not None and last.code == code and _ends_spawned_process()
            mine = last if last is not None and again else Exit(code, words, at)
            known = vars(raised)[_NAME] = _Fate(self, mine)
        return known.exit

    def begins(self, frame: FrameType | None) -> None:
        """The program is running, `frame` is the first that is its own. It is kept if it is a script's.

        That of a function, as in a process that was spawned, would keep its variables.
        """
        if self._outermost is None and frame is not None and frame.f_code.co_name == "<module>":
            self._outermost = frame

    def left_at(self) -> FrameType | None:
        """The program's first frame, if it was left by an exception. It is looked at once."""
        outermost, self._outermost = self._outermost, None
        here: FrameType | None = sys._getframe()
        while here is not None and outermost is not None:
            outermost = None if here is outermost else outermost
            here = here.f_back
        if outermost is None or outermost.f_lasti < 0:
            return None
        code = outermost.f_code.co_code
        last, argument = opcode.opname[code[outermost.f_lasti]], code[outermost.f_lasti + 1]
        self.finished = last.startswith("RETURN_")
        self.raised_again = last == "RERAISE" or (last == "RAISE_VARARGS" and not argument)
        return None if self.finished else outermost


class _Fate:
    """Lies in an exception's dictionary, and dies with it."""

    __slots__ = ("exit", "exits")

    def __init__(self, exits: Exits, exit: Exit) -> None:
        self.exits, self.exit = exits, exit

    def __del__(self, caller: Callable[[int], FrameType] = sys._getframe) -> None:
        try:
            caught_by = caller(1).f_globals.get("__name__")
        except ValueError:  # nobody calls
            self.exits.ended = self.exit
        else:
            if caught_by == "multiprocessing.process":
                self.exits.handed_on = self.exit

    def __reduce__(self) -> tuple[type, tuple[()]]:
        # A copy, or what another process gets, tells nobody.
        return object, ()


def _ends_spawned_process() -> bool:
    """Whether the function that runs such a process is exiting."""
    here: FrameType | None = sys._getframe(1)
    while here is not None and here.f_globals.get("__name__", "").partition(".")[0] == "initopt":
        here = here.f_back
    return here is not None and here.f_globals.get("__name__") == "multiprocessing.spawn"


def _code(status: object) -> tuple[int, str]:
    """The exit code that the interpreter makes of what `sys.exit` was given, and the words that it prints."""
    if status is None:
        return 0, ""
    if isinstance(status, int):
        # What is no C long counts as -1.
        return (status if -(1 << 63) <= status < 1 << 63 else -1) & 0xFF, ""
    try:
        return 1, str(status)
    except Exception:
        # Theirs, asked for its text. The interpreter would print nothing.
        return 1, ""
