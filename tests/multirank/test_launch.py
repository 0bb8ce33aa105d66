"""The launcher itself: ranks get their numbers, output comes back whole, nothing survives."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.multirank.launch import launch


def test_each_rank_gets_its_number_and_its_output_comes_back() -> None:
    code = "import os, sys; print(os.environ['RANK'], os.environ['WORLD_SIZE']); print('e', file=sys.stderr)"
    job = launch(["-c", code], ranks=3, timeout=20).check()
    assert [r.stdout for r in job.ranks] == ["0 3\n", "1 3\n", "2 3\n"]
    assert [r.stderr for r in job.ranks] == ["e\n"] * 3


def test_a_failing_rank_is_reported_and_the_others_are_left_alone() -> None:
    job = launch(["-c", "import os, sys; sys.exit(7 * int(os.environ['RANK']))"], timeout=20)
    assert [r.returncode for r in job.ranks] == [0, 7]
    with pytest.raises(AssertionError, match="rank 1, exit code 7"):
        job.check()


def test_the_limit_ends_ranks_that_never_return() -> None:
    job = launch(["-c", "import threading; threading.Event().wait()"], timeout=0.5)
    assert job.timed_out
    assert [r.returncode for r in job.ranks] == [-9, -9]


def test_a_descendant_in_another_session_is_found_and_killed() -> None:
    code = (
        "import subprocess, sys; "
        "subprocess.Popen([sys.executable, '-c', 'import threading; threading.Event().wait()'], start_new_session=True)"
    )
    job = launch(["-c", code], ranks=1, timeout=20, grace=0.2)
    assert len(job.orphans) == 1
    assert _environment(job.orphans[0]) == b""


def _environment(pid: int) -> bytes:
    """Empty for a process that has ended, also when nobody has collected it yet."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""
