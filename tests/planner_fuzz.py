"""Random planner inputs, planned by TorchRec and by the fast planner, compared field by field.

    python -m tests.planner_fuzz --configurations 300

A configuration is made from its seed alone, so `--first SEED --configurations 1` makes a single one again. What is
compared: every field of every ParameterSharding in the plan's order, or the type and text of the error; the options
that were selected with all shards, the number of proposals, and TorchRec's own hash of the planner's inputs. The
address of an object in an error text is masked.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import random
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.mc_embedding import ManagedCollisionEmbeddingCollectionSharder
from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.estimator import EmbeddingPerfEstimatorFactory
from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner, MemoryBalancedPartitioner, SortBy
from torchrec.distributed.planner.proposers import (
    DynamicProgrammingProposer,
    EmbeddingOffloadScaleupProposer,
    GreedyProposer,
    GridSearchProposer,
    UniformProposer,
)
from torchrec.distributed.planner.shard_estimators import (
    EmbeddingOffloadStats,
    EmbeddingPerfEstimator,
    EmbeddingStorageEstimator,
)
from torchrec.distributed.planner.storage_reservations import (
    FixedAbsoluteStorageReservation,
    FixedPercentageStorageReservation,
    HeuristicalStorageReservation,
    InferenceStorageReservation,
)
from torchrec.distributed.planner.types import CollectiveType, CustomTopologyData, GeneralizedCommsBandwidth
from torchrec.distributed.types import (
    BoundsCheckMode,
    CacheAlgorithm,
    CacheParams,
    KeyValueParams,
    PipelineType,
    ShardingType,
)
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)

from initopt.sharding_plan import Account, account, make_fast

META = torch.device("meta")
GB = 1024**3


@dataclass(frozen=True)
class Size:
    """Upper limits of a configuration."""

    tables: int
    ranks: int
    cells: int
    """Tables times ranks: TorchRec's own time grows with tables squared times ranks."""


SMALL = Size(tables=16, ranks=32, cells=320)
LARGE = Size(tables=100, ranks=128, cells=3_000)


class Uneven(GeneralizedCommsBandwidth):
    """Bandwidths of a user's own, which differ by collective."""

    def get_bw(self, local_world_size: int, world_size: int, collective_type: CollectiveType) -> float:
        return (3.0 if collective_type is CollectiveType.ALL_REDUCE else 5.0) * GB / 1000 / (1 + world_size % 3)

    @property
    def intra_host_bw(self) -> float:
        return 100.0 * GB / 1000

    @property
    def inter_host_bw(self) -> float:
        return 10.0 * GB / 1000


class Generous(FixedPercentageStorageReservation):  # type: ignore[misc]
    """A reservation of a user's own."""

    def reserve(self, *args: Any, **kwargs: Any) -> Any:
        topology = super().reserve(*args, **kwargs)
        topology.devices[0].storage.ddr //= 2
        return topology


@dataclass
class Inputs:
    """Fresh objects for one planner."""

    module: nn.Module
    sharders: list[Any]
    arguments: dict[str, Any]
    plans: int


def inputs_of(seed: int, size: Size) -> Inputs:
    """Make the configuration of a seed. Raises nothing of its own; TorchRec may refuse the arguments."""
    return _Maker(random.Random(seed), size).make()


