"""All findings about a recorded start-up: every meeting in one of them, each with what its absence would save."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from initopt.chain import finished_ranks, median_rank
from initopt.comm_elim.drop import drop
from initopt.comm_elim.findings import Finding, at, calls_in, kept
from initopt.comm_elim.fuse import fuse
from initopt.comm_elim.local import local
from initopt.comm_elim.members_only import members_only
from initopt.comm_elim.program import Program
from initopt.comm_elim.resimulate import Resimulation, call_of
from initopt.comm_elim.reuse import reuse
from initopt.comm_elim.timeline import MAKES_GROUP, Met, Problem, timeline
from initopt.comm_elim.verify_once import verify_once
from initopt.hooks import BARRIERS
from initopt.runs import Run

Pass = Callable[[Program], list[Finding]]

PASSES: tuple[Pass, ...] = (reuse, local, members_only, verify_once, fuse, drop)
"""In this order: what one has found is not the next one's."""

_KNOWN_KEPT: Mapping[str, str] = {
    "plan_check": "shows that all ranks hold one plan",
    "agreement": "checks what was left out",
    "groups_2d": "2D groups: no rewrite knows them yet",
}


@dataclass(frozen=True)
class Found:
    """The findings of a run, the ones that save most first; `saving` is that of all together, in seconds, an estimate.

    `rank` is the one whose figures stand for all, the median, else the lowest: those of one rank add up. `problems` are
    places where the ranks did not meet in one order: then nothing is proven, and all is kept.
    """

    findings: tuple[Finding, ...]
    saving: float
    rank: int
    problems: tuple[Problem, ...] = ()


def find(run: Run) -> Found:
    """Look at all meetings before the first training step."""
    rank = median_rank(run) if finished_ranks(run) else min(run.headers)
    line = timeline(run)
    program = Program(run, line.meetings)
    if line.problems:
        why = "the ranks did not meet in one order (initopt verify)"
        said = [kept(name, meetings, why) for name, meetings in _by_call(program.meetings)]
        return Found(tuple(_named(said)), 0.0, rank, line.problems)
    findings = settled(program)
    *each, together = Resimulation(run).savings([*(_gone([one]) for one in findings), _gone(findings)])
    findings = [replace(one, saving=saving) for one, saving in zip(findings, each, strict=True)]
    findings.sort(key=lambda one: (-one.saving, one.verdict == "keep", -one.took(rank), one.meetings[0].call.start))
    return Found(tuple(_named(findings)), together, rank)


def settled(program: Program) -> list[Finding]:
    """Every meeting in exactly one finding, or in two if one leaves out the calls of ranks that another does not."""
    taken: set[tuple[int, str, float]] = set()
    found: list[Finding] = []
    reasons: dict[int, Finding] = {}
    for one_pass in PASSES:
        for finding in one_pass(program):
            if finding.verdict == "keep":
                for met in finding.meetings:
                    reasons.setdefault(id(met), finding)
            elif taken.isdisjoint(map(call_of, finding.calls)):
                taken.update(map(call_of, calls_in(finding.meetings) if finding.verdict == "fuse" else finding.calls))
                found.append(finding)
    left = [met for met in program.meetings if any(call_of(span) not in taken for span in met.spans)]
    given: dict[int, tuple[Finding, list[Met]]] = {}
    plain: list[Met] = []
    for met in left:
        if id(met) in reasons:
            given.setdefault(id(reasons[id(met)]), (reasons[id(met)], []))[1].append(met)
        else:
            plain.append(met)
    said = [replace(finding, meetings=tuple(meetings)) for finding, meetings in given.values()]
    for name, meetings in _by_call(plain, program):
        reason, proof = _why(program, meetings[0])
        said.append(kept(name, meetings, reason, proof))
    for finding in said:
        stay = tuple(span for span in calls_in(finding.meetings) if call_of(span) not in taken)
        found.append(replace(finding, about=stay))
    return found


def _gone(findings: Iterable[Finding]) -> set[tuple[int, str, float]]:
    """The calls that go away with these findings. Where they need the Agreement, one meeting stays as it."""
    wanted = [one for one in findings if one.verdict != "keep"]
    gone = {call_of(span) for one in wanted for span in one.calls}
    whole = [
        met
        for one in wanted
        if one.agreed
        for met in one.meetings
        if met.call.op not in MAKES_GROUP and all(call_of(span) in gone for span in met.spans)
    ]
    if whole:
        most = max(len(met.spans) for met in whole)
        stays = max((met for met in whole if len(met.spans) == most), key=lambda met: met.call.start)
        gone -= {call_of(span) for span in stays.spans}
    return gone


def _by_call(meetings: Iterable[Met], program: Program | None = None) -> list[tuple[str, list[Met]]]:
    """Meetings of one name, operation and call site together, in order."""
    found: dict[tuple[str, str, str], list[Met]] = {}
    for met in meetings:
        step, op = met.call.step, met.call.op
        place = program.place(met) if program is not None else ""
        name = place or (f"{step}.{op}" if step and op != "init_process_group" else op)
        found.setdefault((name, op, "" if place else met.call.call_site), []).append(met)
    return [(name, together) for (name, _, _), together in found.items()]


def _why(program: Program, met: Met) -> tuple[str, str]:
    """Why a meeting that no pass speaks of is kept."""
    place, op = program.place(met), met.call.op
    if place in _KNOWN_KEPT:
        reason = _KNOWN_KEPT[place]
    elif any(span.error for span in met.spans):
        reason = "it failed"
    elif program.unknown and met.call.call_site.startswith("torchrec/"):
        reason = f"the code was not read of {program.unknown}"
    elif op == "init_process_group":
        reason = "before it the ranks do not know each other"
    elif op in MAKES_GROUP:
        reason = "a group that its members need"
    elif op in BARRIERS:
        reason = "may order files, logs or other work around it"
    elif "unknown" in {span.digest for span in met.spans}:
        reason = "what it carries was not read (on a device)"
    elif len({span.digest for span in met.spans}) > 1:
        reason = "carries what the other ranks do not hold"
    elif op.startswith(("all_reduce", "reduce")):
        reason = "a result of what all ranks hold"
    else:
        reason = "nothing shows that ranks could do without"
    return reason, f"{at(met)}: {reason}."


def _named(findings: Sequence[Finding]) -> list[Finding]:
    """The findings, those of one name told apart by a number, as they come in a start-up."""
    seen: dict[str, int] = {}
    named = list(findings)
    for place in sorted(range(len(named)), key=lambda place: named[place].meetings[0].call.start):
        finding = named[place]
        again = seen[finding.name] = seen.get(finding.name, 0) + 1
        if again > 1:
            named[place] = replace(finding, name=f"{finding.name}#{again}")
    return named
