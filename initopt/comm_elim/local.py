"""Values that each rank can tell from what it holds, so that nobody has to send them."""

from __future__ import annotations

from collections.abc import Iterable

from initopt.comm_elim.findings import Finding, at, calls_in, kept
from initopt.comm_elim.left_out import WHY
from initopt.comm_elim.program import Program, failed
from initopt.comm_elim.timeline import Met
from initopt.payload import SAMPLED

_FROM_PLAN = {
    "ec_metadata": (
        "ec_metadata",
        WHY["ec_metadata"],
        "Each rank sends where its shards of one table are (offsets, sizes, rank). TorchRec took that from the plan: "
        "the offsets and sizes of all ranks' shards are in it.",
    ),
    "mc_sizes": (
        "mc_metadata",
        WHY["mc_metadata"],
        "Each rank sends how many ids its part of a managed collision table has: the length of its range of output "
        "ids, and all ranges follow from the plan's shards.",
    ),
    "mc_metadata": (
        "mc_metadata",
        WHY["mc_metadata"],
        "Each rank sends where its part of a managed collision buffer is: the same ranges of output ids, which follow "
        "from the plan's shards.",
    ),
}
_EXCHANGES = frozenset({"all_gather", "all_gather_object", "all_gather_single", "all_gather_into_tensor", "broadcast"})
_OWN_CODE = "initopt changes no call of your own: leave it out there, or keep the value"


def local(program: Program) -> list[Finding]:
    """Find what each rank can tell itself: in TorchRec by plan and environment, elsewhere by equal payloads."""
    findings = [*_flag(program), *_plan(program)]
    for name, (rewrite, reason, what) in _FROM_PLAN.items():
        meetings = [met for met in program.at(name) if not failed(met)]
        if meetings:
            proof = (
                f"{at(meetings[0])}: {what}",
                _same_plan(program, meetings[0]),
                f"With {rewrite} each rank makes what the others would have sent, compares its own part with what it "
                f"would "
                "have sent, and the Agreement shows that all ranks hold one plan. Where they don't, these meetings are "
                "held "
                "as ever.",
            )
            findings.append(_found(name, meetings, reason, proof, rewrite=rewrite))
    virtual = program.at("virtual_tables")
    if virtual:
        why = "sizes of virtual tables come from what they hold"
        findings.append(
            kept("virtual_tables", virtual, why, f"{at(virtual[0])}: {why}, which only the rank itself knows.")
        )
    findings += _held_by_all(program)
    return findings


def _flag(program: Program) -> Iterable[Finding]:
    meetings = [met for met in program.at("validation_flag") if not failed(met)]
    if not meetings:
        return
    given = meetings[0].same_digest()
    if not given:
        yield kept("validation_flag", meetings, "it is not known whether all ranks got one value", _unread(meetings[0]))
        return
    proof = (
        f"{at(meetings[0])}: rank {meetings[0].call.root} sends whether TORCHREC_VALIDATE_COLLECTIVES is 1. Without "
        f"that "
        "variable the answer is no on every rank.",
        f"All {len(meetings[0].spans)} ranks got the same bytes (sha256 {given}).",
        "With validation_flag each rank reads its own environment, and the Agreement shows that it is the same on all. "
        "Where it is not, the flag is sent as ever.",
    )
    yield _found("validation_flag", meetings, WHY["validation_flag"], proof)


def _plan(program: Program) -> Iterable[Finding]:
    meetings = [met for met in program.at("plan") if not failed(met)]
    if not meetings:
        return
    given = [met.same_digest() for met in meetings]
    if not all(given):
        yield kept("plan", meetings, "it is not known whether all ranks got one plan", _unread(meetings[0]))
        return
    proof = (
        f"{at(meetings[0])}: rank {meetings[0].call.root} makes the sharding plan and sends it, while the others wait. "
        f"A "
        "plan is a function of the model, the sharders and the topology, which every rank has.",
        f"All {len(meetings[0].spans)} ranks got the same bytes (sha256 {given[0]}).",
        "With fast_plan (the TorchRec plugin's trainer, or initopt.make_fast; the rewrite plan, where "
        "DistributedModelParallel is given none) each rank makes it, and one collective "
        "shows "
        "that all have the same. A planner that does not give one result everywhere plans on rank 0 as ever.",
    )
    yield _found("plan", meetings, WHY["plan"], proof, rewrite="fast_plan")


def _same_plan(program: Program, before: Met) -> str:
    shown = [m for m in program.at("plan", "plan_check", "agreement") if m.call.start < before.call.start]
    plans = [met for met in shown if program.place(met) == "plan" and met.same_digest()]
    if plans:
        return f"All ranks got one plan before, by {at(plans[-1])} (sha256 {plans[-1].same_digest()})."
    if shown:
        return f"All ranks had shown that they hold one plan before, by {at(shown[-1])}."
    return "This record does not show that all ranks hold one plan: the Agreement has to."


def _held_by_all(program: Program) -> Iterable[Finding]:
    """Exchanges in which every rank already held what the others gave."""
    found: dict[tuple[str, str, str], list[Met]] = {}
    for met in program.meetings:
        fits = met.call.op in _EXCHANGES and not program.place(met) and not failed(met)
        if fits and met.same_digest() and len(met.spans) > 1:
            found.setdefault((met.call.op, met.call.call_site, met.call.group), []).append(met)
    for (op, site, _), meetings in found.items():
        name = f"{meetings[0].call.step}.{op}" if meetings[0].call.step else op
        digests = [met.same_digest() for met in meetings]
        if any(digest.startswith(SAMPLED) for digest in digests):
            why = "every rank held the same, as far as it was read"
            yield kept(name, meetings, why, f"{op} ({site}): {why}: too large to be read whole while recording.")
            continue
        gave = f"rank {meetings[0].call.root} sent" if meetings[0].call.root >= 0 else "each rank sent"
        proof = (
            f"{op} ({site}): what {gave} is what every rank held already (sha256 {digests[0]}, on all "
            f"{len(meetings[0].spans)} ranks{', and so each of these times' if len(meetings) > 1 else ''}).",
            "So each rank received what it had. That was so in this start-up: before the call is left out, the value "
            "must be made part of what the Agreement compares.",
        )
        reason = "every rank held the same value before"
        yield _found(name, meetings, reason, proof, rewrite="", unapplied=_OWN_CODE)


def _unread(met: Met) -> str:
    digests = {span.digest or "none" for span in met.spans}
    why = "was not read (on a device)" if digests <= {"unknown", "none"} else f"differs: {', '.join(sorted(digests))}"
    return f"{at(met)}: what the ranks got {why}."


def _found(
    name: str,
    meetings: list[Met],
    reason: str,
    proof: tuple[str, ...],
    *,
    rewrite: str | None = None,
    unapplied: str = "",
) -> Finding:
    return Finding(
        name,
        "local",
        tuple(meetings),
        calls_in(meetings),
        reason,
        proof,
        name if rewrite is None else rewrite,
        unapplied,
        agreed=True,
    )
