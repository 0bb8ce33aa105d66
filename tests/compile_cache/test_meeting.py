"""All ranks have come, or the ones that have not are named."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from initopt.compile_cache import board
from initopt.compile_cache.meeting import all_there
from tests.multirank.forked_store import forked_store

LONG = 30.0
"""Seconds that something is waited for before the test fails."""


@pytest.fixture(autouse=True)
def _quick_and_nothing_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(board, "POLL", 0.001)
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) == before


@pytest.fixture(params=["hash", "file", "tcp"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> dist.Store:
    if request.param == "hash":
        return dist.HashStore()
    if request.param == "file":
        return dist.FileStore(str(tmp_path / "store"), -1)
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def meet(
    store: Any,
    rank: int,
    world_size: int,
    *,
    topic: str = "t",
    patience: float = LONG,
    between: Callable[[], None] = lambda: None,
) -> tuple[int, ...]:
    return all_there(store, rank=rank, world_size=world_size, topic=topic, patience=patience, between=between)


def test_nobody_goes_on_before_all_are_there(store: dist.Store) -> None:
    waits = [threading.Event() for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        early = [pool.submit(meet, store, rank, 4, between=waits[rank].set) for rank in range(3)]
        assert all(event.wait(LONG) for event in waits)
        assert not any(each.done() for each in early)
        assert meet(store, 3, 4) == ()
        assert [each.result(LONG) for each in early] == [()] * 3


def test_who_has_not_come_is_named() -> None:
    store = dist.HashStore()
    there = {0, 61, 62, 63, 124, 1000}
    for rank in sorted(there):
        missing = meet(store, rank, 1024, patience=0.0)
    assert set(missing) == set(range(1024)) - there and list(missing) == sorted(missing)


def test_a_thousand_ranks_that_came_late_have_come() -> None:
    store = dist.HashStore()
    missing = [meet(store, rank, 1024, patience=0.0) for rank in range(1024)]
    assert missing[-2:] == [(1023,), ()] and len(missing[0]) == 1023


def test_a_poll_asks_for_one_key(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0
    answering = board._answering

    def counted() -> Any:
        nonlocal asked
        asked += 1
        return answering()

    polls: list[int] = []

    def between() -> None:
        polls.append(asked)
        if len(polls) == 5:
            raise TimeoutError

    monkeypatch.setattr(board, "_answering", counted)
    with pytest.raises(TimeoutError):
        meet(dist.HashStore(), 0, 1024, between=between)
    assert [later - one for one, later in itertools.pairwise(polls)] == [1, 1, 1, 1]


def test_topics_are_apart() -> None:
    store = dist.HashStore()
    assert meet(store, 0, 2, patience=0.0) == (1,)
    assert meet(store, 1, 2, topic="u", patience=0.0) == (0,)
    assert meet(store, 1, 2) == ()


def test_who_is_missing_is_said_while_waiting(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(board, "LINE", 0.01)
    store, text, said = dist.HashStore(), "", threading.Event()

    def look() -> None:
        nonlocal text
        text += capsys.readouterr().err
        if "waits" in text:
            said.set()

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(meet, store, 2, 8, patience=300.0, between=look)
        assert said.wait(LONG)
        for rank in (0, 1, 3, 4, 5, 6, 7):
            meet(store, rank, 8, patience=0.0)
        assert first.result(LONG) == ()
    assert re.search(r"^initopt: rank 2 waits for ranks 0-1, 3-7 \(\d+ s, until 300 s\)$", text, re.M)


def test_a_store_that_goes_leaves_the_ranks_to_their_collective() -> None:
    with (
        forked_store() as (store, server),
        pytest.warns(UserWarning, match=r"initopt: the ranks did not wait for each other at 't', .*first collective"),
    ):
        assert meet(store, 0, 2, between=lambda: os.kill(server, signal.SIGKILL)) == ()


def test_between_may_end_the_wait() -> None:
    def stop() -> None:
        raise TimeoutError("the step's time is over")

    with pytest.raises(TimeoutError, match="the step's time is over"):
        meet(dist.HashStore(), 0, 2, between=stop)


def test_the_names_are_plain_data() -> None:
    assert json.dumps(meet(dist.HashStore(), 0, 3, patience=0.0)) == "[1, 2]"
