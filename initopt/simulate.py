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
    `graph.order()`. A step that uses `fork` runs alone; once it is ready, no step later in that order starts before it.
    With `cores` at most so many steps run at once. `serial` runs one step after the other in `graph.order()`.
    Raises GraphError where a step has no duration.
    """
    took = durations(graph, seconds)
    if cores is not None and cores < 1:
        raise ValueError(f"cores must be at least 1, not {cores}")
    starts = _serial(graph, took) if serial else _Schedule(graph, took, cores).starts()
    return [_span(graph, name, start, took[name]) for name, start in starts]


def _span(graph: Graph, name: str, start: float, took: float) -> Span:
    step = graph[name]
    return Span(name, start, start + took, lane=step.lane, stage=step.stage, call_site=step.call_site)


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
        self.cores = cores
        place = {name: i for i, name in enumerate(self.order)}
        self.took = [took[name] for name in self.order]
        self.lane = [graph[name].lane for name in self.order]
        self.alone = ["fork" in graph[name].uses for name in self.order]
        self.follows = [[place[edge.after] for edge in graph.successors(name)] for name in self.order]
        self.waits = [len(graph.predecessors(name)) for name in self.order]
        self.ready: dict[str, list[int]] = {lane: [] for lane in self.lane}
        self.busy: set[str] = set()
        self.heads: list[int] = []
        self.forks: list[int] = []
        self.running: list[tuple[float, int]] = []

    def starts(self) -> list[tuple[str, float]]:
        now = 0.0
        starts: list[tuple[str, float]] = []
        for i, count in enumerate(self.waits):
            if not count:
                self._becomes_ready(i)
        while True:
            for i in self._starting():
                starts.append((self.order[i], now))
                heapq.heappush(self.running, (now + self.took[i], i))
            if not self.running:
                return starts
            now = self.running[0][0]
            while self.running and self.running[0][0] == now:
                self._ends(heapq.heappop(self.running)[1])

    def _becomes_ready(self, i: int) -> None:
        heapq.heappush(self.ready[self.lane[i]], i)
        if self.alone[i]:
            heapq.heappush(self.forks, i)
        self._offers(self.lane[i])

    def _offers(self, lane: str) -> None:
        if lane not in self.busy and self.ready[lane]:
            heapq.heappush(self.heads, self.ready[lane][0])

    def _ends(self, i: int) -> None:
        self.busy.discard(self.lane[i])
        self._offers(self.lane[i])
        for j in self.follows[i]:
            self.waits[j] -= 1
            if not self.waits[j]:
                self._becomes_ready(j)

    def _starting(self) -> list[int]:
        """The steps that start now; marks their lanes busy."""
        starting: list[int] = []
        while self.heads:
            i = self.heads[0]
            lane = self.lane[i]
            if lane in self.busy or not self.ready[lane] or self.ready[lane][0] != i:
                heapq.heappop(self.heads)  # offered twice, or an earlier step of its lane became ready since
                continue
            count = len(self.running) + len(starting)
            alone = self.alone[self.running[0][1]] if self.running else bool(starting) and self.alone[starting[0]]
            if alone or (self.forks and i > self.forks[0]) or (self.alone[i] and count):
                break
            if self.cores is not None and count >= self.cores:
                break
            heapq.heappop(self.heads)
            heapq.heappop(self.ready[lane])
            if self.alone[i]:
                heapq.heappop(self.forks)
            self.busy.add(lane)
            starting.append(i)
        return starting
