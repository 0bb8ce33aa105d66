"""Meetings of ranks while a DistributedModelParallel is made: TorchRec's, and what is left of them.

    python -m benchmarks.bench_collectives --save      # ~16 minutes on two cores

Ranks are forked from one warm process and meet over gloo. Each row is a start of its own: in it the model is made as
TorchRec makes it and with its meetings left out, in turn, round by round, in one process group. *Collectives* are calls
that meet other ranks while the model is made, the agreement among them; a call may be several messages. *Of all ranks*
are those that every rank of the job comes to; the goal is two, and ranks with other seeds need a third. *Groups* are
those that are created on a rank, and how many of them it belongs to. *Made in* is the wall time of the construction on
the slowest rank, *in meetings* the part of it on the median rank that is spent inside of collectives and the creation
of groups, waits included. Ratios are TorchRec's over initopt's of the same round, median (lowest ... highest). The
state, the metadata, the optimizer, the losses of three steps, the metrics and the generator are compared (*equal*); EC
with data-parallel tables is not trained, which TorchRec can't on a CPU.

Where a latency is given it is emulated: each collective of a group sleeps so long, and 0.8 ns a byte, before it starts,
and nothing else is slower (`benchmarks/trainers/emulation.py`). The creation of a group is not made slower.

Counts for more ranks than a machine bears are those of one rank whose other ranks are torch's fake backend, for the
whole construction (`tests/multirank/fake_world.py`). A test holds that they are those of gloo where both run. Two
dimensions (DMPCollection) want a GPU: TorchRec's assertion is left out here, all else is its own code.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.bench_dynamic_shapes import about
from tests.multirank.eliminated_ranks import (
    HOW,
    Case,
    Counts,
    constructed,
    forgotten,
    outcome,
    own_group,
)
from tests.multirank.fake_world import fake_world
from tests.multirank.forked import fork_ranks
from tests.multirank.forked_agents import fork_agents

RESULTS = Path(__file__).parent / "results" / "collectives.md"

KINDS = HOW[:3] + HOW[5:]
TWRW = Case("EBC", ("table_row_wise",) * 8)
EC = Case("EC", ("table_wise",) * 60)
MC = Case("MC EBC", ("row_wise",) * 8)
MIXED = Case("EBC", HOW * 2)
SEEDS = replace(MIXED, seeds="rank")
CASES = (
    *(Case("EBC", (kind,) * 8) for kind in HOW),
    *(Case("EC", (kind,) * 8, steps=0 if kind == "data_parallel" else 3) for kind in KINDS),
    EC,
    MC,
    Case("MC EC", ("row_wise",) * 8),
    MIXED,
    SEEDS,
    Case("EBC", (HOW * 34)[:200], steps=1),
    Case("EBC", ("table_wise",) * 8, replicas=2),
    replace(TWRW, replicas=2),
    *(replace(MIXED, metrics=name) for name in ("RecMetricModule", "CPUOffloadedRecMetricModule")),
)
LARGE = (TWRW, MIXED, Case("EBC", ("table_wise",) * 8), MC)
"""The rows for many ranks and for latencies: groups, tables of all kinds, little to leave out, metadata."""
MOST = 32
"""With more ranks there are the first two of these rows: a round takes half a minute."""
BY_ITSELF = (Case("EC", ("table_wise", "row_wise", "data_parallel") * 8, steps=0), MIXED, MC)
"""Between them they have something for every rewrite."""
FAKE = (64, 1024)
HOSTS = (TWRW, MIXED, SEEDS)
EMULATED_AT = 8


def size(ranks: int, index: int) -> int:
    """How many rows a table has: few, and as many on each rank, so that none is without one."""
    return -(-max(32 + 8 * index, 4 * ranks) // ranks) * ranks


def around(rewrites: Sequence[str] | None) -> AbstractContextManager[Any]:
    """With these rewrites, or as TorchRec does."""
    from initopt import eliminated

    return nullcontext() if rewrites is None else eliminated(rewrites)


def quietly() -> None:
    """TorchRec says much; so does initopt where ranks have other seeds."""
    import logging
    import warnings

    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")


def turns(case: Case, ways: Sequence[Sequence[str] | None], rounds: int, latency: float) -> list[list[Counts]]:
    """Make a case in each way, in turn, so many rounds."""
    quietly()
    if latency:
        from benchmarks.trainers import emulation, emulation_values

        emulation_values.COLLECTIVE_ALPHA_SECONDS = latency
        emulation_values.RENDEZVOUS_SECONDS = 0.0
        emulation.install("cluster")
    found = []
    sizes = partial(size, int(os.environ["WORLD_SIZE"]))
    with own_group():
        anew(partial(constructed, case, rows=sizes))
        for turn in range(rounds):
            # Each way as often before the other as after it.
            order = list(enumerate(ways))[:: 1 if turn % 2 else -1]
            made = {place: anew(partial(constructed, case, partial(around, way), rows=sizes)) for place, way in order}
            found.append([made[place] for place in range(len(ways))])
    return found


def anew(make: Any) -> Any:
    """What `make` returns, with nothing left over of what was made before, and nothing left behind."""
    from torch import distributed
    from torch.distributed import distributed_c10d as c10d

    found = make()
    distributed.barrier()
    for group in list(c10d._world.pg_map):
        if group is not distributed.group.WORLD:
            distributed.destroy_process_group(group)
    forgotten()
    return found


def equal(case: Case) -> bool:
    """Whether a case, made and trained, is as TorchRec's on this rank."""
    from initopt import eliminated

    quietly()
    return outcome(case, nullcontext).result() == outcome(case, eliminated).result()


