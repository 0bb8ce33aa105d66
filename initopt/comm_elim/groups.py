"""The process groups of a host's ranks and of their peers on other hosts, made by their members only.

TorchRec makes every such group of the job on every rank, and a barrier after each kind. A rank belongs to one of each
kind. The names of groups are the same on all members, whatever else a rank has created before: they follow from what
the group is for, from its ranks, and from a count on which the ranks have agreed. A name is never used twice, since the
store keeps what was written under it.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import distributed
from torch.distributed import distributed_c10d as c10d

from initopt.replaced import on_this_thread

_GLOBALS = ("_INTRA_PG", "_CROSS_PG", "_INTRA_PG_2D", "_CROSS_PG_2D")
_PRIVATE = ("_new_process_group_helper", "_world", "_get_default_timeout", "_is_barrier_after_init")

_generation = 0
"""How often this process has made such groups."""


def found() -> str:
    """What ranks must have in common to make groups by members only: which ones they have, and how often made.

    TorchRec keeps its groups in globals, which outlive a `destroy_process_group`; dead ones are forgotten here.
    """
    from torchrec.distributed import comm

    lines = [f"groups made {_generation} times"]
    for name in _GLOBALS:
        group = getattr(comm, name, None)
        if group is not None and not _is_alive(group):
            setattr(comm, name, None)
            group = None
        lines.append(f"{name} {'made before' if group is not None else 'not made yet'}")
    return "\n".join(lines)


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
    """Make the groups of row-wise and grid tables in the block by members only."""
    from torchrec.distributed import comm
    from torchrec.distributed.sharding import grid_sharding, twrw_sharding

    def pair(device: torch.device | None = None, backend: str | None = None) -> tuple[Any, Any]:
        made = comm._INTRA_PG is not None and comm._CROSS_PG is not None
        why = stays()
        if why and not made:
            kept(why)
        if why or made or (device is not None and device.type == "meta"):
            groups: tuple[Any, Any] = comm.intra_and_cross_node_pg(device, backend=backend)
            return groups
        size = distributed.get_world_size()
        local = comm.get_topology_group_world_size(size)
        host, place = divmod(distributed.get_rank(), local)
        global _generation
        _generation += 1
        backend = backend or distributed.get_backend()
        on_cpu = device is None or device.type == "cpu"
        if comm._INTRA_PG is None:
            comm._INTRA_PG = _group("intra", range(host * local, (host + 1) * local), backend, on_cpu)
            left_out(size // local + 1)
        if comm._CROSS_PG is None:
            comm._CROSS_PG = _group("cross", range(place, size, local), backend, on_cpu)
            left_out(local + 1)
        return comm._INTRA_PG, comm._CROSS_PG

    with ExitStack() as stack:
        for module in (twrw_sharding, grid_sharding):
            stack.enter_context(on_this_thread(module, "intra_and_cross_node_pg", pair))
        yield


def _group(purpose: str, members: range, backend: str, on_cpu: bool) -> Any:
    ranks = list(members)
    # On an accelerator a group has a stream of its own, so that its work is not behind that of the world.
    if len(ranks) == distributed.get_world_size() and on_cpu and backend == distributed.get_backend():
        return distributed.group.WORLD
    joined = "_".join(map(str, itertools.chain([purpose, _generation], ranks)))
    world = distributed.group.WORLD
    assert world is not None
    _, store = c10d._world.pg_map[world]
    group, _ = c10d._new_process_group_helper(
        len(ranks),
        ranks.index(distributed.get_rank()),
        ranks,
        distributed.Backend(backend),
        store,
        c10d.GroupName(f"initopt_{hashlib.sha256(joined.encode()).hexdigest()[:24]}"),
        timeout=c10d._get_default_timeout(distributed.Backend(backend)),
    )
    c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    return group


def _is_alive(group: Any) -> bool:
    return group in c10d._world.pg_map
