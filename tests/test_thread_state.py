"""What a step sees of its thread is what the caller of `run` had set, on every lane and without overlap."""

from __future__ import annotations

import contextvars
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from initopt import Startup

VARIABLE: contextvars.ContextVar[int] = contextvars.ContextVar("VARIABLE", default=0)


@pytest.fixture(autouse=True)
def _root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INITOPT_ROOT", str(tmp_path))


def seen() -> dict[str, Any]:
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "dtype": torch.get_autocast_dtype("cpu"),
        "device": str(torch.empty(1).device),
        "variable": VARIABLE.get(),
    }


def on_a_lane(*, overlap: bool = True, uses: str = "") -> dict[str, Any]:
    start = Startup("job")
    start.step(seen, lane="io:a", uses=[uses] if uses else [])
    found: dict[str, Any] = start.run(overlap=overlap).seen
    return found


@pytest.mark.parametrize("how", [{}, {"overlap": False}, {"uses": "fork"}], ids=["lane", "serial", "fork"])
@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("grad", torch.no_grad),
        ("inference", torch.inference_mode),
        ("autocast", lambda: torch.autocast("cpu", dtype=torch.float16)),
        ("dtype", lambda: torch.autocast("cpu", dtype=torch.float16)),
        ("device", lambda: torch.device("meta")),
    ],
)
def test_a_step_sees_the_callers_setting(
    name: str, setting: Callable[[], AbstractContextManager[object]], how: dict[str, Any]
) -> None:
    plain = on_a_lane(**how)
    with setting():
        expected = seen()
        assert on_a_lane(**how) == expected
    assert expected[name] != plain[name]
    assert on_a_lane(**how) == plain


def test_grad_mode_inside_inference_mode() -> None:
    with torch.inference_mode(), torch.enable_grad():
        assert on_a_lane() == seen()


@pytest.mark.parametrize("overlap", [True, False])
def test_context_variables_go_in_and_stay_in_their_step(overlap: bool) -> None:
    start = Startup("job")
    start.step(lambda: (VARIABLE.get(), VARIABLE.set(9)), name="first", lane="io:a")
    start.step(lambda first: VARIABLE.get(), name="second", lane="io:a")
    token = VARIABLE.set(3)
    try:
        values = start.run(overlap=overlap)
        assert (values.first[0], values.second, VARIABLE.get()) == (3, 3, 3)
    finally:
        VARIABLE.reset(token)


def test_a_failing_step_leaves_the_callers_thread_as_it_was() -> None:
    start = Startup("job")
    start.step(lambda: torch.set_grad_enabled(False), name="off")
    with nullcontext():
        start.run(overlap=False)
    assert torch.is_grad_enabled()


WITHOUT_TORCH = """
import sys, threading
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "numpy"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
if HIDDEN:
    sys.meta_path.insert(0, Missing())
from initopt import Startup
start = Startup("job")
start.step(lambda: 2, name="model", lane="io:a", uses="rng")
start.step(lambda model: model + 1, name="loader", uses=("rng", "fork"), early=True)
start.step(lambda loader: loader + 1, name="plan", lane="process:p")
start.step(lambda plan: plan + 1, name="group", lane="comms")
for overlap in (True, False):
    print(start.run(overlap=overlap).group)
print(threading.active_count(), "torch" in sys.modules)
print(start.report())
"""


@pytest.mark.parametrize("hidden", [True, False])
def test_a_start_up_without_torch(hidden: bool) -> None:
    """It is neither needed nor imported."""
    text = WITHOUT_TORCH.replace("HIDDEN", str(hidden))
    done = subprocess.run([sys.executable, "-W", "error", "-c", text], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[:3] == ["5", "5", "1 False"]
    assert done.stdout.splitlines()[3].startswith("job")
