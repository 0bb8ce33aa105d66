"""A sharding plan checked against the model and the job before DistributedModelParallel sees it, in the author's terms.

DistributedModelParallel reads few things of a plan, and those late: a plan for other tables or other ranks ends in an
IndexError deep in torch on some ranks while the others wait in a collective, or trains with rows looked up in the wrong
place. `check_plan` lists all that is wrong at once, on every rank alike, without a process group.

It asks for what DistributedModelParallel needs, not for what a planner would have chosen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.types import ShardingPlan, ShardingType

from initopt.sharding_plan.needs import Need, gigabytes, needs_of_ranks
from initopt.sharding_plan.planned import Planned, planned_tables
from initopt.sharding_plan.tables import Shardable, Table, path_of, shardable_modules

SHOWN = 20
"""So many problems stand in the message of a PlanError; all of them are in its `problems`."""

_KINDS = [kind.value for kind in ShardingType]
_KERNELS = [kernel.value for kernel in EmbeddingComputeKernel]
_ON_CUDA_ONLY = {"key_value", "ssd_virtual_table", "dram_virtual_table", "dram_ssd_virtual_table", "fused_triton"}
_ANY_WIDTH = {"dense", "customized_kernel", "unfused_tpu"}
_WIDTH = 4
"""The other kernels are FBGEMM's, which read rows in pieces of so many elements."""
BY_HOST = {"table_row_wise", "grid_shard"}
"""The sharding types that divide a table among the ranks of a host."""


class PlanError(ValueError):
    """A sharding plan that this job can't use. `problems` has one sentence for each thing that is wrong."""

    def __init__(self, problems: Iterable[str], what: str = "the sharding plan") -> None:
        self.problems = tuple(problems)
        self.what = what
        lines = [f"  - {problem}" for problem in self.problems[:SHOWN]]
        if len(self.problems) > SHOWN:
            lines.append(f"  - and {len(self.problems) - SHOWN} more")
        super().__init__("\n".join([f"{what} does not fit this job, make a new one for it:", *lines]))

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.problems, self.what)


@dataclass(frozen=True)
class _Job:
    world_size: int
    local_world_size: int | None
    pod_size: int | None
    device: str | None

    @property
    def group_size(self) -> int:
        """The ranks among which TorchRec divides a table that stays on one host or pod."""
        local = self.local_world_size or self.taken_for_a_host
        return (self.world_size if self.world_size % local else local) * (self.pod_size or 1)

    @property
    def taken_for_a_host(self) -> int:
        """The ranks that TorchRec takes for a host where the launcher does not say."""
        return 8 if self.world_size % 8 == 0 else self.world_size

    @property
    def group(self) -> str:
        if self.pod_size:
            return f"{self.group_size} a pod ({self.pod_size} hosts of {self.local_world_size})"
        if self.local_world_size and self.group_size != self.local_world_size:
            return (
                f"{self.local_world_size}, which does not divide {self.world_size}, so that TorchRec takes all "
                f"{self.group_size} ranks for one host"
            )
        return str(self.group_size)


def check_plan(
    plan: ShardingPlan,
    model: nn.Module,
    *,
    world_size: int,
    local_world_size: int | None,
    pod_size: int | None = None,
    device: str | None = None,
    sharders: Sequence[Any] | None = None,
    topology: Topology | None = None,
    batch_size: int | None = None,
    constraints: Mapping[str, ParameterConstraints] | None = None,
) -> None:
    """Return if DistributedModelParallel can shard `model` by `plan` in this job.

    `local_world_size` is the launcher's LOCAL_WORLD_SIZE, None where it set none. `pod_size` is the number of hosts a
    pod that DistributedModelParallel will read from TORCHREC_RESOLVED_POD_SIZE. With `device`, the type of the
    trainer's device, placements and kernels are checked for it. `sharders` are those of DistributedModelParallel
    (default: TorchRec's).

    With `topology` the memory of each rank is compared with the planner's estimate for the plan, which needs the
    planner's `batch_size` (default: TorchRec's) and `constraints`.

    Raises PlanError, which lists everything that is wrong.
    """
    job = _Job(world_size, local_world_size, pod_size, device)
    found = shardable_modules(model, sharders)
    planned = list(planned_tables(plan, found))
    sharding = _Sharding(job, planned)
    by_host = sorted({one.kind for one in planned if one.kind in BY_HOST})
    problems = [
        *_of_job(job, by_host, topology),
        *sharding.of_job(),
        *_of_names(plan, found, model),
        *sharding.of_tables(),
    ]
    if topology is not None and not problems:
        needs = needs_of_ranks(planned, topology, batch_size=batch_size, constraints=constraints)
        problems += _of_memory(needs, topology)
    if problems:
        raise PlanError(problems)


