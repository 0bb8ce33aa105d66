"""Interrupting the main thread: by time, from another thread, and never outside of the block."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from initopt import StepTimeout
from initopt.alarm import Alarm

pytestmark = pytest.mark.timeout(60, method="thread")  # the other method needs the signal for itself

LONG = 30.0


def alarm() -> Alarm:
    return Alarm(lambda step, limit, ended: pytest.fail(f"{step} counts as stuck"))


@pytest.fixture(autouse=True)
def _the_signal_is_free_again() -> Iterator[None]:
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
    yield
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_block_that_takes_too_long_is_left() -> None:
    with pytest.raises(StepTimeout, match=r"step 'model' did not return within 0\.01 s"), alarm().limit("model", 0.01):
        threading.Event().wait(LONG)


def test_a_block_in_time_is_left_alone() -> None:
    ringing = alarm()
    for _ in range(2):
        with ringing.limit("model", LONG):
            assert 0.0 < signal.getitimer(signal.ITIMER_REAL)[0] <= LONG


def test_another_thread_interrupts_the_block() -> None:
    ringing, error = alarm(), ValueError("elsewhere")
    inside = threading.Event()
    thread = threading.Thread(target=lambda: inside.wait(LONG) and ringing.interrupt(error))
    thread.start()
    with pytest.raises(ValueError, match="elsewhere"), ringing.limit("model", LONG):
        inside.set()
        threading.Event().wait(LONG)
    thread.join(LONG)


def test_an_interruption_between_two_blocks_stops_the_next_one_before_it_begins() -> None:
    """Without a block there is no handler, and the signal would end the process."""
    ringing, error = alarm(), ValueError("elsewhere")
    ringing.interrupt(error)
    with pytest.raises(ValueError, match="elsewhere"), ringing.limit("model", LONG):
        pytest.fail("the block must not run")


def test_a_handler_that_is_there_already_is_left_alone() -> None:
    rung = threading.Event()
    signal.signal(signal.SIGALRM, lambda *_: rung.set())
    try:
        ringing = alarm()
        with ringing.limit("model", 0.001):
            ringing.interrupt(ValueError())
            assert not rung.wait(0.05)
        assert signal.getsignal(signal.SIGALRM) is not signal.SIG_DFL
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


def test_a_block_that_catches_every_exception_is_left_all_the_same() -> None:
    ringing, error = alarm(), ValueError("elsewhere")
    inside = threading.Event()
    thread = threading.Thread(target=lambda: inside.wait(LONG) and ringing.interrupt(error))
    thread.start()
    with pytest.raises(ValueError, match="elsewhere"), ringing.limit("model", LONG):
        while True:
            try:
                inside.set()
                threading.Event().wait(LONG)
            except Exception:
                continue
    thread.join(LONG)


def test_a_block_that_swallows_an_interruption_is_interrupted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("initopt.alarm.PATIENCE", 0.05)
    ringing, swallowed = alarm(), []
    inside = threading.Event()
    thread = threading.Thread(target=lambda: inside.wait(LONG) and ringing.interrupt(ValueError("elsewhere")))
    thread.start()
    with pytest.raises(ValueError, match="elsewhere"), ringing.limit("model", LONG):
        try:
            inside.set()
            threading.Event().wait(LONG)
        except BaseException as error:
            swallowed.append(error)
        threading.Event().wait(LONG)
    thread.join(LONG)
    assert len(swallowed) == 1


def test_outside_of_the_main_thread_it_does_nothing() -> None:
    done: list[str] = []

    def run() -> None:
        ringing = alarm()
        ringing.interrupt(ValueError())
        with ringing.limit("model", 0.0001):
            threading.Event().wait(0.01)
            done.append("block")

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(LONG)
    assert done == ["block"]


def test_a_block_that_nothing_can_interrupt_counts_as_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("initopt.alarm.PATIENCE", 0.01)
    said: list[tuple[str, float]] = []
    stuck, done = threading.Event(), threading.Event()

    def run() -> None:
        with Alarm(lambda step, limit, ended: (said.append((step, limit)), stuck.set())).limit("model", 0.01):
            done.wait(LONG)

    thread = threading.Thread(target=run)
    thread.start()
    assert stuck.wait(LONG)
    done.set()
    thread.join(LONG)
    assert said == [("model", 0.01)]
