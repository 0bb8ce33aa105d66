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
    from tests import plans

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
        own = plan_locally(planner, plans.bags([4000, 300]), plans.SHARDERS, rank=rank)
        plan = agree_on_plan(own, distributed.group.WORLD, torch.device("cpu"))
    said += [str(one.message) for one in warned if "initopt" in str(one.message)]
    logging.getLogger("initopt").removeHandler(handler)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "initopt: ")
        try:
            agree_on_plan(own, distributed.group.WORLD, torch.device("cpu"))
        except UserWarning as error:
            said.append(f"an error: {error}")
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
    text = (
        "initopt: rank 1 has another sharding plan, it was made from other topology. Rank 0's plan is used on all "
        "ranks, as TorchRec would"
    )
    # Where warnings are errors, no rank goes on without the other.
    assert said == [text, f"an error: {text}"]
    assert also_said == [f"an error: {text}"]


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
    assert said == [
        "the search for a sharding plan is TorchRec's own: Mine is not TorchRec's own",
        "the other ranks wait for rank 0's sharding plan: search: Mine is not TorchRec's own",
    ]
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


def uneven(rank: int, planner: Any) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = str(rank + 1)


def by_host(rank: int) -> Any:
    from torchrec.distributed.planner import ParameterConstraints

    return {name: ParameterConstraints(sharding_types=["table_row_wise"]) for name in ("t0", "t1")}


def refused(*arguments: Any, **more: Any) -> str:
    from initopt.sharding_plan import PlanError

    with pytest.raises(PlanError) as caught:
        settled(*arguments, **more)
    return str(caught.value)


def test_a_local_world_size_that_differs_is_an_error_where_hosts_share_tables() -> None:
    one, other = fork_ranks(refused, uneven, constraints=by_host)
    assert one == other
    assert "differs between ranks (rank 0 has 1, rank 1 has 2), and the plan has table_row_wise tables" in one
    (digest, _, _), (same, _, _) = fork_ranks(settled, uneven)
    assert digest == same


def test_tables_in_another_order_are_refused_on_all_ranks() -> None:
    """Each rank would look rows up in the other's tables, and nothing would say so."""

    def reordered(rank: int, planner: Any) -> None:
        from tests import plans

        if rank:
            made = plans.bags
            plans.bags = lambda rows: made(list(reversed(rows)))  # type: ignore[assignment]

    for text in fork_ranks(refused, reordered):
        assert "rank 1 has other tables than rank 0, or has them in another order" in text


def test_a_plan_that_can_not_be_compared_is_rank_0s() -> None:
    def odd(rank: int) -> Any:
        import numpy
        from torchrec.distributed.planner import ParameterConstraints
        from torchrec.distributed.types import CacheParams

        return {"t0": ParameterConstraints(cache_params=CacheParams(load_factor=numpy.float64(0.2)))}  # type: ignore[arg-type]

    def loaded() -> float:
        import torch
        from torch import distributed
        from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology

        from initopt.sharding_plan import agree_on_plan, make_fast, plan_locally
        from tests.plans import SHARDERS, bags

        on = Topology(world_size=2, local_world_size=2, compute_device="cuda")
        planner = make_fast(EmbeddingShardingPlanner(topology=on, debug=False, constraints=odd(0)))
        distributed.init_process_group("gloo")
        own = plan_locally(planner, bags([4000, 300]), SHARDERS, rank=int(os.environ["RANK"]))
        return float(
            agree_on_plan(own, distributed.group.WORLD, torch.device("cpu")).plan[""]["t0"].cache_params.load_factor
        )

    assert fork_ranks(loaded) == [0.2, 0.2]


class Bare:
    """A planner of a user's own, with nothing of TorchRec's and no room for more."""

    __slots__ = ("inner",)

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def plan(self, *arguments: Any) -> Any:
        return self.inner.plan(*arguments)


def test_a_planner_of_any_class_plans_on_rank_0() -> None:
    def bare() -> tuple[str, str]:
        import torch
        from torch import distributed
        from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology

        from initopt.sharding_plan import agree_on_plan, make_fast, plan_digest, plan_locally
        from tests.plans import SHARDERS, bags

        on = Topology(world_size=2, local_world_size=2, compute_device="cuda")
        planner = make_fast(Bare(EmbeddingShardingPlanner(topology=on, debug=False)))
        distributed.init_process_group("gloo")
        own = plan_locally(planner, bags([4000, 300]), SHARDERS, rank=int(os.environ["RANK"]))
        return plan_digest(agree_on_plan(own, distributed.group.WORLD, torch.device("cpu"))), own.why

    (one, why), (other, _) = fork_ranks(bare)
    assert one == other and why.startswith("planner: ")
