"""A recorded start-up read back: the files of all ranks on one time axis, every meeting matched across them.

What a rank spent in a meeting before the last of the others arrived is its `wait`. This file does not know what made
the start-up long (see `chain`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, TypeVar

from initopt.ends import clock_of, end_of, first_to_fail
from initopt.hooks import LEFT_TOGETHER
from initopt.imports import Imported, ImportLine
from initopt.record import (
    FIRST_STEP,
    FORMAT,
    Advised,
    Begun,
    CompileCache,
    Compiled,
    Digest,
    Header,
    Note,
    Optimized,
    Span,
    Trailer,
    Usage,
    Watched,
    run_numbers,
    run_root,
)
from initopt.unused import Unused

if TYPE_CHECKING:
    from initopt.graph import Graph

NO_RUN = (
    "no run has been recorded here: `torchrun ... -m initopt.run train.py` records one, or "
    "`with initopt.Recorder(...)` in the script"
)
"""What to do where there is nothing to read."""

Meeting = tuple[str, int]
_Record = TypeVar(
    "_Record",
    Header,
    Span,
    Begun,
    Digest,
    Note,
    Usage,
    Compiled,
    CompileCache,
    Imported,
    ImportLine,
    Unused,
    Watched,
    Optimized,
    Advised,
    Trailer,
)
_Timed = TypeVar("_Timed", Span, Begun, Compiled, Unused)


class RecordError(ValueError):
    """A run that can't be read. The message names the file, the line and what is missing.

    `path` is the file or directory, `line` the line in it (from 1; 0 where it is about the whole).
    """

    def __init__(self, path: Path, problem: str, line: int = 0) -> None:
        self.path = path
        self.line = line
        super().__init__(f"{path}{f' line {line}' if line else ''}: {problem}")


def last_step(spans: Iterable[Span], graph: Graph | None, end: str = FIRST_STEP) -> Span | None:
    """The step that ends the start-up of one rank, None if the rank did not end it well.

    That is `end` (see `Run.end`), or, where the graph has no such step, the one of the graph's steps that ended last.
    """
    steps = {span.name: span for span in spans if span.kind == "step" and not span.error}
    if end in steps or graph is None or end in graph:
        return steps.get(end)
    if not len(graph) or not all(name in steps for name in graph):
        return None
    return max((steps[name] for name in graph), key=lambda span: span.end)


@dataclass(frozen=True)
class Run:
    """All spans of one start-up on all ranks. Seconds; zero is the earliest process start of any rank.

    `spans` are in order of their start. `zero` is the process start of each rank. `groups` are the global ranks of each
    process group that was seen. `compiled` is what torch's compiler did, `compile_caches` how the ranks came to their
    compiled code. `imported` and `import_lines` are the packages that each rank imported and the lines that did so,
    the longest first, where that was recorded, `unused` what they made and did not use before the first batch was done,
    `watched` whether each rank looked at these. `optimized` is what `initopt.run --optimize` did, and left alone, and
    `advised` what the script could do. `stuck` are the collectives that had begun and not ended when a rank's
    record did. `missing_ranks` left no file. `warnings` say what the run can't be trusted in.
    """

    number: int
    path: Path
    headers: Mapping[int, Header]
    spans: tuple[Span, ...]
    zero: Mapping[int, float]
    graph: Graph | None = None
    digests: tuple[Digest, ...] = ()
    notes: tuple[Note, ...] = ()
    trailers: Mapping[int, Trailer] = field(default_factory=dict)
    usages: Mapping[int, Usage] = field(default_factory=dict)
    compiled: tuple[Compiled, ...] = ()
    compile_caches: tuple[CompileCache, ...] = ()
    imported: tuple[Imported, ...] = ()
    import_lines: tuple[ImportLine, ...] = ()
    unused: tuple[Unused, ...] = ()
    watched: Mapping[int, Watched] = field(default_factory=dict)
    optimized: tuple[Optimized, ...] = ()
    advised: tuple[Advised, ...] = ()
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    stuck: tuple[Begun, ...] = ()
    missing_ranks: tuple[int, ...] = ()
    warnings: tuple[str, ...] = ()

    @classmethod
    def load(cls, path: str | Path) -> Run:
        """Read the run in the directory `path`. Raises RecordError if it can't be read or no rank left a file."""
        path = Path(path)
        files = [_read(file) for file in sorted(path.glob("rank*.jsonl"))]
        if not any(file.header for file in files):
            raise RecordError(path, "there is no run here: no file rank*.jsonl with a header")
        return _joined(path, files)

    @classmethod
    def latest(cls, root: str | Path | None = None) -> Run:
        """The newest run under `root` (see `record.run_root`). Raises RecordError if there is none."""
        root = run_root(root)
        for number in reversed(run_numbers(root)):
            path = root / f"{number:04}"
            if next(path.glob("rank*.jsonl"), None) is not None:
                return cls.load(path)
        raise RecordError(root, NO_RUN)

    @property
    def name(self) -> str:
        """Its number in four digits, or that of its folder where this was copied and called otherwise."""
        return f"{self.number:04}" if self.number else self.path.resolve().name

    @property
    def first_to_fail(self) -> int | None:
        """The rank whose script was ended first. None where that is open, as long as a rank lacks its last line."""
        ends = [end_of(self.headers[rank], trailer) for rank, trailer in self.trailers.items()]
        first = first_to_fail(ends) if len(ends) == len(self.headers) and not self.missing_ranks else None
        return first.rank if first is not None else None

    @property
    def own_cost(self) -> float:
        """Seconds that recording took on the rank where it took most. 0.0 if no rank came to its last line."""
        return max((trailer.own_cost for trailer in self.trailers.values()), default=0.0)

    @cached_property
    def core_bound(self) -> float:
        """Seconds that the CPU work of the busiest host takes at least, all its cores at work: no schedule beats it.

        0.0 where no rank left what it used.
        """
        ranks: defaultdict[str, list[int]] = defaultdict(list)
        for rank in self.usages:
            ranks[self.headers[rank].host].append(rank)
        return max((self._core_bound(found) for found in ranks.values()), default=0.0)

    def _core_bound(self, ranks: list[int]) -> float:
        # Ranks may share cores or have some each, so this is the most that they can have together.
        headers = [self.headers[rank] for rank in ranks]
        cores = min(
            sum(header.cores for header in headers), max(header.host_cores or header.cores for header in headers)
        )
        return sum(self.usages[rank].cpu for rank in ranks) / cores

    def of_rank(self, rank: int) -> tuple[Span, ...]:
        """The spans of one rank, in order of their start."""
        return self._by_rank.get(rank, ())

    def first_batch(self, rank: int) -> float:
        """Time to first batch of a rank: seconds from its own process start to the end of its first training step.

        A start-up whose graph has no training step is over with its last step. Raises RecordError if the rank never got
        there, KeyError for a rank without a record.
        """
        zero = self.zero[rank]
        last = last_step(self.of_rank(rank), self.graph, self.end)
        if last is not None:
            return last.end - zero
        which = "this start-up (--until)"
        if self.end == FIRST_STEP:
            which = f"a start-up. Give the first training step that name: `with initopt.step({FIRST_STEP!r})`"
        raise RecordError(
            self.path / f"rank{rank:05}.jsonl", f"there is no finished step {self.end!r}, which ends {which}"
        )

    @cached_property
    def end(self) -> str:
        """The name of the step that ends this start-up: `first_step`, or what `initopt.run --until` named."""
        return next((header.goal for header in self.headers.values() if header.goal), FIRST_STEP)

    @property
    def goal(self) -> str:
        """What this start-up leads to, in words: `first batch`, or `last step` where the graph has no training step.

        Where `initopt.run --until` names the step that ends it, that name.
        """
        if self.end != FIRST_STEP:
            return self.end
        return "first batch" if self.graph is None or FIRST_STEP in self.graph else "last step"

    def meeting(self, span: Span) -> tuple[Span, ...]:
        """The spans of all ranks that met in this collective, this one among them, in order of their start.

        Just this one if it is no collective, if it was only handed over (`async_op`), or if the ranks' calls differ.
        """
        if not _meets(span):
            return (span,)
        met = self._meetings[span.group, span.sequence]
        return tuple(met) if len({s.op for s in met}) == 1 else (span,)

    @cached_property
    def _meetings(self) -> dict[Meeting, list[Span]]:
        return _met(self.spans)

    @cached_property
    def _by_rank(self) -> dict[int, tuple[Span, ...]]:
        by_rank: defaultdict[int, list[Span]] = defaultdict(list)
        for span in self.spans:
            by_rank[span.rank].append(span)
        return {rank: tuple(spans) for rank, spans in by_rank.items()}


