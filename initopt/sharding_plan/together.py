"""Every rank makes the sharding plan, and one collective shows that all of them hold the same.

TorchRec plans on rank 0 while the other ranks wait to be told. A plan is a function of its inputs, though, so each rank
can make it. What all ranks must have in common is gathered as digests, never assumed: where ranks differ, or a part of
the planner is not known to give the same result everywhere, rank 0's plan is broadcast as TorchRec would.
"""

from __future__ import annotations

import enum
import hashlib
import importlib.metadata
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, cast

import torch
from torch import distributed, nn
from torchrec.distributed.types import ShardingPlan

from initopt.agreement import Agreement
from initopt.cores import ranks_of_host
from initopt.replaced import on_this_thread
from initopt.sharding_plan.check import BY_HOST, PlanError
from initopt.sharding_plan.fast import Account, account, foreign_parts
from initopt.sharding_plan.plan_json import canonical, plan_digest
from initopt.sharding_plan.tables import shardable_modules

logger = logging.getLogger("initopt")

INPUTS = ("versions", "tables", "sharders", "topology", "constraints", "planner")
"""What a plan is made from, as a difference between ranks is named."""

_ORDERED_SINCE = (1, 9, 2)
"""The torchrec since which the options of a constrained table no longer stand in the order of a set."""

_PLAN = "sharding plan"
_SIZE = "LOCAL_WORLD_SIZE of the sharding plan"
_WIDTH = 8
"""Bytes of each digest."""
_NONE = 0
"""The number of what a rank does not have."""
_MOST = 200_000
"""Values that are looked at to digest one input; a tensor counts as one, and a large one by its shape."""


@dataclass(frozen=True)
class OwnPlan:
    """What this rank found. `why` says why its `plan` is not to be taken for the other ranks'; empty if it is. That is
    no news where it was `asked` for.

    `inputs` has a digest of each of INPUTS, `remarks` say what the planner did, `local_world_size` is this rank's
    LOCAL_WORLD_SIZE, 0 where it has none.
    """

    plan: ShardingPlan | None
    why: str = ""
    inputs: Mapping[str, bytes] = field(default_factory=lambda: dict.fromkeys(INPUTS, bytes(_WIDTH)))
    remarks: tuple[str, ...] = ()
    local_world_size: int = field(default_factory=ranks_of_host)
    asked: bool = False


def plan_locally(planner: Any, model: nn.Module, sharders: Sequence[Any], *, rank: int) -> OwnPlan:
    """Make the plan on this rank. Ranks other than 0 do so only if the plan will be the same there (see `make_fast`).

    Raises on rank 0 what the planner raises; on another rank that is told to the others, who may know better.
    """
    inputs = _inputs(planner, model, sharders)
    why = _differs_by_nature(planner)
    if rank != 0 and why:
        return OwnPlan(None, why, inputs)
    try:
        with _reported_by(rank, planner):
            plan = planner.plan(model, list(sharders))
    except Exception as error:
        if rank == 0:
            raise
        return OwnPlan(None, f"{type(error).__name__}: {error}", inputs)
    did = account(planner)
    if did.timed_out:
        why = why or "the timeout of the planner cut its search, and ranks are not equally fast"
    return OwnPlan(plan, why, inputs, _remarks(did))


def agree_on_plan(
    own: OwnPlan, group: Any, device: torch.device, *, agreement: Agreement | None = None
) -> ShardingPlan:
    """Return the plan that all ranks of `group` hold: this rank's own, or rank 0's where they are not all the same.

    Holds one all_gather of 256 bytes a rank, on `device`, and a broadcast where it is needed. With an `agreement` of
    the same group, what else it is about is compared in the same all_gather, and a strict one makes it an error that
    plans differ. Raises PlanError on all ranks if they don't have the same tables in the same order, whose rows would
    be looked up in each other's, or if their LOCAL_WORLD_SIZE differs and the plan divides a table among the ranks of a
    host.
    """
    agreement = agreement or Agreement(group, device)
    if distributed.get_world_size(group) == 1 and own.plan is not None:
        agreement.plan = own.plan
        return own.plan
    number = _NONE
    if own.plan is not None and not own.why:
        try:
            number = _number(bytes.fromhex(plan_digest(own.plan)))
        except Exception as error:
            own = replace(own, why=f"the plan can't be compared: {error}")
    agreement.tell(_PLAN, number)
    for name in INPUTS:
        agreement.tell(f"{_PLAN} made from {name}", _number(own.inputs[name]))
    agreement.tell(_SIZE, own.local_world_size)
    agreement.hold()
    told = _told(agreement)
    _check_tables(told)
    plan = agreement.plan = _settled(own, told, agreement)
    sizes = {message.local_world_size: rank for rank, message in reversed(list(enumerate(told)))}
    by_host = BY_HOST & {one.sharding_type for tables in plan.plan.values() for one in _shardings(tables)}
    if len(sizes) > 1 and by_host:
        seen = sorted(f"rank {rank} has {size or 'none'}" for size, rank in sizes.items())
        tables = f"the plan has {', '.join(sorted(by_host))} tables"
        raise PlanError([f"LOCAL_WORLD_SIZE differs between ranks ({', '.join(seen)}), and {tables}"])
    return plan


