"""Start-up = work + wait + queue, and the chain of steps that decided it, across ranks.

The chain is the longest one of steps that need each other, by what each took, up to the first training step. The time
in which it stood still is queue: its next step, or another one which that step needed, was behind other steps. Where a
rank waited in a collective, the chain goes on at the rank that came last. In a run without a graph the steps count as
one sequence, and what ran between them, unrecorded, counts as work. This file does not know what would happen with
other steps or other times (see `simulate`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from initopt.record import FIRST_STEP
from initopt.runs import RecordError, last_step

if TYPE_CHECKING:
    from initopt.graph import Graph
    from initopt.record import Span
    from initopt.runs import Run

UNNAMED = "(not in a step)"
"""Name of the links that stand for time in which a run without a graph recorded nothing."""

SKEW = 0.005
"""Seconds. Ranks that reach a collective this close together came at the same time: the clocks do not tell more."""

_ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class Split:
    """The parts of one rank's time to first batch, in seconds. They add up to it.

    `work` is the longest chain of steps that need each other, `wait` the part of that chain spent for slower ranks,
    `queue` the time in which the chain stood still, because a lane or a resource was busy or nothing started its steps.
    """

    work: float
    wait: float
    queue: float

    @property
    def total(self) -> float:
        """Seconds from the start of the rank's process to the end of its first training step."""
        return self.work + self.wait + self.queue


@dataclass(frozen=True, slots=True)
class Link:
    """One step of the chain, on the rank that decided. Times are seconds, `start` on the run's common axis.

    `took` is the time from `start` to where the link before this one in the list took over. `wait` of it was spent for
    slower ranks; `waited_for` is the rank that came last and where the chain goes on, None when it stays on this rank.
    Before `start` the chain stood still for `queue` seconds, `behind` other steps (empty: nothing recorded ran).
    The chain enters the step at `joined`: at its start, or when the rank `waited_for` came to the meeting inside it.
    """

    step: str
    rank: int
    start: float
    took: float
    wait: float = 0.0
    waited_for: int | None = None
    queue: float = 0.0
    behind: tuple[str, ...] = ()
    joined: float = 0.0


def split(run: Run, rank: int) -> Split:
    """Work, wait and queue of one rank, read on that rank alone. Raises RecordError if it had no first batch."""
    total = run.first_batch(rank)
    links = rank_chain(run.of_rank(rank), run.graph, zero=run.zero[rank], end=run.end)
    queue = sum(link.queue for link in links)
    wait = sum(link.wait for link in links)
    return Split(total - wait - queue, wait, queue)


def seconds(value: float) -> str:
    """A time the way every view prints it: `104.3s`, `640ms`, `0`.

    >>> seconds(104.34), seconds(0.64), seconds(0)
    ('104.3s', '640ms', '0')
    """
    if abs(value) < 0.0005:
        return "0"
    return f"{value:.1f}s" if abs(value) >= 0.9995 else f"{1000 * value:.0f}ms"


def sentence(run: Run, rank: int | None = None) -> str:
    """The start-up of `rank` (default: the median one) in one line.

    `first batch after 157.7s = 98.4s work + 13.5s wait + 45.8s queue`. Where the queue is not known (there
    is no graph), it is left out. Raises RecordError if it had no first batch.
    """
    parts = split(run, median_rank(run) if rank is None else rank)
    work, wait, queue = (seconds(part) for part in (parts.work, parts.wait, parts.queue))
    known = f"{run.goal} after {seconds(parts.total)} = {work} work + {wait} wait"
    return known if run.graph is None and parts.queue < SKEW else f"{known} + {queue} queue"


def critical_chain(run: Run, rank: int | None = None) -> list[Link]:
    """The links that decided when `rank` (default: the slowest one) had its first batch, last link first.

    Raises RecordError if that rank did not reach its first batch, or none did.
    """
    rank = slowest_rank(run) if rank is None else rank
    if rank not in finished_ranks(run):
        raise RecordError(run.path, f"rank {rank} did not finish the step {run.end!r}, which ends a start-up")
    return _Walk(run.spans, run.graph, run.zero, run.end).back(rank, crossing=True)


def rank_chain(spans: Sequence[Span], graph: Graph | None, *, zero: float = 0.0, end: str = FIRST_STEP) -> list[Link]:
    """The links that decided the first batch of one rank, read on that rank alone, last link first.

    `spans` are recorded or simulated ones of a single rank, the step `end` among them; `zero` is its process start.
    """
    rank = spans[0].rank
    return _Walk(spans, graph, {rank: zero}, end).back(rank, crossing=False)


