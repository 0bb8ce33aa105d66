"""The optimizations that `python -m initopt.run --optimize` may apply, by name: what each does, and where it acts.

Only the table: how each is done stands in a file of its own under `optimize`. It imports nothing, since the command
line and every watched process need it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

DISABLE = "INITOPT_DISABLE"
"""Names of optimizations, or of single rewrites of collectives, that are not used; with commas."""


@dataclass(frozen=True, slots=True)
class Optimization:
    """`name` is that of `--no-NAME`, `does` a phrase, `at` where it acts.

    With `together` it leaves collectives out or adds some, so all ranks apply it or none.
    """

    name: str
    does: str
    at: str
    together: bool = False


TABLE = (
    Optimization("gc", "garbage is collected less often, above all during the imports", "the imports"),
    Optimization("rendezvous", "the job's store is reached during the imports", "the end of `import torch`"),
    Optimization("plan", "the sharding plan is made on every rank, and compared", "a sharding planner", together=True),
    Optimization("eliminate", "meetings of ranks are left out", "DistributedModelParallel", together=True),
    Optimization("fill-once", "tables are filled once", "DistributedModelParallel"),
    Optimization("compile", "compiled code is kept, and shared by the ranks of a host", "the first compile"),
    Optimization("failures", "a step that fails on one rank ends the others' wait", "any meeting", together=True),
    Optimization("patience", "a late rank is named, and waited for longer", "any meeting", together=True),
    Optimization("order", "meetings that differ between ranks are stopped", "any meeting", together=True),
)
"""All that is applied, in the order in which a trainer comes to it."""

NAMES = tuple(one.name for one in TABLE)

REWRITES = ("validation_flag", "plan", "groups", "ec_metadata", "mc_metadata", "dp_tables", "ddp_sync")
"""What `eliminate` consists of, as one follows the other (see `comm_elim.elimination`)."""


def disabled() -> tuple[str, ...]:
    """The names in INITOPT_DISABLE."""
    return tuple(filter(None, (name.strip() for name in os.environ.get(DISABLE, "").split(","))))


def unknown_disabled() -> str:
    """What is wrong with INITOPT_DISABLE, a sentence; empty if nothing is."""
    known = dict.fromkeys((*NAMES, *REWRITES))
    for name in disabled():
        if name not in known:
            return f"{DISABLE} names {name!r}, which is no optimization or rewrite; there are {', '.join(known)}"
    return ""


def enabled(names: Iterable[str]) -> tuple[str, ...]:
    """Those of these names that INITOPT_DISABLE does not take away, in the table's order."""
    off, wanted = disabled(), set(names)
    return tuple(name for name in NAMES if name in wanted and name not in off)
