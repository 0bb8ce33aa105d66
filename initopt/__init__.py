"""initopt: the start-up of a TorchRec trainer as a graph of steps: recorded, checked, overlapped, measured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from initopt.agreement import Agreement as Agreement
    from initopt.agreement import Difference as Difference
    from initopt.agreement import Disagreement as Disagreement
    from initopt.comm_elim.elimination import Elimination as Elimination
    from initopt.comm_elim.elimination import eliminated as eliminated
    from initopt.compile_cache.calls import Call as Call
    from initopt.compile_cache.compile_events import recompiled_since as recompiled_since
    from initopt.compile_cache.warmup import Compile as Compile
    from initopt.failure import PeerFailed as PeerFailed
    from initopt.failure import StartupFailed as StartupFailed
    from initopt.failure import StepTimeout as StepTimeout
    from initopt.graph import Collective as Collective
    from initopt.graph import Graph as Graph
    from initopt.graph import GraphError as GraphError
    from initopt.graph import OrderError as OrderError
    from initopt.graph import Step as Step
    from initopt.imports import record_imports as record_imports
    from initopt.one_order import one_order as one_order
    from initopt.overlap import Startup as Startup
    from initopt.overlap import Values as Values
    from initopt.record import FIRST_STEP as FIRST_STEP
    from initopt.record import Recorder as Recorder
    from initopt.record import Span as Span
    from initopt.record import step as step
    from initopt.runs import Run as Run
    from initopt.sharding_plan import OwnPlan as OwnPlan
    from initopt.sharding_plan import PlanError as PlanError
    from initopt.sharding_plan import agree_on_plan as agree_on_plan
    from initopt.sharding_plan import check_plan as check_plan
    from initopt.sharding_plan import fast_planner as fast_planner
    from initopt.sharding_plan import load_plan as load_plan
    from initopt.sharding_plan import make_fast as make_fast
    from initopt.sharding_plan import plan_locally as plan_locally
    from initopt.table_init.fill_once import Filled as Filled
    from initopt.table_init.fill_once import fill_once as fill_once

_HOME = {
    "FIRST_STEP": "record",
    "Agreement": "agreement",
    "Call": "compile_cache.calls",
    "Collective": "graph",
    "Compile": "compile_cache.warmup",
    "Difference": "agreement",
    "Disagreement": "agreement",
    "Elimination": "comm_elim.elimination",
    "Filled": "table_init.fill_once",
    "Graph": "graph",
    "GraphError": "graph",
    "OrderError": "graph",
    "PeerFailed": "failure",
    "Recorder": "record",
    "Run": "runs",
    "Span": "record",
    "Startup": "overlap",
    "StartupFailed": "failure",
    "Step": "graph",
    "StepTimeout": "failure",
    "Values": "overlap",
    "OwnPlan": "sharding_plan",
    "PlanError": "sharding_plan",
    "agree_on_plan": "sharding_plan",
    "check_plan": "sharding_plan",
    "eliminated": "comm_elim.elimination",
    "fast_planner": "sharding_plan",
    "fill_once": "table_init.fill_once",
    "load_plan": "sharding_plan",
    "make_fast": "sharding_plan",
    "one_order": "one_order",
    "plan_locally": "sharding_plan",
    "record_imports": "imports",
    "recompiled_since": "compile_cache.compile_events",
    "step": "record",
}

__version__ = "0.1.0"

__all__ = [
    "FIRST_STEP",
    "Agreement",
    "Call",
    "Collective",
    "Compile",
    "Difference",
    "Disagreement",
    "Elimination",
    "Filled",
    "Graph",
    "GraphError",
    "OrderError",
    "OwnPlan",
    "PeerFailed",
    "PlanError",
    "Recorder",
    "Run",
    "Span",
    "Startup",
    "StartupFailed",
    "Step",
    "StepTimeout",
    "Values",
    "agree_on_plan",
    "check_plan",
    "eliminated",
    "fast_planner",
    "fill_once",
    "load_plan",
    "make_fast",
    "one_order",
    "plan_locally",
    "recompiled_since",
    "record_imports",
    "step",
]


def __getattr__(name: str) -> Any:
    # A worker that imports initopt for one of its names doesn't pay for the others.
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value  # asked for once only: `step` may stand in a loop
    return value


def __dir__() -> list[str]:
    return __all__
