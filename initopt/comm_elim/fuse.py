"""Small broadcasts from one rank to the same others, one right after the other, that can be one."""

from __future__ import annotations

from initopt.comm_elim.findings import Finding, at, calls_in, kept
from initopt.comm_elim.program import Program, failed
from initopt.comm_elim.timeline import Met

_SENDS = frozenset({"broadcast", "_broadcast_coalesced"})


def fuse(program: Program) -> list[Finding]:
    """Find runs of broadcasts with the same root and group, between which nothing reads what they brought."""
    findings = []
    for run in _runs(program):
        place = program.place(run[0])
        together = sum(met.call.bytes for met in run)
        what = f"{len(run)} broadcasts from rank {run[0].call.root} to the same ranks, {together} bytes together"
        if place != "dp_tables":
            why = "code between them may read what came before"
            name = f"{run[0].call.step}.broadcast" if run[0].call.step else "broadcast"
            said = f"{at(run[0])} to {at(run[-1])}: {what}, follow each other, but {why}. It is not TorchRec's."
            findings.append(kept(name, run, why, said))
            continue
        proof = (
            f"{at(run[0])}: {what}, follow each other on every rank.",
            "TorchRec fills a data-parallel table, sends it, and goes on with the next: no table is read before all "
            "are "
            "filled, so that they can be sent together when the last one is.",
            "Their values are sent, not assumed: generators of ranks with shards of different size have drifted apart.",
        )
        reason = f"{len(run)} broadcasts become one"
        findings.append(Finding("dp_tables", "fuse", tuple(run), calls_in(run[:-1]), reason, proof, "dp_tables"))
    return findings


def _runs(program: Program) -> list[list[Met]]:
    """Broadcasts that follow each other on every rank of their group, at least two."""
    sends = [met for met in program.meetings if met.call.op in _SENDS and not failed(met) and not met.call.async_op]
    runs: list[list[Met]] = []
    for met in sends:
        last = runs[-1][-1] if runs else None
        same = last is not None and (last.call.group, last.call.root) == (met.call.group, met.call.root)
        if last is not None and same and program.after(last) is met and program.place(last) == program.place(met):
            runs[-1].append(met)
        else:
            runs.append([met])
    return [run for run in runs if len(run) > 1]
