"""The torchtnt callback, with the library itself: names for what it calls, an end with the first step, nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torchtnt
from torch.utils.data import DataLoader
from torchtnt.framework.auto_unit import AutoUnit
from torchtnt.framework.fit import fit
from torchtnt.framework.unit import EvalUnit, TrainUnit

from initopt import Recorder, Run, Span
from initopt.chain import finished_ranks
from initopt.plugins.torchtnt import StartUp

LOADER = DataLoader(torch.arange(24.0).reshape(8, 3), batch_size=2)


class Accumulates(AutoUnit[torch.Tensor]):
    """Updates its weights after every second batch."""

    def __init__(self, recorder: Recorder | None) -> None:
        torch.manual_seed(1)
        super().__init__(module=torch.nn.Linear(3, 1), device=torch.device("cpu"), gradient_accumulation_steps=2)
        self.trained: list[tuple[float, float]] = []
        self.recorder = recorder

    def configure_optimizers_and_lr_scheduler(self, module: torch.nn.Module) -> tuple[Any, None]:
        return torch.optim.SGD(module.parameters(), lr=0.01), None

    def compute_loss(self, state: Any, data: torch.Tensor) -> tuple[torch.Tensor, Any]:
        loss = self.module(data).square().mean()
        if self.recorder is not None and self.module.training:
            self.trained.append((self.recorder.now(), loss.item()))
        return loss, None


class Fails(TrainUnit[Iterator[torch.Tensor]], EvalUnit[Iterator[torch.Tensor]]):
    """Its first batch is broken."""

    def train_step(self, state: Any, data: Any) -> None:
        raise KeyError("a broken row")

    def eval_step(self, state: Any, data: Any) -> None: ...


def train(unit: Any, *callbacks: Any) -> None:
    fit(unit, LOADER, LOADER, max_epochs=2, evaluate_every_n_steps=1, callbacks=list(callbacks))


def spans(recorder: Recorder) -> list[Span]:
    assert recorder.path is not None
    return [span for span in Run.load(recorder.path).of_rank(0) if span.kind == "step"]


def test_the_steps_of_a_start_up(tmp_path: Path) -> None:
    with Recorder("tnt", mode="stock", root=tmp_path) as recorder:
        unit = Accumulates(recorder)
        train(unit, StartUp())
    first_batch, first_step = found = spans(recorder)
    assert [(span.name, span.error) for span in found] == [("first_batch", ""), ("first_step", "")]
    # The weights are updated after the second batch, and evaluations after each are none of training's.
    second, third = (unit.trained[number][0] for number in (1, 2))
    assert first_batch.end <= first_step.start <= unit.trained[0][0]
    assert second <= first_step.end <= third
    assert finished_ranks(Run.latest(tmp_path)) == [0]

    stock = Accumulates(recorder)
    train(stock)
    assert [loss for _, loss in unit.trained] == [loss for _, loss in stock.trained]
    assert torch.equal(unit.module.weight, stock.module.weight)


def test_a_failure_is_the_trainer_s_own(tmp_path: Path) -> None:
    with Recorder("tnt", mode="stock", root=tmp_path) as recorder, pytest.raises(KeyError, match="a broken row"):
        train(Fails(), StartUp())
    assert [(span.name, span.error) for span in spans(recorder)] == [("first_batch", ""), ("first_step", "KeyError")]
    assert finished_ranks(Run.latest(tmp_path)) == []


def test_another_version_is_left_alone_with_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchtnt, "__version__", "0.3.0")
    said = r"initopt: torchtnt 0\.3\.0 is not known.*use 0\.2\.4, or leave the callback out"
    with Recorder("tnt", mode="stock", root=tmp_path) as recorder:
        with pytest.warns(UserWarning, match=said) as warned:
            callback = StartUp()
        train(Accumulates(None), callback)
        recorder.note("not empty", step="")
    assert [(len(warned), warned[0].filename)] == [(1, __file__)]
    assert spans(recorder) == []
