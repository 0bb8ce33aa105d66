"""What is counted as the cost of watching, and what is not."""

from __future__ import annotations

import gc
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from initopt import own_cost
from initopt.own_cost import Spent


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The CPU seconds of every thread: what a collection takes is added by who sees it begin."""
    now = [10.0]
    monkeypatch.setattr(own_cost.time, "thread_time", lambda: now[0])
    return now


def test_what_the_thread_did_counts_and_what_was_collected_does_not(clock: list[float]) -> None:
    before = list(gc.callbacks)

    def takes_long(phase: str, _: dict[str, int]) -> None:
        clock[0] += 100.0 if phase == "stop" else 0.0

    with Spent(entered=9.5) as spent:
        clock[0] += 1.0
        # Before the other sees its end, as the collection itself is.
        gc.callbacks.insert(len(before), takes_long)
        gc.collect()
        gc.callbacks.remove(takes_long)
        clock[0] += 2.0
    assert spent.seconds == 3.5
    assert gc.callbacks == before


def test_the_collection_of_another_thread_is_no_part_of_it(clock: list[float]) -> None:
    with Spent() as spent, ThreadPoolExecutor(1) as pool:
        clock[0] += 1.0
        pool.submit(gc.collect).result()
        clock[0] += 1.0
    assert spent.seconds == 2.0
    assert time.thread_time() == 12.0


def test_a_list_of_callbacks_that_was_emptied_is_no_concern(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc, "callbacks", [])
    with Spent():
        gc.callbacks.clear()
    assert gc.callbacks == []
