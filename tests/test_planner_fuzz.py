"""Thirty random planner inputs come out of the fast planner as out of TorchRec's; and a wrong bound would be noticed.

The long run: `python -m tests.planner_fuzz --configurations 300`.
"""

from __future__ import annotations

from typing import Any

import pytest

from initopt.sharding_plan import search
from tests.planner_fuzz import SMALL, compare

# Found by trying: seeds of SMALL.
WHERE_THE_BOUND_MATTERS = (2, 9, 24)
WHERE_NOTHING_FITS = (1, 12, 16)


@pytest.mark.parametrize("first", range(0, 30, 5))
def test_random_inputs_are_planned_as_torchrec_plans_them(first: int) -> None:
    differences = [each.difference() for each in compare(range(first, first + 5), SMALL) if not each.equal]
    assert not differences, "\n".join(differences)


def test_a_bound_that_is_too_high_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = search.bound
    monkeypatch.setattr(search, "bound", lambda *arguments: 3 * right(*arguments) // 2)
    assert not all(each.equal for each in compare(iter(WHERE_THE_BOUND_MATTERS), SMALL))


def test_an_error_has_the_same_text_and_the_same_number_of_proposals() -> None:
    def failed(each: Any) -> bool:
        return not each.stock.planned and "Planner evaluated" in str(each.stock.outcome)

    found = [each for each in compare(iter(WHERE_NOTHING_FITS), SMALL)]
    assert found and all(failed(each) and each.equal for each in found)
