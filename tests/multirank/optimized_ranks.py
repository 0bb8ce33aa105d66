"""Trainers that know nothing of initopt, as forked ranks: stock, recorded, or with `--optimize`.

What `sitecustomize` would do in a fresh process is done by `watched`: all modules are imported here already, as in a
rank of `initopt launch`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sys
import threading
import time
import traceback
from dataclasses import asdict, dataclass, field
from typing import Any

WORLD = 2
LARGE = 1 << 19
"""Rows of 64 columns, of which each rank gets half: enough that to fill them once is worth it."""


class Broken(Exception):
    """What a trainer fails with that is meant to."""


@dataclass
class Outcome:
    """What a rank came to. `frames` are those of the error, as file and function."""

    losses: list[float] = field(default_factory=list)
    state: str = ""
    generator: str = ""
    error: str = ""
    frames: list[tuple[str, str]] = field(default_factory=list)
    fills: int = 0
    left: list[str] = field(default_factory=list)
    """Entry points that are still hooked."""

    def trained(self) -> tuple[Any, ...]:
        return self.losses, self.state, self.generator


def watched(root: str, names: tuple[str, ...]) -> Any:
    """Watch this process as `initopt.run` has it watched."""
    from initopt.run import VARIABLE, Wanted, _interpreter
    from initopt.watched_run import WatchedRun

    wanted = Wanted(os.getpid(), "trainer.py", "", root, None, optimize=names)
    os.environ[VARIABLE] = f"{_interpreter()}:{wanted.program}:{json.dumps(asdict(wanted))}"
    run = WatchedRun(wanted)
    run.begin(time.thread_time())
    return run


def rank_of(
    kind: str, root: str, names: tuple[str, ...] | None, *, disable: str = "", patience: float = 60.0
) -> Outcome:
    """One rank of a trainer. `names` are what is optimized, None for stock; `disable` holds on rank 1 only."""
    import torch
    from torch import distributed

    from initopt.optimize import together

    together.PATIENCE = patience
    if os.environ["RANK"] == "1":
        os.environ["INITOPT_DISABLE"] = disable
        if disable == "everything":
            names = () if names else names
    before = hooked_now()
    if names is not None:
        watched(root, names)
    outcome = Outcome()
    kernels = _count_fills(outcome)
    try:
        with kernels:
            train(kind, outcome)
    except Broken as error:
        outcome.error = str(error)
        outcome.frames = [
            (os.path.basename(one.filename), one.name)
            for one in traceback.extract_tb(error.__traceback__)
            if "event_logger" not in one.filename
        ]
    now = hooked_now()
    outcome.left = [name for name in before if before[name] is not now[name]]
    outcome.generator = hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()
    if not outcome.error:
        distributed.destroy_process_group()
    return outcome


def hooked_now() -> dict[str, Any]:
    from initopt.entry_points import ENTRY_POINTS

    found = {}
    for row in ENTRY_POINTS:
        owner, _, name = row.name.rpartition(".")
        module = sys.modules.get(row.module)
        if module is not None and owner != "*":
            found[f"{row.module}.{row.name}"] = vars(getattr(module, owner) if owner else module).get(name)
    callbacks = sys.modules["torch._dynamo.callback"].callback_handler  # type: ignore[attr-defined]
    found["compiles"] = None if not callbacks.start_callbacks + callbacks.end_callbacks else object()
    return found


def _count_fills(outcome: Outcome) -> Any:
    """Count the random fills of large tensors, as torch's own operator sees them: from whatever function."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Fills(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is torch.ops.aten.uniform_.default and args[0].numel() >= LARGE:
                outcome.fills += 1
            return function(*args, **(kwargs or {}))

    return Fills()


