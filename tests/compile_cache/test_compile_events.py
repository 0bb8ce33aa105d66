"""What torch's compiler does is seen, on the thread and in the step where it does it, and nothing stays behind."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.utils as kept
from torch import nn

import initopt
from initopt import Call, Compile, Recorder, Startup, recompiled_since
from initopt.compile_cache.compile_events import watching
from initopt.compiles import cache_use
from initopt.plugins.torchrec import trainer
from initopt.record import FIRST_STEP, Compiled
from initopt.runs import Run

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module", autouse=True)
def _one_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """That of the other tests of compiling, so that the compiler of C++ runs once per graph."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "inductor"))
        yield


@pytest.fixture(autouse=True)
def _fresh_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("INITOPT_ROOT", str(tmp_path))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Part(nn.Module):
    """A layer of a width that no other test has, so that its code is in no cache yet."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu()


class Broken(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.sin()
        torch._dynamo.graph_break()
        return x.cos()


def compiled(module: nn.Module, backend: Any = "eager") -> nn.Module:
    module.compile(backend=backend, dynamic=False)
    return module


def named(of: type[nn.Module]) -> str:
    """The name of its `forward`: on Python 3.10 a code object does not know its class."""
    return f"{of.__name__}.forward" if sys.version_info >= (3, 11) else "forward"


def place(of: type[nn.Module]) -> str:
    """What the place of the function ends in."""
    return f"{Path(__file__).name}:{of.forward.__code__.co_firstlineno}"


def test_a_graph_is_a_miss_at_first_and_a_hit_after_a_reset() -> None:
    seen: list[Compiled] = []
    x = torch.ones(3, 7)
    before = time.perf_counter()
    with watching(seen.append):
        compiled(Part(), "inductor")(x).sum().backward()
        torch._dynamo.reset()
        compiled(Part(), "inductor")(x).sum().backward()
    after = time.perf_counter()
    forward, backward, again = seen
    assert [(one.name, one.direction, cache_use(one)) for one in seen] == [
        (named(Part), "forward", "miss"),
        (named(Part), "backward", "miss"),
        (named(Part), "both", "hit"),
    ]
    assert all(one.place.endswith(place(Part)) for one in seen)
    assert (forward.operations, backward.operations, again.operations) == (2, 0, 2)
    assert before <= forward.start < forward.end <= backward.start < backward.end <= again.start < again.end <= after
    for one in seen:
        stages = one.dynamo + one.aot_autograd + one.backend
        assert 0 < stages <= one.end - one.start + 0.001  # the two clocks that torch and this read
        assert one.code_gen <= one.backend
        assert (one.failure, one.recompile_reason, one.breaks, one.restarts) == ("", "", (), ())
    assert min(forward.dynamo, forward.aot_autograd, forward.code_gen) > 0
    assert (backward.dynamo, again.backend) == (0, 0) and min(backward.backend, again.aot_autograd) > 0


def test_a_second_shape_names_the_guard() -> None:
    seen: list[Compiled] = []
    part = compiled(Part())
    with watching(seen.append):
        part(torch.ones(3, 7))
        moment = time.time()
        assert recompiled_since(moment) == ()
        part(torch.ones(5, 7))
    reason = "tensor 'x' size mismatch at index 0. expected 3, actual 5"
    assert [one.recompile_reason for one in seen] == ["", reason]
    # With nobody watching either.
    assert recompiled_since(moment) == (f"{named(Part)} ({seen[1].place}): {reason}",)
    assert recompiled_since(time.time()) == ()


def test_a_graph_break_has_its_reason_and_its_line() -> None:
    """Also after a reset, which clears torch's list of them. The rest of the function is a graph of its own."""
    seen: list[Compiled] = []
    with watching(seen.append):
        for _ in range(2):
            compiled(Broken())(torch.ones(3))
            torch._dynamo.reset()
    line = Broken.forward.__code__.co_firstlineno + 2
    assert [one.name for one in seen] == [named(Broken), f"{named(Broken)} from line {line}"] * 2
    for one in seen[::2]:
        (text,) = one.breaks
        assert text.startswith("Call to `torch._dynamo.graph_break()` (") and text.endswith(f"events.py:{line})")
        assert one.restarts == ()
    assert seen[1].breaks == seen[3].breaks == ()


