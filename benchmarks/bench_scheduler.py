"""What the scheduler itself costs: graphs of steps that do nothing, against graphlib and dask on the same graphs.

Steps that do nothing make every microsecond the scheduler's own. The three don't do the same work: `Graph` also checks
names, lanes and resources and keeps one order of collectives; `Startup` has a thread per lane, deadlines and a failure
protocol, and writes a record of every step to disk; dask has a pool of threads. `us_per_step` in the extra info is the
median divided by the number of steps.
"""

from __future__ import annotations

import graphlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask.order
import dask.threaded
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from initopt.graph import Graph, Step
from initopt.overlap import Startup
from initopt.simulate import simulate

LANES = ("main", "comms", "io:data", "io:ckpt")
SIZES = (10, 100, 1_000, 10_000)


def steps_of(size: int) -> list[Step]:
    """Steps that need up to three of the last fifty before them, spread over the lanes, always the same."""
    draw = random.Random(size)
    steps = []
    for i in range(size):
        needs = {f"step_{draw.randrange(max(0, i - 50), i)}" for _ in range(draw.randrange(4))} if i else set()
        steps.append(Step(f"step_{i}", needs=tuple(sorted(needs)), lane=draw.choice(LANES)))
    return steps


def nothing(*_values: object) -> None:
    """The work of a step."""


def dask_graph(graph: Graph) -> dict[Any, Any]:
    """The same steps and edges as tasks. What only comes after is a value here: dask knows no other order."""
    return {name: (nothing, *dict.fromkeys(e.before for e in graph.predecessors(name))) for name in graph}


def plain_graph(graph: Graph) -> dict[str, list[str]]:
    return {name: list(dict.fromkeys(edge.before for edge in graph.predecessors(name))) for name in graph}


def startup_of(steps: list[Step]) -> Startup:
    """A start-up of the same steps. Its functions have the needs as parameters, as a user's would."""
    start = Startup("cost")
    for step in steps:
        scope: dict[str, Callable[..., None]] = {}
        exec(f"def {step.name}({', '.join(step.needs)}): pass", scope)
        start.step(lane=step.lane)(scope[step.name])
    return start


def measure(benchmark: BenchmarkFixture, size: int, work: Callable[[], object]) -> None:
    rounds = 3 if size == max(SIZES) else 7
    benchmark.pedantic(work, rounds=rounds, iterations=1, warmup_rounds=1)  # type: ignore[no-untyped-call]
    if benchmark.stats is not None:  # None with --benchmark-disable
        benchmark.extra_info["us_per_step"] = round(1e6 * benchmark.stats.stats.median / size, 2)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.benchmark(group="build, check and order")
class TestOrder:
    def test_initopt(self, benchmark: BenchmarkFixture, size: int) -> None:
        steps = steps_of(size)
        measure(benchmark, size, lambda: Graph(steps).order())

    def test_graphlib(self, benchmark: BenchmarkFixture, size: int) -> None:
        plain = plain_graph(Graph(steps_of(size)))
        measure(benchmark, size, lambda: list(graphlib.TopologicalSorter(plain).static_order()))

    def test_dask(self, benchmark: BenchmarkFixture, size: int) -> None:
        tasks = dask_graph(Graph(steps_of(size)))
        measure(benchmark, size, lambda: dask.order.order(tasks))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.benchmark(group="plan: order, lower bound, simulated schedule")
def test_plan(benchmark: BenchmarkFixture, size: int) -> None:
    graph = Graph(steps_of(size))
    seconds = dict.fromkeys(graph, 1.0)
    measure(benchmark, size, lambda: (graph.slack(seconds), graph.lower_bound(seconds), simulate(graph, seconds)))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.benchmark(group="run steps that do nothing")
class TestRun:
    @pytest.mark.parametrize("overlap", [True, False], ids=["overlapped", "serial"])
    def test_initopt(
        self,
        benchmark: BenchmarkFixture,
        size: int,
        overlap: bool,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setenv("INITOPT_ROOT", str(tmp_path))
        start = startup_of(steps_of(size))
        measure(benchmark, size, lambda: start.run(overlap=overlap))

    def test_graphlib(self, benchmark: BenchmarkFixture, size: int) -> None:
        plain = plain_graph(Graph(steps_of(size)))

        def run() -> None:
            sorter = graphlib.TopologicalSorter(plain)
            sorter.prepare()
            while sorter.is_active():
                for name in sorter.get_ready():
                    nothing()
                    sorter.done(name)

        measure(benchmark, size, run)

    def test_dask(self, benchmark: BenchmarkFixture, size: int) -> None:
        tasks = dask_graph(Graph(steps_of(size)))
        measure(benchmark, size, lambda: dask.threaded.get(tasks, list(tasks), num_workers=len(LANES)))
