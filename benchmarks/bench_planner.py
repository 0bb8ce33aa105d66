"""What a sharding plan costs: TorchRec's planner and the fast one, one after the other in one process, plans compared.

    python -m benchmarks.bench_planner                 # stock runs up to two minutes each
    python -m benchmarks.bench_planner --long          # all of them
    python -m benchmarks.bench_planner --only mixed:26x8 --json results.json

Times are CPU seconds of the process, the median of five runs (of one where a run takes over a second). The largest
sizes are planned by the fast planner alone, each in a fresh process, whose peak memory is printed.

Equal tables have a million rows of dimension 128; mixed ones 1,000 to 50 million rows of dimension 16 to 256 and
pooling factors of 0.5 to 60; in tight memory each rank has 1.25 times its share of the tables' bytes.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import logging
import multiprocessing
import os
import platform
import random
import resource
import statistics
import sys
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from initopt.sharding_plan import account, fast_planner

KINDS = ("equal", "mixed", "tight")
COMPARED = ((26, 8), (26, 128), (100, 32), (100, 128), (200, 128))
ALONE = ((1_000, 128), (1_000, 1_024), (5_000, 1_024))
WANTED = {(26, 8): 20, (26, 128): 80, (100, 32): 90, (100, 128): 100, (200, 128): 250}
GOAL = {(1_000, 128): 5, (1_000, 1_024): 30, (5_000, 1_024): 120}
LONG = ((200, 128),)
"""Where TorchRec's own planner takes over two minutes."""


@dataclass(frozen=True)
class Row:
    """One case. Times are CPU seconds; `stock` is None where it did not run. `peak` is in GB."""

    kind: str
    tables: int
    ranks: int
    stock: float | None
    fast: float
    equal: bool | None
    planned: bool
    proposals: int
    placed: int
    peak: float | None = None

    @property
    def ratio(self) -> float | None:
        return self.stock / self.fast if self.stock is not None else None

    @property
    def wanted(self) -> str:
        size = self.tables, self.ranks
        if size in GOAL:
            return f"<= {GOAL[size]} s {'yes' if self.fast <= GOAL[size] else 'NO'}"
        if self.ratio is None:
            return ""
        return f">= {WANTED[size]} {'yes' if self.ratio >= WANTED[size] else 'NO'}" if size in WANTED else ""


def inputs(kind: str, tables: int, ranks: int) -> tuple[nn.Module, dict[str, Any]]:
    """Return a model and the arguments of a planner, always the same for the same case."""
    draw = random.Random(1)
    configs, constraints, size = [], {}, 0
    for i in range(tables):
        rows, dim, pooling = 1_000_000, 128, 10.0
        if kind != "equal":
            rows, dim = int(10 ** draw.uniform(3, 7.7)), draw.choice([16, 32, 64, 96, 128, 192, 256])
            pooling = draw.choice([0.5, 1.0, 5.0, 20.0, 60.0])
            constraints[f"t{i}"] = ParameterConstraints(pooling_factors=[pooling])
        size += rows * dim * 4
        configs.append(
            EmbeddingBagConfig(name=f"t{i}", feature_names=[f"f{i}"], embedding_dim=dim, num_embeddings=rows)
        )
    model = nn.Module()
    model.sparse = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
    hbm = int(1.25 * size / ranks) if kind == "tight" else 80 * 1024**3
    topology = Topology(
        world_size=ranks, local_world_size=8, compute_device="cuda", hbm_cap=hbm, ddr_cap=2048 * 1024**3
    )
    return model, {"topology": topology, "constraints": constraints or None}


def plan(make: Any, kind: str, tables: int, ranks: int) -> tuple[str, float, Any]:
    """Return what came out (every field of the plan, or the error), the CPU seconds, and the planner."""
    model, arguments = inputs(kind, tables, ranks)
    planner = make(**arguments)
    gc.collect()
    start = time.process_time()
    try:
        found = planner.plan(model, [EmbeddingBagCollectionSharder()]).plan
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.process_time() - start, planner
    seconds = time.process_time() - start
    return repr([(path, list(parameters.items())) for path, parameters in found.items()]), seconds, planner


def repeated(make: Any, kind: str, tables: int, ranks: int) -> tuple[str, float, Any]:
    """Plan until five runs or a second are over; return the median time."""
    found, seconds, planner = plan(make, kind, tables, ranks)
    times = [seconds]
    while len(times) < 5 and sum(times) < 1:
        times.append(plan(make, kind, tables, ranks)[1])
    return found, statistics.median(times), planner


