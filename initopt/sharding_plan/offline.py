"""A plan made without a job: no GPU, no process group, no ranks; from a function that returns the model.

The planner looks at shapes only, so the tables of the model belong on the meta device: elsewhere they take their full
size of this machine's memory.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import inspect
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.planner.constants import BATCH_SIZE
from torchrec.distributed.planner.types import PlannerError, ShardingOption
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import ModuleSharder

from initopt.sharding_plan.check import PlanError, check_plan
from initopt.sharding_plan.fast import fast_planner
from initopt.sharding_plan.needs import gigabytes
from initopt.sharding_plan.plan_file import PlanFile, PlannedFor, RankEstimate, Share, versions
from initopt.sharding_plan.tables import path_of, shardable_modules

DEVICES = ("cuda", "cpu", "mtia", "tpu")

_REASONS = 5
"""So many tables of the slowest rank are kept with their times."""

_LARGE = 1 << 30
"""A model of so many bytes outside the meta device is worth a note."""


class OfflineError(ValueError):
    """A plan could not be asked for: what was named can't be imported, fails, or gives something else."""


class NoPlanError(ValueError):
    """TorchRec's planner found no plan. The message is its own."""


@dataclass(frozen=True)
class OfflinePlan:
    """A plan with what is wrong with it: `problems` are those of `check.PlanError`; `notes` are about its making."""

    file: PlanFile
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def names_file(what: str) -> bool:
    """Whether `what` is a plan file and no function."""
    return what.endswith(".json") or Path(what).is_file()


def read(path: str | Path) -> OfflinePlan:
    """The plan in a file, of which nothing can be checked without its model. Raises PlanFileError."""
    return OfflinePlan(PlanFile.read(path))


