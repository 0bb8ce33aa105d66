"""Criteo-format data on disk: a generator with a fixed seed, and a loader that reads it in worker processes.

A day is three files, named as the Criteo preprocessing of TorchRec and MLPerf names them: `day_0_dense.npy` (float32,
[N, 13]), `day_0_sparse.npy` (int32, [N, 26]) and `day_0_labels.npy` (int32, [N, 1]). The values are random: this is
for measuring start-up, there is nothing to learn. Run the file to write a day.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

DENSE = 13
SPARSE = 26
FEATURES = tuple(f"cat_{index}" for index in range(SPARSE))
_FILES = ("day_0_dense.npy", "day_0_sparse.npy", "day_0_labels.npy")

Rows = tuple["npt.NDArray[np.float32]", "npt.NDArray[np.int32]", "npt.NDArray[np.int32]"]


def data_folder() -> Path:
    """$INITOPT_DATA, else `data` beside this file."""
    return Path(os.environ.get("INITOPT_DATA") or Path(__file__).parent / "data")


def generate(samples: int = 65_536, seed: int = 0, folder: Path | None = None) -> Path:
    """The folder of a day with that many samples, written now if it isn't there yet.

    Several processes may call it at once: the day is written aside and renamed, so each sees a whole day or none. The
    bytes are a function of `samples` and `seed` alone.
    """
    day = (folder or data_folder()) / f"criteo-{samples}-seed{seed}"
    if day.is_dir():
        return day
    day.parent.mkdir(parents=True, exist_ok=True)
    draw = np.random.Generator(np.random.PCG64(seed))
    arrays: Rows = (
        draw.random((samples, DENSE), dtype=np.float32),
        draw.integers(0, 2**31 - 1, (samples, SPARSE), dtype=np.int32),
        draw.integers(0, 2, (samples, 1), dtype=np.int32),
    )
    aside = Path(tempfile.mkdtemp(prefix=f".{day.name}-", dir=day.parent))
    try:
        for name, array in zip(_FILES, arrays, strict=True):
            np.save(aside / name, array)
        try:
            aside.rename(day)
        except OSError:  # another process was first; its bytes are the same
            if not day.is_dir():
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return day


@dataclass
class Batch(Pipelineable):  # type: ignore[misc]
    """One batch as TorchRec's train pipelines take it. The field names are those that `DLRMTrain` reads."""

    dense_features: torch.Tensor
    sparse_features: KeyedJaggedTensor
    labels: torch.Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        return Batch(
            self.dense_features.to(device, non_blocking=non_blocking),
            self.sparse_features.to(device, non_blocking=non_blocking),
            self.labels.to(device, non_blocking=non_blocking),
        )

    def record_stream(self, stream: torch.Stream) -> None:
        self.dense_features.record_stream(stream)
        self.sparse_features.record_stream(stream)
        self.labels.record_stream(stream)

    def pin_memory(self) -> Batch:
        return Batch(self.dense_features.pin_memory(), self.sparse_features.pin_memory(), self.labels.pin_memory())


def example(batch_size: int) -> Batch:
    """A batch like those of `loader`, whose values mean nothing."""
    ids = torch.zeros(batch_size * SPARSE, dtype=torch.int64)
    features = KeyedJaggedTensor(
        keys=list(FEATURES), values=ids, lengths=torch.ones_like(ids, dtype=torch.int32), stride=batch_size
    )
    return Batch(torch.zeros(batch_size, DENSE), features, torch.zeros(batch_size, dtype=torch.int32))


class CriteoDay(Dataset[Rows]):
    """A day's samples by number. The files are mapped at first use, so that each worker process maps its own."""

    def __init__(self, day: Path) -> None:
        self.day = day

    @cached_property
    def _arrays(self) -> Rows:
        dense, sparse, labels = (np.load(self.day / name, mmap_mode="r") for name in _FILES)
        return dense, sparse, labels

    def __len__(self) -> int:
        return len(self._arrays[2])

    def __getitem__(self, index: int) -> Rows:
        return self.__getitems__([index])

    def __getitems__(self, indices: Sequence[int]) -> Rows:
        """The rows of a whole batch; the data loader prefers this to one call per sample."""
        dense, sparse, labels = self._arrays
        rows = np.asarray(indices)
        return dense[rows], sparse[rows], labels[rows]


@dataclass(frozen=True)
class Collate:
    """Rows of a batch, as `CriteoDay` gives them, to a `Batch`: ids are taken modulo the rows of their table."""

    rows_per_table: tuple[int, ...]

    def batch_schema(self, batch_size: int) -> Batch:
        """What initopt asks for to compile before the first batch is there."""
        return example(batch_size)

    def __call__(self, rows: Rows) -> Batch:
        dense, sparse, labels = rows
        ids = sparse.astype(np.int64) % np.asarray(self.rows_per_table, dtype=np.int64)
        features = KeyedJaggedTensor(
            keys=list(FEATURES),
            values=torch.from_numpy(np.ascontiguousarray(ids.T)).reshape(-1),
            lengths=torch.ones(len(labels) * SPARSE, dtype=torch.int32),
            stride=len(labels),
        )
        return Batch(torch.from_numpy(dense), features, torch.from_numpy(labels).reshape(-1))


def loader(
    day: Path,
    rows_per_table: Sequence[int],
    *,
    rank: int,
    world_size: int,
    batch_size: int,
    workers: int = 1,
    seed: int = 0,
    worker_init: Callable[[int], None] | None = None,
) -> DataLoader[Any]:
    """This rank's shuffled share of a day, in batches of `batch_size`, read by `workers` forked processes (1 or more).

    `worker_init` runs in each worker before its first sample.
    """
    if workers < 1:
        raise ValueError(f"workers={workers}: this loader reads in worker processes, give it at least 1")
    dataset = CriteoDay(day)
    return DataLoader(
        dataset,
        batch_size=batch_size,
        sampler=DistributedSampler(
            dataset, num_replicas=world_size, rank=rank, shuffle=True, seed=seed, drop_last=True
        ),
        num_workers=workers,
        collate_fn=Collate(tuple(rows_per_table)),  # type: ignore[arg-type]
        worker_init_fn=worker_init,
        multiprocessing_context="fork",
        persistent_workers=True,
        drop_last=True,
    )


def main() -> None:
    arguments = argparse.ArgumentParser(
        description="Write one day of random data in Criteo format and print its folder."
    )
    arguments.add_argument("--samples", type=int, default=65_536)
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument(
        "--folder", type=Path, default=None, help="default: $INITOPT_DATA, else data/ beside this file"
    )
    chosen = arguments.parse_args()
    print(generate(chosen.samples, chosen.seed, chosen.folder))


if __name__ == "__main__":
    main()
