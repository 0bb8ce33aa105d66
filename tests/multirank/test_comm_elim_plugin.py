"""The trainer's start-up has one meeting for the plan and for all that the rewrites assume, and trains as without."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.multirank.forked import fork_ranks
from tests.multirank.test_torchrec_plugin import config, small

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(autouse=True)
def root(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INITOPT_ROOT", str(tmp_path / "runs"))
    monkeypatch.setenv("INITOPT_DATA", str(tmp_path_factory.getbasetemp() / "criteo"))


def trained(sharding: str, eliminate: Any = True, change: Any = None, **options: Any) -> Any:
    """The state after three steps, the meetings of the plan's and the model's steps, their notes, what was said."""
    import torch

    from benchmarks.trainers.trained_state import trained_state
    from initopt import Recorder, Run
    from initopt.comm_elim.left_out import left_out

    torch.manual_seed(1)
    start = small(config(sharding=sharding), eliminate=eliminate, **options)
    if change is not None:
        change(start)
    recorder = Recorder("small", mode="overlap")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ready = start.run(recorder=recorder)
    losses = [ready.pipeline.progress(ready.batches)[0] for _ in range(3)]
    recorder.close()
    assert recorder.path is not None
    run = Run.load(recorder.path)
    mine = [span for span in run.spans if span.kind == "collective" and span.rank == recorder.rank]
    meetings = Counter(span.op for span in mine if span.step in ("sharding_plan", "dmp"))
    notes = [note.text for note in run.notes if note.step == "dmp"]
    # By the lowest rank whose record is there by now.
    assert bool(left_out(run)) == any("left out (" in note.text for note in run.notes)
    assert all(f"{one.count} by {one.name}" in "".join(notes) and one.place == "dmp" for one in left_out(run))
    said = [str(one.message) for one in caught if "initopt: " in str(one.message)]
    return trained_state(ready.model, ready.optimizer, losses), dict(meetings), notes, said


def test_the_plan_and_all_else_are_agreed_on_in_one_meeting() -> None:
    for sharding, fused in (("table_wise", 0), ("data_parallel", 1)):
        stock = fork_ranks(trained, sharding, False)
        mine = fork_ranks(trained, sharding)
        assert [state for state, *_ in mine] == [state for state, *_ in stock]
        for _, meetings, notes, said in mine:
            assert meetings.pop("broadcast", 0) == fused
            assert meetings == {"all_gather_single": 1}
            assert "meetings of ranks were left out (1 by validation_flag" in "".join(notes)
            assert said == []
        for _, meetings, _, _ in stock:
            assert sum(meetings.values()) > 3


def loads_on_rank_0(start: Any) -> None:
    """As a script does that leaves it to DistributedDataParallel to send what rank 0 has read."""

    def pretrained(model: Any) -> None:
        import torch

        if os.environ["RANK"] == "0":
            with torch.no_grad():
                for one in model.parameters():
                    if not one.is_meta:
                        one.add_(0.5)

    start.step(pretrained, before="dmp")


def test_what_a_step_writes_to_the_model_on_one_rank_reaches_the_others() -> None:
    stock = fork_ranks(trained, "table_wise", False, loads_on_rank_0)
    mine = fork_ranks(trained, "table_wise", True, loads_on_rank_0)
    assert [state for state, *_ in mine] == [state for state, *_ in stock]
    assert [state for state, *_ in fork_ranks(trained, "table_wise")] != [state for state, *_ in stock]
    for _, meetings, notes, _ in mine:
        assert meetings == {"all_gather_single": 2, "_sync_module_states": 1}
        assert any("values of dense parameters differs between ranks" in note for note in notes)


def stopped() -> str:
    import torch

    from initopt import StartupFailed

    def model(place: Any) -> Any:
        from benchmarks.trainers import dlrm_model

        torch.manual_seed(place.rank)
        return dlrm_model.make_model(config(), place.device)

    with pytest.raises(StartupFailed) as caught:
        small(config(), model=model, eliminate=True, strict=True).run()
    return f"{caught.value} {caught.value.exceptions}"


def test_strict_stops_all_ranks_where_one_has_another_seed() -> None:
    for text in fork_ranks(stopped):
        assert "sharding_plan" in text and "dense parameters differs between ranks (rank 0: " in text


def fails_on_rank_0() -> str:
    """A constructor fails on one rank only; the others have a meeting ahead that it will not come to."""
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder

    from initopt import StartupFailed

    def raises(*args: Any, **kwargs: Any) -> Any:
        raise ValueError("None has no name")

    if os.environ["RANK"] == "0":
        EmbeddingBagCollectionSharder.shard = raises
    start = small(config(sharding="data_parallel"), timeout=60.0)
    with pytest.raises(StartupFailed) as caught:
        start.run()
    return f"{caught.value} {caught.value.exceptions}"


def test_a_rank_that_fails_in_the_constructor_is_named_on_all_ranks() -> None:
    for text in fork_ranks(fails_on_rank_0, timeout=50.0):
        assert "failed in step 'dmp' on rank 0" in text and "None has no name" in text


def test_rewrites_are_chosen_by_name() -> None:
    for _, meetings, notes, _ in fork_ranks(trained, "table_wise", ["ddp_sync"]):
        assert meetings == {"all_gather_single": 1, "broadcast_object_list": 1}
        assert notes[-1] == "2 meetings of ranks were left out (2 by ddp_sync)"
