"""The sharding plan that TorchRec's planner makes, in a fraction of the time."""

from initopt.sharding_plan.fast import Account, StockPart, account, fast_planner, make_fast

__all__ = ["Account", "StockPart", "account", "fast_planner", "make_fast"]
