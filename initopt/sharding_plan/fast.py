"""A stock planner with two parts exchanged: the enumerator and the proposer. `plan()` itself is TorchRec's.

The proposer does the whole search when it is loaded, and proposes only what it found. TorchRec's partitioner and perf
model place and rate that; if the rating is not the one that was found, TorchRec's own search runs after all. So it does
for every part that is not TorchRec's own, and `account` says which part that was.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import inspect
import logging
import sys
import warnings
import weakref
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from torchrec.distributed.planner import (
    EmbeddingShardingPlanner,
    enumerators,
    partitioners,
    perf_models,
    planners,
    proposers,
    shard_estimators,
    storage_reservations,
)
from torchrec.distributed.planner import types as planner_types
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.estimator import estimator as estimators
from torchrec.distributed.planner.estimator.types import ShardPerfContext
from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner, MemoryBalancedPartitioner
from torchrec.distributed.planner.perf_models import NoopPerfModel
from torchrec.distributed.planner.proposers import (
    DynamicProgrammingProposer,
    EmbeddingOffloadScaleupProposer,
    GreedyProposer,
    GridSearchProposer,
    UniformProposer,
)
from torchrec.distributed.planner.types import PlannerError, Proposer
from torchrec.distributed.planner.utils import reset_shard_rank

from initopt.sharding_plan.enumeration import FastEnumerator, enumerates_as_expected
from initopt.sharding_plan.options import ProposedOption, plain
from initopt.sharding_plan.proposals import Greedy, Grid, Proposals, Twin, Uniform
from initopt.sharding_plan.search import Found, handed_over, search
from initopt.sharding_plan.space import Space, Unmodelled

logger = logging.getLogger(__name__)
_warn = logging.getLogger("initopt")

TESTED_TORCHREC = "1.9."
"""The start of the versions whose plans were compared; the planner of any other version is left alone."""

_FIELDS = {
    planner_types.Perf: "fwd_compute fwd_comms bwd_compute bwd_comms input_dist_comms prefetch_compute",
    planner_types.Storage: "hbm ddr ssd",
    planner_types.Shard: "size offset storage perf rank",
    planner_types.DeviceHardware: "rank storage perf",
    ShardPerfContext: (
        "sharding_type compute_kernel hash_size emb_dim batch_sizes num_poolings input_lengths world_size "
        "local_world_size intra_group_size input_data_type_size table_data_type_size output_data_type_size "
        "fwd_a2a_comm_data_type_size bwd_a2a_comm_data_type_size fwd_sr_comm_data_type_size "
        "bwd_sr_comm_data_type_size device_bw hbm_to_ddr_mem_bw intra_host_bw inter_host_bw comms_bandwidths "
        "is_inference is_weighted is_pooled has_feature_processor bwd_compute_multiplier "
        "weighted_feature_bwd_compute_multiplier use_linear_regression_prefetch_estimate "
        "use_batch_inputs_for_expected_cache_fetches caching_ratio table_name hash_size_for_clamping "
        "cache_stats_expected_lookups expected_miss_rate"
    ),
}
"""What estimates are made from and consist of. A field more, and shards of one size might no longer be equal."""

_RESERVATIONS = (
    storage_reservations.HeuristicalStorageReservation,
    storage_reservations.FixedPercentageStorageReservation,
    storage_reservations.FixedAbsoluteStorageReservation,
    storage_reservations.SKUAwareStorageReservation,
    storage_reservations.InferenceStorageReservation,
)
"""Those whose `last_reserved_topology` is what `reserve` returned."""


@dataclasses.dataclass(frozen=True)
class StockPart:
    """A part of the planner that ran as it is, and why."""

    part: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Account:
    """What the last `plan()` did.

    `fast`: the search was ours. Of its `proposals` some were `pruned` by the bound, `cut` while being placed because
    they were slower than the best already, `placed` to the end, or `failed` to fit; a search that was not ours counts
    none. `timed_out`: `timeout_seconds` ended it, and the plan is the best until then. `stock` names the parts that ran
    as they are.
    """

    fast: bool = False
    proposals: int = 0
    pruned: int = 0
    cut: int = 0
    placed: int = 0
    failed: int = 0
    timed_out: bool = False
    stock: tuple[StockPart, ...] = ()


def fast_planner(*args: Any, **kwargs: Any) -> Any:
    """Return an `EmbeddingShardingPlanner`, made with these arguments, that finds the same plan sooner.

    The plan is the same to the last field, as is an error. A part that is not TorchRec's own runs as it is, and takes
    the time that it takes.
    """
    return make_fast(EmbeddingShardingPlanner(*args, **kwargs))


def make_fast(planner: Any) -> Any:
    """Exchange the enumerator and the proposers of a planner in place, and return it.

    A planner of another class, or of a version of torchrec that was not tested, is left as it is: see `account`. That,
    and a part with which the search is TorchRec's own, is said on the logger `initopt`. Raises TypeError for what is no
    planner.
    """
    if not callable(getattr(planner, "plan", None)):
        raise TypeError(f"make_fast got {type(planner).__name__!r}, which is no sharding planner: it can't plan")
    if hasattr(planner, _ACCOUNT):
        return planner
    reason = _not_for_us(planner)
    # A class of the user's own may have no room for it; that planner is none of ours anyhow.
    with contextlib.suppress(AttributeError):
        setattr(planner, _ACCOUNT, Account(stock=(StockPart("planner", reason),) if reason else ()))
    if reason:
        _warn.warning("the sharding planner runs as it is: %s", reason)
    else:
        if type(planner._enumerator) is EmbeddingEnumerator and enumerates_as_expected():
            planner._enumerator = FastEnumerator(planner._enumerator)
        planner._proposers = [SearchProposer(planner, planner._proposers)]
    return planner


def account(planner: Any) -> Account:
    """Return what the last `plan()` of a planner did; `stock` names the planner if `make_fast` never saw it."""
    found: Account = getattr(planner, _ACCOUNT, Account(stock=(_UNTOUCHED,)))
    return found


def foreign_parts(planner: Any) -> tuple[StockPart, ...]:
    """Return the parts of a planner that are not TorchRec's own, or not known, and why.

    With them the search may take as long as TorchRec's, and nobody knows whether it ends alike in two processes.
    """
    if not hasattr(planner, _ACCOUNT):
        return (_UNTOUCHED,)
    first = planner._proposers[0] if getattr(planner, "_proposers", None) else None
    if not isinstance(first, SearchProposer):
        return account(planner).stock or (StockPart("search", f"{_name(first)} came after make_fast"),)
    parts = (*_parts_in_use(planner), *_foreign_in_search(planner, first.proposers))
    if planner._callbacks:
        parts = (*parts, StockPart("callbacks", "functions of the user's own change the search space"))
    if planner.plan_loader is not None:
        parts = (*parts, StockPart("plan loader", f"{_name(planner.plan_loader)} is not TorchRec's own"))
    return parts


_ACCOUNT = "_initopt_account"
_UNTOUCHED = StockPart("planner", "make_fast was not called with it")


def _not_for_us(planner: Any) -> str | None:
    version = importlib.metadata.version("torchrec")
    if not version.startswith(TESTED_TORCHREC):
        return f"torchrec {version} was not tested, only {TESTED_TORCHREC}*"
    if type(planner) is not EmbeddingShardingPlanner:
        return f"{type(planner).__name__} plans in its own way"
    replaced = _replaced()
    if replaced:
        return f"{replaced} is not TorchRec's own code"
    for kind, names in _FIELDS.items():
        if [field.name for field in dataclasses.fields(kind)] != names.split():
            return f"{kind.__name__} of this torchrec has other fields than the one that was tested"
    return None


def _replaced() -> str:
    """Name a function of the planner's modules that somebody has replaced in place, or return nothing."""
    for module in _PLANNING:
        classes = [kind for kind in vars(module).values() if inspect.isclass(kind) and _from(kind, {"torchrec"})]
        for holder in (module, *classes):
            for name, value in vars(holder).items():
                if inspect.isfunction(value) and not _from(value, _KNOWN):
                    return f"{holder.__name__}.{name}"
    return ""


