"""Which ranks met in which order: one order on all, or the first place where they differ, with who met what."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from initopt.comm_elim.timeline import Problem, timeline
from initopt.record import Begun
from initopt.runs import Run
from tests.comm_elim.recorded import Script, stock


def parties(problem: Problem) -> list[tuple[tuple[int, ...], str, int]]:
    return [(party.ranks, party.what, party.number) for party in problem.parties]


def test_all_ranks_in_one_order(tmp_path: Path) -> None:
    run = stock().run(tmp_path)
    line = timeline(run)
    assert line.problems == ()
    assert len(line.meetings) == 18
    for rank in range(4):
        own = [s.start for met in line.meetings for s in met.spans if s.rank == rank]
        assert own == sorted(own)


def test_two_groups_in_two_orders(tmp_path: Path) -> None:
    script = Script(ranks=3)
    script.meet("barrier")
    for rank, groups in ((0, ("1", "2")), (1, ("1", "2")), (2, ("2", "1"))):
        for group in groups:
            script.meet("all_reduce", members=(rank,), group=group)
    (problem,) = timeline(script.run(tmp_path)).problems
    assert problem.text == "the ranks did not meet in one order"
    assert parties(problem) == [
        ((0, 1), "met in all_reduce on group 1", 2),
        ((2,), "met in all_reduce on group 2", 2),
    ]
    assert {party.call_site for party in problem.parties} == {"train.py:40"}


def test_groups_that_are_not_asked_for_alike(tmp_path: Path) -> None:
    script = Script()
    script.meet("init_process_group")
    for rank in range(4):
        pair = (0, 1) if rank < 2 else (2, 3)
        other = Script()
        other.now, other.spans, other.calls = dict(script.now), {r: [] for r in range(4)}, script.calls
        other.make_group("1", pair, ("train.py:12 main",))
        script.spans[rank] += other.spans[rank]
    (problem,) = timeline(script.run(tmp_path, steps=False)).problems
    assert problem.text == "new group 1 is not the same for all ranks"
    assert parties(problem) == [
        ((0, 1), "asked for one of ranks 0-1 (gloo)", 1),
        ((2, 3), "asked for one of ranks 2-3 (gloo)", 1),
    ]


def test_a_rank_that_makes_no_further_group(tmp_path: Path) -> None:
    script = Script(ranks=2)
    script.make_group("1", (0, 1))
    script.spans[1].pop()
    (problem,) = timeline(script.run(tmp_path)).problems
    assert ((1,), "asked for no further one", 1) in parties(problem)


def test_two_operations_in_one_meeting(tmp_path: Path) -> None:
    script = Script(ranks=2)
    script.meet("broadcast", members=(0,), root=0)
    script.meet("all_reduce", members=(1,))
    (problem,) = timeline(script.run(tmp_path)).problems
    assert parties(problem) == [
        ((0,), "met in broadcast on world with root 0", 1),
        ((1,), "met in all_reduce on world", 1),
    ]


def test_two_roots_in_one_broadcast(tmp_path: Path) -> None:
    script = Script(ranks=2)
    script.meet("broadcast", members=(0,), root=0)
    script.meet("broadcast", members=(1,), root=1)
    assert timeline(script.run(tmp_path)).problems


def test_a_rank_that_did_not_come(tmp_path: Path) -> None:
    script = Script(ranks=3)
    script.meet("barrier")
    script.meet("all_reduce", members=(0, 2))
    (problem,) = timeline(script.run(tmp_path, steps=False), training=True).problems
    assert problem.text == "a meeting was not complete"
    assert ((1,), "did not come: it made no further call", 0) in parties(problem)


def test_a_rank_that_was_stopped_while_it_waited(tmp_path: Path) -> None:
    script = Script(ranks=2)
    script.meet("barrier")
    script.meet("all_reduce", members=(0,))
    path = script.run(tmp_path, steps=False).path
    begun = {"kind": "begun", **asdict(Begun("broadcast", 9.0, "3", 0, "train.py:77", rank=1))}
    file = path / "rank00001.jsonl"
    file.write_text(file.read_text().replace('{"kind": "usage"', json.dumps(begun) + '\n{"kind": "usage"'))
    run = Run.load(path)
    assert [(one.op, one.rank) for one in run.stuck] == [("broadcast", 1)]
    (problem,) = timeline(run, training=True).problems
    assert ((1,), "was still in broadcast on group 3 when its record ends", 2) in parties(problem)


def test_a_call_that_ended_is_not_stuck(tmp_path: Path) -> None:
    path = stock().run(tmp_path).path
    file = path / "rank00001.jsonl"
    lines = file.read_text().splitlines()
    place = next(i for i, line in enumerate(lines) if '"barrier"' in line)
    lines.insert(place, json.dumps({"kind": "begun", **asdict(Begun("barrier", 1.0, rank=1))}))
    file.write_text("\n".join(lines) + "\n")
    assert Run.load(path).stuck == ()
