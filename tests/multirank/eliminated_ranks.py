"""Models whose start-up has meetings to leave out, made and trained on one rank, and what can be compared of them."""

from __future__ import annotations

import datetime
import functools
import hashlib
import itertools
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

BATCH = 4
HOW = ("table_wise", "row_wise", "column_wise", "table_row_wise", "grid_shard", "data_parallel")


@dataclass(frozen=True)
class Case:
    """One DistributedModelParallel: the module's kind, how each of its tables is sharded, the ranks of a host."""

    module: str
    shardings: tuple[str, ...]
    local: int = 2
    seeds: str = "equal"
    """`equal`, `rank` for another one on each rank, or `one` for another one on rank 1."""
    steps: int = 3
    kernel: str = "fused"
    dense: bool = True
    device: str = "meta"
    half: bool = False
    replicas: int = 1
    """How often each table is held: with more than one the model is a DMPCollection, of two dimensions."""
    metrics: str = ""
    """The class of a metric module that is made after the model, from torchrec.metrics."""

    @property
    def name(self) -> str:
        kinds = Counter(self.shardings)
        tables = "+".join(f"{count} {kind}" for kind, count in kinds.items())
        more = ", ".join(
            [
                f"{self.local} a host",
                *([f"seeds: {self.seeds}"] if self.seeds != "equal" else []),
                *([f"{self.replicas} replicas"] if self.replicas > 1 else []),
                *([self.metrics] if self.metrics else []),
                self.kernel,
            ]
        )
        return f"{self.module} {tables} ({more}, {self.device}{', half' if self.half else ''})"


@dataclass
class Outcome:
    """What a rank made of a case. Down to `metrics` all must be the same with a rewrite."""

    state: dict[str, str] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    optimizer: str = ""
    losses: list[float] = field(default_factory=list)
    generator: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    meetings: dict[str, int] = field(default_factory=dict)
    groups: int = 0
    """Those that this rank belongs to."""
    created: int = 0
    """Those that were created on it."""
    everybody: int = 0
    """Collectives of all ranks."""
    left_out: dict[str, int] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)

    def result(self) -> tuple[Any, ...]:
        return self.state, self.metadata, self.optimizer, self.losses, self.generator, self.metrics


def sharding(kind: str, index: int, world: int, local: int, kernel: str) -> Any:
    from torchrec.distributed import sharding_plan as made

    hosts = world // local
    return {
        "table_wise": lambda: made.table_wise(rank=index % world, compute_kernel=kernel),
        "row_wise": lambda: made.row_wise(compute_kernel=kernel),
        # Not in the order of ranks, and two shards of one table on the same rank.
        "column_wise": lambda: made.column_wise([(index + at) % world for at in (1, 0)], compute_kernel=kernel),
        "column_wise twice": lambda: made.column_wise([index % world] * 2, compute_kernel=kernel),
        "table_row_wise": lambda: made.table_row_wise(host_index=index % hosts),
        "grid_shard": lambda: made.grid_shard([at % hosts for at in (index, index + 1)]),
        "data_parallel": lambda: made.data_parallel(),
    }[kind]()


PARALLEL: Any = None
"""A class to use instead of DistributedModelParallel."""


