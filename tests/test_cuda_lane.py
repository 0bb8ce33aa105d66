"""The lanes `cuda:<n>` against a stand-in for the accelerator that writes down what it is told."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from initopt import Startup, StartupFailed
from initopt.plugins import cuda

BEGIN = ["device 1", "current of cuda:1", "new on cuda:1", "side waits for default", "set side"]
END = ["side synchronized", "set default", "device 0"]


class Accelerator:
    """Two devices; `log` has every call, `fails` names the one that raises."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.fails = ""
        self.available = True

    def note(self, text: str) -> None:
        self.log.append(text)
        if text == self.fails:
            raise RuntimeError(f"no {text}")

    def current_accelerator(self) -> torch.device | None:
        return torch.device("cuda") if self.available else None

    def is_available(self) -> bool:
        return self.available

    def device_count(self) -> int:
        return 2

    def current_device_index(self) -> int:
        return 0

    def set_device_index(self, index: int) -> None:
        self.note(f"device {index}")

    def current_stream(self, device: torch.device) -> Any:
        self.note(f"current of {device}")
        return SimpleNamespace(name="default")

    def set_stream(self, stream: Any) -> None:
        self.note(f"set {stream.name}")

    def stream(self, *, device: torch.device) -> Any:
        self.note(f"new on {device}")
        return SimpleNamespace(
            name="side",
            wait_stream=lambda other: self.note(f"side waits for {other.name}"),
            synchronize=lambda: self.note("side synchronized"),
        )


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Accelerator:
    stub = Accelerator()
    monkeypatch.setenv("INITOPT_ROOT", str(tmp_path))
    monkeypatch.setattr(torch, "accelerator", stub)
    monkeypatch.setattr(torch, "Stream", stub.stream)
    return stub


@pytest.mark.parametrize("overlap", [True, False])
def test_a_step_runs_on_a_side_stream_of_its_device(accelerator: Accelerator, overlap: bool) -> None:
    start = Startup("job")
    start.step(lambda: accelerator.note("step"), name="shard", lane="cuda:1")
    start.run(overlap=overlap)
    assert accelerator.log == [*BEGIN, "step", *END]


def test_the_stream_is_synchronised_after_an_error_too(accelerator: Accelerator) -> None:
    with pytest.raises(KeyError), cuda.side_stream(1):
        raise KeyError
    assert accelerator.log == [*BEGIN, *END]


def test_stream_and_device_are_put_back_when_the_work_failed(accelerator: Accelerator) -> None:
    accelerator.fails = "side synchronized"
    with pytest.raises(RuntimeError, match="no side synchronized"), cuda.side_stream(1):
        pass
    assert accelerator.log[-2:] == ["set default", "device 0"]


def test_the_device_is_put_back_when_there_is_no_stream(accelerator: Accelerator) -> None:
    accelerator.fails = "new on cuda:1"
    with pytest.raises(RuntimeError, match="no new on"), cuda.side_stream(1):
        pytest.fail("the block must not run")
    assert accelerator.log[-1] == "device 0"


def test_no_accelerator(accelerator: Accelerator) -> None:
    accelerator.available = False
    start = Startup("job")
    start.step(lambda: accelerator.note("step"), name="shard", lane="cuda:0")
    with pytest.raises(StartupFailed, match="in step 'shard'") as caught:
        start.run()
    assert str(caught.value.exceptions[0]).startswith(
        "lane 'cuda:0' needs an accelerator, and torch sees none on this host"
    )
    assert accelerator.log == []


def test_a_device_that_is_not_there(accelerator: Accelerator) -> None:
    text = "lane 'cuda:2' names a device that this host lacks: torch sees 2"
    with pytest.raises(RuntimeError, match=text), cuda.side_stream(2):
        pytest.fail("the block must not run")
    assert accelerator.log == []


@pytest.mark.parametrize("lane", ["main", "comms", "io:cuda", "process:a"])
def test_other_lanes_are_not_its_own(lane: str) -> None:
    assert cuda.initopt_lane_context(lane) is None
