"""torch's generator of the CPU, moved on by any number of draws without drawing them.

It is a Mersenne Twister (MT19937; Matsumoto and Nishimura 1998). Its words follow a linear recurrence over GF(2), so
the words after n steps are sums of words after at most 19,936: those that x^n modulo the recurrence's characteristic
polynomial names (Haramoto et al. 2008). Distances are put together from 624 * 2^k words.
"""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass

import numpy
import torch
from numpy.typing import NDArray

WORDS = 624
_MIDDLE = 397
_DEGREE = 19_937
_LOW_BITS = 31
_TWIST = 0x9908B0DF

_LEFT, _NEXT, _STATE = slice(8, 12), slice(16, 24), slice(24, 24 + 8 * WORDS)
_SIZE = 5_056
"""Where `Generator.get_state` has the number of words left (plus 1), the next word and the words, in bytes. Around them
are the seed and what `normal_` keeps of a pair (of fewer than 16 values), which moving on leaves alone."""

_STEPPED = 6
"""Fewer than 2^6 blocks are made one after the other: that takes as long as a sum."""


class UnknownGenerator(ValueError):
    """A state that is not laid out as torch 2.13 lays out MT19937."""


def ahead(state: torch.Tensor, draws: int) -> torch.Tensor:
    """Return the state of a CPU generator after `draws` more draws of 32 bits; both as of `Generator.get_state`.

    Takes some 20 ms, the first time in a process 100 more. Raises UnknownGenerator, and ValueError for a negative
    number of draws.
    """
    if draws < 0:
        raise ValueError(f"a generator can't be moved by {draws} draws")
    twister = _Twister.of(state)
    if not draws:
        return state.clone()
    used = twister.used + draws
    blocks, used = (used - 1) // WORDS, (used - 1) % WORDS + 1
    return twister.at(_words_after(twister.words, blocks), used)


def claim(draws: int) -> torch.Tensor:
    """Take so many draws from torch's default generator of the CPU; returns the state that they begin from.

    Other threads go on after them, as if these had been drawn. Raises UnknownGenerator.
    """
    with _claiming:
        while True:
            start = torch.default_generator.get_state()
            end = ahead(start, draws)
            # Another thread may have drawn meanwhile.
            if torch.equal(torch.default_generator.get_state(), start):
                torch.default_generator.set_state(end)
                return start


_claiming = threading.Lock()


@dataclass(frozen=True)
class _Twister:
    """A generator that is at word `used` of a block of 624; with all used, the next draw makes a new block."""

    state: torch.Tensor
    words: NDArray[numpy.uint32]
    used: int

    @classmethod
    def of(cls, state: torch.Tensor) -> _Twister:
        content = state.numpy() if state.dtype == torch.uint8 and state.device.type == "cpu" else numpy.empty(0)
        if content.shape != (_SIZE,):
            raise UnknownGenerator(f"a state of {tuple(state.shape)} {state.dtype} is not that of torch's MT19937")
        left, following = int(content[_LEFT].view(numpy.int32)[0]), int(content[_NEXT].view(numpy.uint64)[0])
        words = content[_STATE].view(numpy.uint64)
        # Just seeded it has no block of its own yet: nothing is left, and the next word is the first.
        fresh = (left, following) == (1, 0)
        if not (fresh or left + following == WORDS + 1) or int(words.max()) >= 1 << 32:
            raise UnknownGenerator(f"a state with {left} words left and word {following} next is not MT19937's")
        return cls(state, words.astype(numpy.uint32), WORDS if fresh else following)

    def at(self, words: NDArray[numpy.uint32], used: int) -> torch.Tensor:
        moved = self.state.clone()
        content = moved.numpy()
        content[_LEFT] = numpy.array([WORDS + 1 - used], numpy.int32).view(numpy.uint8)
        content[_NEXT] = numpy.array([used], numpy.uint64).view(numpy.uint8)
        content[_STATE] = words.astype(numpy.uint64).view(numpy.uint8)
        return moved


