"""The main job on its embedded default: a DLRM trainer started on two gloo ranks, stock and with initopt, and compared.

    make demo            # or: python -m benchmarks.demo --runs 3

Both profiles are shown: `cluster`, whose waits are emulated and labelled so, and `local`, where nothing is.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.trainers import criteo
from initopt import Run, bench, chain, report
from initopt.record import run_root

TRAINERS = Path(__file__).parent / "trainers"


def command(trainer: str, profile: str, ranks: int, *options: str) -> list[str]:
    """The command that starts one of the two trainers under torchrun."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [*launch, str(TRAINERS / f"dlrm_{trainer}.py"), "--profile", profile, *options]


def compare(
    profile: str, *, ranks: int, runs: int, warmup: int, root: Path, options: Sequence[str] = ()
) -> bench.Bench:
    """Start both trainers in turn, `warmup` times to fill their caches and `runs` times measured."""
    return bench.run_bench(
        command("stock", profile, ranks, *options),
        command("initopt", profile, ranks, *options),
        runs=runs,
        warmup=warmup,
        root=root,
        progress=lambda line: print(f"{profile}: {line}", file=sys.stderr, flush=True),
    )


def changed(run: Run) -> list[str]:
    """What ran beside other steps in the last start-up with initopt, the longest first."""
    rank = chain.median_rank(run)
    on_chain = {link.step for link in chain.rank_chain(run.of_rank(rank), run.graph, zero=run.zero[rank])}
    beside = [span for span in chain.steps_of(run, rank) if span.name not in on_chain and span.end - span.start > 0.05]
    lines = [
        f"  {report.seconds(span.end - span.start):>8}  {span.name:<16} on lane {span.lane}"
        for span in sorted(beside, key=lambda span: span.start - span.end)
    ]
    return lines or ["  nothing that takes more than 50ms"]


def show(measured: bench.Bench, root: Path) -> None:
    """Print where the time went, what initopt changed, both initialization times and the gain in ETT%."""
    folder = root / "bench"
    stock = Run.load(folder / measured.stock.samples[-1].run)
    mine = Run.load(folder / measured.initopt.samples[-1].run)
    for title, view in (
        ("Where the time went, stock", report.blame(stock)),
        ("Where the time went, with initopt", report.blame(mine)),
    ):
        print(f"\n## {title}\n")
        print("\n".join(line.plain for line in view.lines[:-1]))
    print("\n## What initopt changed: these steps ran beside the longest chain\n")
    print("\n".join(changed(mine)))
    print("\n## Initialization time, and the trained state\n")
    print("\n".join(line.plain for line in report.bench_view(measured, bench.against_stock(measured)).lines[:-1]))
    print("\n## ETT%\n")
    print("\n".join(line.plain for line in report.ett_view(mine, stock).lines[:-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--runs", type=int, default=1, help="measured starts of each trainer and profile")
    chosen = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    root = run_root()
    criteo.generate(65_536, 0)
    last = None
    for profile, warmup in (("cluster", 1), ("local", 1)):
        measured = compare(profile, ranks=chosen.ranks, runs=chosen.runs, warmup=warmup, root=root)
        print(f"\n# Profile {profile}")
        show(measured, root)
        last = last or root / "bench" / measured.initopt.samples[-1].run
    print(f"\nnext: initopt critical-chain {last}, initopt plot {last} -o startup.svg")


if __name__ == "__main__":
    main()
