"""Start-up of the DLRM trainer: stock against initopt in both profiles, compile cache cold and warm; saved as a table.

    python -m benchmarks.startup                 # all cases, about half an hour on two cores
    python -m benchmarks.startup cluster-warm    # one of them

Each case is two measurements. *stock / initopt* are pairs of starts in turn. *serial / overlapped* is initopt with the
same steps one after the other against overlapped: what overlap alone brings. The bound is that of the overlapped graph,
max(longest chain, CPU work / cores), with the least that each step took in either mode and without waits for other ranks.
"""

from __future__ import annotations

import argparse
import os
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.demo import command
from benchmarks.trainers import criteo
from initopt import Run, bench, chain
from initopt.record import run_root

RESULTS = Path(__file__).parent / "results" / "startup.md"
CASES = ("cluster-warm", "cluster-cold", "local-warm", "local-cold")


@dataclass(frozen=True)
class Result:
    """One case: its two measurements and the bound of its own graph (seconds)."""

    case: str
    stock: bench.Bench
    serial: bench.Bench
    bound: float


def measure(case: str, *, ranks: int, runs: int, root: Path) -> Result:
    profile, cache = case.split("-")
    folder = root / "inductor" / case
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder.resolve())
    prepare = f"rm -rf {shlex.quote(str(folder))}" if cache == "cold" else None
    mine = command("initopt", profile, ranks)

    def pairs(other: Sequence[str], what: str, runs: int) -> bench.Bench:
        return bench.run_bench(
            other,
            mine,
            runs=runs,
            warmup=1,
            root=root,
            prepare=prepare,
            progress=lambda line: print(f"{case}, {what}: {line}", file=sys.stderr, flush=True),
        )

    against_stock = pairs(command("stock", profile, ranks), "stock / initopt", runs)
    against_serial = pairs(command("initopt", profile, ranks, "--no-overlap"), "serial / overlapped", max(2, runs // 2))
    return Result(case, against_stock, against_serial, bound(root, against_serial))


def bound(root: Path, measured: bench.Bench) -> float:
    """The bound of the overlapped graph: the median over the overlapped runs."""
    folder = root / "bench"
    serial = [Run.load(folder / sample.run) for sample in measured.stock.samples]
    return statistics.median(_bound(Run.load(folder / sample.run), serial) for sample in measured.initopt.samples)


def _bound(run: Run, serial: Sequence[Run]) -> float:
    graph = run.graph
    assert graph is not None, f"{run.path} has no graph"
    rank = chain.median_rank(run)
    known = [_work(run, rank), *(_work(other, chain.median_rank(other)) for other in serial)]
    least = {name: min(times[name] for times in known if name in times) for name in graph}
    imports = min(times["imports"] for times in known)
    # The ranks of this host share its cores; what child processes burn is not in the threads' time, so this is a floor.
    cpu = {name: sum(span.cpu for span in run.spans if span.name == name and span.kind == "step") for name in graph}
    first_cpu = sum(span.cpu for span in run.spans if span.kind == "import")
    cores = run.headers[rank].cores
    return max(imports + graph.lower_bound(least), (first_cpu + sum(cpu.values())) / cores)


def _work(run: Run, rank: int) -> Mapping[str, float]:
    return {span.name: span.end - span.start - span.wait for span in chain.steps_of(run, rank)}


def table(results: Sequence[Result]) -> str:
    """The results as Markdown. Every row names its profile; `cluster` is emulated."""
    first = results[0].stock
    lines = [
        "# Start-up of the DLRM trainer, stock against initopt",
        "",
        f"`python -m benchmarks.startup`, {first.ranks} ranks on one host of {first.cores} cores, commit "
        f"{first.commit[:7]}; " + ", ".join(f"{name} {version}" for name, version in first.versions.items()) + ".",
        "Seconds to the first batch (median rank): median, and range in brackets. Ratios are pair by pair: median, range.",
        "",
        "| case | stock | initopt | stock / initopt | serial / overlapped | bound of its graph | above the bound | state |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for result in results:
        stock, mine = result.stock.stock.first_batch, result.stock.initopt.first_batch
        overlapped = result.serial.initopt.first_batch.median
        lines.append(
            f"| {result.case} | {_spread(stock)} | {_spread(mine)} | {_spread(result.stock.ratio, 2)} "
            f"| {_spread(result.serial.ratio, 2)} | {result.bound:.1f} | {100 * (overlapped / result.bound - 1):+.0f} % "
            f"| {result.stock.state.verdict}, {len(result.stock.stock.samples)} pairs |"
        )
    lines.append("")
    for result in results:
        emulated = [label for label in result.stock.labels if label.startswith("emulated")]
        lines.append(f"- {result.case}: {'; '.join(emulated) or 'nothing emulated'}.")
    return "\n".join(lines) + "\n"


def _spread(spread: bench.Spread, digits: int = 1) -> str:
    return f"{spread.median:.{digits}f} ({spread.min:.{digits}f} ... {spread.max:.{digits}f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; default: all")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--runs", type=int, default=5, help="pairs of stock and initopt per case")
    parser.add_argument("--save", action="store_true", help=f"also write {RESULTS.name} into the results")
    chosen = parser.parse_args()
    unknown = set(chosen.cases) - set(CASES)
    if unknown:
        parser.error(f"no such case: {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    root = run_root()
    criteo.generate(65_536, 0)
    results = [measure(case, ranks=chosen.ranks, runs=chosen.runs, root=root) for case in chosen.cases or CASES]
    text = table(results)
    print(text)
    if chosen.save:
        RESULTS.write_text(text)


if __name__ == "__main__":
    main()
