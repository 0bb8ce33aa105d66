"""Trainers that know nothing of initopt, recorded on real ranks: the same losses and ends, and the stages found."""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from initopt.chain import finished_ranks, outer_steps
from initopt.hooks import HIDDEN
from initopt.report import summary
from initopt.runs import Run
from tests.multirank.launch import JobOutput, launch

TRAINER = ("-m", "tests.multirank.plain_trainer")
LIMIT = 80.0


def start(root: Path, *words: str, ranks: int = 2, recorded: bool = True) -> JobOutput:
    command = ["-m", "initopt.run", "--root", str(root), *words] if recorded else list(words)
    return launch(command, ranks, timeout=LIMIT)


def printed(job: JobOutput) -> list[dict[str, object]]:
    lines = [line for rank in job.ranks for line in rank.stdout.splitlines() if line.startswith("{")]
    return sorted((json.loads(line) for line in lines), key=lambda line: line["rank"])


def steps(run: Run, rank: int) -> list[str]:
    return [span.name for span in outer_steps(run.of_rank(rank))]


def in_order(wanted: Sequence[str], names: Sequence[str]) -> bool:
    left = iter(names)
    return all(name in left for name in wanted)


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    """Those of the trainer as it is; they are the same on both ranks."""
    job = start(tmp_path_factory.mktemp("stock"), *TRAINER, "env", recorded=False).check()
    return [line["losses"] for line in printed(job)]


def check(run: Run, lines: list[dict[str, object]], losses: list[object]) -> None:
    assert [line["losses"] for line in lines] == losses
    assert [line["hooked"] for line in lines] == [[], []]
    assert finished_ranks(run) == [0, 1]
    assert run.warnings == ()
    for rank in (0, 1):
        wanted = [
            "imports",
            "process_group",
            "new_group",
            "model",
            "first_batch",
            "loader",
            "first_batch",
            "first_step",
        ]
        assert in_order(wanted, steps(run, rank)), steps(run, rank)
        spans = run.of_rank(rank)
        assert [span.step for span in spans if span.name == "rendezvous"] == ["process_group"]
        assert {"init_process_group", "new_group", "_sync_module_states"} <= {s.op for s in spans}
        last = next(span for span in spans if span.name == "first_step")
        # The validation's batches and loader come before, and nothing is recorded that came later.
        assert last.start >= max(span.end for span in spans if span.name == "first_batch")
        assert max(span.end for span in spans if span.kind == "collective") <= last.end
        assert run.trailers[rank].own_cost < run.usages[rank].cpu


def test_an_own_loop_after_a_validation(tmp_path: Path, losses: list[object]) -> None:
    job = start(tmp_path, *TRAINER, "env", "state-only", "throw-away").check()
    run = Run.latest(tmp_path)
    check(run, printed(job), losses)
    assert [line["environment"] for line in printed(job)] == [["RANK"], ["RANK"]]
    for rank in (0, 1):
        # A step without a backward pass made state only, and what one with it had trained was loaded anew.
        assert in_order(["model", "thrown_away_step", "first_batch", "first_step"], steps(run, rank)), steps(run, rank)
        assert steps(run, rank).count("first_step") == 1
    said = job.ranks[0].stderr.splitlines()
    parts = r"\S+ work \+ \S+ wait(?: \+ \S+ queue)?"
    assert re.fullmatch(rf"initopt: first batch after \S+ = {parts} \(rank 0, own cost \d+ms\)", said[-2])
    assert said[-1] == f"initopt: {run.path}   next: initopt blame"
    assert "initopt" not in job.ranks[1].stderr


def test_ranks_that_are_spawned_without_a_launcher_s_variables(tmp_path: Path, losses: list[object]) -> None:
    job = start(tmp_path, *TRAINER, "spawn", ranks=1).check()
    run = Run.latest(tmp_path)
    check(run, printed(job), losses)
    assert [path.name for path in tmp_path.iterdir() if path.name.isdigit()] == ["0001"]
    # The one that has spawned them is no rank, and says nothing.
    assert len([line for line in job.ranks[0].stderr.splitlines() if line.startswith("initopt: ")]) == 2


def test_ranks_of_a_launcher_inside_the_script_and_its_restart(tmp_path: Path, losses: list[object]) -> None:
    job = start(tmp_path, *TRAINER, "elastic", "restart", ranks=1).check()
    check(Run.load(tmp_path / "0002"), printed(job), losses)
    first = Run.load(tmp_path / "0001")
    assert finished_ranks(first) == []
    assert in_order(["process_group", "new_group"], steps(first, 0))
    assert not (tmp_path / "0003").exists()


