"""Real trainers, untouched: as they are, under `initopt.run`, and under `initopt.run --optimize`.

    python -m benchmarks.bench_run --save                    # all rows; about forty minutes on two cores
    python -m benchmarks.bench_run --trainers golden hstu --rounds 5

Every start is in fresh processes; in each round a trainer is started in all three ways, the first of them in turn.
First batch: wall time from the start of the command until the slowest rank has said that its first training step had
ended. CPU: of the command with all that it started, to its end. Trained: the losses and the digest of all that was
trained, printed by every rank; they must be the same in all starts. Meetings: collectives of rank 0 before its first
training step, without the making of groups; groups: those that rank 0 makes. Both are of the records, so those of the
trainer as it is are those of its recorded starts. What the trainers are like is said in `trainers/`.

A row is a trainer and what is special about its starts:

- *emulated*: in every process, of all three ways alike, each collective starts so much later, and 0.8 ns a byte, and
  where it says so each process group is made so much later (`emulated_cluster/`, `trainers/emulation.py`). Reads and
  writes of the job's key-value store are not delayed; `--optimize` has a handful more of those than the trainer.
- *compiled*: the trainer compiles its dense arch. `first start ever`: nothing compiled is anywhere. `empty disk`: nor
  is it on the disk, as on a second host or in a container that was started anew, but initopt's store (which the three
  ways see, and one uses) has what an earlier start has left. `second start`: torch's own caches are warm for all three.
- *launched*: recorded and optimized are started by `initopt launch`, and the trainer as it is by torchrun.

For a script of your own there is `initopt bench`, with `-m initopt.run` on one side and `--optimize` on the other. It
measures from the start of a rank's process, so it does not see what `initopt launch` imports before that.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from benchmarks.results_page import made_on, spread, table
from benchmarks.trainers import criteo, emulation_values
from initopt import Run, bench, contain
from initopt.record import FIRST_STEP, run_root

RESULTS = Path(__file__).parent / "results" / "run.md"
REPOSITORY = Path(__file__).resolve().parents[1]
TRAINERS = REPOSITORY / "benchmarks" / "trainers"
EMULATED = REPOSITORY / "benchmarks" / "emulated_cluster"
TORCHRUN = ("-m", "torch.distributed.run")
LAUNCH = ("-c", "from initopt.cli import main; main()", "launch")
EASYREC = ("-m", "benchmarks.trainers.easyrec", "--model-dir")
LATENCIES = (0.1, 0.5, 2.0)
"""Milliseconds."""
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


@dataclass(frozen=True)
class Case:
    """A trainer and how it is started. `words` are its own, `ranks` those of the launcher, 0 where it starts its own.

    With `launched` those that are recorded are started by `initopt launch`. `emulated` are variables of
    `emulated_cluster`, `disk` says what there is of compiled code, empty: what this machine has.
    """

    words: tuple[str, ...]
    ranks: int = 2
    launched: bool = False
    emulated: Mapping[str, str] = field(default_factory=dict)
    disk: Literal["", "first", "empty", "second"] = ""

    @property
    def world(self) -> int:
        """How many ranks there are."""
        return self.ranks or 2

    def launcher(self, way: str) -> tuple[str, ...]:
        """What starts its ranks."""
        if not self.ranks:
            return ()
        launcher = LAUNCH if self.launched and way != "stock" else TORCHRUN
        return (*launcher, "--standalone", "--nproc-per-node", str(self.ranks))


def rows(folder: Path) -> dict[str, Case]:
    """What is measured, by the name of its row. The trainers' files are below `folder`."""
    golden, main, hstu = (str(TRAINERS / name) for name in ("golden.py", "dlrm_main.py", "hstu.py"))
    easyrec = (*EASYREC, str(folder / "model"))
    spawned = (hstu, "--ranks", "2")
    cases = {
        "golden": Case((golden,)),
        # As large as a machine of 16 GB bears, in place of TorchRec's 13.9 GB of tables.
        "golden, 3.6 GB of tables": Case((golden, "--rows", "1000000", "--dim", "128")),
        "golden, own plan": Case((golden, "--own-plan")),
        "dlrm_main": Case((main,)),
        "dlrm_main, three pipelines": Case((main, "--three-pipelines")),
        "easyrec (imports emulated)": Case(easyrec),
        "easyrec, continued (imports emulated)": Case((*EASYREC, str(folder / "continued"), "--continue")),
        "hstu, spawned": Case(spawned, 0),
        "hstu, elastic, validated first": Case((*spawned, "--launch", "elastic", "--validate-first"), 0),
    }
    for ms in LATENCIES:
        later = f"**emulated**: each collective {ms:g} ms later"
        emulated = {"EMULATED_COLLECTIVE": str(ms / 1e3), "EMULATED_RENDEZVOUS": "0"}
        cases[f"golden, {later}"] = Case((golden,), emulated=emulated)
        cases[f"easyrec, {later} (imports emulated)"] = Case(easyrec, emulated=emulated)
        cases[f"hstu, spawned, {later}"] = Case(spawned, 0, emulated=emulated)
    seconds, alpha = emulation_values.RENDEZVOUS_SECONDS, emulation_values.COLLECTIVE_ALPHA_SECONDS
    emulated = {"EMULATED_COLLECTIVE": str(alpha), "EMULATED_RENDEZVOUS": str(seconds)}
    later = f"**emulated**: each process group {seconds:g} s later, each collective {alpha * 1e3:g} ms"
    compiled = (golden, "--compile-dense")
    return {
        **cases,
        f"golden, {later}": Case((golden,), emulated=emulated),
        f"hstu, spawned, {later}": Case(spawned, 0, emulated=emulated),
        "golden, compiled: first start ever": Case(compiled, disk="first"),
        "golden, compiled: empty disk, initopt's store has an earlier start": Case(compiled, disk="empty"),
        "golden, compiled: second start on a disk, torch's caches warm": Case(compiled, disk="second"),
        "golden, 4 ranks": Case((golden,), 4),
        "golden, launched: torchrun / `initopt launch`": Case((golden,), launched=True),
        "golden, launched: torchrun / `initopt launch`, 4 ranks": Case((golden,), 4, launched=True),
    }