def _words_after(words: NDArray[numpy.uint32], blocks: int) -> NDArray[numpy.uint32]:
    for power in range(_STEPPED, blocks.bit_length()):
        if blocks >> power & 1:
            words = _jumped(words, _powers(power)[power])
    stepped = blocks % (1 << _STEPPED)
    return _sequence(words, (stepped + 1) * WORDS)[-WORDS:]


def _jumped(words: NDArray[numpy.uint32], exponents: NDArray[numpy.int64]) -> NDArray[numpy.uint32]:
    windows = numpy.lib.stride_tricks.sliding_window_view(_sequence(words, _DEGREE + WORDS), WORDS)
    new = numpy.zeros(WORDS, numpy.uint32)
    for some in numpy.array_split(exponents, 32):
        # Of the first word only the top bit is part of the recurrence. So the powers are of one step less, and each
        # stands for the window after it.
        new ^= numpy.bitwise_xor.reduce(windows[some + 1], axis=0)
    return new


def _sequence(words: NDArray[numpy.uint32], length: int) -> NDArray[numpy.uint32]:
    """The words of a block and those that follow, `length` in all."""
    sequence = numpy.empty(length, numpy.uint32)
    sequence[:WORDS] = words
    # A word needs the one `_MIDDLE` after the oldest: so many can be made at once.
    at_once = WORDS - _MIDDLE
    for start in range(WORDS, length, at_once):
        count = min(at_once, length - start)
        old = start - WORDS
        joined = (sequence[old : old + count] & 0x80000000) | (sequence[old + 1 : old + 1 + count] & 0x7FFFFFFF)
        sequence[start : start + count] = (
            sequence[old + _MIDDLE : old + _MIDDLE + count] ^ (joined >> 1) ^ ((joined & 1) * numpy.uint32(_TWIST))
        )
    return sequence


_known: list[NDArray[numpy.int64]] = []
_learning = threading.Lock()


def _powers(highest: int) -> list[NDArray[numpy.int64]]:
    """For each k up to `highest` the powers whose sum x^(624 * 2^k - 1) is modulo the characteristic polynomial."""
    with _learning:
        if not _known:
            _known.append(numpy.array([WORDS - 1]))
        while len(_known) <= highest:
            product = numpy.zeros(2 * _DEGREE, numpy.uint8)
            # Over GF(2) the square of a sum is the sum of the squares. Times x, for the one step less of each.
            product[2 * _known[-1] + 1] = 1
            _known.append(numpy.flatnonzero(_reduced(product)))
        return _known


def _reduced(product: NDArray[numpy.uint8]) -> NDArray[numpy.uint8]:
    lower = _characteristic()[:-1]
    # So many of the highest powers can be replaced at once by lower ones.
    at_once = _DEGREE - int(lower[-1])
    for stop in range(len(product), _DEGREE, -at_once):
        start = max(stop - at_once, _DEGREE)
        high = product[start:stop]
        for exponent in lower:
            low = start - _DEGREE + int(exponent)
            product[low : low + len(high)] ^= high
    return product[:_DEGREE]


@functools.cache
def _characteristic() -> NDArray[numpy.int64]:
    """The exponents of the characteristic polynomial, ascending.

    A bit of the twist matrix's last row, a_i, stands in it with the powers of x^624 + x^397 and x^623 + x^396 that
    Matsumoto and Nishimura give (1998, appendix A).
    """
    long, short = (1 << WORDS) ^ (1 << _MIDDLE), (1 << (WORDS - 1)) ^ (1 << (_MIDDLE - 1))
    high_bits = 32 - _LOW_BITS
    polynomial = _product([long] * high_bits + [short] * _LOW_BITS)
    for i in range(32):
        if _TWIST >> i & 1:
            if i < _LOW_BITS:
                term = _product([long] * high_bits + [short] * (_LOW_BITS - 1 - i))
            else:
                term = _product([long] * (31 - i))
            polynomial ^= term
    return numpy.array([i for i in range(polynomial.bit_length()) if polynomial >> i & 1])


def _product(factors: list[int]) -> int:
    """The product of polynomials that are sums of two powers, each as the bits of a number."""
    result = 1
    for factor in factors:
        low = (factor & -factor).bit_length() - 1
        result = (result << (factor.bit_length() - 1)) ^ (result << low)
    return result
