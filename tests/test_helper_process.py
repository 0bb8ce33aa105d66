"""A lane that is a process: what comes back from it, how it ends, and what can't go there."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from initopt import Startup, StartupFailed
from initopt.helper_process import HelperProcess

LONG = 30.0


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("INITOPT_ROOT", str(tmp_path))
    # Tests before this one may have left idle threads, such as those of torch's compiler.
    count, idle = threading.active_count, threading.active_count() - 1
    monkeypatch.setattr(threading, "active_count", lambda: count() - idle)
    assert multiprocessing.active_children() == []
    yield
    assert multiprocessing.active_children() == []


@pytest.fixture
def helper() -> Iterator[Callable[..., HelperProcess]]:
    made: list[HelperProcess] = []

    def make(**functions: Callable[..., Any]) -> HelperProcess:
        made.append(HelperProcess("process:a", functions))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def threads() -> Iterator[None]:
    """Another thread, beside which a fork is unsafe."""
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    yield
    end.set()
    thread.join(LONG)


def pid() -> int:
    return os.getpid()


class Unpicklable(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


def notes(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", []))


def test_a_value_comes_back_from_another_process(helper: Callable[..., HelperProcess]) -> None:
    own = helper(pid=pid, double=lambda x: 2 * x)
    assert own.call("pid", {}) == own.call("pid", {}) != os.getpid()
    assert own.call("double", {"x": [1]}) == [1, 1]


def test_a_forked_helper_knows_closures(helper: Callable[..., HelperProcess]) -> None:
    secret = object()
    assert helper(same=lambda: secret is not None and id(secret)).call("same", {}) == id(secret)


def test_an_error_comes_back_with_its_notes_and_place(helper: Callable[..., HelperProcess]) -> None:
    def fails() -> None:
        error = ValueError("no such feature")
        error.__notes__ = ["of the step itself"]  # type: ignore[attr-defined]
        raise error

    own = helper(fails=fails, pid=pid)
    with pytest.raises(ValueError, match="no such feature") as caught:
        own.call("fails", {})
    assert notes(caught.value).startswith("of the step itself\nin the helper process of lane 'process:a':\n")
    assert "in fails\n    raise error" in notes(caught.value)
    assert own.call("pid", {}) != os.getpid(), "the helper lives on"


def test_an_error_that_can_not_travel_is_told_in_words(helper: Callable[..., HelperProcess]) -> None:
    def fails() -> None:
        raise Unpicklable(1, 2)

    with pytest.raises(RuntimeError, match="Unpicklable: 1 and 2") as caught:
        helper(fails=fails).call("fails", {})
    assert "raise Unpicklable(1, 2)" in notes(caught.value)


def test_a_helper_that_dies_is_named_with_its_exit_code(helper: Callable[..., HelperProcess]) -> None:
    with pytest.raises(RuntimeError, match=r"helper process of lane 'process:a' ended with exit code 7 in step 'dies'"):
        helper(dies=lambda: os._exit(7)).call("dies", {})
    with pytest.raises(RuntimeError, match=r"exit code -9 in step 'killed'"):
        helper(killed=lambda: os.kill(os.getpid(), signal.SIGKILL)).call("killed", {})


def test_a_helper_that_dies_is_noticed_though_what_it_started_lives_on(helper: Callable[..., HelperProcess]) -> None:
    read, write = os.pipe()

    def leaves() -> None:
        if os.fork():
            os._exit(7)
        # Lives, with all that it inherited, until the test lets go of the pipe.
        os.close(write)
        os.read(read, 1)
        os._exit(0)

    with pytest.raises(RuntimeError, match="exit code 7"):
        helper(leaves=leaves).call("leaves", {})
    os.close(write)
    os.close(read)


def test_what_a_helper_has_started_ends_with_it() -> None:
    def starts() -> int:
        return subprocess.Popen(["sleep", "600"]).pid

    helper = HelperProcess("process:a", {"starts": starts})
    pid = helper.call("starts", {})
    helper.close()
    until = time.monotonic() + LONG
    while Path(f"/proc/{pid}/stat").exists() and ") Z" not in Path(f"/proc/{pid}/stat").read_text():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_inputs_must_be_picklable(helper: Callable[..., HelperProcess]) -> None:
    own = helper(f=lambda x: x)
    with pytest.raises(TypeError) as caught:
        own.call("f", {"x": threading.Lock()})
    assert "the inputs of step 'f' must be picklable" in notes(caught.value)
    assert own.call("f", {"x": 1}) == 1


def test_values_must_be_picklable(helper: Callable[..., HelperProcess]) -> None:
    own = helper(f=threading.Lock, pid=pid)
    with pytest.raises(TypeError) as caught:
        own.call("f", {})
    assert "the value of step 'f' must be picklable" in notes(caught.value)
    assert own.call("pid", {}) != os.getpid()


def test_ctrl_c_does_not_reach_the_step(helper: Callable[..., HelperProcess]) -> None:
    assert helper(f=lambda: os.kill(os.getpid(), signal.SIGINT) or 3).call("f", {}) == 3


def test_closing_ends_a_call_that_is_under_way(helper: Callable[..., HelperProcess], tmp_path: Path) -> None:
    fifo = tmp_path / "started"
    os.mkfifo(fifo)

    def waits() -> None:
        fifo.write_text("now")
        threading.Event().wait()

    own = helper(waits=waits)
    errors: list[Exception] = []

    def call() -> None:
        try:
            own.call("waits", {})
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    assert fifo.read_text() == "now"
    own.close()
    thread.join(LONG)
    assert [type(error) for error in errors] == [RuntimeError]


def test_beside_other_threads_a_helper_is_spawned(threads: None) -> None:
    own = HelperProcess("process:a", {"getpid": os.getpid})
    try:
        assert type(own._process).__name__ == "SpawnProcess"
        assert own.call("getpid", {}) == own._process.pid
    finally:
        own.close()


def test_a_spawned_helper_can_not_have_closures(threads: None) -> None:
    with pytest.raises(
        TypeError, match=r"lane 'process:a' needs a helper process, and this process already has threads"
    ):
        HelperProcess("process:a", {"f": lambda: 1})


def test_a_helper_ends_when_its_trainer_is_killed() -> None:
    """The trainer here is a forked process: it tells who its helper is, and is killed."""
    context: Any = multiprocessing.get_context("fork")
    mine, other = context.Pipe()

    def trainer() -> None:
        own = HelperProcess("process:a", {"pid": pid})
        # The helper holds the far end of this pipe too: it breaks when both are gone.
        other.send(own.call("pid", {}))
        signal.pause()

    process = context.Process(target=trainer)
    process.start()
    other.close()
    helper_pid = mine.recv()
    assert helper_pid != process.pid
    process.kill()
    process.join(LONG)
    assert mine.poll(LONG), "the helper outlived its trainer"
    with pytest.raises(EOFError):
        mine.recv()


# In a start-up


def test_a_step_on_a_process_lane() -> None:
    start = Startup("job")
    start.step(lambda size: list(range(size)), name="plan", lane="process:p")
    start.step(lambda plan: (sum(plan), os.getpid()), name="shard")
    start.step(pid, name="again", lane="process:p")
    values = start.run(size=4)
    assert values.shard == (6, os.getpid()) and values.again != os.getpid()


def test_without_overlap_there_is_no_helper() -> None:
    start = Startup("job")
    start.step(pid, name="plan", lane="process:p")
    assert start.run(overlap=False).plan == os.getpid()


def test_a_step_on_a_process_lane_that_fails() -> None:
    start = Startup("job")
    start.step(lambda: {}["colour"], name="plan", lane="process:p")
    with pytest.raises(StartupFailed, match="in step 'plan'") as caught:
        start.run()
    assert isinstance(caught.value.exceptions[0], KeyError)


def test_another_step_fails_while_the_helper_works(tmp_path: Path) -> None:
    fifo = tmp_path / "started"
    os.mkfifo(fifo)

    def plan() -> None:
        fifo.write_text("now")
        threading.Event().wait()

    def features() -> None:
        assert fifo.read_text() == "now"
        raise ValueError("no")

    start = Startup("job")
    start.step(plan, lane="process:p")
    start.step(features)
    with pytest.raises(StartupFailed) as caught:
        start.run()
    assert [type(error) for error in caught.value.exceptions] == [ValueError], "the helper's end is no error of its own"


def test_a_helper_that_can_not_be_made_leaves_none_behind(threads: None) -> None:
    start = Startup("job")
    start.step(os.getpid, name="first", lane="process:a")
    start.step(lambda: 1, name="second", lane="process:b")
    with pytest.raises(TypeError, match="lane 'process:b' needs a helper process"):
        start.run()