class _Maker:
    def __init__(self, draw: random.Random, size: Size) -> None:
        self.draw, self.size = draw, size
        self.bytes = 0
        self.names: list[tuple[str, int, int, int]] = []

    def some(self, share: float) -> bool:
        return self.draw.random() < share

    def make(self) -> Inputs:
        draw = self.draw
        self.ranks = draw.choice([r for r in (1, 2, 3, 4, 8, 8, 12, 16, 16, 24, 32, 64, 128) if r <= self.size.ranks])
        self.local = draw.choice([n for n in (1, 2, 4, 8, 8, 8, 6) if n <= self.ranks])
        if self.ranks % self.local and self.some(0.8):
            self.local = self.ranks
        self.device = draw.choice(["cuda"] * 6 + ["cpu", "mtia"])
        # Some inputs are refused for one wrong table; too many would hide the others.
        self.wrong = self.some(0.06)
        # The offload proposer asks for cached tables with cache parameters, and fails on others.
        self.offload = self.some(0.15) and self.device == "cuda"
        module = nn.Module()
        most = max(1, min(self.size.tables, self.size.cells // self.ranks))
        tables = draw.choice([draw.randint(1, 3), draw.randint(1, most), draw.randint(1, most)])
        self.equal = self.some(0.25)
        parts = draw.randint(1, min(3, tables))
        for part in range(parts):
            here = tables // parts + (part < tables % parts)
            holder = module
            if self.some(0.4):
                holder = nn.Module()
                module.add_module(f"nest{part}", holder)
            holder.add_module(f"part{part}", self.collection(part, here))
        if self.some(0.4):
            module.add_module("dense", nn.Linear(draw.choice([8, 512]), 256, device=META))
        constraints = self.constraints() if self.some(0.65) or self.offload else None
        topology = self.topology()
        arguments: dict[str, Any] = {
            "topology": topology,
            "batch_size": draw.choice([None, 1, 64, 512, 4096]),
            "constraints": constraints,
            "debug": False,
        }
        self.reservation(arguments)
        self.enumerator(arguments)
        self.search(arguments)
        if self.some(0.08):
            arguments["callbacks"] = [lambda plan: list(reversed(plan))]
        if self.some(0.08):
            arguments["timeout_seconds"] = 3600
        # TorchRec's offload proposer never comes to an end when it is used a second time.
        proposers = arguments.get("proposer", [])
        again = self.some(0.12) and not any(isinstance(p, EmbeddingOffloadScaleupProposer) for p in _listed(proposers))
        return Inputs(module, self.sharders(), arguments, plans=2 if again else 1)

    def collection(self, part: int, count: int) -> nn.Module:
        draw = self.draw
        kind = draw.choice(["bag"] * 5 + ["weighted", "weighted", "sequence", "sequence", "mcbag", "mcseq", "fp"])
        sequence = kind in ("sequence", "mcseq")
        dim = draw.choice([8, 16, 64, 128])
        configs = []
        for i in range(count):
            rows = int(10 ** draw.uniform(0.5, 7.7 if not kind.startswith("mc") else 5.0))
            width = draw.choice([4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 512, 1024])
            if self.equal:
                rows, width = (100_000, dim) if kind.startswith("mc") else (1_000_000, dim)
            if sequence:
                width = dim
            # Managed collision has as many rows per rank on all of them.
            granule = 4 * self.ranks if kind.startswith("mc") else 1
            rows = max(rows // granule, 1) * granule
            features = 1 if self.some(0.8) else draw.randint(2, 3)
            dtype = draw.choice([DataType.FP32] * 3 + [DataType.FP16])
            name = f"table_{part}_{i}"
            self.names.append((name, rows, width, features))
            self.bytes += rows * width * (4 if dtype is DataType.FP32 else 2)
            made: dict[str, Any] = {
                "name": name,
                "embedding_dim": width,
                "num_embeddings": rows,
                "feature_names": [f"{name}_f{f}" for f in range(features)],
                "data_type": dtype,
            }
            if self.some(0.05) and not kind.startswith("mc"):
                buckets = self.ranks * draw.choice([1, 1, 3]) if self.some(0.95) else 7
                made["num_embeddings"] = max(rows // buckets, 1) * buckets
                made |= {"use_virtual_table": True, "total_num_buckets": buckets}
            if self.some(0.05):
                made["stash_weights"] = True
            configs.append((EmbeddingConfig if sequence else EmbeddingBagConfig)(**made))
        inner: nn.Module
        if sequence:
            inner = EmbeddingCollection(tables=configs, device=META)
        else:
            inner = EmbeddingBagCollection(tables=configs, is_weighted=kind in ("weighted", "fp"), device=META)
        if self.some(0.3):
            for parameter in inner.parameters():
                parameter._optimizer_classes = [draw.choice([torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad])]
        if kind == "fp":
            features = [feature for config in configs for feature in config.feature_names]
            processors = PositionWeightedModuleCollection(dict.fromkeys(features, 10), device=META)
            return FeatureProcessedEmbeddingBagCollection(inner, processors)
        if not kind.startswith("mc"):
            return inner
        collisions = ManagedCollisionCollection(
            {
                config.name: MCHManagedCollisionModule(
                    zch_size=config.num_embeddings,
                    device=META,
                    eviction_policy=DistanceLFU_EvictionPolicy(),
                    eviction_interval=10,
                    buckets=self.ranks + 1 if self.wrong else draw.choice([self.ranks, 4 * self.ranks]),
                )
                for config in configs
            },
            configs,
        )
        wrapper = ManagedCollisionEmbeddingCollection if sequence else ManagedCollisionEmbeddingBagCollection
        return wrapper(inner, collisions)

    def constraints(self) -> dict[str, Any]:
        draw = self.draw
        kernels = [kernel.value for kernel in EmbeddingComputeKernel]
        usual = ["fused", "fused_uvm", "fused_uvm_caching", "dense", "key_value"]
        types = [each.value for each in ShardingType]
        every = self.some(0.2) or self.offload
        caching = self.device == "cuda" and (self.some(0.1) or self.offload)
        constraints = {}
        for name, rows, _, features in self.names:
            if not every and self.some(0.4):
                continue
            made: dict[str, Any] = {}
            if self.some(0.3):
                made["sharding_types"] = draw.sample(types, draw.randint(2, 5))
            if self.some(0.15):
                made["sharding_types"] = draw.choice([["grid_shard"], ["table_wise", "grid_shard"], ["table_row_wise"]])
                if self.device == "cpu":
                    del made["sharding_types"]
            if self.some(0.3):
                made["compute_kernels"] = draw.sample(usual, draw.randint(2, 4))
            elif self.some(0.05):
                made["compute_kernels"] = draw.sample(kernels, draw.randint(3, 6))
            # What no sharder offers is an error for the whole model: seldom.
            if "compute_kernels" in made and not self.wrong:
                made["compute_kernels"] = [*made["compute_kernels"], "fused", "dense"]
            if "sharding_types" in made and not self.wrong:
                made["sharding_types"] = [*made["sharding_types"], "table_wise"]
            if caching or self.some(0.15):
                if caching:
                    made["compute_kernels"] = ["fused_uvm_caching"]
                    if self.some(0.7):
                        made["sharding_types"] = [draw.choice(["table_wise", "row_wise", "column_wise"])]
                made["cache_params"] = self.cache(rows)
            if self.some(0.3):
                made["min_partition"] = draw.choice([4, 8, 16, 24, 32, 64, 128])
            if self.some(0.5) or features > 1:
                made["pooling_factors"] = [draw.choice([0.3, 1.0, 7.5, 60.0]) for _ in range(features)]
            if self.some(0.15):
                made["num_poolings"] = [draw.choice([1.0, 2.0]) for _ in range(features)]
            if self.some(0.15):
                made["batch_sizes"] = [draw.choice([16, 512]) for _ in range(features)]
            if self.wrong and self.some(0.1):
                made["batch_sizes"] = [64] * (features + 1)
            if self.some(0.1):
                made["is_weighted"] = True
            if self.some(0.1):
                made["enforce_hbm"] = self.some(0.5)
            if self.some(0.1):
                made["stochastic_rounding"] = self.some(0.5)
            if self.some(0.1):
                made["bounds_check_mode"] = draw.choice(list(BoundsCheckMode))
            if self.some(0.1):
                made["feature_names"] = [f"{name}_f{f}" for f in range(features)]
            if self.some(0.2):
                made["output_dtype"] = draw.choice([DataType.FP16, DataType.FP32, DataType.BF16])
            if self.some(0.04):
                made["device_group"] = draw.choice(["cuda", "cpu"])
            if self.some(0.1):
                made["key_value_params"] = KeyValueParams(
                    max_l1_cache_size=draw.choice([None, 16, 512]), l2_cache_size=draw.choice([None, 1])
                )
            if self.some(0.03):
                made["use_virtual_table"] = True
            constraints[name] = ParameterConstraints(**made)
        return constraints

    def cache(self, rows: int) -> CacheParams:
        draw = self.draw
        made: dict[str, Any] = {}
        if self.some(0.7):
            made["algorithm"] = draw.choice([CacheAlgorithm.LRU, CacheAlgorithm.LRU, CacheAlgorithm.LFU])
        if self.some(0.7):
            made["load_factor"] = draw.choice([0.05, 0.1, 0.2, 0.5, 0.9])
        if self.some(0.2):
            made["reserved_memory"] = 8.0
        if self.some(0.2):
            made["precision"] = DataType.FP16
        if self.some(0.4):
            made["prefetch_pipeline"] = self.some(0.5)
        if self.some(0.8):
            bins = draw.choice([1, 4, 20])
            made["stats"] = EmbeddingOffloadStats(
                cacheability=draw.choice([0.0, 0.2, 0.8]),
                expected_lookups=draw.choice([0, 1_000, rows]),
                mrc_hist_counts=torch.tensor([float(draw.randint(0, 50)) for _ in range(bins)]),
                height=rows,
            )
        return CacheParams(**made)

    def topology(self) -> Topology:
        draw = self.draw
        per_rank = self.bytes / self.ranks
        loose = draw.choice([0.3, 0.9, 1.05, 1.25, 1.6, 3.0, 10.0, 100.0, 100.0])
        hbm = int(max(per_rank * loose, draw.choice([0, 2**20, 2**30, 2**30])))
        ddr = int(max(self.bytes * draw.choice([0.5, 2.0, 10.0]) / self.ranks, draw.choice([0, 2**30, 2**36])))
        if self.device == "cpu":
            ddr = hbm
        made: dict[str, Any] = {
            "world_size": self.ranks,
            "compute_device": self.device,
            "hbm_cap": hbm,
            "ddr_cap": ddr,
            "local_world_size": self.local,
        }
        if self.some(0.3):
            made["ssd_cap"] = int(draw.choice([0, self.bytes * 2 / self.ranks, 2**42]))
        if self.some(0.2) and self.ranks >= 2 * self.local:
            made["pod_size"] = draw.choice([n for n in (1, 2, 4) if n * self.local <= self.ranks])
        if self.some(0.02):
            made["pod_size"] = self.ranks
        if self.some(0.15):
            made |= {"intra_host_bw": 450.0 * GB / 1000, "inter_host_bw": 25.0 * GB / 1000}
        if self.some(0.1):
            made["generalized_comms_bandwidths"] = Uneven()
        if self.some(0.1):
            made |= {"bwd_compute_multiplier": 1.5, "weighted_feature_bwd_compute_multiplier": 1.2}
        if self.some(0.1):
            made |= {"hbm_mem_bw": 3e9, "ddr_mem_bw": 1e8, "hbm_to_ddr_mem_bw": 5e7}
        if self.some(0.12):
            caps = [max(1, int(hbm * draw.choice([0.5, 1.0, 1.0, 2.0]))) for _ in range(self.ranks)]
            key = "ddr_cap" if self.device == "cpu" else "hbm_cap"
            made["custom_topology_data"] = CustomTopologyData({key: caps}, self.ranks)
        return Topology(**made)

    def reservation(self, arguments: dict[str, Any]) -> None:
        draw = self.draw
        made: Callable[[], Any] | None = draw.choice(
            [
                *[None] * 4,
                lambda: HeuristicalStorageReservation(percentage=draw.choice([0.0, 0.1, 0.5])),
                lambda: HeuristicalStorageReservation(percentage=0.05, dense_tensor_estimate=2**20),
                lambda: FixedPercentageStorageReservation(percentage=draw.choice([0.0, 0.2])),
                lambda: FixedPercentageStorageReservation(percentage=0.0),
                lambda: FixedAbsoluteStorageReservation(hbm_reserved_bytes=draw.choice([0, 2**20, 2**33])),
                lambda: InferenceStorageReservation(percentage=0.1),
                lambda: Generous(percentage=0.1),
            ]
        )
        if made is not None:
            arguments["storage_reservation"] = made()

    def enumerator(self, arguments: dict[str, Any]) -> None:
        draw = self.draw
        if self.some(0.75):
            return
        topology, constraints = arguments["topology"], arguments["constraints"]
        estimators: list[Any] | None = None
        if self.some(0.6):
            perf: Any = EmbeddingPerfEstimator(topology, constraints, is_inference=self.some(0.2))
            if self.some(0.4):
                perf = EmbeddingPerfEstimatorFactory.create(
                    "default",
                    topology=topology,
                    constraints=constraints,
                    use_batch_inputs_for_expected_cache_fetches=self.some(0.5),
                )
            storage = EmbeddingStorageEstimator(
                topology=topology,
                constraints=constraints,
                pipeline_type=draw.choice(list(PipelineType)),
                run_embedding_at_peak_memory=self.some(0.5),
            )
            estimators = [perf, storage]
        arguments["enumerator"] = EmbeddingEnumerator(
            topology=topology,
            batch_size=arguments["batch_size"] or 512,
            constraints=constraints,
            estimator=estimators,
            use_exact_enumerate_order=self.some(0.5),
        )

    def search(self, arguments: dict[str, Any]) -> None:
        draw = self.draw
        partitioner: Callable[[], Any] | None = draw.choice(
            [
                *[None] * 4,
                lambda: GreedyPerfPartitioner(sort_by=SortBy.PERF),
                lambda: GreedyPerfPartitioner(sort_by=SortBy.PERF, balance_modules=True),
                lambda: GreedyPerfPartitioner(balance_modules=True),
                MemoryBalancedPartitioner,
                lambda: MemoryBalancedPartitioner(
                    max_search_count=draw.choice([0, 3, 20]), tolerance=draw.choice([0.0, 0.5]), balance_modules=True
                ),
            ]
        )
        if partitioner is not None:
            arguments["partitioner"] = partitioner()
        if not self.offload and self.some(0.4):
            return
        bins = draw.choice([1, 5, 20])
        single: list[Callable[[], Any]] = [
            GreedyProposer,
            lambda: GreedyProposer(use_depth=False),
            lambda: GreedyProposer(threshold=draw.choice([1, 3, 10])),
            lambda: GreedyProposer(use_depth=False, threshold=2),
            UniformProposer,
            lambda: UniformProposer(use_depth=False),
            lambda: GridSearchProposer(max_proposals=draw.choice([200, 1000])),
            lambda: DynamicProgrammingProposer(hbm_bins_per_device=bins),
        ]
        if self.offload or self.some(0.03):
            offload = EmbeddingOffloadScaleupProposer(use_depth=self.some(0.7))
            arguments["proposer"] = [*(proposer() for proposer in draw.sample(single, draw.choice([0, 0, 1]))), offload]
            return
        made = [proposer() for proposer in draw.sample(single, draw.choice([1, 1, 2, 3]))]
        arguments["proposer"] = made[0] if len(made) == 1 else made

    def sharders(self) -> list[Any]:
        draw = self.draw
        fused: dict[str, Any] | None = None
        if self.some(0.3):
            fused = {}
            if self.some(0.5):
                fused["cache_load_factor"] = draw.choice([0.1, 0.4])
            if self.some(0.3):
                fused["prefetch_pipeline"] = True
        qcomms = None
        if self.some(0.25):
            config = QCommsConfig(
                forward_precision=draw.choice([CommType.FP16, CommType.FP32]),
                backward_precision=draw.choice([CommType.BF16, CommType.FP32, CommType.FP16]),
            )
            qcomms = get_qcomm_codecs_registry(config, device=torch.device("cuda"))
        bag: Any = EmbeddingBagCollectionSharder(fused_params=fused, qcomm_codecs_registry=qcomms)
        if self.some(0.1):
            few = draw.choice([["table_wise"], ["row_wise", "data_parallel"], ["column_wise", "table_wise"]])

            class Few(EmbeddingBagCollectionSharder):  # type: ignore[misc]
                def sharding_types(self, compute_device_type: str) -> list[str]:
                    return few

            bag = Few(fused_params=fused, qcomm_codecs_registry=qcomms)
        return [
            bag,
            EmbeddingCollectionSharder(fused_params=fused, qcomm_codecs_registry=qcomms),
            ManagedCollisionEmbeddingBagCollectionSharder(bag, qcomm_codecs_registry=qcomms),
            ManagedCollisionEmbeddingCollectionSharder(fused_params=fused, qcomm_codecs_registry=qcomms),
            FeatureProcessedEmbeddingBagCollectionSharder(bag, qcomm_codecs_registry=qcomms),
        ]


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def canonical(value: Any) -> Any:
    """Return nested tuples and strings that are equal if and only if every field is."""
    if isinstance(value, torch.Tensor):
        return "tensor", str(value.dtype), tuple(value.shape), str(value.tolist() if not value.is_meta else "meta")
    if isinstance(value, nn.Module):
        return type(value).__name__
    if isinstance(value, dict):
        return type(value).__name__, tuple((canonical(key), canonical(each)) for key, each in value.items())
    if isinstance(value, list | tuple):
        return type(value).__name__, tuple(canonical(each) for each in value)
    if isinstance(value, Enum | type) or callable(value):
        return type(value).__name__, str(value)
    if dataclasses.is_dataclass(value):
        fields = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
        return type(value).__name__, tuple((name, canonical(each)) for name, each in fields)
    if hasattr(value, "__dict__"):
        return type(value).__name__, tuple((name, canonical(each)) for name, each in sorted(vars(value).items()))
    return type(value).__name__, repr(value)


@dataclass(frozen=True)
class Result:
    """What came out of one planner: `outcome` is a plan or an error."""

    outcome: Any
    planned: bool
    seconds: float
    account: Account | None


def run(seed: int, size: Size, fast: bool) -> Result:
    """Plan the configuration of a seed. `seconds` are CPU seconds of planning."""
    try:
        inputs = inputs_of(seed, size)
    except (AssertionError, ValueError) as error:
        return Result(("arguments", str(error)), False, 0.0, None)
    planner = EmbeddingShardingPlanner(**inputs.arguments)
    if fast:
        make_fast(planner)
    outcomes: list[Any] = []
    planned = False
    start = time.process_time()
    for _ in range(inputs.plans):
        try:
            plan = planner.plan(inputs.module, inputs.sharders)
        except Exception as error:
            text = re.sub(r"0x[0-9a-f]+", "0x", str(error))
            outcomes.append((type(error).__name__, str(getattr(error, "error_type", "")), text, planner._num_proposals))
        else:
            planned = True
            outcomes.append((canonical(plan.plan), planner._num_proposals))
    seconds = time.process_time() - start
    outcomes.append([_option(option) for option in planner.get_selected_options()])
    try:
        outcomes.append(planner.hash_planner_context_inputs_str())
    except Exception as error:
        outcomes.append(type(error).__name__)
    return Result(outcomes, planned, seconds, account(planner) if fast else None)


def _option(option: Any) -> Any:
    assert type(option).__name__ == "ShardingOption"
    return [
        canonical([shard.size, shard.offset, shard.storage, shard.perf, shard.rank]) for shard in option.shards
    ], canonical({name: each for name, each in vars(option).items() if name not in ("shards", "_tensor")})


@dataclass(frozen=True)
class Comparison:
    """A configuration, planned twice."""

    seed: int
    stock: Result
    fast: Result

    @property
    def equal(self) -> bool:
        """Whether both came to the same."""
        return bool(self.stock.outcome == self.fast.outcome)

    def difference(self) -> str:
        """Say where the two differ first."""
        return f"seed {self.seed}: " + _difference(self.stock.outcome, self.fast.outcome, "")


def _difference(stock: Any, fast: Any, where: str) -> str:
    if isinstance(stock, list | tuple) and isinstance(fast, list | tuple) and len(stock) == len(fast):
        for i, (a, b) in enumerate(zip(stock, fast, strict=True)):
            if a != b:
                return _difference(a, b, f"{where}[{i}]")
    return f"at {where}: stock {str(stock)[:600]} / fast {str(fast)[:600]}"


def compare(seeds: Iterator[int] | range, size: Size) -> Iterator[Comparison]:
    """Plan each configuration with both planners."""
    with warnings.catch_warnings():
        # TorchRec warns of narrow tables and deprecated arguments; the search that is not trusted is an error.
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", message="initopt")
        logging.disable(logging.CRITICAL)
        try:
            for seed in seeds:
                yield Comparison(seed, run(seed, size, fast=False), run(seed, size, fast=True))
        finally:
            logging.disable(logging.NOTSET)


def main() -> int:
    """Compare configurations and print a line for each, then the sums. Exit code 1 if one differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configurations", type=int, default=300)
    parser.add_argument("--first", type=int, default=0, help="seed of the first")
    parser.add_argument("--small", action="store_true", help="the sizes of the tests")
    parser.add_argument("--quiet", action="store_true", help="print differences and the sums only")
    arguments = parser.parse_args()
    seeds = range(arguments.first, arguments.first + arguments.configurations)
    plans = errors = fallen = 0
    different = []
    seconds = [0.0, 0.0]
    for each in compare(seeds, SMALL if arguments.small else LARGE):
        plans, errors = plans + each.stock.planned, errors + (not each.stock.planned)
        seconds = [seconds[0] + each.stock.seconds, seconds[1] + each.fast.seconds]
        parts = [part for part in (each.fast.account.stock if each.fast.account else ()) if part.part == "search"]
        fallen += bool(parts)
        if not each.equal:
            different.append(each.seed)
            print(each.difference(), flush=True)
        elif not arguments.quiet:
            outcome = "plan" if each.stock.planned else f"{str(each.stock.outcome[0])[:60]!r}"
            times = f"{each.stock.seconds:.2f} s / {each.fast.seconds:.2f} s"
            print(f"seed {each.seed}: equal, {outcome}, {times} {[p.reason for p in parts] or ''}", flush=True)
    print(
        f"{plans + errors} configurations: {plans} plans, {errors} errors, {len(different)} different "
        f"{different or ''}; searched by TorchRec: {fallen}; CPU seconds: stock {seconds[0]:.0f}, fast {seconds[1]:.0f}"
    )
    return bool(different)


if __name__ == "__main__":
    sys.exit(main())
