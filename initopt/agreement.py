"""One small collective that shows whether all ranks assume the same.

A collective that is left out carried a guarantee: all ranks hold the same value. Here each rank says what it assumes,
as digests of a fixed size, and one all_gather shows all of them to all ranks. As every rank sees the same table, every
rank takes the same decision: where values differ, what stands in for the assumption runs on all ranks alike.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed

_SLOTS = 32
"""Numbers that a rank sends, whatever it assumes: ranks of other code still understand each other."""

_LAYOUT = "what is agreed on"
_TEXT = 4000
"""Characters of a value that are sent where values differ."""
_SHOWN = 100
_UNTOLD = 0x1B0D1_0000_0001
"""The number of what a rank can't tell."""


@dataclass(frozen=True)
class Difference:
    """A `key` whose value is not the same on all ranks.

    `parties` are the ranks of the group that hold the same value, the one with rank 0 first; `values` has, for each of
    them, the first line that is not the others'.
    """

    key: str
    parties: tuple[tuple[int, ...], ...]
    values: tuple[str, ...]

    def __str__(self) -> str:
        told = "; ".join(f"{_named(ranks)}: {value}" for ranks, value in zip(self.parties, self.values, strict=True))
        return f"{self.key} differs between ranks ({told})"


class Disagreement(RuntimeError):
    """Ranks assume different things, and there is nothing to fall back to. Raised on all of them."""

    def __init__(self, differences: Sequence[Difference]) -> None:
        super().__init__("; ".join(map(str, differences)))
        self.differences = tuple(differences)


@dataclass(frozen=True)
class _Assumption:
    number: int
    text: str
    otherwise: Callable[[Difference], None] | None
    compared: bool = True
    explained: bool = True


