"""Two-dimensional sharding with its meetings left out: real gloo ranks, and groups of jobs that don't fit here."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from tests.multirank.collection_ranks import Pair, collection
from tests.multirank.eliminated_ranks import Counter, counted
from tests.multirank.forked import fork_ranks

pytestmark = pytest.mark.timeout(120)

CASES: dict[str, tuple[dict[str, Any], int, int, int]] = {
    # What the collection is made with; the meetings of TorchRec, and what is left of them; the groups of a rank.
    "tables": ({"shardings": ("table_wise", "row_wise")}, 7, 1, 2),
    "continuous ranks": ({"shardings": ("column_wise",), "inter": True}, 7, 1, 2),
    "hosts": ({"shardings": ("table_row_wise", "data_parallel"), "node": 1}, 18, 2, 4),
    "submodules": ({"shardings": ("table_row_wise",), "node": 2, "submodules": 2}, 23, 1, 4),
}


def both() -> dict[str, tuple[Pair, Pair]]:
    import logging
    import warnings

    from initopt import eliminated

    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    return {name: (collection(**how), collection(around=eliminated, **how)) for name, (how, *_) in CASES.items()}


def test_a_collection_is_as_in_torchrec_and_a_rank_makes_its_own_groups_only() -> None:
    for rank, found in enumerate(fork_ranks(both, ranks=4, timeout=100)):
        for name, (_, before, after, groups) in CASES.items():
            stock, mine = found[name]
            assert mine.result() == stock.result(), name
            assert (sum(stock.meetings.values()), sum(mine.meetings.values())) == (before, after), (
                name,
                stock.meetings,
            )
            assert mine.groups == groups and len(set(mine.ranks)) == groups, (name, mine.ranks)
            assert set(mine.ranks) == set(stock.ranks) and all(rank in ranks for _, ranks in mine.ranks), name


def other_groups(rank: int) -> dict[str, Any]:
    return {"size": 2 if rank else 4}


def other_plan(rank: int) -> dict[str, Any]:
    return {"shardings": ("row_wise",) if rank else ("table_wise",)}


def disagreement(change: Callable[[int], dict[str, Any]]) -> str:
    from initopt import Disagreement, eliminated

    given = {"shardings": ("row_wise",), **change(int(os.environ["RANK"]))}
    with pytest.raises(Disagreement) as caught:
        collection(around=eliminated, **given)
    return str(caught.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            other_groups,
            "two-dimensional sharding differs between ranks (rank 0: sharding_group_size=4; ranks 1",
        ),
        (other_plan, "sharding plan of DistributedModelParallel differs between ranks (rank 0: tables.t0: table_wise"),
    ],
)
def test_a_rank_that_is_divided_in_another_way_is_named_before_any_group_is_made(change: Any, says: str) -> None:
    for text in fork_ranks(disagreement, change, ranks=4):
        assert says in text


def asked(ranks: int, size: int, node: int, around: AbstractContextManager[None]) -> tuple[int, int, list[int]]:
    """Calls that make a group, groups that came, and the sizes of this rank's, for two contexts and their hosts."""
    import torch
    from torch import distributed
    from torch.distributed import distributed_c10d as c10d
    from torchrec.distributed import comm, model_parallel
    from torchrec.distributed.sharding import twrw_sharding

    seen: Counter[str] = Counter()
    known = set(c10d._world.pg_map)
    of_cpu = SimpleNamespace(_device=torch.device("cpu"))
    with counted(seen), around:
        for _ in range(2):
            make = model_parallel.DMPCollection._create_process_groups
            mesh, sharding, _ = make(of_cpu, 0, ranks, size)
        env = SimpleNamespace(sharding_pg=sharding, node_group_size=node, use_inter_host_allreduce=False)
        twrw_sharding.intra_and_cross_node_pg_2D(env, torch.device("cpu"))
    comm._INTRA_PG_2D = comm._CROSS_PG_2D = comm._NODE_GROUP_SIZE_2D = None
    new = [group for group in c10d._world.pg_map if group not in known]
    assert mesh.get_group("shard") is sharding
    return sum(seen.values()), len(new), sorted(distributed.get_world_size(group) for group in new)


def large(ranks: int, size: int, node: int) -> list[tuple[int, int, list[int]]]:
    from torch import distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from initopt.comm_elim import groups

    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    return [
        asked(ranks, size, node, nullcontext()),
        asked(ranks, size, node, groups.rewritten(lambda count: None, lambda why: None)),
    ]


def test_a_rank_of_a_large_job_makes_as_many_groups_as_it_belongs_to() -> None:
    for ranks, size, node in ((64, 32, 8), (1024, 128, 8)):
        [(stock, mine)] = fork_ranks(large, ranks, size, node, ranks=1)
        meshes, hosts = ranks // size + size, ranks // node + (ranks // size) * node
        assert stock[0] == 2 * meshes + hosts + 2, "a barrier after each kind of hosts' groups"
        assert stock[1] == 6, "those of the second context are the first's again"
        assert mine == (0, 4, sorted([size, ranks // size, node, size // node]))


def environments() -> tuple[list[int], bool]:
    """Groups of two sharding environments as TorchRec makes them where CUDA is there and ranks meet over gloo."""
    import torch
    from torch import distributed
    from torchrec.distributed.types import ShardingEnv

    from initopt.comm_elim import groups
    from tests.multirank.eliminated_ranks import groups as known
    from tests.multirank.eliminated_ranks import own_group

    torch.cuda.is_available = lambda: True
    made = []
    with own_group():
        for around in (nullcontext(), groups.rewritten(lambda count: None, lambda why: None)):
            before = known()
            with around:
                meshes = [ShardingEnv.from_process_group(distributed.group.WORLD).device_mesh for _ in range(2)]
            made.append(known() - before)
        return made, all(mesh.get_group() is distributed.group.WORLD for mesh in meshes)


def test_the_mesh_of_an_environment_is_of_the_worlds_group() -> None:
    assert fork_ranks(environments) == [([2, 0], True)] * 2
