"""One rank works for all: ranks as threads, each with a connection of its own to a real store."""

from __future__ import annotations

import datetime
import json
import os
import random
import re
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from initopt import store_connection
from initopt.compile_cache import board, leader
from initopt.compile_cache.board import Board
from initopt.compile_cache.leader import Outcome, one_for_all
from initopt.process_id import this_process
from tests.multirank.forked_store import forked_store

LONG = 30.0
"""Seconds that something is waited for before the test fails."""

Say = Callable[[str], None]


@pytest.fixture(autouse=True)
def _quick_and_nothing_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(board, "POLL", 0.001)
    monkeypatch.setattr(leader, "BEAT", 0.002)
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


@pytest.fixture
def tcp() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


class Rank:
    """One rank: what it did, and the means to hold it up in its work."""

    def __init__(self, pool: ThreadPoolExecutor, store: Any, rank: int, **about: Any) -> None:
        self.rank = rank
        self.works, self.go_on, self.waits = threading.Event(), threading.Event(), threading.Event()
        self.worked, self.used = 0, [""][:0]
        self.outcome: Future[Outcome] = pool.submit(self._run, store, **about)

    def _run(
        self,
        store: Any,
        *,
        topic: str = "t",
        patience: float = LONG,
        held: bool = False,
        fails: BaseException | None = None,
        unusable: bool = False,
        between: Callable[[], None] = lambda: None,
    ) -> Outcome:
        def work(say: Say) -> str:
            self.worked += 1
            say("compiles 'over'")
            self.works.set()
            if held:
                assert self.go_on.wait(LONG)
            if fails is not None:
                raise fails
            return f"made by {self.rank}"

        def use(result: str) -> None:
            if unusable:
                raise ValueError("torn")
            self.used.append(result)

        def both() -> None:
            self.waits.set()
            between()

        return one_for_all(store, rank=self.rank, topic=topic, patience=patience, work=work, use=use, between=both)

    def end(self) -> Outcome:
        return self.outcome.result(LONG)


@pytest.fixture
def start() -> Iterator[Callable[..., Rank]]:
    with ThreadPoolExecutor(64) as pool:
        made: list[Rank] = []

        def start(store: Any, rank: int, **about: Any) -> Rank:
            made.append(Rank(pool, store, rank, **about))
            return made[-1]

        yield start
        for rank in made:
            rank.go_on.set()


def leading(start: Callable[..., Rank], store: Any, rank: int = 0, **about: Any) -> Rank:
    """A rank that leads and is held up in its work."""
    first = start(store, rank, held=True, **about)
    assert first.works.wait(LONG)
    return first


def test_one_works_and_the_others_use_it(store: dist.Store, start: Callable[..., Rank]) -> None:
    first = leading(start, store)
    others = [start(store, rank) for rank in (1, 2)]
    assert all(other.waits.wait(LONG) for other in others)
    first.go_on.set()
    assert first.end() == Outcome("led", 0, first.end().waited, result="made by 0")
    for other in others:
        end = other.end()
        assert end == Outcome("followed", 0, end.waited, result="made by 0")
        assert other.used == ["made by 0"] and not other.worked
    assert start(store, 3).end().role == "followed"


def test_without_others_it_leads_without_a_store() -> None:
    outcome = one_for_all(None, rank=5, topic="t", patience=1.0, work=lambda say: "made", use=pytest.fail)
    assert outcome == Outcome("led", 5, 0.0, result="made")


def test_a_leader_that_fails_is_replaced_once_then_each_is_on_its_own(tcp: Any, start: Callable[..., Rank]) -> None:
    first = leading(start, tcp, fails=ValueError("no compiler"))
    second = start(tcp, 1, held=True, fails=SystemExit(3))
    assert second.waits.wait(LONG)
    first.go_on.set()
    with pytest.raises(ValueError, match="no compiler"):
        first.end()
    assert second.works.wait(LONG)
    third = start(tcp, 2)
    assert third.waits.wait(LONG)
    second.go_on.set()
    with pytest.raises(SystemExit):
        second.end()
    for rank in (third, start(tcp, 3)):
        end = rank.end()
        why = "rank 0 failed (ValueError: no compiler); rank 1 failed (SystemExit: 3)"
        assert end == Outcome("alone", None, end.waited, why, f"made by {rank.rank}")


