"""What earlier starts left about a model: how its parts are called, which sizes varied, which kernels won.

Documents of the store (see `store`), each read by the file whose data it is. What can't be read is left out, with a
warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from initopt.compile_cache.autotune import Winners
from initopt.compile_cache.calls import Recorded
from initopt.compile_cache.dynamic_shapes import DynamicSources, versions

DOCUMENTS = CALLS, SIZES, WINNERS = ("calls", "sizes", "winners")
"""The names of the documents."""

_Found = TypeVar("_Found")


@dataclass(frozen=True)
class Known:
    """The documents about one model; None where there is none that can be used."""

    calls: Recorded | None = None
    sizes: DynamicSources | None = None
    winners: Winners | None = None

    @classmethod
    def of(cls, documents: Mapping[str, Mapping[str, Any]]) -> Known:
        """Read the documents, which are given by name."""
        sizes = _read(documents, SIZES, DynamicSources.from_data)
        if sizes is not None and dict(sizes.versions) != versions():
            # The names of sources are those of a library's variables.
            sizes = None
        return cls(
            calls=_read(documents, CALLS, Recorded.from_data),
            sizes=sizes,
            winners=_read(documents, WINNERS, Winners.from_data),
        )


def _read(documents: Mapping[str, Mapping[str, Any]], name: str, from_data: Callable[[Any], _Found]) -> _Found | None:
    if name not in documents:
        return None
    try:
        return from_data(documents[name])
    except ValueError as error:
        warnings.warn(f"initopt: what an earlier start left as {name!r} is not used ({error})", stacklevel=4)
        return None
