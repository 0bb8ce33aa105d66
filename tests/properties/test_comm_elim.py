"""Random programs of collectives: what the findings leave out changes nothing that any rank receives, nor the order.

Ranks hold numbers by name. A collective replaces what a rank holds by what it receives; between two of them a rank may
change a number of its own. The program is run, recorded as the recorder would, and run again without the calls that go
away: `local` and `drop` leave a rank with what it held, `fuse` sends what several broadcasts sent in the last of them.
"""

from __future__ import annotations

import hashlib
import tempfile
from dataclasses import dataclass
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from initopt.comm_elim.findings import Finding
from initopt.comm_elim.passes import settled
from initopt.comm_elim.program import Program
from initopt.comm_elim.resimulate import Call, Resimulation, call_of
from initopt.comm_elim.timeline import Met, timeline
from initopt.runs import Run
from tests.comm_elim.recorded import OWN, TABLES, Script

RANKS = 3
NAMES = ("a", "b")
SENT = ("a0", "b0", "a1")
GROUPS = {"world": (0, 1, 2), "1": (0, 1), "2": (1, 2)}
Held = dict[int, dict[str, int]]


@dataclass(frozen=True)
class Do:
    """One instruction: `op` on a group with the number `name`, from a root; or rank `root` changes its own number."""

    op: str
    group: str
    name: str
    root: int
    place: tuple[str, ...] = OWN


@st.composite
def programs(draw: st.DrawFn) -> tuple[Held, list[Do]]:
    held = {rank: {name: draw(st.integers(0, 1)) for name in NAMES} for rank in range(RANKS)}
    does = []
    for _ in range(draw(st.integers(1, 10))):
        op = draw(st.sampled_from(["broadcast", "broadcast", "all_gather", "all_reduce", "barrier", "change", "table"]))
        group = draw(st.sampled_from(sorted(GROUPS)))
        root = draw(st.sampled_from(GROUPS[group]))
        # Other meetings may carry a table, too. No rank changes one between two that are sent.
        name = draw(st.sampled_from(NAMES if op in ("change", "table") else NAMES + SENT))
        if op == "table":
            # TorchRec fills a table, sends it, and goes on with the next one: each has a name of its own.
            for i in range(draw(st.integers(1, 3))):
                does.append(Do("broadcast", group, f"{name}{i}", root, TABLES))
                between = draw(st.sampled_from([None, None, "all_reduce", "all_gather", "barrier"]))
                if between is not None:
                    does.append(Do(between, draw(st.sampled_from(sorted(GROUPS))), f"{name}{i}", root))
        else:
            does.append(Do(op, group, name, root))
    for do in does:
        for rank in range(RANKS):
            held[rank].setdefault(do.name, draw(st.integers(0, 1)))
    return held, does


def meet(do: Do, held: Held) -> None:
    """Let the members receive."""
    members = GROUPS[do.group]
    values = [held[rank][do.name] for rank in members]
    for rank in members:
        if do.op == "broadcast":
            held[rank][do.name] = held[do.root][do.name]
        elif do.op == "all_reduce":
            held[rank][do.name] = sum(values)
        elif do.op == "all_gather":
            held[rank][do.name] = values[0] if len(set(values)) == 1 else hash(tuple(values)) % 1000


def digest(value: int) -> str:
    return hashlib.sha256(str(value).encode()).hexdigest()[:16]


def recorded(held: Held, does: list[Do], root: Path) -> tuple[Run, list[Held], dict[Call, int]]:
    """The run, what all ranks held after each instruction, and which instruction each call was."""
    held = {rank: dict(of_rank) for rank, of_rank in held.items()}
    script = Script(ranks=RANKS)
    after, calls = [], {}
    for number, do in enumerate(does):
        if do.op == "change":
            held[do.root][do.name] += 1
        else:
            before = {rank: digest(held[rank][do.name]) for rank in GROUPS[do.group]}
            rooted = do.root if do.op == "broadcast" else -1
            shown = "" if do.op == "barrier" else before
            script.meet(do.op, do.place, group=do.group, members=GROUPS[do.group], digest=shown, root=rooted)
            meet(do, held)
            for rank in GROUPS[do.group]:
                calls[call_of(script.spans[rank][-1])] = number
        after.append({rank: dict(of_rank) for rank, of_rank in held.items()})
    return script.run(root), after, calls


def found_in(run: Run) -> tuple[list[Finding], tuple[Met, ...]]:
    line = timeline(run)
    assert line.problems == ()
    return settled(Program(run, line.meetings)), line.meetings


@settings(max_examples=150)
@given(programs())
def test_what_ranks_receive_stays_the_same(program: tuple[Held, list[Do]]) -> None:
    start, does = program
    with tempfile.TemporaryDirectory() as folder:
        run, after, calls = recorded(start, does, Path(folder))
    findings, _ = found_in(run)
    gone: dict[int, set[int]] = {}
    for finding in findings:
        for span in finding.calls:
            gone.setdefault(calls[call_of(span)], set()).add(span.rank)
    carried: dict[int, list[int]] = {}
    for finding in findings:
        if finding.verdict == "fuse":
            numbers = [calls[call_of(met.call)] for met in finding.meetings]
            carried[numbers[-1]] = numbers[:-1]
    late = {number for numbers in carried.values() for number in numbers}
    held = {rank: dict(of_rank) for rank, of_rank in start.items()}
    unsent: set[str] = set()
    for number, do in enumerate(does):
        if do.op == "change":
            held[do.root][do.name] += 1
        elif number in gone:
            # On all members or none: else some would wait for ever.
            assert gone[number] == set(GROUPS[do.group])
            unsent |= {do.name} if number in late else set()
        else:
            for earlier in carried.get(number, ()):
                meet(does[earlier], held)
                unsent.discard(does[earlier].name)
            # What others were to have been sent by now is not read.
            assert do.op == "barrier" or do.name not in unsent
            meet(do, held)
        for rank in range(RANKS):
            for name, value in held[rank].items():
                assert name in unsent or value == after[number][rank][name]
    assert held == after[-1]


@settings(max_examples=150)
@given(programs())
def test_the_order_stays_one_on_all_ranks(program: tuple[Held, list[Do]]) -> None:
    start, does = program
    with tempfile.TemporaryDirectory() as folder:
        run, _, calls = recorded(start, does, Path(folder))
    findings, meetings = found_in(run)
    gone = {call_of(span) for finding in findings for span in finding.calls}
    left = [met for met in meetings if not any(call_of(span) in gone for span in met.spans)]
    # What is left on each rank is what it did before, in that order, and no meeting has lost some of its members.
    assert all(not any(call_of(span) in gone for span in met.spans) for met in left)
    assert sum(len(met.spans) for met in left) == len(calls) - len(gone)
    for rank in range(RANKS):
        own = [calls[call_of(span)] for met in left for span in met.spans if span.rank == rank]
        assert own == sorted(own)


@settings(max_examples=100)
@given(programs(), st.data())
def test_leaving_calls_out_makes_no_start_up_longer(program: tuple[Held, list[Do]], data: st.DataObject) -> None:
    start, does = program
    with tempfile.TemporaryDirectory() as folder:
        run, _, calls = recorded(start, does, Path(folder))
    again = Resimulation(run)
    whole = again.first_batches(())
    if not calls:
        return
    some = data.draw(st.sets(st.sampled_from(sorted(set(calls.values())))))
    shorter = again.first_batches({call for call, number in calls.items() if number in some})
    assert all(shorter[rank] <= whole[rank] + 1e-9 for rank in whole)
