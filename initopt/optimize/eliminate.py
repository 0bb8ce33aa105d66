"""`eliminate`: a DistributedModelParallel is made with as few meetings of ranks as it needs (see `comm_elim`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from initopt.optimizations import REWRITES
from initopt.optimize.saying import Saying
from initopt.optimize.together import Together

NAME = "eliminate"


@contextmanager
def eliminate(together: Together, saying: Saying, *, plan: bool) -> Iterator[None]:
    """Around the making of one DistributedModelParallel, on every rank. With `plan` each may make the plan of it."""
    why = together.why_not()
    if why:
        saying.left(NAME, why)
        yield
        return
    from initopt.comm_elim.elimination import eliminated

    with eliminated([name for name in REWRITES if plan or name != "plan"]) as elimination:
        yield
    if elimination.left_out:
        saying.applied(NAME, elimination.summary(), left_out=elimination.left_out)
    for name, reason in elimination.kept.items():
        part = "in part " if name in elimination.left_out else ""
        saying.left(NAME, f"{name} is {part}as in TorchRec: {reason}")
    if not elimination.left_out and not elimination.kept:
        saying.left(NAME, "there was no meeting of ranks to leave out")
