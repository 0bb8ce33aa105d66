"""Which cores are a rank's own, and which share its memory node."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from initopt.cores import cores, near_this_thread, share_of_rank


@pytest.mark.parametrize(("ranks", "share"), [("", 8), ("1", 8), ("2", 4), ("3", 2), ("100", 1), ("0", 8), ("many", 8)])
def test_ranks_of_a_host_share_its_cores(ranks: str, share: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert (cores(), share_of_rank()) == (8, share)


def system(folder: Path, *nodes: str) -> Path:
    for number, cpus in enumerate(nodes):
        (folder / f"node{number}").mkdir()
        (folder / f"node{number}" / "cpulist").write_text(cpus + "\n")
    return folder


def test_a_node_of_two_is_near(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Wherever this thread runs, and is moved to, is the first node.
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 5_000})
    assert near_this_thread(system(tmp_path, "0-4095", "4096-4999,5000")) == {0, 1}


def test_one_node_needs_no_binding(tmp_path: Path) -> None:
    assert near_this_thread(system(tmp_path, "0-4095")) == set()


def test_a_system_that_can_not_be_asked_binds_nothing(tmp_path: Path) -> None:
    assert near_this_thread(tmp_path) == set()
    assert near_this_thread(system(tmp_path, "nonsense")) == set()
