"""Which rank failed first, as far as records tell, and what rank 0 says of it as it ends."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from initopt import report
from initopt.ends import End, ends, first_to_fail, who_failed
from initopt.record import Ended, Header, Trailer
from initopt.runs import Run


def end(rank: int, at: float, error: str = "", *, step: str = "", clock: str = "one") -> End:
    return End(rank, clock, at, Ended(error, at, step) if error else None)


ILL = "ValueError at inst.py:3: it is ill"
LATER = "RuntimeError at inst.py:9: Connection closed"


@pytest.mark.parametrize(
    ("known", "first", "said"),
    [
        ([end(0, 2, LATER), end(1, 1, ILL)], 1, [f"rank 1 failed first: {ILL}"]),
        ([end(0, 2, LATER), end(1, 1, ILL, step="model")], 1, [f"rank 1 failed first: {ILL} (in step 'model')"]),
        ([end(0, 1, ILL), end(1, 2, LATER)], 0, []),
        ([end(0, 2), end(1, 1, ILL)], 1, [f"rank 1 failed first: {ILL}"]),
        ([end(0, 2), end(1, 3)], None, []),
        # Together, or by two clocks: nobody can tell.
        ([end(0, 1.01, ILL), end(1, 1, ILL)], None, [f"rank 1 failed, too: {ILL}"]),
        ([end(0, 2, LATER), end(1, 1, ILL, clock="two")], None, [f"rank 1 failed, too: {ILL}"]),
    ],
)
def test_who_failed(known: list[End], first: int | None, said: list[str]) -> None:
    found = first_to_fail(known)
    assert (None if found is None else found.rank) == first
    assert list(who_failed(known, 2)) == said


def test_ranks_that_have_not_ended_yet_may_have_failed_before() -> None:
    known = [end(0, 2, LATER), end(2, 1, ILL)]
    assert list(who_failed(known, 4)) == [
        f"rank 2 failed before rank 0: {ILL}",
        "not known yet: how ranks 1, 3 ended",
    ]
    assert next(who_failed([end(0, 2), end(2, 1, ILL)], 4)) == f"rank 2 failed: {ILL}"
    assert list(who_failed([end(0, 2, LATER)], 2)) == ["not known yet: how rank 1 ended"]
    assert list(who_failed([end(0, 2)], 2)) == []


def test_only_a_whole_last_line_counts(tmp_path: Path) -> None:
    for rank in range(4):
        header = {"kind": "header", **asdict(Header(rank, 4, "job", "stock", "host", 1, 100.0, 1, clock="boot"))}
        trailer = {"kind": "trailer", **asdict(Trailer(rank, 3.0, 0.0, 1, Ended(ILL, 2.0) if rank else None))}
        lines = [json.dumps(line, separators=(",", ":")) for line in (header, trailer)]
        text = {2: lines[0] + "\n", 3: "\n".join(lines)}.get(rank, "\n".join([*lines, ""]))
        (tmp_path / f"rank{rank:05}.jsonl").write_text(text)
    assert ends(tmp_path) == (End(0, "boot", 103.0, None), End(1, "boot", 102.0, Ended(ILL, 2.0)))
    # The same is read from the whole record; rank 3's last line is half of one.
    view = report.summary(Run.load(tmp_path))
    assert "  rank 1: ValueError at inst.py:3: it is ill (after 2.0s)" in view.plain
    assert view.data["first_to_fail"] is None


def test_the_view_begins_with_the_rank_that_failed_first(tmp_path: Path) -> None:
    path = tmp_path / "0001"
    path.mkdir()
    for rank, ended in enumerate((Ended(LATER, 2.0), Ended(ILL, 1.0, "model"))):
        header = {"kind": "header", **asdict(Header(rank, 2, "job", "stock", "host", 1, 100.0, 1))}
        trailer = {"kind": "trailer", **asdict(Trailer(rank, 3.0, 0.0, 1, ended))}
        (path / f"rank{rank:05}.jsonl").write_text(f"{json.dumps(header)}\n{json.dumps(trailer)}\n")
    view = report.summary(Run.load(path))
    assert view.plain.splitlines()[2:5] == [
        "No rank reached its first batch. Rank 1 failed first:",
        "  rank 1: ValueError at inst.py:3: it is ill (in step 'model', after 1.0s)",
        "  rank 0: RuntimeError at inst.py:9: Connection closed (after 2.0s)",
    ]
    assert view.data["first_to_fail"] == 1
