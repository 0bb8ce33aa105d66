"""What a rank has after training, as one digest: its weights, its optimizer state and its losses, bit for bit."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.optim.keyed import KeyedOptimizer


def trained_state(model: nn.Module, optimizer: KeyedOptimizer, losses: Sequence[torch.Tensor]) -> str:
    """The sha256 (hex) of this rank's part of all state, in sorted order of the keys."""
    digest = hashlib.sha256()
    parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "losses": list(losses)}
    for key, value in sorted(_leaves("", parts), key=lambda leaf: leaf[0]):
        digest.update(f"{key}\0".encode())
        if isinstance(value, torch.Tensor):
            local = value.detach().cpu().contiguous()
            digest.update(f"{local.dtype}{tuple(local.shape)}\0".encode())
            digest.update(local.reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            digest.update(f"{value!r}\0".encode())
    return digest.hexdigest()


def _leaves(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, ShardedTensor):
        for shard in value.local_shards():
            yield f"{prefix}@{shard.metadata.shard_offsets}", shard.tensor
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(f"{prefix}/{key}", inner)
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield from _leaves(f"{prefix}/{index}", inner)
    else:
        yield prefix, value
