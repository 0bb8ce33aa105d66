"""Any trainer, untouched: recorded as it is, against `initopt.run --optimize`, in turn and in fresh processes.

    python -m benchmarks.bench_run                                   # the plain DLRM trainer of this repository
    python -m benchmarks.bench_run --ranks 2 --runs 5 -- train.py ARGS   # any script, or -m MODULE ARGS

Both sides are recorded, so the recorder's own cost is in both. Besides the table of `initopt bench` it says how many
meetings of ranks there were before the first batch, and whether what the script printed was the same (objects of JSON
only, such as a trainer's losses). Without them, and without digests in the record, nothing shows that the training was.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from initopt import Run, bench
from initopt.record import run_root
from initopt.report import bench_view

PLAIN = (str(Path(__file__).parent / "trainers" / "dlrm_plain.py"), "--no-compile", "--steps", "3")


def command(script: Sequence[str], ranks: int, *options: str) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*launcher, "-m", "initopt.run", *options, *script]


def measure(script: Sequence[str], *, ranks: int, runs: int, warmup: int, root: Path) -> bench.Bench:
    return bench.run_bench(
        command(script, ranks),
        command(script, ranks, "--optimize"),
        runs=runs,
        warmup=warmup,
        root=root,
        progress=lambda line: print(line, file=sys.stderr, flush=True),
    )


def printed(side: bench.Side, folder: Path) -> set[tuple[str, ...]]:
    """The JSON objects that each run printed, in no order: ranks print as they come, some into the same line."""
    return {tuple(sorted(_objects((folder / sample.log).read_text(errors="replace")))) for sample in side.samples}


def _objects(text: str) -> Iterator[str]:
    decoder, at = json.JSONDecoder(), text.find("{")
    while at >= 0:
        end = at + 1
        with suppress(ValueError):
            _, end = decoder.raw_decode(text, at)
            yield text[at:end]
        at = text.find("{", end)


def meetings(side: bench.Side, folder: Path) -> list[int]:
    """Meetings of rank 0 before its first training step, beyond the rendezvous, in each run."""
    counts = []
    for sample in side.samples:
        run = Run.load(folder / sample.run)
        calls = [span for span in run.of_rank(0) if span.kind == "collective" and span.step != "first_step"]
        counts.append(sum(call.op != "init_process_group" for call in calls))
    return counts


def lines(measured: bench.Bench, root: Path) -> list[str]:
    folder = root / "bench"
    before, after = meetings(measured.stock, folder), meetings(measured.initopt, folder)
    said = printed(measured.stock, folder), printed(measured.initopt, folder)
    told = [f"Meetings of ranks before the first training step: {_range(before)} -> {_range(after)} (rank 0)."]
    if said[0] == {()}:
        told.append("The script printed no JSON, so nothing printed can be compared.")
    elif len(said[0]) > 1:
        told.append("The script itself does not print the same twice, so nothing printed can be compared.")
    else:
        told.append("What it printed is the same." if said[0] == said[1] else "! What it printed DIFFERS.")
    last = Run.load(folder / measured.initopt.samples[-1].run)
    told += dict.fromkeys(
        f"{'applied' if one.applied else 'left'}  {one.name}: {one.text}" for one in last.optimized if one.rank == 0
    )
    return told


def _range(counts: Sequence[int]) -> str:
    return str(counts[0]) if len(set(counts)) == 1 else f"{min(counts)} ... {max(counts)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--runs", type=int, default=5, help="measured pairs")
    parser.add_argument("--warmup", type=int, default=1, help="pairs before, not measured")
    parser.add_argument("--root", type=Path, default=None, help="where runs are kept; default: as for any run")
    parser.add_argument(
        "script", nargs="*", default=[], help="after --: the script and its arguments, or -m MODULE ..."
    )
    arguments = parser.parse_args()
    root = run_root(arguments.root).resolve()
    script = arguments.script or list(PLAIN)
    measured = measure(script, ranks=arguments.ranks, runs=arguments.runs, warmup=arguments.warmup, root=root)
    print(bench_view(measured).plain)
    print("\n".join(lines(measured, root)))


if __name__ == "__main__":
    main()
