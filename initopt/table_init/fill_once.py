"""TorchRec's tables filled once: the fill that is overwritten is left out, the other one is made by several threads.

TorchRec fills a table where its kernel is made (`init_parameters`), and again where the sharded module ends its
construction (`reset_parameters`, with the table's `init_fn`). In a block of `fill_once` the first fill is put off, and
the generator moved on by what it would have drawn. If a fill of the whole table follows, by a function of
`torch.nn.init`, it is left out; if anything else is done with the table first, it is made then, from where the
generator stood.
"""

from __future__ import annotations

import functools
import inspect
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
from torch import nn

from initopt.cores import share_of_rank
from initopt.record import Recorder, Span
from initopt.replaced import on_this_thread
from initopt.table_init import philox
from initopt.table_init.fills import Claimed, Fill, Worked, claimed, make, overlap, span
from initopt.table_init.mersenne import claim
from initopt.table_init.pages import untouched
from initopt.table_init.restored import complete, mark
from initopt.table_init.watch import Watch

TESTED = "1.9."
"""The versions of TorchRec whose constructors are known to do nothing with a table between its two fills."""

_WORTH_A_JUMP = 1 << 24
"""Draws that take some 50 ms; to move the generator on takes 20."""

_WORTH_A_THREAD = 1 << 23

_LARGE = 64 << 20
"""Bytes of tables from which on they get memory that nobody has written to."""