def faked(case: Case, ranks: int) -> list[Counts]:
    """What one rank of so many would do, as TorchRec does and with all rewrites."""
    from initopt.optimizations import REWRITES

    quietly()
    found = []
    for way in (None, REWRITES):
        with fake_world(ranks):
            found.append(constructed(case, partial(around, way), rows=partial(size, ranks)))
    return found


def on_two_hosts(case: Case) -> tuple[Any, Any]:
    """A case as TorchRec makes it and without meetings, on a rank of two agents."""
    from initopt import eliminated

    quietly()
    assert os.environ["LOCAL_WORLD_SIZE"] == str(case.local), "the agent's"
    return outcome(case, nullcontext), outcome(case, eliminated)


def fitting(case: Case, ranks: int) -> Case | None:
    """The case for so many ranks, on two hosts or on hosts of eight; None where they are too few for its tables."""
    hosts = max(2, ranks // case.replicas // 8)
    local = ranks // case.replicas // hosts
    # Two ranks are two hosts of one, where a grid has nothing to divide by rows.
    fits = local > 1 or (local == 1 and "grid_shard" not in case.shardings)
    return replace(case, local=local) if fits else None


def timed_rows(
    cases: Sequence[Case], ranks: int, rounds: int, *, latency: float = 0.0, compared: bool = False
) -> Iterator[str]:
    """The rows of these cases for so many ranks, one by one."""
    from initopt.optimizations import REWRITES

    for case in filter(None, (fitting(one, ranks) for one in cases)):
        found = fork_ranks(turns, case, (None, REWRITES), rounds, latency, ranks=ranks, timeout=600)
        same = "" if not compared else _yes(all(fork_ranks(equal, case, ranks=ranks, timeout=600)))
        slowest = [[max(rank[turn][way].seconds for rank in found) for way in (0, 1)] for turn in range(rounds)]
        inside = [
            [statistics.median(rank[turn][way].meeting for rank in found) for way in (0, 1)] for turn in range(rounds)
        ]
        ratios = [a / b for a, b in slowest]
        cells = [
            str(ranks),
            _named(case),
            *_counts(found[0][0][0], found[0][0][1]),
            " -> ".join(f"{1e3 * statistics.median(each):.1f}" for each in zip(*inside, strict=True)),
            _spread([a / b for a, b in inside], 1),
            _spread([1e3 * a for a, _ in slowest], 0),
            _spread(ratios, 2),
            _in_words(ratios),
            *([same] if compared else []),
        ]
        yield f"| {' | '.join(cells)} |"


def by_itself(ranks: int, rounds: int) -> Iterator[str]:
    """The rows of each rewrite without the others."""
    from initopt.optimizations import REWRITES

    ways = (None, (), *((name,) for name in REWRITES), REWRITES)
    for case in filter(None, (fitting(one, ranks) for one in BY_ITSELF)):
        found = fork_ranks(turns, case, ways, rounds, 0.0, ranks=ranks, timeout=600)
        for way, rewrites in enumerate(ways[1:], 1):
            stock, agreed, mine = (found[0][0][which] for which in (0, 1, way))
            whole, alone = (
                [
                    max(rank[turn][which].seconds for rank in found) / max(rank[turn][way].seconds for rank in found)
                    for turn in range(rounds)
                ]
                for which in (0, 1)
            )
            name = "all" if rewrites == REWRITES else " ".join(rewrites or ()) or "none: the agreement alone"
            if not rewrites:
                words = "its cost: " + _in_words(whole)
            elif (mine.collectives, mine.created) == (agreed.collectives, agreed.created):
                words = "brings nothing: it has nothing to leave out here"
            else:
                words = _in_words(alone).replace("no difference", "brings nothing")
            yield (
                f"| {_named(case)} | {name} | {' | '.join(_counts(stock, mine))} | {_spread(whole, 2)} "
                f"| {_spread(alone, 2) if rewrites else ''} | {words} |"
            )


def fake_rows(ranks: int) -> Iterator[str]:
    """The rows of all cases for so many ranks that are not there."""
    # Ranks that are not there have this one's seed.
    for case in filter(None, (fitting(one, ranks) for one in CASES if one.seeds == "equal")):
        [[stock, mine]] = fork_ranks(faked, case, ranks, ranks=1, timeout=300)
        yield f"| {ranks} | {_named(case)} | {' | '.join(_counts(stock, mine))} | {_goal(mine)} |"


def host_rows() -> Iterator[str]:
    """The rows of two hosts."""
    for case in HOSTS:
        found = fork_agents(on_two_hosts, case)
        stock, mine = found[0]
        same = all(one.result() == other.result() for one, other in found)
        cells = (
            f"{sum(stock.meetings.values()) - stock.meetings.get('new_group', 0)} -> "
            f"{sum(mine.meetings.values()) - mine.meetings.get('new_group', 0)}",
            f"{stock.everybody} -> {mine.everybody}",
            f"{stock.created} -> {mine.created} of {mine.groups}",
        )
        yield f"| {_named(case)} | {' | '.join(cells)} | {_yes(same)} |"


def _counts(stock: Counts, mine: Counts) -> tuple[str, str, str]:
    """Three cells: collectives, those of all ranks, groups."""
    return (
        f"{stock.collectives} -> {mine.collectives}",
        f"{stock.everybody} -> {mine.everybody}",
        f"{stock.created} -> {mine.created} of {mine.belongs}",
    )


def _goal(mine: Counts) -> str:
    missed = []
    if mine.everybody > 2:
        missed.append(f"{mine.everybody} of all ranks")
    if mine.created > mine.belongs:
        missed.append(f"{mine.created - mine.belongs} groups of others")
    return f"**missed**: {', '.join(missed)}" if missed else "met"


def _in_words(ratios: Sequence[float]) -> str:
    """What rounds say of TorchRec's time over another one."""
    if min(ratios) > 1:
        return "shorter in each round"
    if max(ratios) < 1:
        return "**longer** in each round"
    return "no difference that the rounds show"


def _yes(holds: bool) -> str:
    return "yes" if holds else "**NO**"


def _named(case: Case) -> str:
    kinds = Counter(case.shardings)
    tables = (
        " + ".join(f"{count} {kind}" for kind, count in kinds.items())
        if len(kinds) < 4
        else (f"{len(case.shardings)} tables, {len(kinds)} kinds")
    )
    more = (
        ", other seeds" if case.seeds != "equal" else "",
        f", 2D with {case.replicas} replicas" if case.replicas > 1 else "",
        f", {case.metrics}" if case.metrics else "",
    )
    return f"{case.module}, {tables}{''.join(more)}"


def _spread(values: Sequence[float], digits: int) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} ... {max(values):.{digits}f})"


