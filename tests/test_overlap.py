"""Steps as functions: what is refused when they are declared, and what a run does with lanes, draws and failures."""

from __future__ import annotations

import copy
import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

from initopt import (
    Graph,
    GraphError,
    OrderError,
    Recorder,
    Run,
    Startup,
    StartupFailed,
    StepTimeout,
    lanes,
    plugins,
    rng,
)
from initopt.plugins import hookimpl

LONG = 30.0
"""Seconds that a step waits for another one before the test fails."""


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("INITOPT_ROOT", str(tmp_path))
    return tmp_path


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    before, state = set(threading.enumerate()), torch.get_rng_state()
    yield
    torch.set_rng_state(state)
    assert set(threading.enumerate()) == before


@pytest.fixture
def plugin() -> Iterator[Callable[[object], None]]:
    added: list[object] = []

    def add(it: object) -> None:
        plugins.register(plugins.installed(), it, type(it).__name__)
        added.append(it)

    yield add
    for it in added:
        plugins.installed().unregister(it)


def failure(start: Startup, **arguments: Any) -> StartupFailed:
    with pytest.raises(StartupFailed) as caught:
        start.run(**arguments)
    return caught.value


def notes(error: BaseException) -> list[str]:
    return list(getattr(error, "__notes__", []))


# Declaring


def test_parameters_name_the_needs() -> None:
    start = Startup("job")

    @start.step
    def plan(model: int, config: int) -> int:
        return model + config

    @start.step(lane="io:a")
    def model(config: int) -> int:
        return 10 * config

    graph = start.graph(["config"])
    assert graph["plan"].needs == ("model", "config")
    assert graph["plan"].call_site.startswith("test_overlap.py:")
    assert graph.order() == ("model", "plan")
    values = start.run(config=2)
    assert (values.plan, values["model"]) == (22, 20)
    assert plan(1, 2) == 3


def test_a_default_stands_in_for_a_name_that_nobody_provides() -> None:
    start = Startup()
    start.step(lambda size=3: size, name="batch")
    assert start.graph()["batch"].needs == ()
    assert start.run().batch == 3
    assert start.run(size=4).batch == 4
    start.step(lambda: 5, name="size")
    assert start.run().batch == 5


def test_after_before_and_order_add_edges() -> None:
    start = Startup()
    done: list[str] = []
    start.step(lambda: done.append("last"), name="last", lane="io:a")
    start.step(lambda: done.append("middle"), name="middle", lane="io:b", before="last")
    start.step(lambda: done.append("first"), name="first", lane="io:c")
    start.step(lambda: done.append("end"), name="end", lane="io:d", after=["last"])
    start.order("first", "middle")
    assert {(e.before, e.after, e.kind) for e in start.graph().edges} == {
        ("first", "middle", "order"),
        ("middle", "last", "order"),
        ("last", "end", "order"),
    }
    start.run()
    assert done == ["first", "middle", "last", "end"]


def test_replace_takes_the_new_functions_needs_and_keeps_the_rest() -> None:
    start = Startup()
    start.step(lambda: 1, name="config")
    start.step(lambda config: config, name="model", lane="io:a", uses="rng", stage="train_module_creation")
    start.step(lambda model: model, name="shard")
    start.replace("model", lambda: 7)
    step = start.graph()["model"]
    assert (step.needs, step.lane, step.uses, step.stage) == ((), "io:a", ("rng",), "train_module_creation")
    assert start.run().shard == 7


def test_what_is_not_there_is_named() -> None:
    start = Startup()
    start.step(lambda: 1, name="model")
    with pytest.raises(GraphError, match=r"no step is named 'modle' \(did you mean 'model'\?\)"):
        start.replace("modle", lambda: 1)
    with pytest.raises(GraphError, match=r"no step is named 'shard'"):
        start.order("model", "shard")
    with pytest.raises(GraphError, match=r"no step is named 'shard'"):
        start.step(lambda: 1, name="plan", before="shard")
    assert list(start.graph()) == ["model"], "what was refused is not declared"


def test_two_steps_of_one_name_are_refused_with_both_places() -> None:
    start = Startup()
    start.step(lambda: 1, name="model")
    with pytest.raises(
        GraphError, match=r"test_overlap\.py:\d+: step 'model' is declared already, at test_overlap\.py:\d+"
    ):
        start.step(lambda: 1, name="model")


