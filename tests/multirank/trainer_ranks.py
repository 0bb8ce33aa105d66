"""The plain trainers of `benchmarks/trainers` as forked ranks: as they are, recorded, or with `--optimize`."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import sys

from tests.multirank.launch import REPOSITORY
from tests.multirank.optimized_ranks import watched

TRAINERS = REPOSITORY / "benchmarks" / "trainers"


def rank_of(root: str, names: tuple[str, ...] | None, script: str, *options: str) -> str:
    """One rank, and what it wrote on stdout. `names` are what is optimized, None for the trainer as it is."""
    out = io.StringIO()
    if names is not None:
        watched(root, names)
    if script.endswith(".py"):
        sys.path.insert(0, str(TRAINERS))
        sys.argv = [str(TRAINERS / script), *options]
        with contextlib.redirect_stdout(out):
            runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        sys.argv = [script, *options]
        with contextlib.redirect_stdout(out):
            # It was imported before the fork.
            sys.modules[script].main()
    return out.getvalue()


def spawned_rank_of(*, steps: int) -> str:
    """One rank of the HSTU trainer, which finds no RANK, and what it wrote on stdout."""
    from benchmarks.trainers import hstu

    rank, port = int(os.environ.pop("RANK")), int(os.environ["MASTER_PORT"])
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        hstu.spawned(rank, port, hstu.Config(steps=steps))
    return out.getvalue()