def _shardings(tables: Any) -> list[Any]:
    return list(tables.values()) if isinstance(tables, Mapping) else []


def _check_tables(told: Sequence[_Message]) -> None:
    place = INPUTS.index("tables")
    seen = [message.inputs[place] for message in told]
    others = [rank for rank, tables in enumerate(seen) if tables != seen[0] and _NONE not in (tables, seen[0])]
    if others:
        raise PlanError([f"rank {others[0]} has other tables than rank 0, or has them in another order"])


def _settled(own: OwnPlan, told: Sequence[_Message], agreement: Agreement) -> ShardingPlan:
    if own.plan is not None and all(message.plan == told[0].plan != _NONE for message in told):
        return own.plan
    group = agreement.group
    rank = distributed.get_rank(group)
    if agreement.strict and told[0].plan != _NONE:
        raise PlanError([_differs(own, told)])
    refused = ""
    if rank == 0:
        refused = _say(own, told)
    elif own.why and told[0].plan != _NONE:
        logger.warning("rank %d made no sharding plan: %s", rank, own.why)
    sent: list[Any] = [own.plan, refused]
    distributed.broadcast_object_list(sent, group_src=0, group=group)
    plan, refused = sent
    if refused:
        raise UserWarning(refused)
    if plan is None:
        raise RuntimeError("rank 0 has no sharding plan to give to the others")
    return cast("ShardingPlan", plan)


@dataclass(frozen=True)
class _Message:
    """What the ranks tell each other. `plan` is _NONE where a rank has no plan that could be the others'."""

    plan: int
    inputs: tuple[int, ...]
    local_world_size: int


def _told(agreement: Agreement) -> list[_Message]:
    plans, sizes = agreement.told(_PLAN), agreement.told(_SIZE)
    inputs = zip(*(agreement.told(f"{_PLAN} made from {name}") for name in INPUTS), strict=True)
    return [_Message(*one) for one in zip(plans, inputs, sizes, strict=True)]


def _number(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "big", signed=True)


def _say(own: OwnPlan, told: Sequence[_Message]) -> str:
    """Say on the first rank why the plan is broadcast.

    Returns the words where warnings are errors (`-W error`): on all ranks then, which would else wait for this one.
    """
    if own.asked:
        return ""
    if own.why:
        logger.warning("the other ranks wait for rank 0's sharding plan: %s", own.why)
        return ""
    text = f"initopt: {_differs(own, told)}. Rank 0's plan is used on all ranks, as TorchRec would"
    try:
        warnings.warn(text, stacklevel=3)
    except UserWarning:
        return text
    return ""


def _differs(own: OwnPlan, told: Sequence[_Message]) -> str:
    others = [rank for rank, message in enumerate(told) if message.plan != told[0].plan]
    if own.why or not others:
        return own.why
    inputs = zip(INPUTS, told[0].inputs, told[others[0]].inputs, strict=True)
    differ = [name for name, here, there in inputs if here != there]
    pinned = _NONE in (*told[0].inputs, *told[others[0]].inputs)
    made = f"it was made from other {' and '.join(differ)}" if differ else "it was made from the same inputs"
    what = "one of them from a file" if pinned else made
    many = f"rank {others[0]}" if len(others) == 1 else f"rank {others[0]} and {len(others) - 1} more"
    has = "no sharding plan of its own" if told[others[0]].plan == _NONE else f"another sharding plan, {what}"
    return f"{many} has {has}"


