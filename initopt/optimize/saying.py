"""How an optimization says what it did: into the record, once for each thing; what fails in it, on stderr, too."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from initopt.failure import first_line
from initopt.hooks import caller_level
from initopt.record import Advised, CompileCache, Optimized, Recorder

if TYPE_CHECKING:
    from initopt.table_init.fill_once import Filled


class Saying:
    """`recorder` gives the one to say it to, `place` the line of the script that is being run, as `file:line`."""

    def __init__(self, recorder: Callable[[], Recorder], place: Callable[[], str]) -> None:
        self._recorder = recorder
        self._place = place
        self._said: set[Optimized] = set()

    def here(self) -> str:
        """The line of the script that is being run."""
        return self._place()

    def applied(
        self, name: str, text: str, place: str | None = None, *, left_out: Mapping[str, int] | None = None
    ) -> None:
        """Say what an optimization has done, here or at another place; of meetings left out, how many by rewrite."""
        place = self._place() if place is None else place
        self._say(Optimized(name, True, text, place, left_out=tuple((left_out or {}).items())))

    def left(self, name: str, why: str) -> None:
        """Say why it has done nothing here."""
        self._say(Optimized(name, False, why, self._place()))

    def never(self, name: str, why: str) -> None:
        """Say why it has done nothing in the whole start-up, unless something was said of it."""
        if name not in {one.name for one in self._said}:
            self._say(Optimized(name, False, why))

    def advise(self, advised: Advised) -> None:
        """Say what the script could do itself."""
        self._recorder().optimized(advised)

    def code(self, found: CompileCache) -> None:
        """Say how this rank came to its compiled code."""
        self._recorder().compile_cache(found)

    def filled(self, tables: Filled) -> None:
        """Say when which thread filled tables."""
        tables.add_to(self._recorder())

    @contextmanager
    def costs_only(self, name: str) -> Iterator[None]:
        """What goes wrong in the block costs the optimization, with one warning, and not the job."""
        try:
            yield
        except Exception as error:
            text = first_line(error)
            with suppress(Exception):
                self.left(name, f"it failed with {text}")
            warnings.warn(
                f"initopt: {name!r} of --optimize is left out here, as it failed ({text}); the script goes on without "
                f"it, and --no-{name} switches it off",
                stacklevel=caller_level("torch", "torchrec"),
            )

    def _say(self, what: Optimized) -> None:
        if what not in self._said:
            self._said.add(what)
            self._recorder().optimized(what)
