"""The embedding tables of a model, found as DistributedModelParallel finds them: by path and by exact module type.

It knows what is there, not how it is sharded (see `planned`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import ShardedModule


@dataclass(frozen=True)
class Table:
    """One embedding table: `rows` x `dim` elements of `dtype` (as torch names it, such as `float32`).

    `module` is the path of the module that is sharded, `features` what is looked up in the table; empty where the
    module doesn't say.
    """

    module: str
    name: str
    rows: int
    dim: int
    dtype: str
    features: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        """Module and table in one name: `sparse.ebc.t0`."""
        return path_of(self.module, self.name)


def path_of(module: str, table: str) -> str:
    """The name of a table with the path of its module before it; the model itself has the empty path."""
    return f"{module}.{table}" if module else table


@dataclass(frozen=True)
class Shardable:
    """A module that a sharder takes: its tables, parameters and, where it has them, configs, all by table name.

    `bucketed` are the tables whose rows are divided by buckets.
    """

    path: str
    module: nn.Module
    sharder: Any
    tables: Mapping[str, Table]
    parameters: Mapping[str, nn.Parameter]
    configs: Mapping[str, Any]
    bucketed: frozenset[str]

    def says(self, table: str, flag: str) -> bool:
        """Whether the config of `table` sets `flag`, such as `use_virtual_table`."""
        return bool(getattr(self.configs.get(table), flag, False))


def shardable_modules(model: nn.Module, sharders: Sequence[Any] | None = None) -> list[Shardable]:
    """Return the modules of `model` that `sharders` (default: TorchRec's) would shard, in the order they are met.

    A module that stands at several paths is returned for each of them.
    """
    by_type = {sharder.module_type: sharder for sharder in (get_default_sharders() if sharders is None else sharders)}
    return list(_walk(model, "", by_type))


def _walk(module: nn.Module, path: str, by_type: Mapping[type, Any]) -> Iterator[Shardable]:
    if isinstance(module, ShardedModule):
        return
    sharder = by_type.get(type(module))
    parameters = sharder.shardable_parameters(module) if sharder is not None else {}
    if parameters:
        yield _shardable(path, module, sharder, parameters)
        return
    for name, child in module.named_children():
        yield from _walk(child, path_of(path, name), by_type)


def _shardable(path: str, module: nn.Module, sharder: Any, parameters: Mapping[str, nn.Parameter]) -> Shardable:
    configs = {config.name: config for config in _configs(module)}
    tables = {}
    for name, parameter in parameters.items():
        rows, dim = parameter.shape
        features = tuple(configs[name].feature_names or ()) if name in configs else ()
        tables[name] = Table(path, name, rows, dim, str(parameter.dtype).removeprefix("torch."), features)
    virtual = frozenset(name for name, config in configs.items() if getattr(config, "use_virtual_table", False))
    return Shardable(path, module, sharder, tables, parameters, configs, virtual | _with_buckets(module))


def _configs(module: nn.Module) -> Iterable[Any]:
    # Managed collisions and feature processors hold the collection inside themselves.
    inner = itertools.product(module.modules(), ("embedding_bag_configs", "embedding_configs"))
    found: Iterable[Any] = next((getattr(one, name)() for one, name in inner if callable(getattr(one, name, None))), ())
    return found


def _with_buckets(module: nn.Module) -> frozenset[str]:
    inner = (getattr(one, "table_to_number_buckets", None) for one in module.modules())
    return frozenset(name for buckets in inner if callable(buckets) for name in buckets())
