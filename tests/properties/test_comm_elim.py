"""Random programs of collectives: what the findings leave out changes nothing that any rank receives, nor the order.

Ranks hold numbers by name. A collective replaces what a rank holds by what it receives; between two of them a rank may
change a number of its own. The program is run, recorded as the recorder would, and run again without the calls that go
away: `local` and `drop` leave a rank with what it held, `fuse` sends what several broadcasts sent in the last of them.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from initopt.comm_elim.findings import Finding
from initopt.comm_elim.passes import settled
from initopt.comm_elim.program import Program
from initopt.comm_elim.resimulate import Call, Resimulation, call_of
from initopt.comm_elim.timeline import Met, timeline
from initopt.graph import Graph, Step
from initopt.hooks import LEFT_TOGETHER
from initopt.record import Span
from initopt.runs import Run
from tests.comm_elim.recorded import OWN, TABLES, Script
from tests.synthetic import write_run

RANKS = 3
NAMES = ("a", "b")
SENT = ("a0", "b0", "a1")
GROUPS = {"world": (0, 1, 2), "1": (0, 1), "2": (1, 2)}
Held = dict[int, dict[str, int]]


@dataclass(frozen=True)
class Do:
    """One instruction: `op` on a group with the number `name`, from a root; or rank `root` changes its own or looks."""

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
                # Another module may be sent to others, or from another rank.
                group = draw(st.sampled_from([group, group, "world"]))
                root = draw(st.sampled_from([*[root] * 3, *GROUPS[group]]).filter(GROUPS[group].__contains__))
                does.append(Do("broadcast", group, f"{name}{i}", root, TABLES))
                between = draw(st.sampled_from([None, None, "all_reduce", "all_gather", "barrier"]))
                if between is not None:
                    does.append(Do(between, draw(st.sampled_from(sorted(GROUPS))), f"{name}{i}", root))
        else:
            if op == "broadcast" and draw(st.booleans()):
                # Code that is not TorchRec's may look at a table first.
                does.append(Do("look", group, draw(st.sampled_from(SENT)), root))
            does.append(Do(op, group, name, root))
    for do in does:
        for rank in range(RANKS):
            # Tables differ between ranks, but need not.
            held[rank].setdefault(do.name, draw(st.sampled_from([rank, rank, 0])))
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
        elif do.op != "look":
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


@settings(max_examples=400)
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
        elif do.op == "look":
            assert do.name not in unsent
        elif number in gone:
            # On all members or none: else some would wait for ever.
            assert gone[number] == set(GROUPS[do.group])
            unsent |= {do.name} if number in late else set()
        else:
            for earlier in carried.get(number, ()):
                # One broadcast, so one group and one root.
                meet(replace(do, name=does[earlier].name), held)
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


@dataclass(frozen=True)
class Doing:
    """A step that meets others, or handles a file on a rank. It runs after the steps that it needs."""

    name: str
    op: str
    group: str
    root: int
    needs: tuple[str, ...]


@st.composite
def steps(draw: st.DrawFn) -> list[Doing]:
    """A rank hands a file to another one behind a barrier, some times over; what comes next may do as well."""
    found: list[Doing] = []

    def add(op: str, group: str, root: int, *needs: Doing) -> Doing:
        one = Doing(f"s{len(found)}", op, group, root, tuple(each.name for each in needs))
        found.append(one)
        return one

    for _ in range(draw(st.integers(1, 3))):
        group = draw(st.sampled_from(sorted(GROUPS)))
        early, late = draw(st.permutations(GROUPS[group]))[:2]
        written = add("file", group, early)
        behind = add("barrier", group, early, written)
        op = draw(st.sampled_from(["", "barrier", "all_reduce", "reduce_scatter_tensor", "broadcast"]))
        if op:
            other = draw(st.sampled_from([group, group, *sorted(GROUPS)]))
            root = draw(st.sampled_from(GROUPS[other]))
            following = add(op, other, root)
            behind = draw(st.sampled_from([behind, following]))
        add("file", group, late, behind)
    return found


def orders(does: list[Doing], gone: set[str]) -> set[tuple[str, str]]:
    """Which file steps come before which other rank's, whatever the timing, if these meetings are left out."""
    before = {one.name: {one.name} for one in does}
    for one in does:
        for needed in one.needs:
            before[one.name] |= before[needed]
    meetings = [one for one in does if one.op != "file"]
    files = [one for one in does if one.op == "file"]
    found = set()
    for first in files:
        for second in files:
            if first is second or first.root == second.root:
                continue
            # Meetings keep their order among each other, and a step its place in it.
            come = [at for at, met in enumerate(meetings) if first.name in before[met.name]]
            left = [at for at, met in enumerate(meetings) if met.name in before[second.name]]
            between = meetings[min(come) : max(left) + 1] if come and left else []
            if any(met.name not in gone and _joins(met, first.root, second.root) for met in between):
                found.add((first.name, second.name))
    return found


