"""The places in libraries whose meetings were read and are understood, found by the functions that led there.

A call is what a place says if its nearest callers are these functions of these files. Another version of the library
may do something else in a function of the same name: then nothing of it is known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from initopt.comm_elim.timeline import Met

TESTED: Mapping[str, str] = {"torch": "2.13.0", "torchrec": "1.9.2"}
"""The versions whose code was read. A local part, such as `+cpu`, does not count."""

_DISTRIBUTED = "torchrec/distributed/"
_BROADCAST = (_DISTRIBUTED + "collective_utils.py", "invoke_on_rank_and_broadcast_result")
_ANY_COLLECTION = ("embeddingbag.py", "embedding.py")
_OBJECTS = ("all_gather_object",)
_DDP = ("_verify_param_shape_across_processes", "_sync_module_states")


@dataclass(frozen=True, slots=True)
class Place:
    """A function that meets other ranks. `callers` are (file, function), the nearest first."""

    name: str
    ops: tuple[str, ...]
    callers: tuple[tuple[str, str], ...]


def _of(name: str, ops: tuple[str, ...], file: str, function: str) -> Place:
    return Place(name, ops, ((_DISTRIBUTED + file, function),))


PLACES = (
    Place(
        "validation_flag",
        ("broadcast_object_list",),
        (_BROADCAST, (_DISTRIBUTED + "collective_utils.py", "init_collective_validation")),
    ),
    Place(
        "plan",
        ("broadcast_object_list",),
        (_BROADCAST, (_DISTRIBUTED + "planner/planners.py", "collective_plan")),
    ),
    _of("ec_metadata", _OBJECTS, "embedding.py", "_initialize_torch_state"),
    _of("virtual_tables", _OBJECTS, "embeddingbag.py", "_initialize_torch_state"),
    _of("mc_sizes", ("all_gather",), "mc_modules.py", "_create_managed_collision_modules"),
    _of("mc_metadata", _OBJECTS, "mc_modules.py", "_initialize_torch_state"),
    _of("groups", ("new_group", "barrier"), "comm.py", "intra_and_cross_node_pg"),
    _of("groups_2d", ("new_group", "barrier"), "comm.py", "intra_and_cross_node_pg_2D"),
    _of("ddp_sync", _DDP, "model_parallel.py", "_ddp_wrap"),
    *(_of("dp_lookup_sync", _DDP, file, "init_data_parallel") for file in _ANY_COLLECTION),
    *(_of("dp_tables", ("broadcast",), file, "reset_parameters") for file in _ANY_COLLECTION),
    _of("mesh", ("new_group",), "types.py", "__init__"),
    _of("mesh_2d", ("new_group",), "model_parallel.py", "_create_process_groups"),
    *(
        Place("metrics", ("new_group",), (("torchrec/metrics/cpu_offloaded_metric_module.py", function),))
        for function in ("__init__", "_process_metric_compute_job")
    ),
    Place("plan_check", ("all_gather",), (("initopt/sharding_plan/together.py", "_gathered"),)),
    Place("agreement", ("all_gather", "all_gather_single", "all_gather_into_tensor"), (("initopt/agreement.py", ""),)),
)


GROUPS = ("groups", "groups_2d", "mesh", "mesh_2d")
"""The places that make groups, which the rewrite of that name knows."""


def known(met: Met, versions: Mapping[str, str]) -> str:
    """The name of the place that a meeting was called from, empty if it is none of these or of another version."""
    if unknown_versions(versions):
        return ""
    callers = [_split(caller) for caller in met.call.callers]
    for place in PLACES:
        if met.call.op in place.ops and len(callers) >= len(place.callers):
            pairs = zip(callers, place.callers, strict=False)
            if all(
                path.endswith(file) and name in (function, function or name) for (path, name), (file, function) in pairs
            ):
                return place.name
    return ""


def unknown_versions(versions: Mapping[str, str]) -> str:
    """What the record says of the libraries whose code was read, if that is not what was read; else empty.

    A library that was imported after the record was opened is not in it: then its version is not known either.
    """
    found = {library: versions.get(library, "of unknown version").partition("+")[0] for library in TESTED}
    return ", ".join(f"{library} {version}" for library, version in found.items() if version != TESTED[library])


def _split(caller: str) -> tuple[str, str]:
    """`file:line function` as file and function."""
    where, _, function = caller.rpartition(" ")
    return where.rpartition(":")[0], function
