"""The TorchRec trainer plugin on real gloo ranks: its batches, its options, and what a user can change."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from initopt import Compile, Recorder, Run, StartupFailed, plugins
from initopt.compile_cache.fast_batch import Examples
from initopt.plugins import hookimpl
from initopt.plugins.torchrec import Ready, TrainerStartup, trainer
from tests.multirank.forked import fork_ranks

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(autouse=True)
def root(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("INITOPT_ROOT", str(tmp_path / "runs"))
    monkeypatch.setenv("INITOPT_DATA", str(tmp_path_factory.getbasetemp() / "criteo"))
    return tmp_path / "runs"


def config(**changes: Any) -> Any:
    from benchmarks.trainers.dlrm_model import Config

    small = {"rows": 50, "dim": 8, "batch_size": 16, "samples": 256, "compile": False, "sharding": "table_wise"}
    return Config(**{**small, **changes})


def small(config: Any, **changes: Any) -> TrainerStartup:
    from benchmarks.trainers import dlrm_model

    def model(place: Any) -> Any:
        return dlrm_model.make_model(config, place.device)

    def planner(place: Any) -> Any:
        return dlrm_model.make_planner(config, place.device, place.world_size, place.local_world_size)

    def loader(place: Any) -> Any:
        return dlrm_model.make_loader(config, place.rank, place.world_size)

    given = {"model": model, "planner": planner, "loader": loader, "dense_optimizer": dlrm_model.dense_optimizer}
    return trainer(**{**given, "device": "cpu", "name": "small", **changes})


def fingerprint(batch: Any) -> tuple[float, int, int]:
    return batch.dense_features.sum().item(), batch.sparse_features.values().sum().item(), batch.labels.sum().item()


def in_stock(config: Any) -> list[tuple[float, int, int]]:
    from benchmarks.trainers import dlrm_model

    loader = dlrm_model.make_loader(config, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    return [fingerprint(batch) for batch in loader]


def trained_on(ready: Ready) -> list[tuple[float, int, int]]:
    """Train on all batches; return those that the pipeline took."""
    seen: list[tuple[float, int, int]] = []

    def noted() -> Iterator[Any]:
        for batch in ready.batches:
            seen.append(fingerprint(batch))
            yield batch

    batches, steps = noted(), 0
    while True:
        try:
            ready.pipeline.progress(batches)
        except StopIteration:
            assert steps == len(seen)
            return seen
        steps += 1


def test_every_batch_is_seen_once_and_in_stocks_order() -> None:
    chosen = config()
    expected = fork_ranks(in_stock, chosen)
    assert [len(batches) for batches in expected] == [8, 8]
    for overlap in (False, True, True):
        found = fork_ranks(lambda overlap=overlap: trained_on(small(chosen).run(overlap=overlap)))
        assert found == expected


def shuffled(workers: int, config: Any, rank: int, world_size: int) -> Any:
    """A loader that draws from the default generator, at once or when its first batch is asked for."""
    from torch.utils.data import DataLoader

    from benchmarks.trainers import criteo

    return DataLoader(
        criteo.CriteoDay(criteo.generate(config.samples, config.seed)),
        batch_size=config.batch_size,
        shuffle=True,
        num_workers=workers,
        collate_fn=criteo.Collate(tuple(config.rows_per_table)),
        drop_last=True,
    )


def trained(config: Any, workers: int, mode: str) -> Any:
    from benchmarks.trainers import dlrm_initopt, dlrm_model, dlrm_stock

    dlrm_model.make_loader = partial(shuffled, workers)
    return dlrm_stock.train(config) if mode == "stock" else dlrm_initopt.train(config, overlap=mode == "overlap")


@pytest.mark.parametrize("workers", [0, 2])
def test_a_shuffling_loader_with_and_without_workers_equals_stock(workers: int) -> None:
    chosen = config(steps=3)
    expected = fork_ranks(trained, chosen, workers, "stock")
    assert fork_ranks(trained, replace(chosen, seed=1), workers, "stock") != expected
    for mode in ("serial", "overlap", "overlap"):
        assert fork_ranks(trained, chosen, workers, mode) == expected


def test_any_iterable_is_a_loader() -> None:
    chosen = config()

    def listed(place: Any) -> list[Any]:
        from benchmarks.trainers import dlrm_model

        return list(dlrm_model.make_loader(chosen, place.rank, place.world_size))

    expected = fork_ranks(in_stock, chosen, ranks=1)
    assert fork_ranks(lambda: trained_on(small(chosen, loader=listed).run()), ranks=1) == expected


def test_steps_can_be_added_replaced_and_ordered(root: Path) -> None:
    def changed() -> tuple[str, int, str]:
        from benchmarks.trainers import dlrm_model

        start = small(config())
        start.step(lambda dmp, size: f"{type(dmp).__name__} {size}", name="metrics", lane="io:metrics")

        def planner(place: Any, size: int) -> Any:
            made = dlrm_model.make_planner(config(), place.device, place.world_size, place.local_world_size)
            made.size = size
            return made

        start.replace("planner", planner)
        start.step(lambda metrics: "last", name="last")
        start.order("first_batch", "metrics")
        ready = start.run(size=3)
        ready.pipeline.progress(ready.batches)
        return ready.values.metrics, ready.values.planner.size, ready.values.last

    assert fork_ranks(changed, ranks=1) == [("DistributedModelParallel 3", 3, "last")]
    run = Run.latest(root)
    spans = {span.name: span for span in run.spans if span.kind == "step" and not span.step}
    assert spans["first_batch"].end <= spans["metrics"].start
    assert spans["first_step"].start >= spans["last"].end
    assert run.graph is not None and set(run.graph) == set(spans)
    assert {edge.before for edge in run.graph.predecessors("first_step")} >= {"last", "batches"}


def test_an_added_step_that_draws_must_be_put_in_order() -> None:
    from initopt import OrderError

    start = small(config())
    start.step(lambda: 1, name="noise", uses="rng")
    with pytest.raises(OrderError, match=r"'noise' .* both draw random numbers|both draw random numbers"):
        start.graph()
    start.order("noise", "model")
    assert start.graph()["model"].after == ("noise",)


def failed(run: Callable[[], object]) -> list[str]:
    """The message and the errors of a start-up that fails, with their notes."""
    try:
        run()
    except StartupFailed as error:
        return [error.message] + [
            "\n".join([f"{type(e).__name__}: {e}", *getattr(e, "__notes__", [])]) for e in error.exceptions
        ]
    return []


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_without_a_batch(workers: int) -> None:
    chosen = config(samples=16)
    chosen = replace(chosen, batch_size=32)

    def start() -> TrainerStartup:
        from benchmarks.trainers import dlrm_model

        dlrm_model.make_loader = partial(shuffled, workers)
        return small(chosen)

    ((message, error, *more),) = fork_ranks(lambda: failed(lambda: start().run()), ranks=1)
    assert message == "start-up 'small' failed in step 'first_batch' on rank 0"
    assert error.startswith("ValueError: the loader of rank 0 has no batch: its data set, or this rank's share of it,")
    assert more == []


@pytest.mark.parametrize("overlap", [True, False])
def test_a_trainer_that_no_launcher_started(overlap: bool) -> None:
    def never(place: Any) -> Any:
        raise AssertionError("needs its place first")

    start = trainer(model=never, loader=never, dense_optimizer=never, sharders=lambda: [], planner=never)
    message, error = failed(lambda: start.run(overlap=overlap))
    assert message == "start-up 'trainer' failed in step 'place' on rank 0"
    assert "RANK and WORLD_SIZE not in the environment: start the trainer with torchrun, or set the variables" in error


def test_a_checkpoint_is_restored_before_the_pipeline_is_used() -> None:
    def restored() -> tuple[list[str], float]:
        def checkpoint(dmp: Any, optimizer: Any) -> str:
            import torch

            with torch.no_grad():
                for parameter in dmp.parameters():
                    parameter.fill_(0.25)
            return "restored"

        ready = small(config(), checkpoint=checkpoint).run()
        name, parameter = next((n, p) for n, p in ready.model.named_parameters() if "over_arch" in n)
        return [ready.values.checkpoint, name and "over_arch"], parameter.mean().item()

    assert fork_ranks(restored, ranks=1) == [(["restored", "over_arch"], 0.25)]


def test_the_limit_of_a_collective_changes_after_the_first_step() -> None:
    def limits() -> list[float]:
        import torch
        from torch import distributed

        def limit() -> float:
            group = distributed.group.WORLD
            return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()

        ready = small(config(), timeout=77.0, collective_timeout=5.0).run()
        found = [limit()]
        ready.pipeline.progress(ready.batches)
        return [*found, limit()]

    assert fork_ranks(limits, ranks=1) == [[77.0, 5.0]]


def test_another_step_on_comms_of_one_rank_is_named_on_all() -> None:
    def start() -> TrainerStartup:
        made = small(config())
        if os.environ["RANK"] == "1":
            made.step(lambda process_group: None, name="extra", lane="comms", before="sharding_plan")
        return made

    for rank, (message, error, *_) in enumerate(fork_ranks(lambda: failed(lambda: start().run()))):
        assert message == "start-up 'small' failed in step 'store' on rank 1"
        assert error.startswith("PeerFailed: rank 1 failed" if rank == 0 else "OrderError: ")
        assert "rank 1 and rank 0 don't hold the same collectives" in error
        assert "rank 1 has 'extra', rank 0 'sharding_plan'" in error


class Ended:
    """A plugin that notes the records that are done."""

    def __init__(self) -> None:
        self.paths: list[str] = []

    @hookimpl
    def initopt_run_ended(self, path: Path) -> None:
        self.paths.append(path.name)


def test_the_record_ends_with_the_first_step_and_plugins_hear_of_it(root: Path) -> None:
    def started() -> list[list[str]]:
        ended = Ended()
        plugins.register(plugins.installed(), ended, "ended")
        ready = small(config(), labels=["a label"]).run()
        found = [list(ended.paths)]
        for _ in range(2):
            ready.pipeline.progress(ready.batches)
            found.append(list(ended.paths))
        return found

    assert fork_ranks(started, ranks=1) == [[[], ["0001"], ["0001"]]]
    run = Run.latest(root)
    assert run.first_batch(0) == max(span.end for span in run.spans)
    assert [span.name for span in run.spans if span.kind == "step"].count("first_step") == 1
    assert run.headers[0].labels == ("a label",)
    assert run.warnings == ()


def test_a_recorder_that_is_given_stays_open(root: Path) -> None:
    def started() -> list[str]:
        with Recorder("own", mode="overlap") as recorder:
            ready = small(config()).run(recorder=recorder)
            ready.pipeline.progress(ready.batches)
            with recorder.span("later"):
                pass
        return []

    fork_ranks(started, ranks=1)
    assert "later" in {span.name for span in Run.latest(root).spans}


def test_a_first_step_that_fails_is_in_the_record(root: Path) -> None:
    def fails() -> list[str]:
        ready = small(config(), collective_timeout=5.0).run()

        def no_batches() -> Iterator[Any]:
            raise OSError("no disk")
            yield

        return failed(lambda: ready.pipeline.progress(no_batches()))

    ((message, error),) = fork_ranks(fails, ranks=1)
    assert message == "start-up 'small' failed in step 'first_step' on rank 0"
    assert error.startswith("OSError: no disk\nstart-up step 'first_step' failed on rank 0 after")
    (span,) = [span for span in Run.latest(root).spans if span.name == "first_step"]
    assert span.error == "OSError"


def test_a_rank_that_is_done_hears_of_another_ranks_failure() -> None:
    def run() -> None:
        start = small(config())

        @start.step(after=("pipeline", "batches"))
        def late(place: Any) -> None:
            if place.rank == 1:
                raise ValueError("too late")

        ready = start.run()
        ready.pipeline.progress(ready.batches)

    for message, first, *_ in fork_ranks(lambda: failed(run)):
        assert message == "start-up 'small' failed in step 'late' on rank 1"
        assert "ValueError: too late" in first


def test_a_collective_off_its_lane_is_refused_before_it_is_made() -> None:
    def run() -> None:
        import torch

        start = small(config())

        @start.step
        def check(process_group: Any) -> None:
            torch.distributed.all_reduce(torch.ones(1))

        start.run()

    for message, first, *_ in fork_ranks(lambda: failed(run)):
        assert message.startswith("start-up 'small' failed in step 'check' on rank")
        assert "calls all_reduce at" in first and "Set lane='comms'" in first


class Warmed(Compile):
    """It compiles two graphs ahead, and `late` more at the first step."""

    def __init__(self, late: int) -> None:
        super().__init__(lambda model: {}, batch=lambda device: None)
        counted = iter([2, 2 + late])
        object.__setattr__(self, "graphs", lambda: next(counted))

    def calls(self, *_: Any, **__: Any) -> Examples:
        return Examples({"part": ()})

    def warm_up(self, *_: Any, **__: Any) -> int:
        return 2


@pytest.mark.parametrize("late", [0, 3])
def test_a_warm_up_that_missed_something_is_warned_of_at_the_first_step(late: int) -> None:
    def warned() -> list[str]:
        ready = small(config(), compile=Warmed(late)).run()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ready.pipeline.progress(ready.batches)
        return [str(warning.message) for warning in caught if "initopt" in str(warning.message)]

    (texts,) = fork_ranks(warned, ranks=1)
    assert [text.partition(" than the warm-up had")[0] for text in texts] == (
        ["initopt: the first batch compiled 3 more graphs"] if late else []
    )


def planned(config: Any, **changes: Any) -> tuple[str, list[str]]:
    """The digest of the plan of a start-up, and what the summary of its record says of planning."""
    from initopt.sharding_plan import plan_digest

    ready = small(config, **changes).run()
    next_loss = ready.pipeline.progress(ready.batches)[0]
    assert next_loss.isfinite()
    run = Run.latest()
    return plan_digest(ready.values.sharding_plan), [
        note.text for note in run.notes if note.rank == ready.values.place.rank and note.step == "sharding_plan"
    ]


def stock_plan(config: Any) -> str:
    import torch
    from torch import distributed

    from benchmarks.trainers import dlrm_model
    from initopt.sharding_plan import plan_digest

    device = torch.device("cpu")
    distributed.init_process_group("gloo")
    planner = dlrm_model.make_planner(config, device, 2, 2)
    model, sharders = dlrm_model.make_model(config, device), dlrm_model.make_sharders(config)
    return plan_digest(planner.collective_plan(model, sharders, distributed.group.WORLD))


@pytest.mark.parametrize("lane", ["main", "process:plan"])
def test_the_plan_is_torchrecs_on_every_lane(lane: str) -> None:
    chosen = config(sharding="row_wise")
    (stock, _) = fork_ranks(stock_plan, chosen)

    def sharders() -> list[Any]:
        from benchmarks.trainers import dlrm_model

        return dlrm_model.make_sharders(chosen)

    for digest, notes in fork_ranks(planned, chosen, plan_lane=lane, sharders=sharders):
        assert digest == stock
        assert len(notes) == 1 and "sharding plans proposed" in notes[0]


def test_with_fast_plan_off_rank_0_plans_as_torchrec_does() -> None:
    chosen = config()
    (stock, _) = fork_ranks(stock_plan, chosen)
    (one, notes), (other, none) = fork_ranks(planned, chosen, fast_plan=False)
    assert one == other == stock
    assert notes == ["the planner ran as it is: make_fast was not called with it"] and none == []


def file_of(config: Any, path: Path) -> None:
    """Write the plan of `config` for two ranks as `initopt plan -o` does."""
    import torch

    from benchmarks.trainers import dlrm_model
    from initopt.sharding_plan.offline import plan_offline

    device = torch.device("cpu")
    plan_offline(
        dlrm_model.make_model(config, device),
        world_size=2,
        local_world_size=2,
        device="cpu",
        batch_size=config.batch_size,
        sharders=dlrm_model.make_sharders(config),
    ).file.write(path)


def test_a_pinned_plan_is_used_and_one_for_other_tables_is_refused_on_all_ranks(tmp_path: Path) -> None:
    from initopt.sharding_plan import PlanFile

    fork_ranks(file_of, config(), tmp_path / "plan.json", ranks=1)
    pinned = PlanFile.read(tmp_path / "plan.json")
    for digest, notes in fork_ranks(planned, config(), plan=tmp_path / "plan.json"):
        assert digest == pinned.digest
        assert notes == [f"the sharding plan is that of {tmp_path / 'plan.json'}"]

    def refused() -> str:
        with pytest.raises(StartupFailed) as caught:
            small(config(rows=51), plan=tmp_path / "plan.json").run()
        return str(caught.value.exceptions[0])

    for text in fork_ranks(refused):
        assert f"the sharding plan in {tmp_path / 'plan.json'} does not fit this job" in text
        assert "was planned as" in text


def test_a_plan_that_takes_long_does_not_run_into_the_time_limit_of_collectives() -> None:
    """`collective_timeout` holds from the first training step on; while rank 0 plans, the others do not fail."""

    def slow(place: Any) -> Any:
        from torchrec.distributed.planner import EmbeddingShardingPlanner

        from benchmarks.trainers import dlrm_model

        made = dlrm_model.make_planner(config(), place.device, place.world_size, place.local_world_size)

        class Slow(EmbeddingShardingPlanner):  # type: ignore[misc]
            def plan(self, *arguments: Any) -> Any:
                time.sleep(3.0)
                return made.plan(*arguments)

        return Slow(topology=made._topology, debug=False)

    (stock, _) = fork_ranks(stock_plan, config())
    (one, notes), (other, _) = fork_ranks(planned, config(), planner=slow, collective_timeout=1.0)
    assert one == other == stock
    assert notes == ["the planner ran as it is: Slow plans in its own way"]
