"""What counts as the first training step, by the order in which a trainer does things."""

from __future__ import annotations

import pytest

from initopt.first_training_step import FirstStep
from initopt.own_lines import Moment


def told(*events: str, all_in_backward: bool = False) -> FirstStep:
    """Tell of `events`, each at the time of its place."""
    first = FirstStep()
    first.all_in_backward = all_in_backward
    for time, event in enumerate(events):
        at = Moment(float(time), 0.0)
        if event == "backward":
            first.backward_begins(at)
            first.backward_ended(Moment(time + 0.5, 0.0))
        elif event == "load":
            first.thrown_away()
        elif event.startswith("progress_ended"):
            first.progress_ended(at, well=event == "progress_ended")
        else:
            getattr(first, event)(at)
    return first


@pytest.mark.parametrize(
    ("events", "found"),
    [
        ("", None),
        # The state of an optimizer is made, without a backward pass.
        ("batch_came stepped", None),
        ("batch_came backward", None),
        ("batch_came backward stepped", (0, 2)),
        ("backward stepped", (0, 1)),
        # A validation's batches come before, and something is made after the batch.
        ("batch_came batch_came batch_came backward stepped", (2, 4)),
        ("batch_came step_ended backward stepped", (1, 3)),
        ("step_ended backward stepped", (1, 2)),
        # Gradients are accumulated over batches, and two optimizers step.
        ("batch_came backward batch_came backward stepped stepped", (0, 5)),
        ("progress_begins backward stepped progress_ended", (0, 3)),
        ("progress_begins progress_begins backward stepped progress_ended progress_ended", (0, 5)),
        # A validation by the same pipeline, and one that fails.
        ("progress_begins progress_ended", None),
        ("progress_begins progress_ended progress_begins backward progress_ended", (2, 4)),
        ("progress_begins backward progress_ended_badly", None),
        # A pipeline that only loads.
        ("progress_begins progress_ended backward stepped", (1, 3)),
        ("batch_came backward stepped load", None),
        ("batch_came backward stepped load batch_came backward stepped", (4, 6)),
        # One that loads at every step trains all the same.
        ("batch_came backward stepped load batch_came backward stepped load", (4, 6)),
        ("load batch_came backward stepped", (1, 3)),
    ],
)
def test_which_step_is_found(events: str, found: tuple[float, float] | None) -> None:
    first = told(*events.split()).found
    assert (None if first is None else (first.start.time, first.end.time)) == found


def test_a_backward_pass_is_a_step_where_every_optimizer_is_in_it() -> None:
    found = told("batch_came", "backward", all_in_backward=True).found
    assert found is not None
    assert (found.start.time, found.end.time) == (0, 1.5)


def test_an_optimizer_that_nobody_sees_has_stepped_with_the_first_backward_pass() -> None:
    assert told("batch_came", *["backward"] * 31).found is None
    found = told("batch_came", *["backward"] * 32).found
    assert found is not None
    assert (found.start.time, found.end.time) == (0, 1.5)


def test_an_optimizer_in_the_backward_pass_ends_with_it() -> None:
    first = FirstStep()
    first.backward_begins(Moment(0.0, 0.0))
    first.stepped(Moment(1.0, 0.0))
    first.backward_ended(Moment(2.0, 0.0))
    assert first.found is not None
    assert first.found.end.time == 2.0
