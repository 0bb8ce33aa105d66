"""Classes whose instances are described and made again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass
class Sample:
    x: Any
    y: Any


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass(frozen=True, slots=True)
class Slotted:
    x: Any


@dataclass
class Loud:
    """Says that its code runs."""

    x: Any = 0

    def __post_init__(self) -> None:
        raise AssertionError("its code runs")

    @property
    def y(self) -> int:
        raise AssertionError("its code runs")

    @y.setter
    def y(self, value: Any) -> None:
        raise AssertionError("its code runs")