def test_an_unknown_need_comes_with_a_hint_before_anything_runs() -> None:
    start = Startup()
    ran: list[str] = []
    start.step(lambda: ran.append("model"), name="model")
    start.step(lambda modle: modle, name="shard")
    with pytest.raises(GraphError, match=r"'shard' needs 'modle', which no step provides \(did you mean 'model'\?\)"):
        start.run()
    assert ran == []


@pytest.mark.parametrize("text", ["lambda *model: 1", "lambda **model: 1", "lambda model, /: 1"])
def test_parameters_that_name_nothing_are_refused(text: str) -> None:
    start = Startup()
    with pytest.raises(GraphError, match=r"step 'shard' takes .*model.*, but parameters name the steps it needs"):
        start.step(eval(text), name="shard")


def test_a_function_without_a_name_needs_one() -> None:
    start = Startup()
    with pytest.raises(GraphError, match=r"has no name; pass name="):
        start.step(functools.partial(int, "3"))


def test_draws_in_a_helper_process_are_refused() -> None:
    start = Startup()
    start.step(lambda: 1, name="model", lane="process:a", uses="rng")
    with pytest.raises(GraphError, match=r"'model' uses 'rng' on lane 'process:a'"):
        start.graph()


def test_an_early_step_must_not_meet_other_ranks() -> None:
    start = Startup()
    start.step(lambda: 1, name="loader", lane="comms", uses="rng", early=True)
    with pytest.raises(GraphError, match=r"'loader' is early and meets other ranks"):
        start.graph()


def test_values_are_attributes_items_and_copies() -> None:
    start = Startup()
    start.step(lambda: 1, name="model")
    start.step(lambda: 2, name="items")
    values = start.run()
    assert (dict(values), len(values), repr(values)) == ({"model": 1, "items": 2}, 2, "Values(model, items)")
    assert dict(copy.copy(values)) == dict(values)
    with pytest.raises(AttributeError, match="no step is named 'modle'; there are model, items"):
        _ = values.modle


# Running


def test_steps_on_two_lanes_overlap() -> None:
    """Each waits for the other, so without overlap both would wait in vain."""
    start = Startup()
    meeting = threading.Barrier(2)
    start.step(lambda: meeting.wait(LONG) >= 0 and threading.current_thread().name, name="reader", lane="io:a")
    start.step(lambda: meeting.wait(LONG) >= 0 and threading.current_thread().name, name="model")
    values = start.run()
    assert (values.reader, values.model) == ("initopt-io:a", "initopt-main")


def test_a_lane_runs_one_step_at_a_time() -> None:
    start = Startup()
    inside = threading.Lock()

    def alone() -> int:
        assert inside.acquire(blocking=False)
        inside.release()
        return threading.get_ident()

    for index in range(50):
        start.step(alone, name=f"s{index}", lane="io:a")
    assert len(set(start.run().values())) == 1


def test_a_step_waits_for_all_lanes_that_it_needs() -> None:
    start = Startup()
    open_a, open_b = threading.Event(), threading.Event()

    def a() -> str:
        assert open_a.wait(LONG)
        open_b.set()
        return "a"

    def b() -> str:
        open_a.set()
        assert open_b.wait(LONG)
        return "b"

    start.step(lambda a, b: a + b, name="both", lane="io:c")
    start.step(a, lane="io:a")
    start.step(b, lane="io:b")
    assert start.run().both == "ab"


def drawing() -> Startup:
    start = Startup("drawing")
    start.step(lambda: torch.rand(3), name="model", uses="rng", lane="io:m")
    start.step(lambda config: config * 2, name="reader", lane="io:r")
    start.step(lambda model, reader: model * reader, name="shard")
    start.step(lambda: torch.rand(3), name="head", uses="rng", lane="io:h")
    start.step(lambda shard: shard + torch.rand(3), name="dmp", uses="rng", lane="comms")
    return start


def test_serial_and_overlapped_give_the_same_values() -> None:
    state = torch.get_rng_state()
    serial = drawing().run(overlap=False, config=3)
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    overlapped = drawing().run(config=3)
    assert torch.equal(torch.get_rng_state(), after)
    assert list(serial) == list(overlapped) == ["model", "reader", "shard", "head", "dmp"]
    for name in ("model", "shard", "head", "dmp"):
        assert torch.equal(serial[name], overlapped[name])


