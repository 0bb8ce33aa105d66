"""One rank of a large job, whose other ranks are torch's fake backend: they say at once what this one says.

TorchRec's own code runs, and makes and calls what it would. Two seams are needed. The backend says that it is gloo, and
who asks for a group of gloo gets a fake one: TorchRec leaves out some of its state where it reads that name. And shards
of which all ranks told the same would not make up a table, so what this rank lacks is said to be on the next one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any


@contextmanager
def fake_world(ranks: int) -> Iterator[None]:
    """A default process group of so many ranks, of which this process is the first. TorchRec forgets it after."""
    from torch import distributed
    from torch.distributed import distributed_c10d as c10d
    from torch.distributed._shard.sharded_tensor import ShardedTensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from initopt.replaced import on_this_thread
    from tests.multirank.eliminated_ranks import forgotten

    def new_group(size: int, place: int, members: list[int], backend: Any, *rest: Any, **options: Any) -> Any:
        return c10d._new_process_group_helper(size, place, members, c10d.Backend("fake"), *rest, **options)

    def sharded(shards: Any, *size: Any, process_group: Any = None, **options: Any) -> Any:
        whole = [*size] if isinstance(size[0], int) else [*size[0]]

        def gather(told: list[Any], mine: Any, group: Any = None) -> None:
            distributed.all_gather_object(told, mine, group=group)
            place = distributed.get_rank(group)
            told[:] = [None] * len(told)
            told[place] = mine
            told[(place + 1) % len(told)] = _rest(mine, whole, distributed.get_process_group_ranks(group))

        with on_this_thread(distributed, "all_gather_object", gather):
            return ShardedTensor._init_from_local_shards(shards, *size, process_group=process_group, **options)

    os.environ.update(WORLD_SIZE=str(ranks), RANK="0")
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        with ExitStack() as stack:
            for home in (distributed, c10d):
                stack.enter_context(on_this_thread(home, "get_backend", lambda group=None: "gloo"))
            stack.enter_context(on_this_thread(c10d, "_new_process_group_helper", new_group))
            stack.enter_context(on_this_thread(ShardedTensor, "_init_from_local_shards", sharded))
            yield
    finally:
        distributed.destroy_process_group()
        forgotten()


def _rest(mine: Any, size: list[int], members: list[int]) -> Any:
    """What the next rank has to tell so that the table is whole, if this one tells `mine`; None for nothing."""
    import torch
    from torch import distributed
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharded_tensor import ShardedTensorMetadata
    from torch.distributed._shard.sharded_tensor.metadata import TensorProperties

    place = f"rank:{members[(members.index(distributed.get_rank()) + 1) % len(members)]}/cpu"
    if mine is None:
        whole = ShardMetadata([0] * len(size), size, place)
        return ShardedTensorMetadata([whole], torch.Size(size), TensorProperties(dtype=torch.float32))
    own = mine.shards_metadata
    # A table is divided along one of its dimensions here.
    along = next((at for at, length in enumerate(size) if own[0].shard_sizes[at] != length), 0)
    taken = sorted((one.shard_offsets[along], one.shard_sizes[along]) for one in own)
    shards, first = [], 0
    for offset, length in [*taken, (size[along], 0)]:
        if offset > first:
            where, large = [0] * len(size), [*size]
            where[along], large[along] = first, offset - first
            shards.append(ShardMetadata(where, large, place))
        first = offset + length
    return ShardedTensorMetadata(shards, mine.size, mine.tensor_properties) if shards else None
