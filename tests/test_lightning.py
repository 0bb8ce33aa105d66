"""The Lightning callback, with the library itself: names for what it calls, an end with the first optimizer step."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from initopt import Recorder, Run, Span
from initopt.chain import finished_ranks
from initopt.plugins.lightning import StartUp

pytestmark = [
    # Lightning asks torch's pytree in the old way.
    pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated:FutureWarning"),
    # What Lightning says of so small a job.
    pytest.mark.filterwarnings(r"ignore:The '\w+_dataloader' does not have many workers:UserWarning"),
]


class Module(pl.LightningModule):
    """Keeps its losses."""

    def __init__(self, recorder: Recorder | None, *, steps: bool = True, broken: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = torch.nn.Linear(3, 1)
        self.recorder, self.broken, self.trained = recorder, broken, list[tuple[float, float]]()
        self.automatic_optimization = steps

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        if self.broken:
            raise KeyError("a broken row")
        loss = self.layer(batch).square().mean()
        if self.recorder is not None:
            self.trained.append((self.recorder.now(), loss.item()))
        return loss

    def validation_step(self, batch: torch.Tensor, number: int) -> None:
        self.layer(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def train_dataloader(self) -> Any:
        return DataLoader(torch.arange(24.0).reshape(8, 3), batch_size=2)

    def val_dataloader(self) -> Any:
        return self.train_dataloader()


def fit(module: Module, *callbacks: Any, **about: Any) -> None:
    quiet = {name: False for name in ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")}
    pl.Trainer(accelerator="cpu", devices=1, max_epochs=1, callbacks=list(callbacks), **quiet, **about).fit(module)


def spans(recorder: Recorder) -> list[Span]:
    assert recorder.path is not None
    return [span for span in Run.load(recorder.path).of_rank(0) if span.kind == "step"]


def test_the_steps_of_a_start_up(tmp_path: Path) -> None:
    with Recorder("lit", mode="stock", root=tmp_path) as recorder:
        module = Module(recorder)
        fit(module, StartUp(), accumulate_grad_batches=2)
    found = spans(recorder)
    assert [span.name for span in found] == ["setup", "sanity_check", "train_loader", "first_batch", "first_step"]
    assert {span.error for span in found} == {""}
    # The optimizer steps after the second batch.
    first, second, third = (module.trained[number][0] for number in (0, 1, 2))
    assert found[-2].end <= found[-1].start <= first
    assert second <= found[-1].end <= third
    assert finished_ranks(Run.latest(tmp_path)) == [0]

    stock = Module(recorder)
    fit(stock, accumulate_grad_batches=2)
    assert [loss for _, loss in module.trained] == [loss for _, loss in stock.trained]
    assert torch.equal(module.layer.weight, stock.layer.weight)


def test_without_a_sanity_check_and_with_a_failure(tmp_path: Path) -> None:
    with Recorder("lit", mode="stock", root=tmp_path) as recorder, pytest.raises(KeyError, match="a broken row"):
        fit(Module(None, broken=True), StartUp(), num_sanity_val_steps=0)
    assert [(span.name, span.error) for span in spans(recorder)] == [
        ("setup", ""),
        ("train_loader", ""),
        ("first_batch", ""),
        ("first_step", "KeyError"),
    ]
    assert finished_ranks(Run.latest(tmp_path)) == []


def test_training_without_an_optimizer_s_step_does_not_end_the_start_up(tmp_path: Path) -> None:
    with Recorder("lit", mode="stock", root=tmp_path) as recorder:
        fit(Module(None, steps=False), StartUp(), limit_val_batches=0)
    assert [(span.name, span.error) for span in spans(recorder)][-1] == ("first_step", "NoOptimizerStep")
    assert finished_ranks(Run.latest(tmp_path)) == []


def test_it_reaches_ranks_that_are_spawned() -> None:
    callback = pickle.loads(pickle.dumps(StartUp()))
    assert isinstance(callback, StartUp) and isinstance(callback, pl.Callback)


def test_another_version_is_left_alone_with_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(StartUp()), "_version", "3.0.0")
    with Recorder("lit", mode="stock", root=tmp_path) as recorder:
        unknown = r"initopt: Lightning 3\.0\.0 is not known.*use 2\.5\.x or 2\.6\.x"
        with pytest.warns(UserWarning, match=unknown) as warned:
            callback = StartUp()
        fit(Module(None), callback)
        recorder.note("not empty", step="")
    assert [(len(warned), warned[0].filename)] == [(1, __file__)]
    assert spans(recorder) == []