def test_a_fork_step_runs_alone_in_the_callers_thread() -> None:
    start = Startup()
    other = threading.Event()
    start.step(lambda: 1, name="config", lane="io:c")
    start.step(lambda config: other.set(), name="reader", lane="io:r")
    start.step(lambda config: (threading.current_thread(), other.wait(0.1)), name="loader", uses="fork", lane="io:d")
    start.step(lambda loader: 1, name="batch", lane="io:d")
    thread, disturbed = start.run().loader
    assert thread is threading.current_thread()
    # `reader` may also have run before it; then it ended before it.
    spans = {span.name: span for span in Run.latest(os.environ["INITOPT_ROOT"]).spans}
    loader = spans.pop("loader")
    assert all(span.end <= loader.start or span.start >= loader.end for span in spans.values())
    assert not disturbed or spans["reader"].end <= loader.start


def test_collectives_keep_the_graphs_order_whatever_is_ready_first() -> None:
    """What the meetings need becomes ready in the opposite order."""
    start = Startup()
    ready = [threading.Event() for _ in range(6)]
    met: list[str] = []
    ready[-1].set()

    def prepare(index: int) -> None:
        assert ready[index].wait(LONG)
        if index:
            ready[index - 1].set()

    for index in range(6):
        start.step(functools.partial(prepare, index), name=f"p{index}", lane=f"io:{index}")
        start.step(eval(f"lambda p{index}: met.append('c{index}')", {"met": met}), name=f"c{index}", lane="comms")
    start.run()
    assert met == [f"c{index}" for index in range(6)] == list(start.graph().lanes()["comms"])


@pytest.mark.parametrize("overlap", [True, False])
def test_many_tiny_steps(overlap: bool) -> None:
    start = Startup()
    for index in range(300):
        needs = ", ".join({f"s{max(0, index - back)}" for back in (1, 7, 8)} - {f"s{index}"})
        start.step(eval(f"lambda {needs}: 1 + max([{needs}], default=0)"), name=f"s{index}", lane=f"io:{index % 8}")
    assert start.run(overlap=overlap).s299 == 300


def test_one_object_runs_twice(plugin: Callable[[object], None]) -> None:
    class Adds:
        @hookimpl
        def initopt_declare(self, startup: Startup) -> None:
            startup.step(lambda: 5, name="added")

    plugin(Adds())
    start = Startup()
    start.step(lambda size: size, name="model")
    assert [start.run(size=size).model for size in (1, 2)] == [1, 2]
    assert start.run(size=3).added == 5
    assert Run.latest(os.environ["INITOPT_ROOT"]).number == 3


def test_the_report_needs_a_run() -> None:
    start = Startup("job")
    with pytest.raises(RuntimeError, match="start-up 'job' has not run yet"):
        start.report()
    start.step(lambda: 1, name="model")
    start.run()
    assert "job" in start.report()


def test_the_record_has_every_step_on_its_lane(root: Path) -> None:
    start = Startup("job")
    start.step(lambda: 1, name="model", stage="train_module_creation")
    start.step(lambda model: 1, name="reader", lane="io:r")
    start.run()
    run = Run.latest(root)
    spans = {span.name: span for span in run.spans if span.kind == "step"}
    assert {name: (s.lane, s.stage) for name, s in spans.items()} == {
        "model": ("main", "train_module_creation"),
        "reader": ("io:r", None),
    }
    assert spans["model"].end <= spans["reader"].start
    assert isinstance(run.graph, Graph) and list(run.graph) == ["model", "reader"]


# Random numbers


def sneaky() -> Startup:
    start = Startup()
    start.step(lambda: torch.rand(1), name="model", uses="rng")
    # Seeding is seen by where the generator stands afterwards only.
    start.step(lambda model: torch.manual_seed(5), name="features", lane="io:f")
    start.step(lambda features: torch.rand(1), name="head", uses="rng")
    return start


def test_an_undeclared_draw_is_an_error_with_overlap() -> None:
    error = failure(sneaky())
    assert "failed in step 'head' on rank 0" in str(error)
    (order,) = error.exceptions
    assert isinstance(order, OrderError)
    assert "random numbers were drawn before 'head', by a step that does not use 'rng'" in str(order)
    assert "one of these: features. Give uses='rng' to the one that draws. Overlapped, the weights would" in str(order)


