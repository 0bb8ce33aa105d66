"""What the passes say of recorded start-ups, and that they say nothing that is not shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from initopt.comm_elim.findings import Finding
from initopt.comm_elim.passes import find, settled
from initopt.comm_elim.program import Program
from initopt.comm_elim.resimulate import call_of
from initopt.comm_elim.timeline import timeline
from initopt.graph import Graph, Step
from initopt.runs import Run
from tests.comm_elim.recorded import DDP, EC, GROUPS, LOOKUP, PLAN, TABLES, Script, stock


def verdicts(run: Run) -> dict[str, tuple[str, int, str]]:
    return {one.name: (one.verdict, len(one.meetings), one.rewrite) for one in find(run).findings}


def one(run: Run, name: str) -> Finding:
    return next(finding for finding in find(run).findings if finding.name == name)


def test_a_stock_start_up(tmp_path: Path) -> None:
    assert verdicts(stock().run(tmp_path)) == {
        "plan": ("local", 1, "fast_plan"),
        "validation_flag": ("local", 1, "validation_flag"),
        "groups": ("drop", 2, "groups"),
        "groups#2": ("keep", 2, ""),
        "groups.barrier": ("drop", 1, "groups"),
        "dp_lookup_sync": ("drop", 2, "dp_tables"),
        "dp_tables": ("fuse", 3, "dp_tables"),
        "ec_metadata": ("local", 4, "ec_metadata"),
        "ddp_sync": ("drop", 2, "ddp_sync"),
        "init_process_group": ("keep", 1, ""),
        "setup.barrier": ("keep", 1, ""),
    }


def test_every_call_is_in_one_finding_and_only_what_is_named_goes_away(tmp_path: Path) -> None:
    run = stock().run(tmp_path)
    found = settled(Program(run, timeline(run).meetings))
    gone = [call_of(span) for finding in found for span in finding.calls]
    assert len(gone) == len(set(gone))
    for finding in found:
        inside = {call_of(span) for met in finding.meetings for span in met.spans}
        assert inside.issuperset(map(call_of, finding.calls))
        assert finding.proof and finding.reason
        assert bool(finding.calls) == (finding.verdict != "keep")
        assert finding.verdict == "keep" or bool(finding.rewrite) != bool(finding.unapplied)
    seen = {call_of(span) for finding in found for met in finding.meetings for span in met.spans}
    recorded = {call_of(s) for s in run.spans if s.kind == "collective"}
    assert seen == recorded


def test_parameters_that_differ_are_sent_as_ever(tmp_path: Path) -> None:
    run = stock(seeds="rank").run(tmp_path)
    kept = [finding for finding in find(run).findings if finding.name.startswith("ddp_sync")]
    verdicts = {finding.meetings[0].call.op: (finding.verdict, finding.reason) for finding in kept}
    assert verdicts == {
        "_verify_param_shape_across_processes": ("drop", "what is checked or sent is equal on all ranks"),
        "_sync_module_states": ("keep", "what the ranks hold differs"),
    }


@pytest.mark.parametrize("digest", ["unknown", ""])
def test_values_that_were_not_read_prove_nothing(tmp_path: Path, digest: str) -> None:
    script = Script()
    script.meet("init_process_group")
    script.meet("_sync_module_states", DDP, digest=digest, root=0)
    script.meet("broadcast_object_list", PLAN, digest=digest, root=0)
    assert {finding.verdict for finding in find(script.run(tmp_path)).findings} == {"keep"}


def test_sampled_values_of_a_call_of_ones_own_prove_nothing(tmp_path: Path) -> None:
    script = Script()
    script.meet("broadcast", digest="~abcd", root=0)
    assert one(script.run(tmp_path), "setup.broadcast").verdict == "keep"


def test_a_value_that_all_ranks_held_is_local_and_not_applied(tmp_path: Path) -> None:
    script = Script()
    script.meet("broadcast", digest="abcd", root=0)
    found = one(script.run(tmp_path), "setup.broadcast")
    assert (found.verdict, found.rewrite) == ("local", "")
    assert "no call of your own" in found.unapplied


@pytest.mark.parametrize("written", ['"torchrec": "1.10.0"', '"another": "1.9.2"'])
def test_an_unknown_version_proves_nothing(tmp_path: Path, written: str) -> None:
    script = Script()
    script.meet("all_gather_object", EC, digest={rank: str(rank) for rank in range(4)})
    path = script.run(tmp_path).path
    for file in path.glob("rank*.jsonl"):
        file.write_text(file.read_text().replace('"torchrec": "1.9.2"', written))
    (found,) = find(Run.load(path)).findings
    assert found.verdict == "keep" and found.reason.startswith("the code was not read of torchrec")


def test_two_modules_with_lookups_before_the_first_table_are_kept(tmp_path: Path) -> None:
    script = Script()
    for _ in range(2):
        script.meet("_verify_param_shape_across_processes", LOOKUP, digest="cccc")
        script.meet("_sync_module_states", LOOKUP, digest="cccc", root=0)
    script.meet("broadcast", TABLES, digest="t", root=0)
    assert one(script.run(tmp_path), "dp_lookup_sync").verdict == "keep"


def test_lookups_of_which_no_table_is_sent_after_are_kept(tmp_path: Path) -> None:
    script = Script()
    script.meet("broadcast", TABLES, digest="t", root=0)
    script.meet("_sync_module_states", LOOKUP, digest="cccc", root=0)
    assert one(script.run(tmp_path), "dp_lookup_sync").verdict == "keep"


@pytest.mark.parametrize(("options", "verdict"), [("gloo", "reuse"), ("nccl", "keep")])
def test_a_group_of_the_same_ranks_and_backend_is_reused(tmp_path: Path, options: str, verdict: str) -> None:
    script = Script()
    script.meet("init_process_group", options="gloo, timeout=0:10:00")
    script.make_group("1", (0, 1, 2, 3), ("train.py:9 main",), options)
    assert one(script.run(tmp_path), "new_group" if verdict == "reuse" else "setup.new_group").verdict == verdict


def test_a_group_that_is_used_on_another_lane_is_not_reused(tmp_path: Path) -> None:
    script = Script()
    script.meet("init_process_group", options="gloo")
    script.make_group("1", (0, 1, 2, 3), ("train.py:9 main",))
    script.meet("all_reduce", group="1", lane="metrics")
    assert one(script.run(tmp_path), "new_group").verdict == "keep"


def test_a_group_on_which_a_thread_of_the_metric_module_meets_is_not_reused(tmp_path: Path) -> None:
    script = Script()
    script.meet("init_process_group", options="gloo")
    script.make_group("1", (0, 1, 2, 3), ("torchrec/metrics/cpu_offloaded_metric_module.py:389 __init__",))
    finding = one(script.run(tmp_path), "metrics")
    assert finding.verdict == "keep" and finding.reason == "a thread of the metric module meets on it"


def test_groups_of_a_mesh_are_made_by_members_and_once(tmp_path: Path) -> None:
    script = Script()
    script.meet("init_process_group", options="gloo")
    mesh = ("torchrec/distributed/model_parallel.py:1764 _create_process_groups",)
    for name in ("1", "2"):
        script.make_group(name, (0, 1), mesh)
    script.make_group("3", (0, 1), GROUPS)
    found = [finding for finding in find(script.run(tmp_path)).findings if finding.verdict in ("drop", "reuse")]
    assert sorted((finding.verdict, len(finding.meetings), finding.rewrite) for finding in found) == [
        ("drop", 1, "groups"),
        ("drop", 2, "groups"),
        ("reuse", 1, ""),
        ("reuse", 1, "groups"),
    ]


def test_a_group_that_was_destroyed_is_not_reused(tmp_path: Path) -> None:
    script = Script()
    script.make_group("1", (0, 1), GROUPS)
    for rank in (0, 1):
        last = script.spans[rank][-1]
        from dataclasses import replace

        ended = replace(last, name="d", op="destroy_process_group", start=last.end, end=last.end, sequence=-1, ranks=())
        script.spans[rank].append(ended)
    script.make_group("2", (0, 1), GROUPS)
    assert "reuse" not in {finding.verdict for finding in find(script.run(tmp_path)).findings}


def barrier_graph(needs: tuple[str, ...]) -> Graph:
    return Graph(
        [
            Step("shard.barrier", lane="comms"),
            Step("load", lane="comms", needs=needs),
            Step("first_step", needs=("load",), lane="comms"),
        ],
        name="dlrm",
    )


# Who leaves a reduce-scatter has something of every rank; who leaves a broadcast, of its root only.
@pytest.mark.parametrize(
    ("needs", "after", "verdict"),
    [
        ((), "all_reduce", "drop"),
        (("shard.barrier",), "all_reduce", "keep"),
        ((), "reduce_scatter_tensor", "drop"),
        ((), "broadcast", "keep"),
    ],
)
def test_a_barrier_goes_only_if_no_step_needs_it(
    tmp_path: Path, needs: tuple[str, ...], after: str, verdict: str
) -> None:
    script = Script()
    script.meet("barrier", step="shard.barrier", lane="comms")
    script.meet(after, step="load", lane="comms")
    run = script.run(tmp_path, graph=barrier_graph(needs), steps=False)
    assert one(run, "shard.barrier.barrier").verdict == verdict


def test_nothing_is_proven_where_ranks_met_in_different_orders(tmp_path: Path) -> None:
    script = Script(ranks=2)
    script.meet("barrier", members=(0, 1))
    script.make_group("1", (0, 1))
    script.make_group("2", (0, 1))
    for rank, groups in ((0, ("1", "2")), (1, ("2", "1"))):
        for group in groups:
            script.meet("all_reduce", members=(rank,), group=group, digest="same")
    found = find(script.run(tmp_path))
    assert found.problems and found.saving == 0.0
    assert {finding.verdict for finding in found.findings} == {"keep"}
