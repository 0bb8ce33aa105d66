"""A model of three tables and one layer, with its batches: what a train pipeline needs, and no more."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable


@dataclass
class Batch(Pipelineable):  # type: ignore[misc]
    features: KeyedJaggedTensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        return Batch(self.features.to(device=device, non_blocking=non_blocking))

    def record_stream(self, stream: Any) -> None:
        pass

    def pin_memory(self) -> Batch:
        return self


class Small(nn.Module):
    def __init__(self, ebc: nn.Module) -> None:
        super().__init__()
        self.ebc = ebc
        self.over = nn.Linear(3 * 64, 1)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.over(self.ebc(batch.features).values())
        return out.sigmoid().mean(), out


def made_batches(names: list[str]) -> Iterator[Batch]:
    """Other ones on each rank, from a generator of their own."""
    generator = torch.Generator().manual_seed(int(os.environ["RANK"]))
    for _ in range(5):
        values = torch.randint(0, 24, (4 * len(names),), generator=generator)
        lengths = torch.ones(4 * len(names), dtype=torch.int32)
        yield Batch(KeyedJaggedTensor([f"f_{name}" for name in names], values, lengths=lengths))
