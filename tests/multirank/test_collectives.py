"""Findings about recorded start-ups of stock TorchRec on four gloo ranks, and orders that differ between real ranks.

Run as a program, this file is one of those ranks.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from initopt.collectives_view import verify_view
from initopt.comm_elim.passes import find
from initopt.comm_elim.timeline import timeline
from initopt.runs import Run
from tests.multirank.forked import fork_ranks
from tests.multirank.launch import launch
from tests.multirank.recorded_ranks import sharded

OPERATIONS = {
    "broadcast_object_list": 2,
    "all_gather_object": 2,
    "_verify_param_shape_across_processes": 2,
    "_sync_module_states": 1,
    "all_gather": 1,
    "broadcast": 1,
    "barrier": 1,
}
"""How many operations of the backend one call is: objects are sent after their length, shapes are gathered and sent."""

STOCK = {"plan": ("local", 1), "validation_flag": ("local", 1), "ddp_sync": ("drop", 2)}


@pytest.mark.parametrize(
    ("module", "shardings", "local", "operations", "verdicts"),
    [
        ("EC", ("row_wise",) * 4, 4, 15, {"ec_metadata": ("local", 4)}),
        ("MC", ("row_wise",) * 4, 4, 43, {"mc_metadata": ("local", 16), "mc_sizes": ("local", 4)}),
        (
            "EBC",
            ("data_parallel", "table_wise", "row_wise") * 3,
            4,
            13,
            {"dp_lookup_sync": ("drop", 2), "dp_tables": ("fuse", 3)},
        ),
        ("EBC", ("table_row_wise",) * 4, 2, 9, {"groups": ("drop", 4), "groups.barrier": ("drop", 2)}),
        (
            "EBC",
            ("table_row_wise",) * 4,
            4,
            9,
            {"groups": ("reuse", 1), "groups#2": ("drop", 4), "groups.barrier": ("drop", 2)},
        ),
    ],
)
def test_the_findings_are_those_counted_by_hand(
    tmp_path: Path,
    module: str,
    shardings: tuple[str, ...],
    local: int,
    operations: int,
    verdicts: dict[str, tuple[str, int]],
) -> None:
    fork_ranks(sharded, tmp_path, module, shardings, ranks=4, env={"LOCAL_WORLD_SIZE": str(local)})
    run = Run.latest(tmp_path)
    meetings = timeline(run).meetings
    assert sum(OPERATIONS.get(met.call.op, 0) for met in meetings) == operations
    found = find(run)
    assert found.problems == () and run.stuck == ()
    told = {one.name: (one.verdict, len(one.meetings)) for one in found.findings if one.verdict != "keep"}
    # Two groups are told apart by what they save, which differs from run to run.
    assert sorted(told.values()) == sorted({**STOCK, **verdicts}.values())
    assert {name.partition("#")[0] for name in told} == {name.partition("#")[0] for name in {**STOCK, **verdicts}}
    assert not verify_view(run).finding


def test_parameters_of_ranks_with_other_seeds_are_kept(tmp_path: Path) -> None:
    fork_ranks(sharded, tmp_path, "EC", ("table_wise",) * 2, "rank", ranks=2)
    found = [one for one in find(Run.latest(tmp_path)).findings if one.name.startswith("ddp_sync")]
    verdicts = {one.meetings[0].call.op: one.verdict for one in found}
    # Their shapes are the same.
    assert verdicts == {"_verify_param_shape_across_processes": "drop", "_sync_module_states": "keep"}


def test_groups_made_in_the_order_of_a_set_are_named(tmp_path: Path) -> None:
    """As in NVIDIA/apex#19 and pytorch/pytorch#25390: one group each for some names, in an order of the rank's own."""
    fork_ranks(other_order, tmp_path, ranks=4)
    (problem,) = timeline(Run.latest(tmp_path), training=True).problems
    assert problem.text == "the ranks did not meet in one order"
    assert [party.ranks for party in problem.parties] == [(0, 1, 2), (3,)]
    assert {party.call_site.rpartition(":")[0].rpartition("/")[2] for party in problem.parties} == {Path(__file__).name}


def test_groups_made_by_members_only_are_named(tmp_path: Path) -> None:
    """As in pytorch/pytorch#130102: each rank asks only for the pair that it belongs to."""
    fork_ranks(own_pair, tmp_path, ranks=4)
    problem = timeline(Run.latest(tmp_path), training=True).problems[0]
    assert problem.text == "new group 1 is not the same for all ranks"
    assert [(party.ranks, party.number) for party in problem.parties] == [((0, 1), 1), ((2, 3), 1)]


def test_a_rank_that_was_killed_while_others_waited_is_named(tmp_path: Path) -> None:
    job = launch([__file__, "waits_for_ever"], ranks=2, env={"INITOPT_ROOT": str(tmp_path)}, timeout=60)
    assert not job.timed_out
    run = Run.latest(tmp_path)
    assert [(one.rank, one.op) for one in run.stuck] == [(1, "all_reduce")]
    (problem,) = timeline(run, training=True).problems
    assert ((1,), "was still in all_reduce on world when its record ends") in [
        (party.ranks, party.what) for party in problem.parties
    ]


def _recorded(root: Path, case):  # type: ignore[no-untyped-def]
    import datetime

    import torch.distributed as dist

    import initopt

    with initopt.Recorder("case", mode="stock", root=root) as recorder, recorder.collectives():
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))
        case(dist)
        # Rank 0 has the store, from which the others learn where to write: it leaves last.
        store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
        recorder.agree(rank, dist.get_world_size(), store)
        store.set(f"done/{rank}", "")
        if rank == 0:
            store.wait([f"done/{other}" for other in range(dist.get_world_size())])


def other_order(root: Path) -> None:
    def case(dist) -> None:  # type: ignore[no-untyped-def]
        import torch

        names = ["dense", "sparse", "ids"]
        if dist.get_rank() == 3:
            names.reverse()
        groups = {name: dist.new_group() for name in names}
        for name in sorted(names):
            # Only started: ranks that wait for each other would wait out the timeout.
            dist.all_reduce(torch.ones(1), group=groups[name], async_op=True)

    _recorded(root, case)


def own_pair(root: Path) -> None:
    def case(dist) -> None:  # type: ignore[no-untyped-def]
        import contextlib
        import datetime

        pair = [0, 1] if dist.get_rank() < 2 else [2, 3]
        # Both pairs get the same name, so that a rank may connect to one of the other pair, or fail to. Or neither.
        with contextlib.suppress(RuntimeError):
            dist.new_group(pair, timeout=datetime.timedelta(seconds=2))

    _recorded(root, case)


def waits_for_ever() -> None:
    def case(dist) -> None:  # type: ignore[no-untyped-def]
        import signal
        import threading

        import torch

        rank = dist.get_rank()
        store = dist.distributed_c10d._get_default_store()
        dist.barrier()
        if rank == 0:
            # By the one that goes on: it must not leave first, which would end the other's call with an error.
            os.kill(int(store.get("inside")), signal.SIGKILL)
            store.set("done/1", "")
            return
        main = threading.get_ident()

        def say_when_inside() -> None:
            while sys._current_frames()[main].f_code.co_name != "all_reduce":
                pass
            store.set("inside", str(os.getpid()))

        threading.Thread(target=say_when_inside).start()
        dist.all_reduce(torch.ones(1))

    _recorded(Path(os.environ["INITOPT_ROOT"]), case)
    os._exit(0)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