def make(
    what: str,
    *,
    world_size: int | None,
    local_world_size: int | None,
    sharders: str | None = None,
    constraints: str | None = None,
    progress: Callable[[str], None],
    **job: Any,
) -> OfflinePlan:
    """Return the plan for the model that the function `what` returns, as the command `initopt plan` asks for it.

    `sharders` and `constraints` name functions, too. `progress` is told what is being done. The rest is that of
    `plan_offline`. Raises OfflineError and NoPlanError.
    """
    missing = [
        option for option, value in (("--world-size", world_size), ("--local-size", local_world_size)) if value is None
    ]
    if world_size is None or local_world_size is None:
        raise OfflineError(f"{' and '.join(missing)} missing: a plan is made for so many ranks, so many of them a host")
    if world_size < local_world_size:
        raise OfflineError(f"--local-size {local_world_size} is more than the --world-size {world_size}")
    if world_size % local_world_size:
        raise OfflineError(f"--local-size {local_world_size} does not divide the --world-size {world_size}")
    hosts, pod = world_size // local_world_size, job.get("pod_size") or 1
    if hosts % pod:
        raise OfflineError(f"--pod-size {pod} does not divide {hosts} hosts, of {local_world_size} ranks each")
    if job["device"] not in DEVICES:
        raise OfflineError(f"--device {job['device']!r} is none of {', '.join(DEVICES)}")
    if job["device"] == "cpu" and job.get("hbm") is not None:
        raise OfflineError("--hbm is memory of an accelerator, and --device is cpu: give --ddr")
    progress(f"making the model of {what}")
    model = _model(what)
    listed = None if sharders is None else _sharders(sharders)
    limits = None if constraints is None else _constraints(constraints)
    known = {name for one in shardable_modules(model, listed) for name in one.tables}
    unknown = [name for name in limits or () if name not in known]
    if unknown:
        near = difflib.get_close_matches(unknown[0], known, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise OfflineError(f"{constraints!r} constrains {unknown[0]!r}, which is no table of the model{hint}")
    progress(f"planning for {world_size} ranks")
    return plan_offline(
        model, world_size=world_size, local_world_size=local_world_size, sharders=listed, constraints=limits, **job
    )


def plan_offline(
    model: nn.Module,
    *,
    world_size: int,
    local_world_size: int,
    pod_size: int | None = None,
    device: str = "cuda",
    hbm: int | None = None,
    ddr: int | None = None,
    batch_size: int | None = None,
    sharders: Sequence[Any] | None = None,
    constraints: Mapping[str, ParameterConstraints] | None = None,
) -> OfflinePlan:
    """Return the plan that a job with these ranks would make for `model`.

    `pod_size` is in hosts, `hbm` and `ddr` are bytes a rank and `batch_size` samples a rank (defaults: TorchRec's).

    Raises OfflineError for a model without tables or arguments that TorchRec refuses, NoPlanError if no plan fits.
    """
    sharders = list(get_default_sharders() if sharders is None else sharders)
    tables = [table for one in shardable_modules(model, sharders) for table in one.tables.values()]
    if not tables:
        kinds = ", ".join(sorted({sharder.module_type.__name__ for sharder in sharders}))
        raise OfflineError(f"the model has no tables that the sharders take, which are those of {kinds}")
    with _quiet():
        try:
            topology = Topology(
                world_size=world_size,
                compute_device=device,
                hbm_cap=hbm,
                ddr_cap=ddr,
                local_world_size=local_world_size,
                pod_size=pod_size,
            )
            planner = fast_planner(
                topology=topology,
                batch_size=batch_size,
                constraints=None if constraints is None else dict(constraints),
                stats=[],
                debug=False,
            )
            plan = planner.plan(model, sharders)
        except PlannerError as error:
            raise NoPlanError(str(error)) from error
        except Exception as error:
            raise OfflineError(f"TorchRec's planner refuses: {_said(error)}") from error
        problems: tuple[str, ...] = ()
        try:
            check_plan(
                plan,
                model,
                world_size=world_size,
                local_world_size=local_world_size,
                pod_size=pod_size,
                device=device,
                sharders=sharders,
            )
        except PlanError as error:
            problems = error.problems
    ranks, slowest = _estimates(planner.get_selected_options(), world_size)
    storages = [one.storage for one in topology.devices]
    memory = {name: tuple(getattr(storage, name) for storage in storages) for name in ("hbm", "ddr", "ssd")}
    made_for = PlannedFor(world_size, local_world_size, pod_size, device, batch_size or BATCH_SIZE, **memory)
    return OfflinePlan(PlanFile(plan, made_for, tuple(tables), ranks, slowest, versions()), problems, _notes(model))


def _called(name: str, what: str) -> Any:
    """Import the function `name`, written `module:function`, from the current directory or the path, and call it.

    `what` says what it should return, for the message. What it prints goes to stderr. Raises OfflineError that says
    where the module or the function failed.
    """
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        raise OfflineError(f"{name!r} names no function: write module:function, which returns {what}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    with contextlib.redirect_stdout(sys.stderr):
        try:
            module = importlib.import_module(module_name)
        except (Exception, SystemExit) as error:
            raise OfflineError(f"{module_name!r} can't be imported: {_said(error)}") from error
        function = getattr(module, attribute, None)
        if function is None:
            near = difflib.get_close_matches(attribute, dir(module), n=1)
            raise OfflineError(
                f"module {module_name!r} has no {attribute!r}" + (f" (did you mean {near[0]!r}?)" if near else "")
            )
        if not callable(function):
            raise OfflineError(f"{name!r} is {type(function).__name__!r}: name a function that returns {what}")
        needed = _needed(function)
        if needed:
            raise OfflineError(
                f"{name!r} takes {', '.join(map(repr, needed))}: it is called without arguments, so name a function "
                f"that takes none and returns {what}"
            )
        try:
            return function()
        except (Exception, SystemExit) as error:
            raise OfflineError(f"{name!r} failed: {_said(error)}") from error


def _model(name: str) -> nn.Module:
    made = _called(name, "a torch.nn.Module")
    if not isinstance(made, nn.Module):
        raise OfflineError(f"{name!r} returned {type(made).__name__!r}: it must return a torch.nn.Module")
    return made


def _sharders(name: str) -> list[Any]:
    made = _called(name, "a list of sharders")
    if not isinstance(made, list) or not all(isinstance(one, ModuleSharder) for one in made):
        raise OfflineError(f"{name!r} returned {type(made).__name__!r}: it must return a list of sharders")
    return made


def _constraints(name: str) -> dict[str, ParameterConstraints]:
    made = _called(name, "a dict of ParameterConstraints by table name")
    wrong = (
        [one for one in made.values() if not isinstance(one, ParameterConstraints)] if isinstance(made, dict) else []
    )
    if not isinstance(made, dict) or wrong:
        returned = f"a dict with {type(wrong[0]).__name__!r}" if wrong else repr(type(made).__name__)
        raise OfflineError(f"{name!r} returned {returned}: it must return a dict of ParameterConstraints by table name")
    return made


def _estimates(
    options: Sequence[ShardingOption], world_size: int
) -> tuple[tuple[RankEstimate, ...], tuple[Share, ...]]:
    sums = [[0, 0, 0, 0, 0.0, 0.0, 0.0, 0.0, 0.0] for _ in range(world_size)]
    for option in options:
        for shard in option.shards:
            total, storage, perf = sums[shard.rank], shard.storage, shard.perf
            parts = (perf.fwd_compute, perf.fwd_comms, perf.bwd_compute, perf.bwd_comms, perf.prefetch_compute)
            for i, part in enumerate((1, storage.hbm, storage.ddr, storage.ssd, *parts)):
                total[i] += part
    ranks = tuple(RankEstimate(rank, *total) for rank, total in enumerate(sums))  # type: ignore[arg-type]
    slowest = max(ranks, key=lambda rank: rank.time).rank
    shares: dict[str, float] = {}
    for option in options:
        path = path_of(option.path, option.name)
        mine = [shard.perf.total for shard in option.shards if shard.rank == slowest]
        if mine:
            shares[path] = shares.get(path, 0.0) + sum(mine)
    longest = sorted(shares.items(), key=lambda share: (-share[1], share[0]))[:_REASONS]
    return ranks, tuple(Share(path, time) for path, time in longest)


def _notes(model: nn.Module) -> tuple[str, ...]:
    held = sum(p.numel() * p.element_size() for p in model.parameters() if p.device.type != "meta")
    if held < _LARGE:
        return ()
    return (
        f"the model takes {gigabytes(held)} of this machine's memory: tables made with device=torch.device('meta') "
        "take none, and the plan is the same",
    )


def _needed(function: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def _said(error: BaseException) -> str:
    """What an exception says, and the line of the user's own code that it comes from."""
    text = f"{type(error).__name__}: {error}".rstrip(": ")
    here = os.getcwd() + os.sep
    own = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename.startswith(here) and "site-packages" not in frame.filename and frame.filename != __file__
    ]
    return f"{text} ({own[-1].filename.removeprefix(here)} line {own[-1].lineno})" if own else text


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    # TorchRec warns, on every plan, of a topology and a reservation that are its own defaults.
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
