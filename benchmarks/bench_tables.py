"""Filling TorchRec's tables: as ever, once, by several threads, in huge pages, left to a restore.

    python -m benchmarks.bench_tables --save                 # 26 tables of 1 M x 128, 20 minutes on two cores
    python -m benchmarks.bench_tables --rows 100000          # smaller

Each row is a way to make a DistributedModelParallel of one EmbeddingBagCollection, row-wise over the ranks. All ways
are started in turn, each rank in a fresh process, and a round of all is repeated. *Seconds* are those of the
construction on the slowest rank; page faults and CPU seconds those of all ranks in it. *System* is nearly all the
first touch of the memory, which every way pays once. *fill* is from the first to the last moment that initopt's threads
fill. The sha256 of every table's bytes and of the generator's state is compared with stock's. Where tables are left to
a restore, one that writes them all follows, and the seconds of the check after it are counted.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.bench_dynamic_shapes import about

RESULTS = Path(__file__).parent / "results" / "tables.md"
WAYS = ("stock", "once, 1 thread", "once, all cores", "once, huge pages", "restored")


@dataclass(frozen=True)
class Made:
    """What making the model took on one rank: seconds, CPU seconds, page faults, bytes of its tables."""

    seconds: float
    fill: float
    cpu: float
    system: float
    faults: int
    bytes: int
    digest: str


def one(way: str, rows: int, dim: int, tables: int) -> Made:
    """Make the model in this rank, in one of `WAYS`."""
    import torch
    from torch import distributed
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
    from torchrec.distributed.types import ShardingPlan

    from initopt import Filled, fill_once

    distributed.init_process_group("gloo")
    torch.manual_seed(0)
    configs = [
        EmbeddingBagConfig(name=f"t{i}", feature_names=[f"f{i}"], embedding_dim=dim, num_embeddings=rows)
        for i in range(tables)
    ]
    model = torch.nn.Sequential(EmbeddingBagCollection(tables=configs, device=torch.device("meta")))
    sharder, world = EmbeddingBagCollectionSharder(), distributed.get_world_size()
    plan = construct_module_sharding_plan(
        model[0],
        {config.name: row_wise(compute_kernel="fused") for config in configs},
        sharder=sharder,
        local_size=world,
        world_size=world,
        device_type="cpu",
    )

    def make() -> Any:
        return DistributedModelParallel(
            model, device=torch.device("cpu"), plan=ShardingPlan({"0": plan}), sharders=[sharder]
        )

    distributed.barrier()
    before, cpu, start = resource.getrusage(resource.RUSAGE_SELF), time.process_time(), time.perf_counter()
    filled = Filled(0)
    if way == "stock":
        sharded = make()
    else:
        threads = 1 if way == "once, 1 thread" else None
        with fill_once(threads, restored=way == "restored", huge_pages=way == "once, huge pages") as filled:
            sharded = make()
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    after = resource.getrusage(resource.RUSAGE_SELF)
    shards = [shard.tensor for value in sharded.state_dict().values() for shard in value.local_shards()]
    if way == "restored":
        for shard in shards:
            shard.fill_(0.5)
        start = time.perf_counter()
        if filled.complete():
            raise AssertionError("a restored table was filled")
        seconds += time.perf_counter() - start
    content = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
    for shard in shards if way != "restored" else ():
        content.update(memoryview(shard.detach().numpy()).cast("B"))
    return Made(
        seconds,
        max((w.end for w in filled.worked), default=0.0) - min((w.start for w in filled.worked), default=0.0),
        cpu,
        after.ru_stime - before.ru_stime,
        after.ru_minflt - before.ru_minflt,
        sum(shard.numel() * shard.element_size() for shard in shards),
        content.hexdigest() if way != "restored" else "",
    )


def started(way: str, ranks: int, size: Sequence[int]) -> list[Made]:
    """Make the model in this way on so many fresh ranks."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [*launch, "-m", "benchmarks.bench_tables", "--one", way, "--size", *map(str, size)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return [Made(**json.loads(line)) for line in done.stdout.splitlines() if line.startswith("{")]


def table(starts: dict[tuple[int, str], list[list[Made]]]) -> str:
    """All ways as Markdown, ratios pair by pair with stock's start of the same round."""
    lines = [
        "| ranks | way | rounds | seconds | stock / it | fill, s | user CPU s | stock / it | system CPU s "
        "| page faults | bytes |",
        "|---:|---|---:|---|---|---:|---:|---|---:|---:|---|",
    ]
    for (ranks, way), rounds in starts.items():
        stock = starts[ranks, "stock"]
        slowest = [max(made.seconds for made in ranks_) for ranks_ in rounds]
        ratios = [max(m.seconds for m in base) / mine for base, mine in zip(stock, slowest, strict=True)]
        fill = statistics.median(max(made.fill for made in ranks_) for ranks_ in rounds)
        user = [sum(made.cpu - made.system for made in ranks_) for ranks_ in rounds]
        less = [sum(m.cpu - m.system for m in base) / mine for base, mine in zip(stock, user, strict=True)]
        system = statistics.median(sum(made.system for made in ranks_) for ranks_ in rounds)
        faults = statistics.median(sum(made.faults for made in ranks_) for ranks_ in rounds)
        expected = [sorted(made.digest for made in base) for base in stock]
        equal = [sorted(made.digest for made in ranks_) for ranks_ in rounds] == expected
        bytes_ = "" if way in ("stock", "restored") else "equal" if equal else "**DIFFERENT**"
        faster, lighter = ("", "") if way == "stock" else (_spread(ratios, 2), _spread(less, 2))
        cells = (
            f"{ranks} | {way} | {len(rounds)} | {_spread(slowest, 1)} | {faster} | {f'{fill:.1f}' if fill else ''} "
            f"| {statistics.median(user):.1f} | {lighter} | {system:.1f} | {faults:,.0f} | {bytes_}"
        )
        lines.append(f"| {cells} |")
    return "\n".join(lines)


def _spread(values: Sequence[float], digits: int) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} ... {max(values):.{digits}f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--tables", type=int, default=26)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", action="store_true", help=f"keep the table in {RESULTS.name}")
    parser.add_argument("--one", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, nargs=3, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.one:
        print(json.dumps(asdict(one(chosen.one, *chosen.size))), flush=True)
        return
    size = (chosen.rows, chosen.dim, chosen.tables)
    starts: dict[tuple[int, str], list[list[Made]]] = {}
    for ranks in chosen.ranks:
        for number in range(chosen.rounds):
            # What memory the host has taken back since the last start differs, so each way gets each place in a round.
            for way in (*WAYS[number % len(WAYS) :], *WAYS[: number % len(WAYS)]):
                made = started(way, ranks, size)
                starts.setdefault((ranks, way), []).append(made)
                seconds = max(one.seconds for one in made)
                print(f"{ranks} ranks, round {number + 1}, {way}: {seconds:.1f} s", file=sys.stderr, flush=True)
    total = sum(made.bytes for made in starts[chosen.ranks[0], "stock"][0]) / 1e9
    text = f"{chosen.tables} tables of {chosen.rows:,} x {chosen.dim}, {total:.1f} GB in all.\n\n{table(starts)}"
    print(text)
    if chosen.save:
        RESULTS.write_text(
            f"# Filling tables\n\n{about('bench_tables', 'medians and ranges of several rounds')}\n\n{text}\n"
        )


if __name__ == "__main__":
    main()
