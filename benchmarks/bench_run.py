"""Real trainers, untouched: as they are, under `initopt.run`, and under `initopt.run --optimize`.

    python -m benchmarks.bench_run --save                    # all trainers; about twelve minutes on two cores
    python -m benchmarks.bench_run --trainers golden hstu --rounds 5

Every start is in fresh processes; in each round a trainer is started in all three ways, the first of them in turn.
First batch: wall time from the start of the command until the slowest rank has said that its first training step had
ended. CPU: of the command with all that it started, to its end. Trained: the losses and the digest of all that was
trained, printed by every rank; they must be the same in all starts. Meetings: collectives of rank 0 before its first
training step, without the making of groups; groups: those that rank 0 makes. Both are of the records, so those of the
trainer as it is are those of its recorded starts. What the trainers are like is said in `trainers/`.

For a script of your own there is `initopt bench`, with `-m initopt.run` on one side and `--optimize` on the other.
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

from benchmarks.results_page import made_on, ratio, table
from benchmarks.trainers import criteo
from initopt import Run, bench, contain
from initopt.record import FIRST_STEP, run_root

RESULTS = Path(__file__).parent / "results" / "run.md"
REPOSITORY = Path(__file__).resolve().parents[1]
TRAINERS = REPOSITORY / "benchmarks" / "trainers"
RANKS = 2
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS))
EASYREC = ("-m", "benchmarks.trainers.easyrec", "--model-dir")
LIMIT = 300.0

WAYS: dict[str, tuple[str, ...]] = {
    "stock": (),
    "recorded": ("-m", "initopt.run", "--root"),
    "optimized": ("-m", "initopt.run", "--optimize", "--root"),
}
MAKES_GROUPS = ("init_process_group", "new_group", "split_group")
COLUMNS = ("trainer", "rounds", "meetings", "groups", "first batch s", "recorded", "optimized")
COLUMNS += ("CPU s", "recorded", "optimized", "trained")


@dataclass(frozen=True)
class Start:
    """One start. Times are seconds; `said` is what the ranks printed of their training. The rest is of its record."""

    first_batch: float
    cpu: float
    said: tuple[str, ...]
    meetings: int = 0
    groups: int = 0
    run: Run | None = None


def trainers(folder: Path) -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
    """Each trainer: what launches it, and its own words. Their files are below `folder`."""
    itself: tuple[str, ...] = ()
    golden, main, hstu = (str(TRAINERS / name) for name in ("golden.py", "dlrm_main.py", "hstu.py"))
    return {
        "golden": (TORCHRUN, (golden,)),
        # As large as a machine of 16 GB bears, in place of TorchRec's 13.9 GB of tables.
        "golden, 3.6 GB of tables": (TORCHRUN, (golden, "--rows", "1000000", "--dim", "128")),
        "golden, own plan": (TORCHRUN, (golden, "--own-plan")),
        "dlrm_main": (TORCHRUN, (main,)),
        "dlrm_main, three pipelines": (TORCHRUN, (main, "--three-pipelines")),
        "easyrec (imports emulated)": (TORCHRUN, (*EASYREC, str(folder / "model"))),
        "easyrec, continued (imports emulated)": (TORCHRUN, (*EASYREC, str(folder / "continued"), "--continue")),
        "hstu, spawned": (itself, (hstu, "--ranks", str(RANKS))),
        "hstu, elastic, validated first": (
            itself,
            (hstu, "--ranks", str(RANKS), "--launch", "elastic", "--validate-first"),
        ),
    }


def measure(launcher: Sequence[str], words: Sequence[str], way: str, folder: Path) -> Start:
    """One start. Raises RuntimeError where it ended otherwise than well, or left processes."""
    root = folder / "runs"
    prefix = (*WAYS[way], str(root)) if WAYS[way] else ()
    command = [sys.executable, *launcher, *prefix, *words]
    log = folder / f"{way}.log"
    environment = {**os.environ, "INITOPT_DATA": str(criteo.data_folder()), "PYTHONPATH": _paths()}
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.time()
    outcome = contain.run(command, env=environment, log=log, timeout=LIMIT)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    text = log.read_text(errors="replace")
    ends = [float(at) for at in re.findall(r"^first step at ([\d.]+)$", text, re.MULTILINE)]
    said = tuple(sorted(line for line in text.splitlines() if line.startswith("{") and "trained_state" in line))
    if outcome.code != 0 or outcome.left or len(ends) != RANKS or len(said) != RANKS:
        raise RuntimeError(f"{' '.join(command)} ended with {outcome.code}, left {outcome.left}:\n{text}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    start = Start(max(ends) - began, cpu, said)
    if not prefix:
        return start
    run = Run.latest(root)
    spans = run.of_rank(0)
    begun = next(span.start for span in spans if span.name == FIRST_STEP)
    calls = [span for span in spans if span.kind == "collective" and span.start < begun]
    groups = sum(call.op in MAKES_GROUPS for call in calls)
    return Start(start.first_batch, cpu, said, len(calls) - groups, groups, run)


def _paths() -> str:
    return os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))


def row(name: str, rounds: Sequence[dict[str, Start]]) -> str:
    """The line of a trainer."""
    cells = [name, str(len(rounds))]
    for count in ("meetings", "groups"):
        sides = [sorted({getattr(one[way], count) for one in rounds}) for way in ("recorded", "optimized")]
        cells.append(" -> ".join(" ... ".join(map(str, counts)) for counts in sides))
    for time_ in ("first_batch", "cpu"):
        stock = [getattr(one["stock"], time_) for one in rounds]
        cells.append(f"{bench.Spread.of(stock).median:.2f}")
        for way in ("recorded", "optimized"):
            ours = [getattr(one[way], time_) for one in rounds]
            cells.append(ratio(theirs / mine for theirs, mine in zip(stock, ours, strict=True)))
    said = {start.said for one in rounds for start in one.values()}
    cells.append("identical" if len(said) == 1 else "DIFFERENT")
    return f"| {' | '.join(cells)} |"


def became(name: str, rounds: Sequence[dict[str, Start]]) -> str:
    """What the last optimized start says of each optimization, on rank 0, as a line of a table."""
    run = rounds[-1]["optimized"].run
    assert run is not None
    said = [
        list(
            dict.fromkeys(
                f"{one.name}: {one.text}" for one in run.optimized if one.rank == 0 and one.applied == applied
            )
        )
        for applied in (True, False)
    ]
    return f"| {name} | {' | '.join('; '.join(texts) for texts in said)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainers", nargs="+", default=[""], help="only those whose name begins so")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", action="store_true", help=f"also put the rows into results/{RESULTS.name}")
    chosen = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    folder = run_root().resolve() / "run"
    folder.mkdir(parents=True, exist_ok=True)
    cases = trainers(folder)
    names = [name for name in cases if name.startswith(tuple(chosen.trainers))]
    if not names:
        parser.error(f"no trainer's name begins with {' or '.join(chosen.trainers)}: {', '.join(cases)}")
    if not (folder / "continued" / "checkpoint" / ".metadata").exists():  # its last file
        measure(TORCHRUN, (*EASYREC, str(folder / "continued")), "stock", folder)
    saved = RESULTS.read_text() if chosen.save and RESULTS.exists() else ""
    lines = {name: re.findall(rf"^\| {re.escape(name)} \|.*$", saved, re.MULTILINE) for name in cases}
    rounds: dict[str, list[dict[str, Start]]] = {name: [] for name in names}
    for turn in range(chosen.rounds):
        for name in names:
            order = [list(WAYS)[(turn + place) % len(WAYS)] for place in range(len(WAYS))]
            rounds[name].append({way: measure(*cases[name], way, folder) for way in order})
            lines[name] = [row(name, rounds[name]), became(name, rounds[name])]
            print(lines[name][0], file=sys.stderr, flush=True)
            page = _page([line for line in lines.values() if line], Run.latest(folder / "runs"))
            if chosen.save:
                RESULTS.write_text(page)
    print(page)
    if any("DIFFERENT" in lines[name][0] for name in names):
        sys.exit("a trainer did not train the same in all starts")


def _page(rows: Sequence[Sequence[str]], last: Run) -> str:
    machine, versions = made_on(last)
    lines = (
        "# Real trainers, untouched, with `initopt.run`",
        "",
        f"`python -m benchmarks.bench_run --save`, {RANKS} ranks on {machine}",
        versions,
        "Medians of the trainer as it is, then stock / recorded and stock / optimized: medians of rounds with their",
        "range. No delay is emulated; the large packages that `easyrec` imports and does not use stand for others.",
        "What each column is says [bench_run.py](../bench_run.py).",
        "",
        *table(COLUMNS, (measured for measured, _ in rows)),
        "",
        "What became of each optimization, on rank 0 of the last start:",
        "",
        *table(("trainer", "applied", "left as it is"), (said for _, said in rows)),
    )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
