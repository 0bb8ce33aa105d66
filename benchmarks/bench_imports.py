"""What recording imports costs, against nothing and against `-X importtime`, each in fresh processes in turn.

    python -m benchmarks.bench_imports --save          # about three minutes on two cores

CPU seconds of a process that imports torch and torchrec, from its start to the end of the imports. `used` watches whose
code runs, too, which no run that is measured should do.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from initopt.imports import SWITCH

RESULTS = Path(__file__).parent / "results" / "imports.md"

CHILD = """
import sys
if sys.argv[1] == "yes":
    import initopt
    initopt.record_imports()
import torch, torchrec
if sys.argv[1] == "yes":
    from initopt.imports import recording
    found = recording().end()
    print(sum(one.modules for one in found.packages), end=" ")
import time
print(time.process_time())
"""

WAYS = ("nothing", "record_imports", "-X importtime", "used")


def measure(way: str) -> tuple[float, int]:
    """CPU seconds of one fresh process, and how many modules it recorded."""
    options = ["-X", "importtime"] if way == "-X importtime" else []
    recording = "yes" if way in ("record_imports", "used") else "no"
    env = {**os.environ, SWITCH: "used" if way == "used" else "", "OMP_NUM_THREADS": "1"}
    child = [sys.executable, *options, "-c", CHILD, recording]
    # A file, as a job's log is one.
    with open(os.devnull, "w") as log:
        out = subprocess.run(child, check=True, text=True, stdout=subprocess.PIPE, stderr=log, env=env).stdout.split()
    return float(out[-1]), int(out[0]) if len(out) > 1 else 0


def table(seconds: dict[str, list[float]], modules: int) -> str:
    """The results as Markdown; each ratio is that of one round."""
    rounds = len(seconds["nothing"])
    lines = [
        "# What recording imports costs",
        "",
        "`python -m benchmarks.bench_imports --save`: CPU seconds to import torch and torchrec",
        f"({modules} modules), in fresh processes, {rounds} rounds of all ways in turn; median, and range in brackets.",
        "The ratio is to nothing, round by round.",
        "",
        "| way | CPU seconds | ratio |",
        "|---|---|---|",
    ]
    for way in WAYS:
        ratios = [one / other for one, other in zip(seconds[way], seconds["nothing"], strict=True)]
        lines.append(f"| {way} | {_spread(seconds[way], 2)} | {_spread(ratios, 3)} |")
    return "\n".join(lines) + "\n"


def _spread(values: Sequence[float], digits: int) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} ... {max(values):.{digits}f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--save", action="store_true", help=f"also write {RESULTS.name} into the results")
    chosen = parser.parse_args()
    for way in WAYS:
        measure(way)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    modules = 0
    for number in range(chosen.rounds):
        # Each goes first as often as the others.
        for way in WAYS[number % len(WAYS) :] + WAYS[: number % len(WAYS)]:
            took, found = measure(way)
            seconds[way].append(took)
            modules = found or modules
        print(f"round {number + 1} of {chosen.rounds}", file=sys.stderr, flush=True)
        if chosen.save:
            RESULTS.write_text(table(seconds, modules))
    print(table(seconds, modules))


if __name__ == "__main__":
    main()
