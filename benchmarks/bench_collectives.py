"""Meetings of ranks while a DistributedModelParallel is made: TorchRec's, and what is left of them.

    python -m benchmarks.bench_collectives --save      # ten minutes on two cores

Ranks are forked from one warm process and meet over gloo. In each of them every case is made in turn as TorchRec makes
it and with its meetings left out, round by round, each time in a process group of its own. *Meetings* are calls that
meet other ranks, from the start of the construction to its end, the agreement among them; a call may be several
messages. *Groups* are those that one rank makes. *Seconds* are those of the construction on the slowest rank, and
ratios are TorchRec's over initopt's, of the same round. The state, the metadata, the optimizer, the losses of three
steps and the generator are compared. Where a latency is given it is emulated: each collective of a group sleeps so
long before it starts, and nothing else is slower (`benchmarks/trainers/emulation.py`).

The last table counts the groups that TorchRec makes on one rank of larger jobs, with torch's fake backend: no group
connects, and nothing is timed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.bench_dynamic_shapes import about
from tests.multirank.eliminated_ranks import HOW, Case, Counter, built, counted, outcome, own_group
from tests.multirank.forked import fork_ranks

RESULTS = Path(__file__).parent / "results" / "collectives.md"

KINDS = HOW[:3] + HOW[5:]
BY_HOST = HOW[3:5]
CASES = (
    *(Case("EBC", (kind,) * 8) for kind in (*KINDS, *BY_HOST)),
    *(Case("EC", (kind,) * 8, steps=0 if kind == "data_parallel" else 3) for kind in KINDS),
    Case("EC", ("table_wise",) * 60),
    *(Case(f"MC {inner}", ("row_wise",) * 8) for inner in ("EBC", "EC")),
    Case("EBC", HOW * 2),
    Case("EBC", HOW * 2, seeds="rank"),
    Case("EBC", (HOW * 34)[:200], steps=1),
)
ALONE = Case("EC", ("table_wise", "row_wise", "data_parallel") * 20, steps=0)
BY_ITSELF = (ALONE, Case("EBC", HOW * 2), Case("MC EBC", ("row_wise",) * 8))


@dataclass(frozen=True)
class Made:
    """What the construction took on one rank: seconds, meetings, groups; and whether all is as TorchRec made it."""

    seconds: float
    meetings: int
    groups: int


def timed(case: Case, rewrites: Sequence[str] | None, *, counts: bool = False) -> Made:
    """Make a case on this rank, with these rewrites or as TorchRec does; what `counts` takes time of its own."""
    import torch
    from torch import distributed
    from torchrec.distributed.model_parallel import DistributedModelParallel

    from initopt import eliminated
    from tests.multirank.eliminated_ranks import groups

    seen: Counter[str] = Counter()
    os.environ["LOCAL_WORLD_SIZE"] = str(case.local)
    with own_group():
        torch.manual_seed(5 + (int(os.environ["RANK"]) if case.seeds == "rank" else 0))
        model, plan, sharders = built(case)
        distributed.barrier()
        before, start = groups(), time.perf_counter()
        counting = counted(seen) if counts else nullcontext()
        with counting, nullcontext() if rewrites is None else eliminated(rewrites):
            DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=sharders)
        made = Made(time.perf_counter() - start, sum(seen.values()), groups() - before)
        distributed.barrier()
    return made


def on_rank(cases: Sequence[Case], ways: Sequence[Sequence[str] | None], rounds: int, latency: float) -> Any:
    """Make each case in each way, in turn, so many rounds."""
    import logging
    import warnings

    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    if latency:
        from benchmarks.trainers import emulation, emulation_values

        emulation_values.COLLECTIVE_ALPHA_SECONDS = latency
        emulation_values.RENDEZVOUS_SECONDS = 0.0
        emulation.install("cluster")
    made = []
    for case in cases:
        counts = [timed(case, way, counts=True) for way in ways]
        turns = []
        for turn in range(rounds):
            # Each way as often before the other as after it.
            order = list(enumerate(ways))[:: 1 if turn % 2 else -1]
            found = {place: timed(case, way) for place, way in order}
            turns.append([replace(counts[place], seconds=found[place].seconds) for place in range(len(ways))])
        made.append(turns)
    return made


def equal(cases: Sequence[Case]) -> list[bool]:
    """Whether each case, made and trained, is as TorchRec's on this rank."""
    import logging
    import warnings

    from initopt import eliminated

    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    return [outcome(case, nullcontext).result() == outcome(case, eliminated).result() for case in cases]