@pytest.mark.parametrize("draw", [lambda: torch.rand(1), lambda: torch.empty(2).uniform_(), lambda: torch.randperm(3)])
def test_a_draw_beside_a_step_that_draws_is_refused_where_it_is_made(draw: Callable[[], object]) -> None:
    """The generator's state tells nothing here: it may move while the other step holds it."""
    start = Startup("job")
    refused = threading.Event()

    @start.step(uses="rng")
    def model() -> object:
        assert refused.wait(30)
        return torch.rand(1)

    @start.step(lane="io:x")
    def noise() -> object:
        try:
            return draw()
        finally:
            refused.set()

    error = failure(start)
    assert "failed in step 'noise' on rank 0" in str(error)
    assert "does not use 'rng', so the weights would depend on timing" in str(error.exceptions[0])


def test_a_draw_that_moves_no_default_generator_is_none() -> None:
    own = torch.Generator()
    start = Startup("job")
    start.step(lambda: torch.rand(1, generator=own), name="own")
    start.step(lambda: torch.empty(2, device="meta").uniform_(), name="meta")
    assert start.run().meta.shape == (2,)


def test_an_undeclared_draw_is_a_warning_without_overlap() -> None:
    with pytest.warns(
        UserWarning, match=r"drawn before 'head'.* of these: features. Give .*; with overlap this is an error"
    ):
        values = sneaky().run(overlap=False)
    assert values.head.shape == (1,)


def test_an_undeclared_draw_after_the_last_one_fails_the_start_up_as_a_whole() -> None:
    start = Startup("job")
    gone: list[str] = []
    start.step(lambda: torch.rand(1), name="model", uses="rng")
    start.step(lambda model: torch.manual_seed(5) is None or "value", name="features", discard=gone.append)
    error = failure(start)
    assert [type(each) for each in error.exceptions] == [OrderError]
    assert "after the last step that uses 'rng'" in str(error.exceptions[0])
    assert gone == ["value"] or gone == [True]


