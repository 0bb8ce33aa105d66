"""The names of what lies between two steps."""

from __future__ import annotations

import sys

from initopt.own_lines import Between, Line, Moment, Own, name


def at(time: float, *lines: tuple[int, int]) -> Moment:
    """A moment in lines of `train.py`, each with the number of its call."""
    return Moment(time, time / 2, tuple(Line(call, "train.py", number) for call, number in lines))


def test_a_name_is_the_lines_of_the_innermost_call_that_both_ends_are_in() -> None:
    assert name(at(0, (1, 90), (2, 41), (3, 7)), at(1, (1, 90), (2, 77), (4, 3))) == "train.py:41-77"
    assert name(at(0, (1, 90)), at(1, (1, 90), (2, 5))) == "train.py:90"
    # A loop has come round.
    assert name(at(0, (1, 9)), at(1, (1, 4))) == "train.py:4-9"
    assert name(at(0), at(1, (1, 9), (2, 3))) == "until train.py:9"
    assert name(at(0, (1, 9)), at(1)) == ""


def found(*events: tuple[str, Moment]) -> list[tuple[str, float, float]]:
    pieces: list[tuple[str, float, float]] = []
    between = Between(lambda called, start, end, _: pieces.append((called, start.time, end.time)))
    for event, moment in events:
        getattr(between, event)(moment)
    return pieces


def test_modules_that_are_put_together_are_the_model() -> None:
    pieces = found(
        ("begins", at(0, (1, 10))),
        ("module_put_in", at(1, (1, 12))),
        ("module_put_in", at(2, (1, 12))),
        ("module_put_in", at(3, (1, 13))),
        ("ends", at(4, (1, 20))),
    )
    assert pieces == [("train.py:10-12", 0, 1), ("model", 1, 3), ("train.py:13-20", 3, 4)]


def test_what_is_put_together_after_the_model_was_sharded_is_none() -> None:
    """Such as a wrapper, then data that is waited for, and what the first batch makes."""
    pieces: list[str] = []
    between = Between(lambda called, *_: pieces.append(called))
    between.model_is_made = True
    between.begins(at(0, (1, 10)))
    between.module_put_in(at(1, (1, 12)))
    between.module_put_in(at(4, (1, 13)))
    between.ends(at(5, (1, 20)))
    assert pieces == ["train.py:10-20"]


def test_the_last_piece_has_the_error_in_which_the_program_ended_however_short_it_is() -> None:
    pieces: list[tuple[str, float, str]] = []
    between = Between(lambda called, _, end, error: pieces.append((called, end.time, error)))
    between.begins(at(0, (1, 1)))
    between.module_put_in(at(1, (1, 2)))
    between.module_put_in(at(2, (1, 3)))
    between.ends(at(2.001, (1, 4)), "KeyError")
    between.begins(at(3, (1, 5)))
    between.ends(at(3.001, (1, 6)), "ValueError")
    assert pieces == [
        ("train.py:1-2", 1, ""),
        ("model", 2, ""),
        ("train.py:3-4", 2.001, "KeyError"),
        ("train.py:5-6", 3.001, "ValueError"),
    ]


def test_what_is_short_or_inside_of_a_step_has_no_name() -> None:
    pieces = found(
        ("module_put_in", at(0, (1, 1))),
        ("ends", at(1, (1, 2))),
        ("begins", at(2, (1, 3))),
        ("module_put_in", at(2.001, (1, 4))),
        ("ends", at(2.005, (1, 5))),
        ("begins", at(3, (1, 6))),
        ("module_put_in", at(4, (1, 7))),
        ("ends", at(5, (1, 8))),
    )
    assert pieces == [("train.py:6-8", 3, 5)]


def test_lines_are_those_of_own_code_the_outermost_first() -> None:
    here = sys._getframe()
    moment = (lambda: Own().now())()
    own = [line for line in moment.lines if line.file == "test_own_lines.py"]
    assert [line.number for line in own] == [here.f_lineno - 2] * 2
    assert own[0].call == id(here)
    assert all("pytest" not in line.file for line in moment.lines)
