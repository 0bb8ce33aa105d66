"""A job pinned to the plan in a file: read, verified, and checked against the model and the job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.types import ShardingPlan

from initopt.sharding_plan.check import PlanError, check_plan
from initopt.sharding_plan.plan_file import PlanFile
from initopt.sharding_plan.tables import Table, shardable_modules


def load_plan(
    path: str | Path,
    model: nn.Module,
    *,
    world_size: int,
    local_world_size: int | None,
    pod_size: int | None = None,
    device: str | None = None,
    sharders: Sequence[Any] | None = None,
    topology: Topology | None = None,
    batch_size: int | None = None,
    constraints: Mapping[str, ParameterConstraints] | None = None,
) -> ShardingPlan:
    """Return the plan in the file `path` for `model` in this job. The arguments are those of `check.check_plan`.

    Raises PlanFileError for a file that can't be trusted, and PlanError, which lists everything that is wrong, for a
    plan that was made for another job or for other tables, or does not fit.
    """
    file = PlanFile.read(path)
    found = shardable_modules(model, sharders)
    made, job = file.planned_for, {"world_size": world_size, "local_world_size": local_world_size, "device": device}
    problems = [
        f"it was made for {name} {getattr(made, name)}, this job has {value}"
        for name, value in job.items()
        if value is not None and value != getattr(made, name)
    ]
    # One host a pod is what TorchRec takes where nothing is said of pods.
    if (made.pod_size or 1) != (pod_size or 1):
        problems.append(f"it was made for pods of {made.pod_size or 1} hosts, this job has {pod_size or 1} a pod")
    known = {table.path: table for shardable in found for table in shardable.tables.values()}
    problems += _other_tables(file.tables, known)
    if not problems:
        try:
            check_plan(
                file.plan,
                model,
                world_size=world_size,
                local_world_size=local_world_size,
                pod_size=pod_size,
                device=device,
                sharders=sharders,
                topology=topology,
                batch_size=batch_size,
                constraints=constraints,
            )
        except PlanError as error:
            problems = list(error.problems)
    if problems:
        raise PlanError(problems, f"the sharding plan in {path}")
    return file.plan


def _other_tables(planned: Sequence[Table], known: Mapping[str, Table]) -> Iterator[str]:
    made = {table.path: table for table in planned}
    yield from (f"table {path!r} is not in the plan" for path in known if path not in made)
    yield from (f"table {path!r} of the plan is not in the model" for path in made if path not in known)
    for path, table in made.items():
        now = known.get(path, table)
        for what, was, is_now in (
            ("as", _size(table), _size(now)),
            ("with the features", _features(table), _features(now)),
        ):
            if was != is_now:
                yield f"table {path!r} was planned {what} {was}, the model has {is_now}"


def _size(table: Table) -> str:
    return f"{table.rows} rows x {table.dim} of {table.dtype}"


def _features(table: Table) -> str:
    return ", ".join(table.features) or "none"
