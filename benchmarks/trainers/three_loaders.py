"""A day in memory, split into three, and its loaders: `dlrm_main.py` imports it from its own folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from torch.utils.data import DataLoader, IterableDataset

from benchmarks.trainers import criteo

SPLITS = {"train": (0.0, 0.8), "val": (0.8, 0.9), "test": (0.9, 1.0)}


class InMemory(IterableDataset[criteo.Batch]):
    """One rank's batches of a split. The whole split is read here, whichever part of it the rank takes."""

    def __init__(
        self, day: Path, split: str, rows_per_table: tuple[int, ...], *, rank: int, world_size: int, batch_size: int
    ) -> None:
        first, last = SPLITS[split]
        self._rows = []
        for name in ("dense", "sparse", "labels"):
            rows = np.load(day / f"day_0_{name}.npy")
            self._rows.append(rows[int(first * len(rows)) : int(last * len(rows))])
        self._collate = criteo.Collate(rows_per_table)
        self._rank, self._world_size, self._batch_size = rank, world_size, batch_size

    def __iter__(self) -> Iterator[criteo.Batch]:
        dense, sparse, labels = self._rows
        whole = len(labels) // (self._batch_size * self._world_size)
        for number in range(whole):
            start = (number * self._world_size + self._rank) * self._batch_size
            part = slice(start, start + self._batch_size)
            yield self._collate((dense[part], sparse[part], labels[part]))


def loaders(
    day: Path, rows_per_table: tuple[int, ...], *, rank: int, world_size: int, batch_size: int
) -> list[DataLoader[criteo.Batch]]:
    """Those of training, validation and test, without worker processes."""
    return [
        DataLoader(
            InMemory(day, split, rows_per_table, rank=rank, world_size=world_size, batch_size=batch_size),
            batch_size=None,
        )
        for split in SPLITS
    ]