@dataclass
class _File:
    """What stood in the file of one rank."""

    path: Path
    header: Header | None = None
    spans: list[Span] = field(default_factory=list)
    begun: dict[str, Begun] = field(default_factory=dict)
    digests: list[Digest] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    compiled: list[Compiled] = field(default_factory=list)
    compile_caches: list[CompileCache] = field(default_factory=list)
    imported: list[Imported] = field(default_factory=list)
    import_lines: list[ImportLine] = field(default_factory=list)
    unused: list[Unused] = field(default_factory=list)
    watched: Watched | None = None
    optimized: list[Optimized] = field(default_factory=list)
    advised: list[Advised] = field(default_factory=list)
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)
    trailer: Trailer | None = None
    usage: Usage | None = None
    warnings: list[str] = field(default_factory=list)


def _read(path: Path) -> _File:
    import msgspec

    file = _File(path)
    *lines, rest = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        try:
            values = msgspec.json.decode(line)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise RecordError(path, f"this is no JSON: {error}", number) from None
        if not isinstance(values, dict):
            raise RecordError(path, "this is no JSON object", number)
        kind = values.get("kind")
        if (file.header is None) != (kind == "header"):
            raise RecordError(path, "the first line, and no other, must be the header", number)
        if kind == "header":
            written = values.get("format")
            if isinstance(written, int) and written > FORMAT:
                raise RecordError(path, f"written by a newer initopt: format {written}, this reads {FORMAT}", number)
            file.header = _convert(Header, values, path, number)
        elif kind in ("import", "step", "collective", "compile"):
            file.spans.append(_convert(Span, values, path, number))
            if kind == "collective":
                file.begun.pop(file.spans[-1].lane, None)
        elif kind == "begun":
            begun = _convert(Begun, values, path, number)
            file.begun[begun.lane] = begun
        elif kind == "digest":
            file.digests.append(_convert(Digest, values, path, number))
        elif kind == "group":
            try:
                file.groups[msgspec.convert(values["name"], str)] = msgspec.convert(values["ranks"], tuple[int, ...])
            except (KeyError, msgspec.ValidationError) as error:
                raise RecordError(path, f"a group needs `name` and `ranks`: {error}", number) from None
        elif kind == "note":
            file.notes.append(_convert(Note, values, path, number))
        elif kind == "compiled":
            file.compiled.append(_convert(Compiled, values, path, number))
        elif kind == "compile_cache":
            file.compile_caches.append(_convert(CompileCache, values, path, number))
        elif kind == "imported":
            file.imported.append(_convert(Imported, values, path, number))
        elif kind == "import_line":
            file.import_lines.append(_convert(ImportLine, values, path, number))
        elif kind == "unused":
            file.unused.append(_convert(Unused, values, path, number))
        elif kind == "watched":
            file.watched = _convert(Watched, values, path, number)
        elif kind == "optimized":
            file.optimized.append(_convert(Optimized, values, path, number))
        elif kind == "advised":
            file.advised.append(_convert(Advised, values, path, number))
        elif kind == "usage":
            file.usage = _convert(Usage, values, path, number)
        elif kind == "trailer":
            file.trailer = _convert(Trailer, values, path, number)
        else:
            raise RecordError(path, f"`kind` is {kind!r}, which this initopt does not know", number)
    if rest:
        file.warnings.append(f"{path} line {len(lines) + 1}: half-written, left out: the process ended meanwhile")
    if file.header is None:
        file.warnings.append(f"{path}: there is no header, left out: the process ended too early")
    elif file.trailer is None:
        file.warnings.append(
            f"{path}: the record ends without its last line: the process ended before it was closed, or goes on"
        )
    return file


