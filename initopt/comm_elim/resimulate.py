"""When each rank would have had its first batch if some calls had not been made.

Every recorded start, end and arrival gets the time that follows from what it waited for. What took a while takes as
long, a step starts when what it needed is done, a meeting ends when the last of those that it had waited for has come.
So a wait that is no longer spent at one meeting turns up at the next, and what is saved is less than what a call took.
It does not know how steps on other lanes share the cores.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from initopt.record import Span
from initopt.runs import Run, last_step

Call = tuple[int, str, float]
"""A call by rank, lane and start, which no two of a run share."""

_TICKS = 10**12
"""Of a second. Whole numbers add up to the same in whatever order."""

_CLOSE = 1e-6


def call_of(span: Span) -> Call:
    """What names the call of this span."""
    return span.rank, span.lane, span.start


@dataclass(slots=True)
class _Event:
    """A moment of one rank: at the earliest `gap` ticks after the last of `after`.

    The end of a call has its own arrival as `arrival`: if the call is left out it ends when it begins.
    """

    rank: int
    time: int
    after: list[int] = field(default_factory=list)
    gap: int = 0
    call: Call | None = None
    arrival: int = -1


class Resimulation:
    """A recorded start-up that can be run again with calls left out. With none left out it is as recorded."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._events: list[_Event] = []
        self._lanes: dict[tuple[int, str], list[int]] = {}
        self._steps: dict[int, list[tuple[Span, int, int]]] = {rank: [] for rank in run.headers}
        self._last: dict[int, int] = {}
        arrivals: dict[Call, int] = {}
        departures: dict[Call, int] = {}
        for rank in run.headers:
            self._read(rank, arrivals, departures)
        for rank in run.headers:
            self._connect(rank, arrivals, departures)
        for span in run.spans:
            if call_of(span) in departures and span.kind == "collective":
                self._meet(span, arrivals, departures)
        self._order = self._sorted()

    def first_batches(self, left_out: Collection[Call]) -> Mapping[int, float]:
        """Seconds from the process start of each rank to the end of its start-up without these calls.

        Of a rank that did not come to that end, to the last that was recorded of it.
        """
        times = self._times(set(left_out))
        return {rank: (times[place] - self._zero(rank)) / _TICKS for rank, place in self._last.items()}

    def savings(self, choices: Sequence[Collection[Call]]) -> list[float]:
        """Seconds by which the slowest rank would have been done sooner, for each choice of calls to leave out."""
        some = set().union(*choices)
        if not self._last or not some:
            return [0.0] * len(choices)
        reduced = _Reduced(self._events, self._order, self._times(set()), self._times(some), some)
        ends = {place: self._zero(rank) for rank, place in self._last.items()}
        return [saved / _TICKS for saved in reduced.savings(ends, choices)]

    def _zero(self, rank: int) -> int:
        return round(self._run.zero[rank] * _TICKS)

    def _times(self, gone: Collection[Call]) -> list[int]:
        """When each event happens without these calls."""
        times = [0] * len(self._events)
        for place in self._order:
            event = self._events[place]
            if event.arrival >= 0 and event.call in gone:
                times[place] = times[event.arrival]
            else:
                times[place] = max((times[p] for p in event.after), default=event.time - event.gap) + event.gap
        return times

    def _read(self, rank: int, arrivals: dict[Call, int], departures: dict[Call, int]) -> None:
        """The events of each lane of a rank, in their order."""
        spans = self._run.of_rank(rank)
        outer = [s for s in spans if s.kind in ("import", "step") and not s.step]
        calls = [s for s in spans if s.kind == "collective"]
        by_lane: dict[str, list[tuple[float, int, float, Span]]] = {}
        for span in (*outer, *calls):
            inner = int(span.kind == "collective")
            found = by_lane.setdefault(span.lane, [])
            # What begins at the same moment: the step, then its call; what ends: the call, then its step. An end comes
            # before a beginning, unless it is that of the same thing.
            instant = span.end <= span.start
            found.append((span.start, 2 + inner, span.start, span))
            found.append((span.end, (4 + 1 - inner) if instant else 1 - inner, span.start, span))
        ends: dict[int, int] = {}
        for lane, moments in by_lane.items():
            line = self._lanes[rank, lane] = []
            begun: dict[int, int] = {}
            for time, _, _, span in sorted(moments, key=lambda moment: moment[:3]):
                place = len(self._events)
                self._events.append(_Event(rank, round(time * _TICKS)))
                line.append(place)
                if id(span) not in begun:
                    begun[id(span)] = place
                    if span.kind == "collective":
                        arrivals[call_of(span)] = place
                elif span.kind == "collective":
                    departures[call_of(span)] = place
                else:
                    self._steps[rank].append((span, begun[id(span)], place))
                    ends[id(span)] = place
        last = last_step(spans, self._run.graph)
        if last is not None and id(last) in ends:
            self._last[rank] = ends[id(last)]
        elif self._steps[rank]:
            self._last[rank] = max((end for _, _, end in self._steps[rank]), key=lambda p: self._events[p].time)

    def _connect(self, rank: int, arrivals: Mapping[Call, int], departures: Mapping[Call, int]) -> None:
        """What each event of a rank comes after: the one before on its lane, and what a step needs or holds."""
        graph = self._run.graph
        for (of_rank, _), line in self._lanes.items():
            if of_rank == rank:
                for before, after in itertools.pairwise(line):
                    self._events[after].after.append(before)
        by_name = {span.name: end for span, _, end in self._steps[rank]}
        steps = sorted(self._steps[rank], key=lambda step: step[0].end)
        calls: dict[str, list[Span]] = {}
        for call in self._run.of_rank(rank):
            if call.kind == "collective":
                calls.setdefault(call.step, []).append(call)
        for span, start, end in self._steps[rank]:
            known = graph is not None and span.name in graph
            needed = [edge.before for edge in graph.predecessors(span.name)] if known and graph is not None else []
            places = [by_name[name] for name in needed if name in by_name]
            if not places:
                # Nothing says what it needed: the last that had ended, such as the imports.
                ended = steps[: bisect_right(steps, span.start + _CLOSE, key=lambda step: step[0].end)][-2:]
                places = [other for _, _, other in ended if other != end][-1:]
            self._needs(start, places)
            inside = (c for c in calls.get(span.name, ()) if span.start <= c.start and c.end <= span.end)
            elsewhere = [c for c in inside if c.lane != span.lane]
            self._needs(end, [departures[call_of(call)] for call in elsewhere])
            for call in elsewhere:
                line = self._lanes[rank, call.lane]
                if arrivals[call_of(call)] == line[0]:
                    self._needs(line[0], [start])
        for (of_rank, _), line in self._lanes.items():
            if of_rank == rank:
                for place in line:
                    event = self._events[place]
                    event.gap = event.time - max((self._events[p].time for p in event.after), default=event.time)

    def _needs(self, place: int, needed: Iterable[int]) -> None:
        event = self._events[place]
        until = event.time + _CLOSE * _TICKS
        event.after += [p for p in needed if self._events[p].time <= until and p not in event.after]

    def _meet(self, span: Span, arrivals: Mapping[Call, int], departures: Mapping[Call, int]) -> None:
        """A call ends so long after the last of those came that it waited for."""
        call = call_of(span)
        event = self._events[departures[call]]
        event.call, event.arrival = call, arrivals[call]
        met = [other for other in self._run.meeting(span) if other.start <= span.end]
        event.after = [arrivals[call_of(other)] for other in met if call_of(other) in arrivals]
        event.gap = event.time - max((self._events[p].time for p in event.after), default=event.time)

    def _sorted(self) -> list[int]:
        """All events, each behind what it comes after."""
        follows: list[list[int]] = [[] for _ in self._events]
        waits = [0] * len(self._events)
        for place, event in enumerate(self._events):
            waits[place] = len(event.after)
            for before in event.after:
                follows[before].append(place)
        ready = [place for place, count in enumerate(waits) if not count]
        for place in ready:
            for after in follows[place]:
                waits[after] -= 1
                if not waits[after]:
                    ready.append(after)
        if len(ready) < len(self._events):
            # Two clocks that disagree can make a circle: then nothing can be said of what would be saved.
            self._last = {}
        return ready


