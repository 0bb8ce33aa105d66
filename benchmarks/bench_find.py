"""What `initopt collectives` takes to find what can be left out: 10,000 steps, 500 collectives a rank."""

from __future__ import annotations

from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from initopt.comm_elim.passes import find
from initopt.record import Span
from initopt.runs import Run
from tests.comm_elim.recorded import EC, FLAG, OWN, TABLES, Script

CALLS = (("broadcast", TABLES), ("all_gather_object", EC), ("broadcast_object_list", FLAG), ("barrier", OWN))
MEETINGS = 500
STEPS = 20
"""Between two meetings."""


@pytest.fixture
def run(tmp_path: Path, ranks: int) -> Run:
    script = Script(ranks)
    for meeting in range(MEETINGS):
        for rank in range(ranks):
            for step in range(STEPS):
                begun = script.now[rank]
                script.now[rank] = begun + 0.001 * (1 + (meeting + step + rank) % 3)
                script.spans[rank].append(Span(f"step {meeting}.{step}", begun, script.now[rank], rank))
        op, callers = CALLS[meeting // 10 % len(CALLS)]
        script.meet(op, callers, digest=f"{meeting:x}", root=0 if op.startswith("broadcast") else -1, step="")
    return script.run(tmp_path, steps=False)


@pytest.mark.benchmark(group="find what can be left out: 10,000 steps, 500 collectives a rank")
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_find(benchmark: BenchmarkFixture, run: Run) -> None:
    found = benchmark.pedantic(find, args=(run,), rounds=3, iterations=1)
    assert found.findings