def test_a_start_up_that_fails_has_its_own_traceback_first_and_whole(tmp_path: Path) -> None:
    with ThreadPoolExecutor() as pool:
        jobs = [
            pool.submit(start, tmp_path, *TRAINER, "env", "fail", ranks=1, recorded=recorded)
            for recorded in (False, True)
        ]
        stock, recorded = (job.result().ranks[0] for job in jobs)
    assert stock.returncode == recorded.returncode == 1
    assert "KeyError: 'a broken row'" in stock.stderr
    theirs, _, ours = recorded.stderr.partition("initopt: ")
    if sys.version_info < (3, 11):  # its bare `raise` brings the frame back
        theirs = re.sub(rf".*{re.escape(HIDDEN)}.*\n", "", theirs)
    assert _unnumbered(theirs) == _unnumbered(stock.stderr)
    [place] = re.findall(
        r"the script ended with KeyError at (plain_trainer.py:\d+), without a training step, and so does its record: "
        rf"{re.escape(str(tmp_path / '0001'))}\n",
        ours,
    )
    run = Run.latest(tmp_path)
    errors = [span.error for span in run.spans if span.name == "first_batch"]
    assert errors == ["", f"KeyError at {place}: Caught KeyError in DataLoader worker process 0."]


FAILING = """
import torch.distributed

torch.distributed.init_process_group("gloo")
if torch.distributed.get_rank() == 1:
    raise ValueError("it is ill")
torch.distributed.barrier()
"""


def test_the_rank_that_failed_first_is_named_on_rank_0(tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    job = start(tmp_path, str(tmp_path / "failing.py"))
    assert [rank.returncode for rank in job.ranks] == [1, 1]
    said = [line for line in job.ranks[0].stderr.splitlines() if line.startswith("initopt: ")]
    assert said == [
        "initopt: rank 1 failed first: ValueError at failing.py:6: it is ill",
        "initopt: the script ended on rank 0 with RuntimeError at failing.py:7, without a training step, "
        f"and so does its record: {tmp_path / '0001'}",
    ]
    run = Run.latest(tmp_path)
    assert run.first_to_fail == 1
    # It failed between steps, in lines that are no name beside the place of the error.
    assert re.search(r"\n  rank 1: ValueError at failing.py:6: it is ill \(after \S+\)\n", summary(run).plain)


SPAWNED = """
import os, sys, torch
from torch import distributed
def work(rank):
    distributed.init_process_group("gloo", rank=rank, world_size=2)
    if rank == 1 and "exit" in sys.argv:
        sys.exit(3)
    if rank == 1:
        raise ValueError("it is ill")
    distributed.barrier()
if __name__ == "__main__":
    torch.multiprocessing.spawn(work, nprocs=2)
"""


@pytest.mark.parametrize(
    ("how", "said"),
    [("raise", "exit code 1 at spawned.py:9 after ValueError at spawned.py:9: it is ill"), ("exit", "exit code 3 at")],
)
def test_what_a_spawned_rank_failed_of_is_said_and_ends_the_wait_of_the_others(
    tmp_path: Path, how: str, said: str
) -> None:
    """multiprocessing catches it, and exits anew."""
    (tmp_path / "spawned.py").write_text(SPAWNED)
    [job] = start(tmp_path, "--optimize", str(tmp_path / "spawned.py"), how, ranks=1).ranks
    assert job.returncode == 1
    assert f"initopt: rank 1 failed first: {said}" in job.stderr
    assert "no record of it" not in job.stderr
    run = Run.latest(tmp_path)
    assert run.first_to_fail == 1
    mine = run.trailers[0].ended
    assert mine is not None
    assert f"PeerFailed at spawned.py:10: rank 1 failed: {said.partition(' after ')[2]}" in mine.error


LATER = """
import torch
from torch import distributed
distributed.init_process_group("gloo")
rank, value = distributed.get_rank(), torch.zeros(1)
if rank == 2:
    distributed.recv(value, src=0)
distributed.new_group([0, 1])
if rank == 0:
    distributed.send(value, dst=2)
distributed.barrier()  # who leaves closes connections that another one may still be making
"""


def test_a_group_of_some_is_made_though_another_rank_comes_to_it_later(tmp_path: Path) -> None:
    (tmp_path / "later.py").write_text(LATER)
    job = start(tmp_path, "--optimize", str(tmp_path / "later.py"), ranks=3)
    assert [rank.returncode for rank in job.ranks] == [0, 0, 0]


def test_a_spawned_rank_ends_without_its_variables(tmp_path: Path) -> None:
    """As without: their destructors may write files, or end threads that are waited for."""
    text = """
        import torch
        from torch import distributed
        class Last:
            def __del__(self):
                print("gone", flush=True)
        def work(rank):
            last = Last()
            distributed.init_process_group("gloo", rank=rank, world_size=2)
        if __name__ == "__main__":
            torch.multiprocessing.spawn(work, nprocs=2)
    """
    (tmp_path / "spawned.py").write_text(textwrap.dedent(text))
    [job] = start(tmp_path, str(tmp_path / "spawned.py"), ranks=1).ranks
    assert (job.returncode, job.stdout.split()) == (0, ["gone", "gone"])


def _unnumbered(text: str) -> str:
    return re.sub(r"\d+\.\d+|pid[ =:]*\d+|0x[0-9a-f]+", "N", text)
