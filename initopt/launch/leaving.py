"""A module that would end or replace the process while it is imported is heard first: that is for a rank to do."""

from __future__ import annotations

import os
import posix
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_CALLS = ("_exit", "execv", "execve")
"""What all of `os` comes to that leaves without a word. `sys.exit` raises, and what native code does can't be heard."""


@contextmanager
def heard(tell: Callable[[str], None]) -> Iterator[None]:
    """In the block, `tell` what would leave this process, and end it; what it has forked leaves as ever."""
    own, leave = os.getpid(), os._exit
    plain = {name: getattr(os, name) for name in _CALLS}

    def hearing(name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            if os.getpid() != own or not hears:
                return plain[name](*arguments, **named)
            tell(f"calls os.{name}")
            return leave(0)

        return call

    hears = True
    try:
        for name in _CALLS:
            for place in (os, posix):
                setattr(place, name, hearing(name))
        yield
    finally:
        # A module may have kept one of them.
        hears = False
        for name in _CALLS:
            for place in (os, posix):
                setattr(place, name, plain[name])