def built(
    case: Case,
    *,
    rows: Callable[[int], int] = lambda index: 32 + 8 * index,
    order: bool = True,
    init_fn: Any = None,
    dense_device: str = "cpu",
    sharder: Any = None,
) -> Any:
    """The model, its plan and its sharders."""
    import torch
    from torch import nn
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.mc_embedding import ManagedCollisionEmbeddingCollectionSharder
    from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan
    from torchrec.distributed.types import ShardingPlan
    from torchrec.modules import mc_embedding_modules as managed
    from torchrec.modules.embedding_configs import DataType
    from torchrec.modules.mc_modules import (
        DistanceLFU_EvictionPolicy,
        ManagedCollisionCollection,
        MCHManagedCollisionModule,
    )
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

    bags = case.module in ("EBC", "MC EBC")
    config = EmbeddingBagConfig if bags else EmbeddingConfig
    tables = [
        # TorchRec divides columns by 128.
        config(
            name=f"t{i}",
            feature_names=[f"f{i}"],
            embedding_dim=256 if kind == "grid_shard" else 8,
            num_embeddings=rows(i),
            init_fn=init_fn,
            data_type=DataType.FP16 if case.half else DataType.FP32,
        )
        for i, kind in enumerate(case.shardings)
    ]
    if not order:
        tables.reverse()
    place = torch.device(case.device)
    inner = (EmbeddingBagCollection if bags else EmbeddingCollection)(tables=tables, device=place)
    sharders: dict[str, Any] = {
        "EBC": EmbeddingBagCollectionSharder,
        "EC": EmbeddingCollectionSharder,
        "MC EBC": ManagedCollisionEmbeddingBagCollectionSharder,
        "MC EC": ManagedCollisionEmbeddingCollectionSharder,
    }
    sharder = sharder or sharders[case.module]()
    module: Any = inner
    if case.module.startswith("MC"):
        collision = ManagedCollisionCollection(
            managed_collision_modules={
                one.name: MCHManagedCollisionModule(
                    zch_size=one.num_embeddings,
                    device=place,
                    input_hash_size=1000,
                    eviction_interval=2,
                    eviction_policy=DistanceLFU_EvictionPolicy(),
                )
                for one in tables
            },
            embedding_configs=tables,
        )
        outer = managed.ManagedCollisionEmbeddingBagCollection if bags else managed.ManagedCollisionEmbeddingCollection
        module = outer(inner, collision)
    # In two dimensions the plan is that of one replica.
    world = int(os.environ["WORLD_SIZE"]) // case.replicas

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = module
            width = sum(one.embedding_dim for one in tables)
            self.over = nn.Linear(width, 1, device=dense_device) if case.dense else nn.Identity()
            self.register_buffer("own", torch.full((3,), float(os.environ["RANK"])))

        def forward(self, features: Any) -> Any:
            found = self.tables(features)
            if case.module.startswith("MC"):
                found = found[0]
            values = found.values() if bags else torch.cat([found[f"f{i}"].values() for i in range(len(tables))], dim=1)
            return self.over(values).square().mean()

    model = Model()
    apply_optimizer_in_backward(torch.optim.Adagrad, module.parameters(), {"lr": 0.1})
    kinds = {f"t{i}": kind for i, kind in enumerate(case.shardings)}
    plan = construct_module_sharding_plan(
        module,
        {name: sharding(kind, int(name[1:]), world, case.local, case.kernel) for name, kind in kinds.items()},
        local_size=case.local,
        world_size=world,
        device_type="cpu",
        sharder=sharder,
    )
    return model, ShardingPlan({"tables": plan}), [sharder]


def parallel(case: Case, model: Any, plan: Any, sharders: Any) -> Any:
    """The model on all ranks, in one dimension or two."""
    import torch
    from torch import distributed
    from torchrec.distributed.model_parallel import DistributedModelParallel, DMPCollection

    place = torch.device("cpu")
    if case.replicas == 1:
        return (PARALLEL or DistributedModelParallel)(model, device=place, plan=plan, sharders=sharders)
    _on_cpu()
    world = distributed.get_world_size()
    return DMPCollection(
        model,
        place,
        plan,
        world,
        world // case.replicas,
        distributed.group.WORLD,
        node_group_size=case.local,
        sharders=sharders,
    )


@functools.cache
def _on_cpu() -> None:
    """Let TorchRec make two dimensions on a CPU in this process: it asserts a GPU, and gives ranks a device by number.

    Its own code runs, compiled without its assertions; the places that it writes into the plan are corrected after it.
    """
    import inspect

    from torch.distributed import _remote_device
    from torchrec.distributed import model_parallel
    from torchrec.distributed.model_parallel import DMPCollection

    path = inspect.getsourcefile(model_parallel) or ""
    codes = [compile(inspect.getsource(model_parallel), path, "exec", optimize=1)]
    for name in ("DMPCollection", "__init__"):
        codes = [one for code in codes for one in code.co_consts if getattr(one, "co_name", "") == name]
    [DMPCollection.__init__.__code__] = codes
    remap = DMPCollection._remap_sharding_plan

    def remapped(dmp: Any, plan: Any, *args: Any, **kwargs: Any) -> None:
        remap(dmp, plan, *args, **kwargs)
        for one in (one for module in plan.plan.values() for one in module.values()):
            for shard in getattr(one.sharding_spec, "shards", ()):
                shard.placement = _remote_device(f"rank:{shard.placement.rank()}/cpu")

    DMPCollection._remap_sharding_plan = remapped


def metric_module(case: Case) -> Any:
    """The metric module of a trainer, with TorchRec's default metrics."""
    import torch
    from torch import distributed
    from torchrec.metrics import cpu_offloaded_metric_module, metric_module
    from torchrec.metrics.metrics_config import DefaultMetricsConfig

    home: Any = cpu_offloaded_metric_module if case.metrics.startswith("CPU") else metric_module
    place = torch.device("cpu")
    return metric_module.generate_metric_module(
        getattr(home, case.metrics),
        metrics_config=DefaultMetricsConfig,
        batch_size=BATCH,
        world_size=distributed.get_world_size(),
        my_rank=distributed.get_rank(),
        state_metrics_mapping={},
        device=place,
        module_kwargs={"model_out_device": place} if case.metrics.startswith("CPU") else None,
    )


