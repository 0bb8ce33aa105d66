"""`plan`: the sharding plan is made by the fast planner, and by every rank instead of by rank 0 for all.

`EmbeddingShardingPlanner.plan` is made fast wherever it is called. `collective_plan` makes the plan on each rank and
compares it in one small collective (see `sharding_plan.together`). A planner of the trainer's own class is left alone.

A plan that the script has from elsewhere is looked at, too: where DistributedModelParallel fails with one that does not
fit, the error says what does not.
"""

from __future__ import annotations

import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from initopt.optimize.saying import Saying
from initopt.optimize.together import Together

NAME = "plan"


class Plan:
    """Stands in for the two methods of a planner that make a plan."""

    def __init__(self, together: Together, saying: Saying) -> None:
        self._together = together
        self._saying = saying
        self._here = threading.local()

    def instead(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """What is called in place of `plan` or `collective_plan`."""
        return self._on_all_ranks(function) if function.__name__ == "collective_plan" else self._sooner(function)

    def _sooner(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def plan(planner: Any, *args: Any, **kwargs: Any) -> Any:
            known = self._is_known(planner)
            if known:
                self._make_fast(planner)
            result = function(planner, *args, **kwargs)
            if known and not getattr(self._here, "with_others", False):
                self._say_parts(planner)
            return result

        return plan

    def _on_all_ranks(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def collective_plan(planner: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._is_known(planner):
                return function(planner, *args, **kwargs)
            from torch import distributed
            from torchrec.distributed.model_parallel import get_default_sharders

            from initopt.sharding_plan import agree_on_plan, plan_locally

            given = inspect.signature(function).bind(planner, *args, **kwargs)
            given.apply_defaults()
            model, sharders, group = (given.arguments[name] for name in ("module", "sharders", "pg"))
            group = distributed.group.WORLD if group is None else group
            device = _device(group) if group is not None and distributed.get_world_size(group) > 1 else None
            why = self._together.why_not() if device is not None else ""
            if why:
                self._saying.left(NAME, why)
            if device is None or why:
                return function(planner, *args, **kwargs)
            # Where it can't be made fast, the ranks still meet: the others do.
            self._make_fast(planner)
            sharders = get_default_sharders() if sharders is None else sharders
            self._here.with_others = True
            try:
                own = plan_locally(planner, model, sharders, rank=distributed.get_rank(group))
            finally:
                self._here.with_others = False
            plan = agree_on_plan(own, group, device)
            if own.why:
                self._saying.left(NAME, f"rank 0 made the sharding plan for all: {own.why}")
            else:
                self._saying.applied(NAME, "; ".join(("every rank made the sharding plan", *own.remarks)))
            return plan

        return collective_plan

    def _is_known(self, planner: Any) -> bool:
        """Whether the planner is TorchRec's own; if not, that is said."""
        planners: Any = sys.modules["torchrec.distributed.planner.planners"]
        if type(planner) is planners.EmbeddingShardingPlanner:
            return True
        self._saying.left(NAME, f"{type(planner).__name__} is a planner of the trainer's own")
        return False

    def _make_fast(self, planner: Any) -> None:
        with self._saying.costs_only(NAME):
            from initopt.sharding_plan import make_fast

            make_fast(planner)

    def _say_parts(self, planner: Any) -> None:
        with self._saying.costs_only(NAME):
            from initopt.sharding_plan import account

            did = account(planner)
            parts = [f"the {part.part} ran as it is: {part.reason}" for part in did.stock]
            if did.fast:
                self._saying.applied(NAME, "; ".join(("the sharding plan was searched for in the fast way", *parts)))
            else:
                self._saying.left(NAME, "; ".join(parts))


@contextmanager
def explained(kind: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
    """Around the making of a class of TorchRec with these arguments: PlanError where it fails of the plan it is given.

    What is wrong is found before, since what has failed may have changed the model.
    """
    wrong: Exception | None = None
    try:
        wrong = _wrong(kind, *args, **kwargs)
    except Exception:
        # Nothing is known then. Arguments that are not right are TorchRec's to refuse.
        wrong = None
    try:
        yield
    except (IndexError, KeyError, ValueError) as raised:
        if wrong is None:
            raise
        raise wrong from raised


def _wrong(kind: Any, *args: Any, **kwargs: Any) -> Exception | None:
    from torch import distributed

    from initopt.sharding_plan import PlanError, check_plan

    given = inspect.signature(kind.__init__).bind(*args, **kwargs)
    given.apply_defaults()
    plan, model = given.arguments.get("plan"), given.arguments["module"]
    # In two dimensions a plan is for a part of the ranks.
    if kind.__name__ != "DistributedModelParallel" or plan is None or given.arguments["env"] is not None:
        return None
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    pods = os.environ.get("TORCHREC_RESOLVED_POD_SIZE", "")
    try:
        check_plan(
            plan,
            model,
            world_size=distributed.get_world_size(),
            local_world_size=int(local) if local.isdecimal() else None,
            pod_size=int(pods) if pods.isdecimal() else None,
            sharders=given.arguments["sharders"],
        )
    except PlanError as error:
        return error
    return None


def _device(group: Any) -> Any:
    """Where the ranks of a group meet; None where that is not known."""
    import torch
    from torch import distributed

    backend = distributed.get_backend(group)
    if "gloo" in backend:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device()) if "nccl" in backend else None
