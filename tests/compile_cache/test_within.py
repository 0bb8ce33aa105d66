"""A call that is waited for only so long."""

from __future__ import annotations

import threading

import pytest

from initopt.compile_cache.within import within


def test_what_it_returns_and_raises() -> None:
    assert within(60, lambda: 3) == 3
    assert within(60, lambda: None) is None
    with pytest.raises(ZeroDivisionError):
        within(60, lambda: 1 // 0)


def test_what_does_not_answer_is_left_alone() -> None:
    over = threading.Event()
    try:
        with pytest.raises(TimeoutError, match=r"no answer within 0.01 s"):
            within(0.01, over.wait)
    finally:
        over.set()
