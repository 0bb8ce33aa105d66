"""What recording costs: a step, a collective, against the same work unrecorded and under torch's own profiler.

The work is nothing, or an all-reduce of one number on a group of one rank, so that all that is measured is the cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from pytest_benchmark.fixture import BenchmarkFixture

import initopt
from initopt import Recorder

CALLS = 200
"""Recorded calls in one measured round."""


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    """A recorder that writes to disk, as it does from the moment the ranks have agreed on a run."""
    recorder = Recorder("cost", mode="stock", root=tmp_path)
    recorder.agree(0, 1)
    yield recorder
    recorder.close()


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def measure(benchmark: BenchmarkFixture, work: Callable[[], object]) -> None:
    def round_of_calls() -> None:
        for _ in range(CALLS):
            work()

    benchmark.pedantic(round_of_calls, rounds=20, iterations=1, warmup_rounds=1)  # type: ignore[no-untyped-call]
    if benchmark.stats is not None:  # None with --benchmark-disable
        benchmark.extra_info["us_per_call"] = round(1e6 * benchmark.stats.stats.median / CALLS, 2)


@pytest.mark.benchmark(group="one step")
class TestStep:
    def nothing(self, around: Callable[[str], AbstractContextManager[object]]) -> Callable[[], None]:
        def work() -> None:
            with around("step"):
                pass

        return work

    def test_unrecorded(self, benchmark: BenchmarkFixture) -> None:
        measure(benchmark, self.nothing(lambda _name: nullcontext()))

    def test_named_without_a_recorder(self, benchmark: BenchmarkFixture) -> None:
        measure(benchmark, self.nothing(initopt.step))

    def test_recorded(self, benchmark: BenchmarkFixture, recorder: Recorder) -> None:
        measure(benchmark, self.nothing(recorder.span))

    def test_torch_profiler(self, benchmark: BenchmarkFixture) -> None:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            measure(benchmark, self.nothing(torch.profiler.record_function))


@pytest.mark.benchmark(group="one collective")
@pytest.mark.usefixtures("one_rank")
class TestCollective:
    def test_unrecorded(self, benchmark: BenchmarkFixture) -> None:
        value = torch.zeros(1)
        measure(benchmark, lambda: dist.all_reduce(value))

    def test_recorded(self, benchmark: BenchmarkFixture, recorder: Recorder) -> None:
        value = torch.zeros(1)
        with recorder.collectives():
            measure(benchmark, lambda: dist.all_reduce(value))