def test_a_generator_that_a_step_only_makes_is_no_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a step starts the GPU: its generators are there from then on."""
    read, started = rng.read, threading.Event()
    monkeypatch.setattr(rng, "read", lambda: read() | ({"cuda:0": b"seed"} if started.is_set() else {}))
    start = Startup()
    start.step(started.set, name="device")
    start.step(lambda device: torch.rand(1), name="model", uses="rng")
    assert start.run().model.shape == (1,)


class EarlyJob:
    """A job whose loader is early: what it drew, what was discarded, what the model drew before it."""

    def __init__(self, draws: int = 1) -> None:
        self.draws = draws
        self.events: list[str] = []
        self.start = Startup("early")
        self.start.step(self._model, name="model", uses="rng")
        self.start.step(
            self._loader,
            name="loader",
            uses=("rng", "fork"),
            lane="io:d",
            early=True,
            discard=lambda value: self._discard(value),
        )
        self.start.step(lambda loader: [torch.rand(1).item(), loader], name="head", uses="rng")

    def _model(self) -> float:
        self.events.append("model")
        return torch.rand(self.draws)[0].item()

    def _loader(self) -> float:
        self.events.append("loader")
        return torch.rand(1).item()

    def _discard(self, value: float) -> None:
        self.events.append("discard")

    def run(self, **arguments: Any) -> tuple[object, bytes]:
        torch.manual_seed(3)
        values = self.start.run(**arguments)
        return dict(values), rng.cpu()


def test_an_early_step_runs_first_from_the_second_start_on_and_draws_the_same() -> None:
    expected = EarlyJob().run(overlap=False)
    job = EarlyJob()
    assert job.run() == expected
    assert job.events == ["loader", "model"], "the run without overlap left the ledger"
    again = EarlyJob()
    assert again.run() == expected
    assert again.events == ["loader", "model"]


def test_an_early_step_runs_in_its_turn_at_the_first_start() -> None:
    job = EarlyJob()
    first = job.run()
    assert job.events == ["model", "loader"]
    assert job.run() == first


def test_a_step_whose_state_came_out_different_is_run_again_in_its_turn() -> None:
    EarlyJob(draws=1).run()
    expected = EarlyJob(draws=2)
    values = expected.run(overlap=False)
    EarlyJob(draws=1).run()
    job = EarlyJob(draws=2)
    assert job.run() == values
    assert job.events == ["loader", "model", "discard", "loader"]
    job.events.clear()
    assert job.run() == values
    assert job.events == ["loader", "model"], "the ledger has learnt the new state"


def test_an_early_step_keeps_what_it_was_told_to_follow() -> None:
    for _ in range(2):
        job = EarlyJob()
        job.start.step(lambda job=job: job.events.append("download"), name="download", lane="io:x", before="loader")
        job.run()
        assert job.events.index("download") < job.events.index("loader")


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_value_of_an_early_step_is_discarded_once_when_the_start_up_fails(when: str) -> None:
    EarlyJob().run()
    job = EarlyJob()

    def fails() -> None:
        raise ValueError("no")

    job.start.step(fails, name="fails", lane="io:f", **{"before": "model"} if when == "before" else {"after": "head"})
    torch.manual_seed(3)
    failure(job.start)
    assert job.events == ["loader", "discard"] if when == "before" else ["loader", "model", "discard"]


def test_running_again_in_turn_does_not_lock_up_with_a_step_that_forks() -> None:
    """The step that forks is ready while the early one is in its turn, and each has to run alone."""
    EarlyJob(draws=1).run()
    job = EarlyJob(draws=2)
    in_turn = threading.Event()
    job.start.step(lambda: in_turn.wait(LONG), name="gate", lane="io:g")
    job.start.step(lambda gate: job.events.append("fork"), name="fork", uses="fork", lane="io:x")

    def discard(value: float) -> None:
        in_turn.set()
        execution = job.start._execution
        assert execution is not None
        with execution._changed:
            assert execution._changed.wait_for(lambda: "fork" in execution._alone, LONG)
        job.events.append("discard")

    job._discard = discard  # type: ignore[method-assign]
    job.run()
    assert job.events == ["loader", "model", "discard", "loader", "fork"]


def test_a_step_that_pauses_lets_one_that_forks_run() -> None:
    start = Startup("job")
    events: list[str] = []
    begun, forked = threading.Event(), threading.Event()

    @start.step(lane="io:x", pauses=True)
    def long() -> None:
        start.pause()
        begun.set()
        while not forked.is_set():
            start.pause()
        events.append("long")

    @start.step(lane="io:y")
    def gate() -> None:
        begun.wait(LONG)

    @start.step(uses="fork")
    def fork(gate: None) -> None:
        assert start._execution is not None
        assert start._execution._running.keys() == {"fork"}
        events.append("fork")
        forked.set()

    start.run()
    assert events == ["fork", "long"]
    long_span = next(span for span in Run.latest().spans if span.name == "long")
    assert not long_span.error


def test_a_pause_ends_when_the_start_up_fails() -> None:
    start = Startup("job")
    paused = threading.Event()

    @start.step(lane="io:x", pauses=True)
    def long() -> None:
        while not paused.is_set():
            start.pause()

    @start.step(uses="fork")
    def fork() -> None:
        pass

    @start.step(uses="fork")
    def fails(fork: None) -> None:
        paused.set()
        raise ValueError("no")

    assert [str(error) for error in failure(start).exceptions] == ["no"]


def test_a_step_goes_on_while_another_one_does_not_pause() -> None:
    start = Startup("job")
    both, paused = threading.Barrier(3, timeout=LONG), threading.Event()

    @start.step(lane="io:x", pauses=True)
    def long() -> None:
        both.wait()
        execution = start._execution
        assert execution is not None
        with execution._changed:
            assert execution._changed.wait_for(lambda: execution._alone, LONG)
        start.pause()
        paused.set()

    @start.step(lane="io:y")
    def stays() -> None:
        both.wait()
        assert paused.wait(LONG), "the pause waited for a step that does not pause"

    @start.step(lane="io:z")
    def gate() -> None:
        # Until the two others run: what is to run alone lets no other step begin.
        both.wait()

    start.step(lambda gate: None, name="fork", uses="fork")
    start.run()


@pytest.mark.parametrize("resource", ["rng", "fork"])
def test_a_step_that_holds_what_others_wait_for_does_not_pause(resource: str) -> None:
    start = Startup("job")
    start.step(lambda: None, name="model", uses=resource, pauses=True)
    with pytest.raises(GraphError, match=f"'model' pauses and uses '{resource}'"):
        start.graph()


def test_the_pause_is_told_in_the_record() -> None:
    start = Startup("job")
    begun = threading.Event()

    @start.step(lane="io:x", pauses=True)
    def long() -> None:
        begun.set()
        while "fork" not in start._execution.values:  # type: ignore[union-attr]
            start.pause()

    start.step(lambda: begun.wait(LONG), name="gate", lane="io:z")
    start.step(lambda gate: time.sleep(0.05), name="fork", uses="fork")
    start.run()
    (span,) = (span for span in Run.latest().spans if span.name == "long")
    assert 0.05 <= span.paused <= span.end - span.start


def test_a_collective_in_a_named_part_of_a_step_is_still_that_steps() -> None:
    start = Startup("job")

    @start.step(lane="io:x")
    def off() -> None:
        assert start._execution is not None
        with start._execution.recorder.span("part"):
            start._execution._refuse_meeting("all_reduce", "train.py:1")

    error = failure(start).exceptions[0]
    assert isinstance(error, OrderError) and "'off'" in str(error)


def test_what_is_used_after_the_start_up_is_not_its_own(root: Path) -> None:
    with Recorder("job", mode="overlap") as recorder:
        start = Startup("job")
        start.step(lambda: None, name="model")
        start.run(recorder=recorder)
        until = time.process_time() + 0.2
        while time.process_time() < until:
            pass
    run = Run.latest(root)
    assert run.usages[0].at <= run.trailers[0].end - 0.2


def test_a_process_forked_during_a_start_up_has_faulthandler_to_itself() -> None:
    """Its timer's thread does not come along, and its lock would."""
    code = (
        "import faulthandler, os; from initopt import watchdog\n"
        "watchdog.put_off(30.0)\n"
        "if (child := os.fork()) == 0:\n"
        "    faulthandler.dump_traceback_later(30.0); faulthandler.cancel_dump_traceback_later(); os._exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0 and watchdog._until is not None\n"
        "watchdog.stop()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("when", ["before any run", "in turn"])
def test_a_pause_where_nothing_waits_returns(when: str) -> None:
    start = Startup("job")
    start.step(start.pause, name="long", pauses=True)
    if when == "in turn":
        start.run(overlap=False)
    start.pause()


# Failing


@pytest.mark.parametrize("overlap", [True, False])
def test_a_failed_start_up_names_step_rank_and_time(overlap: bool, root: Path) -> None:
    start = Startup("job")
    gone: list[int] = []
    never: list[str] = []
    start.step(lambda: 4, name="reader", lane="io:r", discard=gone.append)
    start.step(lambda reader: {}["colour"], name="features")
    start.step(lambda features: never.append("shard"), name="shard", discard=never.append)
    error = failure(start, overlap=overlap)
    assert error.message == "start-up 'job' failed in step 'features' on rank 0"
    (cause,) = error.exceptions
    assert isinstance(cause, KeyError)
    assert [note.rpartition(" after ")[0] for note in notes(cause)] == ["start-up step 'features' failed on rank 0"]
    assert gone == [4] and never == []
    spans = {span.name: span.error for span in Run.latest(root).spans if span.kind == "step"}
    assert spans == {"reader": "", "features": "KeyError"}


def test_several_steps_that_fail_are_all_told() -> None:
    start = Startup("job")
    both = threading.Barrier(2)

    def fails(error: Exception) -> None:
        both.wait(LONG)
        raise error

    start.step(functools.partial(fails, ValueError("a")), name="a", lane="io:a")
    start.step(functools.partial(fails, TypeError("b")), name="b", lane="io:b")
    error = failure(start)
    assert {type(each): len(notes(each)) for each in error.exceptions} == {ValueError: 1, TypeError: 1}
    assert error.subgroup(TypeError) is not None
    assert type(error.subgroup(TypeError)) is StartupFailed


def test_what_fails_while_values_are_discarded_is_told_too() -> None:
    start = Startup("job")

    def discard(value: object) -> None:
        raise OSError("busy")

    start.step(lambda: 1, name="reader", discard=discard)
    start.step(lambda reader: {}["colour"], name="features")
    assert [type(each) for each in failure(start).exceptions] == [KeyError, OSError]


def test_a_fork_step_that_fails() -> None:
    start = Startup("job")
    ran: list[str] = []
    start.step(lambda: {}["workers"], name="loader", uses="fork", lane="io:d")
    start.step(lambda loader: ran.append("batch"), name="batch", lane="io:d")
    error = failure(start)
    assert "in step 'loader'" in str(error) and ran == []


def test_a_step_fails_while_a_fork_step_waits_for_it() -> None:
    start = Startup("job")
    ran: list[str] = []
    both = threading.Barrier(2)

    def features() -> None:
        both.wait(LONG)
        execution = start._execution
        assert execution is not None
        with execution._changed:
            assert execution._changed.wait_for(lambda: execution._alone == ["loader"], LONG)
        raise ValueError("no")

    start.step(lambda: both.wait(LONG), name="config", lane="io:c")
    start.step(features, lane="io:f")
    start.step(lambda config: ran.append("loader"), name="loader", uses="fork", lane="io:d")
    assert "in step 'features'" in str(failure(start)) and ran == []


@pytest.mark.timeout(60, method="thread")
@pytest.mark.parametrize("overlap", [True, False])
def test_a_step_that_takes_too_long(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "TICK", 0.01)
    monkeypatch.setattr(lanes, "GRACE", 0.01)
    start = Startup("job", timeout=100)
    enough = threading.Event()
    start.step(lambda: enough.wait(LONG), name="features", lane="io:f", timeout=0.1)
    error = failure(start, overlap=overlap)
    enough.set()
    for thread in threading.enumerate():
        if thread.name.startswith("initopt-"):
            thread.join(LONG)
    (cause,) = error.exceptions
    assert isinstance(cause, StepTimeout) and cause.limit == 0.1
    assert "start-up step 'features' did not return within 0.1 s" in str(cause)
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL


def test_ctrl_c_ends_an_overlapped_start_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "GRACE", 0.01)
    start = Startup("job")
    gone: list[int] = []
    left = threading.Event()

    def features(reader: int) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        left.wait(LONG)

    start.step(lambda: 4, name="reader", lane="io:r", discard=gone.append)
    start.step(features)
    with pytest.raises(KeyboardInterrupt) as caught:
        start.run()
    left.set()
    for thread in threading.enumerate():
        if thread.name.startswith("initopt-"):
            thread.join(LONG)
    assert any("rank 0 was in start-up step 'features' for" in note for note in notes(caught.value))
    assert gone == [4]