def test_the_second_leader_is_followed_and_says_why(tcp: Any, start: Callable[..., Rank]) -> None:
    with pytest.raises(ValueError, match="no compiler"):
        start(tcp, 0, fails=ValueError("no compiler")).end()
    why = "rank 0 failed (ValueError: no compiler)"
    second = start(tcp, 1).end()
    assert second == Outcome("led", 1, second.waited, why, "made by 1")
    third = start(tcp, 2).end()
    assert third == Outcome("followed", 1, third.waited, why, "made by 1")


def test_a_late_leader_is_replaced(tcp: Any, start: Callable[..., Rank]) -> None:
    first = leading(start, tcp)
    second = start(tcp, 1, patience=0.05)
    end = second.end()
    assert end == Outcome("led", 1, end.waited, "rank 0 was not done after 0.05 s", "made by 1")
    first.go_on.set()
    assert (first.end().role, first.end().why) == ("led", "rank 1 was done sooner")


def test_a_late_leaders_result_still_counts(tcp: Any, start: Callable[..., Rank]) -> None:
    first = leading(start, tcp)
    second = leading(start, tcp, 1, patience=0.05)
    third = start(tcp, 2)
    assert third.waits.wait(LONG)
    first.go_on.set()
    end = third.end()
    assert end == Outcome("followed", 0, end.waited, result="made by 0")
    second.go_on.set()
    assert second.end().why == "rank 0 was not done after 0.05 s; rank 0 was done sooner"


def test_two_late_leaders_leave_each_on_its_own(tcp: Any, start: Callable[..., Rank]) -> None:
    leading(start, tcp)
    leading(start, tcp, 1, patience=0.05)
    end = start(tcp, 2, patience=0.05).end()
    assert (end.role, end.leader, end.result) == ("alone", None, "made by 2")
    assert end.why == "rank 0 was not done after 0.05 s; rank 1 was not done after 0.05 s"


