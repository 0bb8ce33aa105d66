"""Whether TorchRec validates its collectives: found on each rank, where TorchRec asks rank 0.

It asks once a process, when the first DistributedModelParallel is made (`torchrec/distributed/model_parallel.py:323`,
`collective_utils.py:254`), and keeps the answer. That is one variable of the environment or a default, which the ranks
compare: where it is equal, rank 0 would have said what each rank finds. Where it is not, or some ranks hold an answer
already, rank 0 is asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Flag:
    """What this rank would tell the others if it were rank 0, or holds already (`known`)."""

    on: bool
    known: bool

    def text(self) -> str:
        """The flag in words."""
        return f"validation of collectives {'on' if self.on else 'off'}{', from before' if self.known else ''}"

    def keep(self) -> bool:
        """Let TorchRec hold it. Returns whether that left out the broadcast."""
        from torchrec.distributed import collective_utils as home

        home._USE_COLLECTIVE_VALIDATION, home._INITIALIZED = self.on, True
        return not self.known


def found() -> Flag:
    """The flag as TorchRec finds it."""
    from torchrec.distributed import collective_utils as home

    if home._INITIALIZED:
        return Flag(home._USE_COLLECTIVE_VALIDATION, True)
    return Flag(home._resolve_enablement_on_leader(), False)


def ask_rank_0(group: Any) -> None:
    """Let TorchRec broadcast rank 0's flag, whatever ranks hold."""
    from torchrec.distributed import collective_utils as home

    home._INITIALIZED = False
    as_ever(group)


def as_ever(group: Any) -> None:
    """Let TorchRec broadcast rank 0's flag, where a rank has none yet."""
    from torchrec.distributed import collective_utils as home

    home.init_collective_validation(group)