def end_threads(module: Any) -> None:
    """Of a metric module that has some."""
    if hasattr(module, "update_queue"):
        module.shutdown()


def metrics_of(module: Any) -> dict[str, float]:
    """What a metric module has found, on all ranks together; rates apart, which are of time."""
    later = hasattr(module, "update_queue")
    found = dict((module.async_compute() if later else module.compute()).resolve())
    end_threads(module)
    return {name: float(value) for name, value in found.items() if "throughput" not in name}


def batch(case: Case, step: int) -> Any:
    import torch
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    generator = torch.Generator().manual_seed(100 * step + int(os.environ["RANK"]))
    names = [f"f{i}" for i in range(len(case.shardings))]
    values = torch.randint(0, 32, (len(names) * BATCH,), generator=generator)
    return KeyedJaggedTensor(names, values, lengths=torch.ones(len(names) * BATCH, dtype=torch.int64))


def outcome(
    case: Case,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    *,
    then: Callable[[], None] = lambda: None,
    **changes: Any,
) -> Outcome:
    """Make the model of a case, in a process group of its own, and train it some steps.

    `around` is entered for the construction; `then` is called at the end. `changes` are for `built`.
    """
    import torch
    from torch import distributed
    from torchrec.optim.optimizers import in_backward_optimizer_filter

    os.environ["LOCAL_WORLD_SIZE"] = str(case.local)
    with own_group():
        rank = int(os.environ["RANK"])
        torch.manual_seed(5 + {"equal": 0, "rank": rank, "one": rank == 1}[case.seeds])
        model, plan, sharders = built(case, **changes)
        before = groups()
        with tallied() as tally, around() as elimination:
            dmp = parallel(case, model, plan, sharders)
            measured = metric_module(case) if case.metrics else None
        found = Outcome(
            meetings=dict(tally.calls),
            groups=groups() - before,
            created=len(tally.created),
            everybody=tally.everybody,
        )
        found.left_out, found.kept = getattr(elimination, "left_out", {}), getattr(elimination, "kept", {})
        found.generator = digest(torch.get_rng_state())
        note_state(found, dmp)
        rest = [one for _, one in in_backward_optimizer_filter(dmp.named_parameters())]
        optimizer = torch.optim.Adagrad(rest, lr=0.1) if rest else None
        for step in range(case.steps):
            loss = dmp(batch(case, step))
            if optimizer is not None:
                optimizer.zero_grad()
            loss.backward()
            if optimizer is not None:
                optimizer.step()
            found.losses.append(loss.item())
            if case.replicas > 1:
                dmp.sync()
            if measured is not None:
                told = torch.full((BATCH,), loss.item())
                label = torch.arange(BATCH) % 2
                measured.update({"prediction": told, "label": label, "weight": torch.ones(BATCH)})
        if measured is not None:
            found.metrics = metrics_of(measured)
        note_state(found, dmp, "trained ")
        held = [dmp.fused_optimizer.state_dict(), optimizer.state_dict() if optimizer is not None else None]
        found.optimizer = digest(held)
        then()
        distributed.barrier()
    return found


@dataclass(frozen=True)
class Counts:
    """What the construction of a model took on this rank, in calls and groups.

    `meeting` is the part of its wall `seconds` inside of calls. Neither has what it took to see the calls.
    """

    calls: dict[str, int]
    collectives: int
    everybody: int
    created: int
    belongs: int
    seconds: float
    meeting: float


def constructed(case: Case, around: Callable[[], AbstractContextManager[Any]] = nullcontext, **changes: Any) -> Counts:
    """Make the model of a case in the process group that there is, and train nothing."""
    import torch
    from torch import distributed

    os.environ["LOCAL_WORLD_SIZE"] = str(case.local)
    torch.manual_seed(5 + (int(os.environ["RANK"]) if case.seeds == "rank" else 0))
    model, plan, sharders = built(case, **changes)
    before = groups()
    distributed.barrier()
    with tallied() as tally:
        start = time.perf_counter()
        with around():
            parallel(case, model, plan, sharders)
            measured = metric_module(case) if case.metrics else None
        seconds = time.perf_counter() - start - tally.own
    end_threads(measured)
    return Counts(
        dict(tally.calls),
        tally.collectives,
        tally.everybody,
        len(tally.created),
        groups() - before,
        seconds,
        tally.seconds,
    )


def note_state(found: Outcome, dmp: Any, when: str = "") -> None:
    for name, value in dmp.state_dict().items():
        found.state[when + name] = digest(value)
        if hasattr(value, "metadata"):
            found.metadata[when + name] = repr(
                (value.metadata(), value.sharding_spec(), value.dtype, value.requires_grad)
            )
    for name, value in dmp.named_parameters():
        found.state[f"{when}parameter {name}"] = digest(value)


