"""Every rank says that it has come this far, and waits for a limited time until all have.

A rank that is still at work when the others enter a collective looks like a hang until the group's timeout; here it has
a name while they wait.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

from initopt.compile_cache import board
from initopt.compile_cache.board import Board, StoreGone
from initopt.rank_numbers import ranks_in_short

_BITS = 62
"""Ranks of which one number of the store, a signed one of 64 bits, can say that they are there."""


def all_there(
    store: Any,
    *,
    rank: int,
    world_size: int,
    topic: str,
    patience: float,
    between: Callable[[], None] = lambda: None,
) -> tuple[int, ...]:
    """Say that this rank is there, wait `patience` seconds for the others, return the ranks that have not come.

    `store` is a torch.distributed store that all ranks share. A `topic` is used once in an attempt of the job, and once
    by each rank. `between` is called while this rank waits, every `board.POLL` seconds. A poll asks for one key,
    however many ranks there are.

    Where the store is gone nobody can be named, so nobody is: with a warning the result is empty, and the ranks meet in
    their first collective, as they would without this.
    """
    begun = time.monotonic()
    try:
        notes = Board(store, f"meeting/{topic}")
        notes.add(f"there/{rank // _BITS}", 1 << rank % _BITS)
        # After its bit, so that whoever sees the count full sees all bits.
        if notes.add("count", 1) == world_size:
            notes.write("all", "there")
        while not notes.has("all"):
            between()
            waited = time.monotonic() - begun
            if waited >= patience or notes.line_is_due():
                missing = _missing(notes, world_size)
                if not missing or waited >= patience:
                    return missing
                _say(rank, missing, waited, patience)
            time.sleep(board.POLL)
    except StoreGone as gone:
        warnings.warn(
            f"initopt: the ranks did not wait for each other at {topic!r}, as the job's store no longer answers "
            f"({gone}); the first collective waits for who is late",
            stacklevel=2,
        )
    return ()


def _missing(notes: Board, world_size: int) -> tuple[int, ...]:
    words = [notes.add(f"there/{number}", 0) for number in range(-(-world_size // _BITS))]
    return tuple(rank for rank in range(world_size) if not words[rank // _BITS] >> rank % _BITS & 1)


def _say(rank: int, missing: tuple[int, ...], waited: float, patience: float) -> None:
    which = f"rank{'s' if len(missing) > 1 else ''} {ranks_in_short(missing)}"
    text = f"initopt: rank {rank} waits for {which} ({waited:.0f} s, until {patience:g} s)"
    print(text, file=sys.stderr, flush=True)
