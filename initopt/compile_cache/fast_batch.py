"""Examples of how the parts of a model are called, without a batch: from a description of one.

A copy of the model whose tensors have no data runs once on a batch that has none either, and what its parts are passed
is noted. So it takes no memory, no kernel and no draw, and the model itself is only read.
"""

from __future__ import annotations

import copy
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from initopt.compile_cache.calls import Call, Recorded, Seen, noted, outermost
from initopt.compile_cache.schema import Entries, KeyedJagged, Schema, Tensor, of
from initopt.failure import first_line

if TYPE_CHECKING:
    import torch
    from torch import nn

Parts = Callable[["nn.Module"], Mapping[str, "nn.Module"]]


class HasBatchSchema(Protocol):
    """A loader, or its collate function or data set, that can tell what a batch will be."""

    def batch_schema(self, batch_size: int | None) -> Any:
        """Return a batch, whose values don't matter, or a `Schema`; `batch_size` is that of a DataLoader."""


@dataclass(frozen=True)
class Examples:
    """The calls of each part that has any, and where they are from: `user`, `recorded` or `fast batch`."""

    calls: Mapping[str, tuple[Call, ...]] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Twin:
    """A copy of a model whose tensors have no data, and the mode that runs it. Without a copy `problem` says why."""

    model: nn.Module | None
    mode: Any = None
    problem: str = ""

    @classmethod
    def of(cls, model: nn.Module, device: torch.device) -> Twin:
        """Return the copy, its parameters and buffers on `device`. Never raises.

        That takes milliseconds; nothing else may change the model meanwhile, as sharding does.
        """
        try:
            return cls(*_copied(model, device))
        except Exception as error:
            return cls(None, problem=first_line(error))


def batch_schema(batch: Any) -> Schema:
    """Return the description of a batch, or the description itself. Raises SchemaError."""
    return batch if isinstance(batch, Schema) else of(batch)


def loader_schema(loader: Any) -> Schema | None:
    """Return what a loader, its collate function or its data set says a batch will be (see `HasBatchSchema`), or None.

    Of TorchRec's RandomRecDataset it is known. A DataLoader may be iterated already. Where a description fails there
    is one warning.
    """
    collate, data = (getattr(loader, name, getattr(loader, f"_{name}", None)) for name in ("collate_fn", "dataset"))
    try:
        for one in (loader, collate, data):
            if one is not None and hasattr(one, "batch_schema"):
                return batch_schema(one.batch_schema(_batch_size(loader)))
        random_data = getattr(sys.modules.get("torchrec.datasets.random"), "RandomRecDataset", None)
        for one in (loader, data):
            if random_data is not None and isinstance(one, random_data):
                return _random_batch(one)
    except Exception as error:
        warnings.warn(
            f"initopt: what the loader says a batch will be is no use ({first_line(error)}): nothing is compiled "
            "ahead for it. Compare `batch_schema` with a batch",
            stacklevel=2,
        )
    return None


def examples_for(
    parts: Parts,
    model: nn.Module,
    device: torch.device,
    *,
    user: Mapping[str, Call] | None = None,
    recorded: Recorded | None = None,
    batch: Schema | None = None,
    twin: Twin | None = None,
) -> Examples:
    """Return examples for the parts of a model, each from the first source that has some.

    These are: the user's; the recorded ones of an earlier start, if its batch was like `batch` or no batch is known;
    what a copy of the model passes its parts for such a batch. The copy is `twin`, else made here; it runs in the
    calling thread, only if some part needs it, and while no other thread draws random numbers: what its forward pass
    draws is taken back.

    `batch` is described as the loader gives it; the model takes it on the device. Where the copy fails there is one
    warning, and the parts that it did not get to have no example.
    """
    calls: dict[str, tuple[Call, ...]] = {name: (call,) for name, call in (user or {}).items()}
    sources = dict.fromkeys(calls, "user")

    def take(seen: Mapping[str, tuple[Seen, ...]], source: str) -> None:
        for name, part in outermost(parts(model)).items():
            # A part is warmed up as it stands: in training mode or not.
            fitting = [call for call in seen.get(name, ()) if call.modes.training == part.training]
            if fitting and name not in calls:
                calls[name] = tuple(call.make(device) for call in fitting)
                sources[name] = source

    if recorded is not None and (batch is None or _alike(batch, recorded.batch, device)):
        take(recorded.calls, "recorded")
    if batch is not None and not outermost(parts(model)).keys() <= calls.keys():
        take(_rehearsed(parts, twin or Twin.of(model, device), batch, device), "fast batch")
    return Examples(calls, sources)


