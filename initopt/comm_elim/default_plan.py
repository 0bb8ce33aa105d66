"""The plan that DistributedModelParallel asks for where it is given none, made on every rank.

TorchRec makes it on rank 0 and sends it (`torchrec/distributed/model_parallel.py:352`, `planner/planners.py:795`). A
plan is a function of the model, the sharders and the topology, which every rank has, so each makes it, and the
agreement shows that all made the same. Where they did not, or a planner is not known to give one result everywhere,
rank 0's is sent as ever (`initopt/sharding_plan/together.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import distributed

from initopt.agreement import Agreement
from initopt.replaced import on_this_thread


@contextmanager
def rewritten(
    agreement: Agreement, agreed: Callable[[], None], left_out: Callable[[int], None], *, local: bool
) -> Iterator[None]:
    """Plan on each rank in the block, and hold `agreement` when that is done; `agreed` is called after it.

    If not `local`, rank 0 plans for all, but the ranks understand others that do.
    """
    from torchrec.distributed.planner import EmbeddingShardingPlanner

    from initopt.sharding_plan import OwnPlan, agree_on_plan, make_fast, plan_locally

    def plan(planner: Any, module: Any, sharders: Sequence[Any], group: Any) -> Any:
        rank = distributed.get_rank(group)
        if local:
            own = plan_locally(make_fast(planner), module, sharders, rank=rank)
        else:
            planned = None if rank else planner.plan(module, sharders)
            own = OwnPlan(planned, "the rewrite 'plan' is not used", asked=True)
        found = agree_on_plan(own, group, agreement.device, agreement=agreement)
        numbers = set(agreement.told("sharding plan"))
        if len(numbers) == 1 and 0 not in numbers:
            left_out(1)
        agreed()
        return found

    with on_this_thread(EmbeddingShardingPlanner, "collective_plan", plan):
        yield
