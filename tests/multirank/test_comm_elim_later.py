"""Groups that were made by their members only: what comes after them works on, on four real gloo ranks."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.multirank.eliminated_ranks import Case, built, digest, own_group
from tests.multirank.forked import fork_ranks


def made(case: Case) -> Any:
    import torch
    from torchrec.distributed.model_parallel import DistributedModelParallel

    from initopt import eliminated

    os.environ["LOCAL_WORLD_SIZE"] = str(case.local)
    torch.manual_seed(5)
    model, plan, sharders = built(case)
    with eliminated():
        return DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=sharders)


def kept(dmp: Any) -> dict[str, Any]:
    """What a checkpoint can hold: not the buffer that has another value on each rank."""
    return {name: value for name, value in dmp.state_dict().items() if name != "own"}


def total(group: Any) -> float:
    """The sum of the ranks of a group, met on it."""
    import torch
    from torch import distributed

    ranks = torch.tensor([float(os.environ["RANK"])])
    distributed.all_reduce(ranks, group=group)
    return ranks.item()


def metrics(name: str) -> dict[str, float]:
    """What a metric module, made now, says of all ranks; one of them meets on a thread of its own."""
    import torch
    from torchrec.metrics import cpu_offloaded_metric_module, metric_module, metrics_config

    task = metrics_config.DefaultTaskInfo
    kind = {
        "RecMetricModule": metric_module.RecMetricModule,
        "CPUOffloadedRecMetricModule": cpu_offloaded_metric_module.CPUOffloadedRecMetricModule,
    }[name]
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    module = metric_module.generate_metric_module(
        kind,
        metrics_config=metrics_config.MetricsConfig(
            rec_tasks=[task],
            rec_metrics={
                metrics_config.RecMetricEnum.MSE: metrics_config.RecMetricDef(rec_tasks=[task], window_size=100)
            },
            throughput_metric=metrics_config.ThroughputDef(),
        ),
        batch_size=2,
        world_size=world,
        my_rank=rank,
        state_metrics_mapping={},
        device=torch.device("cpu"),
        module_kwargs={"model_out_device": torch.device("cpu")} if name.startswith("CPU") else None,
    )
    module.update(
        {
            task.label_name: torch.ones(2, dtype=torch.float64),
            task.prediction_name: torch.full((2,), float(rank), dtype=torch.float64),
            task.weight_name: torch.ones(2, dtype=torch.float64),
        }
    )
    if name.startswith("CPU"):
        found = module.async_compute().resolve()
        module.shutdown()
    else:
        found = module.compute()
    return {key: float(value) for key, value in found.items() if key.endswith("|window_mse")}


def later(folder: str) -> dict[str, Any]:
    import logging

    import torch
    import torch.distributed.checkpoint as checkpoint
    from torch import distributed
    from torchrec.distributed import comm

    logging.disable(logging.CRITICAL)
    rank, found = int(os.environ["RANK"]), {}
    case = Case("EBC", ("table_row_wise", "row_wise", "data_parallel"))
    # What ranks have made before differs, as where a script makes a group on some ranks only.
    with own_group(forgets=False):
        if rank < 2:
            distributed.new_group([0, 1], use_local_synchronization=True)
        dmp = made(case)
        names = [distributed.distributed_c10d._world.pg_names[group] for group in (comm._INTRA_PG, comm._CROSS_PG)]
        found["sums"] = [total(comm._INTRA_PG), total(comm._CROSS_PG)]
        held = digest(kept(dmp))
        checkpoint.save({"model": kept(dmp)}, checkpoint_id=folder)
        with torch.no_grad():
            for one in dmp.parameters():
                one.zero_()
        changed = digest(kept(dmp))
        state = {"model": kept(dmp)}
        checkpoint.load(state, checkpoint_id=folder)
        dmp.load_state_dict(state["model"], strict=False)
        found["loaded"] = digest(kept(dmp)) == held != changed
        found["metrics"] = [metrics("RecMetricModule"), metrics("CPUOffloadedRecMetricModule")]
        # One of them is destroyed by its members, and made again, under another name.
        distributed.destroy_process_group(comm._CROSS_PG)
        made(case)
        new = [distributed.distributed_c10d._world.pg_names[group] for group in (comm._INTRA_PG, comm._CROSS_PG)]
        found["new names"] = [name not in names for name in new]
        found["sums again"] = [total(comm._INTRA_PG), total(comm._CROSS_PG)]
        distributed.barrier()
    with own_group():
        made(case)
        found["sums after all"] = [total(comm._INTRA_PG), total(comm._CROSS_PG)]
        distributed.barrier()
    return found


# torchmetrics still asks distutils for versions.
@pytest.mark.filterwarnings("ignore:distutils Version classes:DeprecationWarning")
def test_checkpoints_metrics_and_groups_made_and_destroyed_later_work_on() -> None:
    # Once, for all ranks.
    import torchrec.metrics.cpu_offloaded_metric_module  # noqa: F401

    with tempfile.TemporaryDirectory(prefix="initopt-checkpoint-") as folder:
        ranks = fork_ranks(later, str(Path(folder) / "saved"), ranks=4)
    assert len(ranks[0]["metrics"][0]) == 1 and ranks[0]["metrics"] == [ranks[0]["metrics"][0]] * 2
    for rank, found in enumerate(ranks):
        sums = [1.0 if rank < 2 else 5.0, 2.0 if rank % 2 == 0 else 4.0]
        assert found["sums"] == found["sums again"] == found["sums after all"] == sums
        assert found["loaded"]
        assert found["new names"] == [False, True]
        # (1 + 0 + 1 + 4) / 4: of all ranks. TorchRec gives it to rank 0 alone.
        assert all(value == 1.5 for values in found["metrics"] for value in values.values())
