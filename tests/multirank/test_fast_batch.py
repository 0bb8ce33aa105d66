"""Examples made without data are what the sharded model passes its parts, on real ranks and for every sharding."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.multirank.forked import fork_ranks

pytestmark = pytest.mark.timeout(200)


@pytest.fixture(autouse=True)
def _data(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INITOPT_DATA", str(tmp_path_factory.getbasetemp() / "criteo"))


def first_step(sharding: str, known: Any) -> Any:
    """The examples and the calls of the first step, both described, the graphs of the warm-up and of the step.

    What is `known` of the calls is None, what the loader says ("loader"), or what an earlier job recorded.
    """
    import torch
    from torch import distributed

    from benchmarks.trainers import dlrm_model
    from initopt import Compile
    from initopt.compile_cache import calls, schema, warmup

    # What is compared are guards and what they guard: code is not needed for that.
    warmup._Backend.__init__ = lambda self, *_: setattr(self, "_inductor", lambda graph, inputs: graph.forward)  # type: ignore[method-assign]
    distributed.init_process_group("gloo")
    device, rank = torch.device("cpu"), distributed.get_rank()
    config = dlrm_model.Config(rows=50, dim=16, batch_size=16, samples=256, compile=False, sharding=sharding)
    torch.manual_seed(0)
    model = dlrm_model.make_model(config, device)
    chosen = Compile(
        lambda m: dict(zip(("dense", "interaction", "over"), dlrm_model.compiled_parts(m.model), strict=True)),
        dynamic=False,
    )
    parts = chosen.parts(model)
    chosen.apply(model)
    state = torch.get_rng_state()
    loader = dlrm_model.make_loader(config, rank, distributed.get_world_size())
    earlier = calls.Recorded.from_data(known) if isinstance(known, dict) else None
    examples = chosen.calls(model, device, recorded=earlier, loader=loader if known == "loader" else None)
    assert set(examples.sources.values()) <= {"recorded" if earlier else "fast batch"}
    warm = chosen.warm_up(model, device, examples)
    assert torch.equal(torch.get_rng_state(), state)
    sharders = dlrm_model.make_sharders(config)
    planner = dlrm_model.make_planner(config, device, distributed.get_world_size(), distributed.get_world_size())
    dmp = dlrm_model.make_dmp(
        model, device, planner.collective_plan(model, sharders, distributed.group.WORLD), sharders
    )
    pipeline = dlrm_model.make_pipeline(dmp, dlrm_model.make_optimizer(dmp), device)
    batches = iter(loader)
    first = next(batches)
    batches = itertools.chain([first], batches)
    before = Compile.graphs()
    with calls.recording(parts) as seen:
        loss = pipeline.progress(batches)[0]
    graphs = Compile.graphs() - before
    losses = [loss, *(pipeline.progress(batches)[0] for _ in range(2))]
    described = {
        name: tuple(calls.Seen(schema.of(call.args), schema.of(dict(call.kwargs)), call.modes) for call in found)
        for name, found in examples.calls.items()
    }
    distributed.destroy_process_group()
    return (
        described,
        dict(seen),
        warm,
        graphs,
        [loss.item() for loss in losses],
        calls.Recorded.of(first, seen).to_data(),
    )


def test_a_warm_up_changes_nothing_but_when_code_is_made() -> None:
    """Neither one on a fast batch nor one on what was recorded, and that is the same."""
    stock = fork_ranks(first_step, "default", None)
    fast = fork_ranks(first_step, "default", "loader")
    again = fork_ranks(first_step, "default", stock[0][5])
    for rank, other in enumerate(stock):
        assert other[0] == {} and other[2:4] == (0, 3)
        for mine in (fast[rank], again[rank]):
            assert mine[2:4] == (3, 0) and mine[0] == mine[1] == other[1]
            assert mine[4] == other[4] and mine[5] == other[5]


@pytest.mark.parametrize("sharding", ["table_wise", "column_wise", "row_wise", "data_parallel"])
def test_the_first_step_of_a_sharded_model_compiles_nothing(sharding: str) -> None:
    for examples, seen, warm, graphs, *_ in fork_ranks(first_step, sharding, "loader"):
        assert list(seen) == ["dense", "interaction", "over"]
        assert examples == seen and (warm, graphs) == (3, 0)
