"""A trainer that knows nothing of initopt: a validation before the training, its own loop, forked loader workers.

    python -m tests.multirank.plain_trainer [env|spawn|elastic] [OPTION]...

`env` is one rank with the launcher's variables, `spawn` two by `mp.spawn` which find none of them in the environment,
`elastic` two by `elastic_launch`. Options: `throw-away` takes a training step that a checkpoint overwrites,
`state-only` lets the optimizer make its state first, `fail` raises in the data set, `restart` at the first attempt,
`restart-early` before it has a process group.
Each rank prints one JSON line: its losses, what is still hooked at the end, and what its environment says.
"""

from __future__ import annotations

import copy
import json
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import init_process_group, new_group
from torch.utils.data import DataLoader, Dataset

WORLD = 2


class Rows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __init__(self, broken: bool) -> None:
        self._broken = broken

    def __len__(self) -> int:
        return 32

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self._broken:
            raise KeyError("a broken row")
        return torch.full((4,), row / 32), torch.full((1,), row / 16)


def train(options: list[str]) -> None:
    rank = dist.get_rank()
    torch.manual_seed(0)
    new_group([0])
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(200)), nn.Linear(4, 1))
    ddp = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    if "restart" in options and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
        raise RuntimeError("the first attempt fails")
    if "state-only" in options:
        optimizer.step()
    if "throw-away" in options:
        before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        step(ddp, optimizer, torch.ones(2, 4), torch.ones(2, 1))
        optimizer.load_state_dict(before[1])
        model.load_state_dict(before[0])
    validate(ddp)
    loader = DataLoader(Rows("fail" in options), batch_size=8, num_workers=1)
    losses = [step(ddp, optimizer, rows, wanted) for rows, wanted in loader]
    line = json.dumps({"rank": rank, "losses": losses, "hooked": hooked(), "environment": environment()})
    # In one write: the ranks have one stdout, and print would make two of it.
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def validate(ddp: nn.Module) -> None:
    ddp.eval()
    with torch.no_grad():
        for rows, _ in DataLoader(Rows(False), batch_size=8):
            ddp(rows)
    ddp.train()


def step(ddp: nn.Module, optimizer: torch.optim.Optimizer, rows: torch.Tensor, wanted: torch.Tensor) -> float:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(ddp(rows), wanted)
    loss.backward()
    optimizer.step()
    return loss.item()


def hooked() -> list[str]:
    """What does not come from where torch has it."""
    import torch.nn.modules.module as modules
    import torch.optim.optimizer as optimizers

    functions = {
        "init_process_group": init_process_group,
        "dist.init_process_group": dist.init_process_group,
        "new_group": new_group,
        "rendezvous": dist.distributed_c10d.rendezvous,
        "DataLoader.__iter__": DataLoader.__iter__,
        "backward": torch.autograd._engine_run_backward,
        "load_state_dict": nn.Module.load_state_dict,
    }
    found = [name for name, one in functions.items() if "torch" not in one.__code__.co_filename]
    left = {
        "registration": modules._global_module_registration_hooks,
        "optimizers": optimizers._global_optimizer_post_hooks,
    }
    return found + [name for name, hooks in left.items() if hooks]


def environment() -> list[str]:
    return [name for name in ("INITOPT_RUN", "RANK") if name in os.environ] + [
        path for path in [*sys.path, *os.environ.get("PYTHONPATH", "").split(os.pathsep)] if "every_process" in path
    ]


def spawned(rank: int, port: int, options: list[str]) -> None:
    init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD)
    train(options)
    dist.destroy_process_group()


def launched(options: list[str]) -> None:
    if "restart-early" in options and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
        raise RuntimeError("the first attempt fails")
    init_process_group("gloo")
    train(options)
    dist.destroy_process_group()


def main() -> None:
    how, *options = sys.argv[1:]
    if how == "spawn":
        port = int(os.environ["MASTER_PORT"])
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
        torch.multiprocessing.spawn(spawned, (port, options), nprocs=WORLD)
    elif how == "elastic":
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        # Else restarted ranks may find gloo's addresses of the attempt before in the agent's store.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=WORLD,
            run_id="plain",
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            max_restarts=1 if "restart" in options else 0,
            monitor_interval=0.1,
        )
        elastic_launch(config, launched)(options)
    else:
        launched(options)


if __name__ == "__main__":
    main()
