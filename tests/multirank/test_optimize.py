"""`initopt.run --optimize` on real ranks: the same training, fewer meetings, one fill, and nothing left afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from initopt.chain import finished_ranks
from initopt.comm_elim.left_out import left_out
from initopt.compile_cache import board, instruction_sets
from initopt.hooks import HIDDEN
from initopt.optimizations import NAMES
from initopt.optimize import compiled
from initopt.record import Optimized
from initopt.runs import Run
from tests.multirank.forked import fork_ranks
from tests.multirank.launch import REPOSITORY
from tests.multirank.optimized_ranks import LARGE, Outcome, compiling_rank, rank_of

LIMIT = 60.0


def start(kind: str, root: Path, names: tuple[str, ...] | None, **more: object) -> list[Outcome]:
    found: list[Outcome] = fork_ranks(rank_of, kind, str(root), names, timeout=LIMIT, **more)
    return found


def meetings(run: Run, rank: int) -> list[str]:
    return [
        span.op for span in run.of_rank(rank) if span.kind == "collective" and span.step in ("sharding_plan", "dmp")
    ]


def said(run: Run, rank: int = 0) -> dict[tuple[str, bool], str]:
    found: dict[tuple[str, bool], list[Optimized]] = {}
    for one in run.optimized:
        if one.rank == rank:
            found.setdefault((one.name, one.applied), []).append(one)
    return {key: "; ".join(one.text for one in all_) for key, all_ in found.items()}


@pytest.mark.parametrize("kind", ["default plan", "own plan", "own classes"])
def test_the_training_is_the_same_with_fewer_meetings(kind: str, tmp_path: Path) -> None:
    stock = start(kind, tmp_path, None)
    recorded = start(kind, tmp_path, ())
    optimized = start(kind, tmp_path, NAMES)
    trained = [one.trained() for one in stock]
    assert [one.trained() for one in recorded] == trained
    assert [one.trained() for one in optimized] == trained
    assert [one.left for one in (*recorded, *optimized)] == [[]] * 4
    before, after = Run.load(tmp_path / "0001"), Run.load(tmp_path / "0002")
    assert before.optimized == ()
    for rank in (0, 1):
        was, now, told = meetings(before, rank), meetings(after, rank), said(after, rank)
        if kind == "own classes":
            assert now == was
            assert "Planner is a planner of the trainer's own" in told["plan", False]
            assert "Parallel" in told["eliminate", False]
        else:
            assert was.count("broadcast_object_list") == 2
            # The plan is compared, and all else; the data-parallel tables are sent.
            assert set(now) == {"all_gather_single", "broadcast"}
            assert len(now) <= 3 < len(was)
            assert "sharding plan" in told["plan", True]
            assert "by ddp_sync" in told["eliminate", True]
            assert "ddp_sync" in {one.name for one in left_out(after)}
    if kind == "default plan":
        # One rank has the large table.
        assert sorted(one.fills for one in stock) == sorted(one.fills for one in recorded) == [0, 2]
        assert sorted(one.fills for one in optimized) == [0, 1]
        rank = max((0, 1), key=lambda rank: stock[rank].fills)
        assert said(after, rank)["fill-once", True] == f"{LARGE * 64 * 4 / 1e6:.1f} MB of tables were not filled twice"


def test_an_error_in_there_looks_as_in_torchrec(tmp_path: Path) -> None:
    stock, optimized = start("fails", tmp_path, None), start("fails", tmp_path, NAMES)
    assert [one.error for one in optimized] == ["these weights can't be made"] * 2
    # The bare `raise` of Python 3.10 brings frames back.
    back = (HIDDEN, "applied.py") if sys.version_info < (3, 11) else ()
    frames = [[frame for frame in one.frames if frame[0] not in back] for one in optimized]
    assert frames == [one.frames for one in stock]


@pytest.mark.parametrize(
    ("disable", "why"),
    [
        ("plan", "ranks were started with other options or versions"),
        ("everything", "not all ranks have --optimize"),
    ],
)
def test_all_ranks_change_their_meetings_or_none_does(disable: str, why: str, tmp_path: Path) -> None:
    stock = start("own plan", tmp_path, None)
    mixed = start("own plan", tmp_path, NAMES, disable=disable, patience=0.5)
    assert [one.trained() for one in mixed] == [one.trained() for one in stock]
    told = said(Run.load(tmp_path / "0001"))
    assert why in told["eliminate", False]
    assert why in told["plan", False]


def torchrun(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
    where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--monitor-interval", "0.1"]
    return subprocess.run(
        [*command, *where, "-m", "initopt.run", "--root", str(root), *words],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=80,
    )


def test_under_torchrun_and_its_restart_the_store_is_reached_early(tmp_path: Path) -> None:
    # Only before there is a group: torch's own ranks may meet stale addresses of the first attempt in the store.
    done = torchrun(tmp_path, "--optimize", "-m", "tests.multirank.plain_trainer", "env", "restart-early")
    assert done.returncode == 0, done.stderr
    ranks = sorted((json.loads(line) for line in done.stdout.splitlines()), key=lambda line: line["rank"])
    assert [line["hooked"] for line in ranks] == [[], []]
    assert [line["environment"] for line in ranks] == [["RANK"], ["RANK"]]
    # The data set, the model and the batches are the same on both.
    assert ranks[0]["losses"] == ranks[1]["losses"]
    # The script's error comes first, and whole.
    assert "RuntimeError: the first attempt fails" in done.stderr
    assert "initopt: " not in done.stderr.partition("RuntimeError: the first attempt fails")[0]
    run = Run.latest(tmp_path)
    assert finished_ranks(run) == [0, 1]
    for rank in (0, 1):
        told = said(run, rank)
        assert told["rendezvous", True] == "the job's store was reached during the imports"
        assert told["plan", False] == "no sharding planner made a plan"
        assert told["compile", False].startswith("nothing was compiled")


def test_one_rank_compiles_for_all_and_a_start_on_an_empty_disk_for_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What the C++ compiler can do takes seconds to find out, and is tested elsewhere.
    monkeypatch.setattr(instruction_sets, "ask", lambda: None)
    monkeypatch.setattr(instruction_sets, "verdicts", lambda: {"any": True})
    monkeypatch.setattr(board, "POLL", 0.01)
    monkeypatch.setattr(compiled, "share_of_rank", lambda: 1)
    runs = tmp_path / "runs"

    def started(folder: str, names: tuple[str, ...] | None) -> list[dict[str, object]]:
        found: list[dict[str, object]] = fork_ranks(
            compiling_rank, str(runs), str(tmp_path / folder), names, timeout=LIMIT
        )
        return found

    stock, first = started("stock", None), started("first", NAMES)
    again, in_use = started("second", NAMES), started("stock", NAMES)
    losses = [one["losses"] for one in stock]
    for one in (first, again, in_use):
        assert [rank["losses"] for rank in one] == losses
        assert [rank["left"] for rank in one] == [[], []]
    assert sorted(int(str(rank["misses"])) for rank in first)[0] == 0
    assert sum(int(str(rank["misses"])) for rank in first) > 0
    assert [rank["misses"] for rank in again] == [0, 0]
    told = [[said(Run.load(runs / number), rank) for rank in (0, 1)] for number in ("0001", "0002", "0003")]
    for rank in (0, 1):
        assert "compiles were made" in told[0][rank]["compile", True]
        assert told[1][rank]["compile", True].startswith("compiled code of an earlier start was there")
        assert "is in use, and stays so" in told[2][rank]["compile", False]
    assert {one.text for one in Run.load(runs / "0001").advised} == {
        "the parts of a model that `initopt.Compile` is told compile before the first batch is there"
    }
