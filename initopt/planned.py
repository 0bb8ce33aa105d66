"""A recorded start-up as its graph would schedule it: as it is, or with steps that take less.

It knows one rank at a time, and nobody waits for another: what a rank gains is not taken back by the slower ones, so a
saving is that of the rank that would be last.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from initopt.chain import SKEW, finished_ranks, steps_of
from initopt.runs import RecordError, last_step
from initopt.simulate import simulate

if TYPE_CHECKING:
    from initopt.record import Span
    from initopt.runs import Run


def planned(run: Run, rank: int, *, less: Mapping[str, float] | None = None) -> list[Span]:
    """The start-up of `rank` as the run's graph would schedule it, with the recorded times and nobody waiting.

    Steps outside the graph keep their place before or after it. A step in `less` takes so many seconds less. Times are
    seconds from the start of the rank's process. Raises RecordError for a run without a graph.
    """
    graph = run.graph
    if graph is None:
        raise RecordError(run.path, "there is no graph in this run, so nothing can be planned from it")
    left = dict(less or {})

    def placed(span: Span, start: float) -> Span:
        return replace(span, start=start, end=start + work(span) - _taken(span, left), wait=0.0)

    recorded = steps_of(run, rank)
    inside = [span for span in recorded if span.name in graph]
    began = min((span.start for span in inside), default=math.inf)
    ended = max((span.end for span in inside), default=math.inf)
    spans, clock = [], 0.0
    for span in recorded:
        if span.name not in graph and span.end <= began + SKEW:
            spans.append(placed(span, clock))
            clock = spans[-1].end
    took = per_step(run, rank, waits=False)
    simulated = simulate(graph, {name: max(0.0, took[name] - left.get(name, 0.0)) for name in took})
    spans += [replace(s, start=s.start + clock, end=s.end + clock, rank=rank) for s in simulated]
    clock = max((span.end for span in spans), default=0.0)
    for span in recorded:
        if span.name not in graph and span.start >= ended - SKEW:
            spans.append(placed(span, clock))
            clock = spans[-1].end
    return spans


def saving(run: Run, less: Mapping[int, Mapping[str, float]]) -> float:
    """By how many seconds the first batch would be there sooner if each rank's steps took `less[rank]` seconds less.

    Both are simulated: that of the ranks which would be last now, and then. Without a graph the steps of a rank are one
    sequence. Raises RecordError if no rank reached its first batch.
    """
    ranks = finished_ranks(run)
    if not ranks:
        raise RecordError(run.path, "no rank reached its first batch, so nothing can be saved before it")
    return max(_first_batch(run, rank, {}) for rank in ranks) - max(_first_batch(run, r, less[r]) for r in ranks)


def _first_batch(run: Run, rank: int, less: Mapping[str, float]) -> float:
    if run.graph is not None:
        last = last_step(planned(run, rank, less=less), run.graph, run.end)
        assert last is not None, "the rank has finished"
        return last.end
    recorded = run.first_batch(rank)
    steps = [span for span in steps_of(run, rank) if span.end <= run.zero[rank] + recorded + SKEW]
    left = dict(less)
    taken = sum(_taken(span, left) for span in steps)
    return recorded - sum(span.wait for span in steps) - taken


def _taken(span: Span, left: dict[str, float]) -> float:
    """Seconds that this step takes less: what is `left` to take from all of its name, as far as it has so many."""
    taken = min(work(span), left.get(span.name, 0.0))
    if taken:
        left[span.name] -= taken
    return taken


def per_step(run: Run, rank: int, *, waits: bool) -> dict[str, float]:
    """Seconds of every step of the run's graph on `rank`, with or without its `waits`; 0 where it did not run."""
    graph = run.graph
    took = dict.fromkeys(graph, 0.0) if graph is not None else {}
    for span in steps_of(run, rank):
        if span.name in took:
            took[span.name] += span.end - span.start if waits else work(span)
    return took


def work(span: Span) -> float:
    """Seconds of a step without its wait for other ranks, and without what it stood aside for."""
    return max(0.0, span.end - span.start - span.wait - span.paused)
