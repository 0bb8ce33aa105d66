"""The record of real ranks: one run for all, meetings matched, the late rank is the one that others waited for.

Run as a program, this file is one of those ranks.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from initopt.record import FIRST_STEP
from initopt.runs import Run
from tests.multirank.launch import JobOutput, launch


def ranks(case: Callable[..., None], root: Path, number: int) -> JobOutput:
    env = {"INITOPT_ROOT": str(root)}
    return launch([__file__, case.__name__], ranks=number, env=env, timeout=80)


def test_the_others_wait_for_the_late_rank(tmp_path: Path) -> None:
    ranks(late_rank, tmp_path, 3).check()
    run = Run.latest(tmp_path)
    assert (sorted(run.headers), run.missing_ranks, run.warnings) == ([0, 1, 2], (), ())
    barrier = {s.rank: s for s in run.spans if s.op == "barrier" and s.step == "model"}
    assert barrier[2].wait == 0.0
    for rank in (0, 1):
        assert barrier[rank].wait == pytest.approx(barrier[2].start - barrier[rank].start)
        assert 0 < barrier[rank].wait <= barrier[rank].end - barrier[rank].start
        (model,) = (s for s in run.of_rank(rank) if s.name == "model")
        assert model.wait >= barrier[rank].wait
    assert [s.rank for s in run.meeting(barrier[0])] == [
        s.rank for s in sorted(barrier.values(), key=lambda s: s.start)
    ]


def test_groups_of_some_ranks_are_counted_on_their_own(tmp_path: Path) -> None:
    ranks(small_groups, tmp_path, 3).check()
    run = Run.latest(tmp_path)
    names = {members: name for name, members in run.groups.items()}
    assert sorted(names) == [(0, 1), (0, 1, 2), (1, 2)]
    calls = {
        rank: [(s.op, s.group, s.sequence) for s in run.of_rank(rank) if s.kind == "collective"] for rank in range(3)
    }
    first, second, world = names[0, 1], names[1, 2], names[0, 1, 2]
    assert calls == {
        0: [(INIT, world, 0), ("new_group", first, 0), ("new_group", "", -1), ("barrier", first, 1)],
        1: [
            (INIT, world, 0),
            ("new_group", first, 0),
            ("new_group", second, 0),
            ("barrier", first, 1),
            (REDUCE, second, 1),
        ],
        2: [(INIT, world, 0), ("new_group", "", -1), ("new_group", second, 0), (REDUCE, second, 1)],
    }
    assert run.warnings == ()


INIT, REDUCE = "init_process_group", "all_reduce"


def test_the_record_of_a_killed_rank_stays(tmp_path: Path) -> None:
    job = ranks(killed, tmp_path, 2)
    assert [r.returncode for r in job.ranks] == [0, -signal.SIGKILL]
    run = Run.latest(tmp_path)
    assert [s.name for s in run.of_rank(1) if s.kind == "step"] == ["model"]
    assert len(run.warnings) == 1 and "rank00001.jsonl: the record ends without its last line" in run.warnings[0]
    assert run.first_batch(0) > 0


def test_every_meeting_of_a_sharded_model_is_seen(tmp_path: Path) -> None:
    """Two table-wise tables in an embedding collection: the calls that were counted by hand, at their places."""
    ranks(sharded_model, tmp_path, 2).check()
    run = Run.latest(tmp_path)
    for rank in range(2):
        seen = [(s.op, s.call_site.partition(":")[0]) for s in run.of_rank(rank) if s.step == "shard" and s.op]
        assert seen == [
            ("broadcast_object_list", "torchrec/distributed/collective_utils.py"),
            ("all_gather_object", "torchrec/distributed/embedding.py"),
            ("all_gather_object", "torchrec/distributed/embedding.py"),
            ("_verify_param_shape_across_processes", "torchrec/distributed/model_parallel.py"),
            ("_sync_module_states", "torchrec/distributed/model_parallel.py"),
        ]
    assert run.warnings == ()


def late_rank() -> None:
    import torch.distributed as dist

    import initopt

    with initopt.Recorder("late", mode="stock") as recorder, recorder.collectives():
        dist.init_process_group("gloo")
        store, rank = agree(recorder)
        main = threading.get_ident()

        def tell_when_inside() -> None:
            while not within(sys._current_frames()[main], "barrier"):
                pass
            store.set(f"inside/{rank}", "")

        with initopt.step("model"):
            if rank == 2:
                store.wait(["inside/0", "inside/1"])
            else:
                threading.Thread(target=tell_when_inside).start()
            dist.barrier()
        with initopt.step(FIRST_STEP):
            dist.barrier()
    dist.destroy_process_group()


def within(frame, name: str) -> bool:  # type: ignore[no-untyped-def]
    """Whether torch's function of this name is being called in the frame or one that led to it."""
    while frame is not None:
        if frame.f_code.co_name == name and frame.f_code.co_filename.endswith("distributed_c10d.py"):
            return True
        frame = frame.f_back
    return False


def small_groups() -> None:
    import torch
    import torch.distributed as dist

    import initopt

    with initopt.Recorder("groups", mode="stock") as recorder, recorder.collectives():
        dist.init_process_group("gloo")
        _, rank = agree(recorder)
        first, second = dist.new_group([0, 1]), dist.new_group([1, 2])
        if rank in (0, 1):
            dist.barrier(first)
        if rank in (1, 2):
            dist.all_reduce(torch.ones(1), group=second)
    dist.barrier()
    dist.destroy_process_group()


def killed() -> None:
    import torch.distributed as dist

    import initopt

    with initopt.Recorder("killed", mode="stock") as recorder:
        dist.init_process_group("gloo")
        _, rank = agree(recorder)
        with initopt.step("model"):
            pass
        with initopt.step(FIRST_STEP):
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)


def sharded_model() -> None:
    import torch
    import torch.distributed as dist
    from torchrec import EmbeddingCollection
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.planner.types import ParameterConstraints
    from torchrec.modules.embedding_configs import EmbeddingConfig

    import initopt

    tables = [
        EmbeddingConfig(name=f"t{i}", embedding_dim=8, num_embeddings=16, feature_names=[f"f{i}"]) for i in range(2)
    ]
    with initopt.Recorder("dlrm", mode="stock") as recorder, recorder.collectives():
        dist.init_process_group("gloo")
        agree(recorder)
        model = torch.nn.ModuleDict(
            {"ec": EmbeddingCollection(device=torch.device("meta"), tables=tables), "over": torch.nn.Linear(8, 1)}
        )
        sharders = [EmbeddingCollectionSharder()]
        table_wise = {t.name: ParameterConstraints(sharding_types=["table_wise"]) for t in tables}
        topology = Topology(world_size=2, local_world_size=2, compute_device="cpu")
        planner = EmbeddingShardingPlanner(topology=topology, constraints=table_wise, debug=False)
        with initopt.step("plan"):
            plan = planner.collective_plan(model, sharders, dist.group.WORLD)  # type: ignore[arg-type]
        with initopt.step("shard"):
            DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=sharders)  # type: ignore[arg-type]
    dist.barrier()
    dist.destroy_process_group()


def agree(recorder):  # type: ignore[no-untyped-def]
    """The default store and the rank, after the recorder has learned the number of the run."""
    import torch.distributed as dist

    store = dist.distributed_c10d._get_default_store()
    recorder.agree(dist.get_rank(), dist.get_world_size(), store)
    return store, dist.get_rank()


if __name__ == "__main__":
    globals()[sys.argv[1]]()
