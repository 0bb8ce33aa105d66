"""A function of a module or class, replaced for the calls of one thread while a block runs, and put back.

What stands in its place is in no traceback, and no `stacklevel` counts it: a warning names the line that it would name.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any, TypeVar

from initopt.hooks import HIDDEN, drop_frame

_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass(eq=False)
class _Replacement:
    function: Callable[..., Any]
    when: Callable[[], bool]
    running: bool = False


@dataclass
class _Place:
    """What stands in place of a function as long as some thread has replaced it."""

    original: Callable[..., Any]
    stored: Any
    """Of a class it is not what an access gives, but a classmethod."""
    by_thread: dict[int, list[_Replacement]] = field(default_factory=dict)
    stands: Any = None
    """The function that was put there, which asks this."""

    def replacement(self) -> _Replacement | None:
        """What this thread's call is for; None for the original."""
        for replacement in reversed(self.by_thread.get(threading.get_ident(), [])):
            # One that calls the function gets the one below, and in the end the original.
            if not replacement.running and replacement.when():
                return replacement
        return None


_places: dict[tuple[int, str], _Place] = {}
_changing = threading.Lock()


@contextmanager
def on_this_thread(
    module: ModuleType | type, name: str, function: Callable[..., Any], when: Callable[[], bool] = lambda: True
) -> Iterator[None]:
    """Let `module.name` be `function` in calls of this thread, while `when` says so; others go where they went.

    Where `function` itself calls `module.name` it gets what it replaced. Raises AttributeError if there is no such
    function.
    """
    key, thread, replacement = (id(module), name), threading.get_ident(), _Replacement(function, when)
    with _changing:
        place = _places.get(key)
        if place is None:
            place = _places[key] = _Place(getattr(module, name), vars(module)[name])
            place.stands = _put(module, name, place)
        place.by_thread.setdefault(thread, []).append(replacement)
    try:
        yield
    finally:
        with _changing:
            place.by_thread[thread].remove(replacement)
            if not place.by_thread[thread]:
                del place.by_thread[thread]
            if not place.by_thread:
                del _places[key]
                # Somebody else may have put something in its place meanwhile.
                if vars(module).get(name) is place.stands:
                    setattr(module, name, place.stored)


def passes_on(function: _Function) -> _Function:
    """A replacement that calls what it replaced, and raises nothing itself: its frame is left out as well."""
    assert isinstance(function, FunctionType)
    function.__code__ = function.__code__.replace(co_filename=HIDDEN)
    return function


def _put(module: ModuleType | type, name: str, place: _Place) -> Callable[..., Any]:
    @passes_on
    def call(*args: Any, **kwargs: Any) -> Any:
        replacement = place.replacement()
        if replacement is not None:
            replacement.running = True
        try:
            return (place.original if replacement is None else replacement.function)(*args, **kwargs)
        except BaseException as raised:
            drop_frame(raised)
            # Then that of a replacement that passes on.
            while (trace := raised.__traceback__) and trace.tb_next and trace.tb_frame.f_code.co_filename == HIDDEN:
                drop_frame(raised)
            raise
        finally:
            if replacement is not None:
                replacement.running = False

    # Others may ask for its signature, or for the module that it is of.
    functools.update_wrapper(call, place.original)
    setattr(module, name, call)
    return call
