"""Ranks that tell each other what they do and who failed, here in one process over one store."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from initopt import OrderError, PeerFailed, Run, Startup, StartupFailed, lanes, peers
from initopt.peers import Failure, Peers
from initopt.process_id import born, this_process

LONG = 30.0
"""Seconds that something is waited for before the test fails."""


@pytest.fixture(autouse=True)
def _nothing_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("INITOPT_ROOT", str(tmp_path))
    monkeypatch.setattr(peers, "BEAT", 0.001)
    monkeypatch.setattr(peers, "CAUSE", 0.01)
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) == before


@pytest.fixture(params=["hash", "tcp"])
def store(request: pytest.FixtureRequest) -> dist.Store:
    if request.param == "hash":
        return dist.HashStore()
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


class Rank:
    """One rank's `Peers`: what it hears, what it says it is doing, and how often it was asked."""

    def __init__(self, store: dist.Store, rank: int, world_size: int = 2, startup: str = "dlrm") -> None:
        self.heard: list[Failure] = []
        self.told = threading.Event()
        self.doing = ("", 0.0)
        self.asked = threading.Semaphore(0)
        self.peers = Peers(store, rank, world_size, startup=startup, turn=1, status=self._status, failed=self._failed)

    def _status(self) -> tuple[str, float]:
        self.asked.release()
        return self.doing

    def _failed(self, failure: Failure) -> None:
        self.heard.append(failure)
        self.told.set()

    def goes_round(self, times: int = 3) -> bool:
        """Wait until the watcher has begun its round so many more times."""
        while self.asked.acquire(blocking=False):
            pass
        return all(self.asked.acquire(timeout=LONG) for _ in range(times))


@pytest.fixture
def rank(store: dist.Store) -> Iterator[Callable[..., Rank]]:
    made: list[Rank] = []

    def make(number: int, *, start: bool = True, **arguments: Any) -> Rank:
        made.append(Rank(store, number, **arguments))
        if start:
            made[-1].peers.start()
        return made[-1]

    yield make
    for each in made:
        each.peers.stop()


