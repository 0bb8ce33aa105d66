"""Start-ups that never ran: three ranks with round figures, written as the recorder writes them.

Rank 2 imports slowly and rank 0 plans for all, so that the chain of the slowest rank crosses ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path

from initopt.graph import Graph, Step
from initopt.imports import Imported, ImportLine
from initopt.record import Advised, CompileCache, Compiled, Digest, Header, Optimized, Span, Trailer, Usage, Watched
from initopt.unused import Unused

BORN = 1_795_857_240.0
"""Unix time of the first process start: 2026-11-28 09:14 UTC."""

GRAPH = Graph(
    [
        Step("process_group", lane="comms", stage="process_group_init"),
        Step("reader", lane="io:data", stage="get_first_batch_data"),
        Step("model", uses=("rng",), stage="train_module_creation"),
        Step("plan", needs=("model",), after=("process_group",), stage="pre_train"),
        Step("plan.broadcast", needs=("plan",), lane="comms", stage="pre_train"),
        Step("shard", needs=("model", "plan.broadcast"), uses=("rng",), stage="pre_train"),
        Step("compile", needs=("model",), lane="process:compile", stage="pre_train"),
        Step("optimizer", needs=("shard",), stage="pre_train"),
        Step("first_step", needs=("optimizer", "compile", "reader"), stage="get_first_batch_data"),
    ],
    name="dlrm",
)

WORK: dict[str, tuple[float, float, float]] = {
    "imports": (3.0, 3.2, 4.5),
    "process_group": (0.6, 0.6, 0.6),
    "reader": (5.0, 5.2, 5.1),
    "model": (2.0, 2.0, 2.0),
    "plan": (3.0, 0.1, 0.1),
    "plan.broadcast": (0.04, 0.04, 0.04),
    "shard": (2.5, 2.5, 2.6),
    "compile": (4.0, 4.0, 4.0),
    "optimizer": (0.2, 0.2, 0.2),
    "first_step": (0.5, 0.5, 0.5),
}
"""Seconds of work of each step on each rank, without waiting."""

MEETS = {"process_group": "init_process_group", "plan.broadcast": "broadcast", "shard": "barrier"}
"""The collective at the end of a step, which it leaves 20 ms after the last rank came."""


def serial_spans() -> list[list[Span]]:
    """The spans of every rank when all steps run one after the other on the main thread, in the graph's order."""
    now = [0.0, 0.0, 0.0]
    spans: list[list[Span]] = [[], [], []]
    for sequence, name in enumerate(["imports", *GRAPH.order()]):
        came = [now[rank] + WORK[name][rank] for rank in range(3)]
        for rank in range(3):
            start, end = now[rank], came[rank]
            if name in MEETS:
                end = max(came) + 0.02
                spans[rank].append(_meeting(name, sequence, came[rank], end, rank, "main"))
            spans[rank].append(_step(name, start, end, rank, "main"))
            now[rank] = end
    return spans


def overlapped_spans() -> list[list[Span]]:
    """The spans of every rank when each step runs on its lane as soon as it can."""
    ends: list[dict[str, float]] = [{}, {}, {}]
    free: list[dict[str, float]] = [{}, {}, {}]
    spans: list[list[Span]] = [[], [], []]
    for rank in range(3):
        spans[rank].append(_step("imports", 0.0, WORK["imports"][rank], rank, "main"))
    for sequence, name in enumerate(GRAPH.order()):
        lane = GRAPH[name].lane
        starts = []
        for rank in range(3):
            ready = [ends[rank][edge.before] for edge in GRAPH.predecessors(name)]
            starts.append(max([WORK["imports"][rank], free[rank].get(lane, 0.0), *ready]))
        came = [starts[rank] + WORK[name][rank] for rank in range(3)]
        for rank in range(3):
            end = came[rank]
            if name in MEETS:
                end = max(came) + 0.02
                spans[rank].append(_meeting(name, sequence, came[rank], end, rank, lane))
            spans[rank].append(_step(name, starts[rank], end, rank, lane))
            ends[rank][name] = free[rank][lane] = end
    return spans