def finished_ranks(run: Run) -> list[int]:
    """The ranks that reached the end of their first training step, in order."""
    return sorted(rank for rank in run.headers if last_step(run.of_rank(rank), run.graph, run.end) is not None)


def slowest_rank(run: Run) -> int:
    """The rank with the longest time to first batch, the lowest on a tie. Raises RecordError if no rank got there."""
    return max(_finished(run), key=lambda rank: (run.first_batch(rank), -rank))


def median_rank(run: Run) -> int:
    """The rank whose time to first batch is the median, the faster of the two middle ones for an even number.

    Raises RecordError if no rank reached its first batch.
    """
    ranks = sorted(_finished(run), key=lambda rank: (run.first_batch(rank), rank))
    return ranks[(len(ranks) - 1) // 2]


def _finished(run: Run) -> list[int]:
    ranks = finished_ranks(run)
    if not ranks:
        raise RecordError(run.path, f"no rank finished the step {run.end!r}, which ends a start-up")
    return ranks


def steps_of(run: Run, rank: int) -> list[Span]:
    """The steps and imports of a rank by start, without those that are part of another step."""
    return outer_steps(run.of_rank(rank))


def outer_steps(spans: Iterable[Span]) -> list[Span]:
    """The steps and imports among the spans of one rank by start, without those that are part of another step."""
    steps = [span for span in spans if span.kind in ("import", "step") and not span.step]
    return sorted(steps, key=lambda span: (span.start, -span.end))


class _Lines:
    """The steps of one rank, indexed for looking backwards."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self.steps = outer_steps(spans)
        self.by_name: dict[str, list[Span]] = {}
        for span in self.steps:
            self.by_name.setdefault(span.name, []).append(span)
        self.by_end = sorted(self.steps, key=lambda span: (span.end, -span.start))
        self._ends = [span.end for span in self.by_end]
        self._meetings: dict[tuple[str, float], list[Span]] = {}
        for span in sorted(spans, key=lambda span: span.start):
            if span.kind == "collective":
                step = self.around(span)
                if step is not None:
                    self._meetings.setdefault((step.name, step.start), []).append(span)

    def meetings(self, step: Span) -> Sequence[Span]:
        """The collectives inside a step, by start."""
        return self._meetings.get((step.name, step.start), ())

    def around(self, call: Span) -> Span | None:
        """The step that holds a collective: the one that issued it, or that one's outer step."""
        step = self.latest(call.step, call.start + _ROUNDING)
        if step is None or step.end < call.start:
            inside = (s for s in self.steps if s.lane == call.lane and s.start <= call.start <= s.end)
            step = next(inside, None)
        return step

    def ended_by(self, time: float) -> Iterable[Span]:
        """Steps that had ended at `time`, the last to end first."""
        for at in range(bisect_right(self._ends, time + _ROUNDING) - 1, -1, -1):
            yield self.by_end[at]

    def latest(self, name: str, before: float) -> Span | None:
        """The last span of that name that started before `before`."""
        named = [span for span in self.by_name.get(name, ()) if span.start < before]
        return named[-1] if named else None


class _Walk:
    def __init__(self, spans: Sequence[Span], graph: Graph | None, zero: Mapping[int, float], end: str) -> None:
        self.graph = graph
        self._end = end
        self.zero = zero
        self._spans: dict[int, list[Span]] = {}
        self._lines: dict[int, _Lines] = {}
        self._lengths: dict[int, dict[str, float]] = {}
        self._arrivals: dict[tuple[str, int], list[Span]] = {}
        for span in spans:
            self._spans.setdefault(span.rank, []).append(span)
            if span.kind == "collective" and span.sequence >= 0 and not span.async_op:
                self._arrivals.setdefault((span.group, span.sequence), []).append(span)

    def lines(self, rank: int) -> _Lines:
        if rank not in self._lines:
            self._lines[rank] = _Lines(self._spans[rank])
        return self._lines[rank]

    def back(self, rank: int, *, crossing: bool) -> list[Link]:
        links: list[Link] = []
        step = last_step(self._spans[rank], self.graph, self._end)
        until = step.end if step is not None else 0.0
        crossed = False
        while step is not None:
            meeting = self._decided_elsewhere(step, until) if crossing else None
            if meeting is not None:
                mine, last = meeting
                links.append(
                    Link(step.name, rank, step.start, until - step.start, mine.wait, last.rank, joined=last.start)
                )
                rank, until, crossed = last.rank, last.start, True
                step = self.lines(rank).around(last)
                if step is not None:
                    continue
            start = step.start if step is not None else until
            needed = self._needed(step, rank, start)
            ready = min(needed.end, start) if needed is not None else self.zero[rank]
            behind = self._holders(step, rank, ready, start) if start - ready > SKEW else ()
            queued = step is not None and (self.graph is not None or bool(behind))
            if step is not None:
                wait, queue = self._wait(step, until), start - ready if queued else 0.0
                link = Link(step.name, rank, start, until - start, wait, None, queue, behind, start)
                # The rank that came last is named by the link above: say it twice only if the step itself made it late.
                if not crossed or link.took > SKEW or link.queue > SKEW:
                    links.append(link)
            if not queued and start > ready:
                links.append(Link(UNNAMED, rank, ready, start - ready, joined=ready))
            step, until, crossed = needed, ready, False
        return links

    def _decided_elsewhere(self, step: Span, until: float) -> tuple[Span, Span] | None:
        """The last collective inside the step that waited for another rank, and that rank's call."""
        for mine in reversed(self.lines(step.rank).meetings(step)):
            if mine.wait <= SKEW or mine.end > until + _ROUNDING:
                continue
            last = max(self._calls(mine), key=lambda call: call.start)
            if last.rank != step.rank and last.start > mine.start:
                return mine, last
        return None

    def _calls(self, mine: Span) -> list[Span]:
        """The same meeting on the ranks that met `mine`."""
        return [call for call in self._arrivals[mine.group, mine.sequence] if call.start < mine.end] or [mine]

    def _wait(self, step: Span, until: float) -> float:
        """The wait of the part of a step that ended at `until`."""
        if until >= step.end - _ROUNDING:
            return min(step.wait, until - step.start)
        waits = (c.wait for c in self.lines(step.rank).meetings(step) if step.start <= c.start < until)
        return min(sum(waits), until - step.start)

    def _needed(self, step: Span | None, rank: int, start: float) -> Span | None:
        """The step before this one on the longest chain, None where only the process was needed."""
        lines = self.lines(rank)
        if step is not None and self.graph is not None and step.name in self.graph:
            edges = [edge for edge in self.graph.predecessors(step.name) if edge.kind != "resource"]
            spans = [lines.latest(edge.before, start) for edge in edges]
            found = [span for span in spans if span is not None]
            if found:
                lengths = self._chain_lengths(rank)
                return max(found, key=lambda span: (lengths[span.name], span.end))
            # Nothing in the graph comes before it: it needs what ran before the graph began, the imports at least.
            graph_began = min(span.start for span in lines.steps if span.name in self.graph)
            start = min(start, graph_began)
            return next((s for s in lines.ended_by(start) if s.name not in self.graph and s.start < start), None)
        last = next((span for span in lines.ended_by(start) if span.start < start), None)
        if last is not None and self.graph is not None and last.name in self.graph:
            lengths = self._chain_lengths(rank)
            ended = (span for span in lines.ended_by(start) if span.start < start and span.name in lengths)
            return max(ended, key=lambda span: (lengths[span.name], span.end))
        return last

    def _chain_lengths(self, rank: int) -> dict[str, float]:
        """Seconds of the longest chain that ends with each step of the graph, on this rank."""
        if rank not in self._lengths:
            assert self.graph is not None
            lengths: dict[str, float] = {}
            for name in self.graph.order():
                took = max((span.end - span.start for span in self.lines(rank).by_name.get(name, ())), default=0.0)
                needs = [edge.before for edge in self.graph.predecessors(name) if edge.kind != "resource"]
                lengths[name] = took + max((lengths[need] for need in needs), default=0.0)
            self._lengths[rank] = lengths
        return self._lengths[rank]

    def _holders(self, step: Span | None, rank: int, ready: float, start: float) -> tuple[str, ...]:
        """Steps in the way of a step since `ready`: on its lane or resource, or needed by it; else all that ran."""
        running = [s for s in self.lines(rank).steps if s.start < start - _ROUNDING and s.end > ready + _ROUNDING]
        running = [s for s in running if s is not step]
        if step is not None:
            in_the_way = [s for s in running if s.lane == step.lane or self._bound(s.name, step.name)]
            running = in_the_way or running
        return tuple(dict.fromkeys(s.name for s in running))

    def _bound(self, one: str, step: str) -> bool:
        """Whether `step` could not start while `one` ran, whatever their lanes."""
        if self.graph is None or one not in self.graph or step not in self.graph:
            return False
        uses = self.graph[one].uses, self.graph[step].uses
        shared = bool(set(uses[0]) & set(uses[1])) or "fork" in uses[0] + uses[1]
        return shared or any(edge.before == one for edge in self.graph.predecessors(step))
