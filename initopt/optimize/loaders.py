"""Data loaders whose workers could start earlier: advice only, since from outside nobody can prove that they may.

A worker runs the script's own data set, as it is when the worker is forked, with whatever globals it reads; and an
iterator draws its seed, and perhaps its first indices, when it is made. Both belong to the place where the script makes
it. So what an early start would hide is measured, and the script is told where it could do so itself.
"""

from __future__ import annotations

import weakref
from typing import Any

from initopt.optimize.saying import Saying
from initopt.record import Advised

_WORTH = 0.01
"""Seconds that must be saved on this rank, as it looks now, for advice to be given."""

_TEXT = (
    "make its iterator here (batches = iter(loader)) and take the batches from that one later, so that its workers "
    "load meanwhile; only if the data set, and all else that the workers read, is complete at this line"
)
_GENERATOR = (
    ", and with DataLoader(..., generator=torch.Generator().manual_seed(seed)), which keeps later draws the same "
    "wherever the iterator is made (to add it changes them once): without one it draws from torch's default generator"
)


class Loaders:
    """The loaders of this process, from where they are made to their first batch. Times are `time.perf_counter`."""

    def __init__(self, saying: Saying) -> None:
        self._saying = saying
        self._made: weakref.WeakKeyDictionary[Any, tuple[float, str]] = weakref.WeakKeyDictionary()
        self._begun: tuple[Any, float, str, bool] | None = None

    def made(self, loader: Any, at: float) -> None:
        """A loader was made at this line."""
        if loader.num_workers:
            self._made[loader] = at, self._saying.here()

    def begins(self, loader: Any, at: float) -> None:
        """It is asked for an iterator: that could have been where it was made."""
        self._begun = None
        if loader in self._made:
            made, place = self._made.pop(loader)
            self._begun = loader.dataset, at - made, place, loader.generator is not None

    def first_batch(self, iterator: Any, seconds: float, step: str) -> None:
        """The first batch came after so many `seconds`, in the outermost step `step`."""
        if self._begun is None:
            return
        dataset, between, place, own = self._begun
        # Private: there is no public way from an iterator to its loader. Without it nothing is said.
        if getattr(iterator, "_dataset", None) is not dataset:
            return
        self._begun = None
        less = min(seconds, between)
        if less >= _WORTH and place:
            text = f"{_TEXT}{'' if own else _GENERATOR}"
            self._saying.advise(Advised(text, place, {step: less}))
