"""Fills made in parts by several threads equal those that torch makes one after the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from initopt.table_init import fills
from initopt.table_init.fills import Fill, make, overlap, parts, splits

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SIZES = (16, 17, 31, 32, 33, 47, 48, 1_000, 16_384, 50_003)


def stock(sizes: tuple[int, ...], method: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    made = [getattr(torch.empty(size, dtype=dtype), method)(0.25, 0.5, generator=generator) for size in sizes]
    return torch.cat(made), generator.get_state()


@pytest.mark.parametrize("method", ["uniform_", "normal_"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("threads", [1, 2, 3, 7, 64])
def test_the_bytes_are_those_of_torch(method: str, dtype: torch.dtype, threads: int) -> None:
    expected, end = stock(SIZES, method, dtype)
    made = torch.zeros_like(expected)
    wanted = [Fill(part, method, (0.25, 0.5)) for part in made.split(SIZES)]
    state, worked = make(wanted, torch.Generator().manual_seed(11).get_state(), threads)
    assert torch.equal(made.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(state, end)
    assert len(worked) <= threads


@pytest.mark.parametrize("method", ["uniform_", "normal_"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_this_torch_can_be_split(method: str, dtype: torch.dtype) -> None:
    assert splits(method, dtype)


def test_a_torch_that_draws_in_another_way_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fill, "draws_before", lambda self, index: index + 1)
    assert not splits.__wrapped__("uniform_", torch.float32)


def test_a_generator_of_another_kind_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise fills.UnknownGenerator("no MT19937")

    monkeypatch.setattr(fills, "ahead", refuse)
    assert not splits.__wrapped__("uniform_", torch.float32)


def test_integers_are_not_split() -> None:
    assert not splits("uniform_", torch.int8)


def test_parts_are_about_as_long() -> None:
    wanted = [Fill(torch.empty(size), "uniform_", (0.0, 1.0)) for size in (100_000, 7_000, 300_000)]
    lengths = [sum(piece.draws for piece in part) for part in parts(wanted, 4)]
    assert len(lengths) == 4
    assert max(lengths) - min(lengths) < 200


def test_memory_is_shared_or_not() -> None:
    memory = torch.empty(10, 10)
    assert overlap(memory[:5], memory[4:])
    assert not overlap(memory[:5], memory[5:])
    assert overlap(memory[:, :5], memory[:, 5:])  # row by row they lie between each other
    assert not overlap(memory[:0], memory)