def compiled_spans() -> tuple[list[list[Span]], list[Compiled | CompileCache]]:
    """The overlapped spans, and what was compiled in them: ahead by all ranks, and once more by rank 2.

    Rank 0 led, the others waited for it for 2.5 seconds in their step `compile`.
    """
    spans = overlapped_spans()
    found: list[Compiled | CompileCache] = []
    for rank in range(3):
        start = next(span.start for span in spans[rank] if span.name == "compile")
        cached = "miss" if rank == 0 else "hit"
        took = (1.0, 1.0, 1.8) if rank == 0 else (0.2, 0.2, 0.4)
        now = start if rank == 0 else start + 2.5
        for name, seconds in zip(("Dense.forward", "Interaction.forward", "Over.forward"), took, strict=True):
            turn = _turn(name, now, now + seconds, rank, "compile", cached)
            found.append(turn)
            now = turn.end
        wait = 0.0 if rank == 0 else 2.5
        role, hit = ("leader" if rank == 0 else "follower"), rank > 0
        why = "no bundle for this key" if rank == 0 else ""
        found.append(CompileCache(role, 0, wait, hit, 24, 1_258_291, why, rank))  # type: ignore[arg-type]
    first = next(span.start for span in spans[2] if span.name == "first_step")
    late = _turn("Over.forward", first + 0.05, first + 0.25, 2, "first_step", "miss")
    size = "tensor 'x' size mismatch at index 0. expected 128, actual 64"
    found.append(replace(late, compile_id="2/1", direction="forward", recompile_reason=size))
    broken = _turn("Metrics.forward", first + 0.25, first + 0.3, 2, "first_step", "")
    failure = "Unsupported: Data-dependent branching (metrics.py:14)"
    found.append(replace(broken, operations=0, direction="forward", backend=0.0, code_gen=0.0, failure=failure))
    for one in found:
        if isinstance(one, Compiled):
            kind = {"kind": "compile", "stage": "compile", "step": one.step, "call_site": one.place}
            error = one.failure.partition(":")[0]
            span = Span(one.name, one.start, one.end, one.rank, one.lane, error=error, **kind)  # type: ignore[arg-type]
            spans[one.rank].append(span)
    return spans, found


def wasteful() -> tuple[list[list[Span]], Graph, list[Imported | ImportLine | Unused | Watched]]:
    """The serial spans with two steps that nothing needs, and what was imported and not used, on all ranks."""
    spans, found = serial_spans(), list[Imported | ImportLine | Unused | Watched]()
    first = GRAPH["first_step"]
    validation = Step("validation", needs=("reader",), lane="io:val", call_site="train.py:61")
    metrics = Step("metrics", needs=("optimizer",), uses=("rng",), call_site="train.py:70")
    graph = Graph([*(step for step in GRAPH.values() if step != first), validation, metrics, first], name="dlrm")
    for rank in range(3):
        last = spans[rank].pop()
        at = last.start
        spans[rank].append(Span("validation", at - 3.0, at - 0.5, rank, "io:val"))
        spans[rank].append(Span("metrics", at, at + 0.8, rank))
        spans[rank].append(replace(last, start=at + 0.8, end=last.end + 0.8))
        took = WORK["imports"][rank]
        call = Span("new_group", at - 1.0, at - 0.6, rank, "main", "collective", step="shard", op="new_group")
        spans[rank].append(replace(call, group="7", sequence=0, call_site="train.py:84"))
        parts = [("torch", 0.05, 0.5), ("torchrec", 0.55, 0.4)]
        spans[rank] += [
            Span(f"import {name}", start * took, (start + part) * took, rank, kind="import", step="imports")
            for name, start, part in parts
        ]
        places = ("train.py:4", "", "train.py:4"), ("train.py:5", "", "train.py:5")
        deep = ("torchrec/distributed/embedding_a_long_way_down/embedding.py:29", "torchrec", "train.py:5")
        found += [
            Imported("torch", 1139, 0.5 * took, 0.45 * took, 0.5 * took, *places[0], "yes", (("torch._C", 0.3),), rank),
            Imported("torchrec", 133, 0.2 * took, 0.2 * took, 0.4 * took, *places[1], "yes", (), rank),
            Imported("tensordict", 59, 0.2 * took, 0.1 * took, 0.2 * took, *deep, "no", (), rank),
            Imported(
                "pandas", 400, 0.05 * took, 0.04 * took, 0.05 * took, "train.py:9", "", "train.py:9", "no", (), rank
            ),
            ImportLine("train.py:4", 0.5 * took, (("torch", 0.5 * took),), "yes", "imports", True, rank),
            ImportLine(
                "train.py:5",
                0.4 * took,
                (("torchrec", 0.2 * took), ("tensordict", 0.2 * took)),
                "yes",
                "imports",
                True,
                rank,
            ),
            ImportLine(
                "train.py:9",
                0.05 * took,
                (("pandas", 0.04 * took), ("pytz", 0.01 * took)),
                "yes",
                "imports",
                True,
                rank,
                (("pandas", 0.04 * took),),
                ("pytz", "six"),
            ),
            ImportLine("train.py:9", 0.01, (("pandas", 0.01),), "no", "model", True, rank, (("pandas", 0.01),)),
            ImportLine("initopt/graph.py:7", 0.02, (("networkx", 0.02),), "yes", "imports", False, rank),
            ImportLine("initopt/record.py:9", 0.01, (), "yes", "imports", False, rank),
            ImportLine("concurrent/futures/thread.py:58", 0.015, (("six", 0.015),), "yes", "imports", False, rank),
            Watched(True, "used", True, ("numpy", "yaml"), rank),
            Unused("loader", "train.py:90", "reader", alone=False, rank=rank),
            Unused("group", "train.py:84", "shard", "7", rank=rank),
        ]
    return spans, graph, found


