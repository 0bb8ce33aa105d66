"""The trained state with initopt equals the stock trainer's, bit for bit, on real gloo ranks."""

from __future__ import annotations

import itertools
import json
import random
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from initopt.compiles import compiled_on, total
from initopt.runs import Run
from tests.multirank.forked import fork_ranks
from tests.multirank.launch import REPOSITORY, launch

SHARDINGS = ("table_wise", "column_wise", "row_wise", "data_parallel")


@pytest.fixture(autouse=True)
def _folders(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INITOPT_ROOT", str(tmp_path / "runs"))
    monkeypatch.setenv("INITOPT_DATA", str(tmp_path_factory.getbasetemp() / "criteo"))


def config(**changes: Any) -> Any:
    from benchmarks.trainers.dlrm_model import Config

    return Config(**{"rows": 200, "dim": 16, "batch_size": 16, "samples": 2_048, "compile": False, **changes})


def stock(config: Any) -> Any:
    from benchmarks.trainers import dlrm_stock

    return dlrm_stock.train(config)


def started(config: Any, *, overlap: bool = True, delays: int | None = None) -> Any:
    """The initopt trainer; with `delays` every step starts after a random wait that this seed and the rank decide."""
    from benchmarks.trainers import dlrm_initopt
    from initopt import plugins

    if delays is not None:
        plugins.register(plugins.installed(), Delays(delays), "delays")
    return dlrm_initopt.train(config, overlap=overlap)


class Delays:
    """A plugin that lets each step wait at random."""

    def __init__(self, seed: int) -> None:
        import os

        # Not the generators that the trainer draws from.
        self._random = random.Random(f"{seed} {os.environ['RANK']}")

    @contextmanager
    def _late(self) -> Any:
        time.sleep(self._random.choice((0.0, 0.0, 0.02, 0.1)))
        yield

    from initopt.plugins import hookimpl as _hookimpl

    @_hookimpl(tryfirst=True)
    def initopt_lane_context(self, lane: str) -> Any:
        return self._late()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_trained_state_equals_stock(sharding: str, ranks: int) -> None:
    chosen = config(sharding=sharding)
    expected = fork_ranks(stock, chosen, ranks=ranks, timeout=100)
    assert len({rank["trained_state"] for rank in expected}) > 1 or sharding == "data_parallel"

    assert fork_ranks(started, chosen, overlap=False, ranks=ranks, timeout=100) == expected
    first = fork_ranks(started, chosen, ranks=ranks, timeout=100)
    assert first == expected
    # From the second start on the loader starts from the ledger.
    assert fork_ranks(started, chosen, ranks=ranks, timeout=100) == expected


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(4, 20), marks=pytest.mark.long)])
def test_trained_state_equals_stock_under_random_delays(seeds: range) -> None:
    chosen = config(workers=2)
    expected = fork_ranks(stock, chosen, timeout=100)
    different = [seed for seed in seeds if fork_ranks(started, chosen, delays=seed, timeout=100) != expected]
    assert different == []


def test_another_seed_trains_to_another_state() -> None:
    """The comparison can fail: the digest sees one other seed, and so does the ledger that the first seed left."""
    first = fork_ranks(started, config(seed=0))
    fork_ranks(started, config(seed=0))
    other = fork_ranks(started, config(seed=1))
    assert [rank["trained_state"] for rank in other] != [rank["trained_state"] for rank in first]
    assert other == fork_ranks(stock, config(seed=1))


def launched(disk: str, folder: Path, trainer: str, *options: str, compiler: bool = True) -> list[Any]:
    """A trainer of small size in fresh processes (one that was forked may wait for ever for a compiler's thread)."""
    trainers = REPOSITORY / "benchmarks" / "trainers"
    script = [str(trainers / "disk.py"), disk, str(folder), trainer, *options]
    size = ["--rows", "200", "--batch-size", "16", "--samples", "2048"]
    before = [] if compiler else [str(Path(__file__).with_name("without_compiler.py"))]
    job = launch([*before, *script, *size], ranks=3, timeout=350).check()
    return [json.loads(rank.stdout.splitlines()[-1]) for rank in job.ranks]


@pytest.mark.long
@pytest.mark.timeout(400)
def test_compiled_parts_equal_stock(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The warm-up leaves no trace, one rank compiles, and the code that it compiled is the code that trains.

    Three ranks: of two the order in which gradients are added up makes no difference.
    """
    # Loader workers make sockets in there, whose names must not be long.
    disks = tmp_path_factory.mktemp("disk")
    expected = launched("shared", disks / "stock", "dlrm_stock.py")
    assert launched("own", disks / "cold", "dlrm_initopt.py", "--shared-store") == expected
    # Every disk is empty again, and all there is is what the first start stored.
    moved_to = disks / "moved"
    assert launched("own", moved_to, "dlrm_initopt.py", "--shared-store", compiler=False) == expected

    by_stock, cold, moved = (Run.load(tmp_path / "runs" / f"{number:04}") for number in (1, 2, 3))
    for rank in range(3):
        # Stock compiles in its first step, every backward graph when it comes to it. Inside DDP torch cuts a graph up.
        turns = compiled_on(by_stock, rank)
        assert {turn.step for turn in turns} == {"first_step"}
        forward = [turn.name for turn in turns if turn.direction == "forward"]
        assert forward == ["DenseArch.forward", "InteractionArch.forward", "OverArch.forward"]
        assert {turn.name for turn in turns if turn.direction == "backward"} == set(forward)
        assert ["DDPOptimizer" in "".join(turn.breaks) for turn in turns[:3]] == [False, False, True]
        # With initopt all of it is there before.
        for run in (cold, moved):
            turns = compiled_on(run, rank)
            assert {(turn.step, turn.lane, turn.direction) for turn in turns} == {
                ("compile_warmup", "io:compile", "both")
            }
            found = total(turns)
            assert (found.graphs, found.recompiled, found.failed) == (3, 0, 0)
            steps = {span.name for span in run.of_rank(rank) if span.stage == "compile" and span.kind == "step"}
            assert steps >= {"compile_parts", "compile_cache", "compile_load", "compile_warmup", "compiled"}
    assert sorted(one.role for one in cold.compile_caches) == ["follower", "follower", "leader"]
    assert not any(one.hit for one in cold.compile_caches)
    [led] = [one.rank for one in cold.compile_caches if one.role == "leader"]
    for run, rank in itertools.product((cold, moved), range(3)):
        use = "miss" if (run, rank) == (cold, led) else "hit"
        turns = compiled_on(run, rank)
        assert {turn.fx_graph_cache for turn in turns} == {use}
        # What was cut up for DDP does not go through this cache, in stock neither.
        assert [turn.aot_autograd_cache for turn in turns] == [use, use, "bypass"]
    assert all(one.hit and one.files for one in moved.compile_caches)
