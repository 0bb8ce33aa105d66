"""Rank numbers as people read them."""

from __future__ import annotations

from collections.abc import Sequence


def ranks_in_short(ranks: Sequence[int], most: int = 6) -> str:
    """Rank numbers in their order, at most so many runs of them: `0-3, 7`."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][-1] + 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    shown = ", ".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts[:most])
    return shown + (f", ... ({len(ranks)} in all)" if len(parts) > most else "")
