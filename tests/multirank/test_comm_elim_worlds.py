"""Meetings left out on two hosts, in two dimensions, with metric modules, and for more ranks than there are."""

from __future__ import annotations

import os
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest

from tests.multirank.eliminated_ranks import HOW, Case, Counts, Outcome, constructed, outcome, outcomes
from tests.multirank.fake_world import fake_world
from tests.multirank.forked import fork_ranks
from tests.multirank.forked_agents import fork_agents

MORE = (
    Case("EBC", ("table_wise", "row_wise"), replicas=2, local=1, seeds="rank"),
    Case("EBC", ("table_row_wise",) * 2, replicas=2, local=1),
    Case("EC", ("table_wise", "row_wise"), replicas=2, local=1),
    Case("EBC", ("table_wise", "data_parallel"), metrics="RecMetricModule", seeds="rank"),
    Case("EBC", ("row_wise",), metrics="CPUOffloadedRecMetricModule"),
)
"""What the table of `test_comm_elim` has not."""

COUNTED = (
    *MORE[1:3],
    MORE[4],
    Case("EBC", HOW, steps=0),
    Case("EC", ("table_wise", "row_wise", "column_wise"), steps=0),
    Case("MC EBC", ("row_wise",) * 2, steps=0),
)


def quietly() -> None:
    import logging
    import warnings

    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")


def on_gloo() -> tuple[dict[str, Any], dict[str, Any]]:
    """All rows as TorchRec makes them, and without meetings."""
    cases = list(dict.fromkeys((*MORE, *COUNTED)))
    return outcomes(cases, "stock"), outcomes(cases, "eliminated")


def on_fake() -> list[tuple[Counts, Counts]]:
    """The rows that are counted, on one rank of four."""
    from initopt import eliminated

    quietly()
    found = []
    for case in COUNTED:
        both = []
        for around in (nullcontext, eliminated):
            with fake_world(4):
                both.append(constructed(case, around))
        found.append((both[0], both[1]))
    return found


# torchmetrics still asks distutils for versions.
@pytest.mark.filterwarnings("ignore:distutils Version classes:DeprecationWarning")
def test_two_dimensions_and_metrics_are_as_in_torchrec_and_are_counted_alike_by_the_fake_backend() -> None:
    # Once, for all ranks.
    import torchrec.metrics.cpu_offloaded_metric_module  # noqa: F401

    found = fork_ranks(on_gloo, ranks=4, timeout=200)
    for case in MORE:
        for stock, mine in found:
            expected, other = stock[case.name], mine[case.name]
            assert other.state == expected.state, case.name
            assert other.result() == expected.result(), case.name
            assert len(expected.losses) == 3
            assert other.created == other.groups <= expected.groups, case.name
            # The agreement, data-parallel tables, and dense parameters of other seeds.
            sent = ("data_parallel" in case.shardings) + (case.seeds == "rank")
            assert other.everybody == 1 + sent < expected.everybody, case.name
        # TorchRec gives them to rank 0 alone.
        assert bool(found[0][0][case.name].metrics) == bool(case.metrics)
    [counts] = fork_ranks(on_fake, ranks=1)
    for case, both in zip(COUNTED, counts, strict=True):
        for fake, gloo in zip(both, (side[case.name] for side in found[0]), strict=True):
            assert fake.calls == gloo.meetings, case.name
            assert (fake.created, fake.belongs, fake.everybody) == (gloo.created, gloo.groups, gloo.everybody)


def many(ranks: int) -> list[Counts]:
    """Tables of all kinds on one of so many ranks."""
    from initopt import eliminated

    quietly()
    found = []
    for around in (nullcontext, eliminated):
        with fake_world(ranks):
            found.append(constructed(Case("EBC", HOW, local=8), around, rows=lambda index: 4 * ranks))
    return found


def test_what_is_left_does_not_grow_with_the_ranks() -> None:
    for ranks in (64, 256):
        [[stock, mine]] = fork_ranks(many, ranks, ranks=1)
        assert stock.created == ranks // 8 + 8 and stock.belongs == 2
        assert mine.created == mine.belongs == 2
        assert mine.everybody == mine.collectives == 2, "the agreement, and the data-parallel tables"


def on_two_hosts(cases: list[Case]) -> list[tuple[Outcome, Outcome, tuple[Any, ...]]]:
    from torch import distributed
    from torchrec.distributed import comm

    from initopt import eliminated

    quietly()
    assert (os.environ["LOCAL_WORLD_SIZE"], os.environ["GROUP_RANK"]) == ("2", str(int(os.environ["RANK"]) // 2))
    found = []
    for case in cases:
        members: list[Any] = []

        def note(members: list[Any] = members) -> None:
            members += map(distributed.get_process_group_ranks, (comm._INTRA_PG, comm._CROSS_PG))

        stock, mine = outcome(case, nullcontext), outcome(case, eliminated, then=note)
        found.append((stock, mine, tuple(members)))
    return found


def test_two_hosts_make_the_groups_that_a_rank_belongs_to_and_train_as_torchrec() -> None:
    cases = [Case("EBC", ("table_row_wise", "grid_shard")), Case("EBC", HOW, seeds="rank")]
    for rank, found in enumerate(fork_agents(on_two_hosts, cases)):
        host, place = divmod(rank, 2)
        for stock, mine, members in found:
            assert mine.result() == stock.result()
            assert members == ([2 * host, 2 * host + 1], [place, place + 2])
            assert (stock.created, stock.groups) == (4, 2)
            assert mine.created == mine.groups == 2
            assert "barrier" in stock.meetings and "barrier" not in mine.meetings


def test_the_fake_world_tells_when_a_rank_makes_groups_of_others() -> None:
    """That the counts above can be another number."""
    [stock] = fork_ranks(partial(_with, "ddp_sync"), ranks=1)
    assert stock.created == 4 and stock.belongs == 2 and stock.calls["barrier"] == 2


def _with(rewrite: str) -> Counts:
    from initopt import eliminated

    quietly()
    with fake_world(4):
        return constructed(Case("EBC", ("table_row_wise",)), partial(eliminated, [rewrite]))