def _of_job(job: _Job, by_host: Sequence[str], topology: Topology | None) -> Iterator[str]:
    if job.local_world_size is None and by_host:
        yield (
            f"LOCAL_WORLD_SIZE is not set, and for {_listed(by_host)} TorchRec would take "
            f"{job.taken_for_a_host} ranks for one host: set it to the ranks of a host, as torchrun does"
        )
    if job.world_size % job.group_size:
        yield (
            f"the pods of {job.pod_size} hosts with {job.group_size} ranks do not divide {job.world_size} ranks: "
            "TORCHREC_RESOLVED_POD_SIZE is not that of this job"
        )
    if topology is not None and topology.world_size != job.world_size:
        yield f"the topology that was given has {topology.world_size} ranks, this job has {job.world_size}"


def _of_names(plan: ShardingPlan, found: Sequence[Shardable], model: nn.Module) -> Iterator[str]:
    """What is in the model and not in the plan, and the reverse."""
    paths = {shardable.path: shardable for shardable in found}
    sharded: set[int] = set()
    for path, shardable in paths.items():
        module_plan = plan.plan.get(path)
        if module_plan is None or (isinstance(module_plan, Mapping) and not module_plan):
            # A module that stands at two paths is sharded once, at the first one.
            if id(shardable.module) not in sharded:
                yield (
                    f"module {path!r} is not in the plan, so that each rank would keep its own whole copy of "
                    f"{_names(shardable.tables.values())}"
                )
            continue
        sharded.add(id(shardable.module))
        if isinstance(module_plan, Mapping):
            yield from (
                f"table {t.path!r} is not in the plan" for t in shardable.tables.values() if t.name not in module_plan
            )
            unknown = (name for name in module_plan if name not in shardable.tables)
            yield from (f"table {path_of(path, name)!r} of the plan is not in the model" for name in unknown)
    modules = dict(model.named_modules(remove_duplicate=False))
    for path, module_plan in plan.plan.items():
        if path in paths or (isinstance(module_plan, Mapping) and not module_plan):
            continue
        if path not in modules:
            yield f"module {path!r} of the plan is not in the model, which has {_modules(paths)}"
        elif isinstance(module_plan, Mapping):
            kind = type(modules[path]).__name__
            has = _modules(paths)
            yield f"module {path!r} of the plan is of type {kind}, which no sharder takes; the model has {has}"


