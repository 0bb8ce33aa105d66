"""Recorded winners leave fewer choices to inductor's autotuning, where they are known to be right, and nowhere else."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor import select_algorithm

from initopt.compile_cache.autotune import AGAIN, CLOSE, Kernel, Tuned, Tuning, Winners, device, pruned, versions


@dataclass(eq=False)
class Node:
    size: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    def get_size(self) -> tuple[int, ...]:
        return self.size

    def get_stride(self) -> tuple[int, ...]:
        return tuple(torch.empty(self.size, device="meta").stride())

    def get_dtype(self) -> torch.dtype:
        return self.dtype


@dataclass(eq=False)
class Layout:
    size: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def stride(self) -> tuple[int, ...]:
        return tuple(torch.empty(self.size, device="meta").stride())


@dataclass(eq=False)
class Choice:
    """As inductor describes a choice; the number in the name differs from kernel to kernel."""

    name: str
    description: str
    input_nodes: list[Node]
    layout: Layout
    annotations: dict[Any, Any] = field(default_factory=dict)


def choices(*blocks: int, rows: int = 128, numbers: int = 0, dtype: torch.dtype = torch.float32) -> list[Choice]:
    """A matrix product of so many rows, by templates of these block sizes."""
    nodes, layout = [Node((rows, 64), dtype), Node((64, 32), dtype)], Layout((rows, 32), dtype)
    return [Choice(f"triton_mm_{numbers + i}", f"BLOCK={size}", nodes, layout) for i, size in enumerate(blocks)]


def text(block: int) -> str:
    return f"triton_mm(BLOCK={block})"


def tune(tuning: Tuning, offered: list[Choice], **milliseconds: float) -> list[str]:
    """What inductor does with choices: ask which, time those (by block), tell. Returns which."""
    kept = tuning.choose(offered)
    if len(kept) > 1:
        times = {choice: milliseconds[choice.description.replace("BLOCK=", "b")] for choice in kept}
        tuning.timed(times, "mm", [], kept, None, {})
    return [choice.description.removeprefix("BLOCK=") for choice in kept]


def started(winners: Winners | None, top: int = 3) -> Tuning:
    with pruned(winners, top=top) as tuning:
        return tuning


TIMES = {"b16": 5.0, "b32": 1.0, "b64": 1.05, "b128": 2.0}


@pytest.fixture
def recorded() -> Winners:
    tuning = started(None)
    assert tune(tuning, choices(16, 32, 64, 128), **TIMES) == ["16", "32", "64", "128"]
    # Not within the start itself.
    assert tune(tuning, choices(16, 32, 64, 128, rows=96), **TIMES) == ["16", "32", "64", "128"]
    return tuning.winners()


def test_close_choices_are_tried_again(recorded: Winners) -> None:
    (kernel,) = recorded.kernels.values()
    assert kernel.winner == text(32) and kernel.ratios[text(16)] == 5 and kernel.starts == 0
    assert kernel.ratios[text(64)] <= CLOSE
    tuning = started(recorded)
    assert tune(tuning, choices(16, 32, 64, 128, numbers=70), **TIMES) == ["32", "64"]
    assert tune(started(recorded, top=1), choices(16, 32, 64, 128), **TIMES) == ["32"]
    (tuned,) = tuning.tuned
    assert (tuned.choices, tuned.tried, tuned.winner, tuned.loss) == (4, 2, text(32), None)


@pytest.mark.parametrize(
    "other",
    [
        choices(16, 32, 64, 128, rows=129),
        choices(16, 32, 64, 128, rows=120),
        choices(16, 32, 64, 128, dtype=torch.bfloat16),
        [replace(choice, name="triton_bmm_1") for choice in choices(16, 32, 64, 128)],
        [replace(choice, layout=Layout((128, 32), device=torch.device("meta"))) for choice in choices(16, 32, 64, 128)],
    ],
    ids=["another class", "other divisors", "dtype", "operation", "device"],
)
def test_another_class_is_tuned_in_full(recorded: Winners, other: list[Choice]) -> None:
    assert started(recorded).choose(other) is other


def test_the_same_class_is_not(recorded: Winners) -> None:
    assert len(started(recorded).choose(choices(16, 32, 64, 128, rows=96))) == 2


def test_a_winner_that_is_gone_means_all_choices(recorded: Winners) -> None:
    assert tune(started(recorded), choices(16, 64, 128), **TIMES) == ["16", "64", "128"]


def test_what_was_close_in_one_shape_stays(recorded: Winners) -> None:
    tuning = started(recorded)
    tune(tuning, choices(16, 32, 64, 128, rows=96), b32=3.0, b64=1.0)
    after = tuning.winners()
    (kernel,) = after.kernels.values()
    assert kernel.winner == text(64) and kernel.ratios[text(32)] == 1 and kernel.ratios[text(128)] == 2
    assert kernel.starts == 1
    assert tune(started(after), choices(16, 32, 64, 128), **TIMES) == ["32", "64"]


def test_after_some_starts_all_are_tried_again(recorded: Winners) -> None:
    winners = recorded
    for _ in range(AGAIN):
        tuning = started(winners)
        assert len(tune(tuning, choices(16, 32, 64, 128), **TIMES)) == 2
        winners = Winners.from_data(json.loads(json.dumps(tuning.winners().to_data())))
    tuning = started(winners)
    # Now another one is the fastest, and the record is wrong by half.
    assert tune(tuning, choices(16, 32, 64, 128), b16=1.0, b32=1.5, b64=9.0, b128=9.0) == ["16", "32", "64", "128"]
    (tuned,) = tuning.tuned
    assert tuned.loss == pytest.approx(0.5) and "the recorded choice is 50% slower" in tuned.line
    assert tune(started(tuning.winners()), choices(16, 32, 64, 128), **TIMES) == ["16"]


def test_a_start_that_does_not_use_a_kernel_does_not_count(recorded: Winners) -> None:
    assert [kernel.starts for kernel in started(recorded).winners().kernels.values()] == [0]


@pytest.mark.parametrize("other", [{"versions": {**versions(), "torch": "2.12.0"}}, {"device": "another"}])
def test_winners_from_elsewhere_are_not_used(recorded: Winners, other: dict[str, Any]) -> None:
    tuning = started(replace(recorded, **other))
    assert len(tuning.choose(choices(16, 32, 64, 128))) == 4
    assert not tuning.winners().kernels and tuning.winners().device == device()


def test_failed_choices_are_no_winners() -> None:
    tuning = started(None)
    tune(tuning, choices(16, 32), b16=float("inf"), b32=2.0)
    (kernel,) = tuning.winners().kernels.values()
    assert kernel.ratios == {text(32): 1.0}
    assert tune(started(tuning.winners()), choices(16, 32), b16=1.0, b32=1.0) == ["32"]


def test_choices_that_are_not_understood_are_left_to_torch(recorded: Winners) -> None:
    tuning = started(recorded)
    strange: list[Any] = [object(), object()]
    with pytest.warns(UserWarning, match=r"initopt: autotuning is left to torch .* \(AttributeError"):
        assert tuning.choose(strange) is strange
    # Said once.
    assert tuning.choose(strange) is strange


def test_others_hooks_stay() -> None:
    def other(offered: list[Any]) -> list[Any]:
        return offered

    selector = select_algorithm.get_algorithm_selector_cache()
    before = list(selector.preprocessing_fns), list(selector.feedback_saver_fns)
    with pruned():
        select_algorithm.add_preprocessing_fn(other)
        assert len(selector.feedback_saver_fns) == len(before[1]) + 1
    assert (selector.preprocessing_fns, selector.feedback_saver_fns) == ([*before[0], other], before[1])
    selector.preprocessing_fns.remove(other)


def test_an_unknown_torch_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(select_algorithm, "get_algorithm_selector_cache")
    with pytest.warns(UserWarning, match="initopt: autotuning is left to this torch, which is unknown"), pruned():
        pass


def test_no_choice_is_no_top() -> None:
    with pytest.raises(ValueError, match="top=0: at least one choice has to be tried"):
        started(None, top=0)


KERNEL = {"ratios": {"a": 1.0, "b": 2.5}, "winner": "a", "seconds": 3.0, "starts": 2}
GOOD = {
    "initopt": "autotune winners",
    "format": 1,
    "kernels": {"mm": KERNEL},
    "device": "cpu",
    "versions": {"torch": "2"},
}


def test_the_good_record_is_read() -> None:
    assert Winners.from_data(GOOD).to_data() == GOOD
    assert Winners.from_data(GOOD).kernels == {"mm": Kernel({"a": 1.0, "b": 2.5}, "a", 3.0, 2)}


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (None, "no record of autotune winners"),
        ({**GOOD, "initopt": "dynamic sources"}, "no record of autotune winners"),
        ({**GOOD, "format": "1"}, "has format '1', this initopt reads format 1"),
        ({**GOOD, "kernels": []}, "at most 1024 kernels"),
        ({**GOOD, "kernels": {str(i): KERNEL for i in range(1025)}}, "at most 1024 kernels"),
        ({**GOOD, "device": 0}, "has versions, a device"),
        ({**GOOD, "kernels": {"mm": {}}}, "kernel 'mm' has not ratios, winner, seconds and starts"),
        ({**GOOD, "kernels": {"mm": {**KERNEL, "winner": "c"}}}, "kernel 'mm' has ratios from 1 on"),
        ({**GOOD, "kernels": {"mm": {**KERNEL, "ratios": {"a": 0.5}}}}, "kernel 'mm' has ratios from 1 on"),
        ({**GOOD, "kernels": {"mm": {**KERNEL, "seconds": float("nan")}}}, "kernel 'mm' has ratios from 1 on"),
        ({**GOOD, "kernels": {"mm": {**KERNEL, "starts": -1}}}, "kernel 'mm' has ratios from 1 on"),
    ],
)
def test_a_foreign_record_is_refused(data: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Winners.from_data(data)


def test_a_line_for_the_report() -> None:
    assert Tuned("mm", 20, 3, 1.5, "a", 9.0).line == "mm: 3 of 20 choices in 1.50 s, a, ~7.50 s saved"
    assert Tuned("mm", 2, 2, 1.5, "a", 1.5).line == "mm: 2 of 2 choices in 1.50 s, a"


@pytest.fixture(scope="session")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The cache folder of the tests that compile for real: one, so that what it costs to start is paid once."""
    yield tmp_path_factory.mktemp("autotune")


