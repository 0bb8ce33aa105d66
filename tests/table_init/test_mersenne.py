"""torch's CPU generator moved on equals one that drew, to the last byte of its state."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from initopt.table_init.mersenne import UnknownGenerator, ahead


def after(seed: int, draws: int) -> torch.Generator:
    generator = torch.Generator().manual_seed(seed)
    if draws:
        torch.empty(draws).uniform_(generator=generator)
    return generator


@pytest.mark.parametrize("before", [0, 1, 623, 624, 625, 5_000])
@pytest.mark.parametrize("draws", [0, 1, 2, 623, 624, 625, 624 * 63, 624 * 64, 624 * 64 + 1, 3_333_333])
def test_moving_on_equals_drawing(before: int, draws: int) -> None:
    moved = ahead(after(7, before).get_state(), draws)
    assert torch.equal(moved, after(7, before + draws).get_state())


@given(
    seed=st.integers(0, 2**63 - 1),
    before=st.integers(0, 2_000),
    first=st.integers(0, 2**40),
    second=st.integers(0, 2**40),
)
def test_two_moves_are_one(seed: int, before: int, first: int, second: int) -> None:
    state = after(seed, before).get_state()
    assert torch.equal(ahead(ahead(state, first), second), ahead(state, first + second))


def test_what_normal_keeps_of_a_pair_stays() -> None:
    generator = torch.Generator().manual_seed(3)
    torch.empty(1).normal_(generator=generator)
    moved = torch.Generator()
    moved.set_state(ahead(generator.get_state(), 1_000_000))
    torch.empty(1_000_000).uniform_(generator=generator)
    both = [torch.empty(3).normal_(generator=each) for each in (generator, moved)]
    assert torch.equal(*both)


def test_the_state_that_is_given_stays() -> None:
    state = after(1, 10).get_state()
    kept = state.clone()
    ahead(state, 10_000_000)
    assert torch.equal(state, kept)


def changed(state: torch.Tensor, place: int, value: int) -> torch.Tensor:
    state[place] = value
    return state


@pytest.mark.parametrize(
    "state",
    [
        torch.zeros(16, dtype=torch.uint8),
        torch.zeros(5_056, dtype=torch.float32),
        torch.zeros(5_056, dtype=torch.uint8),
        changed(after(1, 10).get_state(), 8, 9),
        changed(after(1, 10).get_state(), 24 + 4, 1),
    ],
    ids=["another generator's", "no bytes", "nothing", "places that don't fit", "a word too long"],
)
def test_another_generator_is_refused(state: torch.Tensor) -> None:
    with pytest.raises(UnknownGenerator, match="MT19937"):
        ahead(state, 1)


def test_it_does_not_go_back() -> None:
    with pytest.raises(ValueError, match="-1 draws"):
        ahead(after(1, 10).get_state(), -1)
