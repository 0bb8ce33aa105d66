"""Every rank plans: all come to TorchRec's plan, and what sets ranks apart is found and said, without a hang."""

from __future__ import annotations

import json
import logging
import os
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from tests.multirank.forked import fork_ranks
from tests.multirank.launch import launch

GB = 1024**3


@pytest.mark.timeout(300)
def test_ranks_with_other_hash_seeds_come_to_the_plan_of_torchrec() -> None:
    job = launch(["-m", "tests.multirank.planning_ranks", "5000", "30"], ranks=4, timeout=280).check()
    told = [json.loads(rank.stdout.splitlines()[-1]) for rank in job.ranks]
    assert len({hash_of_a_string for hash_of_a_string, _ in told}) == 4
    results = [result for _, result in told]
    assert len(results[0]) == 30
    assert sum(len(stock) == 64 for stock, _ in results[0].values()) > 15, "most of them plans, not errors"
    for result in results:
        assert {seed: (stock, own) for seed, (stock, own) in result.items() if own != stock} == {}
        assert result == results[0]


def settled(change: Callable[[int, Any], None] | None = None, **arguments: Any) -> tuple[str, list[str], bool]:
    """On one rank: the digest of the plan that is agreed on, what was said, and whether this rank planned itself.

    `change` may do something to this rank's environment or planner first.
    """
    import torch
    from torch import distributed
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology

    from initopt.sharding_plan import agree_on_plan, make_fast, plan_digest, plan_locally
    from tests.plans import SHARDERS, bags

    rank = int(os.environ["RANK"])
    on = Topology(world_size=2, local_world_size=2, compute_device="cuda", hbm_cap=16 * GB)
    given = {"topology": on, "debug": False, **{k: v(rank) if callable(v) else v for k, v in arguments.items()}}
    planner = make_fast(EmbeddingShardingPlanner(**given))
    if change is not None:
        change(rank, planner)
    distributed.init_process_group("gloo")
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("initopt").addHandler(handler)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        own = plan_locally(planner, bags([4000, 300]), SHARDERS, rank=rank)
        plan = agree_on_plan(own, distributed.group.WORLD, torch.device("cpu"))
    said += [str(one.message) for one in warned if "initopt" in str(one.message)]
    return plan_digest(plan), said, own.plan is not None


def test_equal_ranks_hold_their_own_plans_and_say_nothing() -> None:
    (one, said, planned), (other, also_said, also_planned) = fork_ranks(settled)
    assert one == other and planned and also_planned
    assert said == also_said == []


def of_other_memory(rank: int) -> Any:
    from torchrec.distributed.planner import Topology

    # On rank 1 the larger table does not fit on the device.
    hbm = 300_000 if rank else 16 * GB
    return Topology(world_size=2, local_world_size=2, compute_device="cuda", hbm_cap=hbm, ddr_cap=GB)


def test_a_rank_with_other_memory_takes_rank_0s_plan_and_that_is_said() -> None:
    (one, said, planned), (other, also_said, also_planned) = fork_ranks(settled, topology=of_other_memory)
    assert one == other and planned and also_planned
    assert said == [
        "initopt: rank 1 has another sharding plan, it was made from other topology. Rank 0's plan is used on all "
        "ranks, as TorchRec would"
    ]
    assert also_said == []


def tightly(rank: int) -> Any:
    from torchrec.distributed.planner import Topology

    return Topology(
        world_size=2, local_world_size=2, compute_device="cuda", hbm_cap=(1 if rank else 16 * GB), ddr_cap=1
    )


def test_a_rank_that_finds_no_plan_takes_rank_0s() -> None:
    (one, said, planned), (other, also_said, also_planned) = fork_ranks(settled, topology=tightly)
    assert one == other and planned and not also_planned
    assert "rank 1 has no sharding plan of its own. Rank 0's plan is used" in said[0]
    assert "rank 1 made no sharding plan: PlannerError" in also_said[0]


def own_partitioner(rank: int) -> Any:
    from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner

    class Mine(GreedyPerfPartitioner):  # type: ignore[misc]
        pass

    return Mine()


def test_with_a_part_of_the_users_own_rank_0_plans_for_all() -> None:
    (one, said, planned), (other, also_said, also_planned) = fork_ranks(settled, partitioner=own_partitioner)
    assert one == other and planned and not also_planned
    assert said == ["initopt: the other ranks wait for rank 0's sharding plan: search: Mine is not TorchRec's own"]
    assert also_said == []


def test_an_older_torchrec_with_constraints_plans_on_rank_0_only() -> None:
    def older(rank: int, planner: Any) -> None:
        from initopt.sharding_plan import together

        together._ORDERED_SINCE = (99, 0, 0)  # type: ignore[assignment]

    def constrained(rank: int) -> Any:
        from torchrec.distributed.planner import ParameterConstraints

        return {"t0": ParameterConstraints(sharding_types=["table_wise"])}

    (one, said, planned), (other, _, also_planned) = fork_ranks(settled, older, constraints=constrained)
    assert one == other and planned and not also_planned
    assert "orders the options of constrained tables by a hash" in said[0]


def test_a_timeout_that_cut_the_search_is_no_plan_for_others() -> None:
    def cut(rank: int, planner: Any) -> None:
        import dataclasses

        from initopt.sharding_plan import account, together

        together.account = lambda planner: dataclasses.replace(account(planner), timed_out=True)  # type: ignore[assignment]

    (one, said, _), (other, _, _) = fork_ranks(settled, cut)
    assert one == other
    assert "the timeout of the planner cut its search" in said[0]


def test_a_local_world_size_that_differs_is_an_error_on_all_ranks() -> None:
    def uneven(rank: int, planner: Any) -> None:
        os.environ["LOCAL_WORLD_SIZE"] = str(rank + 1)

    def refused() -> str:
        from initopt.sharding_plan import PlanError

        with pytest.raises(PlanError) as caught:
            settled(uneven)
        return str(caught.value)

    one, other = fork_ranks(refused)
    assert one == other
    assert "LOCAL_WORLD_SIZE differs between ranks: rank 0 has 1, rank 1 has 2" in one