def _from(value: Any, packages: Collection[str]) -> bool:
    return (value.__module__ or "").partition(".")[0] in packages


_KNOWN = {"torchrec", "torch", "fbgemm_gpu", "numpy", "pyre_extensions", *sys.stdlib_module_names}
"""Where the functions in those modules come from."""
_PLANNING = (enumerators, estimators, partitioners, perf_models, planners, proposers, shard_estimators)
"""The modules that make a plan."""


class _Distrusted(Unmodelled):
    """TorchRec's partitioner and perf model say something else than the search."""


@contextmanager
def _errors_of_ours() -> Iterator[None]:
    """Whatever goes wrong in the search, TorchRec's own still runs; if it was the input, that raises again there."""
    try:
        yield
    except Unmodelled:
        raise
    except Exception as error:
        raise _Distrusted(f"it failed with {error!r}") from error


class SearchProposer(Proposer):  # type: ignore[misc]
    """The one proposer of a fast planner.

    `load` searches; the best proposal, or those that an error tells of, are proposed. Where the search can't be ours
    the proposers of the user are driven, in the order and with the calls of a stock `plan()`.
    """

    def __init__(self, planner: Any, proposers: list[Any]) -> None:
        self.proposers = proposers
        # The planner holds this proposer: a strong reference back would keep both, and the search space, for long.
        self._planner_ref = weakref.ref(planner)
        self._forget()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_planner_ref": self._planner}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _planner_ref=weakref.ref(state["_planner_ref"]))

    @property
    def _planner(self) -> Any:
        return self._planner_ref()

    def _forget(self) -> None:
        self._inputs: tuple[list[Any], Any] = [], None
        self._space: Space | None = None
        self._sources: list[Proposals] = []
        self._found: Found | None = None
        self._queue: list[tuple[list[Any], float | None]] = []
        self._driven: int | None = None

    def load(self, search_space: list[Any], enumerator: Any = None) -> None:
        """Search the space, or load the proposers of the user with it."""
        self._forget()
        self._inputs = search_space, enumerator
        self._write(Account(stock=_parts_in_use(self._planner)))
        reservation = self._planner._storage_reservation
        try:
            with _errors_of_ours():
                self._prepare()
                if type(reservation) in _RESERVATIONS:
                    self._search(reservation.last_reserved_topology)
                    return
            if self._planner._timeout_seconds:
                raise Unmodelled(f"{_name(reservation)} tells what it reserved when the timeout runs already")
        except Unmodelled as reason:
            self._space = None
            self._give_up(reason)
            return
        # The topology that is left is known from the first feedback on.
        self._drive()

    def propose(self) -> list[Any] | None:
        """Return the next proposal; after the last one tell the planner how many there were."""
        if self._driven is not None:
            while not (proposal := self.proposers[self._driven].propose()):
                if self._driven + 1 == len(self.proposers):
                    return None
                self._driven += 1
            return proposal  # type: ignore[no-any-return]
        if self._queue:
            return self._queue[0][0]
        if self._found is not None:
            counts = self._found.counts
            self._planner._num_proposals, self._planner._num_plans = counts.proposals, counts.placed
        # The numbers are as large as the search space.
        self._space, self._sources, self._inputs = None, [], ([], None)
        return None

    def feedback(
        self,
        partitionable: bool,
        plan: list[Any] | None = None,
        perf_rating: float | None = None,
        storage_constraint: Any = None,
    ) -> None:
        """Compare the planner's rating with the one that was found; or tell the user's proposer."""
        try:
            if self._driven is None:
                _, expected = self._queue.pop(0)
                if perf_rating != expected:
                    raise _Distrusted(f"it found the rating {expected}, TorchRec {perf_rating}")
                return
            self.proposers[self._driven].feedback(
                partitionable=partitionable,
                plan=plan,
                perf_rating=perf_rating,
                storage_constraint=storage_constraint,
            )
            if self._space is not None:
                # The planner does so next; a rank would be part of what tells two options apart.
                reset_shard_rank(plan or [])
                with _errors_of_ours():
                    self._search(storage_constraint)
                self._driven = None
        except Unmodelled as reason:
            self._give_up(reason)

    def _prepare(self) -> None:
        """Make the space and the proposals. Raises Unmodelled for a part of the user's own."""
        search_space, enumerator = self._inputs
        planner = self._planner
        for part in _foreign_in_search(planner, self.proposers):
            raise Unmodelled(part.reason)
        if len({id(proposer) for proposer in self.proposers}) < len(self.proposers):
            raise Unmodelled("one proposer stands twice in the list")
        self._space = space = Space(search_space)
        for proposer in self.proposers:
            self._sources.append(_MODELLED[type(proposer)](proposer, space, search_space, enumerator))

    def _search(self, topology: Any) -> None:
        """Fill the queue. Raises Unmodelled."""
        planner, space = self._planner, self._space
        assert space is not None
        self._space = None
        if planner._perf_model._topology.world_size != topology.world_size:
            raise Unmodelled("the perf model has another world size than the topology")
        found = search(space, self._sources, planner._partitioner, topology, planner._timeout_seconds)
        expected = None if found.best is None else found.rating
        queue = []
        for picks in handed_over(found):
            options = [plain(space.choices[pick].option, ProposedOption) for pick in picks]
            rating = _rated(planner, options, topology)
            if rating != expected:
                raise _Distrusted(f"it found the rating {expected}, TorchRec {rating}")
            queue.append((options, expected))
        self._queue, self._found = queue, found
        # A proposer may remember something for the next plan().
        self.proposers = [source.stock for source in self._sources]
        counts = found.counts
        self._write(dataclasses.replace(account(planner), fast=True, **dataclasses.asdict(counts)))
        logger.debug(
            "%d proposals: %d pruned by a bound, %d cut while being placed, %d placed, %d did not fit",
            counts.proposals,
            counts.pruned,
            counts.cut,
            counts.placed,
            counts.failed,
        )
        if counts.timed_out:
            warnings.warn(
                f"initopt: timeout_seconds={planner._timeout_seconds} ended the search for a sharding plan after "
                f"{counts.proposals} proposals; another start, or another rank, may get another plan. Raise it.",
                stacklevel=2,
            )

    def _give_up(self, reason: Unmodelled) -> None:
        self._queue, self._found = [], None
        part = StockPart("search", str(reason))
        if not isinstance(reason, _Distrusted):
            _warn.warning("the search for a sharding plan is TorchRec's own: %s", reason)
        self._write(Account(stock=(*account(self._planner).stock, part)))
        if isinstance(reason, _Distrusted):
            warnings.warn(
                f"initopt: the fast search for a sharding plan is not trusted, as {reason}; TorchRec's own search runs "
                "instead. The plan is right; please report this.",
                stacklevel=2,
            )
        if self._driven is None:
            self._drive()

    def _drive(self) -> None:
        search_space, enumerator = self._inputs
        options = [plain(option) for option in search_space]
        for proposer in self.proposers:
            proposer.load(search_space=options, enumerator=enumerator)
        self._driven = 0

    def _write(self, what: Account) -> None:
        setattr(self._planner, _ACCOUNT, what)