def _convert(kind: type[_Record], values: dict[str, Any], path: Path, line: int) -> _Record:
    import msgspec

    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        missing = [f"`{f.name}`" for f in fields(kind) if f.name not in values and f"`{f.name}`" in str(error)]
        problem = f"{missing[0]} is missing" if missing else str(error)
        raise RecordError(path, f"{kind.__name__.lower()}: {problem}", line) from None


def _joined(path: Path, files: list[_File]) -> Run:
    headers = {}
    warnings = [warning for file in files for warning in file.warnings]
    for file in files:
        header = file.header
        if header is None:
            continue
        if header.rank in headers:
            raise RecordError(file.path, f"rank {header.rank} has another file in this run", 1)
        headers[header.rank] = header
    sizes = {header.world_size for header in headers.values()}
    if len(sizes) > 1:
        warnings.append(f"{path}: the ranks name different numbers of ranks: {sorted(sizes)}")
    missing = tuple(sorted(set(range(max(sizes))) - headers.keys()))

    starts = {rank: header.process_start for rank, header in headers.items()}
    unaligned = {
        file.header.rank: [_moved(span, starts[file.header.rank]) for span in file.spans]
        for file in files
        if file.header is not None
    }
    late = _clock_offsets(headers, unaligned, warnings)
    zero = {rank: start - late[clock_of(headers[rank])] for rank, start in starts.items()}
    first = min(zero.values())
    zero = {rank: start - first for rank, start in zero.items()}
    spans = [_moved(span, zero[file.header.rank]) for file in files if file.header for span in file.spans]
    compiled = [_moved(one, zero[file.header.rank]) for file in files if file.header for one in file.compiled]

    spans = _with_waits(_imports_in_steps(spans), warnings)
    graph = None
    if (path / "graph.json").exists():
        from initopt.graph import Graph

        try:
            graph = Graph.from_json((path / "graph.json").read_text())
        except ValueError as error:
            raise RecordError(path / "graph.json", str(error)) from error
    groups: dict[str, tuple[int, ...]] = {}
    for file in files:
        groups.update(file.groups)
    return Run(
        number=int(path.resolve().name) if path.resolve().name.isdigit() else 0,
        path=path,
        headers=dict(sorted(headers.items())),
        spans=tuple(sorted(spans, key=lambda span: (span.start, span.rank, -span.end))),
        zero=dict(sorted(zero.items())),
        graph=graph,
        digests=tuple(digest for file in files for digest in file.digests),
        notes=tuple(note for file in files for note in file.notes),
        trailers={file.trailer.rank: file.trailer for file in files if file.trailer is not None},
        compiled=tuple(sorted(compiled, key=lambda one: (one.start, one.rank))),
        compile_caches=tuple(cache for file in files for cache in file.compile_caches),
        imported=tuple(one for file in files for one in file.imported),
        import_lines=tuple(one for file in files for one in file.import_lines),
        unused=tuple(_moved(one, zero[f.header.rank]) for f in files if f.header for one in f.unused),
        watched={file.watched.rank: file.watched for file in files if file.watched is not None},
        optimized=tuple(one for file in files for one in file.optimized),
        advised=tuple(one for file in files for one in file.advised),
        usages={file.usage.rank: file.usage for file in files if file.usage is not None},
        groups=groups,
        stuck=tuple(_moved(b, zero[f.header.rank]) for f in files if f.header for b in f.begun.values()),
        missing_ranks=missing,
        warnings=tuple(warnings),
    )


