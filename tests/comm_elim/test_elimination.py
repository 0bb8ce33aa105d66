"""What is said of INITOPT_DISABLE before any rank meets another."""

from __future__ import annotations

import inspect
import warnings

import pytest

from initopt.comm_elim.elimination import Elimination, eliminated
from initopt.optimizations import NAMES, REWRITES
from initopt.optimize.eliminate import eliminate
from initopt.optimize.saying import Saying
from initopt.optimize.together import Together


class Silent(Saying):
    def __init__(self) -> None:
        """Nobody is told."""

    def left(self, name: str, why: str) -> None:
        """Nobody is told."""


class Settled(Together):
    def why_not(self) -> str:
        """All ranks do alike."""
        return ""


def by_class() -> int:
    Elimination()
    return here()


def by_block() -> int:
    with eliminated():
        return here()


def by_optimize() -> int:
    with eliminate(Settled([]), Silent(), plan=True):
        return here()


def here() -> int:
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    return frame.f_back.f_lineno - 1


@pytest.mark.parametrize("enter", [by_class, by_block, by_optimize])
def test_an_unknown_name_is_said_on_rank_0_of_the_line_that_called(
    enter: object, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    assert callable(enter)
    monkeypatch.setenv("INITOPT_DISABLE", "plan,groups,fill-once,nosuch")
    monkeypatch.setenv("RANK", "0")
    line = enter()
    [said] = [one for one in recwarn if "INITOPT_DISABLE" in str(one.message)]
    assert (said.filename, said.lineno) == (__file__, line)
    assert "names 'nosuch', which is no optimization or rewrite; there are " in str(said.message)
    assert all(name in str(said.message) for name in (*NAMES, *REWRITES))
    recwarn.clear()
    monkeypatch.setenv("RANK", "1")
    enter()
    assert not [one for one in recwarn if "INITOPT_DISABLE" in str(one.message)]


def test_where_warnings_are_errors_it_is_one_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INITOPT_DISABLE", "nosuch")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(UserWarning, match="names 'nosuch'"):
                Elimination()