@pytest.mark.parametrize("overlap", [True, False])
def test_ctrl_c_in_a_step_of_the_callers_thread(overlap: bool) -> None:
    start = Startup("job")
    gone: list[int] = []

    def loader(reader: int) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        threading.Event().wait(LONG)

    start.step(lambda: 4, name="reader", discard=gone.append)
    start.step(loader, uses="fork")
    with pytest.raises(KeyboardInterrupt) as caught:
        start.run(overlap=overlap)
    assert "start-up step 'loader' failed on rank 0" in notes(caught.value)[0]
    assert gone == [4]


def test_a_trainer_that_handles_sigterm_goes_on_to_do_so(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: seen.set())
    try:
        start = Startup("job")
        start.step(lambda: os.kill(os.getpid(), signal.SIGTERM) or seen.wait(LONG), name="features")
        assert start.run().features is True
    finally:
        handler = signal.signal(signal.SIGTERM, before)
    assert handler is not signal.SIG_DFL


STOPPED = """
import threading
from initopt import Startup
start = Startup("job")

@start.step(discard=lambda value: print("discarded", value, flush=True))
def reader(): return 4

@start.step(lane="io:f")
def features(reader):
    print("ready", flush=True)
    threading.Event().wait()

start.run()
"""


def test_sigterm_ends_the_process_and_says_where_it_was() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", STOPPED], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=LONG)
    assert process.returncode == -signal.SIGTERM
    assert err.startswith("initopt: start-up 'job' stopped by SIGTERM on rank 0 in step 'features' after ")
    assert out == "discarded 4\n"


