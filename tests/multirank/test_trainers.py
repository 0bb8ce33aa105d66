"""Trainers of public structures, untouched: the same output and end, their steps found."""

from __future__ import annotations

from pathlib import Path

import pytest

from initopt.chain import finished_ranks, outer_steps
from initopt.optimizations import NAMES
from initopt.runs import Run
from tests.multirank.forked import fork_ranks
from tests.multirank.launch import launch
from tests.multirank.trainer_ranks import TRAINERS, rank_of, spawned_rank_of

SMALL = ("--steps", "3", "--rows", "500", "--batch-size", "64")
DAY = ("--samples", "2048")
LIMIT = 80.0


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all data is. What ranks import is imported here, once."""
    import benchmarks.trainers.easyrec
    import benchmarks.trainers.hstu  # noqa: F401

    return tmp_path_factory.mktemp("trainers")


@pytest.fixture(autouse=True)
def _data(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INITOPT_DATA", str(place / "data"))


def ranks(root: Path, names: tuple[str, ...] | None, script: str, *options: str) -> list[str]:
    found: list[str] = fork_ranks(rank_of, str(root), names, script, *SMALL, *options, timeout=LIMIT)
    return found


def check(run: Run, *wanted: str) -> None:
    """Every rank has done its first step, and these steps before it, in this order."""
    assert finished_ranks(run) == [0, 1]
    assert run.warnings == ()
    for rank in (0, 1):
        names = [span.name for span in outer_steps(run.of_rank(rank))]
        left = iter(names)
        assert all(name in left for name in (*wanted, "first_step")), names


def meetings(run: Run) -> list[str]:
    """Those that make the model."""
    return [span.op for span in run.of_rank(0) if span.kind == "collective" and span.step in ("sharding_plan", "dmp")]


def applied(run: Run) -> set[str]:
    return {one.name for one in run.optimized if one.applied}


def test_golden(tmp_path: Path) -> None:
    stock = ranks(tmp_path, None, "golden.py")
    assert ["losses" in line for line in stock] == [True, True]
    assert ranks(tmp_path, (), "golden.py") == stock
    assert ranks(tmp_path, NAMES, "golden.py") == stock
    recorded, optimized = Run.load(tmp_path / "0001"), Run.load(tmp_path / "0002")
    for run in (recorded, optimized):
        check(run, "process_group", "model", "dmp")
        # DistributedModelParallel makes the plan itself.
        assert "sharding_plan" in {span.name for span in run.of_rank(0)}
    assert len(meetings(optimized)) < len(meetings(recorded))
    assert {"plan", "eliminate"} <= applied(optimized)


def test_dlrm_main_with_three_pipelines_in_fresh_processes(tmp_path: Path) -> None:
    words = ("dlrm_main.py", *DAY, "--three-pipelines")
    stock = ranks(tmp_path, None, *words)
    # Log lines of rank 0, each after a barrier.
    assert [text.count(":::LOG") for text in stock] == [3, 0]
    assert ranks(tmp_path, NAMES, *words) == stock
    optimized = Run.load(tmp_path / "0001")
    job = launch(
        ["-m", "initopt.run", "--root", str(tmp_path), str(TRAINERS / words[0]), *SMALL, *words[1:]], timeout=LIMIT
    ).check()
    assert [rank.stdout for rank in job.ranks] == stock
    recorded = Run.load(tmp_path / "0002")
    check(recorded, "imports", "process_group", "model", "sharding_plan", "dmp", "loader")
    check(optimized, "process_group", "model", "sharding_plan", "dmp", "loader")
    assert len(meetings(optimized)) < len(meetings(recorded))
    for rank in (0, 1):
        spans = recorded.of_rank(rank)
        assert [span.step for span in spans if span.name == "first_batch"] == ["first_step"]
        assert {span.step for span in spans if span.op == "all_to_all_single"} <= {"first_step", ""}
        assert {span.step for span in spans if span.op == "broadcast_object_list"} == {"sharding_plan", "dmp"}
    for run in (recorded, optimized):
        # The trainer's own stay.
        assert [span.op for span in run.of_rank(0) if span.op == "barrier"] == ["barrier"] * 3


def test_easyrec_that_continues_from_a_checkpoint(tmp_path: Path) -> None:
    words = ("benchmarks.trainers.easyrec", *DAY, "--model-dir", str(tmp_path / "model"))
    first = ranks(tmp_path, None, *words)
    stock = ranks(tmp_path, None, *words, "--continue")
    assert stock != first
    assert ranks(tmp_path, (), *words, "--continue") == stock
    assert ranks(tmp_path, NAMES, *words, "--continue") == stock
    for number in ("0001", "0002"):
        run = Run.load(tmp_path / number)
        check(run, "process_group", "loader", "model", "sharding_plan", "dmp", "thrown_away_step", "checkpoint")
        assert [span.op for span in run.of_rank(0) if span.op == "barrier"] == ["barrier"]


def test_hstu_whose_ranks_are_spawned_and_validate_first(tmp_path: Path) -> None:
    stock = fork_ranks(spawned_rank_of, steps=3, timeout=LIMIT)
    words = (str(TRAINERS / "hstu.py"), "--steps", "3", "--validate-first")
    job = launch(["-m", "initopt.run", "--root", str(tmp_path), "--optimize", *words], ranks=1, timeout=LIMIT).check()
    assert sorted(job.ranks[0].stdout.splitlines()) == sorted("".join(stock).splitlines())
    run = Run.latest(tmp_path)
    check(
        run,
        "imports",
        "process_group",
        "new_group",
        "sharding_plan",
        "dmp",
        "loader",
        "first_batch",
        "loader",
        "first_batch",
    )
    # The trainer as it is has an object broadcast for its plan, and a gather for each table.
    assert {"plan", "eliminate"} <= applied(run)
    assert meetings(run) == ["all_gather_into_tensor"] * 2
