"""The sharding plan that TorchRec's planner makes, in a fraction of the time; checked, kept in a file, pinned."""

from initopt.sharding_plan.check import PlanError, check_plan
from initopt.sharding_plan.fast import Account, StockPart, account, fast_planner, make_fast
from initopt.sharding_plan.pinning import load_plan
from initopt.sharding_plan.plan_file import PlanFile, PlanFileError
from initopt.sharding_plan.plan_json import plan_digest
from initopt.sharding_plan.together import OwnPlan, agree_on_plan, plan_locally

__all__ = [
    "Account",
    "OwnPlan",
    "PlanError",
    "PlanFile",
    "PlanFileError",
    "StockPart",
    "account",
    "agree_on_plan",
    "check_plan",
    "fast_planner",
    "load_plan",
    "make_fast",
    "plan_digest",
    "plan_locally",
]