def test_what_can_not_be_compiled_says_why() -> None:
    def refuses(graph: Any, inputs: Any) -> Any:
        raise NotImplementedError("no kernel\nfor this")

    seen: list[Compiled] = []
    with watching(seen.append), pytest.raises(Exception, match="no kernel"):
        compiled(Part(), refuses)(torch.ones(3, 7))
    (one,) = seen
    assert one.failure == "BackendCompilerFailed: backend='refuses' raised: NotImplementedError: no kernel"
    assert (one.name, one.operations) == (named(Part), 0)


def test_more_cases_than_allowed_are_named_after_their_function(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[Compiled] = []
    part = compiled(Part())
    moment = time.time()
    with watching(seen.append), torch._dynamo.config.patch(recompile_limit=1):
        for rows in (2, 3):
            part(torch.ones(rows, 7))
    assert [(one.name, one.failure) for one in seen] == [
        (named(Part), ""),
        (named(Part), "Unsupported: Dynamo recompile limit exceeded"),
    ]
    assert recompiled_since(moment) == ("frame 0/1: tensor 'x' size mismatch at index 0. expected 2, actual 3",)


def test_a_warm_up_is_recorded_in_its_step_and_on_its_lane(tmp_path: Path) -> None:
    """Its code never ran, and both directions were compiled at once."""
    part = Part(9)
    chosen = Compile(lambda m: {"part": m}, lambda device: {"part": Call((torch.empty(3, 9),))}, dynamic=False)
    chosen.apply(part)
    start = Startup("job")
    start.step(
        lambda: chosen.warm_up(part, torch.device("cpu")), name="warm_up", lane="io:c", uses="compile", stage="compile"
    )
    assert start.run().warm_up == 1
    run = Run.latest(tmp_path)
    (one,) = run.compiled
    assert (one.name, one.step, one.lane, one.direction) == (named(Part), "warm_up", "io:c", "both")
    (span,) = (span for span in run.spans if span.kind == "compile")
    (step,) = (span for span in run.spans if span.name == "warm_up")
    assert (span.stage, span.step, span.lane, span.start, span.end) == (
        "compile",
        "warm_up",
        "io:c",
        one.start,
        one.end,
    )
    assert step.start <= span.start < span.end <= step.end


def test_threads_that_compile_keep_their_names_apart(tmp_path: Path) -> None:
    with Recorder("j", mode="stock") as recorder, recorder.collectives():
        recorder.agree(0, 1)

        def work(width: int) -> None:
            with recorder.current_step(f"step {width}", lane=f"io:{width}"):
                compiled(Part(width))(torch.ones(1, width))

        threads = [threading.Thread(target=work, args=(width,)) for width in range(2, 6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    found = sorted((one.step, one.lane, one.name) for one in Run.latest(tmp_path).compiled)
    assert found == [(f"step {width}", f"io:{width}", named(Part)) for width in range(2, 6)]


def test_nothing_stays_behind() -> None:
    finders, before = list(sys.meta_path), kept.get_compilation_metrics()
    seen: list[Compiled] = []
    with watching(seen.append):
        compiled(Part())(torch.ones(2, 7))
    held = kept._compilation_metrics
    assert type(held) is deque and held.maxlen == kept.DEFAULT_COMPILATION_METRICS_LIMIT
    assert len(held) == min(len(before) + 1, held.maxlen)
    assert sys.meta_path == finders
    compiled(Part())(torch.ones(4, 7))
    assert len(seen) == 1


def test_who_watches_inside_a_watched_block_sees_it_and_ends_alone() -> None:
    outer: list[Compiled] = []
    inner: list[Compiled] = []
    listener = outer.append
    part = compiled(Part())
    with watching(listener):
        with watching(inner.append), watching(listener):
            part(torch.ones(2, 7))
        part(torch.ones(3, 7))
    part(torch.ones(4, 7))
    assert (len(outer), len(inner)) == (2, 1)
    assert type(kept._compilation_metrics) is deque


def test_a_listener_that_fails_hears_no_more(caplog: pytest.LogCaptureFixture) -> None:
    asked: list[Compiled] = []

    def fails(one: Compiled) -> None:
        asked.append(one)
        raise OSError("gone")

    part = compiled(Part())
    with caplog.at_level(logging.WARNING, logger="initopt"), watching(fails):
        part(torch.ones(2, 7))
        part(torch.ones(3, 7))
    assert len(asked) == 1
    (said,) = (record.getMessage() for record in caplog.records if record.name == "initopt")
    assert said == "the compiler is not watched any more, the job goes on: OSError: gone"


@pytest.mark.parametrize("missing", ["_compilation_metrics", "graph_break_reasons"])
def test_a_torch_that_keeps_its_numbers_elsewhere_is_left_alone(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Compiled] = []
    finders = list(sys.meta_path)
    with monkeypatch.context() as patch:
        patch.delattr(kept, missing)
        with watching(seen.append):
            pass
    assert (seen, sys.meta_path) == ([], finders)
    assert type(kept._compilation_metrics) is deque


def test_without_its_numbers_nothing_is_known_to_have_been_compiled_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    part = compiled(Part())
    for rows in (2, 3):
        part(torch.ones(rows, 7))
    assert len(recompiled_since(0.0)) >= 1
    monkeypatch.setattr(kept, "_compilation_metrics", [object()])
    assert recompiled_since(0.0) == ()
    monkeypatch.delattr(kept, "_compilation_metrics")
    assert recompiled_since(0.0) == ()


def test_numbers_that_are_not_there_end_the_watching(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[Compiled] = []
    with caplog.at_level(logging.WARNING, logger="initopt"), watching(seen.append):
        kept._compilation_metrics.append(object())  # type: ignore[arg-type]
        kept._compilation_metrics.pop()
        compiled(Part())(torch.ones(2, 7))
    assert seen == []
    assert len([record for record in caplog.records if "not watched any more" in record.getMessage()]) == 1


def test_a_list_that_somebody_else_has_exchanged_stays() -> None:
    seen: list[Compiled] = []
    try:
        with watching(seen.append):
            kept.set_compilation_metrics_limit(8)
        assert kept._compilation_metrics.maxlen == 8
    finally:
        kept.set_compilation_metrics_limit(kept.DEFAULT_COMPILATION_METRICS_LIMIT)


FRESH = """
import sys
import torch
from torch import nn
import initopt

def f(x):
    return x + 1

with initopt.Recorder("fresh", mode="stock") as recorder, recorder.collectives():
    with initopt.step("model"):
        nn.Linear(2, 2)
    recorder.digest("not imported", str("torch._dynamo" in sys.modules))
    with initopt.step(initopt.FIRST_STEP):
        torch.compile(f, backend="eager")(torch.ones(2))
finders = [type(finder).__module__ for finder in sys.meta_path]
assert not any(name.startswith("initopt") for name in finders), finders
"""


def test_a_script_that_imports_the_compiler_late_is_seen_and_not_made_to(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(FRESH)
    done = subprocess.run([sys.executable, str(script)], text=True, capture_output=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run = Run.latest(tmp_path)
    assert [digest.sha256 for digest in run.digests] == ["False"]
    assert [(one.name, one.place, one.step) for one in run.compiled] == [("f", "script.py:7", FIRST_STEP)]


def test_the_trainer_names_the_guard_that_failed() -> None:
    def never() -> Any:
        raise AssertionError("is not run")

    part = Part()
    ahead = Compile(lambda m: {"part": m}, lambda device: {"part": Call((torch.empty(3, 7),))}, dynamic=False)
    ahead.apply(part)
    start = trainer(model=never, loader=never, dense_optimizer=lambda parameters: None, compile=ahead)
    with torch.no_grad():
        ahead.warm_up(part, torch.device("cpu"))
        warmed, began = ahead.graphs(), time.time()
        start._after_first_step(warmed, began)
        part(torch.ones(5, 7))
    with pytest.warns(UserWarning, match="the first batch compiled 1 more graphs than the warm-up had") as caught:
        start._after_first_step(warmed, began)
    guard = "tensor 'x' size mismatch at index 0. expected 3, actual 5"
    (said,) = (str(warning.message) for warning in caught)
    assert said.endswith(f"{place(Part)}): {guard}") and f"does not match what the model passes, {named(Part)}" in said


def test_what_the_plugin_asks_for_is_a_public_name() -> None:
    assert initopt.recompiled_since is recompiled_since
