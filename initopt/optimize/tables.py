"""`fill-once`: the tables of a DistributedModelParallel are filled once, with the same bytes (see `table_init`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from initopt.optimize.saying import Saying

NAME = "fill-once"


@contextmanager
def filled_once(saying: Saying) -> Iterator[None]:
    """Around the making of one DistributedModelParallel. It concerns no other rank."""
    from initopt.table_init.fill_once import fill_once

    with fill_once() as filled:
        yield
    saying.filled(filled)
    if filled.left_out:
        saying.applied(NAME, f"{filled.left_out / 1e6:.1f} MB of tables were not filled twice")
    else:
        saying.left(NAME, "no table was large enough to be worth it, or none would have been filled twice")
