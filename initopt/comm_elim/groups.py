"""Process groups that a start-up makes, made by their members only, and not a second time.

TorchRec makes every group of a kind on every rank, with a barrier after each kind: those of a host's ranks and of their
peers on other hosts (`torchrec/distributed/comm.py:212-231`), the same for two-dimensional sharding (`:307-339`), and
the groups of its device meshes (`model_parallel.py:1764`, `types.py:972`, by `torch/distributed/device_mesh.py:531` and
`:586`), these again for each submodule with a configuration of its own.

TorchRec's code runs as it is; only its calls of `new_group` and `barrier` are answered. That is safe because

- all ranks go through the same calls in the same order, so the groups of which a rank is a member come in one order
  everywhere, and no two ranks wait for each other in two groups;
- a group's name follows from what it is for, its ranks, and a count on which the ranks have agreed, not from what a
  rank has made before. It is never used twice, since the store keeps what was written under it. The counter from
  which ordinary names come is left alone;
- a group is ready on a rank when its call returns, and the first meeting on it waits for its members: nobody needs the
  barrier;
- a group that is given twice, or the world's in place of one of all ranks, is used by one thread of each rank, in one
  order.
"""

from __future__ import annotations

import hashlib
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

from torch import distributed
from torch.distributed import device_mesh
from torch.distributed import distributed_c10d as c10d

from initopt.replaced import on_this_thread

_GLOBALS = ("_INTRA_PG", "_CROSS_PG", "_INTRA_PG_2D", "_CROSS_PG_2D")
_MAKERS = ("intra_and_cross_node_pg", "intra_and_cross_node_pg_2D")
_PRIVATE = ("_new_process_group_helper", "_world", "_get_default_timeout", "_is_barrier_after_init")

_generation = 0
"""How many such groups this process made. Each kind divides all ranks, so that all of them make as many."""

_made: dict[tuple[str, tuple[int, ...], str], str] = {}
"""Names of groups, by what they are for, their ranks and backend. No groups, which would outlive their destruction."""


def found() -> str:
    """What ranks must have in common to make groups by members only: which ones they have, and how often made.

    TorchRec keeps its groups in globals, which outlive a `destroy_process_group`; dead ones are forgotten here.
    """
    from torchrec.distributed import comm

    lines = [f"groups made: {_generation}"]
    for name in _GLOBALS:
        group = getattr(comm, name, None)
        if group is not None and group not in c10d._world.pg_map:
            setattr(comm, name, None)
            group = None
        lines.append(f"{name} {'made before' if group is not None else 'not made yet'}")
    alive = set(c10d._world.pg_names.values())
    for key in [key for key, name in _made.items() if name not in alive]:
        del _made[key]
    return "\n".join([*lines, f"groups to use again: {len(_made)}"])


def stays() -> str:
    """Why TorchRec has to make the groups by itself; empty if it need not."""
    # Groups of one's own naming have no public call.
    if any(not hasattr(c10d, name) for name in _PRIVATE):
        return "this torch makes groups in another way"
    world = distributed.group.WORLD
    if getattr(world, "bound_device_id", None) is not None:
        return "the process group is bound to a device, so groups may be split from it by all ranks together"
    if callable(getattr(world, "new_group", None)):
        return "the process group makes groups in its own way"
    if c10d._is_barrier_after_init() == 1:
        return "TORCH_DIST_INIT_BARRIER asks for a barrier of all ranks after each group"
    if getattr(c10d, "_use_torchcomms_enabled", lambda: False)():
        return "torchcomms makes the groups"
    return ""


@contextmanager
def rewritten(left_out: Callable[[int], None], kept: Callable[[str], None]) -> Iterator[None]:
    """Make the groups of hosts and device meshes that TorchRec needs in the block by members only."""
    from torchrec.distributed import comm, model_parallel, types
    from torchrec.distributed.sharding import grid_sharding, twrw_sharding

    askers = [twrw_sharding, grid_sharding]
    # Who has no towers would pay for the import.
    if (towers := sys.modules.get("torchrec.distributed.embedding_tower_sharding")) is not None:
        askers.append(towers)
    why = stays()

    def answered(home: ModuleType, make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call TorchRec's `make`, which asks `home` for groups."""
        asks = False

        def new_group(*given: Any, **more: Any) -> Any:
            nonlocal asks
            asks = True
            set_ = {name: value for name, value in more.items() if value not in (None, False)}
            # Whoever asks for more than ranks and a backend gets what all ranks make together.
            if why or given or set_.keys() - {"ranks", "backend", "group_desc"}:
                return home.new_group(*given, **more)
            left_out(1)
            return _group(**set_)

        def barrier() -> None:
            if why:
                distributed.barrier()
            else:
                left_out(1)

        with on_this_thread(home, "new_group", new_group), on_this_thread(distributed, "barrier", barrier):
            done = make(*args, **kwargs)
        if why and asks:
            kept(why)
        return done

    def environment(env: Any, world_size: int, rank: int, pg: Any = None, *args: Any, **kwargs: Any) -> None:
        init = types.ShardingEnv.__init__
        # One of fewer ranks is not made on every rank.
        if pg is distributed.group.WORLD:
            answered(device_mesh, init, env, world_size, rank, pg, *args, **kwargs)
        else:
            init(env, world_size, rank, pg, *args, **kwargs)

    def mesh(collection: Any, *args: Any, **kwargs: Any) -> Any:
        make = model_parallel.DMPCollection._create_process_groups
        return answered(device_mesh, make, collection, *args, **kwargs)

    def hosts(name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: answered(distributed, getattr(comm, name), *args, **kwargs)

    with ExitStack() as stack:
        for module in askers:
            for name in _MAKERS:
                if hasattr(module, name):
                    stack.enter_context(on_this_thread(module, name, hosts(name)))
        stack.enter_context(on_this_thread(types.ShardingEnv, "__init__", environment))
        stack.enter_context(on_this_thread(model_parallel.DMPCollection, "_create_process_groups", mesh))
        yield


def _group(ranks: Any = None, backend: str | None = None, group_desc: str | None = None) -> Any:
    """The group of these ranks, by its members only; what `new_group` gives others."""
    world, backend = distributed.group.WORLD, backend or distributed.get_backend()
    assert world is not None
    members = sorted(range(distributed.get_world_size()) if ranks is None else ranks)
    rank = distributed.get_rank()
    if rank not in members:
        return distributed.GroupMember.NON_GROUP_MEMBER
    # Of another backend a group may have a stream of its own, so that its work is not behind that of the world.
    of_world = len(members) == distributed.get_world_size() and backend == distributed.get_backend()
    if of_world and backend == distributed.Backend.GLOO:
        return world
    # One rank alone meets nobody, in whatever order.
    purpose = "alone" if len(members) == 1 else group_desc or "hosts"
    key = purpose, tuple(members), backend
    earlier = _made.get(key)
    for group, name in c10d._world.pg_names.items():
        if name == earlier:
            return group
    global _generation
    _generation += 1
    joined = "_".join(map(str, itertools.chain([purpose, backend, _generation], members)))
    name = c10d.GroupName(f"initopt_{hashlib.sha256(joined.encode()).hexdigest()[:24]}")
    _, store = c10d._world.pg_map[world]
    group, _ = c10d._new_process_group_helper(
        len(members),
        members.index(rank),
        members,
        distributed.Backend(backend),
        store,
        name,
        timeout=c10d._get_default_timeout(distributed.Backend(backend)),
        group_desc=group_desc,
    )
    c10d._world.pg_group_ranks[group] = {member: place for place, member in enumerate(members)}
    _made[key] = name
    return group
