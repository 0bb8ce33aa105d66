"""A plan in a file: the same plan back to the last field, a digest that all processes agree on, what is refused."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torchrec.distributed.planner.shard_estimators import EmbeddingOffloadStats
from torchrec.distributed.types import (
    BoundsCheckMode,
    CacheAlgorithm,
    CacheParams,
    CacheStatistics,
    KeyValueParams,
    KVZCHTBEConfig,
    MultiPassPrefetchConfig,
    ParameterSharding,
    ShardingPlan,
    TBEStatsReporterConfig,
)
from torchrec.types import DataType

from initopt.sharding_plan.check import PlanError
from initopt.sharding_plan.pinning import load_plan
from initopt.sharding_plan.plan_file import PlanFile, PlanFileError, PlannedFor, RankEstimate, Share
from initopt.sharding_plan.plan_json import digest, plan_digest, plan_from_data, plan_to_data
from initopt.sharding_plan.tables import shardable_modules
from tests.plans import KINDS, bags, model, of, plan, topology


def file_of(made: ShardingPlan, module: nn.Module | None = None) -> PlanFile:
    tables = [t for one in shardable_modules(module or model()) for t in one.tables.values()]
    return PlanFile(
        made,
        PlannedFor(4, 2, None, "cuda", 512, (32 << 30,) * 4, (1, 2, 3, 4), (0,) * 4),
        tuple(tables),
        (RankEstimate(0, 2, 1000, 0, 0, 0.1, 0.2, 0.3, 0.4, 0.0),),
        (Share("sparse.e.t0", 0.7),),
        {"initopt": "0.1.0", "torchrec": "1.9.2"},
    )


def full(kind: str = "row_wise") -> ShardingPlan:
    """A plan whose first table has every field set."""
    made = plan(model(), kind)
    sharding = of(made)
    sharding.cache_params = CacheParams(
        CacheAlgorithm.LFU, 0.1, 1.5, DataType.FP16, True, None, MultiPassPrefetchConfig(3, 7)
    )
    sharding.enforce_hbm = True
    sharding.stochastic_rounding = False
    sharding.bounds_check_mode = BoundsCheckMode.V2_WARNING
    sharding.output_dtype = DataType.BF16
    sharding.key_value_params = KeyValueParams(
        ssd_storage_directory="/ssd/data@local_rank",
        gather_ssd_cache_stats=True,
        stats_reporter_config=TBEStatsReporterConfig(interval=5),
        use_passed_in_path=False,
        kvzch_tbe_config=KVZCHTBEConfig(
            threshold_calculation_bucket_stride=0.3, optimizer_state_dtypes_for_st=frozenset({("a", 1)})
        ),
        ps_hosts=(("::1", 2000), ("::1", 2001)),
    )
    return made


def there_and_back(made: ShardingPlan) -> ShardingPlan:
    return plan_from_data(json.loads(json.dumps(plan_to_data(made))))


def assert_same(made: ShardingPlan, other: ShardingPlan) -> None:
    assert other == made
    assert list(other.plan) == list(made.plan)
    assert repr(other.plan) == repr(made.plan)  # types and order of everything inside, too
    assert plan_digest(other) == plan_digest(made)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_plan_comes_back(kind: str, tmp_path: Path) -> None:
    written = file_of(full(kind))
    written.write(tmp_path / "plan.json")
    read = PlanFile.read(tmp_path / "plan.json")
    assert_same(written.plan, read.plan)
    assert read == written


def test_sets_come_back_whatever_their_order() -> None:
    made = plan(model(), "table_wise")
    states = frozenset((name, number) for number, name in enumerate("edcba"))
    of(made).key_value_params = KeyValueParams(kvzch_tbe_config=KVZCHTBEConfig(optimizer_state_dtypes_for_st=states))
    assert there_and_back(made) == made


def test_every_field_was_set() -> None:
    sharding = of(full())
    assert [name for name, value in vars(sharding).items() if value is None] == []
    assert sharding.key_value_params is not None
    assert sharding.cache_params is not None


def test_statistics_of_torchrec_come_back() -> None:
    made = plan(model(), "table_wise")
    stats = EmbeddingOffloadStats(0.25, 1000, torch.tensor([3.0, 2.5, 0.1]), 10)
    of(made).cache_params = CacheParams(stats=stats)
    again = of(there_and_back(made)).cache_params
    assert again is not None
    assert again.stats is not None
    assert again.stats.stable_fingerprint() == stats.stable_fingerprint()


class OwnStats(CacheStatistics):  # type: ignore[misc]
    expected_lookups = 1.0
    cacheability = 0.5

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def expected_miss_rate(self, clf: float) -> float:
        return 1.0 - clf

    def stable_fingerprint(self) -> tuple[object, ...]:
        return ("own", self.seed)


def test_statistics_of_another_class_are_digested_and_not_written() -> None:
    made, other = plan(model(), "table_wise"), plan(model(), "table_wise")
    of(made).cache_params, of(other).cache_params = CacheParams(stats=OwnStats(1)), CacheParams(stats=OwnStats(2))
    assert plan_digest(made) == plan_digest(copy.deepcopy(made)) != plan_digest(other)
    with pytest.raises(TypeError) as refused:
        plan_to_data(made)
    assert str(refused.value) == (
        "table 'sparse.e.t0': cache_params.stats holds statistics of the class OwnStats, which no plan file can hold: "
        "write the plan with `stats=None` there, they are not used after planning"
    )


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("enforce_hbm", object(), "enforce_hbm holds a builtins.object, which no plan file can hold"),
        (
            "cache_params",
            CacheParams(load_factor=float("nan")),
            "cache_params.load_factor is nan, which JSON does not have",
        ),
        (
            "sharding_spec",
            ChunkShardingSpec(0, ["rank:0/cpu"]),
            "its sharding_spec is a ChunkShardingSpec, which lists no shards",
        ),
    ],
)
def test_what_can_not_be_written_is_named(field: str, value: Any, problem: str, tmp_path: Path) -> None:
    made = plan(model(), "table_wise")
    setattr(of(made), field, value)
    with pytest.raises(PlanFileError) as refused:
        file_of(made).write(tmp_path / "plan.json")
    assert str(refused.value) == f"{tmp_path}/plan.json: can't be written: table 'sparse.e.t0': {problem}"
    assert list(tmp_path.iterdir()) == []


# The digest.


def test_the_digest_does_not_depend_on_the_order() -> None:
    made = full()
    other = ShardingPlan({path: dict(reversed(tables.items())) for path, tables in made.plan.items()})  # type: ignore[attr-defined]
    assert plan_digest(other) == plan_digest(made)


CHANGES: list[Callable[[ParameterSharding], None]] = [
    lambda s: setattr(s, "compute_kernel", "fused_uvm"),
    lambda s: setattr(s, "sharding_type", "column_wise"),
    lambda s: setattr(s, "ranks", [0, 1, 2, 4]),
    lambda s: setattr(s, "enforce_hbm", None),
    lambda s: setattr(s, "stochastic_rounding", True),
    lambda s: setattr(s, "bounds_check_mode", BoundsCheckMode.NONE),
    lambda s: setattr(s, "output_dtype", DataType.FP32),
    lambda s: setattr(s.cache_params, "load_factor", 0.1000001),
    lambda s: setattr(s.cache_params, "multipass_prefetch_config", MultiPassPrefetchConfig(3, 8)),
    lambda s: setattr(s.key_value_params, "ps_hosts", (("::1", 2000),)),
    lambda s: setattr(s.key_value_params, "kvzch_tbe_config", KVZCHTBEConfig(optimizer_type_for_st="x")),
    lambda s: s.sharding_spec.shards[0].shard_sizes.__setitem__(0, 2),
    lambda s: s.sharding_spec.shards[1].shard_offsets.__setitem__(0, 4),
    lambda s: setattr(s.sharding_spec.shards[0], "placement", s.sharding_spec.shards[1].placement),
]


@pytest.mark.parametrize("change", CHANGES)
def test_every_field_is_in_the_digest(change: Callable[[ParameterSharding], None]) -> None:
    made = full()
    changed = copy.deepcopy(made)
    change(of(changed))
    assert plan_digest(changed) != plan_digest(made)


def test_the_digest_is_the_same_in_every_process() -> None:
    code = (
        "import warnings; warnings.simplefilter('ignore')\n"
        "from tests.test_plan_file import full, plan_digest\nprint(plan_digest(full('grid_shard')))"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=Path(__file__).parents[1],
            text=True,
            capture_output=True,
            check=True,
            timeout=80,
        ).stdout.splitlines()[-1]
        for seed in ("1", "77")
    }
    assert printed == {plan_digest(full("grid_shard"))}


# Files that can't be trusted.


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    file_of(full()).write(path)
    return path.read_text()


def refused(content: str | bytes, tmp_path: Path) -> str:
    path = tmp_path / "plan.json"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(PlanFileError) as error:
        PlanFile.read(path)
    text = str(error.value)
    assert text.startswith(f"{path}: ")
    return text.removeprefix(f"{path}: ")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(PlanFileError) as error:
        PlanFile.read(tmp_path / "no.json")
    assert str(error.value) == f"{tmp_path}/no.json: can't be read: No such file or directory"


def test_a_torn_file(written: str, tmp_path: Path) -> None:
    assert refused(written[:500], tmp_path).startswith("is torn or no plan file: ")
    assert refused(b"\x80\x04\x95pickle", tmp_path).startswith("is torn or no plan file: ")
    assert refused("[" * 100_000, tmp_path).startswith("is torn or no plan file: ")


@pytest.mark.parametrize("content", ["{}", "[1]", "17", '{"initopt": "run"}'])
def test_another_file(content: str, tmp_path: Path) -> None:
    assert refused(content, tmp_path) == "is no plan file: `initopt plan ... -o FILE` writes one"


def test_a_file_of_another_format(written: str, tmp_path: Path) -> None:
    assert refused(written.replace('"format": 1', '"format": 2'), tmp_path) == (
        "has format 2, this initopt reads format 1: make the plan anew"
    )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"world_size": 4', '"world_size": 8'),
        ("rank:1/cuda:1", "rank:0/cuda:0"),
        ('"fused"', '"dense"'),
        ("0.7", "0.6"),
    ],
)
def test_an_edited_file(old: str, new: str, written: str, tmp_path: Path) -> None:
    assert old in written
    assert refused(written.replace(old, new, 1), tmp_path) == (
        "was edited or torn: its content does not have the digest in it; make it anew"
    )


def test_a_file_with_a_right_digest_and_a_class_that_is_not_known(written: str, tmp_path: Path) -> None:
    data = json.loads(written)
    data["plan"]["sparse.e"]["t0"]["cache_params"]["$type"] = "Popen"
    del data["digest"]
    data["digest"] = digest(data)
    assert refused(json.dumps(data), tmp_path).startswith("is not understood (KeyError: 'Popen'); it was made by")


@given(at=st.integers(0, 10**6), to=st.integers(0, 255))
def test_a_changed_byte_is_noticed(at: int, to: int, written: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    content = bytearray(written.encode())
    content[at % len(content)] = to
    path = tmp_path_factory.getbasetemp() / "changed.json"
    path.write_bytes(content)
    try:
        read = PlanFile.read(path)
    except PlanFileError:
        return
    assert read == file_of(full())  # a blank for another blank


def test_a_folder_that_can_not_be_written(tmp_path: Path) -> None:
    with pytest.raises(PlanFileError) as error:
        file_of(full()).write(tmp_path / "no" / "plan.json")
    assert str(error.value) == f"{tmp_path}/no/plan.json: can't be written: No such file or directory"


# Pinning.


def pin(made: ShardingPlan, tmp_path: Path, module: nn.Module | None = None, **job: Any) -> ShardingPlan:
    path = tmp_path / "plan.json"
    file_of(made).write(path)
    about = {"world_size": 4, "local_world_size": 2, "device": "cuda", **job}
    return load_plan(path, module or model(), **about)


def problems(made: ShardingPlan, tmp_path: Path, module: nn.Module | None = None, **job: Any) -> list[str]:
    with pytest.raises(PlanError) as error:
        pin(made, tmp_path, module, **job)
    assert str(error.value).startswith(
        f"the sharding plan in {tmp_path}/plan.json does not fit this job, make a new one"
    )
    return list(error.value.problems)


@pytest.mark.parametrize("kind", KINDS)
def test_a_pinned_plan(kind: str, tmp_path: Path) -> None:
    made = plan(model(), kind)
    assert_same(made, pin(made, tmp_path, topology=topology()))


def test_a_plan_pinned_to_another_job(tmp_path: Path) -> None:
    made = plan(model(), "table_wise")
    assert problems(made, tmp_path, world_size=8, local_world_size=4, device="cpu", pod_size=2) == [
        "it was made for world_size 4, this job has 8",
        "it was made for local_world_size 2, this job has 4",
        "it was made for device cuda, this job has cpu",
        "it was made for pods of 1 hosts, this job has 2 a pod",
    ]
    assert pin(made, tmp_path, device=None, pod_size=1) == made


def test_a_plan_pinned_to_other_tables(tmp_path: Path) -> None:
    made = plan(model(), "data_parallel")
    other = bags(rows=[20, 10, 5])
    other.embedding_bag_configs()[1].feature_names = ["f1", "g1"]
    assert problems(made, tmp_path, model(other)) == [
        "table 'sparse.e.t2' is not in the plan",
        "table 'sparse.e.t0' was planned as 10 rows x 8 of float32, the model has 20 rows x 8 of float32",
        "table 'sparse.e.t1' was planned with the features f1, the model has f1, g1",
    ]
    half = bags(data_type=DataType.FP16)
    assert problems(made, tmp_path, model(half))[0] == (
        "table 'sparse.e.t0' was planned as 10 rows x 8 of float32, the model has 10 rows x 8 of float16"
    )


def test_a_pinned_plan_is_checked(tmp_path: Path) -> None:
    made = plan(model(), "table_wise")
    of(made).ranks = [1]
    assert problems(made, tmp_path) == [
        "table 'sparse.e.t0' has rank 1 in `ranks` for a shard that is placed on rank 0",
    ]
    by_host = problems(plan(model(), "table_row_wise"), tmp_path, local_world_size=None)
    assert by_host[0].startswith("LOCAL_WORLD_SIZE is not set, and for table_row_wise TorchRec would take 4 ranks")


def test_an_edited_file_is_not_pinned(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    file_of(plan(model(), "table_wise")).write(path)
    path.write_text(path.read_text().replace('"torchrec": "1.9.2"', '"torchrec": "1.9.3"'))
    with pytest.raises(PlanFileError, match="was edited or torn"):
        load_plan(path, model(), world_size=4, local_world_size=2)


def test_a_file_is_readable_and_differs_by_lines(tmp_path: Path) -> None:
    made = plan(model(), "row_wise")
    file_of(made).write(tmp_path / "one.json")
    other = replace(file_of(made), slowest=(Share("sparse.e.t0", 0.8),))
    other.write(tmp_path / "two.json")
    one, two = ((tmp_path / name).read_text().splitlines() for name in ("one.json", "two.json"))
    assert [line for line in one if '"t0"' in line and "row_wise" in line] != []
    assert max(len(line) for line in one) < 400
    assert sum(a != b for a, b in zip(one, two, strict=True)) == 2  # the share and the digest