class _Sharding:
    """How the tables are sharded, against the ranks of the job."""

    def __init__(self, job: _Job, planned: Sequence[Planned]) -> None:
        self.job = job
        self.planned = planned
        highest = max((max(one.ranks, default=0) for one in planned), default=0)
        told = _other({one.table.path: one.world_size for one in planned}, job.world_size)
        self.other_world = told if told and highest < told[0] else None
        self.other_group = _other({one.table.path: one.group_size for one in planned}, job.group_size)

    def of_job(self) -> Iterator[str]:
        """Whether the plan is for as many ranks and hosts."""
        job = self.job
        beyond = [one for one in self.planned if max(one.ranks, default=0) >= job.world_size and not one.quantized]
        if self.other_world:
            made, path = self.other_world
            yield f"it was made for {_count(made, 'rank')}, this job has {job.world_size} (seen at table {path!r})"
        elif beyond:
            highest = max(max(one.ranks) for one in beyond)
            yield (
                f"it uses ranks up to {highest}, this job has ranks 0 to {job.world_size - 1} (seen at "
                f"{_names(one.table for one in beyond)})"
            )
        if self.other_group:
            made, path = self.other_group
            yield f"it was made for {_count(made, 'rank')} a host, this job has {job.group} (seen at table {path!r})"
        else:
            yield from self._wrong_device()

    def of_tables(self) -> Iterator[str]:
        """What is wrong with single tables, as far as it does not follow from that."""
        for one in self.planned:
            yield from (f"table {one.table.path!r} {problem}" for problem in self._of_table(one))

    def _wrong_device(self) -> Iterator[str]:
        local = self.job.local_world_size
        for one in self.planned:
            for shard in one.shards if not one.quantized else ():
                if shard.placement is None or shard.placement.rank() is None:
                    continue
                rank, device = shard.placement.rank(), shard.placement.device()
                if self.job.device not in (None, device.type):
                    yield (
                        f"it was made for {device.type}, this job is on {self.job.device} (seen at table "
                        f"{one.table.path!r})"
                    )
                    return
                if local and device.index is not None and device.index != rank % local:
                    yield (
                        f"it was made for another LOCAL_WORLD_SIZE: rank {rank} has {device} in the plan and "
                        f"{device.type}:{rank % local} in this job, with {local} ranks a host (seen at table "
                        f"{one.table.path!r})"
                    )
                    return

    def _of_table(self, one: Planned) -> Iterator[str]:
        module = type(one.shardable.module).__name__
        # What a sharder lists for the cpu is the planner's preference: the code runs the others there, too.
        kinds = one.shardable.sharder.sharding_types("cuda")
        if one.kind not in _KINDS:
            yield f"has the unknown sharding type {one.kind!r}"
            return
        if one.kind not in kinds:
            yield f"is {one.kind}, and {module} runs {_listed(sorted(kinds))} only"
            return
        kernel = self._wrong_kernel(one, module)
        if kernel:
            yield kernel
        if one.kind == "data_parallel":
            return
        if not one.shards:
            yield f"is {one.kind} and has no shards: its sharding_spec is {type(one.sharding.sharding_spec).__name__}"
            return
        wrong = [*self._wrong_shape(one)]
        if not wrong and one.quantized:  # inference puts a shard on any device of one process
            wrong = [*_not_covered(one)]
        elif not wrong:
            wrong = [*self._wrong_ranks(one), *_not_covered(one)] or [*self._misplaced(one)]
        yield from wrong
        if not wrong and not kernel:
            yield from _wrong_width(one)

    def _wrong_kernel(self, one: Planned, module: str) -> str:
        device = self.job.device
        if one.kernel not in _KERNELS:
            return f"has the unknown kernel {one.kernel!r}"
        listed = one.shardable.sharder.compute_kernels(one.kind, "cuda")
        if one.quantized != any(kernel.startswith("quant") for kernel in listed):
            return f"has the kernel {one.kernel!r}, and {module} runs {_listed(listed)}"
        if one.kind == "data_parallel" and one.kernel != "dense":
            return f"is data_parallel with the kernel {one.kernel!r}, and data_parallel runs 'dense' only"
        if one.kernel.endswith("virtual_table") and not one.shardable.says(one.table.name, "use_virtual_table"):
            return f"has the kernel {one.kernel!r}, and its config does not say use_virtual_table"
        needs = "tpu" if one.kernel == "unfused_tpu" else "cuda" if one.kernel in _ON_CUDA_ONLY else device
        if device is not None and needs != device:
            return f"has the kernel {one.kernel!r}, which does not run on {device}"
        return ""

    def _wrong_shape(self, one: Planned) -> Iterator[str]:
        rows, dim = one.table.rows, one.table.dim
        if len(one.shape) != 2:
            yield f"has shards of {len(one.shape)} dimensions, a table has 2"
        elif one.shape != (rows, dim):
            shape = f"{one.shape[0]} rows x {one.shape[1]}"
            yield f"has {shape} in the plan and {rows} rows x {dim} in the model"

    def _wrong_ranks(self, one: Planned) -> Iterator[str]:
        """Whether every shard has a rank, and as many shards as the sharding type needs."""
        shards, ranks = one.shards, one.sharding.ranks
        unplaced = [i for i, s in enumerate(shards) if s.placement is None or s.placement.rank() is None]
        if unplaced:
            yield f"has no rank for its shard {unplaced[0]}: the placement is {shards[unplaced[0]].placement}"
            return
        needed = {"table_wise": 1, "row_wise": self.job.world_size, "table_row_wise": self.job.group_size}
        if len(shards) != needed.get(one.kind, len(shards)) and not self._told(one):
            yield f"is {one.kind} with {_count(len(shards), 'shard')}, this job needs {needed[one.kind]}"
        if one.kind == "row_wise":  # `ranks` is not read: shard i is rank i's
            return
        if not ranks:
            yield f"is {one.kind} and has no `ranks`"
            return
        # Of these two the first rank is read, and the others follow from it.
        first_only = one.kind in ("table_wise", "table_row_wise")
        placed = [shard.placement.rank() for shard in shards]
        if not first_only and len(ranks) != len(placed):
            yield f"has {_count(len(ranks), 'rank')} in `ranks` for {_count(len(shards), 'shard')}"
            return
        pairs = list(zip(ranks, placed, strict=False))[: 1 if first_only else None]
        yield from (
            f"has rank {rank} in `ranks` for a shard that is placed on rank {where}"
            for rank, where in [pair for pair in pairs if pair[0] != pair[1]][:1]
        )

    def _misplaced(self, one: Planned) -> Iterator[str]:
        """Whether rows are where they are looked up: TorchRec computes that place, whatever the plan says."""
        if one.kind not in ("row_wise", "table_row_wise", "grid_shard") or self._told(one):
            return
        size = self.job.world_size if one.kind == "row_wise" else self.job.group_size
        block = -(-one.table.rows // size)
        even = [max(0, min(block, one.table.rows - i * block)) for i in range(size)]
        for start in sorted({shard.shard_offsets[1] for shard in one.shards}):
            column = [shard for shard in one.shards if shard.shard_offsets[1] == start]
            if one.kind == "grid_shard":  # only here may the shards be listed in any order
                column.sort(key=lambda shard: shard.placement.rank())
            ranks = [shard.placement.rank() for shard in column]
            first = min(ranks) // size * size
            where = f"ranks {first} to {first + size - 1}"
            begins = [shard.shard_offsets[0] for shard in column if shard.shard_sizes[0]]
            rows = [shard.shard_sizes[0] for shard in column]
            if ranks != list(range(first, first + size)):
                yield f"is {one.kind} on ranks {_listed(ranks)}, and its shards, in this order, belong on {where}"
            elif begins != sorted(begins):
                yield f"is {one.kind} with shards from rows {_listed(begins)} on {where}: they must be in order"
            elif rows != even and one.table.name not in one.shardable.bucketed:
                yield (
                    f"is {one.kind} with {_listed(rows)} rows on {where}, and TorchRec looks up {block} rows on each: "
                    "other rows would be read"
                )
            else:
                continue
            return

    def _told(self, one: Planned) -> bool:
        """Whether it was said already that the plan is for other ranks, of which the rest follows."""
        if one.kind == "row_wise":
            return self.other_world is not None
        return self.other_group is not None and one.group_size is not None


def _not_covered(one: Planned) -> Iterator[str]:
    """Whether every element of the table is in one shard."""
    shards = [shard for shard in one.shards if all(shard.shard_sizes)]
    columns: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for shard in shards:
        span = shard.shard_offsets[1], shard.shard_sizes[1]
        columns.setdefault(span, []).append((shard.shard_offsets[0], shard.shard_sizes[0]))
    yield from _gap("columns", columns, one.table.dim)
    for rows in columns.values():
        yield from list(_gap("rows", rows, one.table.rows))[:1]
        if one.kind in ("column_wise", "table_column_wise") and len(rows) > 1:
            yield f"is {one.kind}, and its shards divide the rows"
            return
    if one.kind in ("row_wise", "table_row_wise") and len(columns) > 1:
        yield f"is {one.kind}, and its shards divide the columns"


def _gap(what: str, spans: Iterable[tuple[int, int]], total: int) -> Iterator[str]:
    end = 0
    for start, size in sorted(spans):
        if start > end:
            yield f"has {what} {end} to {start - 1} in no shard"
        elif start < end:
            yield f"has {what} {start} to {min(end, start + size) - 1} in two shards"
        end = max(end, start + size)
    if end < total:
        yield f"has {what} {end} to {total - 1} in no shard"


def _wrong_width(one: Planned) -> Iterator[str]:
    if one.kernel in _ANY_WIDTH or one.quantized:
        return
    split = one.kind in ("column_wise", "table_column_wise", "grid_shard")
    widths = [shard.shard_sizes[1] for shard in one.shards] if split else [one.table.dim]
    wrong = [width for width in widths if width % _WIDTH]
    if wrong:
        yield (
            f"is {wrong[0]} wide{' in one shard' if split else ''}, and the kernel {one.kernel!r} needs a multiple of "
            f"{_WIDTH}: change its embedding_dim{' or min_partition' if split else ''}"
        )


def _of_memory(needs: Sequence[Need], topology: Topology) -> Iterator[str]:
    for need, device in zip(needs, topology.devices, strict=True):
        for kind in ("hbm", "ddr", "ssd"):
            wanted, there = getattr(need, kind), getattr(device.storage, kind)
            if wanted > there:
                yield (
                    f"rank {need.rank} needs ~{gigabytes(wanted)} of {kind.upper()} for its tables and has "
                    f"{gigabytes(there)}"
                )


def _other(sizes: Mapping[str, int | None], wanted: int) -> tuple[int, str] | None:
    """The size that all tables that tell agree on, and one of them, if it is not the wanted one."""
    told = {path: size for path, size in sizes.items() if size is not None}
    path = next(iter(told), "")
    return (told[path], path) if len(set(told.values())) == 1 and told[path] != wanted else None


def _names(tables: Iterable[Table]) -> str:
    paths = [table.path for table in tables]
    shown = ", ".join(repr(path) for path in paths[:3])
    word = "table" if len(paths) == 1 else "tables"
    return f"{word} {shown}" + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")


def _modules(paths: Iterable[str]) -> str:
    known = [repr(path) for path in paths]
    more = f" and {len(known) - 5} more" if len(known) > 5 else ""
    return f"tables in {', '.join(known[:5])}{more}" if known else "no tables that a sharder takes"


def _listed(values: Sequence[Any]) -> str:
    shown = ", ".join(str(value) for value in values[:8])
    return shown + (f", ... ({len(values)} in all)" if len(values) > 8 else "")


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"
