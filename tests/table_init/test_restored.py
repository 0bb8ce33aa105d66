"""What a restore leaves out gets the values that it would have had."""

from __future__ import annotations

import pytest
import torch

from initopt.table_init import restored
from initopt.table_init.fills import Claimed, Fill, make
from initopt.table_init.restored import complete, mark

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
STATE = torch.Generator().manual_seed(2).get_state()


def filled(dtype: torch.dtype) -> list[torch.Tensor]:
    tables = [torch.empty(1_003, dtype=dtype), torch.empty(640, dtype=dtype)]
    make([Fill(tables[0], "normal_", (0.0, 1.0)), Fill(tables[1], "uniform_", (-1.0, 1.0))], STATE)
    return tables


def left(dtype: torch.dtype) -> list[Claimed]:
    fills = [
        Fill(torch.zeros(1_003, dtype=dtype), "normal_", (0.0, 1.0)),
        Fill(torch.zeros(640, dtype=dtype), "uniform_", (-1.0, 1.0)),
    ]
    mark(fills, 2)
    return [Claimed(fills[0], STATE, 0), Claimed(fills[1], STATE, fills[0].draws)]


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restored, "_PER_TASK", 100)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_restored_value_stays_and_the_others_are_filled(dtype: torch.dtype) -> None:
    unfilled, expected = left(dtype), filled(dtype)
    for one, table in zip(unfilled, expected, strict=True):
        one.fill.values[10:600] = 0.5
        table[10:600] = 0.5
    missing = complete(unfilled, 2)
    assert list(missing.values()) == [10 + 403, 10 + 40]
    for one, table in zip(unfilled, expected, strict=True):
        assert torch.equal(one.fill.values.view(torch.uint8), table.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nothing_restored_is_the_fill(dtype: torch.dtype) -> None:
    unfilled = left(dtype)
    assert all(bool(one.fill.values.isnan().all()) for one in unfilled)
    assert sum(complete(unfilled, 1).values()) == 1_643
    for one, table in zip(unfilled, filled(dtype), strict=True):
        assert torch.equal(one.fill.values.view(torch.uint8), table.view(torch.uint8))


def test_all_restored_is_left_alone() -> None:
    unfilled = left(torch.float32)
    for one in unfilled:
        one.fill.values.fill_(float("nan"))  # not the one that marks
    assert complete(unfilled, 2) == {}
    assert all(bool(one.fill.values.isnan().all()) for one in unfilled)