def test_a_silent_leader_is_replaced(tcp: Any, start: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process is there, or on another host: only its notes are missing."""
    monkeypatch.setattr(leader, "SILENCE", 0.05)
    claim = json.dumps({"rank": 0, "why": "", **this_process(), "host": "another"})
    Board(tcp, "one/t").claim("claim/1", claim)
    end = start(tcp, 1).end()
    assert end == Outcome("led", 1, end.waited, "rank 0 has said nothing for 0.05 s", "made by 1")


def test_a_leader_that_goes_on_speaking_is_not_silent(
    tcp: Any, start: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leader, "SILENCE", 0.5)
    first = leading(start, tcp)
    polls = threading.Semaphore(0)
    second = start(tcp, 1, between=polls.release)
    notes = Board(tcp, "one/t")
    beats = json.loads(notes.read("said/1") or "{}").get("beat", 0)
    # Longer than the silence, by the leader's own beats.
    while json.loads(notes.read("said/1") or "{}").get("beat", 0) < beats + 300:
        assert polls.acquire(timeout=LONG)
    assert not second.worked
    first.go_on.set()
    assert second.end().role == "followed"


def test_a_result_that_can_not_be_used_is_made_here(tcp: Any, start: Callable[..., Rank]) -> None:
    start(tcp, 0).end()
    end = start(tcp, 1, unusable=True).end()
    why = "the result of rank 0 could not be used here (ValueError: torn)"
    assert end == Outcome("alone", None, end.waited, why, "made by 1")
    assert start(tcp, 2).end().role == "followed"


def test_topics_are_apart(tcp: Any, start: Callable[..., Rank]) -> None:
    first, other = leading(start, tcp), leading(start, tcp, 1, topic="u")
    follower = start(tcp, 2, topic="u")
    other.go_on.set()
    assert follower.end().result == "made by 1"
    assert not first.outcome.done()
    first.go_on.set()
    assert first.end().result == "made by 0"


def test_attempts_of_the_job_are_apart(tcp: Any, start: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    assert start(tcp, 0).end().role == "led"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert start(tcp, 1).end().role == "led"


def test_what_between_raises_ends_the_wait(tcp: Any, start: Callable[..., Rank]) -> None:
    first = leading(start, tcp)

    def stop() -> None:
        raise TimeoutError("the step's time is over")

    with pytest.raises(TimeoutError, match="the step's time is over"):
        start(tcp, 1, between=stop).end()
    first.go_on.set()
    assert first.end().role == "led"


def test_a_follower_says_for_whom_it_waits(
    tcp: Any, start: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(board, "LINE", 0.01)
    first = leading(start, tcp)
    said = threading.Event()
    text = ""

    def look() -> None:
        nonlocal text
        text += capsys.readouterr().err
        if "compiles" in text:
            said.set()

    second = start(tcp, 3, patience=300.0, between=look)
    assert said.wait(LONG)
    first.go_on.set()
    second.end()
    assert re.search(r"^initopt: rank 3 waits for rank 0, which compiles 'over' \(\d+ s, until 300 s\)$", text, re.M)


def test_the_store_goes_while_a_rank_waits() -> None:
    with forked_store() as (store, server):
        claim = json.dumps({"rank": 0, "why": "", **this_process()})
        Board(store, "one/t").claim("claim/1", claim)
        outcome = one_for_all(
            store,
            rank=1,
            topic="t",
            patience=LONG,
            work=lambda say: "made alone",
            use=pytest.fail,
            between=lambda: os.kill(server, signal.SIGKILL),
        )
    assert (outcome.role, outcome.leader, outcome.result) == ("alone", None, "made alone")
    assert outcome.why.startswith("the job's store no longer answers (Dist")


def test_the_store_goes_while_a_rank_leads() -> None:
    with forked_store() as (store, server):

        def work(say: Say) -> str:
            os.kill(server, signal.SIGKILL)
            return "made"

        outcome = one_for_all(store, rank=1, topic="t", patience=LONG, work=work, use=pytest.fail)
    assert (outcome.role, outcome.leader, outcome.result) == ("led", 1, "made")
    assert outcome.why.startswith("the others were not told: the job's store no longer answers (Dist")


def test_the_store_is_gone_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_connection, "CONNECT", 0.05)
    with forked_store() as (store, server):
        store.set_timeout(datetime.timedelta(seconds=0.5))
        os.kill(server, signal.SIGKILL)
        os.waitid(os.P_PID, server, os.WEXITED | os.WNOWAIT)
        outcome = one_for_all(store, rank=1, topic="t", patience=LONG, work=lambda say: "made", use=pytest.fail)
        error = "TimeoutError: no connection within 0.05 s: the process that serves the job's store may be gone"
        why = f"the job's store no longer answers ({error})"
        assert outcome == Outcome("alone", None, outcome.waited, why, "made")
        for thread in threading.enumerate():
            if thread.name == "initopt-connects":
                thread.join()


class Connected:
    """A store whose connection of its own is there already: a new one may ask a slow resolver for this host's name."""

    def __init__(self, connection: dist.Store) -> None:
        self._connection = connection

    def clone(self) -> dist.Store:
        return self._connection


@pytest.fixture(scope="module")
def connections() -> list[dist.Store]:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return [server, *(server.clone() for _ in range(7))]


@pytest.mark.parametrize("seed", range(20))
def test_every_rank_comes_to_a_result(seed: int, connections: list[dist.Store], start: Callable[..., Rank]) -> None:
    """Sixty-four at once, with leaders that fail and results that can't be used: at most two lead."""
    chance = random.Random(seed)
    failing = chance.choice([0.0, 0.3, 0.9])
    ranks = []
    for rank in range(64):
        fails = ValueError("no compiler") if chance.random() < failing else None
        ranks.append(
            start(Connected(connections[rank % 8]), rank, topic=f"{seed}", fails=fails, unusable=chance.random() < 0.1)
        )
    ended = [rank.outcome.exception(LONG) or rank.outcome.result() for rank in ranks]
    led = [end for end in ended if isinstance(end, Outcome) and end.role == "led"]
    notes = Board(connections[0], f"one/{seed}")
    assert len(led) <= 1 and not notes.has("claim/3")
    leaders = [json.loads(notes.read(f"claim/{term}") or "null") for term in (1, 2)]
    named = {claim["rank"] for claim in leaders if claim}
    for rank, end in zip(ranks, ended, strict=True):
        assert rank.worked <= 1
        if isinstance(end, ValueError):
            # Its own work failed, as it would have without the others.
            continue
        assert isinstance(end, Outcome)
        assert end.result == f"made by {rank.rank if end.leader is None else end.leader}"
        assert end.leader is None or end.leader in named
        assert (end.role == "alone") == (end.leader is None) and (end.role != "alone" or end.why)
    if not failing:
        assert len(led) == 1 and leaders[1] is None