def _turn(name: str, start: float, end: float, rank: int, step: str, cached: str) -> Compiled:
    took = end - start
    breaks = ("Call to `print` (model.py:70)",) if name.startswith("Inter") and cached == "miss" else ()
    return Compiled(
        name,
        f"model.py:{40 + len(name)}",
        start,
        end,
        compile_id="0/0",
        direction="both",
        operations=4,
        dynamo=0.1 * took,
        aot_autograd=0.2 * took if cached == "miss" else 0.9 * took,
        backend=0.7 * took if cached == "miss" else 0.0,
        code_gen=0.6 * took if cached == "miss" else 0.0,
        aot_autograd_cache=cached,  # type: ignore[arg-type]
        fx_graph_cache=cached,  # type: ignore[arg-type]
        breaks=breaks,
        rank=rank,
        lane="process:compile" if step == "compile" else "main",
        step=step,
    )


def write_run(
    root: Path,
    spans: Iterable[Iterable[Span]],
    *,
    number: int = 7,
    mode: str = "serial",
    graph: Graph | None = GRAPH,
    labels: tuple[str, ...] = (),
    digests: Mapping[str, str] | None = None,
    world_size: int | None = None,
    cpu: float = 9.5,
    compiles: Iterable[Compiled | CompileCache] = (),
    extra: Iterable[Imported | ImportLine | Unused | Watched | Optimized | Advised] = (),
) -> Path:
    """Write a run under `root` and give its directory. `compiles` and `extra` go to the ranks that they name."""
    compiles, extra = list(compiles), list(extra)
    path = root / f"{number:04}"
    path.mkdir(parents=True)
    ranks = [list(of_rank) for of_rank in spans]
    for rank, of_rank in enumerate(ranks):
        host = "trn-01" if rank < 2 else "trn-02"
        header = Header(
            rank=rank,
            world_size=world_size or len(ranks),
            job="dlrm",
            mode=mode,
            host=host,
            pid=1000 + rank,
            process_start=BORN,
            cores=8,
            labels=labels,
            commit="3f9c2e1d0b7a",
            versions={"python": "3.11.7", "torch": "2.13.0", "torchrec": "1.9.2", "initopt": "0.1.0"},
            clock="one clock",
        )
        end = max((span.end for span in of_rank), default=0.0)
        lines = [{"kind": "header", **asdict(header)}]
        lines += [asdict(replace(span, rank=rank, wait=0.0)) for span in of_rank]
        for name, sha256 in (digests or {}).items():
            lines.append({"kind": "digest", **asdict(Digest(name, sha256, rank))})
        for one in compiles:
            if one.rank == rank:
                kind = "compiled" if isinstance(one, Compiled) else "compile_cache"
                lines.append({"kind": kind, **asdict(one)})
        kinds = {Imported: "imported", ImportLine: "import_line", Unused: "unused", Watched: "watched"}
        kinds |= {Optimized: "optimized", Advised: "advised"}
        lines += [{"kind": kinds[type(one)], **asdict(one)} for one in extra if one.rank == rank]
        lines.append({"kind": "usage", **asdict(Usage(end, cpu, rank))})
        lines.append({"kind": "trailer", **asdict(Trailer(rank, end, 0.012, 2**30))})
        (path / f"rank{rank:05}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if graph is not None:
        (path / "graph.json").write_text(graph.to_json())
    return path


def _step(name: str, start: float, end: float, rank: int, lane: str) -> Span:
    kind = "import" if name == "imports" else "step"
    site = "" if name == "imports" else f"train.py:{10 + 7 * list(WORK).index(name)}"
    return Span(name, start, end, rank, lane, kind, call_site=site)  # type: ignore[arg-type]


def _meeting(step: str, sequence: int, start: float, end: float, rank: int, lane: str) -> Span:
    op = MEETS[step]
    return Span(
        op,
        start,
        end,
        rank,
        lane,
        "collective",
        step=step,
        op=op,
        group="world",
        sequence=sequence,
        call_site="train.py:99",
    )
