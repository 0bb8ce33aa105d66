"""TorchRec's estimators, computing what they compute in less time.

They look up the same things for every shard: annotated methods in the whole `dir` of a config (fourteen times),
coefficients, bandwidths, values of enumerations. Their own code runs here from a second copy of their modules, in which
these look-ups are short. TorchRec's modules stay as they are.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib.util
import math
import types
from collections.abc import Callable
from enum import Enum
from typing import Any

from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner import shard_estimators
from torchrec.distributed.planner.estimator import estimator as perf_estimators
from torchrec.distributed.planner.estimator.types import HardwarePerfConfig, ShardPerfContext
from torchrec.distributed.types import ShardingType

Estimate = Callable[[list[Any], Any], None]
"""Write the estimates of options, given the data of their sharders."""


class Unknown(Exception):
    """An estimator that was not tested; its text is the reason."""


def terse(estimator: Any) -> Estimate:
    """Return the quicker `estimate` of an estimator, which may be shown one shard per size.

    Raises Unknown for one that is not TorchRec's own, or that adjusts the shards of an option together.
    """
    kind = type(estimator)
    if any(isinstance(value, types.FunctionType | types.MethodType) for value in vars(estimator).values()):
        raise Unknown(f"a method of {kind.__name__} was replaced")
    if kind is shard_estimators.EmbeddingStorageEstimator:
        return functools.partial(_estimate, "storage", estimator)
    if kind is shard_estimators.EmbeddingPerfEstimator:
        return functools.partial(_estimate_and_validate, estimator, terse(estimator._estimator))
    if kind is not perf_estimators.EmbeddingPerfEstimator:
        raise Unknown(f"{kind.__name__} is not TorchRec's own")
    if not _Sum.READ.issuperset(_fields_read(ShardPerfContext.batch_inputs, ShardPerfContext.batch_outputs)):
        raise Unknown("the sums of this torchrec are of other fields than those of the one that was tested")
    config = type(estimator._config)
    if config.post_process_perfs is not HardwarePerfConfig.post_process_perfs:
        raise Unknown(f"{config.__name__} adjusts the shards of an option together")
    twin = copy.copy(estimator)
    twin._config, annotated = _terse_config(estimator._config), _own_callables(estimator._config)
    return functools.partial(_estimate, "annotated" if annotated else "perf", twin)


_call = object()
"""Stands for one call of an estimator. What it keeps is not for the next: a user may have changed a list by then."""


def _estimate(which: str, estimator: Any, options: list[Any], sharder_data_map: Any) -> None:
    global _call
    _call = object()
    _SECOND[which]().estimate(estimator, options, sharder_data_map=sharder_data_map)


def _estimate_and_validate(stock: Any, inner: Estimate, options: list[Any], sharder_data_map: Any) -> None:
    twin = copy.copy(stock)
    twin._estimator = types.SimpleNamespace(estimate=lambda options, sharder_data_map: inner(options, sharder_data_map))
    twin.estimate(options, sharder_data_map)


class _Sum:
    """A property of TorchRec's that adds up over the features of a table, as an attribute that is computed once.

    The evaluators ask a dozen times, for every kernel and size of shard of a table.
    """

    READ = frozenset({"input_lengths", "num_poolings", "batch_sizes", "is_pooled"})
    """The fields that it may depend on."""

    def __init__(self, stock: property) -> None:
        assert stock.fget is not None
        self._compute = stock.fget
        # Replaced as one: another thread may plan at the same time.
        self._last: tuple[object, dict[str, Any], Any] = (None, {}, None)

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, context: Any, owner: type) -> Any:
        fields = context.__dict__
        call, before, value = self._last
        # The options of a table share this list; those of another may have integers for equal floats.
        if not (
            call is _call
            and fields["input_lengths"] is before["input_lengths"]
            and fields["num_poolings"] == before["num_poolings"]
            and fields["batch_sizes"] == before["batch_sizes"]
            and fields["is_pooled"] == before["is_pooled"]
        ):
            value = self._compute(context)
            self._last = _call, fields, value
        fields[self._name] = value
        return value


def _fields_read(*properties: property) -> set[str]:
    """Return the fields of a context that the code of these properties names."""
    codes = [each.fget.__code__ for each in properties if isinstance(each.fget, types.FunctionType)]
    named = {name for code in codes for name in names_in(code)}
    return named & {field.name for field in dataclasses.fields(ShardPerfContext)}


def names_in(code: types.CodeType) -> list[str]:
    """Return the names that a function looks up, in the functions within it too."""
    inner = [names_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return [*code.co_names, *(name for names in inner for name in names)]


class _Context(ShardPerfContext):  # type: ignore[misc]
    """A context of which an evaluator sees no more than the fields, and the two sums."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__ = fields

    batch_inputs = _Sum(ShardPerfContext.batch_inputs)
    batch_outputs = _Sum(ShardPerfContext.batch_outputs)


def _second(module: types.ModuleType, **names: Any) -> Any:
    """Load a module once more, under no name, with these names in its sight."""
    spec = importlib.util.find_spec(module.__name__)
    assert spec is not None and spec.loader is not None
    twin = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(twin)
    vars(twin).update(names)
    return twin