def _moved(one: _Timed, by: float) -> _Timed:
    if isinstance(one, Begun):
        return replace(one, start=one.start + by)
    return replace(one, start=one.start + by, end=one.end + by)


def _meets(span: Span) -> bool:
    return span.kind == "collective" and span.sequence >= 0 and not span.async_op


def _met(spans: Iterable[Span]) -> dict[Meeting, list[Span]]:
    met: defaultdict[Meeting, list[Span]] = defaultdict(list)
    for span in spans:
        if _meets(span):
            met[span.group, span.sequence].append(span)
    return met


def _clock_offsets(
    headers: Mapping[int, Header], spans: Mapping[int, list[Span]], warnings: list[str]
) -> dict[str, float]:
    """How many seconds each machine's clock is ahead of the one of the lowest rank, by the meetings that both left.

    A machine without a common meeting with one that is already aligned keeps its own clock, with a warning.
    """
    clocks = {rank: clock_of(header) for rank, header in headers.items()}
    offsets = {clocks[min(clocks)]: 0.0}
    if len(set(clocks.values())) == 1:
        return offsets
    ends: list[dict[str, float]] = []
    for met in _met(span for rank in spans for span in spans[rank]).values():
        if met[0].op in LEFT_TOGETHER and len({s.op for s in met}) == 1 and not any(s.error for s in met):
            by_clock: defaultdict[str, list[float]] = defaultdict(list)
            for span in met:
                by_clock[clocks[span.rank]].append(span.end)
            if len(by_clock) > 1:
                ends.append({clock: median(values) for clock, values in by_clock.items()})
    left = dict.fromkeys(clocks[rank] for rank in sorted(clocks) if clocks[rank] not in offsets)
    while left:
        found = {}
        for clock in left:
            differences = [
                end[clock] - (end[known] - offsets[known])
                for end in ends
                if clock in end
                for known in [next((c for c in end if c in offsets), None)]
                if known is not None
            ]
            if differences:
                found[clock] = median(differences)
        if not found:
            for clock in left:
                ranks = [rank for rank in clocks if clocks[rank] == clock]
                warnings.append(
                    f"clock of host {headers[ranks[0]].host} (rank {ranks[0]}): no barrier or other symmetric "
                    "collective in common with the other hosts, so its wall clock is taken as it is"
                )
                offsets[clock] = 0.0
            return offsets
        offsets.update(found)
        for clock in found:
            del left[clock]
    return offsets


