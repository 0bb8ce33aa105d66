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


class DelayedGroup(dist.ProcessGroup):
    """A process group like any other, whose creation and collectives wait first.

    It stands in for `ProcessGroup` where torch.distributed makes one, so that the backend inside is gloo's own and
    `get_backend` says so. Calls from C++ (the constructor and reducer of DistributedDataParallel) arrive here as well.
    """

    # Each method is spelled out: pybind11 tells a call of super() from an endless recursion by the name of the calling
    # function, which methods made in a loop would not have.

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        # The constructor that takes the store can't be subclassed; the stub knows only that one.
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._store = store
        time.sleep(values.RENDEZVOUS_SECONDS)

    def get_group_store(self) -> dist.Store:
        return self._store

    def allreduce(self, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        _delay(tensors)
        return super().allreduce(tensors, *args, **kwargs)

    def allreduce_coalesced(self, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        _delay(tensors)
        return super().allreduce_coalesced(tensors, *args, **kwargs)

    def broadcast(self, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        _delay(tensors)
        return super().broadcast(tensors, *args, **kwargs)

    def allgather(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        _delay(inputs)
        return super().allgather(outputs, inputs, *args, **kwargs)

    def allgather_coalesced(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        _delay(inputs)
        return super().allgather_coalesced(outputs, inputs, *args, **kwargs)

    def all_gather_single(self, output: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
        _delay(input)
        return super().all_gather_single(output, input, *args, **kwargs)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        _delay(inputs)
        return super().all_gather_single_coalesced(outputs, inputs, *args, **kwargs)

    def reduce(self, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        _delay(tensors)
        return super().reduce(tensors, *args, **kwargs)

    def reduce_scatter(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        _delay(inputs)
        return super().reduce_scatter(outputs, inputs, *args, **kwargs)

    def reduce_scatter_single(self, output: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
        _delay(input)
        return super().reduce_scatter_single(output, input, *args, **kwargs)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        _delay(inputs)
        return super().reduce_scatter_single_coalesced(outputs, inputs, *args, **kwargs)

    def all_to_all_single(self, output: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
        _delay(input)
        return super().all_to_all_single(output, input, *args, **kwargs)

    def alltoall(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        _delay(inputs)
        return super().alltoall(outputs, inputs, *args, **kwargs)

    def gather(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        _delay(inputs)
        return super().gather(outputs, inputs, *args, **kwargs)

    def scatter(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        _delay(outputs)
        return super().scatter(outputs, inputs, *args, **kwargs)

    def barrier(self, *args: Any, **kwargs: Any) -> Any:
        _delay(())
        return super().barrier(*args, **kwargs)

    def send(self, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        _delay(tensors)
        return super().send(tensors, *args, **kwargs)
