"""The search space of TorchRec's `EmbeddingEnumerator`, with one estimate per distinct shard size.

TorchRec's own code enumerates and TorchRec's own estimators compute; they are shown options with one shard per size
instead of one per rank. What they can't be shown so (an estimator or a config that sees all shards at once) is left to
them as it is.
"""

from __future__ import annotations

import functools
import types
from typing import Any

from torchrec.distributed.planner import enumerators
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator

from initopt.sharding_plan.estimators import Estimate, Unknown, names_in, terse
from initopt.sharding_plan.options import Layout, LazyOption, compact

_REPLACED = {"ShardingOption", "Shard", "calculate_shard_sizes_and_offsets"}


class FastEnumerator(EmbeddingEnumerator):  # type: ignore[misc]
    """An `EmbeddingEnumerator` made from another one, with the same arguments and estimators.

    `left_alone` says why its estimators see every shard, if they do.
    """

    def __init__(self, stock: EmbeddingEnumerator) -> None:
        self.__dict__.update(stock.__dict__)
        self._stash_weights: dict[tuple[int, str], bool] = {}
        self._kernels: dict[Any, list[str]] = {}
        self.left_alone: list[str] = []
        self._terse: list[Estimate] = []
        for estimator in self._estimators:
            try:
                self._terse.append(terse(estimator))
            except Unknown as reason:
                self.left_alone.append(str(reason))

    def enumerate(self, module: Any, sharders: list[Any]) -> list[Any]:
        """Return the options that TorchRec enumerates, in its order."""
        try:
            return list(_lazily(self, module, sharders))
        except Exception:
            # An input that TorchRec refuses, in its own words; or something of ours, which it does without.
            return list(super().enumerate(module, sharders))
        finally:
            self._stash_weights.clear()
            self._kernels.clear()

    def populate_estimates(self, sharding_options: list[Any]) -> None:
        """Write the perf and the storage of every shard, as TorchRec's estimators compute them."""
        if not self.left_alone:
            restore = compact(sharding_options)
            try:
                for estimator in self._terse:
                    estimator(sharding_options, self._sharder_data_map)
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

    def _filter_compute_kernels(self, name: str, allowed_compute_kernels: list[str], sharding_type: str) -> list[str]:
        constraints = self._constraints.get(name) if self._constraints else None
        key = tuple(allowed_compute_kernels), tuple((constraints and constraints.compute_kernels) or ())
        if not self._kernels.get(key):
            # None at all is worth a warning for every table.
            self._kernels[key] = super()._filter_compute_kernels(name, allowed_compute_kernels, sharding_type)
        return self._kernels[key]


def enumerates_as_expected() -> bool:
    """Whether TorchRec's `enumerate` is a function that makes its options in the way that this file relies on."""
    function = EmbeddingEnumerator.enumerate
    return (
        isinstance(function, types.FunctionType)
        and not function.__code__.co_freevars
        and _REPLACED.issubset(names_in(function.__code__))
    )


def _lazily(enumerator: FastEnumerator, module: Any, sharders: list[Any]) -> Any:
    """Run TorchRec's own `enumerate` so that it makes lazy options."""
    layouts: dict[tuple[Any, ...], Layout] = {}
    cut = enumerators.calculate_shard_sizes_and_offsets

    def layout(tensor: Any, **how: Any) -> tuple[list[Layout], list[None]]:
        # The rest of the arguments are those of the enumerator.
        key = tensor.shape, how["sharding_type"], how["col_wise_shard_dim"], how["num_buckets"]
        if key not in layouts:
            layouts[key] = Layout(*cut(tensor=tensor, **how))
        return [layouts[key]], [None]

    stock: Any = EmbeddingEnumerator.enumerate
    names = {
        **vars(enumerators),
        "ShardingOption": LazyOption,
        "Shard": lambda size, offset: size,
        "calculate_shard_sizes_and_offsets": layout,
        "get_partition_by_type": functools.cache(enumerators.get_partition_by_type),
    }
    # TorchRec's own code with a few other names in its sight; TorchRec itself is not changed.
    return types.FunctionType(stock.__code__, names, stock.__name__, stock.__defaults__)(enumerator, module, sharders)
