"""A start-up that fails on one rank: every rank says which step and rank, and nothing is left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.multirank.launch import JobOutput, launch

SCRIPT = str(Path(__file__).with_name("failing_startup.py"))


def failed(way: str, mode: str, tmp_path: Path) -> JobOutput:
    # torch's loader workers look for their parent every 5 s, and only they can see that it was killed.
    job = launch([SCRIPT, way, mode], 2, {"INITOPT_ROOT": str(tmp_path)}, 60.0, grace=8.0)
    assert not job.timed_out, [rank.stderr for rank in job.ranks]
    assert job.orphans == ()
    return job


def test_nothing_fails(tmp_path: Path) -> None:
    job = failed("not", "overlap", tmp_path).check()
    assert [rank.stdout for rank in job.ranks] == ["started 2.0\n"] * 2


@pytest.mark.parametrize("mode", ["overlap", "serial"])
def test_a_step_raises_on_one_rank(mode: str, tmp_path: Path) -> None:
    job = failed("raise", mode, tmp_path)
    first, second = job.ranks
    for rank in job.ranks:
        assert rank.returncode == 1
        assert "StartupFailed: start-up 'failing' failed in step 'features' on rank 1" in rank.stderr
    assert "ValueError: no such feature: 'colour'" in second.stderr
    assert "start-up step 'features' failed on rank 1 after 0." in second.stderr
    assert "PeerFailed: rank 1 failed in start-up step 'features' after 0." in first.stderr
    assert "no such feature: 'colour'" in first.stderr
    assert "rank 0 was in start-up step 'shard' for" in first.stderr


@pytest.mark.parametrize("mode", ["overlap", "serial"])
def test_a_step_never_returns(mode: str, tmp_path: Path) -> None:
    job = failed("hang", mode, tmp_path)
    for rank in job.ranks:
        assert rank.returncode != 0
        assert "failed in step 'features' on rank 1" in rank.stderr
        assert "start-up step 'features' did not return within 5 s" in rank.stderr


@pytest.mark.parametrize("mode", ["overlap", pytest.param("serial", marks=pytest.mark.long)])
def test_a_step_never_lets_go_of_the_interpreter_lock(mode: str, tmp_path: Path) -> None:
    job = failed("hold", mode, tmp_path)
    first, second = job.ranks
    assert first.returncode == second.returncode == 1
    assert "features" in second.stderr and "failing_startup.py" in second.stderr
    assert "start-up 'failing' failed in step 'shard' on rank 0" in first.stderr
    assert "rank 1 in 'features' for" in first.stderr


@pytest.mark.parametrize("rank_that_fails", [0, 1])
@pytest.mark.parametrize("mode", ["overlap", "serial"])
def test_a_step_raises_before_the_ranks_have_met(mode: str, rank_that_fails: int, tmp_path: Path) -> None:
    for rank in failed(f"early{rank_that_fails}", mode, tmp_path).ranks:
        assert rank.returncode == 1
        assert f"rank {rank_that_fails}" in rank.stderr and "no features before the ranks have met" in rank.stderr


@pytest.mark.parametrize("mode", ["overlap", "serial"])
def test_a_rank_is_killed(mode: str, tmp_path: Path) -> None:
    job = failed("kill", mode, tmp_path)
    first, second = job.ranks
    assert second.returncode == -9
    assert first.returncode != 0
    assert "rank 1 failed in start-up step 'features' after" in first.stderr
    assert "is gone" in first.stderr
    assert "rank 0 was in start-up step 'shard' for" in first.stderr
