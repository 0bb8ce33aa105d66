"""A sharding plan in words and tables for a terminal, two plans compared, and the same data as JSON. It only reads.

Times and memory are the planner's estimates and carry `~`. It needs no torch: what it shows is handed to it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict
from statistics import mean, median
from typing import TYPE_CHECKING, Any

from rich.text import Text

from initopt.rank_numbers import ranks_in_short
from initopt.report import JSON_VERSION, View
from initopt.terminal_lines import LONGEST, QUIET, count, next_verbs, table, wrap

if TYPE_CHECKING:
    from initopt.sharding_plan.plan_file import PlanFile, RankEstimate

UNEVEN = 1.2
"""A rank that takes so many times the mean is worth a warning: in every step the others wait for it."""

FULL = 0.9
"""So is a rank whose tables take this share of its memory."""

HALF_FULL = 0.5
"""Below this share uneven memory is no concern."""

_ALL_RANKS = 16
_WORST = 4
_CHANGES = 20
_PARTS = ("forward_compute", "forward_comms", "backward_compute", "backward_comms", "prefetch")


def plan_view(
    plan: PlanFile,
    *,
    name: str,
    problems: Sequence[str] = (),
    notes: Sequence[str] = (),
    written: str | None = None,
    everything: bool = False,
    width: int = 80,
) -> View:
    """One plan: the slowest rank and why, memory, ranks, sharding types, and what is uneven.

    `name` is what it was made from. `problems` make it a finding, `notes` don't. `written` is the file it was written
    to. More than 16 ranks are summed up, unless `everything` is asked for.
    """
    warnings = _warnings(plan)
    shardings = plan.shardings()
    kinds = _kinds(plan, shardings)
    slowest = _slowest(plan)
    data = {
        **_about(plan, name),
        "problems": list(problems),
        "warnings": warnings,
        "notes": list(notes),
        "slowest_rank": slowest.rank,
        "slowest": [asdict(share) for share in plan.slowest],
        "uneven": _unevenness(plan),
        "kinds": kinds,
        "ranks": [{**asdict(rank), "time": rank.time} for rank in plan.ranks],
        "tables": [{**asdict(table), "sharding": shardings[table.path]} for table in plan.tables],
    }
    lines = _head(plan, name, width)
    for text, style in (*((p, LONGEST) for p in problems), *((w, "yellow") for w in (*warnings, *notes))):
        lines += wrap(f"! {text}", width, style, rest=2)
    lines += [Text(), *_why(plan, slowest, width), *_memory(plan, width), Text()]
    lines += [*_ranks(plan, everything), Text()]
    lines += table(
        [("sharding", "kernel", "tables", "shards", "elements")]
        + [(k["kind"], k["kernel"], str(k["tables"]), str(k["shards"]), _count(k["elements"])) for k in kinds],
        left=2,
    )
    lines += [Text(), *wrap("~ TorchRec's estimates for the tables; dense layers are not in them", width, QUIET)]
    verbs = ["plan ... -o plan.json"] if written is None else [f"plan {written} --all", f"plan ... --diff {written}"]
    lines += next_verbs(width, *verbs)
    return View(tuple(lines), data, finding=bool(problems))


def no_plan_view(message: str, *, name: str, width: int = 80) -> View:
    """What is shown when the planner found no plan: its own message, which says why."""
    lines = [Text(f"No plan for {name}.", LONGEST), Text()]
    for line in message.splitlines():
        indent = len(line.expandtabs(2)) - len(line.lstrip())
        # Some of its words are longer than a line.
        parts = textwrap.wrap(line.strip(), width, initial_indent=" " * indent, subsequent_indent=" " * (indent + 2))
        lines += map(Text, parts or [""])
    lines += next_verbs(width, "plan ... --hbm 80GB --world-size N")
    return View(tuple(lines), {"version": JSON_VERSION, "name": name, "error": message}, finding=True)


def diff_view(
    before: PlanFile,
    after: PlanFile,
    *,
    names: tuple[str, str],
    everything: bool = False,
    width: int = 80,
) -> View:
    """Two plans compared table by table and rank by rank.

    It is a finding when they shard a table differently or are for different jobs.
    """
    tables = _changed_tables(before, after)
    jobs = _changed_fields(asdict(before.planned_for), asdict(after.planned_for))
    ranks = _changed_ranks(before, after)
    data = {
        "version": JSON_VERSION,
        "before": _about(before, names[0]),
        "after": _about(after, names[1]),
        "planned_for": {field: {"before": was, "after": now} for field, was, now in jobs},
        "tables": [{"table": path, "before": was, "after": now} for path, was, now in tables],
        "ranks": [{"rank": r, "before": was and asdict(was), "after": now and asdict(now)} for r, was, now in ranks],
    }
    lines = [*wrap(f"before: {_title(before, names[0])}", width, "bold", rest=2)]
    lines += [*wrap(f"after: {_title(after, names[1])}", width, "bold", rest=2), Text()]
    total = len({table.path for plan in (before, after) for table in plan.tables})
    elsewhere = any(field in ("world_size", "local_world_size", "pod_size", "device") for field, _, _ in jobs)
    verdict = (
        f"{len(tables)} of {count(total, 'table')} differ."
        if tables
        else f"The same plan for {count(total, 'table')}{', for different jobs' if elsewhere else ''}."
    )
    lines += wrap(verdict, width, LONGEST if tables or elsewhere else "bold")
    for field, was, now in jobs:
        lines += wrap(f"{field}: {_short(field, was)} -> {_short(field, now)}", width, rest=4, first=2)
    shown = tables if everything else tables[:_CHANGES]
    for path, was, now in shown:
        lines += wrap(f"{path}: {was} -> {now}", width, rest=4, first=2)
    if len(shown) < len(tables):
        lines.append(Text(f"  {len(tables) - len(shown)} more (--all)", QUIET))
    lines += [Text(), *_compared(before, after, ranks, everything)]
    lines += next_verbs(width, "plan ... -o plan.json")
    return View(tuple(lines), data, finding=bool(tables) or elsewhere)


def milliseconds(value: float) -> str:
    """A time of one step: `0.04ms`, `4.2ms`, `123ms`, `1.5s`.

    >>> milliseconds(0.041), milliseconds(4.2), milliseconds(123.4), milliseconds(1500), milliseconds(0)
    ('0.04ms', '4.2ms', '123ms', '1.5s', '0')
    """
    if value < 0.005:
        return "0"
    if value < 1:
        return f"{value:.2f}ms"
    return f"{value:.1f}ms" if value < 100 else f"{value:.0f}ms" if value < 999.5 else f"{value / 1000:.1f}s"


def size(value: float) -> str:
    """An amount of memory: `0.5 MB`, `512 MB`, `61.2 GB` (1 GB = 1024^3 bytes, as TorchRec has it).

    >>> size(80 * 1024**3), size(30 * 1024**2), size(3 * 1024**2), size(0)
    ('80.0 GB', '30 MB', '3.0 MB', '0')
    """
    if value == 0:
        return "0"
    if value >= 1024**3:
        return f"{value / 1024**3:.1f} GB"
    return f"{value / 1024**2:.0f} MB" if value >= 10 * 1024**2 else f"{value / 1024**2:.1f} MB"


def _about(plan: PlanFile, name: str) -> dict[str, Any]:
    return {
        "version": JSON_VERSION,
        "name": name,
        "digest": plan.digest,
        "versions": dict(plan.versions),
        "planned_for": asdict(plan.planned_for),
    }


def _title(plan: PlanFile, name: str) -> str:
    job = plan.planned_for
    hosts = -(-job.world_size // job.local_world_size)
    parts = [
        name,
        count(len(plan.tables), "table"),
        f"{count(job.world_size, 'rank')} on {count(hosts, 'host')}",
        job.device,
        plan.digest[:10],
    ]
    return " · ".join(parts)


def _head(plan: PlanFile, name: str, width: int) -> list[Text]:
    made = [f"batch {plan.planned_for.batch_size}", *(f"{name} {version}" for name, version in plan.versions.items())]
    return [*wrap(_title(plan, name), width, "bold"), *wrap(" · ".join(made), width, QUIET)]


def _slowest(plan: PlanFile) -> RankEstimate:
    return max(plan.ranks, key=lambda rank: rank.time)


def _capacity(plan: PlanFile, kind: str, rank: int) -> int:
    capacities: tuple[int, ...] = getattr(plan.planned_for, kind)
    return capacities[rank]


def _fullest(plan: PlanFile, kind: str) -> RankEstimate:
    return max(plan.ranks, key=lambda rank: (_share(plan, kind, rank), getattr(rank, kind)))


def _share(plan: PlanFile, kind: str, rank: RankEstimate) -> float:
    capacity, needed = _capacity(plan, kind, rank.rank), getattr(rank, kind)
    return needed / capacity if capacity else 0.0


def _kinds_of_memory(plan: PlanFile) -> list[str]:
    return [kind for kind in ("hbm", "ddr", "ssd") if any(getattr(rank, kind) for rank in plan.ranks)]


def _unevenness(plan: PlanFile) -> dict[str, float]:
    """The largest value of any rank over the mean of all, for the time and each kind of memory."""
    found = {}
    for what in ("time", *_kinds_of_memory(plan)):
        values = [getattr(rank, what) for rank in plan.ranks]
        found[what] = max(values) / mean(values) if any(values) else 1.0
    return found


def _warnings(plan: PlanFile) -> list[str]:
    uneven = _unevenness(plan)
    said = []
    if uneven["time"] >= UNEVEN:
        slowest, average = _slowest(plan), mean(rank.time for rank in plan.ranks)
        said.append(
            f"uneven time: rank {slowest.rank} takes ~{milliseconds(slowest.time)}, {uneven['time']:.2f} times the "
            f"mean of ~{milliseconds(average)}, and the others wait for it"
        )
    for kind in _kinds_of_memory(plan):
        fullest = _fullest(plan, kind)
        if _share(plan, kind, fullest) >= FULL:
            said.append(f"{kind.upper()} of rank {fullest.rank} is ~{_share(plan, kind, fullest):.0%} full of tables")
        elif uneven[kind] >= UNEVEN and _share(plan, kind, fullest) >= HALF_FULL:
            most = max(plan.ranks, key=lambda rank: getattr(rank, kind))
            average = mean(getattr(rank, kind) for rank in plan.ranks)
            said.append(
                f"uneven {kind.upper()}: rank {most.rank} needs ~{size(getattr(most, kind))}, {uneven[kind]:.2f} times "
                f"the mean of ~{size(average)}"
            )
    return said


def _why(plan: PlanFile, slowest: RankEstimate, width: int) -> list[Text]:
    middle = milliseconds(median(rank.time for rank in plan.ranks))
    lines = [
        Text.assemble(
            "Tables take ",
            (f"~{milliseconds(slowest.time)}", "bold"),
            f" a step on the slowest rank, rank {slowest.rank} (median rank ~{middle})",
        )
    ]
    parts = sorted(((getattr(slowest, part), part) for part in _PARTS), reverse=True)
    made_of = [f"{part.replace('_', ' ')} ~{milliseconds(time)}" for time, part in parts if time >= 0.005]
    lines += wrap("its parts: " + ", ".join(made_of or ["nothing that counts"]), width, rest=4, first=2)
    tables = [f"{share.table} ~{milliseconds(share.time)}" for share in plan.slowest]
    rest = slowest.shards - len(tables)
    if rest > 0:
        left = slowest.time - sum(share.time for share in plan.slowest)
        tables.append(f"{count(rest, 'more shard')} ~{milliseconds(left)}")
    lines += wrap("its tables: " + ", ".join(tables), width, rest=4, first=2)
    return lines


def _memory(plan: PlanFile, width: int) -> list[Text]:
    lines = []
    for kind in _kinds_of_memory(plan):
        fullest = _fullest(plan, kind)
        middle = size(median(getattr(rank, kind) for rank in plan.ranks))
        capacity = _capacity(plan, kind, fullest.rank)
        lines += wrap(
            f"{kind.upper()} ~{size(getattr(fullest, kind))} of {size(capacity)} on the fullest rank, rank "
            f"{fullest.rank} (median rank ~{middle})",
            width,
            rest=2,
        )
    return lines


def _ranks(plan: PlanFile, everything: bool) -> list[Text]:
    kinds = _kinds_of_memory(plan)
    columns: list[tuple[str, Callable[[Any], str]]] = [("shards", lambda value: f"{value:g}")]
    columns += [(kind, lambda value: f"~{size(value)}") for kind in kinds]
    columns.append(("time", lambda value: f"~{milliseconds(value)}"))
    rows = [("rank", *(kind.upper() if kind in kinds else kind for kind, _ in columns))]
    shown = list(plan.ranks)
    if not everything and len(plan.ranks) > _ALL_RANKS:
        for word, pick in (("least", min), ("median", median), ("most", max)):
            values = ([getattr(rank, kind) for rank in plan.ranks] for kind, _ in columns)
            cells = [show(pick(column)) for (_, show), column in zip(columns, values, strict=True)]
            rows.append((word, *cells))
        worst = sorted(plan.ranks, key=lambda rank: -rank.time)[:_WORST]
        fullest = [_fullest(plan, kind) for kind in kinds]
        shown = [*worst, *(rank for i, rank in enumerate(fullest) if rank not in worst and rank not in fullest[:i])]
    rows += [(str(rank.rank), *(show(getattr(rank, kind)) for kind, show in columns)) for rank in shown]
    lines = table(rows)
    if len(shown) < len(plan.ranks):
        lines.append(Text(f"the slowest and the fullest ranks of {len(plan.ranks)} (--all)", QUIET))
    return lines


def _kinds(plan: PlanFile, shardings: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Tables, shards and elements of each sharding type and kernel, the most elements first."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for planned in plan.tables:
        one = shardings[planned.path]
        key = one["sharding_type"], one["compute_kernel"]
        row = rows.setdefault(key, {"kind": key[0], "kernel": key[1], "tables": 0, "shards": 0, "elements": 0})
        row["tables"] += 1
        row["shards"] += len(one.get("shards") or one.get("ranks") or ())
        row["elements"] += planned.rows * planned.dim
    return sorted(rows.values(), key=lambda row: (-row["elements"], row["kind"], row["kernel"]))


def _changed_fields(before: dict[str, Any], after: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    # Memory is a list by rank; that there are more ranks is said once.
    memory = ("hbm", "ddr", "ssd")
    sides = [
        {name: set(value) if name in memory else value for name, value in side.items()} for side in (before, after)
    ]
    return [(name, before[name], after[name]) for name in before if sides[0][name] != sides[1][name]]


def _changed_tables(before: PlanFile, after: PlanFile) -> list[tuple[str, str, str]]:
    """Table, what it was, what it is, for each table that is not sharded as before."""
    sharded = before.shardings(), after.shardings()
    tables = [{table.path: table for table in plan.tables} for plan in (before, after)]
    found = []
    for path in dict.fromkeys([*sharded[0], *sharded[1]]):
        was, now = (one.get(path) for one in sharded)
        if was is None or now is None:
            found.append(
                (path, "not there" if was is None else _sharding(was), "gone" if now is None else _sharding(now))
            )
            continue
        sizes = [(one[path].rows, one[path].dim, one[path].dtype) for one in tables if path in one]
        if len(sizes) == 2 and sizes[0] != sizes[1]:
            old, new = (f"{rows} rows x {dim} of {dtype}" for rows, dim, dtype in sizes)
            found.append((path, old, new))
        elif was != now:
            old, new = _sharding(was), _sharding(now)
            others = [name for name in dict.fromkeys([*was, *now]) if was.get(name) != now.get(name)]
            if old == new:
                old, new = (", ".join(f"{name} {_short(name, one.get(name))}" for name in others) for one in (was, now))
            found.append((path, old, new))
    return found


def _sharding(one: dict[str, Any]) -> str:
    ranks = one.get("ranks") or ()
    where = f"on rank{'s' if len(ranks) > 1 else ''} {ranks_in_short(ranks)}" if ranks else ""
    return " ".join(part for part in (one["sharding_type"], one["compute_kernel"], where) if part)


def _changed_ranks(before: PlanFile, after: PlanFile) -> list[tuple[int, RankEstimate | None, RankEstimate | None]]:
    """The ranks with other estimates, those whose time changed most first."""
    sides = [{rank.rank: rank for rank in plan.ranks} for plan in (before, after)]
    pairs = [(rank, sides[0].get(rank), sides[1].get(rank)) for rank in sorted({*sides[0], *sides[1]})]
    changed = [pair for pair in pairs if pair[1] != pair[2]]
    return sorted(changed, key=lambda pair: -abs(_time(pair[2]) - _time(pair[1])))


def _time(rank: RankEstimate | None) -> float:
    return rank.time if rank is not None else 0.0


def _compared(
    before: PlanFile,
    after: PlanFile,
    ranks: Sequence[tuple[int, RankEstimate | None, RankEstimate | None]],
    everything: bool,
) -> list[Text]:
    kinds = [kind for kind in ("hbm", "ddr", "ssd") if kind in {*_kinds_of_memory(before), *_kinds_of_memory(after)}]
    rows = [("rank", "time", *(kind.upper() for kind in kinds))]
    sides = (_slowest(before), _slowest(after))
    rows.append(("slowest", _arrow(*(f"~{milliseconds(side.time)}" for side in sides)), *("" for _ in kinds)))
    most = [[max(getattr(rank, kind) for rank in plan.ranks) for plan in (before, after)] for kind in kinds]
    rows.append(("fullest", "", *(_arrow(*(f"~{size(value)}" for value in pair)) for pair in most)))
    shown = ranks if everything else ranks[:_WORST]
    for rank, *pair in shown:
        times = _arrow(*("none" if one is None else f"~{milliseconds(one.time)}" for one in pair))
        memory = (_arrow(*("none" if one is None else f"~{size(getattr(one, k))}" for one in pair)) for k in kinds)
        rows.append((str(rank), times, *memory))
    lines = table(rows)
    if len(shown) < len(ranks):
        lines.append(Text(f"{len(ranks) - len(shown)} more ranks with other estimates (--all)", QUIET))
    return lines


def _arrow(was: str, now: str) -> str:
    return was if was == now else f"{was} -> {now}"


def _short(name: str, value: Any) -> str:
    if name in ("hbm", "ddr", "ssd"):
        return " ... ".join(dict.fromkeys(size(amount) for amount in (min(value), max(value))))
    text = f"{value}"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _count(value: int) -> str:
    """A number of elements in short.

    >>> _count(950), _count(1_300_000), _count(25_600_000_000)
    ('950', '1.3M', '25.6G')
    """
    for unit, letter in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if value >= unit:
            return f"{value / unit:.1f}{letter}"
    return str(value)
