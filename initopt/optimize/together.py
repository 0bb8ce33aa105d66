"""Whether all ranks of a job optimize, and alike: what adds collectives, or leaves some out, is done by all or by none.

Each rank says in the job's store what it was started with, as soon as it has joined. Before the first collective that
would be another one, ranks ask there once. The first rank that knows the answer settles it for all, so that it can't
differ, whenever they ask.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from initopt.peers import attempt_of_job

PATIENCE = 60.0
"""Seconds that a rank waits for the others to say what they were started with. All of them have joined already."""

ALIKE = 5.0
"""Seconds between ranks on which the same fails, if it does on all of them; their clocks may differ by less."""

_PACKAGES = ("torch", "torchrec", "initopt")
_POLL = 0.005
_ON, _DIFFERS, _MISSING = "on", "ranks were started with other options or versions", "not all ranks have --optimize"


class Together:
    """The answer of this job. `names` are the optimizations that this rank would apply."""

    def __init__(self, names: Sequence[str]) -> None:
        self._mine = hashlib.sha256("\n".join([*names, *map(_version, _PACKAGES)]).encode()).hexdigest()[:16]
        self._store: Any = None
        self._world = 1
        self._settled = ""

    def joined(self) -> None:
        """Say in the store of the default group, which was just made, what this rank would do."""
        if self._store is not None:
            return
        torch: Any = sys.modules["torch"]
        distributed = torch.distributed
        # Private, as all ways to the store of the default group are.
        store = distributed.distributed_c10d._get_default_store()
        self._world = distributed.get_world_size()
        self._store = distributed.PrefixStore(f"initopt/{attempt_of_job()}/optimize", store)
        self._store.add(f"like/{self._mine}", 1)
        # After the other, so that whoever sees all of them sees what all have said.
        self._store.add("all", 1)

    def alike(self) -> bool | None:
        """Whether all ranks have said the same, as far as they have by now; None while some have said nothing."""
        if self._store is None or self._store.add("all", 0) < self._world:
            return None
        return bool(self._store.add(f"like/{self._mine}", 0) == self._world)

    def all_fail(self, what: str) -> bool:
        """Say that `what` has failed on this rank, and return whether it does on all ranks, within some seconds.

        Who has not failed says nothing, and waits for nobody.
        """
        if self._store is None:
            return True
        # It may have failed on some before: only what fails at this moment is the same.
        mine = time.time()
        rank = sys.modules["torch"].distributed.get_rank()
        self._store.set(f"{what}/failed/{rank}", str(mine))
        keys = [f"{what}/failed/{other}" for other in range(self._world)]
        until = time.monotonic() + ALIKE
        while time.monotonic() < until:
            there = self._store.check(keys)
            if there and all(abs(float(self._store.get(key)) - mine) < ALIKE for key in keys):
                return True
            time.sleep(_POLL)
        return False

    def why_not(self) -> str:
        """Why this job does not change its collectives; empty if it does. The same on all ranks."""
        if self._store is None:
            return "the process group was not seen when it was made"
        if not self._settled:
            until = time.monotonic() + PATIENCE
            while (there := self._store.add("all", 0)) < self._world and time.monotonic() < until:
                time.sleep(_POLL)
            alike = self._store.add(f"like/{self._mine}", 0) == self._world
            found = _MISSING if there < self._world else _ON if alike else _DIFFERS
            self._settled = self._store.compare_set("settled", "", found).decode()
        return "" if self._settled == _ON else self._settled


def _version(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"{package} of no known version"
