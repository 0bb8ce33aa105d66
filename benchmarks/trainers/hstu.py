"""A plain trainer with the structure of the HSTU one: the parent imports and spawns, and no rank has RANK.

    python benchmarks/trainers/hstu.py --ranks 2
    python benchmarks/trainers/hstu.py --ranks 2 --launch elastic --validate-first

Embeddings of sequences (EmbeddingCollection), a second group of all ranks that nobody uses, its own plan, and a loop
without a pipeline. `--launch elastic` starts the ranks by torch's `elastic_launch` instead, as torchtnt's example does;
with `--validate-first` a validation pass comes before training, as in TorchRec's BERT4Rec.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(
    0, str(Path(__file__).resolve().parents[2])
)  # a script's own folder is on the path, the repository is not

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.trainers import dlrm_model
from benchmarks.trainers.printed import losses_of, print_trained

FEATURES = ("item", "category", "user")
Rows = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Config:
    """What a run trains: histories of `length` events, each with an id of every feature, in tables of `rows`."""

    ranks: int = 2
    rows: int = 20_000
    dim: int = 16
    length: int = 20
    samples: int = 1024
    batch_size: int = 32
    steps: int = 5
    validate_first: bool = False


class Histories(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Histories of random ids, each a function of its number."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def __len__(self) -> int:
        return self._config.samples

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        draw = torch.Generator().manual_seed(row)
        ids = torch.randint(self._config.rows, (len(FEATURES), self._config.length), generator=draw)
        return ids, torch.randint(2, (self._config.length,), generator=draw).float()


def collate(rows: Rows) -> tuple[KeyedJaggedTensor, torch.Tensor]:
    ids = torch.stack([ids for ids, _ in rows], dim=1)
    lengths = torch.full((len(FEATURES) * len(rows),), ids.shape[2], dtype=torch.int32)
    features = KeyedJaggedTensor(keys=list(FEATURES), values=ids.reshape(-1), lengths=lengths)
    return features, torch.stack([wanted for _, wanted in rows])


class Attending(nn.Module):
    """Each event of a history attends to those before it, and says whether the next one is wanted."""

    def __init__(self, tables: EmbeddingCollection, config: Config) -> None:
        super().__init__()
        self.tables = tables
        self._shape = (config.batch_size, config.length, config.dim)
        self.gates = nn.Linear(config.dim, 4 * config.dim)
        self.out = nn.Linear(config.dim, 1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        found = self.tables(features)
        events = torch.stack([found[name].values().view(self._shape) for name in FEATURES]).sum(0)
        gate, value, query, key = nn.functional.silu(self.gates(events)).chunk(4, dim=-1)
        weights = nn.functional.silu(query @ key.transpose(1, 2)).tril()
        scores: torch.Tensor = self.out(gate * (weights @ value)).squeeze(-1)
        return scores


def train(config: Config, rank: int) -> None:
    """One rank, once it has a process group."""
    device = torch.device("cpu")
    torch.manual_seed(1)
    dist.new_group(list(range(config.ranks)))
    tables = [
        EmbeddingConfig(name=f"t_{name}", embedding_dim=config.dim, num_embeddings=config.rows, feature_names=[name])
        for name in FEATURES
    ]
    model = Attending(EmbeddingCollection(tables=tables, device=torch.device("meta")), config)
    apply_optimizer_in_backward(RowWiseAdagrad, model.tables.parameters(), {"lr": 0.05})
    sharders = [EmbeddingCollectionSharder()]
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=config.ranks, local_world_size=config.ranks, compute_device=device.type)
    )
    plan = planner.collective_plan(model, sharders, dist.GroupMember.WORLD)
    dmp = DistributedModelParallel(module=model, device=device, plan=plan, sharders=sharders)
    optimizer = dlrm_model.make_optimizer(dmp)
    training, validation = (loader(config, rank, shuffle) for shuffle in (True, False))
    if config.validate_first:
        dmp.eval()
        with torch.no_grad():
            dmp(next(iter(validation))[0])
        dmp.train()
    batches = iter(training)

    def step() -> torch.Tensor:
        features, wanted = next(batches)
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(dmp(features), wanted)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss

    print_trained(rank, dmp, optimizer, losses_of(step, config.steps))


def loader(config: Config, rank: int, shuffle: bool) -> DataLoader[tuple[torch.Tensor, torch.Tensor]]:
    data = Histories(config)
    shares = DistributedSampler(data, num_replicas=config.ranks, rank=rank, shuffle=shuffle, drop_last=True)
    return DataLoader(data, batch_size=config.batch_size, sampler=shares, collate_fn=collate, drop_last=True)


def spawned(rank: int, port: int, config: Config) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=config.ranks)
    train(config, rank)
    dist.destroy_process_group()


def launched(config: Config) -> None:
    dist.init_process_group("gloo")
    train(config, dist.get_rank())
    dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launch", choices=("spawn", "elastic"), default="spawn")
    parser.add_argument("--validate-first", action="store_true")
    for name in ("ranks", "rows", "dim", "length", "samples", "batch_size", "steps"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(Config, name))
    options = vars(parser.parse_args())
    launch = options.pop("launch")
    config = Config(**options)
    if launch == "spawn":
        torch.multiprocessing.spawn(spawned, (free_port(), config), nprocs=config.ranks)
    else:
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        place = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=config.ranks,
            run_id="hstu",
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            max_restarts=0,
        )
        elastic_launch(place, launched)(config)


if __name__ == "__main__":
    main()
