"""The schedule of a graph without running it: spans computed from the seconds that each step takes.

It knows lanes, edges and cores, not how ranks wait for each other nor how steps slow each other down.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from initopt.graph import Graph, durations
from initopt.record import Span


def simulate(
    graph: Graph, seconds: Mapping[str, float], *, serial: bool = False, cores: int | None = None
) -> list[Span]:
    """The spans of one start-up by start time, in which step `s` takes `seconds[s]`.

    Each lane runs one step at a time: of those that are ready (every predecessor has ended) the earliest in
    `graph.order()`. A step that uses `fork` runs alone; once it is ready, nothing else starts before it. Steps that
    pause make way for it at once, and take that much longer. With `cores` at most so many steps run at once. `serial`
    runs one step after the other in `graph.order()`. Raises GraphError where a step has no duration.
    """
    took = durations(graph, seconds)
    if cores is not None and cores < 1:
        raise ValueError(f"cores must be at least 1, not {cores}")
    if serial:
        return [_span(graph, name, start, start + took[name]) for name, start in _serial(graph, took)]
    schedule = _Schedule(graph, took, cores)
    return [_span(graph, name, start, schedule.ends[name]) for name, start in schedule.starts()]


def _span(graph: Graph, name: str, start: float, end: float) -> Span:
    step = graph[name]
    return Span(name, start, end, lane=step.lane, stage=step.stage, call_site=step.call_site)


def _serial(graph: Graph, took: Mapping[str, float]) -> list[tuple[str, float]]:
    now = 0.0
    starts = []
    for name in graph.order():
        starts.append((name, now))
        now += took[name]
    return starts


class _Schedule:
    """One pass of events. Steps are numbered by their place in `order()`, so that the earliest is the smallest."""

    def __init__(self, graph: Graph, took: Mapping[str, float], cores: int | None) -> None:
        self.order = graph.order()
        self.cores = len(self.order) if cores is None else cores
        place = {name: i for i, name in enumerate(self.order)}
        self.took = [took[name] for name in self.order]
        self.lane = [graph[name].lane for name in self.order]
        self.forks = ["fork" in graph[name].uses for name in self.order]
        self.pauses = [graph[name].pauses for name in self.order]
        self.follows = [[place[edge.after] for edge in graph.successors(name)] for name in self.order]
        self.waits = [len(graph.predecessors(name)) for name in self.order]
        self.ready: dict[str, list[int]] = {lane: [] for lane in self.lane}
        self.busy: set[str] = set()
        self.offered: list[int] = []
        self.alone: int | None = None
        self.running: list[tuple[float, int]] = []
        self.now = 0.0
        self.started: list[tuple[str, float]] = []
        self.ends: dict[str, float] = {}

    def starts(self) -> list[tuple[str, float]]:
        for i, count in enumerate(self.waits):
            if not count:
                self._becomes_ready(i)
        self._start_what_can()
        while self.running:
            self.now = self.running[0][0]
            while self.running and self.running[0][0] == self.now:
                self._end(heapq.heappop(self.running)[1])
            self._start_what_can()
        return self.started

    def _becomes_ready(self, i: int) -> None:
        if self.forks[i]:
            # one at a time: the resource `fork` chains its users
            self.alone = i
        else:
            heapq.heappush(self.ready[self.lane[i]], i)
            self._offer(self.lane[i])

    def _offer(self, lane: str) -> None:
        if self.ready[lane]:
            heapq.heappush(self.offered, self.ready[lane][0])

    def _end(self, i: int) -> None:
        self.busy.discard(self.lane[i])
        if self.alone == i:
            self.alone = None
        self._offer(self.lane[i])
        for j in self.follows[i]:
            self.waits[j] -= 1
            if not self.waits[j]:
                self._becomes_ready(j)

    def _start_what_can(self) -> None:
        if self.alone is not None:
            others = [i for _, i in self.running]
            if self.alone not in others and all(self.pauses[i] for i in others):
                self.running = [(end + self.took[self.alone], i) for end, i in self.running]
                self.ends |= {self.order[i]: end for end, i in self.running}
                self._start(self.alone)
            return
        while self.offered and len(self.running) < self.cores:
            i = heapq.heappop(self.offered)
            ready = self.ready[self.lane[i]]
            # an offer is void where the lane is busy, or a step before it became ready since
            if self.lane[i] not in self.busy and ready and ready[0] == i:
                heapq.heappop(ready)
                self._start(i)

    def _start(self, i: int) -> None:
        self.busy.add(self.lane[i])
        self.started.append((self.order[i], self.now))
        self.ends[self.order[i]] = self.now + self.took[i]
        heapq.heappush(self.running, (self.ends[self.order[i]], i))