class Agreement:
    """What the ranks of `group` assume, and one all_gather on `device` that shows whether they all do.

    With `strict` every difference is an error. `untold` runs on all ranks where one of them can't tell something
    (see `cannot_tell`) that has no `otherwise`; without it that is an error.
    """

    def __init__(
        self,
        group: Any,
        device: torch.device,
        *,
        strict: bool = False,
        untold: Callable[[Difference], None] | None = None,
    ) -> None:
        self.group, self.device, self.strict = group, device, strict
        self._untold = untold
        self.plan: Any = None
        """The sharding plan that all ranks are known to hold."""
        self._waiting: dict[str, _Assumption] = {}
        self._told: dict[str, tuple[int, ...]] = {}

    def assume(
        self,
        key: str,
        value: str,
        otherwise: Callable[[Difference], None] | None = None,
        *,
        explained: bool = True,
    ) -> None:
        """Say what this rank holds; `otherwise` runs on all ranks if they don't all hold the same.

        `value` is text, whose lines are what a difference is told by. Without `otherwise` a difference is an error.
        One that is not `explained` is no mistake: where nothing else differs the ranks don't meet again to tell it.
        """
        self._add(key, _Assumption(digest(value), value, otherwise, explained=explained))

    def cannot_tell(self, key: str, why: str, otherwise: Callable[[Difference], None] | None = None) -> None:
        """Say, in place of `assume`, that this rank can't find out what it holds: a difference to all other ranks.

        So it still meets them in `hold`.
        """
        self._add(key, _Assumption(_UNTOLD, f"it can't be told ({why})", otherwise))

    def tell(self, key: str, number: int) -> None:
        """Let the others know a number of 64 bits, which may differ; see `told`."""
        self._add(key, _Assumption(number, "", None, compared=False))

    def told(self, key: str) -> tuple[int, ...]:
        """The number that each rank gave for a key, or the digest of what it assumes. Raises KeyError before `hold`."""
        return self._told[key]

    def held(self, key: str) -> bool:
        """Whether `hold` has compared this key."""
        return key in self._told

    @property
    def waits(self) -> bool:
        """Whether something was said that `hold` has not compared yet."""
        return bool(self._waiting)

    def hold(self) -> Mapping[str, Difference]:
        """Compare what was said since the last time, and return what differs; one all_gather of 256 bytes a rank.

        Raises Disagreement on all ranks, before anything else is done, if a key differs that has no `otherwise`, if
        anything does and the agreement is strict, or if ranks don't compare the same keys. It tells all that differs.
        """
        said, self._waiting = self._waiting, {}
        layout = digest("\n".join(said))
        table = self._gathered([layout, *(one.number for one in said.values())])
        columns = [tuple(row[place] for row in table) for place in range(len(said) + 1)]
        if len(set(columns[0])) > 1:
            raise Disagreement([self._difference(_LAYOUT, columns[0], {_LAYOUT: "\n".join(said)})])
        self._told.update(zip(said, columns[1:], strict=True))
        values = {key: set(self._told[key]) for key, one in said.items() if one.compared}
        differing = [key for key, numbers in values.items() if len(numbers) > 1 or _UNTOLD in numbers]
        if not differing:
            return {}
        otherwise = {
            key: said[key].otherwise or (self._untold if len(values[key] - {_UNTOLD}) < 2 else None)
            for key in differing
        }
        wrong = [key for key in differing if self.strict or otherwise[key] is None]
        if wrong or any(said[key].explained or _UNTOLD in values[key] for key in differing):
            texts = self._texts({key: said[key].text for key in differing})
        else:
            texts = [dict.fromkeys(differing, "")] * len(table)
        found = {key: _difference(key, self._told[key], [text[key] for text in texts]) for key in differing}
        if wrong:
            # What else differs may say why.
            raise Disagreement([found[key] for key in (*wrong, *(key for key in differing if key not in wrong))])
        for key in differing:
            instead = otherwise[key]
            assert instead is not None
            instead(found[key])
        return found

    def _add(self, key: str, assumption: _Assumption) -> None:
        if len(self._waiting) + 1 == _SLOTS:
            raise ValueError(f"{key!r} is one too many: at most {_SLOTS - 1} things are agreed on at a time")
        self._waiting[key] = assumption

    def _gathered(self, numbers: Sequence[int]) -> list[list[int]]:
        mine = torch.zeros(_SLOTS, dtype=torch.int64)
        mine[: len(numbers)] = torch.tensor(numbers, dtype=torch.int64)
        size = distributed.get_world_size(self.group)
        told = torch.empty(size * _SLOTS, dtype=torch.int64, device=self.device)
        # The old name still works in torch 2.13, with a warning.
        gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
        gather(told, mine.to(self.device), group=self.group)
        rows: list[list[int]] = told.view(size, _SLOTS).tolist()
        return rows

    def _texts(self, mine: Mapping[str, str]) -> list[Mapping[str, str]]:
        told: list[Any] = [None] * distributed.get_world_size(self.group)
        distributed.all_gather_object(told, {key: text[:_TEXT] for key, text in mine.items()}, group=self.group)
        return told

    def _difference(self, key: str, numbers: Sequence[int], mine: Mapping[str, str]) -> Difference:
        return _difference(key, numbers, [text[key] for text in self._texts(mine)])


def digest(text: str | bytes) -> int:
    """The first 64 bits of the sha256 of `text`, as torch's integers hold them."""
    data = text.encode(errors="surrogatepass") if isinstance(text, str) else text
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "big", signed=True)


def _difference(key: str, numbers: Sequence[int], texts: Sequence[str]) -> Difference:
    parties: dict[int, list[int]] = {}
    for rank, number in enumerate(numbers):
        parties.setdefault(number, []).append(rank)
    lines = [texts[ranks[0]].splitlines() for ranks in parties.values()]
    length = max(map(len, lines))
    filled = [[*own, *[""] * (length - len(own))] for own in lines]
    place = next((at for at, row in enumerate(zip(*filled, strict=True)) if len(set(row)) > 1), None)
    values = (
        [f"digest {number & (1 << 64) - 1:016x}" for number in parties]
        if place is None
        else [_short(own[place]) or "nothing" for own in filled]
    )
    return Difference(key, tuple(tuple(ranks) for ranks in parties.values()), tuple(values))


def _short(line: str) -> str:
    return line if len(line) <= _SHOWN else f"{line[:_SHOWN]}..."


def _named(ranks: Iterable[int]) -> str:
    ranks = list(ranks)
    shown = ", ".join(map(str, ranks[:4]))
    more = f" and {len(ranks) - 4} more" if len(ranks) > 4 else ""
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}{more}"
