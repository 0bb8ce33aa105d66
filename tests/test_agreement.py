"""What ranks assume, compared: equal, different, by ranks of other code, and how a difference is told."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from tests.multirank.forked import fork_ranks


def held(say: Callable[[Any, int], None], strict: bool = False, before: Callable[[], None] | None = None) -> Any:
    """What the ranks of a job hold after `say`, the collectives that took, or the text of what is raised."""
    import torch
    from torch import distributed

    from initopt import Agreement, Disagreement
    from tests.multirank.eliminated_ranks import Counter, counted, own_group

    seen: Counter[str] = Counter()
    with own_group():
        agreement = Agreement(distributed.group.WORLD, torch.device("cpu"), strict=strict)
        say(agreement, int(os.environ["RANK"]))
        try:
            with counted(seen), warnings.catch_warnings():
                warnings.simplefilter("error")
                found = agreement.hold()
        except Disagreement as error:
            return str(error), dict(seen)
    return [str(one) for one in found.values()], dict(seen)


def test_names_that_are_no_text_have_a_digest() -> None:
    from initopt.agreement import digest

    assert digest("t\udcff") != digest("t\udcfe")


def equal(agreement: Any, rank: int) -> None:
    agreement.assume("seed", "1")
    agreement.assume("plan", "a\nb", pytest.fail)
    agreement.tell("rank", rank)
    assert not agreement.held("seed") and agreement.waits


def test_equal_ranks_meet_once() -> None:
    assert fork_ranks(held, equal, ranks=3) == [([], {"all_gather_single": 1})] * 3


def numbers() -> list[tuple[int, ...]]:
    import torch
    from torch import distributed

    from initopt import Agreement
    from tests.multirank.eliminated_ranks import own_group

    with own_group():
        agreement = Agreement(distributed.group.WORLD, torch.device("cpu"))
        for number in (-(2**63), 0, 2**63 - 1):
            agreement.tell(f"number {number}", number + (int(os.environ["RANK"]) if number < 1 else 0))
        agreement.hold()
        agreement.tell("second", 7)
        agreement.hold()
        return [agreement.told(f"number {number}") for number in (-(2**63), 0, 2**63 - 1)] + [agreement.told("second")]


def test_numbers_are_told_as_they_are() -> None:
    expected = [(-(2**63), -(2**63) + 1), (0, 1), (2**63 - 1, 2**63 - 1), (7, 7)]
    assert fork_ranks(numbers) == [expected, expected]


def other_value(agreement: Any, rank: int) -> None:
    ran: list[str] = []
    agreement.assume("colour", "dark\n" + ("red" if rank == 2 else "blue"), lambda told: ran.append(str(told)))
    agreement.assume("shape", "round", pytest.fail)
    agreement.assume("name", f"n{rank}", lambda told: ran.append(told.key), explained=False)
    # Whatever else is raised in `hold` comes after these have run.
    hold = agreement.hold

    def noted() -> Any:
        found = hold()
        assert ran == [str(found["colour"]), "name"]
        return found

    agreement.hold = noted


def test_what_differs_is_told_with_ranks_and_values_and_its_fallback_runs_everywhere() -> None:
    for differs, seen in fork_ranks(held, other_value, ranks=4):
        assert differs[0] == "colour differs between ranks (ranks 0, 1, 3: blue; rank 2: red)"
        assert differs[1].startswith("name differs between ranks (rank 0: n0; rank 1: n1; ")
        assert seen == {"all_gather_single": 1, "all_gather_object": 1}
    for differs, _ in fork_ranks(held, other_value, True, ranks=4):
        assert differs.startswith("colour differs between ranks (ranks 0, 1, 3: blue; rank 2: red); name differs")


def quiet(agreement: Any, rank: int) -> None:
    agreement.assume("seed", str(rank), lambda told: None, explained=False)


def test_a_difference_that_is_no_mistake_costs_no_further_meeting() -> None:
    for (differs,), seen in fork_ranks(held, quiet):
        assert differs.startswith("seed differs between ranks (rank 0: digest ")
        assert seen == {"all_gather_single": 1}


def other_keys(agreement: Any, rank: int) -> None:
    agreement.assume("seed", "1", pytest.fail)
    if rank == 1:
        agreement.assume("more", "1", pytest.fail)


def test_ranks_of_other_code_are_found() -> None:
    for text, _ in fork_ranks(held, other_keys):
        assert text == "what is agreed on differs between ranks (rank 0: nothing; rank 1: more)"


def long_values(agreement: Any, rank: int) -> None:
    agreement.assume("text", "x" * 5000 + str(rank))
    agreement.assume("line", f"{rank}" + "y" * 200)


def test_long_values_are_cut() -> None:
    for text, _ in fork_ranks(held, long_values):
        first, second = text.split("; line differs")
        assert first.startswith("text differs between ranks (rank 0: digest ")
        assert f"(rank 0: 0{'y' * 99}...; rank 1: 1{'y' * 99}...)" in second


def test_there_is_an_end_to_what_can_be_said() -> None:
    import torch

    from initopt import Agreement

    agreement = Agreement(None, torch.device("cpu"))
    for number in range(31):
        agreement.assume(f"key {number}", "")
    with pytest.raises(ValueError, match="'one more' is one too many: at most 31"):
        agreement.assume("one more", "")
