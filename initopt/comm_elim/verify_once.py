"""What DistributedDataParallel checks and sends when it is made, although the ranks hold the same already."""

from __future__ import annotations

from initopt.comm_elim.findings import Finding, at, calls_in, kept
from initopt.comm_elim.left_out import WHY
from initopt.comm_elim.program import Program, failed
from initopt.comm_elim.timeline import Met
from initopt.payload import SAMPLED


def verify_once(program: Program) -> list[Finding]:
    """Find shape checks and parameter syncs of ranks whose shapes and parameters are equal, or are replaced after."""
    return [*_outer(program), *_lookups(program)]


def _outer(program: Program) -> list[Finding]:
    equal: list[Met] = []
    findings = []
    for met in program.at("ddp_sync"):
        if failed(met):
            continue
        if met.same_digest():
            equal.append(met)
            continue
        digests = {span.digest or "unknown" for span in met.spans}
        if digests <= {"unknown"}:
            why = "not read: on a device, or empty"
            more = "With ddp_sync the ranks compare checksums themselves."
        else:
            why = "what the ranks hold differs"
            more = f"This is what makes it equal. {_differs(met)}"
        findings.append(kept("ddp_sync", [met], why, f"{at(met)}: {why}. {more}"))
    if findings:
        # Shapes are compared by themselves.
        sent = [met for met in equal if not _checks(met)]
        equal = [met for met in equal if _checks(met)]
        if sent:
            why = "goes with the sync, which stays"
            findings.append(kept("ddp_sync", sent, why, f"{at(sent[0])}: {why}: what it found equal is not all."))
    if equal:
        sampled = any(met.same_digest().startswith(SAMPLED) for met in equal)
        read = "the same bytes, as far as they were read" if sampled else "the same bytes"
        proof = (
            f"{at(equal[0])}: DistributedDataParallel compares the shapes of parameters"
            + ("." if findings else f", then sends rank {max(met.call.root for met in equal)}'s parameters to all."),
            f"Before that each rank held {read} "
            f"({', '.join(f'{met.call.op}: sha256 {met.same_digest()}' for met in equal[:2])}). So nothing changes.",
            "With ddp_sync the Agreement compares checksums of shapes and of all values; where they differ, "
            "DistributedDataParallel does as ever. Buffers stay as they are on each rank: TorchRec has them not sent.",
        )
        calls, reason = calls_in(equal), WHY["ddp_sync"]
        findings.append(Finding("ddp_sync", "drop", tuple(equal), calls, reason, proof, "ddp_sync", agreed=True))
    return findings


def _lookups(program: Program) -> list[Finding]:
    """The syncs of data-parallel lookups, each with the tables of the same module that are sent after it."""
    findings = []
    replaced: list[tuple[list[Met], Met]] = []
    synced: list[Met] = []
    for met in program.at("dp_lookup_sync", "dp_tables"):
        if program.place(met) == "dp_lookup_sync":
            synced.append(met)
        elif synced:
            # Two modules before the first table: which of them it belongs to is not in the record.
            checks = sum(map(_checks, synced))
            same = all(_where(one) == _where(met) for one in synced)
            if checks <= 1 and same and not any(map(failed, [*synced, met])):
                replaced.append((synced, met))
            else:
                findings.append(_stays(synced))
            synced = []
    if synced:
        findings.append(_stays(synced))
    if replaced:
        meetings = [met for before, _ in replaced for met in before]
        filled = replaced[0][1]
        proof = (
            f"{at(meetings[0])}: DistributedDataParallel compares shapes and sends the parameters of data-parallel "
            "tables.",
            f"Then TorchRec fills every such table of the module and sends it from rank {filled.call.root}, by "
            f"{at(filled)}. Nothing reads a table between the two, which stand in one constructor.",
            "Shapes follow from the plan: the Agreement shows that all ranks hold one.",
        )
        reason = "what it sends is replaced right after"
        calls = calls_in(meetings)
        findings.append(
            Finding("dp_lookup_sync", "drop", tuple(meetings), calls, reason, proof, "dp_tables", agreed=True)
        )
    return findings


def _checks(met: Met) -> bool:
    return met.call.op.startswith("_verify")


def _stays(meetings: list[Met]) -> Finding:
    why = "nothing in the record shows what replaces what it sends"
    return kept("dp_lookup_sync", meetings, why, f"{at(meetings[0])}: {why}.")


def _where(met: Met) -> tuple[str, str]:
    """The group that met, and the file that it was called from."""
    return met.call.group, met.call.call_site.rpartition(":")[0]


def _differs(met: Met) -> str:
    by: dict[str, list[int]] = {}
    for span in met.spans:
        by.setdefault(span.digest or "unknown", []).append(span.rank)
    return "; ".join(f"rank {', '.join(map(str, ranks[:4]))}: sha256 {digest}" for digest, ranks in by.items()) + "."
