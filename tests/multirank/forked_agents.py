"""Two torchrun agents on this machine, each with two ranks: what a job of two hosts finds in its environment.

The agents are torch's own elastic ones, as torchrun starts them. They are forked from this process, and their ranks
from them, which saves the imports.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from tests.multirank.forked import fork_ranks
from tests.multirank.launch import free_port

HOSTS, LOCAL = 2, 2
_OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def fork_agents(function: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
    """Call `function(*args)` on the four ranks of two agents, and return what each returned. Raises as `fork_ranks`."""
    found = fork_ranks(_agent, free_port(), function, args, ranks=HOSTS, timeout=timeout)
    of_rank: dict[int, Any] = {rank: value for one in found for rank, value in one.items()}
    return [of_rank[rank] for rank in range(HOSTS * LOCAL)]


def _agent(port: int, function: Callable[..., Any], args: tuple[Any, ...]) -> dict[int, Any]:
    import logging

    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.disable(logging.WARNING)
    host = int(os.environ["RANK"])
    for name in _OF_RANKS:
        del os.environ[name]
    config = LaunchConfig(
        min_nodes=HOSTS,
        max_nodes=HOSTS,
        nproc_per_node=LOCAL,
        run_id="two-hosts",
        rdzv_backend="static",
        rdzv_endpoint=f"127.0.0.1:{port}",
        rdzv_configs={"rank": host, "timeout": 30},
        max_restarts=0,
        start_method="fork",
    )
    found: dict[int, Any] = elastic_launch(config, function)(*args)
    return found
