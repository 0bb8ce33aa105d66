"""The fast planner: which parts are TorchRec's own, what its account says, and what happens when it is wrong."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.estimator import EmbeddingPerfEstimatorFactory
from torchrec.distributed.planner.estimator.annotations import forward_compute
from torchrec.distributed.planner.estimator.config import EmbeddingPerfEstimatorConfig
from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner
from torchrec.distributed.planner.perf_models import NoopPerfModel
from torchrec.distributed.planner.proposers import GreedyProposer, UniformProposer
from torchrec.distributed.planner.shard_estimators import EmbeddingStorageEstimator
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import Perf, ShardingOption
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from initopt import sharding_plan
from initopt.sharding_plan import Account, StockPart, account, fast, fast_planner, make_fast, placement, search
from initopt.sharding_plan.options import LazyOption, plain
from tests.planner_fuzz import canonical

# TorchRec warns of its own default.
pytestmark = pytest.mark.filterwarnings("ignore:HeuristicalStorageReservation is known:FutureWarning")

ROWS = (1_000, 250_000, 3_000_000, 40_000, 7_000_000, 90)


def model(rows: tuple[int, ...] = ROWS) -> nn.Module:
    configs = [
        EmbeddingBagConfig(name=f"t{i}", feature_names=[f"f{i}"], embedding_dim=32 * (1 + i % 5), num_embeddings=each)
        for i, each in enumerate(rows)
    ]
    module = nn.Module()
    module.sparse = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
    return module


def topology(ranks: int = 16, hbm: int = 2**33) -> Topology:
    return Topology(world_size=ranks, local_world_size=4, compute_device="cuda", hbm_cap=hbm, ddr_cap=2**40)


def plan(planner: Any, module: nn.Module | None = None) -> Any:
    found = planner.plan(module or model(), [EmbeddingBagCollectionSharder()])
    return canonical(found.plan), planner._num_proposals


def both(**arguments: Any) -> Account:
    """Plan with fresh arguments (given as functions) on both planners; the plans are equal. Returns the account."""
    planners = [make(**{name: each() for name, each in arguments.items()}) for make in (_stock, fast_planner)]
    expected, found = (plan(planner) for planner in planners)
    assert expected == found
    return account(planners[1])


def _stock(**arguments: Any) -> Any:
    return EmbeddingShardingPlanner(**arguments)


def searched_by_torchrec(reason: str) -> tuple[StockPart, ...]:
    return (StockPart("search", reason),)


def test_the_account_says_how_the_proposals_fared() -> None:
    told = both(topology=topology)
    assert told.fast and not told.stock and not told.timed_out
    assert told.proposals == told.pruned + told.cut + told.placed + told.failed
    assert told.pruned > 100 and told.placed >= 1


def test_torchrecs_log_counts_every_proposal(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    planner = fast_planner(topology=topology())
    plan(planner)
    told = account(planner)
    assert f"--- Evaluated {told.proposals} proposal(s), found {told.placed} possible plan(s)" in caplog.text
    assert f"{told.proposals} proposals: {told.pruned} pruned by a bound" in caplog.text


def test_a_planner_of_the_user_is_changed_in_place_once() -> None:
    planner = EmbeddingShardingPlanner(topology=topology())
    enumerator, proposers = planner._enumerator, planner._proposers
    assert make_fast(planner) is planner
    assert type(planner._enumerator) is not type(enumerator) and planner._proposers[0].proposers is proposers
    changed = planner._enumerator
    assert make_fast(planner)._enumerator is changed
    assert plan(planner) == plan(EmbeddingShardingPlanner(topology=topology()))


def test_an_untouched_planner_says_so() -> None:
    told = account(EmbeddingShardingPlanner(topology=topology()))
    assert told == Account(stock=(StockPart("planner", "make_fast was not called with it"),))


def test_a_planner_of_another_class_is_left_alone() -> None:
    class Own(EmbeddingShardingPlanner):  # type: ignore[misc]
        pass

    planner = make_fast(Own(topology=topology()))
    assert account(planner) == Account(stock=(StockPart("planner", "Own plans in its own way"),))
    assert type(planner._enumerator) is EmbeddingEnumerator


def test_an_untested_version_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "TESTED_TORCHREC", "1.8.")
    planner = fast_planner(topology=topology())
    (part,) = account(planner).stock
    assert part.part == "planner" and part.reason.endswith("was not tested, only 1.8.*")
    assert type(planner._enumerator) is EmbeddingEnumerator


def test_a_new_field_in_the_estimates_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fast._FIELDS, Perf, "fwd_compute fwd_comms bwd_compute bwd_comms")
    (part,) = account(fast_planner(topology=topology())).stock
    assert part == StockPart("planner", "Perf of this torchrec has other fields than the one that was tested")


class OwnProposer(UniformProposer):  # type: ignore[misc]
    pass


class OwnPartitioner(GreedyPerfPartitioner):  # type: ignore[misc]
    pass


class OwnModel(NoopPerfModel):  # type: ignore[misc]
    def rate(self, plan: Any) -> float:
        return -float(super().rate(plan))


class OwnReservation(FixedPercentageStorageReservation):  # type: ignore[misc]
    def reserve(self, *args: Any, **kwargs: Any) -> Any:
        reserved = super().reserve(*args, **kwargs)
        self._last_reserved_topology = None
        return reserved


class OwnEnumerator(EmbeddingEnumerator):  # type: ignore[misc]
    pass


class OwnEstimator(EmbeddingStorageEstimator):  # type: ignore[misc]
    pass


class Adjusting(EmbeddingPerfEstimatorConfig):  # type: ignore[misc]
    def post_process_perfs(self, shard_perfs: list[Any], *args: Any, **kwargs: Any) -> list[Any]:
        return [Perf(perf.fwd_compute + i, 0.0, 0.0, 0.0) for i, perf in enumerate(shard_perfs)]


class Annotated(EmbeddingPerfEstimatorConfig):  # type: ignore[misc]
    @forward_compute(sharding_type="table_wise")
    def slow_tables(self, ctx: Any) -> float:
        return 3.5 * ctx.hash_size / len(ctx.table_name)


def estimators(config: Any) -> Any:
    perf = EmbeddingPerfEstimatorFactory.create_with_config(config, topology=topology())
    return EmbeddingEnumerator(topology(), 512, estimator=[perf, EmbeddingStorageEstimator(topology=topology())])


@pytest.mark.parametrize(
    ("part", "value", "stock"),
    [
        (
            "proposer",
            lambda: [GreedyProposer(), OwnProposer()],
            searched_by_torchrec("OwnProposer is not TorchRec's own"),
        ),
        ("partitioner", OwnPartitioner, searched_by_torchrec("OwnPartitioner is not TorchRec's own")),
        (
            "performance_model",
            lambda: OwnModel(topology()),
            searched_by_torchrec("OwnModel is not TorchRec's own"),
        ),
        (
            "performance_model",
            lambda: NoopPerfModel(topology(32)),
            searched_by_torchrec("the perf model has another world size than the topology"),
        ),
    ],
)
def test_with_a_part_of_the_users_own_torchrec_searches(part: str, value: Any, stock: tuple[StockPart, ...]) -> None:
    told = both(topology=topology, **{part: value})
    assert told == Account(stock=stock)


@pytest.mark.parametrize(
    ("part", "value", "stock"),
    [
        (
            "storage_reservation",
            lambda: OwnReservation(0.2),
            StockPart("storage reservation", "OwnReservation is not TorchRec's own"),
        ),
        (
            "enumerator",
            lambda: OwnEnumerator(topology(), 512),
            StockPart("enumerator", "OwnEnumerator is not TorchRec's own"),
        ),
        (
            "enumerator",
            lambda: EmbeddingEnumerator(topology(), 512, estimator=[*_perf(), OwnEstimator(topology=topology())]),
            StockPart("estimator", "OwnEstimator is not TorchRec's own"),
        ),
        (
            "enumerator",
            lambda: estimators(Adjusting()),
            StockPart("estimator", "Adjusting adjusts the shards of an option together"),
        ),
    ],
)
def test_other_parts_of_the_users_own_leave_the_search_fast(part: str, value: Any, stock: StockPart) -> None:
    told = both(topology=topology, **{part: value})
    assert told.fast and told.stock == (stock,)


def _perf() -> list[Any]:
    return [EmbeddingPerfEstimatorFactory.create("default_estimator", topology=topology())]


def test_a_config_with_methods_of_its_own_is_asked() -> None:
    told = both(topology=topology, enumerator=lambda: estimators(Annotated()))
    assert told.fast and not told.stock


def test_a_method_put_on_a_part_counts_as_the_users_own() -> None:
    planner = fast_planner(topology=topology())
    planner._perf_model.rate = lambda plan: 1.0
    plan(planner)
    assert account(planner).stock == searched_by_torchrec("NoopPerfModel is not TorchRec's own")


def test_one_proposer_twice_is_left_to_torchrec() -> None:
    def twice() -> list[Any]:
        return [GreedyProposer()] * 2

    assert both(topology=topology, proposer=twice).stock == searched_by_torchrec(
        "one proposer stands twice in the list"
    )


def test_perf_that_no_array_can_hold_is_left_to_torchrec() -> None:
    class Endless(EmbeddingPerfEstimatorConfig):  # type: ignore[misc]
        @forward_compute(sharding_type="row_wise")
        def never(self, ctx: Any) -> float:
            return float("inf")

    told = both(topology=topology, enumerator=lambda: estimators(Endless()))
    assert not told.fast and "sparse.t0 has the perf Perf(fwd_compute=inf" in told.stock[0].reason


@pytest.mark.parametrize("wrong", [lambda right: right * 1.5, lambda right: right / 2])
def test_a_wrong_rating_is_noticed_and_torchrec_searches(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rate = placement.Greedy.rate
    monkeypatch.setattr(placement.Greedy, "rate", lambda *arguments: wrong(rate(*arguments)))
    with pytest.warns(UserWarning, match="is not trusted, as it found the rating") as warned:
        told = both(topology=topology)
    assert [each.category for each in warned].count(UserWarning) == 1 and not told.fast
    assert "it found the rating" in told.stock[0].reason


def test_no_plan_where_torchrec_has_one_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement.Greedy, "never_fits", lambda *_: True)
    with pytest.warns(UserWarning, match=r"is not trusted, as it found the rating None, TorchRec \d"):
        assert not both(topology=topology).fast


def test_an_estimator_that_fails_fails_as_torchrecs(monkeypatch: pytest.MonkeyPatch) -> None:
    constraints = {"t1": ParameterConstraints(pooling_factors=[-1.0])}
    texts = []
    for make in (EmbeddingShardingPlanner, fast_planner):
        with pytest.raises(AssertionError) as raised:
            plan(make(topology=topology(), constraints=constraints))
        texts.append(str(raised.value))
    assert "Negative value" in texts[0] and texts[0] == texts[1]


def test_a_planner_plans_again_as_torchrecs_does() -> None:
    planners = [make(topology=topology(), proposer=GreedyProposer(threshold=3)) for make in (_stock, fast_planner)]
    module, other = model(), model((10_000, 20_000))
    for each in (module, module, other, module):
        expected, found = (plan(planner, each) for planner in planners)
        assert expected == found


def test_enough_time_changes_nothing() -> None:
    assert both(topology=topology, timeout_seconds=lambda: 3_600).fast


def test_a_timeout_ends_the_search_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(10_000))
    monkeypatch.setattr(search.time, "monotonic", lambda: next(now))
    planner = fast_planner(topology=topology(), timeout_seconds=20)
    with pytest.warns(UserWarning, match=r"timeout_seconds=20 ended the search .* after 21 proposals; another start"):
        found, proposals = plan(planner)
    assert proposals == 21 and account(planner).timed_out
    assert found != plan(EmbeddingShardingPlanner(topology=topology()))[0] or proposals < 200


def test_a_reservation_of_the_users_own_and_a_timeout_are_left_to_torchrec() -> None:
    told = both(topology=topology, storage_reservation=lambda: OwnReservation(0.2), timeout_seconds=lambda: 3_600)
    assert not told.fast
    assert told.stock[1].reason == "OwnReservation tells what it reserved when the timeout runs already"


def test_an_option_makes_its_shards_when_asked() -> None:
    planner = fast_planner(topology=topology())
    plan(planner)
    space = planner.get_search_space()
    assert all(isinstance(option, LazyOption) and option.lazy for option in space)
    expected = EmbeddingEnumerator(topology(), 512).enumerate(model(), [EmbeddingBagCollectionSharder()])
    for option, stock in zip(space, expected, strict=True):
        for each in (option, copy.deepcopy(option), pickle.loads(pickle.dumps(option)), plain(option)):
            assert isinstance(each, ShardingOption)
            assert (each.num_shards, each.total_storage, each.total_perf) == (
                stock.num_shards,
                stock.total_storage,
                stock.total_perf,
            )
            assert canonical(each.shards) == canonical(stock.shards)
            assert hash(each) == hash(stock) and str(each) == str(stock)
        assert type(pickle.loads(pickle.dumps(option))) is ShardingOption
        assert repr(option).startswith(repr(stock).partition(" object at ")[0])


def test_the_selected_options_are_torchrecs() -> None:
    planner = fast_planner(topology=topology())
    plan(planner)
    selected = planner.get_selected_options()
    assert {type(option) for option in selected} == {ShardingOption}
    # Nothing of theirs is anyone else's: whoever changes a part of a shard in place changes that one.
    shards = [shard for option in (*selected, *planner.get_search_space()) for shard in option.shards]
    chosen = sum(option.num_shards for option in selected)
    for part in ("size", "offset", "storage", "perf"):
        others = [id(getattr(shard, part)) for shard in shards[chosen:]]
        assert len({id(getattr(shard, part)) for shard in shards[:chosen]}.difference(others)) == chosen


def test_estimates_of_a_copy_are_its_own() -> None:
    enumerator = fast_planner(topology=topology())._enumerator
    options = enumerator.enumerate(model(), [EmbeddingBagCollectionSharder()])
    before = canonical([option.shards for option in copy.deepcopy(options)])
    copies = copy.deepcopy(options)
    for option in copies:
        option.batch_size *= 2
    enumerator.populate_estimates(copies)
    assert canonical([option.shards for option in copies]) != before
    assert canonical([option.shards for option in options]) == before


def test_what_is_computed_once_for_a_table_is_not_taken_for_another() -> None:
    pooling = [20.0]  # one list for two tables, which TorchRec allows
    both(
        topology=topology,
        constraints=lambda: {
            "t1": ParameterConstraints(pooling_factors=pooling, num_poolings=[1.0]),
            "t2": ParameterConstraints(pooling_factors=pooling, num_poolings=[3.0]),
            "t3": ParameterConstraints(pooling_factors=pooling, batch_sizes=[64]),
        },
    )


def test_constraints_that_are_changed_in_place_count_in_the_next_plan() -> None:
    plans = []
    for make in (_stock, fast_planner):
        pooling = [1.0]
        for lookups in (1.0, 500.0):
            pooling[0] = lookups
            constraints = {f"t{i}": ParameterConstraints(pooling_factors=pooling) for i in range(len(ROWS))}
            planner = make(topology=topology(), constraints=constraints)
            plan(planner)
            plans.append([canonical(option.shards) for option in planner.get_search_space()])
    assert plans[:2] == plans[2:]


def test_sums_of_other_fields_are_left_to_torchrec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("initopt.sharding_plan.estimators._Sum.READ", frozenset({"input_lengths"}))
    told = both(topology=topology)
    assert told.fast and told.stock == (
        StockPart("estimator", "the sums of this torchrec are of other fields than those of the one that was tested"),
    )


def test_planning_warns_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan(fast_planner(topology=topology(), storage_reservation=FixedPercentageStorageReservation(0.1)))


def test_public_names() -> None:
    assert {"Account", "StockPart", "account", "fast_planner", "make_fast"} <= set(sharding_plan.__all__)


def test_an_error_of_the_search_leaves_it_to_torchrec(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise KeyError("broken")

    monkeypatch.setattr(search, "bound", broken)
    with pytest.warns(UserWarning, match=r"is not trusted, as it failed with KeyError\('broken'\)"):
        assert not both(topology=topology).fast


def test_a_planner_can_be_copied_and_pickled() -> None:
    planner = fast_planner(topology=topology())
    expected = plan(planner)
    for twin in (copy.deepcopy(planner), pickle.loads(pickle.dumps(planner))):
        assert plan(twin) == expected
        assert account(twin).fast


def test_a_function_of_torchrec_that_was_replaced_keeps_the_planner_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology, shard_estimators

    stock = shard_estimators.calculate_shard_storages
    monkeypatch.setattr(shard_estimators, "calculate_shard_storages", lambda *a, **k: stock(*a, **k))
    planner = EmbeddingShardingPlanner(topology=Topology(world_size=2, compute_device="cuda"), debug=False)
    (part,) = sharding_plan.account(sharding_plan.make_fast(planner)).stock
    assert part.reason.endswith("shard_estimators.calculate_shard_storages is not TorchRec's own code")


def test_a_method_of_an_estimator_that_was_replaced_is_called() -> None:
    from torchrec.distributed.planner.shard_estimators import EmbeddingStorageEstimator

    from initopt.sharding_plan import estimators

    estimator = EmbeddingStorageEstimator(topology=None)  # type: ignore[arg-type]
    estimator.estimate = lambda *arguments, **more: None  # type: ignore[method-assign]
    with pytest.raises(estimators.Unknown, match="a method of EmbeddingStorageEstimator was replaced"):
        estimators.terse(estimator)


def test_what_is_no_planner_is_refused() -> None:
    with pytest.raises(TypeError, match="make_fast got 'NoneType', which is no sharding planner"):
        sharding_plan.make_fast(None)


def test_errors_about_plans_travel_between_processes() -> None:
    import pickle

    for error in (
        sharding_plan.PlanError(["a", "b"], "the plan in x"),
        sharding_plan.PlanFileError("plan.json", "is torn"),
    ):
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again)) == (type(error), str(error))
