"""The search space of TorchRec's `EmbeddingEnumerator`, with one estimate per distinct shard size.

TorchRec's own code enumerates and TorchRec's own estimators compute; they are shown options with one shard per size
instead of one per rank. What they can't be shown so (an estimator or a config that sees all shards at once) is left to
them as it is.
"""

from __future__ import annotations

import copy
import functools
import inspect
import types
from typing import Any

from torchrec.distributed.planner import enumerators, shard_estimators
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.estimator import estimator as perf_estimators
from torchrec.distributed.planner.estimator.types import HardwarePerfConfig, ShardPerfContext

from initopt.sharding_plan.options import Layout, LazyOption, compact

_REPLACED = {"ShardingOption", "Shard", "calculate_shard_sizes_and_offsets"}


class FastEnumerator(EmbeddingEnumerator):  # type: ignore[misc]
    """An `EmbeddingEnumerator` made from another one, with the same arguments and estimators.

    `left_alone` says why its estimators see every shard, if they do.
    """

    def __init__(self, stock: EmbeddingEnumerator) -> None:
        self.__dict__.update(stock.__dict__)
        self._stash_weights: dict[tuple[int, str], bool] = {}
        self.left_alone: list[str] = []
        self._terse: list[Any] = []
        for estimator in self._estimators:
            try:
                self._terse.append(terse(estimator))
            except Unknown as reason:
                self.left_alone.append(str(reason))

    def enumerate(self, module: Any, sharders: list[Any]) -> list[Any]:
        """Return the options that TorchRec enumerates, in its order."""
        self._stash_weights.clear()
        try:
            return list(_lazily(self, module, sharders))
        finally:
            self._stash_weights.clear()

    def populate_estimates(self, sharding_options: list[Any]) -> None:
        """Write the perf and the storage of every shard, as TorchRec's estimators compute them."""
        if not self.left_alone:
            restore = compact(sharding_options)
            try:
                for estimator in self._terse:
                    estimator.estimate(sharding_options, sharder_data_map=self._sharder_data_map)
                return
            except Exception:
                # Its text may tell of all shards: it is raised again below, or it was ours.
                pass
            finally:
                restore()
        super().populate_estimates(sharding_options)

    def _get_stash_weights(self, parameter: str, module: Any) -> bool:
        # It walks all tables, and is asked for every option of every table.
        key = id(module), parameter
        if key not in self._stash_weights:
            self._stash_weights[key] = super()._get_stash_weights(parameter, module)
        return self._stash_weights[key]


def enumerates_as_expected() -> bool:
    """Whether TorchRec's `enumerate` is a function that makes its options in the way that this file relies on."""
    function = EmbeddingEnumerator.enumerate
    return (
        isinstance(function, types.FunctionType)
        and not function.__code__.co_freevars
        and _REPLACED.issubset(_names(function.__code__))
    )


def _names(code: types.CodeType) -> list[str]:
    inner = [_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return [*code.co_names, *(name for names in inner for name in names)]


def _lazily(enumerator: FastEnumerator, module: Any, sharders: list[Any]) -> Any:
    """Run TorchRec's own `enumerate` so that it makes lazy options."""
    layouts: dict[tuple[Any, ...], Layout] = {}
    cut = enumerators.calculate_shard_sizes_and_offsets

    def layout(tensor: Any, **how: Any) -> tuple[list[Layout], list[None]]:
        key = tuple(tensor.shape), *(tuple(value) if isinstance(value, list) else value for value in how.values())
        if key not in layouts:
            layouts[key] = Layout(*cut(tensor=tensor, **how))
        return [layouts[key]], [None]

    stock: Any = EmbeddingEnumerator.enumerate
    names = {
        **vars(enumerators),
        "ShardingOption": LazyOption,
        "Shard": lambda size, offset: size,
        "calculate_shard_sizes_and_offsets": layout,
    }
    return _with_names(stock, names)(enumerator, module, sharders)


class Unknown(Exception):
    """A part that was not tested; its text is the reason."""


def terse(estimator: Any) -> Any:
    """Return an estimator with the same results that is quicker and may be shown one shard per size.

    Raises Unknown for one that is not TorchRec's own, or that adjusts the shards of an option together.
    """
    kind = type(estimator)
    if kind is shard_estimators.EmbeddingStorageEstimator:
        return estimator
    if kind is shard_estimators.EmbeddingPerfEstimator:
        twin = copy.copy(estimator)
        twin._estimator = terse(estimator._estimator)
        return twin
    if kind is not perf_estimators.EmbeddingPerfEstimator:
        raise Unknown(f"{kind.__name__} is not TorchRec's own")
    config = type(estimator._config)
    if config.post_process_perfs is not HardwarePerfConfig.post_process_perfs:
        raise Unknown(f"{config.__name__} adjusts the shards of an option together")
    return _Terse(estimator)


class _Terse:
    """TorchRec's perf estimator with the answers kept that it asks for again and again."""

    def __init__(self, stock: Any) -> None:
        self._estimator = copy.copy(stock)
        self._estimator._config = _terse_config(stock._config)

    def estimate(self, sharding_options: list[Any], sharder_data_map: Any) -> None:
        function: Any = inspect.unwrap(perf_estimators.EmbeddingPerfEstimator.estimate)
        names = {**vars(perf_estimators), "ShardPerfContext": _Context}
        _with_names(function, names)(self._estimator, sharding_options, sharder_data_map)


class _Once:
    """An attribute that is computed by a property of TorchRec's at the first look, and stays."""

    def __init__(self, stock: property) -> None:
        self._compute = stock.fget

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type) -> Any:
        assert self._compute is not None
        value = instance.__dict__[self._name] = self._compute(instance)
        return value


class _Context(ShardPerfContext):  # type: ignore[misc]
    """A context that adds up its inputs and outputs once; the evaluators ask a dozen times."""

    batch_inputs = _Once(ShardPerfContext.batch_inputs)
    batch_outputs = _Once(ShardPerfContext.batch_outputs)


def _with_names(stock: Any, names: dict[str, Any]) -> Any:
    """Return a function of TorchRec's with other names in its sight; TorchRec itself is not changed."""
    return types.FunctionType(stock.__code__, names, stock.__name__, stock.__defaults__)


def _terse_config(config: Any) -> Any:
    """Return a config that answers like this one.

    The evaluators search the whole `dir` for annotated methods, fourteen times for every shard: here it has the
    callables only that are not TorchRec's. And they look up coefficients and bandwidths, which only depend on kernels.
    """
    kind = type(config)

    def own(name: str) -> bool:
        return getattr(kind, name, None) is not getattr(HardwarePerfConfig, name, None) or name in vars(config)

    names = [name for name in dir(config) if not name.startswith("_") and own(name) and callable(getattr(config, name))]
    members: dict[str, Any] = {
        "__dir__": lambda _: names,
        "__module__": kind.__module__,
        "__reduce__": lambda _: (_terse_config, (config,)),
    }
    if not names:
        for name in ("get_coefficients_for_sharding", "get_device_bw"):
            members[name] = functools.lru_cache(maxsize=None)(getattr(config, name))
            members[name] = staticmethod(members[name])
    twin = copy.copy(config)
    twin.__class__ = type(kind.__name__, (kind,), members)
    return twin