CHILD = """
import json, sys
from dataclasses import asdict
import torch
from initopt.compile_cache.autotune import Winners, pruned
known = json.load(sys.stdin)
with pruned(Winners.from_data(known) if known else None) as tuning:
    x, y = torch.ones(4, 8, int(sys.argv[1])), torch.ones(4, int(sys.argv[1]), 8)
    options = {"max_autotune": True, "max_autotune_gemm_backends": "CPP,ATEN"}
    torch.compile(torch.bmm, options=options, dynamic=False)(x, y)
print(json.dumps([tuning.winners().to_data(), [asdict(one) for one in tuning.tuned]]))
"""


def real_start(size: int, known: Any, cache: Path) -> tuple[Any, Any]:
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), "TMPDIR": str(cache), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", CHILD, str(size)]
    done = subprocess.run(command, input=json.dumps(known), env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    winners, tuned = json.loads(done.stdout.splitlines()[-1])
    return winners, tuned


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.skipif(importlib.metadata.version("torch") < "2.13", reason="the choices of torch 2.13 are looked at")
def test_inductor_tries_what_is_recorded(real: Path) -> None:
    winners, (first,) = real_start(128, None, real)
    assert (first["choices"], first["tried"]) == (2, 2) and first["seconds"] > 0
    (kernel,) = winners["kernels"].values()
    slowest = max(kernel["ratios"].values())
    # Another shape of the class. Which of two is faster is the machine's, so whether both are close is, too.
    _, (second,) = real_start(96, winners, real)
    assert second["kernel"] == first["kernel"]
    assert second["tried"] == (1 if slowest > CLOSE else 2)
