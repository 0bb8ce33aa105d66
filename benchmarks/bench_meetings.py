"""What watching costs a meeting of ranks: an all-reduce of one number, over and over, in fresh processes.

    python -m benchmarks.bench_meetings --save       # about three minutes on two cores

*As it is*: under torchrun. *Compared*: in `initopt.one_order`. *Recorded*: under `initopt.run`. *Counted*: under
`initopt.run --optimize`, where ranks count themselves in the job's store before each call, and which records too. In
each round all of them are started, the first of them in turn. Figures are microseconds a call on rank 0, medians of
rounds with their range; *for counting* is what a call of the same round took more counted than recorded. Ranks that
share busy cores wait for each other in all of them. All of it ends with the first training step.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path

from benchmarks.results_page import made_on, spread, table
from initopt import Run, contain, one_order
from initopt.record import run_root

RESULTS = Path(__file__).parent / "results" / "meetings.md"
REPOSITORY = Path(__file__).resolve().parents[1]
ME = "benchmarks.bench_meetings"
CALLS = 300
RANKS = (2, 4)
LIMIT = 120.0
WAYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "as it is": ((), ()),
    "compared": ((), ("--compared",)),
    "recorded": (("-m", "initopt.run"), ()),
    "counted": (("-m", "initopt.run", "--optimize"), ()),
}
"""What stands before the module, and what after it."""


def calls(compared: bool) -> None:
    """One rank: print the seconds of its calls."""
    import torch
    from torch import distributed

    distributed.init_process_group("gloo")
    value = torch.zeros(1)
    with one_order() if compared else nullcontext():
        for turn in range(2):
            distributed.barrier()
            began = time.perf_counter()
            for _ in range(CALLS if turn else CALLS // 10):
                distributed.all_reduce(value)
            seconds = time.perf_counter() - began
        distributed.barrier()
    if distributed.get_rank() == 0:
        sys.stdout.write(json.dumps({"seconds": seconds}) + "\n")
    distributed.destroy_process_group()


def measure(way: str, ranks: int, folder: Path) -> float:
    """Microseconds a call, in one start. Raises RuntimeError where it ended otherwise than well."""
    before, after = WAYS[way]
    root = ("--root", str(folder)) if before else ()
    start = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    command = [sys.executable, *start, *before, *root, "-m", ME, "--rank", *after]
    log = folder / "log"
    paths = filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    outcome = contain.run(command, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, log=log, timeout=LIMIT)
    text = log.read_text(errors="replace")
    said = [json.loads(line) for line in text.splitlines() if line.startswith('{"seconds"')]
    if outcome.code != 0 or outcome.left or len(said) != 1:
        raise RuntimeError(f"{' '.join(command)} ended with {outcome.code}, left {outcome.left}:\n{text}")
    return float(said[0]["seconds"]) / CALLS * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", action="store_true", help=f"also write results/{RESULTS.name}")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--compared", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.rank:
        calls(chosen.compared)
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    folder = run_root().resolve() / "meetings"
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for ranks in RANKS:
        rounds = []
        for turn in range(chosen.rounds):
            order = [list(WAYS)[(turn + place) % len(WAYS)] for place in range(len(WAYS))]
            rounds.append({way: measure(way, ranks, folder) for way in order})
            print(ranks, {way: round(us) for way, us in rounds[-1].items()}, file=sys.stderr, flush=True)
        cells = [spread((one[way] for one in rounds), "{:.0f}") for way in WAYS]
        more = spread((one["counted"] - one["recorded"] for one in rounds), "{:.0f}")
        lines.append(f"| {ranks} | {chosen.rounds} | {' | '.join([*cells, more])} |")
    machine, versions = made_on(Run.latest(folder))
    page = (
        "# What watching costs a meeting",
        "",
        f"`python -m benchmarks.bench_meetings --save`, on {machine}",
        versions,
        "Microseconds of an all-reduce of one number on rank 0, medians of rounds with their range. What the columns",
        "are says [bench_meetings.py](../bench_meetings.py).",
        "",
        *table(("ranks", "rounds", *WAYS, "for counting"), lines),
    )
    text = "\n".join(page) + "\n"
    print(text)
    if chosen.save:
        RESULTS.write_text(text)


if __name__ == "__main__":
    main()
