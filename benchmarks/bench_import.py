"""What `import initopt` adds to a worker that has torch already, each time in a fresh process.

`initopt` alone gives its names when they are asked for; `initopt.overlap` is what a trainer with a `Startup` pays.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

CHILD = """
import time
import {first}
began = time.perf_counter()
import {then}
print(time.perf_counter() - began)
"""


class ChildClock:
    """A clock that stands still except for the seconds that children report, so that only those are measured."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def import_of(self, then: str, first: str) -> None:
        """Import `first`, then `then` in a fresh process; only the second counts."""
        child = [sys.executable, "-c", CHILD.format(first=first, then=then)]
        # A worker finds the modules compiled, by the warm-up round here.
        env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        self.now += float(subprocess.run(child, check=True, text=True, capture_output=True, env=env).stdout)


clock = ChildClock()


@pytest.mark.parametrize(
    ("module", "first"),
    [
        ("initopt", "torch"),
        ("initopt.record", "torch"),
        ("initopt.overlap", "torch"),
        ("rich.table", "torch"),
        ("torch", "time"),
    ],
    ids=lambda name: name,
)
@pytest.mark.benchmark(group="import, seconds over what is there already", timer=clock)
def test_import(benchmark: BenchmarkFixture, module: str, first: str) -> None:
    benchmark.pedantic(  # type: ignore[no-untyped-call]
        clock.import_of, args=(module, first), rounds=5, iterations=1, warmup_rounds=1
    )