def fitting(case: Case, ranks: int) -> Case | None:
    """The case with two hosts; None where the job has too few ranks for some of its tables."""
    if ranks > 2:
        return replace(case, local=ranks // 2)
    # Two ranks are two hosts of one, where a grid has nothing to divide by rows.
    return None if "grid_shard" in case.shardings else replace(case, local=1)


def table(ranks: int, rounds: int, latency: float) -> list[str]:
    """The rows of all cases for so many ranks."""
    from initopt.comm_elim.elimination import REWRITES

    cases = [one for case in CASES if (one := fitting(case, ranks)) is not None]
    found = fork_ranks(on_rank, cases, (None, REWRITES), rounds, latency, ranks=ranks, timeout=900)
    same = None if latency else fork_ranks(equal, cases, ranks=ranks, timeout=900)
    rows = []
    for index, case in enumerate(cases):
        slowest = [[max(rank[index][turn][way].seconds for rank in found) for way in (0, 1)] for turn in range(rounds)]
        stock, mine = found[0][index][0]
        told = "" if same is None else "yes" if all(rank[index] for rank in same) else "**NO**"
        rows.append(
            f"| {ranks} | {_named(case)} | {stock.meetings} -> {mine.meetings} | {stock.groups} -> {mine.groups} "
            f"| {_spread([1e3 * a for a, _ in slowest], 1)} | {_spread([a / b for a, b in slowest], 2)} | {told} |"
        )
    return rows


def by_itself(rounds: int) -> list[str]:
    """The rows of each rewrite without the others, for four ranks."""
    from initopt.comm_elim.elimination import REWRITES

    ways = (None, (), *((name,) for name in REWRITES), REWRITES)
    cases = BY_ITSELF
    found = fork_ranks(on_rank, cases, ways, rounds, 0.0, ranks=4, timeout=900)
    rows = []
    for index, case in enumerate(cases):
        for way, rewrites in enumerate(ways[1:], 1):
            pairs = [
                [max(rank[index][turn][which].seconds for rank in found) for which in (0, way)]
                for turn in range(rounds)
            ]
            stock, mine = found[0][index][0][0], found[0][index][0][way]
            name = "all" if rewrites == REWRITES else " ".join(rewrites or ()) or "none (the agreement alone)"
            rows.append(
                f"| {_named(case)} | {name} | {stock.meetings} -> {mine.meetings} "
                f"| {_spread([a / b for a, b in pairs], 2)} |"
            )
    return rows


def many(ranks: int, local: int) -> tuple[int, int]:
    """Calls that create a group on rank 0 of a job with torch's fake backend: TorchRec's, and initopt's."""
    import torch
    from torch import distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torchrec.distributed import comm

    from initopt.comm_elim import groups as rewritten

    os.environ["LOCAL_WORLD_SIZE"] = str(local)
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    seen: Counter[str] = Counter()
    with counted(seen):
        comm.intra_and_cross_node_pg(torch.device("cpu"))
    before = seen["new_group"]
    comm._INTRA_PG = comm._CROSS_PG = None
    left_out: list[int] = []
    from torchrec.distributed.sharding import twrw_sharding

    seen.clear()
    known = len(distributed.distributed_c10d._world.pg_map)
    with counted(seen), rewritten.rewritten(left_out.append, lambda why: None):
        twrw_sharding.intra_and_cross_node_pg(torch.device("cpu"))
    assert not seen and sum(left_out) == before + 2
    return before, len(distributed.distributed_c10d._world.pg_map) - known


def _named(case: Case) -> str:
    kinds = Counter(case.shardings)
    tables = (
        " + ".join(f"{count} {kind}" for kind, count in kinds.items())
        if len(kinds) < 4
        else (f"{len(case.shardings)} tables, {len(kinds)} kinds")
    )
    return f"{case.module}, {tables}{', other seeds' if case.seeds != 'equal' else ''}"


def _spread(values: Sequence[float], digits: int) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} ... {max(values):.{digits}f})"


_TIMED = """| ranks | tables | meetings | groups | TorchRec, ms | TorchRec / initopt | equal |
|---:|---|---|---|---|---|---|"""


def parts(chosen: argparse.Namespace) -> Iterator[tuple[str, list[str]]]:
    """Measure and yield the chosen parts, each with its heading."""
    rounds = f"{chosen.rounds} rounds"
    for ranks in chosen.ranks:
        yield f"{ranks} gloo ranks, {rounds}, nothing emulated", [_TIMED, *table(ranks, chosen.rounds, 0.0)]
    for latency in chosen.latencies:
        heading = f"Emulated: each collective {latency:g} ms later, 4 ranks, {rounds}"
        yield heading, [_TIMED, *table(4, chosen.rounds, latency / 1e3)]
    if chosen.alone:
        head = ["| tables | rewrite | meetings | TorchRec / initopt |", "|---|---|---|---|"]
        yield f"Each rewrite by itself, 4 ranks, {rounds}, nothing emulated", [*head, *by_itself(chosen.rounds)]
    head = ["| ranks | groups that TorchRec creates on a rank | initopt |", "|---:|---:|---:|"]
    counts = [(ranks, *fork_ranks(many, ranks, 8, ranks=1)[0]) for ranks in (64, 1024)]
    yield "Groups of hosts, fake backend, 8 ranks a host", head + [f"| {r} | {a} | {b} |" for r, a, b in counts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--latencies", type=float, nargs="*", default=[0.1, 0.5, 2.0], help="ms a collective, emulated")
    parser.add_argument("--alone", action=argparse.BooleanOptionalAction, default=True, help="each rewrite by itself")
    parser.add_argument("--save", action="store_true", help=f"put what was measured into {RESULTS.name}")
    chosen = parser.parse_args()
    found: dict[str, str] = {}
    if chosen.save and RESULTS.exists():
        old = RESULTS.read_text().split("\n## ")[1:]
        found = {part.split("\n", 1)[0]: part.split("\n", 1)[1].strip() for part in old}
    for heading, rows in parts(chosen):
        found[heading] = f"{_measured()}\n\n" + "\n".join(rows)
        print(f"## {heading}\n\n{found[heading]}\n", flush=True)
        if chosen.save:
            sections = "\n\n".join(f"## {one}\n\n{text}" for one, text in found.items())
            RESULTS.write_text(
                f"# Meetings of ranks\n\n`python -m benchmarks.bench_collectives --save`\n\n{sections}\n"
            )


def _measured() -> str:
    return about("bench_collectives").split("`", 2)[2].split(", one thread")[0].strip() + "."


if __name__ == "__main__":
    main()
