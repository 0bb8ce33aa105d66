"""A function replaced for one thread is itself for the others, and afterwards for all."""

from __future__ import annotations

import inspect
import sys
import threading
import traceback
import warnings
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import pytest

from initopt.hooks import HIDDEN
from initopt.replaced import on_this_thread, passes_on

BACK = HIDDEN if sys.version_info < (3, 11) else None
"""Frames of this file are taken out of tracebacks, and the bare `raise` of Python 3.10 brings them back."""


@pytest.fixture
def module() -> ModuleType:
    module: Any = ModuleType("example")
    module.ask = lambda: "original"
    return module


def elsewhere(function: Any) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def test_only_this_thread_gets_it(module: Any) -> None:
    original = module.ask
    with on_this_thread(module, "ask", lambda: "mine"):
        assert module.ask() == "mine"
        assert elsewhere(lambda: module.ask()) == "original"
    assert module.ask is original


def test_two_threads_replace_at_once_and_neither_waits(module: Any) -> None:
    original, both = module.ask, threading.Barrier(2, timeout=30)

    def replace(answer: str) -> str:
        with on_this_thread(module, "ask", lambda: answer):
            both.wait()
            got: str = module.ask()
            both.wait()
        return got

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(replace, ["one", "two"])) == ["one", "two"]
    assert module.ask is original


def test_the_one_inside_gets_the_one_outside_and_that_the_original(module: Any) -> None:
    with on_this_thread(module, "ask", lambda: f"outer of {module.ask()}"):
        with on_this_thread(module, "ask", lambda: f"inner of {module.ask()}"):
            assert module.ask() == "inner of outer of original"
        assert module.ask() == "outer of original"


def test_only_when_it_says_so(module: Any) -> None:
    wanted = [True]
    with on_this_thread(module, "ask", lambda: "mine", when=lambda: wanted[0]):
        assert module.ask() == "mine"
        wanted[0] = False
        assert module.ask() == "original"


def test_a_class_method_stays_one() -> None:
    class Example:
        @classmethod
        def ask(cls) -> str:
            return cls.__name__

    before = vars(Example)["ask"]
    with on_this_thread(Example, "ask", lambda: "mine"):
        assert Example.ask() == "mine"
    assert vars(Example)["ask"] is before
    assert Example.ask() == "Example"


def test_an_error_puts_it_back(module: Any) -> None:
    original = module.ask
    with pytest.raises(KeyError), on_this_thread(module, "ask", lambda: "mine"):
        raise KeyError
    assert module.ask is original


def test_what_is_not_there_can_not_be_replaced(module: Any) -> None:
    with pytest.raises(AttributeError, match="answer"), on_this_thread(module, "answer", lambda: "mine"):
        pass


def test_who_asks_for_its_signature_or_its_home_is_told_the_originals(module: Any) -> None:
    def ask(name: str, *, twice: bool = False) -> str:
        return name

    module.ask, ask.__module__ = ask, "example"
    with on_this_thread(module, "ask", lambda *args, **kwargs: "mine"):
        assert module.ask("x") == "mine"
        assert inspect.signature(module.ask) == inspect.signature(ask) and module.ask.__module__ == "example"


def test_a_warning_names_the_line_and_a_traceback_has_the_frames_that_they_would(module: Any) -> None:
    def ask(fail: bool) -> None:
        warnings.warn("old", FutureWarning, stacklevel=2)
        if fail:
            raise KeyError("x")

    module.ask = ask

    def seen() -> tuple[list[tuple[str, int]], list[str]]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            frames = []
            for fail in (False, True):
                try:
                    module.ask(fail)
                except KeyError as raised:
                    found = traceback.extract_tb(raised.__traceback__)
                    frames = [frame.name for frame in found if frame.filename != BACK]
        return [(one.filename, one.lineno) for one in caught], frames

    stock = seen()
    assert {name for name, _ in stock[0]} == {__file__}
    assert stock[1] == ["seen", "ask"]

    @passes_on
    def instead(*args: Any) -> None:
        module.ask(*args)

    with on_this_thread(module, "ask", instead):
        assert seen() == stock
        assert elsewhere(seen) == stock
    with on_this_thread(module, "ask", lambda fail: 1 / 0), pytest.raises(ZeroDivisionError) as raised:
        module.ask(True)
    # Who raises it himself is seen.
    assert [frame.name for frame in raised.traceback if str(frame.path) != BACK][1:] == ["<lambda>"]
