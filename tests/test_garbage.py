"""`gc` of `--optimize`: when the collector's thresholds are raised, when they are as before, and whose they are."""

from __future__ import annotations

import ast
import gc
import json
import multiprocessing
from collections.abc import Iterator
from pathlib import Path

import pytest

from initopt.optimize.garbage import OLD, Garbage
from initopt.runs import Run
from initopt.thresholds import WHILE_IMPORTING, Thresholds
from tests.test_optimize import Said
from tests.test_run import python, script, without_ours

TRAINER = """
import gc, os
shown = [gc.get_threshold()]
import torch
shown.append(gc.get_threshold())
model = torch.nn.Sequential(torch.nn.Linear(2, 1))
shown.append(gc.get_threshold())
optimizer = torch.optim.SGD(model.parameters())
show = lambda _: print(gc.get_threshold(), flush=True)
loader = torch.utils.data.DataLoader(torch.ones(4, 2), num_workers=1, worker_init_fn=show)
for batch in loader:
    model(batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
shown.append(gc.get_threshold())
print(shown, gc.get_freeze_count())
"""
DEFAULT = gc.get_threshold()


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    yield
    gc.set_threshold(*DEFAULT)
    gc.enable()


def garbage() -> tuple[Garbage, Said]:
    said = Said()
    return Garbage(said), said


def test_a_trainer_s_collector_is_as_before_after_its_first_step_and_in_its_workers(tmp_path: Path) -> None:
    done = python(tmp_path, "-m", "initopt.run", "--optimize", script(tmp_path, TRAINER))
    assert done.returncode == 0 and without_ours(done.stderr) == "", done.stderr
    worker, own = done.stdout.splitlines()
    shown = ast.literal_eval(own.rpartition(" ")[0])
    young, middle, _ = DEFAULT
    assert shown == [(WHILE_IMPORTING, middle, OLD)] * 2 + [(young, middle, OLD), DEFAULT]
    assert ast.literal_eval(worker) == DEFAULT
    (said,) = [one for one in Run.latest(tmp_path / ".initopt").optimized if one.name == "gc"]
    assert said.applied and f"times during the imports, at {WHILE_IMPORTING:,} new objects each" in said.text


def test_recorded_only_or_with_the_word_it_stays_as_it_is(tmp_path: Path) -> None:
    name = script(tmp_path, TRAINER.replace(", num_workers=1, worker_init_fn=show", ""))
    for options in ([], ["--optimize", "--no-gc"]):
        done = python(tmp_path, "-m", "initopt.run", *options, name)
        assert ast.literal_eval(done.stdout.rpartition(" ")[0]) == [DEFAULT] * 4


def test_what_the_script_sets_stays() -> None:
    collector, said = garbage()
    collector.begin()
    gc.set_threshold(5, 6, 7)
    collector.imports_ended()
    collector.end()
    assert gc.get_threshold()[:2] == (5, 6)
    assert [(one.applied, one.text) for one in said.all] == [  # type: ignore[union-attr]
        (False, f"the script has set the collector to {gc.get_threshold()}")
    ]


@pytest.mark.parametrize("how", ["off", "never", "rarely"])
def test_a_collector_that_was_set_up_before_is_left_alone(how: str) -> None:
    {"off": gc.disable, "never": lambda: gc.set_threshold(0), "rarely": lambda: gc.set_threshold(10**6)}[how]()
    before = gc.get_threshold(), gc.isenabled()
    collector, said = garbage()
    collector.begin()
    assert (gc.get_threshold(), gc.isenabled()) == before
    collector.imports_ended()
    collector.end()
    assert (gc.get_threshold(), gc.isenabled()) == before
    (told,) = said.all
    assert "before the script began" in told.text


def _thresholds(out: multiprocessing.SimpleQueue[str]) -> None:
    out.put(json.dumps(gc.get_threshold()))


def test_a_process_that_is_forked_meanwhile_has_them_as_before() -> None:
    collector, _ = garbage()
    collector.begin()
    context = multiprocessing.get_context("fork")
    out = context.SimpleQueue()
    child = context.Process(target=_thresholds, args=(out,))
    child.start()
    assert tuple(json.loads(out.get())) == DEFAULT
    child.join(10)
    assert child.exitcode == 0
    assert gc.get_threshold()[0] == WHILE_IMPORTING
    collector.end()
    assert gc.get_threshold() == DEFAULT


def test_thresholds_are_given_back_once_and_only_if_they_are_still_ours() -> None:
    ours = Thresholds()
    assert ours.set(9, 8, 7) and ours.give_back() and gc.get_threshold() == DEFAULT
    assert ours.set(9, 8, 7)
    gc.set_threshold(3, 8, 7)
    assert not ours.give_back() and not ours.set(1, 1, 1) and gc.get_threshold()[0] == 3