def test_handlers_are_put_back() -> None:
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGALRM, signal.SIGCHLD)
    before = [signal.getsignal(number) for number in numbers]
    start = Startup("job")
    start.step(lambda: 1, name="a")
    start.step(lambda a: 1, name="b", uses="fork")
    start.step(lambda b: {}["c"], name="c", lane="io:c")
    failure(start)
    assert [signal.getsignal(number) for number in numbers] == before


def test_a_start_up_in_another_thread_than_the_main_one() -> None:
    """No signals there: neither the alarm nor the handler of SIGTERM is used."""
    start = Startup("job")
    start.step(lambda: threading.current_thread().name, name="loader", uses="fork")
    start.step(lambda loader: loader, name="model", lane="io:m")
    found: list[Any] = []
    thread = threading.Thread(
        target=lambda: found.extend(start.run(overlap=o).model for o in (True, False)), name="own"
    )
    thread.start()
    thread.join(LONG)
    assert found == ["own", "own"]


# Plugins


class _Raises:
    def __init__(self, hook: str) -> None:
        self.hook = hook

    @hookimpl
    def initopt_step_ended(self, span: Any) -> None:
        if self.hook == "ended":
            raise OSError("no disk")

    @hookimpl(tryfirst=True)
    def initopt_lane_context(self, lane: str) -> AbstractContextManager[object] | None:
        if self.hook == "made":
            raise OSError("no disk")
        return self if self.hook in ("entered", "left") else None  # type: ignore[return-value]

    def __enter__(self) -> None:
        if self.hook == "entered":
            raise OSError("no disk")

    def __exit__(self, *error: object) -> None:
        raise OSError("no disk")


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("hook", ["ended", "made", "entered", "left"])
def test_a_plugin_that_raises_fails_the_step(hook: str, overlap: bool, plugin: Callable[[object], None]) -> None:
    plugin(_Raises(hook))
    start = Startup("job")
    start.step(lambda: 1, name="model")
    error = failure(start, overlap=overlap)
    assert [type(each) for each in error.exceptions] == [OSError]
    assert "in step 'model'" in str(error)
    named = [note for note in notes(error.exceptions[0]) if "initopt_step_ended raised this after step 'model'" in note]
    assert len(named) == (hook == "ended")


