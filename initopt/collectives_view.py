"""What can be done about the meetings of a start-up, and whether ranks met in one order, in words. It only reads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.text import Text

from initopt.chain import finished_ranks
from initopt.comm_elim.findings import Finding
from initopt.comm_elim.left_out import LeftOut, left_out
from initopt.comm_elim.passes import Found, find
from initopt.comm_elim.program import group_of
from initopt.comm_elim.timeline import Met, Problem, timeline
from initopt.rank_numbers import ranks_in_short
from initopt.record import FIRST_STEP
from initopt.report import View, about, labels, seconds, title
from initopt.terminal_lines import LONGEST, QUIET, count, next_verbs, wrap

if TYPE_CHECKING:
    from initopt.runs import Run

_KEPT = 5
"""So many meetings that stay are listed unless all are asked for."""

_CALLS = 8
_LEFT = 28
"""Where the second line of a row begins: below the names."""


def collectives_view(run: Run, *, why: str | None = None, everything: bool = False, width: int = 80) -> View:
    """Every collective before the first training step with its verdict; of the one named `why` the proof.

    Those that were left out, and so are in no record, are named as well.
    It is a finding where something can be left out, or the ranks differ. Raises ValueError for an unknown name.
    """
    found, gone = find(run), left_out(run)
    data = {
        **about(run),
        "findings": [_data(finding, found.rank) for finding in found.findings],
        "saving": found.saving,
        "problems": [_problem_data(problem) for problem in found.problems],
        "left_out": [asdict(one) for one in gone],
    }
    where = "the median rank" if finished_ranks(run) else f"rank {found.rank}"
    wrong = bool(found.problems) or any(finding.verdict != "keep" for finding in found.findings)
    if why is not None:
        absent = [one for one in gone if one.name == why]
        if absent and why not in {finding.name for finding in found.findings}:
            lines = [*_head(run, width), *_why_left_out(absent, width), *next_verbs(width, "collectives", "verify")]
            return View(tuple(lines), {**data, "why": asdict(absent[0])})
        finding = _chosen(found, why, gone)
        lines = [
            *_head(run, width),
            *_why(finding, found.rank, where, width),
            *next_verbs(width, "collectives", "verify"),
        ]
        return View(tuple(lines), {**data, "why": _data(finding, found.rank)}, finding.verdict != "keep")
    lines = [*_head(run, width), *_sum(run, found, where, width)]
    for problem in found.problems:
        lines += wrap(f"! {problem.text}: nothing can be proven (initopt verify)", width, "yellow", rest=2)
    if found.findings:
        lines += [*_rows(found, everything, width), Text(), *_together(found, width)]
    lines += _left_out(gone, width)
    more = [f"collectives --why {found.findings[0].name}"] if found.findings else []
    lines += next_verbs(width, *more, "verify")
    return View(tuple(lines), data, wrong)


def verify_view(run: Run, *, width: int = 80) -> View:
    """Whether all ranks met in one order, and if not who met what at the first place where they differ."""
    line = timeline(run, training=True)
    problems, meetings = line.problems, len(line.meetings)
    before = min(meetings, len(timeline(run).meetings))
    data = {
        **about(run),
        "meetings": meetings,
        "before_training": before,
        "problems": [_problem_data(problem) for problem in problems],
    }
    lines = _head(run, width)
    for problem in problems:
        lines += wrap(f"{problem.text}:", width, LONGEST)
        who = [f"{'rank' if len(p.ranks) == 1 else 'ranks'} {ranks_in_short(p.ranks)}" for p in problem.parties]
        room = max(map(len, who), default=0)
        for name, party in zip(who, problem.parties, strict=True):
            number = f" (call {party.number})" if party.number else ""
            where = f" at {party.call_site}" if party.call_site else ""
            lines += wrap(f"{name:<{room}}  {party.what}{number}{where}", width, first=2, rest=room + 4)
    if problems:
        lines += [Text(), Text(f"{count(len(problems), 'problem')}.")]
    elif not meetings:
        lines.append(Text("No meeting of ranks was recorded."))
    else:
        among = f", {before} of them {_until(run)}" if before < meetings else ""
        lines += wrap(f"{count(meetings, 'meeting')}{among}, in one order on all ranks.", width)
    lines += next_verbs(width, "collectives", "critical-chain" if finished_ranks(run) else "blame")
    return View(tuple(lines), data, bool(problems))


def _until(run: Run) -> str:
    """Up to when meetings count: those of the first training step are its own, those of another last step are not."""
    return "before the first training step" if run.end == FIRST_STEP else f"until the step {run.end} had ended"


def _sum(run: Run, found: Found, where: str, width: int) -> list[Text]:
    meetings = {id(met): met for finding in found.findings for met in finding.meetings}
    if not meetings:
        return wrap(f"No meeting was recorded {_until(run)}.", width)
    whole = Finding("", "keep", tuple(meetings.values()))
    took, wait = seconds(whole.took(found.rank)), seconds(whole.wait(found.rank))
    many = f"{count(len(meetings), 'meeting')} {_until(run)}"
    return [*wrap(f"{many}: {took} on {where}, {wait} of it waiting.", width), Text()]


def _rows(found: Found, everything: bool, width: int) -> list[Text]:
    findings, rank = found.findings, found.rank
    stay = [finding for finding in findings if finding.verdict == "keep"]
    hidden = () if everything or len(stay) <= _KEPT + 1 else sorted(stay, key=lambda one: -one.took(rank))[_KEPT:]
    shown = [finding for finding in findings if finding not in hidden]
    names = max(10, *(len(finding.name) for finding in shown))
    groups = max(5, *(len(_group(finding)) for finding in shown))
    lines = [
        Text(
            f"   saves    took    wait  n   {'collective':<{names}}  {'group':<{groups}}  verdict".rstrip(), style=QUIET
        )
    ]
    for finding in shown:
        saves = f"~{seconds(finding.saving)}" if finding.saving >= 0.0005 else "·"
        wait = finding.wait(rank)
        waited = seconds(wait) if wait >= 0.0005 else "·"
        figures = f"{saves:>8}{seconds(finding.took(rank)):>8}{waited:>8}{len(finding.meetings):>3}   "
        style = "" if finding.verdict == "keep" else "bold"
        line = Text.assemble(figures, (f"{finding.name:<{names}}", style), f"  {_group(finding):<{groups}}  ")
        line.append(finding.verdict, style=style)
        lines.append(line)
        indent = min(_LEFT, width // 3)
        lines += wrap(f"└ {finding.reason}", width, first=indent, rest=indent + 2)
        lines += wrap(_sites(finding), width, QUIET, first=indent + 2, rest=indent + 2)
    if hidden:
        lines.append(Text(f"{len(hidden)} more kept (--all)", style=QUIET))
    return lines


def _together(found: Found, width: int) -> list[Text]:
    if all(finding.verdict == "keep" for finding in found.findings):
        return wrap("All of them stay.", width)
    said = f"~{seconds(found.saving)} saved by all of them together, 'saves' by one alone, both re-simulated. "
    said += "A wait that goes away turns up at the next meeting, and is saved only where that one goes, too: so the "
    said += "rows do not add up."
    if any(finding.agreed for finding in found.findings):
        said += " Where ranks first have to see that they hold the same, one meeting is kept for that and not counted "
        said += "as saved: one for a row, one for all together."
    return wrap(said, width)


def _left_out(gone: Sequence[LeftOut], width: int) -> list[Text]:
    if not gone:
        return []
    whole = sum(one.count for one in gone)
    were = f"{count(whole, 'meeting')} more {'was' if whole == 1 else 'were'} left out:"
    lines = [Text(), Text(were, style=QUIET)]
    indent = min(_LEFT, width // 3)
    for one in gone:
        lines.append(Text(f"{one.count:>27}   {one.name}{f'  {one.place}' if one.place else ''}"))
        lines += wrap(f"└ {one.reason}", width, first=indent, rest=indent + 2)
    return [*lines, Text()]


def _group(finding: Finding) -> str:
    groups = dict.fromkeys(group_of(met) for met in finding.meetings)
    return next(iter(groups)) if len(groups) == 1 else f"{len(groups)} groups"


def _sites(finding: Finding) -> str:
    sites = finding.call_sites
    more = f" and {len(sites) - 2} more" if len(sites) > 2 else ""
    return ", ".join(sites[:2]) + more


def _why(finding: Finding, rank: int, where: str, width: int) -> list[Text]:
    many = count(len(finding.meetings), "meeting")
    took, wait = seconds(finding.took(rank)), seconds(finding.wait(rank))
    lines = [*wrap(f"{finding.name}  {finding.verdict}: {finding.reason}", width, "bold", rest=2)]
    lines += [*wrap(f"{many}, {took} on {where}, {wait} of it waiting", width), Text()]
    for number, sentence in enumerate(finding.proof, 1):
        lines += wrap(f"{number}. {sentence}", width, rest=3)
    lines.append(Text())
    if finding.verdict != "keep":
        check = ", and one meeting stays as the check" if finding.agreed else ""
        saves = f"Saves ~{seconds(finding.saving)} by itself, re-simulated: waits move on{check}."
        lines += wrap(saves, width)
        by = f"Applied by the rewrite {finding.rewrite}." if finding.rewrite else f"Not applied: {finding.unapplied}."
        lines += wrap(by, width)
        lines.append(Text())
    for met in _different(finding.meetings)[:_CALLS]:
        lines += _met_lines(met, width)
    return lines


def _why_left_out(gone: Sequence[LeftOut], width: int) -> list[Text]:
    one, whole = gone[0], sum(one.count for one in gone)
    were = f"{count(whole, 'meeting')} {'was' if whole == 1 else 'were'} left out"
    at = ", ".join(dict.fromkeys(one.place for one in gone if one.place))
    lines = wrap(f"{one.name}  left out: {one.reason}", width, "bold", rest=2)
    lines += wrap(f"{were}{f' at {at}' if at else ''}, so the record has nothing to prove it from.", width)
    back = f"Before that the ranks had compared what it assumes. INITOPT_DISABLE={one.name} brings the meetings back."
    return [*lines, Text(), *wrap(back, width), Text()]


def _different(meetings: Iterable[Met]) -> list[Met]:
    """One meeting of each operation and way that led there."""
    return list({(met.call.op, met.call.callers, met.ranks): met for met in reversed(list(meetings))}.values())[::-1]


def _met_lines(met: Met, width: int) -> list[Text]:
    call = met.call
    number = f", call {call.sequence}" if call.sequence >= 0 else ""
    what = f"{call.op} on {group_of(met)}{number}, ranks {ranks_in_short(met.ranks)}, {call.bytes} bytes a rank"
    lines = wrap(what, width, rest=4)
    for caller in call.callers or ((call.call_site,) if call.call_site else ()):
        where, _, function = caller.rpartition(" ")
        lines += wrap(f"{where} in {function}" if where else caller, width, QUIET, first=4, rest=6)
    return lines


def _chosen(found: Found, name: str, gone: Sequence[LeftOut]) -> Finding:
    for finding in found.findings:
        if finding.name == name or name in finding.call_sites:
            return finding
    known = [*(finding.name for finding in found.findings), *(one.name for one in gone)]
    names = ", ".join(dict.fromkeys(known)) or "none"
    raise ValueError(f"--why {name!r}: no collective has that name; there are {names}")


def _data(finding: Finding, rank: int) -> dict[str, Any]:
    return {
        "name": finding.name,
        "verdict": finding.verdict,
        "count": len(finding.meetings),
        "saving": finding.saving,
        "took": finding.took(rank),
        "wait": finding.wait(rank),
        "group": _group(finding),
        "reason": finding.reason,
        "proof": list(finding.proof),
        "rewrite": finding.rewrite,
        "unapplied": finding.unapplied,
        "agreed": finding.agreed,
        "calls_left_out": len(finding.calls),
        "meetings": [
            {
                "op": met.call.op,
                "group": group_of(met),
                "sequence": met.call.sequence,
                "ranks": list(met.ranks),
                "root": met.call.root,
                "call_site": met.call.call_site,
                "callers": list(met.call.callers),
                "step": met.call.step,
                "bytes": met.call.bytes,
                "digests": {str(span.rank): span.digest for span in met.spans},
            }
            for met in finding.meetings
        ],
    }


def _problem_data(problem: Problem) -> dict[str, Any]:
    parties = [
        {"ranks": list(p.ranks), "what": p.what, "call_site": p.call_site, "number": p.number} for p in problem.parties
    ]
    return {"text": problem.text, "parties": parties}


def _head(run: Run, width: int) -> list[Text]:
    lines = wrap(title(run), width, "bold")
    said = [*labels(run), *run.warnings]
    if run.missing_ranks:
        which = "ranks" if len(run.missing_ranks) > 1 else "rank"
        said.append(f"no record of {which} {ranks_in_short(run.missing_ranks)}, so not compared")
    behind = sorted(run.headers.keys() - set(finished_ranks(run)))
    if behind:
        which = f"{'rank' if len(behind) == 1 else 'ranks'} {ranks_in_short(behind)}"
        who = f"{which} did not reach the" if len(behind) < len(run.headers) else "no rank reached its"
        said.append(f"{who} {run.goal}: this is about what was recorded until then")
    for warning in said:
        lines += wrap(f"! {warning}", width, "yellow", rest=2)
    return [*lines, Text()]
