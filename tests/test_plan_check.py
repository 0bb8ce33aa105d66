"""A plan checked before it is used: every way that a plan was seen to break, and no correct plan refused.

What DistributedModelParallel makes of these plans was tried on gloo ranks (`tests/multirank/test_plans.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.remote_device import _remote_device
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.planner.types import CustomTopologyData, PlannerError
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    grid_shard,
    row_wise,
    table_row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan, ShardMetadata
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.quant.embedding_modules import EmbeddingBagCollection as QuantEmbeddingBagCollection
from torchrec.types import DataType

from initopt.sharding_plan.check import PlanError, check_plan
from tests.plans import (
    KINDS,
    SHARDERS,
    bags,
    constraints,
    feature_processed,
    managed_collisions,
    model,
    of,
    plan,
    planner,
    sequences,
    topology,
)


def problems(made: ShardingPlan, module: nn.Module | None = None, **job: Any) -> list[str]:
    """What is wrong with a plan on 4 ranks, 2 a host, with cuda devices."""
    about = {"world_size": 4, "local_world_size": 2, "device": "cuda", **job}
    try:
        check_plan(made, module if module is not None else model(), **about)
    except PlanError as error:
        assert len(error.problems) > 0
        return list(error.problems)
    return []


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_of_torchrec_is_accepted(kind: str) -> None:
    assert problems(plan(model(), kind), topology=topology()) == []


def test_the_message_lists_everything_and_says_what_to_do() -> None:
    made = plan(model(), "table_wise")
    del made.plan["sparse.e"]["t1"]  # type: ignore[attr-defined]
    of(made).compute_kernel = "fast"
    with pytest.raises(PlanError) as refused:
        check_plan(made, model(), world_size=4, local_world_size=2)
    assert str(refused.value) == (
        "the sharding plan does not fit this job, make a new one for it:\n"
        "  - table 'sparse.e.t1' is not in the plan\n"
        "  - table 'sparse.e.t0' has the unknown kernel 'fast'"
    )


def test_a_long_list_is_cut_and_counted() -> None:
    big = model(bags(rows=[10] * 30))
    limits = constraints([f"t{i}" for i in range(30)], sharding_types=["table_wise"])
    made = planner(topology(), limits).plan(big, SHARDERS)
    with pytest.raises(PlanError) as refused:
        check_plan(made, model(bags(rows=[20] * 30)), world_size=4, local_world_size=2)
    assert len(refused.value.problems) == 30
    assert str(refused.value).endswith("  - and 10 more")


# A plan for another job.


@pytest.mark.parametrize("world_size", [2, 8])
@pytest.mark.parametrize("kind", ["row_wise", "data_parallel"])
def test_another_number_of_ranks(kind: str, world_size: int) -> None:
    made = plan(model(), kind, on=topology(world_size))
    assert problems(made) == [
        f"it was made for {world_size} ranks, this job has 4 (seen at table 'sparse.e.t0')",
    ]


def test_ranks_that_the_job_has_not() -> None:
    tables = [f"t{i}" for i in range(8)]
    eight = model(bags(rows=[10] * 8))
    made = planner(topology(8), constraints(tables, sharding_types=["table_wise"])).plan(eight, SHARDERS)
    assert problems(made, eight) == [
        "it uses ranks up to 7, this job has ranks 0 to 3 (seen at tables 'sparse.e.t2', 'sparse.e.t3', "
        "'sparse.e.t6' and 1 more)",
    ]


@pytest.mark.parametrize("kind", ["table_row_wise", "grid_shard"])
def test_another_number_of_ranks_a_host(kind: str) -> None:
    made = plan(model(), kind, on=topology(4, 4))
    assert problems(made) == ["it was made for 4 ranks a host, this job has 2 (seen at table 'sparse.e.t0')"]


def test_devices_tell_of_another_number_of_ranks_a_host() -> None:
    three = model(bags(rows=[10, 10]))
    made = plan(three, "column_wise", on=topology(4, 4))
    assert problems(made) == [
        "it was made for another LOCAL_WORLD_SIZE: rank 2 has cuda:2 in the plan and cuda:0 in this job, with 2 "
        "ranks a host (seen at table 'sparse.e.t1')",
    ]


def test_hosts_that_are_not_full() -> None:
    made = plan(model(), "table_row_wise", on=topology(6, 4))
    assert problems(made, world_size=6, local_world_size=4) == [
        "it was made for 4 ranks a host, this job has 4, which does not divide 6, so that TorchRec takes all 6 ranks "
        "for one host (seen at table 'sparse.e.t0')",
    ]


def test_pods() -> None:
    made = plan(model(), "table_row_wise", on=topology(8, 2, pod_size=2))
    assert problems(made, world_size=8, pod_size=2) == []
    assert problems(made, world_size=8) == [
        "it was made for 4 ranks a host, this job has 2 (seen at table 'sparse.e.t0')",
    ]
    hosts = plan(model(), "table_row_wise", on=topology(8, 2))
    assert problems(hosts, world_size=8, pod_size=2) == [
        "it was made for 2 ranks a host, this job has 4 a pod (2 hosts of 2) (seen at table 'sparse.e.t0')",
    ]
    assert problems(plan(model(), "table_wise"), pod_size=3) == [
        "the pods of 3 hosts with 6 ranks do not divide 4 ranks: TORCHREC_RESOLVED_POD_SIZE is not that of this job",
    ]


@pytest.mark.parametrize(("world_size", "taken"), [(4, 4), (16, 8)])
def test_the_launcher_did_not_say_how_many_ranks_a_host_has(world_size: int, taken: int) -> None:
    made = plan(model(), "table_row_wise", on=topology(world_size, taken))
    assert problems(made, world_size=world_size, local_world_size=None) == [
        f"LOCAL_WORLD_SIZE is not set, and for table_row_wise TorchRec would take {taken} ranks for one host: set it "
        "to the ranks of a host, as torchrun does",
    ]
    of_no_host = plan(model(), "table_wise", on=topology(world_size, taken))
    assert problems(of_no_host, world_size=world_size, local_world_size=None) == []


def test_another_device() -> None:
    made = plan(model(), "table_wise")
    assert problems(made, device="cpu") == [
        "it was made for cuda, this job is on cpu (seen at table 'sparse.e.t0')",
    ]
    assert problems(made, device=None) == []


def test_a_topology_of_another_size() -> None:
    assert problems(plan(model(), "table_wise"), topology=topology(8)) == [
        "the topology that was given has 8 ranks, this job has 4",
    ]


# A plan for another model.


def test_a_module_that_the_plan_leaves_out() -> None:
    made = plan(model(), "table_wise")
    missing = [
        "module 'sparse.e' is not in the plan, so that each rank would keep its own whole copy of tables "
        "'sparse.e.t0', 'sparse.e.t1'",
    ]
    made.plan["sparse.e"].clear()  # type: ignore[attr-defined]
    assert problems(made) == missing
    del made.plan["sparse.e"]
    assert problems(made) == missing


def test_a_table_that_the_plan_leaves_out_and_one_that_the_model_has_not() -> None:
    made = plan(model(), "table_wise")
    tables: Any = made.plan["sparse.e"]
    tables["t7"] = tables.pop("t1")
    assert problems(made) == [
        "table 'sparse.e.t1' is not in the plan",
        "table 'sparse.e.t7' of the plan is not in the model",
    ]


def test_a_module_of_another_name() -> None:
    made = plan(model(), "table_wise")
    made.plan["e"] = made.plan.pop("sparse.e")
    assert problems(made)[1:] == ["module 'e' of the plan is not in the model, which has tables in 'sparse.e'"]


def test_a_module_that_no_sharder_takes() -> None:
    made = plan(model(), "table_wise")
    made.plan["sparse"] = made.plan.pop("sparse.e")
    assert problems(made)[1:] == [
        "module 'sparse' of the plan is of type ModuleDict, which no sharder takes; the model has tables in 'sparse.e'",
    ]


def test_the_model_itself_may_be_the_module() -> None:
    made = plan(bags(), "table_wise")
    assert list(made.plan) == [""]
    assert problems(made, bags()) == []
    assert problems(made, bags(rows=[10, 10, 10])) == ["table 't2' is not in the plan"]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "data_parallel"])
@pytest.mark.parametrize(("rows", "dim"), [(20, 8), (10, 16)])
def test_tables_of_another_size(kind: str, rows: int, dim: int) -> None:
    made = plan(model(), kind)
    assert problems(made, model(bags(rows=[rows, 10], dim=dim)))[0] == (
        f"table 'sparse.e.t0' has 10 rows x 8 in the plan and {rows} rows x {dim} in the model"
    )


def test_one_module_at_two_paths() -> None:
    shared = bags()

    def twice() -> nn.Module:
        return nn.ModuleDict({"a": nn.ModuleDict({"e": shared}), "b": nn.ModuleDict({"e": shared})})

    made = plan(twice(), "table_wise")
    assert sorted(made.plan) == ["a.e", "b.e"]
    assert problems(made, twice()) == []
    first, second = made.plan.pop("a.e"), made.plan.pop("b.e")
    assert problems(ShardingPlan({"a.e": first}), twice()) == []
    assert problems(ShardingPlan({"b.e": second}), twice()) == [
        "module 'a.e' is not in the plan, so that each rank would keep its own whole copy of tables 'a.e.t0', 'a.e.t1'",
    ]


# A plan that contradicts itself or what TorchRec computes.


def shards(made: ShardingPlan, table: str = "t0") -> list[ShardMetadata]:
    found: list[ShardMetadata] = of(made, table).sharding_spec.shards
    return found


def resize(*spans: tuple[int, int]) -> Callable[[ShardingPlan], None]:
    """Give the shards these rows: first row and number of rows."""

    def change(made: ShardingPlan) -> None:
        for shard, (start, rows) in zip(shards(made), spans, strict=True):
            shard.shard_offsets, shard.shard_sizes = [start, shard.shard_offsets[1]], [rows, shard.shard_sizes[1]]

    return change


def widths(*spans: tuple[int, int]) -> Callable[[ShardingPlan], None]:
    def change(made: ShardingPlan) -> None:
        for shard, (start, width) in zip(shards(made), spans, strict=True):
            shard.shard_offsets, shard.shard_sizes = [shard.shard_offsets[0], start], [shard.shard_sizes[0], width]

    return change


def place(*ranks: int) -> Callable[[ShardingPlan], None]:
    """Put the shards on these ranks."""

    def change(made: ShardingPlan) -> None:
        of(made).ranks = list(ranks)
        for shard, rank in zip(shards(made), ranks, strict=True):
            shard.placement = _remote_device(f"rank:{rank}/cuda:{rank % 2}")

    return change


def said(**fields: Any) -> Callable[[ShardingPlan], None]:
    def change(made: ShardingPlan) -> None:
        for name, value in fields.items():
            setattr(of(made), name, value)

    return change


def no_placement(made: ShardingPlan) -> None:
    shards(made)[0].placement = None


def no_rank(made: ShardingPlan) -> None:
    shards(made)[0].placement = _remote_device("cuda:0")


def swapped(made: ShardingPlan) -> None:
    listed = shards(made)
    listed[0], listed[1] = listed[1], listed[0]


def one_less(made: ShardingPlan) -> None:
    shards(made).pop()
    of(made).ranks.pop()


def one_dimension(made: ShardingPlan) -> None:
    of(made).sharding_spec.shards[:] = [ShardMetadata([0], [80], "rank:0/cuda:0")]


def divided(made: ShardingPlan) -> None:
    shards(made)[0].shard_sizes = [5, 8]
    shards(made).append(ShardMetadata([5, 0], [5, 8], "rank:1/cuda:1"))


WRONG: list[tuple[str, Callable[[ShardingPlan], None], str]] = [
    ("table_wise", said(sharding_type="by_moon"), "has the unknown sharding type 'by_moon'"),
    ("table_wise", said(compute_kernel="fast"), "has the unknown kernel 'fast'"),
    (
        "table_wise",
        said(compute_kernel="quant"),
        "has the kernel 'quant', and EmbeddingBagCollection runs fused, fused_uvm, fused_uvm_caching, "
        "key_value, ssd_virtual_table, dram_virtual_table, dram_ssd_virtual_table",
    ),
    (
        "table_wise",
        said(compute_kernel="dram_virtual_table"),
        "has the kernel 'dram_virtual_table', and its config does not say use_virtual_table",
    ),
    ("table_wise", said(compute_kernel="unfused_tpu"), "has the kernel 'unfused_tpu', which does not run on cuda"),
    (
        "data_parallel",
        said(compute_kernel="fused"),
        "is data_parallel with the kernel 'fused', and data_parallel runs 'dense' only",
    ),
    ("table_wise", said(sharding_spec=None), "is table_wise and has no shards: its sharding_spec is NoneType"),
    ("table_wise", said(ranks=None), "is table_wise and has no `ranks`"),
    ("table_wise", said(ranks=[1]), "has rank 1 in `ranks` for a shard that is placed on rank 0"),
    ("table_wise", said(ranks=[-1]), "has rank -1 in `ranks` for a shard that is placed on rank 0"),
    ("table_wise", no_placement, "has no rank for its shard 0: the placement is None"),
    ("table_wise", no_rank, "has no rank for its shard 0: the placement is cuda:0"),
    ("table_wise", one_dimension, "has shards of 1 dimensions, a table has 2"),
    ("table_wise", divided, "is table_wise with 2 shards, this job needs 1"),
    ("row_wise", one_less, "has 9 rows x 8 in the plan and 10 rows x 8 in the model"),
    ("row_wise", resize((0, 3), (3, 2), (6, 3), (9, 1)), "has rows 5 to 5 in no shard"),
    ("row_wise", resize((0, 3), (2, 3), (6, 3), (9, 1)), "has rows 2 to 2 in two shards"),
    (
        "row_wise",
        resize((0, 1), (1, 4), (5, 5), (10, 0)),
        "is row_wise with 1, 4, 5, 0 rows on ranks 0 to 3, and TorchRec looks up 3 rows on each: other rows "
        "would be read",
    ),
    ("row_wise", swapped, "is row_wise on ranks 1, 0, 2, 3, and its shards, in this order, belong on ranks 0 to 3"),
    (
        "row_wise",
        resize((3, 3), (0, 3), (6, 3), (9, 1)),
        "is row_wise with shards from rows 3, 0, 6, 9 on ranks 0 to 3: they must be in order",
    ),
    (
        "row_wise",
        place(1, 0, 2, 3),
        "is row_wise on ranks 1, 0, 2, 3, and its shards, in this order, belong on ranks 0 to 3",
    ),
    (
        "table_row_wise",
        resize((0, 1), (1, 9)),
        "is table_row_wise with 1, 9 rows on ranks 0 to 1, and TorchRec looks up 5 rows on each: other rows "
        "would be read",
    ),
    (
        "table_row_wise",
        place(1, 2),
        "is table_row_wise on ranks 1, 2, and its shards, in this order, belong on ranks 0 to 1",
    ),
    (
        "table_row_wise",
        place(1, 0),
        "is table_row_wise on ranks 1, 0, and its shards, in this order, belong on ranks 0 to 1",
    ),
    (
        "grid_shard",
        place(1, 0, 3, 2),
        "is grid_shard with shards from rows 5, 0 on ranks 0 to 1: they must be in order",
    ),
    (
        "grid_shard",
        place(0, 2, 1, 3),
        "is grid_shard on ranks 0, 2, and its shards, in this order, belong on ranks 0 to 1",
    ),
    ("column_wise", one_less, "has 10 rows x 4 in the plan and 10 rows x 8 in the model"),
    ("column_wise", said(ranks=[0]), "has 1 rank in `ranks` for 2 shards"),
    ("column_wise", said(ranks=None), "is column_wise and has no `ranks`"),
    ("column_wise", widths((0, 4), (0, 8)), "has columns 0 to 3 in two shards"),
    (
        "column_wise",
        widths((0, 3), (3, 5)),
        "is 3 wide in one shard, and the kernel 'fused' needs a multiple of 4: change its embedding_dim or "
        "min_partition",
    ),
    ("column_wise", said(sharding_type="table_row_wise"), "is table_row_wise, and its shards divide the columns"),
]


@pytest.mark.parametrize(("kind", "change", "problem"), WRONG)
def test_a_plan_that_breaks(kind: str, change: Callable[[ShardingPlan], None], problem: str) -> None:
    made = plan(model(), kind)
    change(made)
    found = [text for text in problems(made) if text.startswith("table 'sparse.e.t0'")]
    assert found == [f"table 'sparse.e.t0' {problem}"]


def test_rows_split_where_the_type_splits_columns() -> None:
    made = plan(model(), "column_wise")
    for table in ("t0", "t1"):
        for shard, start in zip(shards(made, table), (0, 5), strict=True):
            shard.shard_offsets, shard.shard_sizes = [start, 0], [5, 8]
    assert problems(made)[0] == "table 'sparse.e.t0' is column_wise, and its shards divide the rows"


def test_columns_split_where_the_type_splits_rows() -> None:
    made = plan(model(), "row_wise")
    for index, shard in enumerate(shards(made)):
        shard.shard_offsets, shard.shard_sizes = [0, 2 * index], [10, 2]
    assert problems(made) == ["table 'sparse.e.t0' is row_wise, and its shards divide the columns"]


def test_a_type_that_the_module_does_not_run() -> None:
    made = plan(model(sequences()), "column_wise")
    of(made).sharding_type = "table_column_wise"
    assert problems(made, model(sequences())) == [
        "table 'sparse.e.t0' is table_column_wise, and EmbeddingCollection runs column_wise, data_parallel, row_wise, "
        "table_wise only",
    ]


@pytest.mark.parametrize("module", [bags, sequences])
def test_a_dim_that_the_kernels_do_not_read(module: Callable[..., nn.Module]) -> None:
    # TorchRec's planner makes this plan; its kernels refuse it, on the ranks that hold the table.
    made = plan(model(module(dim=6)), "table_wise")
    assert problems(made, model(module(dim=6)))[0] == (
        "table 'sparse.e.t0' is 6 wide, and the kernel 'fused' needs a multiple of 4: change its embedding_dim"
    )
    assert problems(plan(model(bags(dim=6)), "data_parallel"), model(bags(dim=6))) == []


def test_the_uneven_rows_that_torchrec_plans_and_does_not_look_up() -> None:
    # On gloo ranks this stock plan returns the embeddings of other rows (multirank/test_plans.py).
    memory = CustomTopologyData({"hbm_cap": [2 << 30, 8 << 30, 8 << 30, 2 << 30]}, 4)
    made = plan(model(), "row_wise", on=topology(custom_topology_data=memory))
    assert problems(made)[0] == (
        "table 'sparse.e.t0' is row_wise with 1, 4, 4, 1 rows on ranks 0 to 3, and TorchRec looks up 3 rows on each: "
        "other rows would be read"
    )


def test_a_plan_that_does_not_fit_the_memory() -> None:
    big = model(bags(rows=[1_000_000, 10], dim=256))
    made = plan(big, "table_wise", on=topology(hbm_cap=4 << 30))
    small = topology(hbm_cap=500 << 20, ddr_cap=1 << 30)
    assert problems(made, big, topology=small) == [
        "rank 0 needs ~1.0 GB of HBM for its tables and has 0.5 GB",
    ]
    assert problems(made, big, topology=topology(hbm_cap=4 << 30)) == []


# Plans that no planner makes, and that run all the same.


@pytest.mark.parametrize("kind", KINDS)
def test_the_order_of_modules_and_tables_does_not_matter(kind: str) -> None:
    made = plan(model(), kind)
    tables: Any = made.plan["sparse.e"]
    made.plan["sparse.e"] = dict(reversed(tables.items()))  # type: ignore[assignment]
    assert problems(made) == []


def test_plans_written_by_hand() -> None:
    module = bags(rows=[10] * 6, dim=256)
    per_table = {
        "t0": data_parallel(),
        "t1": table_wise(rank=3),
        "t2": row_wise(),
        "t3": column_wise(ranks=[1, 1]),
        "t4": table_row_wise(host_index=1),
        "t5": grid_shard(host_indexes=[1, 0]),
    }
    made = construct_module_sharding_plan(module, per_table, local_size=2, world_size=4, device_type="cuda")
    assert problems(ShardingPlan({"": made}), module) == []
    del made["t5"], made["t4"]
    assert problems(ShardingPlan({"": made}), module, world_size=2)[0] == (
        "it was made for 4 ranks, this job has 2 (seen at table 't0')"
    )


def test_what_is_not_read_is_not_asked_for() -> None:
    for kind in ("row_wise", "data_parallel"):
        made = plan(model(), kind)
        of(made).ranks = None
        assert problems(made) == []
    made = plan(model(), "table_row_wise")
    of(made).ranks = of(made).ranks[:1]
    assert problems(made) == []


def test_columns_may_share_a_rank_and_come_in_any_order() -> None:
    made = plan(model(), "column_wise")
    place(1, 1)(made)
    assert problems(made) == []
    shards(made).reverse()
    assert problems(made) == []


def test_managed_collisions() -> None:
    made = plan(model(managed_collisions()), "row_wise")
    assert problems(made, model(managed_collisions())) == []
    assert problems(made, model(managed_collisions(rows=128)))[0] == (
        "table 'sparse.e.t0' has 64 rows x 8 in the plan and 128 rows x 8 in the model"
    )
    of(made).sharding_type = "table_wise"
    assert problems(made, model(managed_collisions())) == [
        "table 'sparse.e.t0' is table_wise, and ManagedCollisionEmbeddingBagCollection runs row_wise only",
    ]


def test_tables_for_inference() -> None:
    tables = [EmbeddingBagConfig(name="t0", embedding_dim=8, num_embeddings=10, feature_names=["f0"])]
    tables[0].data_type = DataType.INT8
    module = QuantEmbeddingBagCollection(tables=tables, is_weighted=False, device=torch.device("cpu"))
    made = planner(topology(2), constraints(sharding_types=["row_wise"])).plan(model(module), SHARDERS)
    assert of(made).compute_kernel == "quant"
    assert problems(made, model(module), world_size=2, topology=topology(2)) == []
    # One process serves all shards, whatever their rows and devices.
    resize((0, 3), (3, 7))(made)
    shards(made)[1].placement = _remote_device("rank:0/cpu")
    assert problems(made, model(module), world_size=1, local_world_size=1) == []
    of(made).compute_kernel = "fused"
    assert (
        "table 'sparse.e.t0' has the kernel 'fused', and EmbeddingBagCollection runs quant, quant_uvm, "
        "quant_uvm_caching"
    ) in problems(made, model(module), world_size=2)


# Over many models: what TorchRec plans is accepted, and what is taken from it is missed.


@st.composite
def jobs(draw: st.DrawFn) -> tuple[nn.Module, Topology, dict[str, ParameterConstraints]]:
    local = draw(st.sampled_from([1, 2, 4, 8]))
    hosts = draw(st.integers(1, 4))
    device = draw(st.sampled_from(["cuda", "cuda", "cpu"]))
    pod = draw(st.sampled_from([None, None, 1, hosts])) if device == "cuda" else None
    children: dict[str, nn.Module] = {}
    limits: dict[str, ParameterConstraints] = {}
    # Managed collisions are planned by rows only, which TorchRec does not plan for the cpu.
    modules = [bags, sequences, feature_processed, *([managed_collisions] if device == "cuda" else [])]
    for index, make in enumerate(draw(st.lists(st.sampled_from(modules), min_size=1, max_size=3))):
        if make is managed_collisions:
            module = managed_collisions(rows=draw(st.integers(1, 500)) * 96, buckets=96)
        else:
            rows = draw(st.lists(st.integers(1, 50_000), min_size=1, max_size=4))
            module = make(rows, draw(st.sampled_from([4, 8, 12, 64, 100, 128, 256, 384])))
        children[f"m{index}"] = nn.ModuleDict({"inner": module}) if draw(st.booleans()) else module
    for table in [f"t{i}" for i in range(4)]:
        if draw(st.booleans()):
            kinds: Sequence[str] = KINDS if device == "cuda" else KINDS[:2]
            limits[table] = ParameterConstraints(
                sharding_types=draw(st.sampled_from([None, None, *[[kind] for kind in kinds], list(kinds)])),
                min_partition=draw(st.sampled_from([None, 4, 16, 32])),
            )
    return nn.ModuleDict(children), topology(local * hosts, local, device, pod_size=pod), limits


@settings(max_examples=60)
@given(jobs(), st.randoms(use_true_random=False))
def test_no_plan_of_torchrec_is_refused(job: Any, random: Any) -> None:
    module, on, limits = job
    try:
        made = planner(on, limits).plan(module, SHARDERS)
    except (PlannerError, RuntimeError):
        return  # no plan: an EmbeddingCollection has fewer types than the constraint may leave
    about = {
        "world_size": on.world_size,
        "local_world_size": on.local_world_size,
        "pod_size": on.intra_group_size // on.local_world_size,
        "device": on.compute_device,
        "topology": on,
        "constraints": limits,
    }
    check_plan(made, module, **about)
    path = random.choice(sorted(made.plan))
    table = random.choice(sorted(made.plan[path]))  # type: ignore[call-overload]
    del made.plan[path][table]  # type: ignore[attr-defined]
    with pytest.raises(PlanError, match=f"{path}.*'? is not in the plan"):
        check_plan(made, module, **about)
