"""What a start-up made and did not use until its first batch was done: data loaders and process groups.

A loader counts as used once one of its iterators gave a batch, a group once a collective was issued on it, by whatever
language: torch counts both. Files that are opened and other objects are not watched. This file does not judge (see
`deferral`).
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from initopt.hooks import CallSites, drop_frame


@dataclass(frozen=True, slots=True)
class Unused:
    """A loader or a group that nobody used. `call_site` is the `file:line` that made it, in the step `step`.

    `group` is the name of a group. `alone` says that the step made nothing of the kind that was used, `begun` that a
    loader has an iterator, whose workers have started. That was made from `start` to `end` (seconds as in a `Span`; of
    `Watch` those of `time.perf_counter`), in the step `begun_in` or, where that is empty, as one of its own.
    """

    what: Literal["loader", "group"]
    call_site: str
    step: str
    group: str = ""
    alone: bool = True
    rank: int = 0
    begun: bool = False
    begun_in: str = ""
    start: float = 0.0
    end: float = 0.0


class _Iterated:
    """Whether a loader was asked for an iterator, and whether one gave a batch."""

    def __init__(self) -> None:
        self.begun = False
        self.step = ""
        self.start = self.end = 0.0
        self._used = self._making = False
        self._made: list[Callable[[], Any]] = []

    def begins(self, step: str) -> None:
        """One is about to be made, or an old one to begin anew, in this step."""
        self._used = self.used()
        self.begun, self.step, self._making = True, step, True
        self.start = self.end = time.perf_counter()

    def is_now(self, iterator: Any) -> None:
        """It was made: watch it, too, without keeping it. Batches may be taken of an earlier one later."""
        self.end, self._making = time.perf_counter(), False
        try:
            self._made.append(weakref.ref(iterator))
        except TypeError:
            self._used = True

    def used(self) -> bool:
        """Whether a batch was taken. One that is gone, or that does not count, was used."""
        # Private: there is no public count of the batches that an iterator gave.
        given = (getattr(made(), "_num_yielded", None) for made in self._made)
        return self._used or self._making or any(count is None or count > 0 for count in given)


@dataclass
class _Made:
    what: Literal["loader", "group"]
    call_site: str
    step: str
    group: str
    used: Callable[[], bool | None]
    """None where it is not known any more."""
    iterated: _Iterated


class Watch:
    """What this process makes, from the blocks on that `loaders` and `group_made` are told of."""

    def __init__(self, step_here: Callable[[], str]) -> None:
        self._step_here = step_here
        self._lock = threading.Lock()
        self._made: list[_Made] = []
        self._iterated: weakref.WeakKeyDictionary[Any, _Iterated] = weakref.WeakKeyDictionary()
        self.on = False
        """Whether loaders and groups are being watched."""

    @contextmanager
    def loaders(self) -> Iterator[None]:
        """Watch every DataLoader that is made while the block runs. Imports torch."""
        from torch.utils.data import DataLoader, dataloader

        sites = CallSites(os.path.dirname(dataloader.__file__ or ""))
        made, iterates = DataLoader.__init__, DataLoader.__iter__

        @functools.wraps(made)
        def __init__(loader: Any, *args: Any, **kwargs: Any) -> None:
            try:
                made(loader, *args, **kwargs)
            except BaseException as raised:
                drop_frame(raised)
                raise
            # One that makes its iterators itself may be used without our seeing it.
            if type(loader).__iter__ is __iter__:
                iterated = self._iterated[loader] = _Iterated()
                self._adds("loader", sites.find(sys._getframe(1))[0], iterated.used, iterated=iterated)

        @functools.wraps(iterates)
        def __iter__(loader: Any) -> Any:
            iterated = self._iterated.get(loader)
            try:
                if iterated is None:
                    return iterates(loader)
                iterated.begins(self._step_here())
                iterator = iterates(loader)
            except BaseException as raised:
                drop_frame(raised)
                raise
            iterated.is_now(iterator)
            return iterator

        replaced = {"__init__": (made, __init__), "__iter__": (iterates, __iter__)}
        for name, (_, ours) in replaced.items():
            setattr(DataLoader, name, ours)
        self.on = True
        try:
            yield
        finally:
            self.on = False
            for name, (before, ours) in replaced.items():
                # Who has replaced ours since calls it, and it calls torch's.
                if getattr(DataLoader, name) is ours:
                    setattr(DataLoader, name, before)

    def group_made(self, group: Any, name: str, call_site: str) -> None:
        """Watch a new process group, of which this rank is a member."""
        # Private: there is no public count of a group's collectives. Without it nothing is said of groups.
        count = getattr(group, "_get_sequence_number_for_group", None)
        if count is None:
            return
        try:
            before = count()
        except RuntimeError:  # this backend does not count
            return
        self._adds("group", call_site, _counts_on(count, before), name)

    def found(self) -> list[Unused]:
        """What was not used so far. Ask while it is `on`: afterwards a loader's use is not seen."""
        with self._lock:
            verdicts = [(made, made.used()) for made in self._made]
        useful = {(made.what, made.step) for made, used in verdicts if used is not False}
        return [
            Unused(
                made.what,
                made.call_site,
                made.step,
                made.group,
                (made.what, made.step) not in useful,
                begun=made.iterated.begun,
                begun_in=made.iterated.step,
                start=made.iterated.start,
                end=made.iterated.end,
            )
            for made, used in verdicts
            if used is False
        ]

    def _adds(
        self,
        what: Literal["loader", "group"],
        call_site: str,
        used: Callable[[], bool | None],
        group: str = "",
        iterated: _Iterated | None = None,
    ) -> None:
        with self._lock:
            self._made.append(_Made(what, call_site, self._step_here(), group, used, iterated or _Iterated()))


def _counts_on(count: Callable[[], int], before: int) -> Callable[[], bool | None]:
    def used() -> bool | None:
        try:
            return count() != before
        except RuntimeError:  # the group was destroyed
            return None

    return used
