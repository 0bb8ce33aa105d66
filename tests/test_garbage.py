"""`gc` of `--optimize`: when the collector's thresholds are raised, when they are as before, and whose they are."""

from __future__ import annotations

import ast
import gc
import json
import multiprocessing
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from initopt.optimize.garbage import OLD, Garbage
from initopt.runs import Run
from initopt.thresholds import WHILE_IMPORTING, Thresholds
from tests.test_optimize import Said
from tests.test_run import python, script, without_ours

TRAINER = """
import gc, os, sys
real = gc.get_threshold
import torch
sys.path.append(os.path.abspath("site-packages"))
import own
import library
few = len(gc.get_objects(0)) + len(gc.get_objects(1)) < 10_000
shown = [library.THRESHOLDS, library.TOLD, own.THRESHOLDS, real(), few]
model = torch.nn.Sequential(torch.nn.Linear(2, 1))
shown.append(real())
optimizer = torch.optim.SGD(model.parameters())
show = lambda _: print(real(), flush=True)
loader = torch.utils.data.DataLoader(torch.ones(4, 2), num_workers=1, worker_init_fn=show)
for batch in loader:
    model(batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
shown.append(real())
print(shown, gc.get_threshold is real, 0)
"""
real = gc.get_threshold
DEFAULT = real()


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    yield
    gc.set_threshold(*DEFAULT)
    gc.enable()


def garbage() -> tuple[Garbage, Said]:
    said = Said()
    return Garbage(said), said


@pytest.mark.parametrize("options", [["--optimize"], ["--optimize", "--no-gc"]])
def test_a_trainer_s_collector_is_as_before_after_its_first_step_and_in_its_workers(
    options: list[str], tmp_path: Path
) -> None:
    found = "THRESHOLDS, TOLD = __main__.real(), gc.get_threshold()"
    (tmp_path / "site-packages").mkdir()
    script(tmp_path, f"import gc, __main__, own\n{found}", "site-packages/library.py")
    script(tmp_path, f"import gc, __main__, csv\n{found}", "own.py")
    done = python(tmp_path, "-m", "initopt.run", *options, script(tmp_path, TRAINER))
    assert done.returncode == 0 and without_ours(done.stderr) == "", done.stderr
    worker, own = done.stdout.splitlines()
    shown, whole, frozen = own.rsplit(" ", 2)
    imported, told_then, in_own, since, _, started, trained = ast.literal_eval(shown)
    assert (whole, frozen) == ("True", "0")
    young, middle, old = DEFAULT
    ours = options == ["--optimize"]
    assert imported == ((WHILE_IMPORTING, middle, old) if ours else DEFAULT)
    assert started == ((young, middle, OLD) if ours else DEFAULT)
    assert told_then == in_own == since == trained == ast.literal_eval(worker) == DEFAULT
    told = [one for one in Run.latest(tmp_path / ".initopt").optimized if one.name == "gc"]
    assert [one.applied for one in told] == [ours]


def test_what_was_imported_counts_as_old_and_what_was_dropped_before_is_gone() -> None:
    class Node:
        pass

    collector, _ = garbage()
    gc.disable()
    dropped = Node()
    dropped.itself = dropped  # type: ignore[attr-defined]
    gone = weakref.ref(dropped)
    del dropped
    gc.enable()
    collector.outermost_import(True)
    assert gone() is None
    kept = Node()
    collector.outermost_import(False)
    assert any(one is kept for one in gc.get_objects(2))
    assert gc.get_freeze_count() == 0


def test_what_the_script_has_frozen_stays_so() -> None:
    collector, _ = garbage()
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        collector.outermost_import(True)
        collector.outermost_import(False)
        # Some of it may be gone meanwhile.
        assert frozen * 0.9 < gc.get_freeze_count() <= frozen
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("inside", [True, False])
def test_what_the_script_sets_stays(inside: bool) -> None:
    collector, said = garbage()
    collector.outermost_import(True)
    if not inside:
        collector.outermost_import(False)
    gc.set_threshold(5, 6, 7)
    now = real()
    collector.outermost_import(not inside)
    collector.imports_ended()
    collector.end()
    assert real() == now
    assert [(one.applied, one.text) for one in said.all] == [  # type: ignore[union-attr]
        (False, f"the script has set the collector's thresholds to {now}")
    ]


def test_a_script_that_runs_while_it_is_imported_is_not_imports_any_more() -> None:
    collector, said = garbage()
    collector.outermost_import(True)
    collector.imports_ended()
    young, middle, _ = DEFAULT
    assert real() == (young, middle, OLD)
    collector.outermost_import(False)
    collector.outermost_import(True)
    assert real() == (young, middle, OLD)
    collector.end()
    assert real() == DEFAULT
    assert [one.applied for one in said.all] == [True]  # type: ignore[union-attr]


@pytest.mark.parametrize("how", ["off", "never", "rarely"])
def test_a_collector_that_was_set_up_before_is_left_alone(how: str) -> None:
    {"off": gc.disable, "never": lambda: gc.set_threshold(0), "rarely": lambda: gc.set_threshold(10**6)}[how]()
    before = real(), gc.isenabled()
    collector, said = garbage()
    collector.outermost_import(True)
    assert (real(), gc.isenabled()) == before
    collector.imports_ended()
    collector.end()
    assert (real(), gc.isenabled()) == before
    (told,) = said.all
    assert "before the script began" in told.text


def _thresholds(out: multiprocessing.SimpleQueue[str]) -> None:
    out.put(json.dumps(real()))


def test_a_process_that_is_forked_meanwhile_has_them_as_before() -> None:
    collector, _ = garbage()
    collector.outermost_import(True)
    context = multiprocessing.get_context("fork")
    out = context.SimpleQueue()
    child = context.Process(target=_thresholds, args=(out,))
    child.start()
    assert tuple(json.loads(out.get())) == DEFAULT
    child.join(10)
    assert child.exitcode == 0
    assert real()[0] == WHILE_IMPORTING
    collector.end()
    assert real() == DEFAULT


def test_thresholds_are_given_back_once_and_only_if_they_are_still_ours() -> None:
    ours = Thresholds()
    assert ours.set(9, 8, 7) and ours.give_back() and real() == DEFAULT
    assert ours.set(9, 8, 7)
    gc.set_threshold(3, 8, 7)
    assert not ours.give_back() and not ours.set(1, 1, 1) and real()[0] == 3


def test_what_a_module_does_with_the_thresholds_that_it_finds_is_what_it_would_have_done() -> None:
    ours = Thresholds()
    assert ours.set(9, 8, 7) and real() != DEFAULT
    kept = gc.get_threshold
    assert kept() == DEFAULT
    gc.set_threshold(*(2 * one for one in kept()))
    now = real()
    assert now == kept() and not ours.give_back() and real() == now
    assert gc.get_threshold is real
