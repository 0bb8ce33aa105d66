"""The rule for a CUDA generator, on numbers from torch's own arithmetic, and what happens where it doesn't hold.

There is no CUDA device here: the generator and the device are stand-ins.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from initopt.table_init import philox

H200 = SimpleNamespace(multi_processor_count=132, max_threads_per_multi_processor=2_048)


@pytest.mark.parametrize(
    ("numel", "moved"),
    [
        (1, 4),
        (1_024, 4),
        (132 * 8 * 256 * 4, 4),
        (132 * 8 * 256 * 4 + 1, 8),
        (10 * 132 * 8 * 256 * 4, 40),
    ],
)
def test_a_launch_moves_the_offset_by_its_steps(numel: int, moved: int) -> None:
    assert philox.offset_after(12, numel, H200) == 12 + moved


class Generator:
    def __init__(self) -> None:
        self.offset = 40

    def get_state(self) -> int:
        return self.offset

    def set_state(self, state: int) -> None:
        self.offset = state

    def get_offset(self) -> int:
        return self.offset

    def set_offset(self, offset: int) -> None:
        self.offset = offset


@pytest.fixture
def generator(monkeypatch: pytest.MonkeyPatch) -> Generator:
    generator = Generator()
    monkeypatch.setattr(philox, "_generator", lambda device: generator)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: H200)
    return generator


class Filling:
    """Stands for a tensor of the device: its fill moves the generator."""

    def __init__(self, generator: Generator, numel: int, wrong: int = 0) -> None:
        self.generator, self._numel, self.wrong = generator, numel, wrong
        self.device, self.filled_from = torch.device("cuda:0"), -1

    def numel(self) -> int:
        return self._numel

    def uniform_(self, *_: Any) -> None:
        self.filled_from = self.generator.offset
        self.generator.offset = philox.offset_after(self.generator.offset, self._numel, H200) + self.wrong


@pytest.mark.parametrize("wrong", [0, 4])
def test_the_rule_is_held_against_fills_first(
    generator: Generator, wrong: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "empty", lambda numel, **_: Filling(generator, numel, wrong))
    assert philox._holds.__wrapped__(torch.device("cuda:0"), torch.float32) == (not wrong)
    assert generator.offset == 40


def test_a_skipped_fill_can_be_made_later(generator: Generator) -> None:
    table: Any = Filling(generator, 5_000_000)
    state = philox.skip(table)
    after = generator.offset
    assert after == philox.offset_after(40, 5_000_000, H200)
    philox.fill_from(table, state, -1, 1)
    assert (table.filled_from, generator.offset) == (40, after)


def test_a_tensor_of_the_cpu_is_not_its_business() -> None:
    assert not philox.can_skip(torch.empty(10))