_COUNTS = ("collectives", "of all ranks", "groups created")
_TIMED = (
    *("ranks", "model", *_COUNTS, "in meetings, ms", "TorchRec / initopt in meetings"),
    *("TorchRec made in, ms", "TorchRec / initopt", "in words"),
)


def parts(chosen: argparse.Namespace) -> Iterator[tuple[str, str, Sequence[str], Iterator[str]]]:
    """The chosen parts: heading, how it is measured, columns, and rows, each of which is measured when it is taken."""
    rounds, fewer = chosen.rounds, max(1, chosen.rounds - 2)
    counted = "No time was taken: torch's fake backend, one rank, 8 ranks a host."
    for ranks in chosen.fake:
        yield f"Counts, {ranks} ranks", counted, ("ranks", "model", *_COUNTS, "goal"), fake_rows(ranks)
    hosts = "Two agents of torchrun on one machine, two ranks each."
    yield "Two hosts", hosts, ("model", *_COUNTS, "equal"), host_rows()
    said = f"{rounds} rounds, nothing emulated."
    for ranks in chosen.ranks:
        rows = timed_rows(CASES, ranks, rounds, compared=True)
        yield f"{ranks} gloo ranks", said, (*_TIMED, "equal"), rows
    for ranks in chosen.many:
        said = f"{fewer} rounds, nothing emulated; {ranks / (os.cpu_count() or 1):.0f} ranks share a core."
        yield f"{ranks} gloo ranks", said, _TIMED, timed_rows(LARGE if ranks <= MOST else LARGE[:2], ranks, fewer)
    for latency in chosen.latencies:
        said = f"{fewer} rounds. **Emulated**: each collective starts {latency:g} ms later."
        rows = timed_rows(LARGE, EMULATED_AT, fewer, latency=latency / 1e3)
        yield f"Emulated latency of {latency:g} ms, {EMULATED_AT} gloo ranks", said, _TIMED, rows
    if chosen.alone:
        columns = ("model", "rewrite", *_COUNTS, "TorchRec / initopt", "agreement alone / with it", "in words")
        said = f"{fewer} rounds, nothing emulated."
        yield f"Each rewrite by itself, {EMULATED_AT} gloo ranks", said, columns, by_itself(EMULATED_AT, fewer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4, 8], help="all rows, compared")
    parser.add_argument("--many", type=int, nargs="*", default=[16, 32, 64], help="some rows")
    parser.add_argument("--fake", type=int, nargs="*", default=FAKE, help="counts only, of one rank of so many")
    parser.add_argument("--rounds", type=int, default=5, help="two less where ranks are many, or latencies emulated")
    parser.add_argument("--latencies", type=float, nargs="*", default=[0.1, 0.5, 2.0], help="ms a collective, emulated")
    parser.add_argument("--alone", action=argparse.BooleanOptionalAction, default=True, help="each rewrite by itself")
    parser.add_argument("--save", action="store_true", help=f"put each row into {RESULTS.name} when it is measured")
    chosen = parser.parse_args()
    # Once, for all ranks of all rows.
    import torchrec.metrics.cpu_offloaded_metric_module  # noqa: F401

    found: dict[str, str] = {}
    if chosen.save and RESULTS.exists():
        old = RESULTS.read_text().split("\n## ")[1:]
        found = {part.split("\n", 1)[0]: part.split("\n", 1)[1].strip() for part in old}
    began = time.perf_counter()
    for heading, said, columns, rows in parts(chosen):
        head = [f"{said} {_measured()}", "", f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
        print("\n".join(["", f"## {heading}", "", *head]), flush=True)
        done: list[str] = []
        for row in rows:
            done.append(row)
            print(row, flush=True)
            found[heading] = "\n".join([*head, *done])
            if chosen.save:
                _save(found)
    print(f"\n{(time.perf_counter() - began) / 60:.1f} minutes")


def _save(found: dict[str, str]) -> None:
    sections = "\n\n".join(f"## {heading}\n\n{text}" for heading, text in found.items())
    RESULTS.write_text(f"# Meetings of ranks\n\n`python -m benchmarks.bench_collectives --save`\n\n{sections}\n")


def _measured() -> str:
    return about("bench_collectives").split("`", 2)[2].split(", one thread")[0].strip() + "."


if __name__ == "__main__":
    main()