def train(kind: str, outcome: Outcome) -> None:
    """A trainer of the usual kind: `own plan`, `default plan`, `own classes` or `fails`."""
    import torch
    from torch import distributed, nn
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
    from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
    from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
    from torchrec.optim.optimizers import in_backward_optimizer_filter

    from benchmarks.trainers.trained_state import trained_state
    from tests.multirank.small_model import Small, made_batches

    class Planner(EmbeddingShardingPlanner):  # type: ignore[misc]
        pass

    class Parallel(DistributedModelParallel):  # type: ignore[misc]
        def init_data_parallel(self) -> None:
            super().init_data_parallel()

    class Pipeline(TrainPipelineSparseDist):  # type: ignore[misc,type-arg]
        pass

    def broken(_: torch.Tensor) -> None:
        raise Broken("these weights can't be made")

    torch.manual_seed(3)
    distributed.init_process_group("gloo")
    rows = {"t0": LARGE if kind == "default plan" else 64, "t1": 40, "t2": 24}
    tables = [
        EmbeddingBagConfig(
            name=name,
            feature_names=[f"f_{name}"],
            embedding_dim=64,
            num_embeddings=count,
            init_fn=broken if kind == "fails" else functools.partial(nn.init.uniform_, a=-0.1, b=0.1),
        )
        for name, count in rows.items()
    ]
    model = Small(EmbeddingBagCollection(tables=tables, device=torch.device("meta")))
    how = {"t0": "column_wise", "t1": "table_wise", "t2": "data_parallel"}
    constraints = {name: ParameterConstraints(sharding_types=[one]) for name, one in how.items()}
    plan = None
    if kind != "default plan":
        made = Planner if kind == "own classes" else EmbeddingShardingPlanner
        planner = made(topology=Topology(world_size=WORLD, compute_device="cpu"), constraints=constraints)
        plan = planner.collective_plan(model)
    apply_optimizer_in_backward(torch.optim.SGD, model.ebc.parameters(), {"lr": 0.05})
    dmp = (Parallel if kind == "own classes" else DistributedModelParallel)(
        module=model, device=torch.device("cpu"), plan=plan
    )
    dense = dict(in_backward_optimizer_filter(dmp.named_parameters()))
    wrapped = KeyedOptimizerWrapper(dense, lambda parameters: torch.optim.Adagrad(parameters, lr=0.1))
    optimizer = CombinedOptimizer([dmp.fused_optimizer, wrapped])
    pipeline = (Pipeline if kind == "own classes" else TrainPipelineSparseDist)(
        dmp, optimizer, torch.device("cpu"), execute_all_batches=True
    )
    batches = made_batches(list(rows))
    losses = [pipeline.progress(batches)[0] for _ in range(3)]
    outcome.losses = [loss.item() for loss in losses]
    outcome.state = trained_state(dmp, optimizer, losses) if kind != "default plan" else _dense_state(dmp)


def _dense_state(dmp: Any) -> str:
    """Of the large table every hundredth row, of all else all."""
    content = hashlib.sha256()
    for name, value in sorted(dmp.state_dict().items()):
        for one in [s.tensor for s in value.local_shards()] if hasattr(value, "local_shards") else [value]:
            content.update(
                name.encode() + one[:: 100 if len(one) > 1000 else 1].detach().contiguous().numpy().tobytes()
            )
    return content.hexdigest()


def compiling_rank(root: str, folder: str, names: tuple[str, ...] | None) -> dict[str, Any]:
    """A rank that compiles a function in its first training step. `folder` is the compiler's."""
    import torch
    from torch import distributed
    from torch._dynamo.utils import counters

    os.environ |= {
        "TORCHINDUCTOR_CACHE_DIR": folder,
        "TMPDIR": folder,
        "INITOPT_ROOT": root,
        "INITOPT_CACHE_KEY": 32 * "k",
    }
    os.makedirs(folder, exist_ok=True)
    before = hooked_now()
    if names is not None:
        watched(root, names)
    torch.manual_seed(3)
    distributed.init_process_group("gloo")
    weight = torch.nn.Parameter(torch.rand(8, 8))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    @torch.compile
    def product(rows: torch.Tensor) -> torch.Tensor:
        # Nothing of this needs a C++ compiler, which takes its time.
        return rows @ weight

    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = product(torch.rand(4, 8)).sigmoid().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        distributed.all_reduce(weight.grad)
        optimizer.step()
        losses.append(loss.item())
    now = hooked_now()
    for thread in threading.enumerate():
        if thread.name == "initopt-compile-cache":
            thread.join()
    distributed.destroy_process_group()
    return {
        "losses": losses,
        "hits": counters["inductor"]["fxgraph_cache_hit"],
        "misses": counters["inductor"]["fxgraph_cache_miss"],
        "joint": counters["aot_autograd"]["autograd_cache_hit"],
        "left": [name for name in before if before[name] is not now[name]],
    }
