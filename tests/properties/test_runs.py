"""Whatever the ranks did: took = work + wait, somebody was last, and nobody waits for a rank it did not meet."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given
from hypothesis import strategies as st

from initopt.record import Header, Span
from initopt.runs import Run

# Whole 64ths of a second are exact as floats, so the axis can be moved without rounding.
TICKS = st.integers(0, 64_000).map(lambda n: n / 64)


@st.composite
def meetings(draw: st.DrawFn) -> list[list[tuple[float, float]]]:
    """For each meeting in turn, and each rank, the gap before it and how much later than the last arrival it left."""
    ranks = draw(st.integers(1, 4))
    one = st.lists(st.tuples(TICKS, TICKS), min_size=ranks, max_size=ranks)
    return draw(st.lists(one, min_size=1, max_size=5))


@given(meetings(), st.lists(TICKS, min_size=4, max_size=4))
def test_waits_of_synchronous_meetings(gaps: list[list[tuple[float, float]]], starts: list[float]) -> None:
    ranks = range(len(gaps[0]))
    clock = {rank: starts[rank] for rank in ranks}
    spans: dict[int, list[Span]] = {rank: [] for rank in ranks}
    waits = {}
    for sequence, meeting in enumerate(gaps):
        arrived = {rank: clock[rank] + meeting[rank][0] for rank in ranks}
        last = max(arrived.values())
        for rank in ranks:
            clock[rank] = last + meeting[rank][1]
            begin, end = arrived[rank] - starts[rank], clock[rank] - starts[rank]
            spans[rank].append(
                Span("barrier", begin, end, kind="collective", op="barrier", group="world", sequence=sequence)
            )
            waits[rank, sequence] = last - arrived[rank]
    with TemporaryDirectory() as folder:
        for rank in ranks:
            whole = Span("all", 0.0, clock[rank] - starts[rank])
            write(Path(folder), rank, len(ranks), starts[rank], [*spans[rank], whole])
        run = Run.load(folder)
    assert run.warnings == ()
    assert run.zero == {rank: starts[rank] - min(starts[rank] for rank in ranks) for rank in ranks}
    assert {(s.rank, s.sequence): s.wait for s in run.spans if s.kind == "collective"} == waits
    for span in run.spans:
        assert 0 <= span.wait <= span.end - span.start
        if span.kind == "collective":
            assert min(s.wait for s in run.meeting(span)) == 0
        else:
            assert span.wait == sum(wait for (rank, _), wait in waits.items() if rank == span.rank)


def write(folder: Path, rank: int, world_size: int, start: float, spans: list[Span]) -> None:
    head = Header(rank, world_size, "dlrm", "stock", "host", 1, start, 2)
    trailer = {"kind": "trailer", "rank": rank, "end": 0.0, "own_cost": 0.0, "peak_rss": 0}
    records = [{"kind": "header", **asdict(head)}, *({**asdict(s), "rank": rank} for s in spans), trailer]
    (folder / f"rank{rank:05}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
