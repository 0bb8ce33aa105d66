"""A function replaced for one thread is itself for the others, and afterwards for all."""

from __future__ import annotations

import inspect
import threading
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import pytest

from initopt.replaced import on_this_thread


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