class _Plain:
    """Attributes. Of a class of its own the interpreter finds them sooner than of a `SimpleNamespace`."""

    def __init__(self, **attributes: Any) -> None:
        for name, value in attributes.items():
            setattr(self, name, value)


def _plain(enumeration: type[Enum]) -> Any:
    """Return the members by name; their `.value` is no descriptor."""
    return _Plain(**{each.name: _Plain(value=each.value) for each in enumeration})


def _nothing(config: Any, sharding_type: str | None = None) -> None:
    """There is no annotated method."""


def _once_per_context(method: Any) -> Any:
    """The backward pass asks for the forward pass once more."""

    def kept(self: Any, ctx: Any, config: Any) -> Any:
        if "_forward" not in vars(ctx):
            ctx._forward = method(self, ctx, config)
        return ctx._forward

    return kept


def _once_per_cut(function: Any) -> Any:
    """The sizes for SSD are asked for with the arguments of those for HBM and DDR, and kernels have some in common."""
    # The call, the sizes of the shards, the rest that the kernels of a table share, and the answers.
    cut: tuple[object, Any, dict[str, Any], dict[Any, Any]] = (None, None, {}, {})

    def kept(*, storage: int, shard_sizes: Any, clf: float | None = None, **same: Any) -> Any:
        nonlocal cut
        call, sizes, rest, answers = cut
        # Each option has a list of sizes of its own, and `same` for all of its calls.
        if sizes is not shard_sizes:
            if call is not _call or sizes != shard_sizes or rest != same:
                answers = {}
            cut = _call, shard_sizes, same, answers
        # One and 1.0 are equal, but not what follows from them if it is very large.
        key = storage, clf, type(clf)
        answer = answers.get(key)
        if answer is None:
            answer = answers[key] = function(storage=storage, shard_sizes=shard_sizes, clf=clf, **same)
        return answer

    return kept


def _unless_repeated(function: Any) -> Any:
    """The kernels of a table are asked about in turn; the sizes of its inputs and outputs are the same for all."""
    last: tuple[object, dict[str, Any], Any] = (None, {}, None)

    def kept(**asked: Any) -> Any:
        nonlocal last
        call, before, answer = last
        # The options of a table share this list; those of another may have integers for equal floats.
        if call is not _call or asked["input_lengths"] is not before["input_lengths"] or asked != before:
            answer = function(**asked)
            last = _call, asked, answer
        return answer

    return kept


@functools.cache
def _second_storage() -> Any:
    names = {"ShardingType": _plain(ShardingType), "EmbeddingComputeKernel": _plain(EmbeddingComputeKernel)}
    module = _second(shard_estimators, **names)
    module.prod = math.prod
    module._calculate_storage_specific_sizes = _once_per_cut(module._calculate_storage_specific_sizes)
    module._calculate_shard_io_sizes = _unless_repeated(module._calculate_shard_io_sizes)
    return module.EmbeddingStorageEstimator


@functools.cache
def _second_perf(annotated: bool) -> Any:
    names = {"ShardingType": _plain(ShardingType), "EmbeddingComputeKernel": _plain(EmbeddingComputeKernel)}
    lookups = {} if annotated else dict.fromkeys(_LOOKUPS, _nothing)
    module = _second(perf_estimators, ShardPerfContext=_Context, **names, **lookups)
    evaluator = module.EmbeddingShardingPerfEvaluator
    evaluator._default_fwd_comp = _once_per_context(evaluator._default_fwd_comp)
    return module.EmbeddingPerfEstimator


_LOOKUPS = (
    "get_forward_compute",
    "get_backward_compute",
    "get_prefetch_compute",
    "get_input_dist_comms",
    "get_fwd_comms",
    "get_bwd_comms",
    "get_output_write_size",
)
_SECOND: dict[str, Callable[[], Any]] = {
    "storage": _second_storage,
    "perf": functools.partial(_second_perf, False),
    "annotated": functools.partial(_second_perf, True),
}


def _own_callables(config: Any) -> list[str]:
    """The public callables of a config that are not TorchRec's: annotated methods are among them."""
    kind = type(config)

    def own(name: str) -> bool:
        return getattr(kind, name, None) is not getattr(HardwarePerfConfig, name, None) or name in vars(config)

    return [name for name in dir(config) if not name.startswith("_") and own(name) and callable(getattr(config, name))]


def _terse_config(config: Any) -> Any:
    """Return a config that answers like this one, whose `dir` is short and which remembers what kernels decide."""
    kind, names = type(config), _own_callables(config)
    members: dict[str, Any] = {
        "__dir__": lambda _: names,
        "__module__": kind.__module__,
        "__reduce__": lambda _: (_terse_config, (config,)),
    }
    if not names:
        for name in ("get_coefficients_for_sharding", "get_device_bw"):
            members[name] = staticmethod(functools.lru_cache(maxsize=None)(getattr(config, name)))
    twin = copy.copy(config)
    twin.__class__ = type(kind.__name__, (kind,), members)
    return twin