@functools.cache
def store() -> Any:
    """The job's, which outlives its process groups."""
    from torch import distributed

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # Under an agent there is one already.
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    return distributed.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), world, is_master=serves)


_made = itertools.count()


@contextmanager
def own_group(*, forgets: bool = True) -> Iterator[None]:
    """A process group of the block's own; afterwards TorchRec `forgets` what it keeps for the process."""
    from torch import distributed

    distributed.init_process_group(
        "gloo",
        store=distributed.PrefixStore(f"group{next(_made)}", store()),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=datetime.timedelta(seconds=30),
    )
    try:
        yield
    finally:
        distributed.destroy_process_group()
        if forgets:
            forgotten()


def forgotten() -> None:
    """Let TorchRec keep nothing of a process group that is no more."""
    from torchrec.distributed import collective_utils, comm

    collective_utils._INITIALIZED = False
    comm._INTRA_PG = comm._CROSS_PG = comm._INTRA_PG_2D = comm._CROSS_PG_2D = None


def groups() -> int:
    from torch.distributed import distributed_c10d as c10d

    return len(c10d._world.pg_map)


@dataclass
class Tally:
    """What a rank does to meet others: calls by operation, seconds inside of them, and the groups that it makes."""

    calls: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    own: float = 0.0
    """Seconds that seeing them cost."""
    everybody: int = 0
    """Collectives that all ranks of the job come to."""
    created: list[tuple[int, ...]] = field(default_factory=list)
    """The ranks of each group that was created here, whether this rank belongs to it or not."""

    @property
    def collectives(self) -> int:
        """The calls that do not make a group."""
        return sum(count for op, count in self.calls.items() if op != "new_group")


@contextmanager
def tallied() -> Iterator[Tally]:
    """See the outermost calls that meet other ranks."""
    from torch import distributed
    from torch.distributed import distributed_c10d as c10d

    from initopt.hooks import WORLD, watched
    from initopt.replaced import on_this_thread

    tally = Tally()
    world = distributed.get_world_size()
    large = {WORLD}

    class Listening:
        def begins(self, op: str, call_site: str) -> None:
            pass

        def enters(self, meeting: Any) -> None:
            pass

        def around(self, meeting: Any, group: Any) -> Any:
            return nullcontext()

        def reads_payloads(self) -> bool:
            return False

        def met(self, meeting: Any) -> None:
            tally.calls[meeting.op] += 1
            tally.seconds += meeting.end - meeting.start
            tally.own += meeting.own
            tally.everybody += meeting.op != "new_group" and meeting.group in large

        def group_made(self, group: Any, name: str, call_site: str) -> None:
            pass

        def group_seen(self, name: str, ranks: tuple[int, ...]) -> None:
            if len(ranks) == world:
                large.add(name)

        def spent(self, seconds: float) -> None:
            pass

    def create(size: int, place: int, members: list[int], *args: Any, **kwargs: Any) -> Any:
        tally.created.append(tuple(members))
        return c10d._new_process_group_helper(size, place, members, *args, **kwargs)

    with on_this_thread(c10d, "_new_process_group_helper", create), watched(Listening()):
        yield tally


@contextmanager
def counted(seen: Counter[str]) -> Iterator[None]:
    """Count the outermost calls that meet other ranks."""
    with tallied() as tally:
        yield
    seen.update(tally.calls)


def digest(value: Any) -> str:
    """Of tensors, shards of tensors, and containers of them; everything else by its text."""
    found = hashlib.sha256()
    _add(found, value)
    return found.hexdigest()[:16]


def _add(found: Any, value: Any) -> None:
    import torch

    if hasattr(value, "local_offsets"):
        _add(found, [value.local_shards(), value.local_offsets()])
    elif hasattr(value, "local_shards"):
        for shard in value.local_shards():
            _add(found, [shard.metadata, shard.tensor])
    elif hasattr(value, "to_local"):
        _add(found, [value.placements, tuple(value.shape), value.to_local()])
    elif isinstance(value, torch.Tensor):
        found.update(f"{tuple(value.shape)} {value.dtype}".encode())
        found.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, dict):
        for key in value:
            found.update(str(key).encode(errors="surrogatepass"))
            _add(found, value[key])
    elif isinstance(value, (list, tuple)):
        for one in value:
            _add(found, one)
    else:
        found.update(repr(value).encode())


def outcomes(cases: Sequence[Case], mode: str) -> dict[str, Outcome | str]:
    """Run the cases on this rank, one after the other, `stock` or `eliminated`."""
    import logging
    import warnings

    from initopt.comm_elim.elimination import eliminated

    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    return {case.name: outcome(case, eliminated if mode == "eliminated" else nullcontext) for case in cases}