def _joins(met: Doing, early: int, late: int) -> bool:
    """Whether `late` leaves the meeting after `early` has come to it."""
    both = {early, late} <= set(GROUPS[met.group])
    return both and (met.op in LEFT_TOGETHER or (met.op == "broadcast" and met.root == early))


@settings(max_examples=300)
@given(steps())
def test_what_a_step_finds_on_disk_stays_in_order(does: list[Doing]) -> None:
    """A barrier orders what ranks do beside their meetings: it goes only where its neighbour does that, too."""
    script = Script(ranks=RANKS)
    for one in does:
        if one.op != "file":
            members = GROUPS[one.group]
            root = one.root if one.op == "broadcast" else -1
            shown = {rank: f"{one.name}{rank}" for rank in members}
            digests = "" if one.op == "barrier" else shown
            script.meet(one.op, group=one.group, members=members, step=one.name, digest=digests, root=root)
    graph = Graph(
        [
            *(Step(one.name, needs=one.needs, lane="io:disk" if one.op == "file" else "comms") for one in does),
            Step("first_step", lane="comms"),
        ],
        name="steps",
    )
    with tempfile.TemporaryDirectory() as folder:
        run = script.run(Path(folder), graph=graph, steps=False)
    findings, _ = found_in(run)
    gone = {finding.meetings[0].call.step for finding in findings if finding.verdict == "drop"}
    assert orders(does, gone) == orders(does, set())


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


@st.composite
def overlapped(draw: st.DrawFn) -> tuple[list[list[Span]], Graph]:
    """Steps on three lanes, with a meeting in some: one of the step's own lane, or of one that it hands it to."""
    parts = st.integers(1, 8)
    free: Counter[tuple[int, str]] = Counter()
    ends: dict[tuple[int, str], int] = {}
    calls: Counter[str] = Counter()
    spans: list[list[Span]] = [[] for _ in range(RANKS)]
    found: list[Step] = []
    for number in range(draw(st.integers(1, 12))):
        lane = draw(st.sampled_from(["main", "comms", "io:a"]))
        some = [one.name for one in found]
        step = Step(
            f"s{number}", lane=lane, needs=tuple(draw(st.sets(st.sampled_from(some), max_size=2)) if some else ())
        )
        group = draw(st.sampled_from(["", *sorted(GROUPS)]))
        other = draw(st.sampled_from([lane, lane, "comms"]))
        came: dict[int, tuple[int, int]] = {}
        for rank in range(RANKS):
            begun = max([free[rank, lane], *(ends[rank, name] for name in step.needs)]) + draw(parts)
            came[rank] = begun, max(begun, free[rank, other]) + draw(parts)
        took, members = draw(parts), GROUPS.get(group, ())
        met = max((came[rank][1] for rank in members), default=0) + took
        for rank in range(RANKS):
            begun, arrived = came[rank]
            end = (met if rank in members else arrived) + draw(parts)
            spans[rank].append(Span(step.name, begun / 8, end / 8, rank, lane))
            if rank in members:
                about = {"step": step.name, "op": "barrier", "group": group, "sequence": calls[group]}
                spans[rank].append(Span("barrier", arrived / 8, met / 8, rank, other, "collective", **about))
                free[rank, other] = met
            free[rank, lane] = ends[rank, step.name] = end
        calls[group] += 1
        found.append(step)
    return spans, Graph(found, name="steps")


@settings(max_examples=300)
@given(overlapped(), st.data())
def test_what_is_saved_is_what_the_whole_start_up_again_says(
    start: tuple[list[list[Span]], Graph], data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = Run.load(write_run(Path(folder), start[0], graph=start[1]))
    again = Resimulation(run)
    calls = [call_of(span) for span in run.spans if span.kind == "collective"]
    one = st.sets(st.sampled_from(calls)) if calls else st.just(set())
    choices = data.draw(st.lists(one, max_size=4))
    whole = max(again.first_batches(()).values())
    plain = [whole - max(again.first_batches(choice).values()) for choice in choices]
    assert again.savings(choices) == pytest.approx(plain, abs=1e-9)
