"""Start-up of the DLRM trainer: stock against initopt in both profiles, compile cache cold and warm.

    python -m benchmarks.startup --save          # all cases, about three quarters of an hour on two cores
    python -m benchmarks.startup cluster-warm    # one of them

Each case is two measurements. *stock / initopt* are pairs of starts in turn. *serial / overlapped* is initopt with the
same steps one after the other, against overlapped: what overlap alone brings. The bound is that of the overlapped
graph, max(longest chain, CPU work / cores), with the least that each step took in the two runs of a pair, and without
waits for other ranks. The CPU work is that of the ranks and of all their child processes (compilers, loader workers)
until the first batch was done.
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
    """One case: its two measurements, and the bound of its graph (seconds) in each pair of the second."""

    case: str
    stock: bench.Bench
    serial: bench.Bench
    bounds: tuple[float, ...]

    @property
    def above(self) -> bench.Spread:
        """How far the overlapped start-ups were above their bounds, as a fraction."""
        pairs = zip(self.serial.initopt.samples, self.bounds, strict=True)
        return bench.Spread.of(sample.first_batch / bound - 1 for sample, bound in pairs)


def measure(case: str, *, ranks: int, runs: int, root: Path) -> Result:
    profile, cache = case.split("-")
    folder = root.resolve() / "inductor" / case
    # Inductor keeps its precompiled headers under the folder for temporary files, whatever its own folder is.
    os.environ |= {"TORCHINDUCTOR_CACHE_DIR": str(folder), "TMPDIR": str(folder)}
    folder.mkdir(parents=True, exist_ok=True)
    # Cold is the first start ever: nothing compiled, and no ledger.
    cold = cache == "cold"
    named = shlex.quote(str(folder))
    prepare = f'rm -rf {named} "$INITOPT_ROOT/ledger" "$INITOPT_ROOT/compile_cache"; mkdir {named}' if cold else None
    mine = command("initopt", profile, ranks)

    def pairs(other: Sequence[str], what: str, runs: int) -> bench.Bench:
        return bench.run_bench(
            other,
            mine,
            runs=runs,
            warmup=0 if cold else 1,
            root=root,
            prepare=prepare,
            progress=lambda line: print(f"{case}, {what}: {line}", file=sys.stderr, flush=True),
        )

    against_stock = pairs(command("stock", profile, ranks), "stock / initopt", runs)
    against_serial = pairs(command("initopt", profile, ranks, "--no-overlap"), "serial / overlapped", max(2, runs // 2))
    return Result(case, against_stock, against_serial, bounds(root, against_serial))


def bounds(root: Path, measured: bench.Bench) -> tuple[float, ...]:
    """The bound of the overlapped graph in each pair of a serial and an overlapped run, in seconds."""
    folder = root / "bench"
    pairs = zip(measured.stock.samples, measured.initopt.samples, strict=True)
    return tuple(_bound(Run.load(folder / mine.run), Run.load(folder / serial.run)) for serial, mine in pairs)


def _bound(run: Run, serial: Run) -> float:
    graph = run.graph
    assert graph is not None, f"{run.path} has no graph"
    rank = chain.median_rank(run)
    known = [_work(run, rank), _work(serial, chain.median_rank(serial))]
    least = {name: min(times[name] for times in known if name in times) for name in graph}
    imports = min(times["imports"] for times in known)
    return max(imports + graph.lower_bound(least), min(run.core_bound, serial.core_bound))


def _work(run: Run, rank: int) -> Mapping[str, float]:
    return {span.name: span.end - span.start - span.wait - span.paused for span in chain.steps_of(run, rank)}


def table(results: Sequence[Result]) -> str:
    """The results as Markdown. Every row names its profile; `cluster` is emulated."""
    first = results[0].stock
    versions = ", ".join(f"{name} {version}" for name, version in first.versions.items())
    columns = (
        "case",
        "pairs",
        "stock",
        "initopt",
        "stock / initopt",
        "serial / overlapped",
        "bound",
        "above it",
        "state",
    )
    lines = [
        "# Start-up of the DLRM trainer, stock against initopt",
        "",
        f"`python -m benchmarks.startup --save`, {first.ranks} ranks on one host of {first.cores} cores, commit",
        f"{first.commit[:7]}; {versions}.",
        "Seconds to the first batch on the median rank: median, and range in brackets. Ratios are pair by pair.",
        "",
        f"| {' | '.join(columns)} |",
        "|---" * len(columns) + "|",
    ]
    for result in results:
        stock, mine = result.stock.stock.first_batch, result.stock.initopt.first_batch
        above = bench.Spread(*(100 * value for value in (result.above.median, result.above.min, result.above.max)))
        cells = (
            result.case,
            str(len(result.stock.stock.samples)),
            _spread(stock),
            _spread(mine),
            _spread(result.stock.ratio, 2),
            _spread(result.serial.ratio, 2),
            f"{statistics.median(result.bounds):.1f}",
            f"{_spread(above, 0)} %",
            result.stock.state.verdict,
        )
        lines.append(f"| {' | '.join(cells)} |")
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
    results = []
    for case in chosen.cases or CASES:
        results.append(measure(case, ranks=chosen.ranks, runs=chosen.runs, root=root))
        if chosen.save:
            RESULTS.write_text(table(results))
    print(table(results))


if __name__ == "__main__":
    main()
