"""Ranks that meet in different orders are told so at once, with both call sites, wherever they wait."""

from __future__ import annotations

import datetime
import re
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.multirank.eliminated_ranks import HOW, Case, outcome, own_group
from tests.multirank.forked import fork_ranks

LONG = datetime.timedelta(minutes=10)
"""Of the groups: who waits it out is ended by the test's own limit, which is shorter."""


def told(program: Any) -> str:
    """What this rank is told where it runs the program with its order watched."""
    from torch import distributed

    from initopt import Disagreement, one_order

    with pytest.raises(Disagreement) as caught, one_order():
        distributed.init_process_group("gloo", timeout=LONG)
        program(distributed)
    return str(caught.value)


def order_of_a_set(distributed: Any) -> None:
    """As in NVIDIA/apex#19: groups of the same ranks, made in an order of the rank's own. Their calls are alike."""
    import torch

    names = ["checkpoint", "dense", "metrics", "sparse"]
    rank = distributed.get_rank()
    groups = {name: distributed.new_group(timeout=LONG) for name in [*names[rank % 2 :], *names[: rank % 2]]}
    for name in names:
        distributed.all_reduce(torch.ones(1), group=groups[name])


def own_pair(distributed: Any) -> None:
    """As in pytorch/pytorch#130102: a rank asks for the pair that it belongs to only, and both get the same name."""
    import torch

    pair = distributed.new_group([0, 1] if distributed.get_rank() < 2 else [2, 3], timeout=LONG)
    distributed.all_reduce(torch.ones(1), group=pair)
    distributed.barrier()


def another_root(distributed: Any) -> None:
    import torch

    pair = [distributed.new_group([0, 1], timeout=LONG), distributed.new_group([2, 3], timeout=LONG)]
    rank = distributed.get_rank()
    distributed.barrier(group=pair[rank // 2])
    # In one pair only, while the other one waits for all.
    distributed.broadcast(torch.ones(1), src=2 + (rank == 3) if rank > 1 else 0, group=pair[rank // 2])
    distributed.barrier()


@pytest.mark.parametrize(
    ("program", "says"),
    [
        (order_of_a_set, r"meeting 5 of all ranks .*\(rank \d: all_reduce on group \d at .*; rank \d: all_reduce on "),
        (
            own_pair,
            r"meeting 1 of all ranks .*\(rank [01]: new_group for ranks 0-1, .*; rank [23]: new_group for ranks 2-3",
        ),
        (another_root, r"meeting 2 on group 2 .*\(rank 2: broadcast from rank 2 .*; rank 3: broadcast from rank 3 "),
    ],
)
def test_the_first_call_that_differs_is_named_on_all_ranks(program: Any, says: str) -> None:
    [text] = set(fork_ranks(told, program, ranks=4))
    assert re.match(says, text), text
    assert text.count(f"{Path(__file__).name}:") == 2


def compared_with_no_server() -> str:
    """What a rank is told whose job's store is gone: it goes on alone, and soon."""
    import os
    import signal
    import time

    from torch import distributed

    from initopt import one_order, store_connection
    from tests.multirank.forked_store import forked_store

    store_connection.CONNECT = 0.2
    with forked_store() as (store, server):
        # Two "ranks" that never meet: the group of one is all that is needed to ask for the store.
        distributed.init_process_group("fake", store=store, rank=0, world_size=2)
        os.kill(server, signal.SIGKILL)
        os.waitid(os.P_PID, server, os.WEXITED | os.WNOWAIT)
        began = time.monotonic()
        with pytest.warns(UserWarning) as warned, one_order():
            distributed.barrier()
        assert time.monotonic() - began < 10
    return str(warned[0].message)


def test_a_rank_whose_store_is_gone_goes_on_without() -> None:
    [text] = fork_ranks(compared_with_no_server, ranks=1)
    assert "one_order compares nothing, the job's store can't do it (no connection within 0.2 s" in text


def trained(cases: list[Case]) -> list[bool]:
    """Whether cases are as without, made by TorchRec and with meetings left out, two groups in one process."""
    import logging
    import warnings

    from initopt import eliminated, one_order

    @contextmanager
    def both() -> Any:
        with one_order(), eliminated() as elimination:
            yield elimination

    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    found = []
    for case in cases:
        expected = outcome(case, nullcontext).result()
        found.append(outcome(case, one_order).result() == expected == outcome(case, both).result())
        with one_order():
            found.append(outcome(case, nullcontext).result() == expected)
    from torch import distributed

    with own_group():
        with one_order():
            distributed.barrier()
        with one_order():
            found.append(distributed.new_group([0, 1]) is not None)
        # A rank that leaves closes connections that another one may still be making.
        distributed.barrier()
    return found


def test_a_start_in_one_order_goes_on_as_without() -> None:
    cases = [Case("EBC", HOW, steps=1, seeds="rank"), Case("EC", ("table_wise",), steps=1)]
    assert fork_ranks(trained, cases, ranks=4) == [[True] * 5] * 4