def _imports_in_steps(spans: list[Span]) -> list[Span]:
    """The spans with the step of each package that was imported while no step had a name: what that time is called."""
    steps: defaultdict[tuple[int, str], list[Span]] = defaultdict(list)
    for span in spans:
        if not span.step and (span.kind == "step" or span.name == "imports"):
            steps[span.rank, span.lane].append(span)

    def step(one: Span) -> str:
        around = (s for s in steps[one.rank, one.lane] if s.start <= (one.start + one.end) / 2 <= s.end)
        return next((s.name for s in around), "")

    return [replace(s, step=step(s)) if s.kind == "import" and not s.step and s.name != "imports" else s for s in spans]


def _with_waits(spans: list[Span], warnings: list[str]) -> list[Span]:
    """The spans with `wait`: of a collective until the last rank came, of a step what its collectives waited."""
    waits: dict[tuple[int, str, int], float] = {}
    for (group, sequence), met in _met(spans).items():
        if len({s.op for s in met}) > 1:
            calls = ", ".join(f"rank {s.rank} {s.op} ({s.call_site})" for s in met[:4])
            warnings.append(f"the ranks differ in call {sequence} on group {group}: {calls}")
            continue
        for span in met:
            # Who came after this one had left can't be the one it waited for: the root of a broadcast leaves at once.
            last = max(other.start for other in met if other.start <= span.end)
            waits[span.rank, group, sequence] = max(0.0, last - span.start)
    spans = [replace(s, wait=waits.get((s.rank, s.group, s.sequence), 0.0)) if _meets(s) else s for s in spans]

    waiting: defaultdict[int, list[Span]] = defaultdict(list)
    for span in sorted(spans, key=attrgetter("start")):
        if span.wait:
            waiting[span.rank].append(span)
    start = attrgetter("start")
    for place, span in enumerate(spans):
        if span.kind != "step":
            continue
        candidates = waiting[span.rank]
        first = bisect_left(candidates, span.start, key=start)
        inside = candidates[first : bisect_right(candidates, span.end, key=start)]
        # By lane as well as by name: a step holds the meetings of the steps inside it.
        wait = sum(s.wait for s in inside if s.end <= span.end and (s.lane == span.lane or s.step == span.name))
        spans[place] = replace(span, wait=min(wait, span.end - span.start))
    return spans
