"""Barriers next to a meeting that keeps the same ranks together anyway."""

from __future__ import annotations

from initopt.comm_elim.findings import Finding, at, calls_in, kept
from initopt.comm_elim.known_calls import GROUPS
from initopt.comm_elim.program import Program, failed
from initopt.comm_elim.timeline import Met
from initopt.hooks import BARRIERS, LEFT_TOGETHER

_OWN = "may order files, logs or other work around it"


def drop(program: Program) -> list[Finding]:
    """Find barriers that nothing but their neighbour depends on. Others stay, with the reason."""
    findings = []
    of_torchrec = [met for met in program.at(*GROUPS) if met.call.op in BARRIERS and not failed(met)]
    if of_torchrec:
        proof = (
            f"{at(of_torchrec[0])} stands behind the calls that make groups, in a function that does nothing else.",
            "A new group is ready on a rank when the call that makes it returns. The first meeting on it waits for the "
            "other "
            "members, so nobody can be too early.",
        )
        reason = "the first meeting on a group waits for its members"
        findings.append(
            Finding("groups.barrier", "drop", tuple(of_torchrec), calls_in(of_torchrec), reason, proof, "groups")
        )
    for met in program.meetings:
        if met.call.op in BARRIERS and not program.place(met) and not failed(met):
            findings.append(_own(program, met))
    return findings


def _own(program: Program, met: Met) -> Finding:
    step = met.call.step
    name = f"{step}.{met.call.op}" if step else met.call.op
    after = program.after(met)
    if after is None or after.call.op not in LEFT_TOGETHER or after.call.async_op:
        next_one = (
            "no meeting follows" if after is None else f"{at(after)}, which follows, lets ranks go before all came"
        )
        return kept(name, [met], _OWN, f"{at(met)}: {next_one}.", f"A barrier {_OWN}.")
    if after.call.group != met.call.group:
        return kept(name, [met], _OWN, f"{at(met)}: {at(after)}, which follows, has other ranks or another group.")
    why = _needed_between(program, met, after)
    if why:
        return kept(name, [met], why, f"{at(met)}: {at(after)} meets the same ranks next, but {why}.")
    proof = (
        f"{at(met)} and then {at(after)} meet the same {len(met.spans)} ranks on {met.call.group}, with no meeting "
        f"between.",
        f"In the graph no step needs {step!r} but through the order of meetings, and {after.call.step!r} does not need "
        f"it: "
        "what it orders is ordered by that next meeting as well, which no rank leaves before all have come.",
        "The wait for the slowest rank moves there.",
        f"What {step!r} does after its barrier, and {after.call.step!r} before its meeting, is not in the record: see "
        "that nothing there relies on the barrier.",
    )
    reason = f"{after.call.step} meets the same ranks next"
    return Finding(
        name,
        "drop",
        (met,),
        calls_in([met]),
        reason,
        proof,
        unapplied="initopt changes no step of your own: take the barrier out of it",
    )


def _needed_between(program: Program, met: Met, after: Met) -> str:
    """Why something may rely on the barrier before the next meeting, empty if the graph shows that nothing does."""
    graph, step, next_step = program.graph, met.call.step, after.call.step
    if graph is None or step not in graph or next_step not in graph:
        return _OWN
    if step == next_step:
        return f"code of the step {step!r} stands between the two, and it {_OWN}"
    needing = sorted({edge.after for edge in graph.successors(step) if edge.kind != "resource"})
    if needing:
        return f"the step {needing[0]!r} needs {step!r}"
    return ""
