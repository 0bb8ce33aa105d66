# mypy: disable-error-code="override"
"""A cluster's waiting, emulated on one machine: slow collectives, slow rendezvous, a reader that has to warm up.

Waiting only: a delay is a sleep that holds neither the GIL nor a core, and nothing else about the run changes (the
backend is still gloo, results are the same bit for bit). The thread that issues a collective pays for it, before it
starts, so an asynchronous collective does not hide its delay: no claim is made about overlap inside a training step.

Not delayed: functional all-gather and reduce-scatter (they bypass a group written in Python), point to point receives,
and reads of the key-value store.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from benchmarks.trainers import emulation_values as values

PROFILES = ("local", "cluster")


def install(profile: str) -> tuple[str, ...]:
    """Emulate `profile` in this process, before its first process group, and say what is emulated (a run's labels).

    `local` emulates nothing. The reader's part is not global: pass `reader(profile)` to the data loader.
    """
    _check(profile)
    if profile == "local":
        return ()
    distributed_c10d.ProcessGroup = DelayedGroup  # type: ignore[misc]
    return (
        f"emulated: collective {values.COLLECTIVE_ALPHA_SECONDS * 1e3:g} ms"
        f" + {values.COLLECTIVE_BETA_SECONDS_PER_BYTE * 1e9:g} ns/byte",
        f"emulated: rendezvous {values.RENDEZVOUS_SECONDS:g} s per process group",
        f"emulated: first batch {values.FIRST_BATCH_SECONDS:g} s in each loader worker",
    )


def reader(profile: str) -> Callable[[int], None] | None:
    """What a data loader runs in each worker before its first sample (`worker_init_fn`), None for nothing."""
    _check(profile)
    return None if profile == "local" else functools.partial(_first_batch, values.FIRST_BATCH_SECONDS)


def collective_seconds(payload: int) -> float:
    """What one collective is delayed by for that many bytes sent by this rank."""
    return values.COLLECTIVE_ALPHA_SECONDS + payload * values.COLLECTIVE_BETA_SECONDS_PER_BYTE


def _check(profile: str) -> None:
    if profile not in PROFILES:
        raise ValueError(f"profile {profile!r} is none of {', '.join(PROFILES)}")


def _first_batch(seconds: float, worker: int) -> None:
    time.sleep(seconds)


def _bytes(tensors: torch.Tensor | Iterable[Any]) -> int:
    if isinstance(tensors, torch.Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(_bytes(tensor) for tensor in tensors)


def _delay(payload: torch.Tensor | Iterable[Any]) -> None:
    time.sleep(collective_seconds(_bytes(payload)))


def _delayed(name: str, payload: int | None) -> Callable[..., Any]:
    """The method `name` of a process group, which waits first; `payload` is the place of what this rank sends."""

    def call(self: DelayedGroup, *args: Any, **kwargs: Any) -> Any:
        _delay(args[payload] if payload is not None and payload < len(args) else ())
        return getattr(self._inner, name)(*args, **kwargs)

    return call


class DelayedGroup(dist.ProcessGroup):
    """A process group like any other, whose creation and collectives wait first.

    It stands in for `ProcessGroup` where torch.distributed makes one, so that the backend inside is gloo's own and
    `get_backend` says so. Calls from C++ (the constructor and reducer of DistributedDataParallel) arrive here, too.

    The work is done by a group of C++ alone, which has the same backends. A call of `super()` would hold the
    interpreter's lock until gloo has queued it, and gloo's own thread, which holds the queue, may want that lock to
    free a tensor: two threads that wait for each other for ever, as one stock start of a benchmark did.
    """

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        super().__init__(rank, size)  # the constructor with a store can't be subclassed
        self._store = store
        self._inner = dist.ProcessGroup(store, rank, size)
        time.sleep(values.RENDEZVOUS_SECONDS)

    def get_group_store(self) -> dist.Store:
        return self._store

    def _register_backend(self, *args: Any, **kwargs: Any) -> None:
        super()._register_backend(*args, **kwargs)
        self._inner._register_backend(*args, **kwargs)

    def _set_default_backend(self, *args: Any) -> None:
        super()._set_default_backend(*args)
        self._inner._set_default_backend(*args)

    def _set_group_name(self, name: str) -> None:
        super()._set_group_name(name)
        self._inner._set_group_name(name)

    allreduce = _delayed("allreduce", 0)
    allreduce_coalesced = _delayed("allreduce_coalesced", 0)
    broadcast = _delayed("broadcast", 0)
    allgather = _delayed("allgather", 1)
    allgather_coalesced = _delayed("allgather_coalesced", 1)
    all_gather_single = _delayed("all_gather_single", 1)
    all_gather_single_coalesced = _delayed("all_gather_single_coalesced", 1)
    reduce = _delayed("reduce", 0)
    reduce_scatter = _delayed("reduce_scatter", 1)
    reduce_scatter_single = _delayed("reduce_scatter_single", 1)
    reduce_scatter_single_coalesced = _delayed("reduce_scatter_single_coalesced", 1)
    all_to_all_single = _delayed("all_to_all_single", 1)
    alltoall = _delayed("alltoall", 1)
    gather = _delayed("gather", 1)
    scatter = _delayed("scatter", 0)
    barrier = _delayed("barrier", None)
    send = _delayed("send", 0)
