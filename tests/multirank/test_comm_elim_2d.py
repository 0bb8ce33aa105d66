"""Two-dimensional sharding with its meetings left out: real gloo ranks, and groups of jobs that don't fit here."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from tests.multirank import eliminated_ranks
from tests.multirank.eliminated_ranks import Case, Counter, Outcome, built, counted, outcome
from tests.multirank.forked import fork_ranks


@dataclass(frozen=True)
class Divided:
    """A collection, how it is made, the meetings of TorchRec and what is left of them, and the groups of a rank."""

    case: Case
    before: int
    after: int
    groups: int
    continuous: bool = False
    submodules: int = 0

    def made(self, case: Case, model: Any, plan: Any, sharders: Any) -> Any:
        from torch import device, distributed
        from torchrec.distributed.model_parallel import DMPCollection
        from torchrec.distributed.types import DMPCollectionConfig
        from torchrec.modules.embedding_modules import EmbeddingBagCollection

        world = distributed.get_world_size()
        size = world // case.replicas
        # Each with a plan of its own, which TorchRec changes.
        plans = [built(case)[1] for _ in range(self.submodules)]
        return DMPCollection(
            model,
            device("cpu"),
            plan,
            world,
            size,
            distributed.group.WORLD,
            node_group_size=case.local,
            sharders=sharders,
            use_inter_host_allreduce=self.continuous,
            submodule_configs=[DMPCollectionConfig(EmbeddingBagCollection, one, size) for one in plans],
        )


ROWS = (
    Divided(Case("EBC", ("column_wise",), replicas=2), 7, 1, 2, continuous=True),
    Divided(Case("EBC", ("table_row_wise", "data_parallel"), replicas=2, local=1), 18, 2, 4),
    Divided(Case("EBC", ("table_row_wise",), replicas=2, local=2), 23, 1, 4, submodules=2),
)


def divided(row: Divided, around: Any) -> tuple[Outcome, list[tuple[int, ...]]]:
    """What became of a row, and the ranks of each group that came with it."""
    from torch import distributed
    from torch.distributed import distributed_c10d as c10d

    # Before anything else stands in place of the class's functions.
    eliminated_ranks._on_cpu()
    eliminated_ranks.parallel = row.made
    members: list[tuple[int, ...]] = []

    def note() -> None:
        for group in c10d._world.pg_map:
            if group is not distributed.group.WORLD:
                members.append((group.group_desc, *distributed.get_process_group_ranks(group)))

    return outcome(row.case, around, then=note), sorted(members)


def both() -> list[Any]:
    import logging
    import warnings

    from initopt import eliminated

    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    return [(divided(row, nullcontext), divided(row, eliminated)) for row in ROWS]


def test_a_collection_is_as_in_torchrec_and_a_rank_makes_its_own_groups_once() -> None:
    for rank, found in enumerate(fork_ranks(both, ranks=4, timeout=200)):
        for row, ((stock, theirs), (mine, ours)) in zip(ROWS, found, strict=True):
            assert mine.state == stock.state and mine.result() == stock.result(), row
            assert sum(stock.meetings.values()) == row.before, (row, stock.meetings)
            assert sum(mine.meetings.values()) == row.after, (row, mine.meetings)
            assert mine.groups == row.groups and ours == sorted(set(theirs)), row
            assert all(rank in members for _, *members in ours), row


def disagreement(one: Divided, other: Divided) -> str:
    from initopt import Disagreement, eliminated

    with pytest.raises(Disagreement) as caught:
        divided(one if os.environ["RANK"] == "0" else other, eliminated)
    return str(caught.value)


def of(*shardings: str, **more: Any) -> Divided:
    return Divided(Case("EBC", shardings, replicas=2), 0, 0, 0, **more)


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (
            of("row_wise", continuous=True),
            "two-dimensional sharding differs between ranks (rank 0: use_inter_host_allreduce=False; ranks 1, 2, 3: "
            "use_inter_host_allreduce=True)",
        ),
        (of("table_wise"), "sharding plan of DistributedModelParallel differs between ranks (rank 0: tables.t0: row_"),
    ],
)
def test_a_rank_that_is_divided_in_another_way_is_named_before_any_group_is_made(other: Divided, says: str) -> None:
    for text in fork_ranks(disagreement, of("row_wise"), other, ranks=4):
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