def test_plugins_see_the_record_once_it_is_closed(plugin: Callable[[object], None]) -> None:
    class Reads:
        def __init__(self) -> None:
            self.last: list[str] = []

        @hookimpl
        def initopt_run_ended(self, path: Path) -> None:
            self.last.append(json.loads((path / "rank00000.jsonl").read_text().splitlines()[-1])["kind"])

    reads = Reads()
    plugin(reads)
    start = Startup("job")
    start.step(lambda: 1, name="model")
    start.run()
    assert reads.last == ["trailer"]


def test_a_lane_of_an_accelerator_needs_its_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    import pluggy

    bare = pluggy.PluginManager("initopt")
    bare.add_hookspecs(plugins.Hooks)
    monkeypatch.setattr(plugins, "installed", lambda: bare)
    start = Startup("job")
    start.step(lambda: 1, name="model", lane="cuda:0")
    (cause,) = failure(start).exceptions
    assert "no installed plugin runs lane 'cuda:0'" in str(cause)


def test_an_input_that_no_step_takes_is_refused() -> None:
    start = Startup("job")
    start.step(lambda batch=3: batch, name="reader")
    with pytest.raises(GraphError, match=r"takes the input 'bacth' \(did you mean 'batch'\?\)"):
        start.run(bacth=5)


def test_a_step_is_a_plain_function() -> None:
    async def later() -> None: ...

    start = Startup("job")
    with pytest.raises(GraphError, match="step 'later' is no plain function"):
        start.step(later)
    with pytest.raises(GraphError, match="start-up 'job' has timeout inf"):
        Startup("job", timeout=float("inf"))


def test_a_slip_of_the_pen_in_a_resource_is_named() -> None:
    start = Startup("job")
    start.step(lambda: 1, name="model", uses="rgn")
    with pytest.raises(GraphError, match=r"uses 'rgn' \(did you mean 'rng'\?\)"):
        start.graph()


def test_a_failed_start_up_is_an_exception_that_handlers_know() -> None:
    start = Startup("job")
    start.step(lambda: sys.exit(3), name="model")
    (error,) = failure(start).exceptions
    assert isinstance(error, RuntimeError) and str(error) == "SystemExit: 3"
    assert isinstance(error.__cause__, SystemExit)


def test_an_early_step_with_an_own_generator_is_not_run_twice(tmp_path: Path) -> None:
    """A ledger of another model says nothing about a loader that draws from its own generator."""
    drawn = []
    for width in (1, 2):
        own = torch.Generator()
        torch.manual_seed(7)
        start = Startup("job")
        start.step(lambda width=width: torch.rand(width), name="model", uses="rng")
        start.step(lambda own=own: torch.rand(1, generator=own), name="loader", uses=("rng", "fork"), early=True)
        drawn.append(start.run().loader)
    assert torch.equal(drawn[0], drawn[1])