def in_thread(function: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    found: list[object] = []

    def run() -> None:
        try:
            found.append(function())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, found


FAILURE = Failure(1, "features", 1.5, "ValueError: no such feature")


def test_all_agree_on_rank_0s_value(rank: Callable[..., Rank]) -> None:
    first, second = rank(0), rank(1)
    assert first.peers.agree("comms", "a b") == "a b"
    assert second.peers.agree("comms", "b a") == "a b"


def test_waiting_for_rank_0_does_not_stop_the_watch(rank: Callable[..., Rank]) -> None:
    first, second = rank(0), rank(1)
    thread, found = in_thread(lambda: second.peers.agree("comms", ""))
    assert second.goes_round()
    first.peers.agree("comms", "a")
    thread.join(LONG)
    assert found == ["a"]


@pytest.mark.parametrize(
    ("theirs", "said"),
    [("other", "was last in start-up 'other.1': give both the same name if they are one"), (None, "has begun none")],
)
def test_waiting_long_for_rank_0_says_what_it_waits_for(
    theirs: str | None,
    said: str,
    rank: Callable[..., Rank],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(peers, "PATIENCE", 0.01)
    if theirs is not None:
        rank(0, startup=theirs).peers.agree("comms", "a b")
    second = rank(1)
    thread, _ = in_thread(lambda: second.peers.agree("comms", ""))
    text, until = "", time.monotonic() + LONG
    while "waits" not in text and time.monotonic() < until:
        text += capsys.readouterr().err
    second.peers.stop()
    thread.join(LONG)
    assert text.startswith(f"initopt: rank 1 waits in start-up 'dlrm.1' for rank 0, which {said}")


@pytest.mark.parametrize("how", ["told", "stopped"])
def test_waiting_for_rank_0_ends_with_the_start_up(how: str, rank: Callable[..., Rank]) -> None:
    second = rank(1)
    thread, found = in_thread(lambda: second.peers.agree("comms", ""))
    assert second.goes_round()
    if how == "told":
        rank(0, start=False).peers.announce(Failure(0, "", 0.0, "x"), look_for_cause=False)
    else:
        second.peers.stop()
    thread.join(LONG)
    assert [str(error) for error in found] == ["the start-up was over before rank 0 said its 'comms'"]


def test_a_failure_reaches_the_others_and_not_the_one_that_tells_it(rank: Callable[..., Rank]) -> None:
    first, second = rank(0), rank(1)
    second.peers.stop()
    assert second.peers.announce(FAILURE, look_for_cause=False) == FAILURE
    assert first.told.wait(LONG)
    assert (first.heard, second.heard) == ([FAILURE], [])
    assert str(FAILURE) == "rank 1 failed in step 'features' after 1.5 s: ValueError: no such feature"


def test_who_tells_first_is_the_cause(rank: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "ACKNOWLEDGE", 0.0)
    first, second = rank(0, start=False), rank(1, start=False)
    assert second.peers.announce(FAILURE, look_for_cause=False) == FAILURE
    assert first.peers.announce(Failure(0, "dmp", 2.0, "x"), look_for_cause=False) == FAILURE


def test_who_tells_waits_until_all_have_heard(rank: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "ACKNOWLEDGE", LONG)
    second = rank(1, start=False)
    thread, found = in_thread(lambda: second.peers.announce(FAILURE, look_for_cause=False))
    thread.join(0.2)
    assert thread.is_alive()
    first = rank(0)
    thread.join(LONG / 2)
    assert found == [FAILURE] and first.heard == [FAILURE]


def test_a_failed_meeting_is_explained_by_the_rank_that_left_it(
    rank: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "ACKNOWLEDGE", 0.0)
    first = rank(0, start=False)
    dead(first, 1, step="features")
    told = first.peers.announce(Failure(0, "shard", 2.0, "connection closed"), look_for_cause=True)
    assert (told.rank, told.step) == (1, "features")
    assert "is gone" in told.error


def test_a_failed_meeting_without_another_cause_is_its_own(
    rank: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "ACKNOWLEDGE", 0.0)
    own = Failure(0, "shard", 2.0, "connection closed")
    assert rank(0, start=False).peers.announce(own, look_for_cause=True) == own


def dead(of: Rank, number: int, **said: Any) -> None:
    """Let rank `number` have said something and be gone."""
    done = subprocess.Popen([sys.executable, "-c", ""])
    status = {"seconds": 1.0, "at": time.time(), "beat": 1, **this_process(), "pid": done.pid}
    status["born"] = born(done.pid) or "1"
    done.wait()
    of.peers._own.set(f"status/{number}", json.dumps(status | said))


def test_a_lost_process_is_seen_by_its_neighbour_and_told_to_all(rank: Callable[..., Rank]) -> None:
    first, third = rank(0, world_size=3), rank(2, world_size=3, start=False)
    dead(third, 1, step="features")
    third.peers.start()
    for each in (first, third):
        assert each.told.wait(LONG)
        (failure,) = each.heard
        assert (failure.rank, failure.step) == (1, "features")
        assert failure.error.startswith("its process (pid ") and failure.error.endswith(") is gone")


def test_who_has_ended_may_go(rank: Callable[..., Rank]) -> None:
    first = rank(0, start=False)
    dead(first, 1, step=peers.ENDED)
    first.peers.start()
    assert first.goes_round() and not first.heard


@pytest.mark.parametrize("elsewhere", [{"host": "far"}, {"processes": "another container's"}])
def test_a_rank_elsewhere_is_lost_when_it_falls_silent(
    elsewhere: dict[str, str], rank: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = rank(0, start=False)
    for beat in (1, 2, 3):
        dead(first, 1, step="features", beat=beat, **elsewhere)
        assert first.peers.cause() is None, "it has said something new"
    assert first.peers.cause() is None, "not long enough"
    monkeypatch.setattr(peers, "SILENCE", -1.0)
    cause = first.peers.cause()
    assert cause is not None and (cause.rank, cause.step) == (1, "features")


def test_statuses_say_what_each_rank_does(rank: Callable[..., Rank]) -> None:
    first, second = rank(0), rank(1, start=False)
    assert first.goes_round() and set(first.peers.statuses()) == {0}
    second.doing = ("features", 3.0)
    second.peers.start()
    assert second.goes_round()
    step, seconds = first.peers.statuses()[1]
    assert step == "features" and seconds >= 3.0
    second.peers.stop()
    second.peers.end()
    assert first.peers.statuses()[1][0] == "ended"


def test_a_changed_status_is_told_at_once(rank: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "BEAT", 10 * LONG)
    first = rank(0)
    assert first.asked.acquire(timeout=LONG)
    first.doing = ("shard", 0.0)
    first.peers.tell()
    assert first.asked.acquire(timeout=LONG)


def test_rank_0_says_what_all_are_doing_when_it_takes_long(
    rank: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(peers, "PATIENCE", 0.0)
    second = rank(1, start=False)
    second.doing = ("features", 3.0)
    second.peers.start()
    assert second.goes_round()
    first = rank(0, start=False)
    first.doing = ("shard", 40.0)
    first.peers.start()
    assert first.goes_round()
    first.peers.stop()
    assert "initopt: rank 0 in 'shard' for 40 s; rank 1 in 'features' for " in capfd.readouterr().err


class Gone:
    def __getattr__(self, name: str) -> Any:
        raise dist.DistNetworkError("connection reset")


def test_a_store_that_is_gone_ends_the_start_up(rank: Callable[..., Rank]) -> None:
    second = rank(1, start=False)
    second.peers._own = Gone()
    second.peers.start()
    assert second.told.wait(LONG)
    (failure,) = second.heard
    assert failure.error == "the job's store no longer answers: rank 0 or its agent is gone (connection reset)"


def test_a_store_that_is_gone_breaks_nothing(rank: Callable[..., Rank]) -> None:
    second = rank(1, start=False)
    second.peers._own = Gone()
    assert second.peers.announce(FAILURE, look_for_cause=True) == FAILURE
    assert second.peers.cause() is None
    assert second.peers.statuses() == {}
    second.peers.end()


def test_the_keys_of_an_earlier_attempt_mean_nothing(
    rank: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    rank(0, start=False).peers._publish(FAILURE)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    first = rank(0)
    assert first.goes_round() and not first.heard


# Start-ups that have joined


class _OneProcess(dict[str, int]):
    """Ranks of one process are runs of one start-up, not one after the other."""

    def __missing__(self, name: str) -> int:
        return 0

    def __setitem__(self, name: str, value: int) -> None: ...


@pytest.fixture
def ranks(store: dist.Store, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    monkeypatch.setattr(lanes, "_runs", _OneProcess())

    def run(*starts: Startup, **arguments: Any) -> list[Any]:
        """What `run` of each rank returned or raised. A step may take the input `join`, which connects its rank."""
        threads = []
        for number, start in enumerate(starts):
            join = _join(start, store, number, len(starts))
            threads.append(in_thread(lambda start=start, join=join: start.run(join=join, **arguments)))
        for thread, _ in threads:
            thread.join(LONG)
        assert not any(thread.is_alive() for thread, _ in threads)
        return [found[0] for _, found in threads]

    return run


def _join(start: Startup, store: dist.Store, rank: int, world_size: int) -> Callable[[], None]:
    return lambda: start.join(store, rank, world_size)


def joining(*meetings: str, name: str = "job") -> Startup:
    start = Startup(name)
    start.step(lambda join: join(), name="group", lane="comms")
    for meeting in meetings:
        start.step(lambda group: None, name=meeting, lane="comms")
    return start


@pytest.mark.parametrize("overlap", [True, False])
def test_ranks_with_the_same_collectives_start(overlap: bool, ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    values = ranks(joining("a", "b"), joining("a", "b"), overlap=overlap)
    assert [set(each) for each in values] == [{"group", "a", "b"}] * 2
    run = Run.latest(tmp_path)
    assert set(run.headers) == {0, 1} and run.number == 1


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    ("mine", "theirs", "text"),
    [
        (("b", "a"), ("a", "b"), "as number 2 of the lane comms rank 1 has 'b', rank 0 'a'"),
        (("a", "b"), ("a",), "as number 3 of the lane comms rank 1 has 'b', rank 0 'nothing more'"),
        (("a",), ("a", "b"), "as number 3 of the lane comms rank 1 has 'nothing more', rank 0 'b'"),
    ],
)
def test_another_order_of_collectives_is_named_on_all_ranks(
    mine: tuple[str, ...], theirs: tuple[str, ...], text: str, overlap: bool, ranks: Callable[..., list[Any]]
) -> None:
    first = joining(*theirs)

    def busy(group: None) -> None:
        """Rank 0 is still at it when rank 1 finds out."""
        execution = first._execution
        assert execution is not None
        with execution._changed:
            assert execution._changed.wait_for(lambda: execution._over, LONG)

    first.step(busy, before=theirs)
    failed = ranks(first, joining(*mine), overlap=overlap)
    assert [type(error) for error in failed] == [StartupFailed] * 2
    for error in failed:
        assert error.message == "start-up 'job' failed in step 'group' on rank 1"
    other, own = failed[0].exceptions[0], failed[1].exceptions[0]
    assert isinstance(own, OrderError) and text in str(own) and "Declare the same steps on every rank" in str(own)
    assert isinstance(other, PeerFailed) and text in str(other)


def test_a_failure_of_one_rank_ends_the_others(ranks: Callable[..., list[Any]]) -> None:
    released = threading.Event()

    def features(group: None) -> None:
        raise ValueError("no such feature")

    def shard(group: None) -> None:
        # As a meeting: it ends when its connection is closed.
        released.wait(LONG)

    first, second = joining(), joining()
    first.step(shard, lane="comms")
    second.step(features)
    second.step(shard, lane="comms")
    left = lanes.leave_collectives

    def leave(before: set[int]) -> None:
        released.set()
        left(before)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lanes, "leave_collectives", leave)
        failed = ranks(first, second)
    for error in failed:
        assert error.message == "start-up 'job' failed in step 'features' on rank 1"
    (peer,) = failed[0].exceptions
    assert isinstance(peer, PeerFailed)
    assert (peer.rank, peer.step, peer.error) == (1, "features", "ValueError: no such feature")
    assert any("rank 0 was in start-up step 'shard' for" in note for note in peer.__notes__)
    (own,) = failed[1].exceptions
    assert isinstance(own, ValueError)
    assert any(note.startswith("meanwhile rank 0 in 'shard' for") for note in own.__notes__)


def test_ctrl_c_on_one_rank_ends_the_others(ranks: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    coordinate = lanes.Execution._coordinate

    def interrupted(self: lanes.Execution) -> None:
        if "stays" in self.graph:
            return coordinate(self)
        with self._changed:
            assert self._changed.wait_for(lambda: "group" in self.values, LONG)
        raise KeyboardInterrupt

    monkeypatch.setattr(lanes.Execution, "_coordinate", interrupted)
    first, second = joining(), joining()

    def stays(group: None) -> None:
        execution = first._execution
        assert execution is not None
        with execution._changed:
            assert execution._changed.wait_for(lambda: execution._over, LONG)

    first.step(stays)
    failed = ranks(first, second)
    assert [type(error) for error in failed] == [StartupFailed, KeyboardInterrupt]
    assert isinstance(failed[0].exceptions[0], PeerFailed)
    assert failed[0].exceptions[0].error == "KeyboardInterrupt: "


def test_a_rank_alone_is_one_run_whatever_it_joins(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    start = joining("a", "b")
    start.step(lambda join, b: join(), name="again", lane="comms")
    ranks(start)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0001", "latest"]
    assert {span.name for span in Run.latest(tmp_path).spans} >= {"group", "a", "b", "again"}


def test_a_start_up_of_another_name_before_does_not_set_ranks_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "_runs", lanes.Counter())
    start = Startup("job")
    turns: list[int] = []

    def note() -> None:
        assert start._execution is not None
        turns.append(start.turn)

    start.step(note)
    start.run()
    lanes._runs.clear()
    other = Startup("prepare")
    other.step(lambda: 1, name="data")
    other.run()
    start.run()
    assert turns[0] == turns[1]
    start.run()
    assert turns[2] != turns[1]
