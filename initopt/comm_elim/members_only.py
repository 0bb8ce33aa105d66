"""Groups that are made on ranks which are no members of them."""

from __future__ import annotations

from initopt.comm_elim.findings import Finding, at
from initopt.comm_elim.known_calls import GROUPS
from initopt.comm_elim.program import Program, failed
from initopt.comm_elim.timeline import Met
from initopt.rank_numbers import ranks_in_short


def members_only(program: Program) -> list[Finding]:
    """Find the calls that made no group for the rank that made them."""
    found: dict[tuple[str, str], list[Met]] = {}
    for met in program.meetings:
        outside = [span for span in met.spans if span.ranks and span.rank not in span.ranks]
        if outside and not failed(met):
            place = program.place(met)
            found.setdefault((place, "" if place else met.call.call_site), []).append(met)
    findings = []
    for (place, _), meetings in found.items():
        calls = tuple(span for met in meetings for span in met.spans if span.rank not in span.ranks)
        member = next(span for span in meetings[0].spans if span.rank not in span.ranks)
        of_torchrec = place in GROUPS
        proof = (
            f"{at(meetings[0])}: rank {member.rank} asks for a group of ranks {ranks_in_short(member.ranks)}, is none "
            f"of "
            f"them, and gets nothing. So it is for {len(calls)} calls of {len(meetings)} groups.",
            "torch has every rank ask for every group, because it names groups by counting them. A name that follows "
            "from "
            "purpose and ranks needs no counting: then members alone make a group, in one order.",
            "Ordinary groups made later are counted on their own, and alike on all ranks, as long as all ranks leave "
            "these "
            "calls out: the Agreement shows that they do.",
        )
        findings.append(
            Finding(
                "groups" if of_torchrec else "new_group",
                "drop",
                tuple(meetings),
                calls,
                "on ranks that are no members",
                proof,
                "groups" if of_torchrec else "",
                "" if of_torchrec else "the rewrite `groups` knows the groups of TorchRec's tables and meshes only",
                agreed=True,
                about=calls,
            )
        )
    return findings
