"""What the passes are given: the meetings of a run in order, which of them are known, and who is whose neighbour."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from initopt.comm_elim.known_calls import known, unknown_versions
from initopt.comm_elim.timeline import MAKES_GROUP, Met
from initopt.graph import Graph
from initopt.hooks import WORLD
from initopt.record import Span
from initopt.runs import Run


class Program:
    """The start-up of all ranks as the sequence of its meetings."""

    def __init__(self, run: Run, meetings: Sequence[Met]) -> None:
        self.run = run
        self.meetings = tuple(meetings)
        versions = run.headers[min(run.headers)].versions or {}
        self.unknown = unknown_versions(versions)
        """The libraries whose calls are not understood, as their versions are not those that were read."""
        self._places = {id(met): known(met, versions) for met in self.meetings}

    @property
    def graph(self) -> Graph | None:
        """The run's graph of steps, if it has one."""
        return self.run.graph

    def place(self, met: Met) -> str:
        """The name of the known place that a meeting was called from, or empty (see `known_calls`)."""
        return self._places[id(met)]

    def at(self, *places: str) -> list[Met]:
        """The meetings that were called from these known places, in order."""
        return [met for met in self.meetings if self.place(met) in places]

    def after(self, met: Met) -> Met | None:
        """The next meeting of every rank that came to this one, if it is the same on all of them."""
        found = {id(after): after for span in met.spans if (after := self._next(span)) is not None}
        whole = all(self._next(span) is not None for span in met.spans)
        return next(iter(found.values())) if whole and len(found) == 1 else None

    def calls_on(self, group: str) -> list[Span]:
        """All calls on a group, training included."""
        return [span for span in self.run.spans if span.kind == "collective" and span.group == group]

    def destroyed(self, group: str, before: float) -> bool:
        """Whether some rank destroyed the group, or all groups, before that time."""
        ended = (s for s in self.run.spans if s.op == "destroy_process_group" and s.group in (group, WORLD))
        return any(span.start < before for span in ended)

    def _next(self, span: Span) -> Met | None:
        line, place = self._lines[span.rank], self._at[span.rank, span.lane, span.start]
        return line[place + 1] if place + 1 < len(line) else None

    @cached_property
    def _lines(self) -> dict[int, list[Met]]:
        lines: dict[int, list[Met]] = {}
        for met in self.meetings:
            for span in met.spans:
                # A rank is no part of a group that others make.
                lines.setdefault(span.rank, []).append(met)
        return lines

    @cached_property
    def _at(self) -> dict[tuple[int, str, float], int]:
        found = {}
        for rank, line in self._lines.items():
            for place, met in enumerate(line):
                span = next(s for s in met.spans if s.rank == rank)
                found[rank, span.lane, span.start] = place
        return found


def group_of(met: Met) -> str:
    """The name of the group that met, for a table: its own, or the ranks of one that is being made."""
    if met.call.op in MAKES_GROUP:
        return met.made or "new"
    return met.call.group


def failed(met: Met) -> bool:
    """Whether the call of some rank ended with an error."""
    return any(span.error for span in met.spans)
