"""Random fills of tables, made by several threads at once: the bytes and the end of the stream of numbers are the same.

Each thread has a generator of its own, moved on to where the numbers of its part begin.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch

from initopt.cores import near_this_thread
from initopt.table_init.mersenne import UnknownGenerator, ahead, claim

ALIGNED = 16
"""`normal_` makes so many values at a time, of as many draws; with fewer it goes another way."""

Item = TypeVar("Item")
Result = TypeVar("Result")

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, eq=False)
class Fill:
    """A call of `uniform_` or `normal_` on a contiguous tensor of the CPU, from torch's default generator.

    `values` is that tensor, flat, of at least 16; `arguments` are the range of `uniform_`, or mean and standard
    deviation of `normal_`.
    """

    values: torch.Tensor
    method: str
    arguments: tuple[float, float]

    @property
    def draws(self) -> int:
        """The draws of 32 bits that it takes."""
        return self.draws_before(len(self.values)) + self._draws_of_rest()

    def draws_before(self, index: int) -> int:
        """The draws before the value at `index`, a multiple of 16."""
        return index * (2 if self.values.dtype == torch.float64 else 1)

    def make(self) -> None:
        """Make it as torch does."""
        with torch.no_grad():
            getattr(self.values, self.method)(*self.arguments)

    def _draws_of_rest(self) -> int:
        """The further draws of `normal_` for the last values, if they don't fill 16."""
        rest = len(self.values) % ALIGNED
        if self.method == "uniform_" or not rest:
            return 0
        if self.values.dtype in (torch.float16, torch.bfloat16):
            return ALIGNED - rest
        return self.draws_before(ALIGNED)


@dataclass(frozen=True)
class Worked:
    """When a thread was filling, in seconds of `time.perf_counter`, and its CPU seconds of it.

    `thread` is its number among those that filled at the same time.
    """

    thread: int
    start: float
    end: float
    cpu: float


def make(fills: Sequence[Fill], state: torch.Tensor, threads: int = 1) -> tuple[torch.Tensor, list[Worked]]:
    """Make fills that follow each other from a state of the default generator.

    Returns the state after them, and when each thread worked.
    """
    cut = list(parts(fills, threads))
    starts, draws = [], 0
    for part in cut:
        starts.append(ahead(state, draws))
        draws += sum(piece.draws for piece in part)
    results = in_threads(_work, list(zip(range(len(cut)), cut, starts, strict=True)), threads)
    return (results[-1][0] if results else state.clone()), [worked for _, worked in results]


@dataclass(frozen=True, eq=False)
class Claimed:
    """A fill whose numbers are taken, and not made yet: they begin `before` draws after a state of the generator."""

    fill: Fill
    state: torch.Tensor
    before: int

    def make(self) -> None:
        """Make it; the generator stays where it is."""
        make([self.fill], ahead(self.state, self.before))


def claimed(fills: Sequence[Fill]) -> list[Claimed]:
    """Take the numbers of fills that follow each other from torch's default generator."""
    state, before = claim(sum(fill.draws for fill in fills)), 0
    found = []
    for fill in fills:
        found.append(Claimed(fill, state, before))
        before += fill.draws
    return found


def in_threads(function: Callable[[Item], Result], items: Sequence[Item], threads: int) -> list[Result]:
    """Call a function that writes to tables with each of the items, in so many threads; returns what it returned."""

    def call(item: Item) -> Result:
        # Grad mode is a thread's own.
        with torch.no_grad():
            return function(item)

    if threads <= 1 or len(items) <= 1:
        return [call(item) for item in items]
    # Pages belong to the memory node of the thread that first writes to them, which would have been this one.
    near = near_this_thread()
    bind = functools.partial(os.sched_setaffinity, 0, near) if near else None
    with ThreadPoolExecutor(threads, "initopt-fill", initializer=bind) as pool:
        return list(pool.map(call, items))


@dataclass(frozen=True, eq=False)
class Piece:
    """The values of a fill from `start` to `stop`."""

    fill: Fill
    start: int
    stop: int

    @property
    def values(self) -> torch.Tensor:
        """They themselves."""
        return self.fill.values[self.start : self.stop]

    @property
    def draws(self) -> int:
        """The draws of 32 bits that they take."""
        fill = self.fill
        end = fill.draws if self.stop == len(fill.values) else fill.draws_before(self.stop)
        return end - fill.draws_before(self.start)


def parts(fills: Sequence[Fill], count: int) -> Iterator[list[Piece]]:
    """Cut fills that follow each other into at most `count` parts of about as many draws."""
    share = -(-sum(fill.draws for fill in fills) // count)
    part: list[Piece] = []
    room = share
    for fill in fills:
        start, size = 0, len(fill.values)
        while start < size:
            stop = start + -(-room // fill.draws_before(ALIGNED)) * ALIGNED
            # What is left over is made again together with values before it.
            if stop > size - 2 * ALIGNED:
                stop = size
            part.append(Piece(fill, start, stop))
            room -= part[-1].draws
            start = stop
            if room <= 0:
                yield part
                part, room = [], share
    if part:
        yield part


def _work(what: tuple[int, list[Piece], torch.Tensor]) -> tuple[torch.Tensor, Worked]:
    start, cpu = time.perf_counter(), time.thread_time()
    number, part, state = what
    generator = torch.Generator()
    generator.set_state(state)
    for piece in part:
        getattr(piece.values, piece.fill.method)(*piece.fill.arguments, generator=generator)
    return generator.get_state(), Worked(number, start, time.perf_counter(), time.thread_time() - cpu)


@functools.cache
def splits(method: str, dtype: torch.dtype) -> bool:
    """Whether this torch's `method` can be put off and made in parts: found out on a small tensor, once."""
    if dtype not in _FLOATS:
        return False
    for size in (4_096, 5_003):
        whole, parts = torch.empty(size, dtype=dtype), torch.empty(size, dtype=dtype)
        generator = torch.Generator()
        state = generator.manual_seed(size).get_state()
        getattr(whole, method)(0.0, 1.0, generator=generator)
        fill = Fill(parts, method, (0.0, 1.0))
        try:
            ends = make([fill], state, 3)[0], ahead(state, fill.draws)
        except UnknownGenerator:
            return False
        same = torch.equal(whole.view(torch.uint8), parts.view(torch.uint8))
        if not same or not all(torch.equal(end, generator.get_state()) for end in ends):
            return False
    return True


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of the first byte of a tensor and of the one after its last."""
    start: int = tensor.data_ptr()
    if not tensor.numel():
        return start, start
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors may share memory."""
    (first, last), (begin, end) = span(one), span(other)
    return begin < last and first < end
