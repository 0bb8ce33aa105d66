"""What torch's compiler did in a start-up: in which step, how long, from a cache or not, and who waited for whom.

It only counts. How a turn of the compiler is seen is another file's business (`compile_cache/compile_events`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from initopt.chain import steps_of

if TYPE_CHECKING:
    from initopt.record import CompileCache, Compiled, Span
    from initopt.runs import Run

CacheUse = Literal["hit", "part", "miss", "bypass", ""]
"""What the caches together did for a graph. `part`: lowered anew, but all code of it was there."""


@dataclass(frozen=True, slots=True)
class Total:
    """The turns of the compiler on one rank together. Times in seconds; `code_gen` is a part of `backend`."""

    took: float = 0.0
    dynamo: float = 0.0
    aot_autograd: float = 0.0
    backend: float = 0.0
    code_gen: float = 0.0
    graphs: int = 0
    from_cache: int = 0
    recompiled: int = 0
    breaks: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True)
class Sharing:
    """Who compiled for whom: the ranks, in order, and the longest that one of the followers waited, in seconds."""

    leaders: tuple[int, ...]
    followers: tuple[int, ...]
    alone: tuple[int, ...]
    waited: float


def compiled_on(run: Run, rank: int) -> list[Compiled]:
    """The turns of the compiler on one rank, in their order."""
    return [one for one in run.compiled if one.rank == rank]


def total(turns: Iterable[Compiled]) -> Total:
    """Count turns of one rank. A graph is one that Dynamo made; its backward part, compiled later, is no other."""
    turns = list(turns)
    graphs = [one for one in turns if one.operations and not one.failure]
    return Total(
        took=sum(one.end - one.start for one in turns),
        dynamo=sum(one.dynamo for one in turns),
        aot_autograd=sum(one.aot_autograd for one in turns),
        backend=sum(one.backend for one in turns),
        code_gen=sum(one.code_gen for one in turns),
        graphs=len(graphs),
        from_cache=sum(cache_use(one) == "hit" for one in graphs),
        recompiled=sum(bool(one.recompile_reason) for one in turns),
        breaks=sum(len(one.breaks) for one in turns),
        failed=sum(bool(one.failure) for one in turns),
    )


def cache_use(one: Compiled) -> CacheUse:
    """What the caches of AOTAutograd and of Inductor did for a graph; "" where neither was asked."""
    used = {one.aot_autograd_cache, one.fx_graph_cache} - {""}
    if len(used) < 2:
        return next(iter(used), "")
    if "bypass" in used:
        return "bypass" if "miss" not in used else "miss"
    return "part" if one.fx_graph_cache == "hit" else "miss"


def compiled_in(run: Run, rank: int) -> dict[tuple[str, float], list[Span]]:
    """The turns of the compiler inside the outer steps of a rank, by name and start of the step.

    What has no step ran on a thread that no step knows of, such as autograd's for a GPU: it counts for the step that
    began last.
    """
    steps = steps_of(run, rank)
    found: dict[tuple[str, float], list[Span]] = {}
    for span in run.of_rank(rank):
        if span.kind != "compile":
            continue
        around = [step for step in steps if step.start <= span.start <= step.end]
        own = [step for step in around if step.name == span.step or step.lane == span.lane]
        if own or (around and not span.step):
            step = (own or around)[-1]
            found.setdefault((step.name, step.start), []).append(span)
    return found


def sharing(run: Run) -> Sharing | None:
    """Who compiled for whom, None where nobody said so. What a rank said last counts."""
    said: dict[int, CompileCache] = {cache.rank: cache for cache in run.compile_caches}
    if not said:
        return None
    ranks = {role: tuple(sorted(rank for rank in said if said[rank].role == role)) for role in _ROLES}
    waited = max((said[rank].waited for rank in ranks["follower"]), default=0.0)
    return Sharing(ranks["leader"], ranks["follower"], ranks["alone"], waited)


_ROLES = ("leader", "follower", "alone")
