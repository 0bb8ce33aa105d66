"""A rank that shards a model by one plan after another and prints, for each, whether the lookups return the right rows.

Every element of a table says where it stands: row * 100 + column. The plans are those of `CASES`; each is for four
ranks on two hosts, on the cpu, and none of them makes TorchRec raise.
"""

from __future__ import annotations

import datetime
import json
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator

warnings.simplefilter("ignore")

import torch  # noqa: E402
from torch import distributed, nn  # noqa: E402
from torchrec.distributed.model_parallel import DistributedModelParallel  # noqa: E402
from torchrec.distributed.planner.types import CustomTopologyData  # noqa: E402
from torchrec.distributed.types import ParameterSharding, ShardingPlan  # noqa: E402
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor  # noqa: E402

from initopt.sharding_plan.check import PlanError, check_plan  # noqa: E402
from initopt.sharding_plan.offline import plan_offline  # noqa: E402
from initopt.sharding_plan.pinning import load_plan  # noqa: E402
from tests.plans import KINDS, SHARDERS, bags, of, plan, sequences, topology  # noqa: E402

ROWS, DIM, TABLES = 10, 8, 2


def stock(kind: str, make: Callable[[], nn.Module] = bags) -> Callable[[], tuple[nn.Module, ShardingPlan]]:
    def case() -> tuple[nn.Module, ShardingPlan]:
        made = make()
        return made, plan(made, kind, on=topology(device="cpu"))

    return case


def changed(kind: str, change: Callable[[ParameterSharding], None]) -> Callable[[], tuple[nn.Module, ShardingPlan]]:
    def case() -> tuple[nn.Module, ShardingPlan]:
        made, planned = stock(kind)()
        for table in ("t0", "t1"):
            change(of(planned, table, ""))
        return made, planned

    return case


def swap(sharding: ParameterSharding) -> None:
    shards = sharding.sharding_spec.shards
    shards[0], shards[1] = shards[1], shards[0]


def reverse(sharding: ParameterSharding) -> None:
    sharding.ranks.reverse()
    sharding.sharding_spec.shards.reverse()


def uneven() -> tuple[nn.Module, ShardingPlan]:
    memory = CustomTopologyData({"ddr_cap": [2 << 30, 8 << 30, 8 << 30, 2 << 30]}, 4)
    made = bags()
    return made, plan(made, "row_wise", on=topology(device="cpu", custom_topology_data=memory))


def other_hosts() -> tuple[nn.Module, ShardingPlan]:
    made = bags()
    return made, plan(made, "grid_shard", on=topology(4, 4, "cpu"))


def pinned() -> tuple[nn.Module, ShardingPlan]:
    made = bags()
    about = {"world_size": 4, "local_world_size": 2, "device": "cpu", "sharders": SHARDERS}
    with tempfile.TemporaryDirectory() as folder:
        plan_offline(made, **about).file.write(f"{folder}/plan.json")
        return made, load_plan(f"{folder}/plan.json", made, **about)


def without_ranks() -> tuple[nn.Module, ShardingPlan]:
    made, planned = stock("row_wise")()
    of(planned, "t0", "").ranks = None
    return made, planned


CASES = {
    **{f"{kind} of bags": stock(kind) for kind in KINDS},
    **{f"{kind} of sequences": stock(kind, sequences) for kind in ("table_wise", "row_wise", "column_wise")},
    "column_wise in another order": changed("column_wise", reverse),
    "row_wise without ranks": without_ranks,
    "pinned": pinned,
    "row_wise in another order": changed("row_wise", swap),
    "uneven row_wise of TorchRec": uneven,
    "grid_shard of larger hosts": other_hosts,
}


def fill(model: DistributedModelParallel) -> None:
    for value in model.state_dict().values():
        shards = value.local_shards() if hasattr(value, "local_shards") else None
        for tensor, offsets in (
            ((shard.tensor, shard.metadata.shard_offsets) for shard in shards)
            if shards is not None
            else ((value, (0, 0)),)
        ):
            rows = torch.arange(tensor.shape[0]) + offsets[0]
            columns = torch.arange(tensor.shape[1]) + offsets[1]
            tensor.copy_(rows[:, None] * 100.0 + columns[None, :])


def looked_up(model: DistributedModelParallel) -> Iterator[torch.Tensor]:
    features = KeyedJaggedTensor.from_lengths_sync(
        keys=[f"f{i}" for i in range(TABLES)],
        values=torch.arange(ROWS).repeat(TABLES),
        lengths=torch.ones(TABLES * ROWS, dtype=torch.long),
    )
    found = model(features).wait()
    for i in range(TABLES):
        value = found[f"f{i}"]
        yield (value if isinstance(value, torch.Tensor) else value.values()).detach()


def main() -> None:
    distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=30))
    wanted = torch.arange(ROWS)[:, None] * 100.0 + torch.arange(DIM)[None, :]
    results = {}
    for name, case in CASES.items():
        made, planned = case()
        try:
            check_plan(
                planned,
                made,
                world_size=distributed.get_world_size(),
                local_world_size=int(os.environ["LOCAL_WORLD_SIZE"]),
                device="cpu",
                sharders=SHARDERS,
            )
            accepted = True
        except PlanError:
            accepted = False
        model = DistributedModelParallel(made, device=torch.device("cpu"), plan=planned, sharders=SHARDERS)
        fill(model)
        right = all(torch.equal(value, wanted) for value in looked_up(model))
        results[name] = [accepted, right]
    print(json.dumps(results))


if __name__ == "__main__":
    main()
