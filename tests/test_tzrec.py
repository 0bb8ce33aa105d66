"""TorchEasyRec's own functions as steps, with a stand-in of the same public surface: the real one is in no index."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from initopt.chain import finished_ranks
from initopt.entry_points import Event, Hooks
from initopt.plugins.tzrec import CALLS
from initopt.runs import Run

ROOT = Path(__file__).parents[1]

# What `tzrec.train_eval` calls and in which order, as in tzrec/main.py of 1.3; what the functions do is made up.
STAND_IN = {
    "__init__": "import torch\n",
    "version": '__version__ = "1.3.16"\n',
    "features.__init__": "",
    "features.feature": "def create_features(configs): return list(configs)\n",
    "datasets.__init__": "",
    "datasets.dataset": """
import torch
from torch.utils.data import DataLoader

def create_dataloader(features):
    loader = DataLoader(torch.arange(24.0).reshape(8, 3), batch_size=2)
    first = iter(loader)
    loader.get_iterator = lambda: first
    return loader
""",
    "utils.__init__": "",
    "utils.plan_util": "def create_planner(model): return object()\n",
    "utils.dist_util": """
class TrainPipeline:
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def progress(self, batches):
        self.optimizer.zero_grad()
        loss = self.model(next(batches)).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.item()

def create_train_pipeline(model, optimizer): return TrainPipeline(model, optimizer)
""",
    "utils.checkpoint_util": """
def restore_model(state, model, optimizer):
    model.load_state_dict(state[0])
    optimizer.load_state_dict(state[1])

class CheckpointManager:
    def restore(self, *state): restore_model(*state)
""",
    "main": """
import copy, itertools, json, sys
import torch
from torch import distributed
from tzrec.datasets.dataset import create_dataloader
from tzrec.features.feature import create_features
from tzrec.utils import checkpoint_util
from tzrec.utils.dist_util import create_train_pipeline
from tzrec.utils.plan_util import create_planner

def train_and_evaluate():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    features = create_features(["a"])
    loader, evaluated = create_dataloader(features), create_dataloader(features)
    manager = checkpoint_util.CheckpointManager()
    torch.manual_seed(1)
    model = torch.nn.Linear(3, 1)
    create_planner(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    pipeline = create_train_pipeline(model, optimizer)
    batches = loader.get_iterator()
    peeked = next(batches)
    pipeline.progress(iter([peeked]))
    manager.restore(saved, model, optimizer)
    batches = itertools.chain([peeked], batches)
    losses = [pipeline.progress(batches) for _ in range(3)]
    named = [create_features, create_dataloader, create_planner, create_train_pipeline, checkpoint_util.restore_model]
    hooked = [function.__name__ for function in named if hasattr(function, "__wrapped__")]
    print(json.dumps({"losses": losses, "hooked": hooked}))
    distributed.destroy_process_group()
""",
    "train_eval": "from tzrec.main import train_and_evaluate\nif __name__ == '__main__':\n    train_and_evaluate()\n",
}


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    for name, text in STAND_IN.items():
        path = tmp_path / "packages" / "tzrec" / f"{name.replace('.', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "packages"


def test_train_eval_untouched(tmp_path: Path, stand_in: Path) -> None:
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{stand_in}"}
    words = [sys.executable, "-m", "initopt.run", "--root", str(tmp_path / "runs"), "-m", "tzrec.train_eval"]
    done = subprocess.run(words, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    # The step before the checkpoint was loaded is taken again, with the same batch.
    assert len(printed["losses"]) == 3
    assert printed["hooked"] == []

    run = Run.latest(tmp_path / "runs")
    assert finished_ranks(run) == [0]
    spans = [span for span in run.of_rank(0) if span.kind == "step"]
    named = [span.name for span in sorted(spans, key=lambda span: span.start) if not span.name.startswith("main.py")]
    wanted = ["features", "loader", "loader", "planner", "pipeline", "thrown_away_step", "restore", "first_step"]
    assert [name for name in named if name in wanted] == wanted
    # Its loads are found as ever: they say that the step before did not count.
    assert [span.step for span in spans if span.name == "checkpoint"] == ["restore", "restore"]
    assert {span.stage for span in spans if span.name == "features"} == {"preproc_creation"}


class Told:
    """Notes which steps a call was."""

    def __init__(self) -> None:
        self.steps: list[str] = []

    def here(self) -> bool:
        return True

    def around(self, event: Event, arguments: tuple[Any, ...]) -> AbstractContextManager[None]:
        return nullcontext()

    def named(self, step: str, stage: str) -> AbstractContextManager[None]:
        self.steps.append(step)
        return nullcontext()

    def instead(self, event: Event, function: Callable[..., Any]) -> Callable[..., Any]:
        return function

    def becomes_rank(self) -> bool:
        return False

    def optimizer_stepped(self, optimizer: Any) -> None: ...

    def module_put_in(self) -> None: ...


@pytest.fixture
def tzrec(stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(stand_in))
    yield importlib.import_module("tzrec.version")
    for name in [name for name in sys.modules if name.partition(".")[0] == "tzrec"]:
        del sys.modules[name]


@pytest.mark.parametrize(("version", "known"), [("1.3.0", True), ("1.4.0", False)])
def test_a_version_that_is_not_known_is_left_alone(tzrec: ModuleType, version: str, known: bool) -> None:
    tzrec.__version__ = version  # type: ignore[attr-defined]
    told = Told()
    hooks = Hooks(told)
    try:
        for name in ("torch", *(call.module for call in CALLS)):
            hooks.imported(importlib.import_module(name).__name__)
        sys.modules["tzrec.features.feature"].create_features([])
        assert told.steps == (["features"] if known else [])
        assert hooks.unknown == ({} if known else {"tzrec": "1.4.0"})
    finally:
        hooks.take_out()
    assert not hasattr(sys.modules["tzrec.features.feature"].create_features, "__wrapped__")
