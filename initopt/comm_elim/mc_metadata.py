"""Managed collision: how many ids each rank takes, and where its buffers lie, read from the plan instead of gathered.

TorchRec gathers the number of ids for each table (`torchrec/distributed/mc_modules.py:533`) and then, for each of its
buffers, where it lies (`:403`, by `torch/distributed/_shard/sharded_tensor/api.py:777`). A module is rebuilt for the
range of ids that its shard of the table has in the plan, on which the ranks have agreed, and its buffers are as long as
that range. That is so for TorchRec's MCHManagedCollisionModule; others decide for themselves, and are gathered. Every
rank compares its own part. TorchRec's code runs as it is; only its gathers are answered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed

from initopt.comm_elim.ec_metadata import answered
from initopt.replaced import on_this_thread


@contextmanager
def rewritten(left_out: Callable[[int], None], kept: Callable[[str], None]) -> Iterator[None]:
    """Answer the gathers of each sharded ManagedCollisionCollection that is made in the block."""
    from torchrec.distributed.mc_modules import ShardedManagedCollisionCollection as Sharded

    def create(module: Any, unsharded: Any) -> None:
        why = _stays(module, unsharded)
        if why:
            kept(why)
            Sharded._create_managed_collision_modules(module, unsharded)
            return
        # TorchRec goes through them in this order, and gathers once for each.
        tables = iter(_tables(module))

        def gather(told: list[torch.Tensor], mine: torch.Tensor, group: Any = None) -> None:
            sizes = [shard.shard_sizes[0] for shard in _by_rank(next(tables))]
            _check(sizes[distributed.get_rank(group)], mine.item())
            for one, size in zip(told, sizes, strict=True):
                one.fill_(size)
            left_out(1)

        if module.training:
            with on_this_thread(distributed, "all_gather", gather):
                Sharded._create_managed_collision_modules(module, unsharded)
        else:
            Sharded._create_managed_collision_modules(module, unsharded)

    def state(module: Any) -> None:
        why = _stays(module, module)
        if why:
            kept(why)
            Sharded._initialize_torch_state(module)
            return
        # TorchRec goes through them in this order, and gathers once for each.
        names = set(module.sharded_parameter_names(prefix="_managed_collision_modules"))
        buffers = iter([name for name in module.state_dict() if name in names])
        tables = {table.name: table for table in _tables(module)}

        def metadata(mine: Any) -> list[Any]:
            return _of_plan(_by_rank(tables[next(buffers).split(".")[1]]), mine)

        with answered(metadata, left_out):
            Sharded._initialize_torch_state(module)

    with (
        on_this_thread(Sharded, "_create_managed_collision_modules", create),
        on_this_thread(Sharded, "_initialize_torch_state", state),
    ):
        yield


def _stays(module: Any, holder: Any) -> str:
    from torchrec.distributed.mc_modules import ShardedManagedCollisionCollection as Sharded
    from torchrec.distributed.types import ShardingEnv
    from torchrec.modules.mc_modules import MCHManagedCollisionModule

    if type(module) is not Sharded:
        return f"{type(module).__name__} is not TorchRec's own"
    if type(module._env) is not ShardingEnv:
        return "the sharding is two-dimensional"
    if module._env.process_group is not distributed.group.WORLD:
        return "it is sharded over a part of the ranks"
    if not module.training:
        return "a managed collision collection is not training"
    for table in _tables(module):
        # Other modules decide on their sizes in their own way.
        kind = type(holder._managed_collision_modules[table.name])
        if kind is not MCHManagedCollisionModule:
            return f"{kind.__name__} is not known"
        if len(_by_rank(table)) != distributed.get_world_size():
            return f"not each rank has one shard of table {table.name!r}"
    return ""


def _tables(module: Any) -> list[Any]:
    groups = [group for sharding in module._embedding_shardings for group in sharding._grouped_embedding_configs]
    return [table for group in groups for table in group.embedding_tables]


def _by_rank(table: Any) -> list[Any]:
    """The shards of a table, of rank 0, 1, ...; empty if not each of these has one."""
    shards = sorted(table.global_metadata.shards_metadata, key=lambda shard: shard.placement.rank())
    return shards if [shard.placement.rank() for shard in shards] == list(range(len(shards))) else []


def _of_plan(shards: list[Any], mine: Any) -> list[Any]:
    """What each rank would send for a buffer of which this rank sends `mine`."""
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharded_tensor import ShardedTensorMetadata

    [own] = mine.shards_metadata
    found = []
    first = 0
    for shard in shards:
        rows = shard.shard_sizes[0]
        one = ShardMetadata([first, *own.shard_offsets[1:]], [rows, *own.shard_sizes[1:]], shard.placement)
        found.append(ShardedTensorMetadata([one], mine.size, mine.tensor_properties))
        first += rows
    return found


def _check(expected: int, found: float) -> None:
    if expected != found:
        raise RuntimeError(
            f"a managed collision module takes {found} ids on this rank, by the sharding plan {expected}: leave the "
            "rewrite 'mc_metadata' out (INITOPT_DISABLE), and report it"
        )
