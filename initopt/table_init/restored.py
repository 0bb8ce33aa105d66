"""Tables that a checkpoint overwrites: marked instead of filled, and what it did not reach filled afterwards.

Every value is set to one that no training gives, a certain NaN. After the restore each that is still there gets the
random number that it would have had.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from initopt.table_init.fills import Claimed, Fill, Piece, in_threads, make, parts
from initopt.table_init.mersenne import ahead

_MARKS = {
    torch.float16: (torch.int16, 0x7E5A),
    torch.bfloat16: (torch.int16, 0x7FDA),
    torch.float32: (torch.int32, 0x7FDA_5A5A),
    torch.float64: (torch.int64, 0x7FFA_5A5A_5A5A_5A5A),
}

_PER_TASK = 1 << 22
"""Values that are marked or looked at in one go."""


def mark(fills: Sequence[Fill], threads: int) -> None:
    """Mark all values."""

    def one(piece: Piece) -> None:
        kind, value = _MARKS[piece.values.dtype]
        piece.values.view(kind).fill_(value)

    in_threads(one, [piece for fill in fills for piece in _pieces(fill)], threads)


def complete(unfilled: Sequence[Claimed], threads: int) -> dict[Claimed, int]:
    """Fill the values that are still marked; returns how many there were, of each fill with any."""

    def one(what: tuple[Claimed, Piece]) -> int:
        left, piece = what
        kind, value = _MARKS[piece.values.dtype]
        marked = piece.values.view(kind) == value
        count = int(marked.sum())
        if count:
            numbers = torch.empty_like(piece.values)
            begin = left.before + piece.fill.draws_before(piece.start)
            make([Fill(numbers, piece.fill.method, piece.fill.arguments)], ahead(left.state, begin))
            piece.values.copy_(torch.where(marked, numbers, piece.values))
        return count

    pieces = [(left, piece) for left in unfilled for piece in _pieces(left.fill)]
    counts: dict[Claimed, int] = {}
    for (left, _), count in zip(pieces, in_threads(one, pieces, threads), strict=True):
        if count:
            counts[left] = counts.get(left, 0) + count
    return counts


def _pieces(fill: Fill) -> list[Piece]:
    return [piece for part in parts([fill], -(-len(fill.values) // _PER_TASK)) for piece in part]
