"""Groups of the same ranks and backend as one that was there already."""

from __future__ import annotations

from initopt.comm_elim.findings import Finding, at, kept
from initopt.comm_elim.known_calls import GROUPS
from initopt.comm_elim.program import Program, failed
from initopt.comm_elim.timeline import MAKES_GROUP, Met
from initopt.hooks import WORLD
from initopt.rank_numbers import ranks_in_short


def reuse(program: Program) -> list[Finding]:
    """Find new groups whose place an earlier one can take."""
    findings = []
    made: dict[tuple[tuple[int, ...], str], Met] = {}
    backend = ""
    for met in program.meetings:
        if failed(met):
            continue
        if met.call.op == "init_process_group":
            backend = _asked(met)
            made[tuple(span.rank for span in met.spans), backend] = met
        elif met.call.op in MAKES_GROUP and met.call.ranks and met.made:
            asked = _asked(met)
            key = met.ranks, backend if asked.startswith("default") else asked
            earlier = made.get(key)
            if earlier is None:
                made[key] = met
            else:
                findings.append(_found(program, met, earlier))
    return findings


def _found(program: Program, met: Met, earlier: Met) -> Finding:
    of_torchrec = program.place(met) in GROUPS
    name = "groups" if of_torchrec else "new_group"
    old = earlier.made or WORLD
    # A group for something else has a use of its own.
    applied = of_torchrec and (old == WORLD or program.place(earlier) == program.place(met))
    ranks = ranks_in_short(met.ranks)
    lanes = {span.lane for group in (old, met.made) for span in program.calls_on(group)}
    if len(lanes) > 1:
        why = "an earlier group of these ranks is in use on another lane"
        proof = f"{at(met)}: group {old} has the same ranks {ranks}, but calls on the two come from {_listed(lanes)}: "
        return kept(name, [met], why, proof + "on one group their order would depend on timing.")
    if program.place(met) == "metrics":
        why = "a thread of the metric module meets on it"
        proof = f"{at(met)}: {why}, while other threads meet on group {old}, which has the same ranks {ranks}: "
        return kept("metrics", [met], why, proof + "on one group their order would depend on timing.")
    if program.destroyed(old, met.call.start):
        why = "the earlier group of these ranks was destroyed"
        return kept(name, [met], why, f"{at(met)}: {why}, so there is nothing to reuse.")
    proofs = (
        f"{at(earlier)} made {'the default group' if old == WORLD else f'group {old}'} of ranks {ranks}.",
        f"{at(met)} asks for the same ranks and backend ({met.call.options}); nothing destroyed the first one between.",
        f"All calls on both come from one lane ({_listed(lanes)}), so on one group they keep the order that they had.",
        "What is set for the earlier group, such as its timeout, holds for both.",
    )
    # Those of other ranks are for nothing, whether or not the group is made again.
    calls = tuple(span for span in met.spans if span.rank in met.ranks)
    return Finding(
        name,
        "reuse",
        (met,),
        calls,
        f"same ranks and backend as {'the world' if old == WORLD else f'group {old}'}",
        proofs,
        "groups" if applied else "",
        "" if applied else "the rewrite `groups` reuses what TorchRec makes a second time, and the world's group",
        about=calls,
    )


def _asked(met: Met) -> str:
    """The backend and its options, without the timeout and the members' way of making it."""
    options = met.call.options.split(", ")
    return ", ".join(part for part in options if not part.startswith("timeout="))


def _listed(lanes: set[str]) -> str:
    return ", ".join(sorted(lanes))