def _remarks(did: Account) -> tuple[str, ...]:
    stock = tuple(f"the {part.part} ran as it is: {part.reason}" for part in did.stock)
    if not did.fast:
        return stock
    counts = f"{did.proposals} sharding plans proposed, {did.pruned} of them pruned by a bound"
    return (f"{counts}, {did.cut} cut while being placed, {did.failed} did not fit", *stock)


def _differs_by_nature(planner: Any) -> str:
    """Why two ranks with equal inputs may plan differently, or slowly; empty if they don't."""
    foreign = foreign_parts(planner)
    if foreign:
        return "; ".join(f"{part.part}: {part.reason}" for part in foreign)
    version = importlib.metadata.version("torchrec")
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:3] if part.isdigit())
    if numbers < _ORDERED_SINCE and planner._constraints:
        return f"torchrec {version} orders the options of constrained tables by a hash that differs between processes"
    return ""


def _inputs(planner: Any, model: nn.Module, sharders: Sequence[Any]) -> dict[str, bytes]:
    tables = [list(shardable.tables.values()) for shardable in shardable_modules(model, sharders)]
    others = [(name, tuple(p.shape), p.dtype) for name, p in model.named_parameters()]
    held = vars(planner) if hasattr(planner, "__dict__") else {}
    parts = [held.get(name) for name in ("_enumerator", "_partitioner", "_perf_model", "_storage_reservation")]
    settings = [held.get(name) for name in ("_batch_size", "_timeout_seconds")]
    values = {
        "versions": [importlib.metadata.version(name) for name in ("torch", "torchrec")],
        "tables": [tables, others],
        "sharders": list(sharders),
        "topology": getattr(planner, "_topology", None),
        "constraints": getattr(planner, "_constraints", None),
        "planner": [type(planner), *settings, [type(part) for part in parts]],
    }
    return {name: _digest(values[name]) for name in INPUTS}


@contextmanager
def _reported_by(rank: int, planner: Any) -> Iterator[None]:
    """Let the planner's statistics, which may write files, and what it logs come from rank 0 only, as in TorchRec."""
    if rank == 0:
        yield
        return

    def handle(log: logging.Logger, record: logging.LogRecord) -> None:
        if record.levelno > logging.WARNING:
            log.handle(record)

    stats = getattr(planner, "_stats", None)
    if stats:
        planner._stats = []
    try:
        with on_this_thread(logging.Logger, "handle", handle):
            yield
    finally:
        if stats:
            planner._stats = stats


def _digest(value: Any) -> bytes:
    """A digest that only serves to name what differs, so whatever can't be read is left out."""
    try:
        return hashlib.sha256(canonical(_Plain().of(value, 8)).encode()).digest()[:_WIDTH]
    except Exception:
        return hashlib.sha256(type(value).__qualname__.encode()).digest()[:_WIDTH]


class _Plain:
    """Values as JSON data that is equal in two processes if the value is; addresses, and what is too much, left out."""

    def __init__(self) -> None:
        self._left = _MOST

    def of(self, value: Any, depth: int) -> Any:
        """Return the data of a value, so many levels deep."""
        self._left -= 1
        if value is None or isinstance(value, bool | int | str):
            return value
        if isinstance(value, float):
            return value.hex()
        if isinstance(value, type) or callable(value):
            return getattr(value, "__qualname__", type(value).__qualname__)
        if depth == 0 or self._left < 0:
            return type(value).__qualname__
        if isinstance(value, Mapping):
            return sorted(([str(key), self.of(one, depth - 1)] for key, one in value.items()), key=lambda pair: pair[0])
        if isinstance(value, list | tuple):
            return [self.of(one, depth - 1) for one in value]
        if isinstance(value, set | frozenset):
            return sorted(canonical(self.of(one, depth - 1)) for one in value)
        if isinstance(value, enum.Enum):
            return value.name
        if isinstance(value, torch.dtype | torch.device):
            return str(value)
        if isinstance(value, torch.Tensor):
            large = value.is_meta or value.numel() > 1000
            return [list(value.shape), str(value.dtype), "" if large else str(value.tolist())]
        names = [one.name for one in fields(value)] if is_dataclass(value) else getattr(value, "__dict__", ())
        held = [[name, self.of(getattr(value, name, None), depth - 1)] for name in names]
        return [type(value).__qualname__, held]