def compiled_code(case: Case, folder: Path) -> tuple[dict[str, str], Path]:
    """The environment with what there is of compiled code before a start, and where its runs are."""
    if not case.disk:
        return {}, folder / "runs"
    disk, runs = folder / case.disk / "disk", folder / case.disk / "runs"
    if case.disk != "second":
        shutil.rmtree(disk, ignore_errors=True)
    if case.disk == "first":
        shutil.rmtree(runs / "compile_cache", ignore_errors=True)
    disk.mkdir(parents=True, exist_ok=True)
    # Inductor's precompiled headers stand under the folder for temporary files. The hosts of a job share a secret.
    places = {"TORCHINDUCTOR_CACHE_DIR": str(disk), "TMPDIR": str(disk), "INITOPT_CACHE_KEY": 32 * "bench"}
    return places, runs


def measure(case: Case, way: str, folder: Path) -> Start:
    """One start. Raises RuntimeError where it ended otherwise than well, or left processes."""
    places, root = compiled_code(case, folder)
    prefix = (*WAYS[way], str(root)) if WAYS[way] else ()
    command = [sys.executable, *case.launcher(way), *prefix, *case.words]
    log = folder / f"{way}.log"
    paths = [*([str(EMULATED)] if case.emulated else []), str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        **places,
        **case.emulated,
        "INITOPT_DATA": str(criteo.data_folder()),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.time()
    outcome = contain.run(command, env=environment, log=log, timeout=LIMIT)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    text = log.read_text(errors="replace")
    ends = [float(at) for at in re.findall(r"^first step at ([\d.]+)$", text, re.MULTILINE)]
    said = tuple(sorted(line for line in text.splitlines() if line.startswith("{") and "trained_state" in line))
    if outcome.code != 0 or outcome.left or len(ends) != case.world or len(said) != case.world:
        raise RuntimeError(f"{' '.join(command)} ended with {outcome.code}, left {outcome.left}:\n{text}")
    waited = len(re.findall(r"^emulated: \d+ collectives waited", text, re.MULTILINE))
    if waited != (case.world if case.emulated else 0):
        raise RuntimeError(f"{' '.join(command)}: {waited} ranks waited as emulated:\n{text}")
    if case.launched and way != "stock" and "imported once, for all ranks: torch" not in text:
        raise RuntimeError(f"{' '.join(command)}: imports were not shared:\n{text}")
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
            cells.append(spread(theirs / mine for theirs, mine in zip(stock, ours, strict=True)))
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
    parser.add_argument("--trainers", nargs="+", default=[""], metavar="ROW", help="only rows that begin so")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", action="store_true", help=f"also put the rows into results/{RESULTS.name}")
    chosen = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    folder = run_root().resolve() / "run"
    folder.mkdir(parents=True, exist_ok=True)
    cases = rows(folder)
    plain = {name: name.replace("*", "") for name in cases}
    # A row's whole name means that row alone, though others begin with it.
    begins = tuple(word for word in chosen.trainers if word not in plain.values())
    names = [name for name in cases if plain[name] in chosen.trainers or (begins and plain[name].startswith(begins))]
    if not names:
        parser.error(f"no row's name begins with {' or '.join(chosen.trainers)}: {'; '.join(cases)}".replace("*", ""))
    if not (folder / "continued" / "checkpoint" / ".metadata").exists():  # its last file
        measure(Case((*EASYREC, str(folder / "continued"))), "stock", folder)
    for case in (cases[name] for name in names if cases[name].disk in ("empty", "second")):
        shutil.rmtree(folder / case.disk, ignore_errors=True)
        measure(case, "optimized" if case.disk == "empty" else "stock", folder)
    saved = RESULTS.read_text() if chosen.save and RESULTS.exists() else ""
    lines = {name: re.findall(rf"^\| {re.escape(name)} \|.*$", saved, re.MULTILINE) for name in cases}
    rounds: dict[str, list[dict[str, Start]]] = {name: [] for name in names}
    for turn in range(chosen.rounds):
        for name in names:
            order = [list(WAYS)[(turn + place) % len(WAYS)] for place in range(len(WAYS))]
            rounds[name].append({way: measure(cases[name], way, folder) for way in order})
            lines[name] = [row(name, rounds[name]), became(name, rounds[name])]
            print(lines[name][0], file=sys.stderr, flush=True)
            page = _page([line for line in lines.values() if line], rounds[name][-1]["optimized"])
            if chosen.save:
                RESULTS.write_text(page)
    print(page)
    if any("DIFFERENT" in lines[name][0] for name in names):
        sys.exit("a trainer did not train the same in all starts")


def _page(lines: Sequence[Sequence[str]], last: Start) -> str:
    assert last.run is not None
    machine, versions = made_on(last.run)
    page = (
        "# Real trainers, untouched, with `initopt.run`",
        "",
        f"`python -m benchmarks.bench_run --save`, 2 ranks where a row says no other number, on {machine}",
        versions,
        "Medians of the trainer as it is, then stock / recorded and stock / optimized: medians of rounds with their",
        "range. A delay is emulated where the row says so, and in all three ways alike; nothing else is, but that the",
        "large packages that `easyrec` imports and does not use stand for others. What each column is, and what a row",
        "means, says [bench_run.py](../bench_run.py).",
        "",
        *table(COLUMNS, (measured for measured, _ in lines)),
        "",
        "What became of each optimization, on rank 0 of the last start:",
        "",
        *table(("trainer", "applied", "left as it is"), (said for _, said in lines)),
    )
    return "\n".join(page) + "\n"


if __name__ == "__main__":
    main()
