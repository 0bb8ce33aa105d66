"""What imports cost a start-up and a restart, torchrun against `initopt launch`, with the stock trainer.

    python -m benchmarks.bench_launch --save                 # 2, 4 and 8 ranks; under twelve minutes on two cores
    python -m benchmarks.bench_launch --ranks 4 --rounds 5   # one of them

--save writes the whole page, of this call's rounds only (--save FILE: elsewhere).

Starts are in pairs, torchrun and `initopt launch` in turn, in fresh processes. Import CPU: the CPU seconds of all ranks
from the start of their process until their imports are done, and of the process that imports for them. Whole CPU: of
the command with all that it started, to its end, which is after five steps. First batch: wall time from the start of
the command until the slowest rank has done its first step. Restart: from the moment that a rank was killed, after its
last step, until the slowest rank of the next attempt has done its first step.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.demo import TRAINERS
from benchmarks.results_page import made_on, spread, table
from benchmarks.trainers import criteo
from initopt import Run, bench, contain
from initopt.record import run_root

RESULTS = Path(__file__).parent / "results" / "launch.md"
OPTIONS = ("--no-compile",)
LAUNCHERS = {
    "torchrun": (sys.executable, "-m", "torch.distributed.run"),
    "launch": (sys.executable, "-c", "from initopt.cli import main; main()", "launch"),
}
COLUMNS = ("ranks", "rounds", "import CPU s", "ratio", "whole CPU s", "ratio", "first batch s", "ratio")
COLUMNS += ("restart s", "ratio", "state")


@dataclass(frozen=True)
class Start:
    """One start. Times are seconds; `restart` is of another start, in which a rank was killed."""

    imports: float
    cpu: float
    first_batch: float
    restart: float
    digests: tuple[tuple[str, str], ...]


def measure(launcher: str, ranks: int, root: Path) -> Start:
    began = time.time()
    run, cpu, log = _run(launcher, ranks, root, "dlrm_stock.py")
    imports = sum(span.cpu for span in run.spans if span.kind == "import")
    imports += sum(float(text) for text in re.findall(r"([\d.]+) CPU seconds, process", log))
    again, _, killed = _run(launcher, ranks, root, "killed_once.py", "--max-restarts=1")
    at = re.search(r"killed at ([\d.]+)", killed)
    assert at is not None, killed
    digests = {(f"{digest.name} {digest.rank}", digest.sha256) for digest in (*run.digests, *again.digests)}
    return Start(imports, cpu, _end(run) - began, _end(again) - float(at[1]), tuple(sorted(digests)))


def _run(launcher: str, ranks: int, root: Path, script: str, *options: str) -> tuple[Run, float, str]:
    """The record of one job, the CPU seconds that it took, and what it wrote."""
    words = [*LAUNCHERS[launcher], "--standalone", f"--nproc-per-node={ranks}", *options]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    log = root / f"{launcher}.log"
    # torchelastic's store outlives an attempt, and restarted gloo ranks may find the last one's addresses in it.
    variables = {**os.environ, "INITOPT_ROOT": str(root), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    outcome = contain.run([*words, str(TRAINERS / script), *OPTIONS], env=variables, log=log, timeout=300.0)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    text = log.read_text(errors="replace")
    if outcome.code != 0 or outcome.left:
        raise RuntimeError(f"{launcher} with {ranks} ranks ended with {outcome.code}, left {outcome.left}:\n{text}")
    return Run.latest(root), after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, text


def _end(run: Run) -> float:
    """When the slowest rank had done its first step, in unix time."""
    return min(header.process_start for header in run.headers.values()) + max(map(run.first_batch, run.headers))


def row(ranks: int, pairs: Sequence[tuple[Start, Start]]) -> str:
    cells = [str(ranks), str(len(pairs))]
    for name in ("imports", "cpu", "first_batch", "restart"):
        values = [(getattr(stock, name), getattr(mine, name)) for stock, mine in pairs]
        medians = [bench.Spread.of(side).median for side in zip(*values, strict=True)]
        cells += [f"{medians[0]:.1f} -> {medians[1]:.1f}", spread(stock / mine for stock, mine in values)]
    states = {start.digests for pair in pairs for start in pair}
    cells.append("identical" if len(states) == 1 and len(states.pop()) == ranks else "DIFFERENT")
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--save",
        metavar="FILE",
        type=Path,
        nargs="?",
        const=RESULTS,
        help=f"also write the page, to results/{RESULTS.name}",
    )
    chosen = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    root = run_root().resolve() / "launch"
    root.mkdir(parents=True, exist_ok=True)
    criteo.generate(65_536, 0)
    began = time.monotonic()
    pairs: dict[int, list[tuple[Start, Start]]] = {ranks: [] for ranks in chosen.ranks}
    # Rounds outside: what else the machine does in these minutes meets all numbers of ranks alike.
    for turn in range(chosen.rounds):
        for ranks, done in pairs.items():
            print(f"round {turn + 1} of {chosen.rounds}, {ranks} ranks", file=sys.stderr, flush=True)
            done.append((measure("torchrun", ranks, root), measure("launch", ranks, root)))
            print(*done[-1], sep="\n", file=sys.stderr, flush=True)
    rows = [row(ranks, done) for ranks, done in pairs.items()]
    if chosen.save is not None:
        chosen.save.write_text(_page(rows, Run.latest(root), time.monotonic() - began, chosen.ranks, chosen.rounds))
    print("\n".join(table(COLUMNS, rows)))


def _page(rows: Sequence[str], last: Run, seconds: float, ranks: Sequence[int], rounds: int) -> str:
    machine, versions = made_on(last)
    lines = (
        "# What imports cost, torchrun against `initopt launch`",
        "",
        f"`python -m benchmarks.bench_launch --save --ranks {' '.join(map(str, ranks))} --rounds {rounds}`,",
        f"one call of {seconds / 60:.1f} minutes on {machine}",
        versions,
        "Medians torchrun -> launch, ratios of pairs with their range. Nothing is emulated. What each column is says",
        "[bench_launch.py](../bench_launch.py). State: the digests of all trained state, of all starts and restarts.",
        "",
        *table(COLUMNS, rows),
        "",
        "`TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1` is set on both sides: with torch's default, restarted ranks may find",
        "addresses of the last attempt in the agent's store, and gloo then ends in `connectFullMesh failed`, under",
        "torchrun, too.",
    )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
