"""A function of a module or class, replaced for the calls of one thread while a block runs, and put back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

# Two threads at once could put back each other's replacements. One thread may replace several.
_one_at_a_time = threading.RLock()


@contextmanager
def on_this_thread(
    module: ModuleType | type, name: str, function: Callable[..., Any], when: Callable[[], bool] = lambda: True
) -> Iterator[None]:
    """Let `module.name` be `function` in calls of this thread, while `when` says so; others go where they went.

    While the block runs other threads that want to replace something wait. Raises AttributeError if there is no such
    function.
    """
    thread = threading.get_ident()
    with _one_at_a_time:
        original = getattr(module, name)
        # Of a class it is not what an access gives, but a classmethod.
        stored = vars(module)[name]

        def call(*args: Any, **kwargs: Any) -> Any:
            chosen = function if threading.get_ident() == thread and when() else original
            return chosen(*args, **kwargs)

        setattr(module, name, call)
        try:
            yield
        finally:
            setattr(module, name, stored)
