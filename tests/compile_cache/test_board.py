"""Notes in the job's store."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from initopt.compile_cache import board
from initopt.compile_cache.board import Board, StoreGone


def test_notes_of_a_topic_are_apart_and_the_first_claim_stands() -> None:
    store = dist.HashStore()
    one, other, apart = Board(store, "t"), Board(store, "t"), Board(store, "u")
    assert one.read("note") is None
    one.write("note", "ä")
    assert other.read("note") == "ä" and other.has("note") and not apart.has("note")
    assert [one.claim("claim", "one"), other.claim("claim", "other"), apart.claim("claim", "apart")] == [
        "one",
        "one",
        "apart",
    ]
    assert [one.add("number", 2), other.add("number", 0), apart.add("number", 0)] == [2, 2, 0]


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


def test_ranks_that_wait_print_one_line_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(board, "time", clock)
    store = dist.HashStore()
    ranks = [Board(store, "t"), Board(store, "t")]
    due = []
    for clock.now in (0.0, 9.9, 10.0, 10.1, 25.0, 30.0):
        due.append([rank.line_is_due() for rank in ranks])
    assert due == [[False, False], [False, False], [True, False], [False, False], [True, False], [True, False]]
    # The first that comes prints, so that one that is lost is made up for.
    clock.now = 40.0
    assert ranks[1].line_is_due() and not ranks[0].line_is_due()


class Broken:
    def clone(self) -> None:
        raise RuntimeError("reset by peer\nand where it was")


def test_a_store_that_fails_is_gone() -> None:
    with pytest.raises(StoreGone, match=r"^RuntimeError: reset by peer$"):
        Board(Broken(), "t")
