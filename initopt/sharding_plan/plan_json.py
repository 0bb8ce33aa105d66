"""A sharding plan as JSON and back, field by field, and its digest. Never a pickle: nothing in it is run.

Which classes may stand in a plan follows from the annotations of TorchRec's `ParameterSharding`, so that a field of a
later TorchRec is carried as well; a value of any other class is refused when the plan is written.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import json
import math
import typing
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch.distributed.remote_device import _remote_device
from torchrec.distributed.planner.shard_estimators import EmbeddingOffloadStats
from torchrec.distributed.types import (
    CacheStatistics,
    EmbeddingModuleShardingPlan,
    EnumerableShardingSpec,
    ParameterSharding,
    ShardingPlan,
    ShardMetadata,
)

from initopt.sharding_plan.tables import path_of

_Stats = Callable[[CacheStatistics], Any]


def plan_digest(plan: ShardingPlan) -> str:
    """Sha256 of everything that is in `plan`, in hex; the order of its modules and tables doesn't matter.

    Equal plans have equal digests in every process. Raises TypeError for a plan with a value that can't be digested.
    """
    return digest(plan_to_data(plan, stats=_fingerprint))


def digest(data: Any) -> str:
    """Sha256 of JSON data in its canonical form, in hex."""
    return hashlib.sha256(canonical(data).encode()).hexdigest()


def canonical(data: Any) -> str:
    """JSON data as text of which there is one only: sorted keys, no blanks, ASCII."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)


def plan_to_data(plan: ShardingPlan, *, stats: _Stats | None = None) -> dict[str, Any]:
    """Return `plan` as JSON data, module by module and table by table, in the plan's order.

    `stats` writes cache statistics of classes that are not TorchRec's own. Raises TypeError that names the table and
    the field whose value can't be written.
    """
    data: dict[str, Any] = {}
    for path, module_plan in plan.plan.items():
        if not isinstance(module_plan, Mapping):
            raise TypeError(f"module {path!r} has a {type(module_plan).__name__}: only plans of tables can be written")
        data[path] = {name: _sharding(path_of(path, name), one, stats) for name, one in module_plan.items()}
    return data


def plan_from_data(data: Mapping[str, Any]) -> ShardingPlan:
    """Return the plan that `plan_to_data` wrote. Raises KeyError, TypeError or ValueError for what it did not write."""
    return ShardingPlan(
        {
            path: EmbeddingModuleShardingPlan({name: _sharding_from(one) for name, one in tables.items()})
            for path, tables in data.items()
        }
    )


def _sharding(table: str, sharding: ParameterSharding, stats: _Stats | None) -> dict[str, Any]:
    data: dict[str, Any] = {}
    for field in fields(sharding):
        value = getattr(sharding, field.name)
        if field.name == "sharding_spec":
            if value is not None:
                data["shards"] = [_shard(table, shard) for shard in _shards(table, value)]
        elif value is not None:
            data[field.name] = _encode(f"table {table!r}: {field.name}", value, stats)
    return data


def _shards(table: str, spec: Any) -> list[Any]:
    if not isinstance(spec, EnumerableShardingSpec):
        raise TypeError(f"table {table!r}: its sharding_spec is a {type(spec).__name__}, which lists no shards")
    return list(spec.shards)


def _shard(table: str, shard: Any) -> list[Any]:
    where = f"table {table!r}: a shard"
    placement = None if shard.placement is None else repr(shard.placement)
    return [_encode(where, shard.shard_offsets, None), _encode(where, shard.shard_sizes, None), placement]


def _sharding_from(data: Mapping[str, Any]) -> ParameterSharding:
    values = {name: _decode(value) for name, value in data.items() if name != "shards"}
    if "shards" in data:
        shards = [
            ShardMetadata(_decode(offsets), _decode(sizes), None if placement is None else _placement(placement))
            for offsets, sizes, placement in data["shards"]
        ]
        values["sharding_spec"] = EnumerableShardingSpec(shards)
    return ParameterSharding(**values)


@functools.lru_cache(maxsize=4096)
def _placement(text: str) -> _remote_device:
    # Shards share it: it is never changed, and there are as many shards on a rank as row-wise tables.
    return _remote_device(text)


def _encode(where: str, value: Any, stats: _Stats | None) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        if not math.isfinite(value):
            raise TypeError(f"{where} is {value}, which JSON does not have")
        return value
    if kind is list:
        if {int}.issuperset(map(type, value)):  # the offsets and sizes of a million shards
            return value
        return [_encode(where, item, stats) for item in value]
    if kind is tuple:
        return {"$tuple": [_encode(where, item, stats) for item in value]}
    if kind is frozenset:
        return {"$frozenset": sorted((_encode(where, item, stats) for item in value), key=canonical)}
    if isinstance(value, CacheStatistics):
        return _encode_stats(where, value, stats)
    if kind not in _classes().values():
        raise TypeError(f"{where} holds a {kind.__module__}.{kind.__qualname__}, which no plan file can hold")
    if isinstance(value, enum.Enum):
        return {"$enum": kind.__qualname__, "name": value.name}
    return {"$type": kind.__qualname__, **{n: _encode(f"{where}.{n}", getattr(value, n), stats) for n in _names(kind)}}


def _decode(data: Any) -> Any:
    if isinstance(data, list):
        return [_decode(item) for item in data]
    if not isinstance(data, dict):
        return data
    if "$tuple" in data:
        return tuple(_decode(item) for item in data["$tuple"])
    if "$frozenset" in data:
        return frozenset(_decode(item) for item in data["$frozenset"])
    if "$stats" in data:
        hist = torch.tensor(data["hist"], dtype=getattr(torch, data["dtype"]))
        return EmbeddingOffloadStats(data["cacheability"], data["expected_lookups"], hist, data["height"])
    if "$enum" in data:
        return _classes()[data["$enum"]][data["name"]]
    return _classes()[data["$type"]](**{name: _decode(value) for name, value in data.items() if name != "$type"})


def _encode_stats(where: str, value: CacheStatistics, other: _Stats | None) -> Any:
    if type(value) is EmbeddingOffloadStats:
        return {
            "$stats": type(value).__qualname__,
            "cacheability": value.cacheability,
            "expected_lookups": value.expected_lookups,
            "height": value.height,
            "dtype": str(value.hist.dtype).removeprefix("torch."),
            "hist": value.hist.tolist(),
        }
    if other is None:
        raise TypeError(
            f"{where} holds statistics of the class {type(value).__qualname__}, which no plan file can hold: write the "
            "plan with `stats=None` there, they are not used after planning"
        )
    return other(value)


def _fingerprint(stats: CacheStatistics) -> Any:
    return {"$stats": type(stats).__qualname__, "fingerprint": repr(stats.stable_fingerprint())}


def _names(kind: Any) -> list[str]:
    return [field.name for field in fields(kind)] if is_dataclass(kind) else list(kind._fields)


@functools.cache
def _classes() -> dict[str, Any]:
    """The dataclasses, named tuples and enums that the fields of a ParameterSharding may hold, by name."""
    found: dict[str, Any] = {}
    left = list(typing.get_type_hints(ParameterSharding).values())
    while left:
        kind = left.pop()
        left += typing.get_args(kind)
        named = isinstance(kind, type) and (is_dataclass(kind) or hasattr(kind, "_fields"))
        if not (named or (isinstance(kind, type) and issubclass(kind, enum.Enum))) or kind.__qualname__ in found:
            continue
        found[kind.__qualname__] = kind
        if named:
            left += [*typing.get_type_hints(kind).values(), *kind.__subclasses__()]
    return found
