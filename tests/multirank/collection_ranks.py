"""A DMPCollection on CPU ranks: TorchRec's own code, but for what it says of an accelerator."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from tests.multirank.eliminated_ranks import Case, Counter, Outcome, batch, built, counted, digest, own_group


def without_assertions() -> Any:
    """TorchRec's class compiled as `python -O` would, in its own module, and without the number of a rank's device."""
    from torchrec.distributed import model_parallel

    source = inspect.getsource(model_parallel.DMPCollection)
    number = ":{shard_rank % get_local_size()}"
    assert source.count(number) == 1
    source = source.replace(number, "")
    exec(compile(source, model_parallel.__file__, "exec", optimize=1), vars(model_parallel))
    return model_parallel.DMPCollection


@dataclass
class Pair(Outcome):
    """What a rank made of a collection; `names` has the ranks of each group that came, by its description."""

    ranks: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)


def collection(
    shardings: tuple[str, ...],
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    *,
    size: int = 2,
    node: int | None = None,
    inter: bool = False,
    submodules: int = 0,
    steps: int = 2,
) -> Pair:
    """Make and train a model whose tables are sharded over `size` ranks, and the rest copied."""
    import copy

    import torch
    from torch import distributed
    from torch.distributed import distributed_c10d as c10d
    from torchrec.distributed import comm
    from torchrec.distributed.types import DMPCollectionConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection
    from torchrec.optim.optimizers import in_backward_optimizer_filter

    kind = without_assertions()
    world = int(os.environ["WORLD_SIZE"])
    case = Case("EBC", shardings, local=node or size)
    with own_group():
        torch.manual_seed(5)
        os.environ["WORLD_SIZE"] = str(size)
        os.environ["LOCAL_WORLD_SIZE"] = str(node or size)
        model, plan, sharders = built(case)
        os.environ["WORLD_SIZE"] = str(world)
        known, seen = set(c10d._world.pg_map), Counter()
        configs = [DMPCollectionConfig(EmbeddingBagCollection, copy.deepcopy(plan), size) for _ in range(submodules)]
        with counted(seen), around() as elimination:
            dmp = kind(
                model,
                torch.device("cpu"),
                plan,
                world,
                size,
                distributed.group.WORLD,
                node_group_size=node,
                sharders=sharders,
                use_inter_host_allreduce=inter,
                submodule_configs=configs or None,
            )
        new = [group for group in c10d._world.pg_map if group not in known]
        found = Pair(meetings=dict(seen), groups=len(new))
        found.ranks = sorted((group.group_desc, tuple(distributed.get_process_group_ranks(group))) for group in new)
        found.left_out, found.kept = getattr(elimination, "left_out", {}), getattr(elimination, "kept", {})
        found.generator = digest(torch.get_rng_state())
        _note(found, dmp)
        optimizer = torch.optim.Adagrad(
            [one for _, one in in_backward_optimizer_filter(dmp.named_parameters())], lr=0.1
        )
        for step in range(steps):
            loss = dmp(batch(case, step))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            dmp.sync()
            found.losses.append(loss.item())
        _note(found, dmp, "trained ")
        held = dmp.fused_optimizer.state_dict()["state"]
        sums = {f"{name} {key}": _local(one) for name, of in held.items() for key, one in of.items()}
        found.optimizer = digest([sums, optimizer.state_dict()])
        distributed.barrier()
    comm._INTRA_PG_2D = comm._CROSS_PG_2D = comm._NODE_GROUP_SIZE_2D = None
    return found


def _note(found: Outcome, dmp: Any, when: str = "") -> None:
    for name, value in dmp.state_dict().items():
        found.state[when + name] = digest(_local(value))
        found.metadata[when + name] = repr(
            [getattr(value, one, None) for one in ("device_mesh", "placements", "shape")]
        )
    for name, value in dmp.named_parameters():
        found.state[f"{when}parameter {name}"] = digest(_local(value))


def _local(value: Any) -> Any:
    """The shards of a DTensor on this rank, with where they lie."""
    local = getattr(value, "_local_tensor", value)
    return [*local.local_shards(), local.local_offsets()] if hasattr(local, "local_offsets") else local
