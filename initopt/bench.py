"""Measured start-ups, stock and initopt: fresh processes, taken in turn, saved, compared with an earlier measurement.

A measurement is a `Bench`: a number, two sides, the samples of each. The median counts, since start-ups are skewed, and
a ratio is taken pair by pair, since neighbours in time share the state of the machine. This file does not know what a
step is worth (see `chain`) nor how the figures are shown (see `report`).
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import signal
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from initopt import chain, contain
from initopt.record import run_numbers
from initopt.runs import RecordError, Run

FORMAT = 1
"""Version of the saved file and of `Bench.to_json`."""

OUTLIER = 3.5
"""Standard deviations from the median, estimated by the median absolute deviation (for which 3.5 is the usual limit).

A sample that is off by more is reported, if it is off by more than `NOTICEABLE`, too.
"""

NOTICEABLE = 0.05
"""Fraction of the median. What differs by less is not worth a warning between start-ups."""

Metric = Literal["median", "min", "max", "slowest", "work", "wait", "queue"]
METRICS: tuple[Metric, ...] = ("median", "min", "max", "slowest", "work", "wait", "queue")
"""What a gate can look at, all in seconds. `slowest` is the median over runs of the slowest rank."""


class BenchError(RuntimeError):
    """A measurement that can't be made, read or compared. The message names the command or file and the way out."""


class CommandFailed(BenchError):
    """A command of the bench ended badly, so there is nothing to measure. `code` is None if it ran into the timeout."""

    def __init__(self, what: str, command: Sequence[str], code: int | None, timeout: float, log: Path) -> None:
        """Say which command ended how, and what it said last."""
        self.command = tuple(command)
        self.code = code
        self.log = log
        if code is None:
            ending = f"did not end within {timeout:g}s and was killed (--timeout)"
        elif code < 0:
            ending = f"was ended by {_signal_name(-code)}"
        else:
            ending = f"failed with exit code {code}"
        lines = log.read_text(errors="replace").splitlines()[-20:]
        said = "\n".join(["its last lines:", *(f"  {line}" for line in lines)]) if lines else "it printed nothing"
        super().__init__(f"{what} {ending}: {shlex.join(command)}\nlog: {log}\n{said}")


@dataclass(frozen=True, slots=True)
class Sample:
    """One start-up in fresh processes. Times are seconds from the start of the worker's process.

    `first_batch` is that of the median rank and equals `work + wait + queue`, `slowest` that of rank `slowest_rank`.
    `steps` is what each step of the median rank took. `digests` names what the ranks said about their trained state.
    `run` is the folder of the record (a side keeps its last 20), `log` the file with what the command printed; both
    within the folder of all measurements.
    """

    first_batch: float
    slowest: float
    slowest_rank: int
    work: float
    wait: float
    queue: float
    steps: dict[str, float]
    digests: dict[str, str]
    run: str
    log: str


