"""What compiling costs a start-up, stock against initopt: one disk for all ranks or one each, cold and restarted.

    python -m benchmarks.bench_compile --save                    # all cases, about an hour on two cores
    python -m benchmarks.bench_compile own-cold --ranks 4        # one of them

A case is a disk and a state. Disk: `shared`, one cache folder for all ranks, as on one host; `own`, a folder per rank,
as on a host each (initopt's store is a folder that all of them see). State: `cold`, the first start ever; `restart`,
all caches as the start before left them; `empty`, the compiler's caches are gone and initopt's store is there, as after
a restart on other hosts; `unequal`, initopt's start comes on an empty disk, stock's on its warm one.

Starts are in pairs, stock and initopt in turn, in fresh processes. CPU seconds are those of all ranks and of their
child processes (compilers, loader workers) until the first batch was done. What compiling alone costs is the
difference to starts of the same trainer that doesn't compile.
"""

from __future__ import annotations

import argparse
import os
import shlex
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.demo import TRAINERS
from benchmarks.trainers import criteo
from initopt import Run, bench
from initopt.record import run_root

RESULTS = Path(__file__).parent / "results" / "compile.md"
CASES = ("shared-cold", "shared-restart", "shared-empty", "own-cold", "own-restart", "own-empty", "own-unequal")


@dataclass(frozen=True)
class Result:
    """One case with so many ranks. `stock` and `mine` are the CPU seconds of each start, in the order of the pairs."""

    case: str
    ranks: int
    wall: bench.Bench
    stock: tuple[float, ...]
    mine: tuple[float, ...]

    @property
    def cpu_ratio(self) -> bench.Spread:
        return bench.Spread.of(stock / mine for stock, mine in zip(self.stock, self.mine, strict=True))


def measure(case: str, ranks: int, *, runs: int, root: Path, options: Sequence[str] = ()) -> Result:
    disk, state = case.split("-")
    # Short: sockets of the loader's workers stand under it.
    folder = root.resolve() / "disk"
    stock, mine = (shlex.quote(str(folder / side)) for side in ("stock", "initopt"))
    prepare = {
        "cold": f'rm -rf {stock} {mine} "$INITOPT_ROOT/compile_cache" "$INITOPT_ROOT/ledger"',
        "restart": None,
        "empty": f"rm -rf {stock} {mine}",
        "unequal": f"rm -rf {mine}",
    }[state]
    measured = bench.run_bench(
        _command("stock", disk, folder, ranks, *options),
        _command("initopt", disk, folder, ranks, *options),
        runs=runs,
        # The second start is the first that knows what the first compiled, and the generators' states.
        warmup=0 if state == "cold" else 1,
        root=root,
        prepare=prepare,
        progress=lambda line: print(f"{case}, {ranks} ranks: {line}", file=sys.stderr, flush=True),
    )
    return Result(case, ranks, measured, _cpu(measured.stock, root), _cpu(measured.initopt, root))


def _command(trainer: str, disk: str, folder: Path, ranks: int, *options: str) -> list[str]:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    if trainer == "initopt" and disk == "own":
        options = (*options, "--shared-store")
    wrapper = [str(TRAINERS / "disk.py"), disk, str(folder / trainer)]
    return [*launch, *wrapper, f"dlrm_{trainer}.py", *options]


def _cpu(side: bench.Side, root: Path) -> tuple[float, ...]:
    runs = (Run.load(root / "bench" / sample.run) for sample in side.samples)
    return tuple(sum(usage.cpu for usage in run.usages.values()) for run in runs)


def table(results: Sequence[Result], uncompiled: Sequence[Result]) -> str:
    """The results as Markdown."""
    first = results[0].wall
    versions = ", ".join(f"{name} {version}" for name, version in first.versions.items())
    columns = ("case", "ranks", "pairs", "stock s", "initopt s", "stock / initopt", "stock CPU s", "initopt CPU s")
    columns += ("CPU ratio", "compile CPU s", "state")
    lines = [
        "# What compiling costs a start-up, stock against initopt",
        "",
        f"`python -m benchmarks.bench_compile --save`, one host of {first.cores} cores, commit {first.commit[:7]};",
        f"{versions}. Nothing is emulated but the disks of `own` (a folder per rank). Medians, and ranges in brackets.",
        "",
        f"| {' | '.join(columns)} |",
        "|---" * len(columns) + "|",
    ]
    base = {result.ranks: result for result in uncompiled}
    for result in results:
        own = [_compile(result, base[result.ranks], side) for side in (0, 1)]
        cells = (
            result.case,
            str(result.ranks),
            str(len(result.stock)),
            _spread(result.wall.stock.first_batch, 1),
            _spread(result.wall.initopt.first_batch, 1),
            _spread(result.wall.ratio, 2),
            _spread(bench.Spread.of(result.stock), 0),
            _spread(bench.Spread.of(result.mine), 0),
            _spread(result.cpu_ratio, 2),
            f"{own[0]:.0f} -> {own[1]:.0f}",
            result.wall.state.verdict,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _compile(result: Result, without: Result, side: int) -> float:
    """CPU seconds over those of the trainer that doesn't compile, medians."""
    whole, less = (result.stock, result.mine)[side], (without.stock, without.mine)[side]
    return statistics.median(whole) - statistics.median(less)


def _spread(spread: bench.Spread, digits: int) -> str:
    return f"{spread.median:.{digits}f} ({spread.min:.{digits}f} ... {spread.max:.{digits}f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; default: all")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--runs", type=int, default=3, help="pairs of stock and initopt per case")
    parser.add_argument("--save", action="store_true", help=f"also write {RESULTS.name} into the results")
    chosen = parser.parse_args()
    unknown = set(chosen.cases) - set(CASES)
    if unknown:
        parser.error(f"no such case: {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    root = run_root()
    criteo.generate(65_536, 0)
    results: list[Result] = []
    uncompiled: list[Result] = []
    for ranks in chosen.ranks:
        uncompiled.append(measure("shared-restart", ranks, runs=chosen.runs, root=root, options=("--no-compile",)))
        for case in chosen.cases or CASES:
            results.append(measure(case, ranks, runs=chosen.runs, root=root))
            if chosen.save:
                RESULTS.write_text(table(results, uncompiled))
    print(table(results, uncompiled))


if __name__ == "__main__":
    main()