def compared(kind: str, tables: int, ranks: int) -> Row:
    """Plan with both, the fast one first and last: whoever comes first pays for what both load."""
    plan(fast_planner, kind, tables, ranks)
    expected, stock, planner = repeated(EmbeddingShardingPlanner, kind, tables, ranks)
    found, fast, made = repeated(fast_planner, kind, tables, ranks)
    equal = found == expected and made._num_proposals == planner._num_proposals
    counts = account(made)
    return Row(kind, tables, ranks, stock, fast, equal, bool(made._best_plan), counts.proposals, counts.placed)


def alone(kind: str, tables: int, ranks: int) -> Row:
    """Plan once with the fast planner, in this process."""
    _quiet()
    _, seconds, planner = plan(fast_planner, kind, tables, ranks)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2
    counts = account(planner)
    return Row(
        kind,
        tables,
        ranks,
        None,
        seconds,
        None,
        bool(planner._best_plan),
        counts.proposals,
        counts.placed,
        round(peak, 2),
    )


def apart(kind: str, tables: int, ranks: int) -> Row:
    """Plan once with the fast planner, in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(alone, kind, tables, ranks).result()


def line(row: Row) -> str:
    stock = f"{row.stock:,.2f}" if row.stock is not None else ""
    ratio = f"{row.ratio:,.1f}" if row.ratio is not None else ""
    equal = {True: "equal", False: "**DIFFERENT**", None: ""}[row.equal] + ("" if row.planned else " (no plan fits)")
    peak = f"{row.peak:.2f} GB" if row.peak is not None else ""
    return (
        f"| {row.kind} | {row.tables} x {row.ranks} | {stock} | {row.fast:,.3f} | {ratio} | {row.wanted} | {equal} "
        f"| {row.proposals} ({row.placed}) | {peak} |"
    )


HEAD = """\
| tables | tables x ranks | stock, CPU s | fast, CPU s | ratio | wanted | plan | proposals (placed) | peak memory |
|---|---|---:|---:|---:|---|---|---:|---:|"""


def _quiet() -> None:
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")


def _machine() -> dict[str, Any]:
    names = ("torch", "torchrec", "fbgemm-gpu-cpu", "numpy")
    versions = {}
    for name in names:
        try:
            versions[name] = version(name)
        except ModuleNotFoundError:
            continue
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cores": os.cpu_count(),
        "system": platform.system(),
        "python": platform.python_version(),
        "load_over_15_minutes": round(os.getloadavg()[2], 1),
        **versions,
    }


def main() -> int:
    """Print a Markdown table, a row when it is measured. Exit code 1 if a plan differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--long", action="store_true", help="also where stock takes over two minutes")
    parser.add_argument("--only", action="append", metavar="KIND:TABLESxRANKS", help="this case, may be repeated")
    parser.add_argument("--no-stock", action="store_true", help="the fast planner only")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the figures there")
    arguments = parser.parse_args()
    _quiet()
    cases = [(kind, *size) for size in (*COMPARED, *ALONE) for kind in KINDS]
    if arguments.only:
        cases = [_case(text, parser) for text in arguments.only]
    print(HEAD, flush=True)
    rows = []
    for kind, tables, ranks in cases:
        size = tables, ranks
        skipped = size in ALONE or arguments.no_stock or (size in LONG and not arguments.long)
        rows.append(apart(kind, tables, ranks) if skipped else compared(kind, tables, ranks))
        print(line(rows[-1]), flush=True)
    if arguments.json:
        saved = {"machine": _machine(), "rows": [dataclasses.asdict(row) for row in rows]}
        arguments.json.write_text(json.dumps(saved, indent=1) + "\n")
    return any(row.equal is False for row in rows)


def _case(text: str, parser: argparse.ArgumentParser) -> tuple[str, int, int]:
    kind, _, size = text.partition(":")
    tables, _, ranks = size.partition("x")
    if kind not in KINDS or not tables.isdigit() or not ranks.isdigit():
        parser.error(f"{text!r} is no case: say one of {', '.join(KINDS)}, as in mixed:26x8")
    return kind, int(tables), int(ranks)


if __name__ == "__main__":
    sys.exit(main())
