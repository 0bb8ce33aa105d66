"""Where the shards of an EmbeddingCollection's tables lie, read from the plan instead of gathered table by table.

TorchRec makes a ShardedTensor for each table (`torchrec/distributed/embedding.py:1070`), which gathers from every rank
what it holds of it (`torch/distributed/_shard/sharded_tensor/api.py:777`). A rank has made its shards from the plan, on
which the ranks have agreed, so the plan says what each would send, and every rank compares its own part. TorchRec's
code runs as it is, with its checks of what came; only the gather is answered. Tables whose shards the plan does not
tell, such as virtual ones, are gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import distributed

from initopt.replaced import on_this_thread

_KERNELS = frozenset(("dense", "fused"))
"""Those whose shards are plain memory of their device."""


@contextmanager
def rewritten(left_out: Callable[[int], None], kept: Callable[[str], None]) -> Iterator[None]:
    """Answer the gathers of each sharded EmbeddingCollection that is made in the block."""
    from torchrec.distributed.embedding import ShardedEmbeddingCollection

    def state(module: Any, *args: Any, **kwargs: Any) -> None:
        # For DTensors, as in two-dimensional sharding, TorchRec takes the plan itself.
        why = "" if module._output_dtensor else _stays(module)
        if why:
            kept(why)
        if why or module._output_dtensor:
            ShardedEmbeddingCollection._initialize_torch_state(module, *args, **kwargs)
            return
        with _answered(module, left_out, kept):
            ShardedEmbeddingCollection._initialize_torch_state(module, *args, **kwargs)

    with on_this_thread(ShardedEmbeddingCollection, "_initialize_torch_state", state):
        yield


@contextmanager
def answered(metadata: Callable[[Any], list[Any] | None], left_out: Callable[[int], None]) -> Iterator[None]:
    """Answer all_gather_object in the block with new objects of `metadata`, each rank's in turn, for this rank's own.

    Raises RuntimeError if it gives something else for this rank: the others would be told wrong, too. Where it gives
    None the ranks meet.
    """

    def gather(told: list[Any], mine: Any, group: Any = None) -> None:
        found = metadata(mine)
        if found is None:
            distributed.all_gather_object(told, mine, group=group)
            return
        rank = distributed.get_rank(group)
        if found[rank] != mine:
            raise RuntimeError(
                f"the sharding plan says {found[rank]} of a table's shards on this rank, but they are {mine}: leave "
                "the rewrites 'ec_metadata' and 'mc_metadata' out (INITOPT_DISABLE), and report it"
            )
        told[:] = found
        left_out(1)

    with on_this_thread(distributed, "all_gather_object", gather):
        yield


@contextmanager
def _answered(module: Any, left_out: Callable[[int], None], kept: Callable[[str], None]) -> Iterator[None]:
    from torch.distributed._shard.sharded_tensor import ShardedTensor

    table = ""

    def make(local_shards: list[Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal table
        held: Mapping[str, list[Any]] = module._model_parallel_name_to_local_shards
        table = next((name for name, shards in held.items() if shards is local_shards), "")
        return ShardedTensor._init_from_local_shards(local_shards, *args, **kwargs)

    def metadata(mine: Any) -> list[Any] | None:
        why = _table_stays(module, table)
        if why:
            kept(why)
            return None
        return _of_plan(module, table)

    with ExitStack() as stack:
        stack.enter_context(on_this_thread(ShardedTensor, "_init_from_local_shards", make))
        stack.enter_context(answered(metadata, left_out))
        yield


def _stays(module: Any) -> str:
    from torchrec.distributed.embedding import ShardedEmbeddingCollection
    from torchrec.distributed.types import ShardingEnv

    if type(module) is not ShardedEmbeddingCollection:
        return f"{type(module).__name__} is not TorchRec's own"
    if type(module._env) is not ShardingEnv or module._env.process_group is not distributed.group.WORLD:
        return "it is sharded over a part of the ranks"
    return ""


def _table_stays(module: Any, table: str) -> str:
    from torch.distributed._shard.sharding_spec import EnumerableShardingSpec

    if table not in module.module_sharding_plan:
        return "a table is not in the plan"
    planned = module.module_sharding_plan[table]
    if module._table_name_to_config[table].use_virtual_table:
        return f"table {table!r} is virtual"
    if planned.compute_kernel not in _KERNELS:
        return f"table {table!r} has the kernel {planned.compute_kernel}"
    if type(planned.sharding_spec) is not EnumerableShardingSpec:
        return f"the plan doesn't list the shards of table {table!r}"
    return ""


def _of_plan(module: Any, table: str) -> list[Any]:
    """What each rank would send: its shards in the plan's order, or None if it has none."""
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharded_tensor import ShardedTensorMetadata, TensorProperties
    from torchrec.modules.embedding_configs import data_type_to_dtype

    planned = module.module_sharding_plan[table]
    properties = TensorProperties(
        dtype=data_type_to_dtype(module._table_name_to_config[table].data_type),
        layout=torch.strided,
        requires_grad=False,
        memory_format=torch.contiguous_format,
        pin_memory=False,
    )
    by_rank: list[list[Any]] = [[] for _ in range(distributed.get_world_size())]
    for one in planned.sharding_spec.shards:
        # TorchRec's code adds to the lists that it is given, and changes them.
        by_rank[one.placement.rank()].append(ShardMetadata([*one.shard_offsets], [*one.shard_sizes], one.placement))
    size = torch.Size(module._name_to_table_size[table])
    return [ShardedTensorMetadata(shards, size, properties) if shards else None for shards in by_rank]
