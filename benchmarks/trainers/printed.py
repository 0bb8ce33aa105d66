"""The training loop of the plain trainers, and what each rank prints of it: nothing in here knows of initopt.

On stdout one line of JSON: the rank, its losses, the digest of all it trained. On stderr when its first training step
had ended (`first step at SECONDS`, unix time), from which `bench_run.py` takes the time to first batch.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import torch
from torch import nn
from torchrec.optim.keyed import KeyedOptimizer

from benchmarks.trainers.trained_state import trained_state


def losses_of(step: Callable[[], torch.Tensor], steps: int) -> list[torch.Tensor]:
    """The loss of each of that many training steps."""
    losses = [step().detach()]
    # In one write: the ranks have one stderr.
    sys.stderr.write(f"first step at {time.time():.3f}\n")
    return losses + [step().detach() for _ in range(steps - 1)]


def print_trained(rank: int, model: nn.Module, optimizer: KeyedOptimizer, losses: list[torch.Tensor]) -> None:
    """The line of JSON."""
    state = trained_state(model, optimizer, losses)
    line = json.dumps({"rank": rank, "losses": [loss.item() for loss in losses], "trained_state": state})
    # In one write: the ranks have one stdout, and print would make two of it.
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