def _rated(planner: Any, options: list[Any], topology: Any) -> float | None:
    """Return the rating by the planner's own partitioner and perf model, or None if the options can't be placed."""
    try:
        plan = planner._partitioner.partition(proposal=options, storage_constraint=topology)
        rating: float = planner._perf_model.rate(plan=plan)
        return rating
    except PlannerError:
        return None
    finally:
        reset_shard_rank(options)


def _parts_in_use(planner: Any) -> tuple[StockPart, ...]:
    """Name the parts that run as they are although the search is ours."""
    parts = []
    enumerator, reservation = planner._enumerator, planner._storage_reservation
    if isinstance(enumerator, FastEnumerator):
        parts += [StockPart("estimator", reason) for reason in enumerator.left_alone]
    else:
        parts.append(StockPart("enumerator", f"{_name(enumerator)} is not TorchRec's own"))
    if type(reservation) not in _RESERVATIONS:
        parts.append(StockPart("storage reservation", f"{_name(reservation)} is not TorchRec's own"))
    return tuple(parts)


def _foreign_in_search(planner: Any, proposers: list[Any]) -> tuple[StockPart, ...]:
    """Name the parts with which the search can't be ours."""
    parts = (planner._partitioner, planner._perf_model, *proposers)
    overridden = {"partition", "rate", "propose", "feedback"}
    foreign = (part for part in parts if type(part) not in _MODELLED or vars(part).keys() & overridden)
    return tuple(StockPart("search", f"{_name(part)} is not TorchRec's own") for part in foreign)


def _name(part: Any) -> str:
    return type(part).__name__


def _twin(stock: Any, space: Space, search_space: list[Any], enumerator: Any) -> Proposals:
    twin = Twin(stock, space)
    twin.load(search_space, enumerator)
    return twin


_MODELLED: dict[type, Any] = {
    GreedyPerfPartitioner: None,
    MemoryBalancedPartitioner: None,
    NoopPerfModel: None,
    GridSearchProposer: lambda stock, space, *_: Grid(stock, space),
    GreedyProposer: lambda stock, space, *_: Greedy(stock, space),
    UniformProposer: lambda stock, space, *_: Uniform(stock, space),
    DynamicProgrammingProposer: _twin,
    EmbeddingOffloadScaleupProposer: _twin,
}
"""The parts that are modelled, and how the proposers among them are."""
