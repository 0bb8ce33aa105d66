"""Data-parallel tables: one broadcast for all of them, and none of the values that are overwritten before.

TorchRec wraps the tables in a DistributedDataParallel (`torchrec/distributed/embeddingbag.py:836`, `embedding.py:627`),
whose construction checks their shapes and sends rank 0's values (`torch/nn/parallel/distributed.py:1064`, `:1066`);
then it fills the tables, and sends each from rank 0 by itself (`embeddingbag.py:1636`, `embedding.py:1275`). The shapes
follow from the tables on which the ranks have agreed, and the first values are dead: nothing reads a table between the
two. The second ones are not: where ranks hold shards of different size their generators drift apart, so they are sent,
together, when the last table is filled. Until then only the fill of a table reads it, if it is one of torch.nn.init's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import distributed, nn

from initopt.comm_elim import ddp_sync
from initopt.replaced import on_this_thread

_BUCKET = 256 << 20
"""Bytes that are sent together, and that are copied for it."""


@contextmanager
def rewritten(left_out: Callable[[int], None], kept: Callable[[str], None], *, at_once: bool) -> Iterator[None]:
    """Send the data-parallel tables that are filled in the block together at its end.

    With `at_once` those of each module are sent when they are filled, as something may come to read them.
    """
    from torchrec.distributed.embedding import ShardedEmbeddingCollection
    from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection

    waiting: list[tuple[torch.Tensor, Any]] = []

    def wrap(kind: Any, configs: str, module: Any) -> None:
        why = _stays(kind, getattr(module, configs), module)
        if why is None:
            kind.init_data_parallel(module)
            return
        if why:
            kept(why)
            kind.init_data_parallel(module)
            return
        lookups = list(module._lookups)
        with ddp_sync.without_sync(lambda given: any(given is lookup for lookup in lookups)):
            kind.init_data_parallel(module)
        left_out(ddp_sync.MEETINGS * sum(given is not now for given, now in zip(lookups, module._lookups, strict=True)))

    def fill(kind: Any, configs: str, module: Any) -> None:
        if _stays(kind, getattr(module, configs), module) != "":
            kind.reset_parameters(module)
            return

        def collect(tensor: torch.Tensor, src: Any = None, group: Any = None, *args: Any, **kwargs: Any) -> Any:
            if src != 0 or args or kwargs or not tensor.is_contiguous():
                return distributed.broadcast(tensor, src, group, *args, **kwargs)
            waiting.append((tensor, group))
            return None

        with on_this_thread(distributed, "broadcast", collect):
            kind.reset_parameters(module)
        if at_once:
            left_out(_send(waiting))

    kinds: tuple[tuple[Any, str], ...] = (
        (ShardedEmbeddingBagCollection, "_embedding_bag_configs"),
        (ShardedEmbeddingCollection, "_embedding_configs"),
    )
    with ExitStack() as stack:
        for kind, configs in kinds:
            for name, function in (("init_data_parallel", wrap), ("reset_parameters", fill)):
                stack.enter_context(on_this_thread(kind, name, functools.partial(function, kind, configs)))
        yield
        left_out(_send(waiting))


def _send(waiting: list[tuple[torch.Tensor, Any]]) -> int:
    """Send what waits, and return how many broadcasts that spared."""
    spared = len(waiting)
    while waiting:
        group, size = waiting[0][1], 0
        bucket: list[torch.Tensor] = []
        while waiting and waiting[0][1] is group and (not bucket or size + waiting[0][0].nbytes <= _BUCKET):
            tensor, _ = waiting.pop(0)
            size += tensor.nbytes
            bucket.append(tensor.detach().view(-1).view(torch.uint8))
        if len(bucket) == 1:
            distributed.broadcast(bucket[0], src=0, group=group)
        else:
            flat = torch.cat(bucket)
            distributed.broadcast(flat, src=0, group=group)
            for own, sent in zip(bucket, torch.split(flat, [one.numel() for one in bucket]), strict=True):
                own.copy_(sent)
        spared -= 1
    return spared


def _stays(kind: Any, configs: Any, module: Any) -> str | None:
    """Why a module's data-parallel tables are as ever; None if it has none, empty if they are not."""
    from torchrec.distributed.embedding_types import EmbeddingComputeKernel
    from torchrec.distributed.types import ShardingType

    plan = module.module_sharding_plan
    mine = [one for one in configs if plan[one.name].sharding_type == ShardingType.DATA_PARALLEL.value]
    if not mine:
        return None
    if type(module) is not kind:
        return f"{type(module).__name__} is not TorchRec's own"
    if module._device is not None and module._device.type == "meta":
        return "the tables are on the meta device"
    if any(plan[one.name].compute_kernel != EmbeddingComputeKernel.DENSE.value for one in mine):
        return "a data-parallel table has a kernel of another kind"
    if not all(_is_of_torch(one.init_fn) for one in mine):
        return "an init_fn is not one of torch.nn.init's, and may read its table"
    return ""


def _is_of_torch(init_fn: Any) -> bool:
    if isinstance(init_fn, functools.partial):
        init_fn = init_fn.func
    return getattr(init_fn, "__module__", "") == nn.init.__name__