def _alike(batch: Schema, other: Schema | None, device: torch.device) -> bool:
    return other is not None and all(
        one.without_counts() == two.without_counts() for one, two in [(batch.on(device.type), other.on(device.type))]
    )


def _rehearsed(parts: Parts, twin: Twin, batch: Schema, device: torch.device) -> dict[str, tuple[Seen, ...]]:
    """What the parts of the copy are passed when it runs on such a batch."""
    import torch

    seen: dict[str, tuple[Seen, ...]] = {}
    problem = twin.problem
    if twin.model is not None:
        try:
            observed = outermost(parts(twin.model)).items()
            hooks = [part.register_forward_pre_hook(_note(seen, name), with_kwargs=True) for name, part in observed]
            with _generators_kept(), torch.enable_grad(), twin.mode:
                twin.model(batch.on(device.type).with_counts().make(device))
            for hook in hooks:
                hook.remove()
        except Exception as error:
            problem = first_line(error)
    if problem:
        warnings.warn(
            f"initopt: the model did not run without data ({problem}), so parts of it that this needs are not compiled "
            "ahead, but at the first batch. Give `Compile` examples for them",
            stacklevel=2,
        )
    return seen


def _note(seen: dict[str, tuple[Seen, ...]], name: str) -> Callable[..., None]:
    return lambda part, args, kwargs: noted(seen, name, part, args, kwargs)


def _copied(model: nn.Module, device: torch.device) -> tuple[nn.Module, Any]:
    import torch

    # Tensors that have a device and no data; meta tensors would lose the device, on which autocast and what a forward
    # pass makes by itself depend. There are no public names for them, nor for the hooks of all modules.
    from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode

    hooks = torch.nn.modules.module
    if hooks._global_forward_hooks or hooks._global_forward_pre_hooks:
        raise RuntimeError("hooks of all modules are registered, which would see the copy")
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    twins: dict[int, Any] = {}
    with mode:
        for tensor in (*model.parameters(), *model.buffers()):
            bare = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
            parameter = isinstance(tensor, torch.nn.Parameter)
            twins[id(tensor)] = torch.nn.Parameter(bare, tensor.requires_grad) if parameter else bare
    with FakeCopyMode(mode):  # for tensors that are neither
        copied = copy.deepcopy(model, twins)
    # Hooks belong to the model: what they count or print is not for a rehearsal.
    for module in copied.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    return copied, mode


@contextmanager
def _generators_kept() -> Iterator[None]:
    """Put back the default generators that the block moves."""
    import torch

    numpy = sys.modules.get("numpy")
    python, tensors = random.getstate(), torch.get_rng_state()
    arrays = numpy.random.get_state() if numpy is not None else None
    try:
        yield
    finally:
        if random.getstate() != python:
            random.setstate(python)
        if not torch.equal(torch.get_rng_state(), tensors):
            torch.set_rng_state(tensors)
        if numpy is not None:
            numpy.random.set_state(arrays)


def _batch_size(loader: Any) -> int | None:
    sampler = getattr(loader, "_index_sampler", None)
    size = getattr(loader, "batch_size", getattr(sampler, "batch_size", None))
    return size if isinstance(size, int) else None


def _random_batch(data: Any) -> Schema:
    made = data.batch_generator
    rows = made.batch_size
    batch = {
        "dense_features": Tensor.dense(rows, made.num_dense),
        "labels": Tensor.dense(rows, dtype="int64"),
        "sparse_features": KeyedJagged.of_keys(made.keys, rows, [most * rows for most in made.ids_per_features]),
    }
    return Entries(tuple(batch), tuple(batch.values()), "torchrec.datasets.utils:Batch")