class Filled:
    """How the tables of a block of `fill_once` came to their values. Sizes are bytes."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.left_out = 0
        """Of fills that were not made, as another one overwrote them."""
        self.made = 0
        """Of fills that were made here; what torch made by itself is not counted."""
        self.marked = 0
        """Of fills that a restore makes needless."""
        self.worked: list[Worked] = []
        self._put_off: list[_PutOff] = []
        self._fills_again = False
        """Whether a module is being made that ends with filling its tables as TorchRec does."""
        self._unfilled: list[Claimed] = []

    def complete(self) -> int:
        """Fill what a restore has not overwritten, as TorchRec would have; returns the bytes of it.

        Call it once the restore is done, where tables were left to it (`restored=True`). After that, and without, it
        does nothing.
        """
        unfilled, self._unfilled = self._unfilled, []
        missing = complete(unfilled, self.threads)
        return sum(count * left.fill.values.element_size() for left, count in missing.items())

    def add_to(self, recorder: Recorder) -> None:
        """Put into a record when which thread filled tables, as parts of the step `dmp`."""
        zero = recorder.now() - time.perf_counter()
        for worked in self.worked:
            span = Span(
                "table_fill",
                zero + worked.start,
                zero + worked.end,
                rank=recorder.rank,
                lane=f"fill:{worked.thread}",
                stage="train_module_creation",
                cpu=worked.cpu,
                step="dmp",
            )
            recorder.add(span)

    def _make(self, fills: Sequence[Fill]) -> None:
        draws = sum(fill.draws for fill in fills)
        if draws < _WORTH_A_JUMP:
            for fill in fills:
                fill.make()
        else:
            _, worked = make(fills, claim(draws), min(self.threads, draws // _WORTH_A_THREAD))
            self.worked += worked
        self.made += sum(_size(fill.values) for fill in fills)

    def _finish(self) -> None:
        for one in list(self._put_off):
            self._catch_up(one)

    def _catch_up(self, one: _PutOff) -> None:
        self._put_off.remove(one)
        self.made += _size(one.values)
        one.make()


@dataclass(frozen=True, eq=False)
class _PutOff:
    """The fill of `values`, which `make` makes from where the generator stood."""

    values: torch.Tensor
    make: Callable[[], Any]


class _OfModule:
    """What is done with the fills that end the construction of a module: they are made."""

    def __init__(self, filled: Filled) -> None:
        self._filled = filled

    def settle(self, fills: Sequence[Fill], *, wanted: bool) -> None:
        self._filled._make(fills)

    def skip(self, tensor: torch.Tensor, low: float, high: float) -> bool:
        return False

    def overwritten(self, tensor: torch.Tensor) -> None:
        first, last = span(tensor)
        for one in self._put_off_of(tensor):
            begin, end = span(one.values)
            if first <= begin and end <= last:
                self._filled._put_off.remove(one)
                self._filled.left_out += _size(one.values)
            else:
                self._filled._catch_up(one)

    def touched(self, tensor: torch.Tensor) -> None:
        for one in self._put_off_of(tensor):
            self._filled._catch_up(one)

    def _put_off_of(self, tensor: torch.Tensor) -> list[_PutOff]:
        return [one for one in self._filled._put_off if overlap(one.values, tensor)]


class _OfModuleBeforeRestore(_OfModule):
    """The same where a restore follows: the tables are marked, unless something else wants their values."""

    def settle(self, fills: Sequence[Fill], *, wanted: bool) -> None:
        if wanted:
            self._filled._make(fills)
            return
        mark(fills, self._filled.threads)
        self._filled._unfilled += claimed(fills)
        self._filled.marked += sum(_size(fill.values) for fill in fills)


class _OfKernel(_OfModule):
    """What is done with the fills of a kernel: they are put off, if there are enough of them."""

    def settle(self, fills: Sequence[Fill], *, wanted: bool) -> None:
        if wanted or sum(fill.draws for fill in fills) < _WORTH_A_JUMP:
            self._filled._make(fills)
            return
        self._filled._put_off += [_PutOff(one.fill.values, one.make) for one in claimed(fills)]

    def skip(self, tensor: torch.Tensor, low: float, high: float) -> bool:
        state = philox.skip(tensor)
        self._filled._put_off.append(_PutOff(tensor, functools.partial(philox.fill_from, tensor, state, low, high)))
        return True


@contextmanager
def fill_once(threads: int | None = None, *, restored: bool = False, huge_pages: bool = False) -> Iterator[Filled]:
    """Fill the tables of each DistributedModelParallel, or sharded module, that this thread makes in the block once.

    The bytes of the tables and the states of torch's generators are those without it. `threads` is how many fill at a
    time; by default the cores of this process, shared between the ranks of its host (LOCAL_WORLD_SIZE). Tables of an
    accelerator are filled by it; only the fill that is overwritten is left out. Data-parallel tables, and kernels that
    don't fill twice, are as ever, and so are all with a TorchRec that this was not tested with, with a warning.

    `restored` says that a restore follows: tables hold NaN until `Filled.complete` is called after it. `huge_pages`
    asks the kernel for them for tables of the CPU.
    """
    filled = Filled(threads or share_of_rank())
    if not version("torchrec").startswith(TESTED):
        warnings.warn(
            f"initopt: tables are filled as ever: torchrec {version('torchrec')} is not one of {TESTED}*, with which "
            "filling them once was tested",
            stacklevel=3,
        )
        yield filled
        return
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
    from torchrec.distributed.batched_embedding_kernel import BaseBatchedEmbedding, BaseBatchedEmbeddingBag
    from torchrec.distributed.embedding import ShardedEmbeddingCollection
    from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection

    of_module = _OfModuleBeforeRestore(filled) if restored else _OfModule(filled)
    modules = (
        (ShardedEmbeddingBagCollection, "_embedding_bag_configs"),
        (ShardedEmbeddingCollection, "_embedding_configs"),
    )
    replacements: list[tuple[Any, str, Callable[..., Any]]] = [
        (kind, "init_parameters", functools.partial(_init_parameters, filled, kind))
        for kind in (BaseBatchedEmbedding, BaseBatchedEmbeddingBag)
    ]
    tables = SplitTableBatchedEmbeddingBagsCodegen
    # Releases of fbgemm-gpu before 1.8 allocate by themselves.
    if "preallocated_host_buffer" in inspect.signature(getattr(tables, "_apply_split", lambda: None)).parameters:
        replacements.append((tables, "_apply_split", functools.partial(_allocate, huge_pages, tables)))
    with ExitStack() as stack:
        for kind, name, function in replacements:
            stack.enter_context(on_this_thread(kind, name, function))
        for kind, configs in modules:
            reset = functools.partial(_reset_parameters, of_module, kind, configs)
            stack.enter_context(on_this_thread(kind, "reset_parameters", reset))
            construct = functools.partial(_construct, filled, kind, kind.reset_parameters)
            stack.enter_context(on_this_thread(kind, "__init__", construct))
        yield filled


def _construct(filled: Filled, kind: Any, reset_parameters: Any, module: Any, /, *args: Any, **kwargs: Any) -> None:
    """Make a module. What was put off and is not overwritten when it is done is filled then."""
    outer = filled._fills_again
    # A subclass may end in a way of its own.
    filled._fills_again = type(module).reset_parameters is reset_parameters
    try:
        kind.__init__(module, *args, **kwargs)
        filled._finish()
    finally:
        filled._fills_again = outer
        filled._put_off.clear()


# The functions of the class, as a subclass's own ones may have called these.


def _init_parameters(filled: Filled, kind: Any, kernel: Any) -> None:
    from torchrec.distributed.batched_embedding_kernel import BatchedFusedEmbedding, BatchedFusedEmbeddingBag

    # Between the fills of data-parallel tables their values are sent to other ranks.
    if filled._fills_again and type(kernel) in (BatchedFusedEmbedding, BatchedFusedEmbeddingBag):
        with Watch(_OfKernel(filled)):
            kind.init_parameters(kernel)
    else:
        kind.init_parameters(kernel)


def _reset_parameters(fills: _OfModule, kind: Any, configs: str, module: Any) -> None:
    known = True
    for config in getattr(module, configs):
        if not _is_of_torch(config.init_fn):
            known = False
            # What it does with the table can't be known: C++ and threads are not seen.
            tables = module.embedding_bags if configs == "_embedding_bag_configs" else module.embeddings
            fills.touched(tables[config.name].weight)
    with Watch(fills, at_once=not known):
        kind.reset_parameters(module)


def _allocate(
    huge_pages: bool, kind: Any, tables: Any, split: Any, prefix: str, dtype: Any, *args: Any, **kwargs: Any
) -> None:
    if prefix == "weights" and not args and kwargs.get("preallocated_host_buffer") is None:
        of_host = tables.current_device.type == "cpu" and dtype.is_floating_point
        if of_host and split.host_size * dtype.itemsize >= _LARGE:
            # Where there is not so much memory torch says so in its own words.
            with suppress(OSError):
                kwargs["preallocated_host_buffer"] = untouched(split.host_size, dtype, huge_pages=huge_pages)
    kind._apply_split(tables, split, prefix, dtype, *args, **kwargs)


def _is_of_torch(init_fn: Any) -> bool:
    """Whether it is a function of `torch.nn.init`, which does nothing but to fill the tensor."""
    if isinstance(init_fn, functools.partial):
        init_fn = init_fn.func
    return any(init_fn is known for name, known in vars(nn.init).items() if name.endswith("_"))


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