_After = tuple[int, int]
"""A node by its number, and the ticks after it."""


@dataclass(frozen=True, slots=True)
class _Node:
    """An event at `floor`, or the last of `after` if that is later. Without `call` it comes with its `arrival`."""

    floor: int
    after: list[_After]
    call: Call | None = None
    arrival: list[_After] = field(default_factory=list)


class _Reduced:
    """The part of a start-up that says how much is saved, for any choice among some calls.

    An event comes no later than with all calls (`whole`) and no sooner than without any of these (`least`). So what is
    too early even at its latest is never waited for, what comes at one time in any case is a number, and in a chain of
    events that wait for one other each only the first has to be known. The events that are left are the nodes.
    """

    def __init__(
        self, events: Sequence[_Event], order: Sequence[int], whole: list[int], least: list[int], some: Collection[Call]
    ) -> None:
        self._whole, self._least = whole, least
        self._nodes: list[_Node] = []
        self._times: list[int] = []
        self._of: dict[int, _After] = {}
        for place in order:
            if whole[place] == least[place]:
                continue
            event = events[place]
            start = max(least[p] for p in event.after)
            after = [(at, ticks + event.gap) for p in event.after if whole[p] > start for at, ticks in [self._of[p]]]
            if event.arrival >= 0 and event.call in some:
                arrival = [self._of[event.arrival]] if event.arrival in self._of else []
                self._nodes.append(_Node(start + event.gap, after, event.call, arrival))
            elif len(after) == 1:
                self._of[place] = after[0]
                continue
            else:
                self._nodes.append(_Node(start + event.gap, after))
            self._of[place] = len(self._times), 0
            self._times.append(whole[place])

    def savings(self, ends: Mapping[int, int], choices: Iterable[Collection[Call]]) -> list[int]:
        """Ticks by which the last of `ends` is sooner, each counted from its own zero, for each choice."""
        last = max(self._whole[place] - zero for place, zero in ends.items())
        floor = max(self._least[place] - zero for place, zero in ends.items())
        earliest = min(self._least)
        after = [(*self._of[place], zero) for place, zero in ends.items() if self._whole[place] - zero > floor]
        first = {node.call: number for number, node in reversed(list(enumerate(self._nodes)))}
        saved = []
        for choice in choices:
            gone = set(choice) if after else set()
            times = self._times.copy()
            for number in range(min((first[call] for call in gone if call in first), default=len(times)), len(times)):
                node = self._nodes[number]
                # An arrival that is a number is in the floors of what comes after it.
                value, needed = (earliest, node.arrival) if node.call in gone else (node.floor, node.after)
                for at, ticks in needed:
                    if times[at] + ticks > value:
                        value = times[at] + ticks
                times[number] = value
            saved.append(last - max([floor, *(times[at] + ticks - zero for at, ticks, zero in after)]))
        return saved