@dataclass(frozen=True, slots=True)
class Spread:
    """The middle and the range of some samples."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """The spread of at least one value."""
        known = list(values)
        return cls(statistics.median(known), min(known), max(known))


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two commands and its samples, in the order they were taken."""

    name: str
    command: tuple[str, ...]
    labels: tuple[str, ...]
    samples: tuple[Sample, ...]

    @property
    def first_batch(self) -> Spread:
        """Seconds to the first batch on the median rank."""
        return Spread.of(sample.first_batch for sample in self.samples)

    @property
    def slowest(self) -> float:
        """Seconds to the first batch on the slowest rank, the median over runs."""
        return statistics.median(sample.slowest for sample in self.samples)

    @property
    def parts(self) -> dict[str, float]:
        """Work, wait and queue of the median run, in seconds. They add up to `first_batch.median`.

        For an even number of runs it is the mean of the two in the middle.
        """
        ordered = sorted(self.samples, key=lambda sample: sample.first_batch)
        middle = ordered[(len(ordered) - 1) // 2 : len(ordered) // 2 + 1]
        return {part: statistics.fmean(getattr(s, part) for s in middle) for part in ("work", "wait", "queue")}

    @property
    def steps(self) -> dict[str, float]:
        """Median seconds of each step, over the runs that had it."""
        names = dict.fromkeys(name for sample in self.samples for name in sample.steps)
        return {name: statistics.median(s.steps[name] for s in self.samples if name in s.steps) for name in names}

    def metric(self, name: Metric) -> float:
        """The value a gate looks at, in seconds."""
        if name == "slowest":
            return self.slowest
        if name in ("work", "wait", "queue"):
            return self.parts[name]
        return float(getattr(self.first_batch, name))


@dataclass(frozen=True, slots=True)
class State:
    """Whether both sides trained to the same state, by the digests that the ranks recorded.

    `unsteady`: the stock runs differ among themselves, so equality can't be shown. `unknown`: some run recorded none.
    `differs` names what differs, `count` is the number of digests of a run.
    """

    verdict: Literal["identical", "different", "unsteady", "unknown"]
    count: int = 0
    differs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Bench:
    """A measurement of two commands. `taken` is unix time in seconds, `notes` are warnings met while measuring."""

    number: int
    taken: float
    stock: Side
    initopt: Side
    warmup: int
    prepare: str | None
    ranks: int
    hosts: tuple[str, ...]
    cores: int
    commit: str
    versions: dict[str, str]
    notes: tuple[str, ...] = ()
    version: int = FORMAT

    @property
    def name(self) -> str:
        """Number and commit, as `0006_3f9c2e1`."""
        return f"{self.number:04d}" + (f"_{self.commit[:7]}" if self.commit else "")

    @property
    def labels(self) -> tuple[str, ...]:
        """What must stand beside every absolute time of this measurement, such as what was emulated."""
        return tuple(dict.fromkeys(self.stock.labels + self.initopt.labels))

    @property
    def ratio(self) -> Spread:
        """How many times faster initopt is than the stock run before it, over the pairs."""
        pairs = zip(self.stock.samples, self.initopt.samples, strict=True)
        return Spread.of(stock.first_batch / mine.first_batch for stock, mine in pairs)

    @property
    def state(self) -> State:
        """Whether the trained state of both sides is the same."""
        return _compare_states(self.stock.samples, self.initopt.samples)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Why the figures may mislead, each with the flag that helps."""
        found = list(self.notes)
        for side in (self.stock, self.initopt):
            found += _outliers(side, self.warmup, self.prepare)
        if set(self.stock.labels) != set(self.initopt.labels):
            found.append(
                f"the two commands don't run under the same conditions: stock {_listed(self.stock.labels)}, "
                f"initopt {_listed(self.initopt.labels)}. The ratio compares both at once; give both the same profile."
            )
        state = self.state
        if state.verdict == "different":
            found.append(
                f"the trained state differs from stock: {_few(state.differs)}. The start-up changed the training."
            )
        elif state.verdict == "unsteady":
            found.append(
                f"stock does not train to the same state twice: {_few(state.differs)}. "
                "Fix its seeds, else initopt can't be shown to keep the training as it was."
            )
        return tuple(found)

    def to_json(self) -> bytes:
        """The whole measurement with its summary, as an object with a `version`."""
        import msgspec

        known: dict[str, Any] = msgspec.to_builtins(self)
        sides = {
            side.name: {
                **msgspec.to_builtins(side.first_batch),
                "slowest": side.slowest,
                **side.parts,
                "runs": len(side.samples),
            }
            for side in (self.stock, self.initopt)
        }
        summary = {"first_batch": sides, "ratio": self.ratio, "state": self.state, "labels": self.labels}
        return msgspec.json.format(msgspec.json.encode({**known, "summary": summary, "warnings": self.warnings}))


def run_bench(
    stock: Sequence[str],
    command: Sequence[str],
    *,
    runs: int = 10,
    warmup: int = 1,
    root: str | Path = ".initopt",
    prepare: str | None = None,
    timeout: float = 600.0,
    progress: Callable[[str], None] = lambda line: None,
) -> Bench:
    """Run both commands in turn, `warmup` times unmeasured and `runs` times measured, and save the result under `root`.

    The environment variable INITOPT_ROOT gives each side a run root of its own, where every run must leave a record.
    `prepare` is a shell command that comes before each run, to bring the machine into a fixed state. A run may take
    `timeout` seconds. `progress` is told what begins. The saved file is `root/bench/NNNN.json`; records and logs stand
    in the folder beside it.

    Raises CommandFailed at the first command that fails, BenchError for a run without a record of its first batch.
    No process of a command outlives this call.
    """
    if runs < 1 or warmup < 0:
        raise ValueError(f"runs is {runs} and warmup is {warmup}: measure at least once, warm up 0 times or more")
    for side, words in (("stock", stock), ("initopt", command)):
        if not words:
            raise ValueError(f"the {side} command is empty: give the words of the command to run")
    series = _Series(*_new_folder(Path(root)), prepare, timeout, progress)
    commands = {"stock": stock, "initopt": command}
    for turn in range(warmup):
        for side, words in commands.items():
            series.take(side, f"warmup-{turn + 1:02d}", f"{side}, warm-up {turn + 1} of {warmup}", words)
    taken: dict[str, list[tuple[Sample, Run]]] = {side: [] for side in commands}
    for turn in range(runs):
        for side, words in commands.items():
            taken[side].append(series.take(side, f"{turn + 1:02d}", f"{side}, run {turn + 1} of {runs}", words))
    return series.save(taken, commands, warmup)


class _Series:
    """The runs of one measurement, and the folder they write to."""

    def __init__(
        self, number: int, folder: Path, prepare: str | None, timeout: float, progress: Callable[[str], None]
    ) -> None:
        self.number = number
        self.folder = folder
        self.prepare = prepare
        self.timeout = timeout
        self.progress = progress
        self.notes: list[str] = []

    def take(self, side: str, turn: str, title: str, command: Sequence[str]) -> tuple[Sample, Run]:
        """One run in fresh processes: its sample and its record."""
        self.progress(title)
        # Shared by the runs of a side: what initopt learns in one start-up is there in the next, as in a real job.
        root = self.folder / side
        if self.prepare is not None:
            log = self.folder / f"{side}-{turn}.prepare.log"
            self._execute(f"{title}: --prepare", ["sh", "-c", self.prepare], root, log)
        log = self.folder / f"{side}-{turn}.log"
        known = run_numbers(root)
        self._execute(title, command, root, log)
        try:
            if run_numbers(root)[-1:] == known[-1:]:
                raise RecordError(root, "there is no new run")
            run = Run.latest(root)
            sample = self._sample(run, log)
        except RecordError as error:
            raise BenchError(
                f"{title} left no record of a first batch: {error}\ncommand: {shlex.join(command)}\n"
                f"log: {log}\nStart the script by `-m initopt.run`, or use a Recorder that keeps its default root."
            ) from error
        if run.missing_ranks:
            raise BenchError(
                f"{title}: the record lacks rank {_few(map(str, run.missing_ranks))} ({run.path}, log: {log})"
            )
        self.notes += [f"{title}: {warning}" for warning in run.warnings]
        return sample, run

    def _execute(self, title: str, command: Sequence[str], root: Path, log: Path) -> None:
        try:
            outcome = contain.run(command, env={**os.environ, "INITOPT_ROOT": str(root)}, log=log, timeout=self.timeout)
        except OSError as error:
            raise BenchError(f"{title} can't be run: {error} (command: {shlex.join(command)})") from error
        if outcome.code != 0:
            raise CommandFailed(title, command, outcome.code, self.timeout, log)
        if outcome.left:
            self.notes.append(
                f"{title} left processes behind, which were killed: {_few(outcome.left)}. "
                "Let the script end its workers, since they slow down what comes next."
            )

    def _sample(self, run: Run, log: Path) -> Sample:
        for rank in run.headers:
            run.first_batch(rank)  # a rank that never got there would make the others' median look good
        rank, slowest = chain.median_rank(run), chain.slowest_rank(run)
        parts = chain.split(run, rank)
        steps: dict[str, float] = {}
        for span in chain.steps_of(run, rank):
            steps[span.name] = steps.get(span.name, 0.0) + span.end - span.start
        return Sample(
            first_batch=parts.total,
            slowest=run.first_batch(slowest),
            slowest_rank=slowest,
            work=parts.work,
            wait=parts.wait,
            queue=parts.queue,
            steps=steps,
            digests=_digests(run),
            run=str(Path(run.path).relative_to(self.folder.parent)),
            log=str(log.relative_to(self.folder.parent)),
        )

    def save(
        self,
        taken: Mapping[str, Sequence[tuple[Sample, Run]]],
        commands: Mapping[str, Sequence[str]],
        warmup: int,
    ) -> Bench:
        """The measurement, written to its file."""
        sides = {
            name: Side(
                name,
                tuple(commands[name]),
                tuple(
                    dict.fromkeys(label for _, run in runs for head in run.headers.values() for label in head.labels)
                ),
                tuple(sample for sample, _ in runs),
            )
            for name, runs in taken.items()
        }
        last = taken["initopt"][-1][1].headers
        first = last[min(last)]
        result = Bench(
            number=self.number,
            taken=time.time(),
            stock=sides["stock"],
            initopt=sides["initopt"],
            warmup=warmup,
            prepare=self.prepare,
            ranks=first.world_size,
            hosts=tuple(sorted({head.host for head in last.values()})),
            cores=first.cores,
            commit=first.commit,
            versions={**_own_versions(), **(first.versions or {})},
            notes=tuple(dict.fromkeys(self.notes)),
        )
        path = self.folder.with_suffix(".json")
        draft = path.with_suffix(".json.new")
        draft.write_bytes(result.to_json())
        draft.replace(path)
        return result


def load(root: str | Path = ".initopt", number: int | None = None) -> Bench:
    """A saved measurement, the newest if no number is given. Raises BenchError if it isn't there or can't be read."""
    import msgspec

    folder = Path(root) / "bench"
    known = {int(path.stem): path for path in sorted(folder.glob("[0-9]*.json"))}
    if not known:
        raise BenchError(f"no measurement is saved under {folder}: make one with `initopt bench`")
    wanted = max(known) if number is None else number
    if wanted not in known:
        raise BenchError(f"{folder} has no measurement {wanted:04d}; it has {_few(f'{one:04d}' for one in known)}")
    path = known[wanted]
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Bench)
    except (OSError, msgspec.MsgspecError) as error:
        raise BenchError(f"{path} can't be read: {error}. Delete it, or measure again") from error
    if found.version != FORMAT:
        raise BenchError(f"{path} has format {found.version}, this initopt reads {FORMAT}: measure again")
    return found


@dataclass(frozen=True, slots=True)
class Growth:
    """A step that takes longer than before. Times are median seconds."""

    step: str
    before: float
    after: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """One side against another. `warnings` say why the difference may come from something else than the code."""

    before_name: str
    after_name: str
    before: Side
    after: Side
    warnings: tuple[str, ...] = ()

    def change(self, metric: Metric = "median") -> float:
        """Relative change: 0.05 is 5 % longer. From nothing to something it is infinite."""
        before, after = self.before.metric(metric), self.after.metric(metric)
        if before == 0:
            return 0.0 if after == 0 else float("inf")
        return after / before - 1

    @property
    def overlaps(self) -> bool:
        """Whether the ranges of both have something in common, so that the difference may be chance."""
        before, after = self.before.first_batch, self.after.first_batch
        return before.min <= after.max and after.min <= before.max

    @property
    def grown(self) -> tuple[Growth, ...]:
        """The steps that take longer, most first. A step that is new took 0 before."""
        before = self.before.steps
        grown = [Growth(step, before.get(step, 0.0), seconds) for step, seconds in self.after.steps.items()]
        return tuple(sorted((g for g in grown if g.after > g.before), key=lambda g: g.before - g.after))


def compare(before: Bench, after: Bench) -> Comparison:
    """The initopt side of two measurements, with warnings where the machine, not the code, may make the difference."""
    found = [
        f"{what} {differ} from {before.name}: {old} -> {new}. The comparison may not be the code's alone."
        for what, differ, old, new in (
            ("hosts", "differ", _listed(before.hosts), _listed(after.hosts)),
            ("cores", "differ", before.cores, after.cores),
            ("ranks", "differ", before.ranks, after.ranks),
            ("labels", "differ", _listed(before.initopt.labels), _listed(after.initopt.labels)),
            ("the command", "differs", shlex.join(before.initopt.command), shlex.join(after.initopt.command)),
            ("versions", "differ", *_version_changes(before.versions, after.versions)),
        )
        if old != new
    ]
    drift = after.stock.metric("median") / before.stock.metric("median") - 1
    if abs(drift) > NOTICEABLE and before.stock.command == after.stock.command:
        found.append(
            f"stock itself changed by {drift:+.0%} since {before.name}: machine or trainer changed, not only initopt. "
            "The ratios of both measurements tell more."
        )
    return Comparison(f"initopt, {before.name}", f"initopt, {after.name}", before.initopt, after.initopt, tuple(found))


def against_stock(bench: Bench) -> Comparison:
    """The two sides of one measurement, so that a gate can hold initopt against stock."""
    return Comparison(f"stock, {bench.name}", f"initopt, {bench.name}", bench.stock, bench.initopt, bench.warnings)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a gate found. `change` is in the gate's unit: percent, or seconds."""

    passed: bool
    change: float
    gate: Gate
    grown: tuple[Growth, ...]


@dataclass(frozen=True, slots=True)
class Gate:
    """The largest growth that is let through, of one metric, in percent (`%`) or seconds (`s`)."""

    metric: Metric
    limit: float
    unit: Literal["%", "s"]

    @classmethod
    def parse(cls, text: str) -> Gate:
        """A gate from what it fails at: `median > +5%`, `slowest > +2s`. Raises ValueError that says the form."""
        match = re.fullmatch(r"\s*(\w+)\s*>\s*([+-]?\d+(?:\.\d+)?)\s*(%|s)\s*", text)
        metric = next((known for known in METRICS if match and match[1] == known), None)
        if match is None or metric is None:
            raise ValueError(
                f"--fail-if {text!r} is not understood: write METRIC > LIMIT, as 'median > +5%' or 'slowest > +2s'; "
                f"METRIC is one of {', '.join(METRICS)}"
            )
        return cls(metric, float(match[2]), "%" if match[3] == "%" else "s")

    def check(self, comparison: Comparison) -> Verdict:
        """Whether the growth stays within the limit, and which steps grew."""
        if self.unit == "%":
            change = 100 * comparison.change(self.metric)
        else:
            change = comparison.after.metric(self.metric) - comparison.before.metric(self.metric)
        return Verdict(change <= self.limit, change, self, comparison.grown)

    def __str__(self) -> str:
        """As it is written after `--fail-if`."""
        return f"{self.metric} > {self.limit:+g}{self.unit}"


def _new_folder(root: Path) -> tuple[int, Path]:
    """The next free number and its folder, which two measurements at once can't both get."""
    parent = root.absolute() / "bench"
    parent.mkdir(parents=True, exist_ok=True)
    number = max((int(p.stem) for p in parent.iterdir() if p.stem.isdecimal()), default=0) + 1
    while True:
        folder = parent / f"{number:04d}"
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
        else:
            return number, folder


def _compare_states(stock: Sequence[Sample], mine: Sequence[Sample]) -> State:
    if not all(sample.digests for sample in (*stock, *mine)):
        return State("unknown")
    first = stock[0].digests
    unsteady = _different(first, stock)
    if unsteady:
        return State("unsteady", len(first), unsteady)
    different = _different(first, mine)
    return State("different" if different else "identical", len(first), different)


def _different(first: Mapping[str, str], samples: Iterable[Sample]) -> tuple[str, ...]:
    names = (name for s in samples for name in (*first, *s.digests) if s.digests.get(name) != first.get(name))
    return tuple(dict.fromkeys(names))


def _outliers(side: Side, warmup: int, prepare: str | None) -> list[str]:
    values = [sample.first_batch for sample in side.samples]
    median = statistics.median(values)
    # 1.4826 makes the median absolute deviation estimate the standard deviation of a normal distribution.
    deviation = 1.4826 * statistics.median(abs(value - median) for value in values)
    found = []
    for turn, value in enumerate(values, start=1):
        off = value - median
        if len(values) < 3 or abs(off) <= max(OUTLIER * deviation, NOTICEABLE * median):
            continue
        if turn == 1 and off > 0 and prepare is None:
            more = f"--warmup {warmup + 1}"
            advice = f"cold caches, as it seems. Use {more}, or --prepare 'CMD' to fix their state."
        elif prepare is None:
            advice = "something else ran beside it, as it seems. Leave the machine alone, or use --prepare 'CMD'."
        else:
            advice = "something else ran beside it, as it seems. Leave the machine alone, or use more --runs."
        word = "slower" if off > 0 else "faster"
        found.append(f"{side.name} run {turn} was {abs(off) / median:.0%} {word} than the median: {advice}")
    return found


def _version_changes(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[str, str]:
    changed = [name for name in sorted({*before, *after}) if before.get(name) != after.get(name)]
    old, new = (", ".join(f"{name} {versions.get(name, 'none')}" for name in changed) for versions in (before, after))
    return old, new


def _own_versions() -> dict[str, str]:
    return {"python": platform.python_version(), "kernel": platform.release()}


def _digests(run: Run) -> dict[str, str]:
    """What the ranks said about their trained state, by name and rank."""
    return {f"{digest.name}, rank {digest.rank}": digest.sha256 for digest in run.digests}


def _listed(words: Sequence[str]) -> str:
    return ", ".join(words) if words else "none"


def _few(words: Iterable[str], most: int = 3) -> str:
    known = list(words)
    more = f" and {len(known) - most} more" if len(known) > most else ""
    return ", ".join(known[:most]) + more


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
