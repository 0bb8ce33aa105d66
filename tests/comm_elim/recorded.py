"""Start-ups that never ran, written down call by call: each meeting ends 10 ms after the last rank came."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from initopt.graph import Graph
from initopt.record import Span
from initopt.runs import Run
from tests.synthetic import write_run

COLLECTIVE_UTILS = "torchrec/distributed/collective_utils.py:74 invoke_on_rank_and_broadcast_result"
FLAG = (COLLECTIVE_UTILS, "torchrec/distributed/collective_utils.py:254 init_collective_validation")
PLAN = (COLLECTIVE_UTILS, "torchrec/distributed/planner/planners.py:795 collective_plan")
EC = ("torchrec/distributed/embedding.py:1070 _initialize_torch_state",)
DDP = ("torchrec/distributed/model_parallel.py:183 _ddp_wrap",)
LOOKUP = ("torchrec/distributed/embeddingbag.py:836 init_data_parallel",)
TABLES = ("torchrec/distributed/embeddingbag.py:1636 reset_parameters",)
GROUPS = ("torchrec/distributed/comm.py:212 intra_and_cross_node_pg",)
OWN = ("train.py:40 main",)


@dataclass
class Script:
    """What the ranks do one after the other. `late` is how long a rank works before a meeting."""

    ranks: int = 4
    took: float = 0.01
    now: dict[int, float] = field(default_factory=dict)
    spans: dict[int, list[Span]] = field(default_factory=dict)
    calls: Counter[tuple[int, str]] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        for rank in range(self.ranks):
            self.now[rank], self.spans[rank] = 1.0, [Span("imports", 0.0, 1.0, rank, kind="import")]

    def meet(
        self,
        op: str,
        callers: tuple[str, ...] = OWN,
        *,
        group: str = "world",
        members: tuple[int, ...] | None = None,
        late: dict[int, float] | None = None,
        digest: str | dict[int, str] = "",
        step: str = "setup",
        lane: str = "main",
        **more: Any,
    ) -> None:
        members = tuple(range(self.ranks)) if members is None else members
        for rank in members:
            self.now[rank] += 0.1 + (late or {}).get(rank, 0.0)
        end = max(self.now[rank] for rank in members) + self.took
        for rank in members:
            sequence = self.calls[rank, group]
            self.calls[rank, group] += 1
            self._call(rank, op, end, callers, group, sequence, digest, step, lane, more)

    def make_group(
        self, name: str, ranks: tuple[int, ...], callers: tuple[str, ...] = GROUPS, options: str = "gloo"
    ) -> None:
        for rank in range(self.ranks):
            self.now[rank] += 0.1
            inside = rank in ranks
            more = {"ranks": ranks, "options": options}
            end = self.now[rank] + self.took
            self.calls[rank, name] += inside
            group, sequence = (name, 0) if inside else ("", -1)
            self._call(rank, "new_group", end, callers, group, sequence, "", "setup", "main", more)

    def _call(
        self, rank: int, op: str, end: float, callers: Any, group: str, sequence: int, digest: Any, *rest: Any
    ) -> None:
        step, lane, more = rest
        checksum = digest if isinstance(digest, str) else digest.get(rank, "")
        site = callers[0].rpartition(" ")[0]
        about = {"op": op, "group": group, "sequence": sequence, "call_site": site, "callers": callers, "step": step}
        self.spans[rank].append(
            Span(op, self.now[rank], end, rank, lane, "collective", digest=checksum, bytes=64, **about, **more)
        )
        self.now[rank] = end

    def run(self, root: Path, *, graph: Graph | None = None, steps: bool = True, number: int = 7) -> Run:
        found = []
        for rank in range(self.ranks):
            spans = list(self.spans[rank])
            if steps:
                spans.append(Span("setup", 1.0, self.now[rank], rank))
                spans.append(Span("first_step", self.now[rank], self.now[rank] + 0.5, rank))
            found.append(spans)
        return Run.load(write_run(root, found, number=number, mode="stock", graph=graph))


def stock(*, seeds: str = "equal") -> Script:
    """A start-up of TorchRec: 4 row-wise and 3 data-parallel tables, two hosts, and a barrier of the script's own."""
    script = Script()
    script.meet("init_process_group", ("train.py:8 main",), options="gloo", step="setup")
    script.meet("broadcast_object_list", PLAN, digest="aaaa", root=0, late={0: 2.0})
    script.meet("broadcast_object_list", FLAG, digest="bbbb", root=0)
    for name, ranks in (("1", (0, 1)), ("2", (2, 3))):
        script.make_group(name, ranks)
    script.meet("barrier", GROUPS)
    script.meet("_verify_param_shape_across_processes", LOOKUP, digest="cccc")
    script.meet("_sync_module_states", LOOKUP, digest="cccc", root=0)
    for table in range(3):
        script.meet("broadcast", TABLES, digest={rank: f"{table}{rank}" for rank in range(4)}, root=0)
    for table in range(4):
        script.meet("all_gather_object", EC, digest={rank: f"{table}{rank}" for rank in range(4)}, late={3: 0.2})
    values = {rank: f"d{rank if seeds == 'rank' else 0}" for rank in range(4)}
    script.meet("_verify_param_shape_across_processes", DDP, digest="eeee")
    script.meet("_sync_module_states", DDP, digest=values, root=0)
    script.meet("barrier", ("train.py:60 main",))
    return script
