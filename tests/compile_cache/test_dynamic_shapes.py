"""What varies is found from Dynamo, survives as JSON, and leaves nothing to recompile when it is applied."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import clear_compilation_metrics, counters

from initopt.compile_cache.dynamic_shapes import DynamicSources, Varying, applied, found, versions, watch

LENGTHS, VALUES = "L['features'].lengths", "L['features'].values"


class Weighted(nn.Module):
    """A sparse part: values of rows, each weighted."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.ones(4))

    def forward(self, features: Any, scale: int = 3) -> torch.Tensor:
        rows = torch.repeat_interleave(features.lengths, output_size=features.values.numel())
        return self.weights[rows % 4] * features.values * scale


def features(rows: int, values: int) -> Any:
    lengths = torch.zeros(rows, dtype=torch.int64)
    lengths[0] = values
    return SimpleNamespace(lengths=lengths, values=torch.ones(values))


def train(sizes: Sequence[tuple[int, int]], dynamic: bool | None = None, scales: Sequence[int] = (3,)) -> int:
    """Compile a new part, without inductor, call it with so many rows and values; return how many graphs that made."""
    before = counters["stats"]["unique_graphs"]
    part = Weighted()
    part.compile(backend="aot_eager", dynamic=dynamic)
    for size in sizes:
        for scale in scales:
            part(features(*size), scale).sum().backward()
    return counters["stats"]["unique_graphs"] - before


SIZES = [(8, 20), (8, 23), (5, 9), (8, 31)]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    clear_compilation_metrics()
    yield
    torch._dynamo.reset()
    clear_compilation_metrics()


def sizes_by_name(sources: DynamicSources) -> dict[tuple[str, int | None], tuple[int, ...]]:
    return {(one.name, one.dim): one.seen for one in sources.varying}


def test_what_varied_is_found_and_applied() -> None:
    assert train(SIZES) == 3
    sources = found()
    assert sizes_by_name(sources).keys() == {(LENGTHS, 0), (VALUES, 0)}
    assert sources.varying[0].frame == "forward" and sources.varying[0].file == __file__
    assert sources.value == f"{LENGTHS}:0,{VALUES}:0"

    torch._dynamo.reset()
    clear_compilation_metrics()
    with applied(sources) as used:
        assert used
        assert train(SIZES) == 1
    # The next start has nothing to find, and keeps what is known.
    assert not found().varying
    assert found(sources).value == sources.value
    torch._dynamo.reset()
    assert train(SIZES) == 3


def test_other_sources_leave_the_recompiles() -> None:
    train(SIZES)
    sources = found()
    torch._dynamo.reset()
    with applied(replace(sources, varying=tuple(one for one in sources.varying if one.name == LENGTHS))):
        assert train(SIZES) == 2


@pytest.mark.parametrize("dynamic", [None, False])
def test_a_watch_finds_it_too_and_all_sizes(dynamic: bool | None) -> None:
    told: list[DynamicSources] = []
    end = watch(told.append)
    train(SIZES, dynamic)
    end()
    assert sizes_by_name(told[-1]).keys() == {(LENGTHS, 0), (VALUES, 0)}
    if dynamic is False:
        assert sizes_by_name(told[-1]) == {(LENGTHS, 0): (5, 8), (VALUES, 0): (9, 20, 23, 31)}
    many = len(told)
    torch._dynamo.reset()
    train([(3, 3), (4, 4)])
    assert len(told) == many
    torch._dynamo.reset()
    with applied(told[-1]):
        assert train(SIZES, dynamic) == 1


def test_without_a_watch_the_reasons_say_it_for_static_shapes() -> None:
    train(SIZES, dynamic=False)
    # The reason names the first guard that failed only: the number of rows is never the one.
    assert (VALUES, 0) in sizes_by_name(found())


def test_a_number_that_varied() -> None:
    assert train([(8, 20)], scales=(3, 4, 5)) == 2
    sources = found()
    assert {(one.name, one.dim) for one in sources.varying} == {("L['scale']", None)}
    assert "scale is a number" in sources.advice()
    torch._dynamo.reset()
    with applied(sources):
        assert train([(8, 20)], scales=(3, 4, 5)) == 1


def test_sizes_that_do_not_vary_are_not_found() -> None:
    train([(8, 20), (8, 20)])
    assert found() == DynamicSources()
    assert found().advice() == "no size varied"


def test_a_size_of_one_remains() -> None:
    train([*SIZES, (1, 12)])
    sources = found()
    assert [one.name for one in sources.remaining] == [LENGTHS]
    assert "features.lengths had a size of 0 or 1, which still compiles anew" in sources.advice()
    torch._dynamo.reset()
    with applied(sources):
        assert train([*SIZES, (1, 12)]) == 2


def test_advice_names_the_part() -> None:
    train(SIZES)
    text = found().advice({"sparse": Weighted()})
    assert f'TORCH_COMPILE_DYNAMIC_SOURCES="{LENGTHS}:0,{VALUES}:0"' in text
    assert "sparse: torch._dynamo.mark_dynamic(features.values, 0)" in text


def test_the_advice_on_marks_is_right() -> None:
    part = Weighted()
    part.compile(backend="aot_eager")
    before = counters["stats"]["unique_graphs"]
    for number, size in enumerate(SIZES):
        batch = features(*size)
        if number == 0:
            torch._dynamo.mark_dynamic(batch.lengths, 0)
            torch._dynamo.mark_dynamic(batch.values, 0)
        part(batch)
    assert counters["stats"]["unique_graphs"] == before + 1


@pytest.mark.parametrize("name", ["a,b", "a b", "a.b", "a+b"])
def test_a_name_that_the_setting_would_cut(name: str) -> None:
    def doubled(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        return inputs[name] * 2

    def run() -> int:
        before = counters["stats"]["unique_graphs"]
        compiled = torch.compile(doubled, backend="aot_eager")
        for rows in (4, 5, 6):
            compiled({name: torch.ones(rows)})
        return counters["stats"]["unique_graphs"] - before

    assert run() == 2
    sources = found()
    torch._dynamo.reset()
    with applied(sources):
        assert run() == 1


def test_the_users_own_setting_stays() -> None:
    sources = DynamicSources((Varying(VALUES, "forward", "f.py", 1, 0),))
    with torch.compiler.config.patch(dynamic_sources="L['x']"):
        with applied(sources):
            assert torch.compiler.config.dynamic_sources == f"L['x'],{VALUES}:0"
        assert torch.compiler.config.dynamic_sources == "L['x']"


def test_sources_of_another_version_are_left_alone() -> None:
    sources = DynamicSources((Varying(VALUES, "forward", "f.py", 1, 0),), {**versions(), "torch": "2.12.0"})
    recorded = r"initopt: the sizes that vary were recorded with torch 2\.12\.0"
    with pytest.warns(UserWarning, match=recorded), applied(sources) as used:
        assert not used and torch.compiler.config.dynamic_sources == ""
    assert found(sources) == DynamicSources()


def test_a_watch_that_fails_costs_the_record_only() -> None:
    def tell(_: DynamicSources) -> None:
        raise OSError("disk full")

    watch(tell)
    with pytest.warns(UserWarning, match=r"no longer recorded \(OSError: disk full\)") as caught:
        assert train(SIZES) == 3
    assert sum("initopt" in str(one.message) for one in caught) == 1


def test_nothing_is_looked_at_where_nothing_compiles() -> None:
    part = Weighted()
    part.compile(backend="aot_eager")
    part(features(8, 20))
    looked: list[DynamicSources] = []
    watch(looked.append, DynamicSources((Varying(VALUES, "forward", "f.py", 1, 0),)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "initopt.compile_cache.dynamic_shapes._Observer.look", lambda self: pytest.fail("looked without a compile")
        )
        part(features(8, 20))
    assert looked == []


CHILD = """
import json, sys
from initopt.compile_cache.dynamic_shapes import DynamicSources, applied
from tests.compile_cache.test_dynamic_shapes import SIZES, train
with applied(DynamicSources.from_data(json.load(sys.stdin))):
    print(train(SIZES, dynamic=False))
"""


def test_a_record_serves_the_next_process() -> None:
    train(SIZES)
    text = json.dumps(found().to_data())
    assert DynamicSources.from_data(json.loads(text)) == found()
    done = subprocess.run([sys.executable, "-c", CHILD], input=text, capture_output=True, text=True, timeout=80)
    assert done.stdout.strip() == "1", done.stderr


ROW = {"name": "L['x']", "frame": "forward", "file": "f.py", "line": 3, "dim": 0, "seen": [4, 8], "small": False}
GOOD = {"initopt": "dynamic sources", "format": 1, "versions": {"torch": "2"}, "varying": [ROW]}


def test_the_good_record_is_read() -> None:
    assert DynamicSources.from_data(GOOD).to_data() == GOOD


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ([], "no record of dynamic sources"),
        ({**GOOD, "initopt": "sharding plan"}, "no record of dynamic sources"),
        ({**GOOD, "format": 2}, "has format 2, this initopt reads format 1"),
        ({**GOOD, "varying": None}, "a list 'varying' of at most"),
        ({**GOOD, "varying": [ROW] * 513}, "a list 'varying' of at most 512"),
        ({**GOOD, "versions": {"torch": 2}}, "has 'versions'"),
        ({**GOOD, "varying": [{"name": "x"}]}, "has dim, file, frame, line, name, seen, small; this is {'name': 'x'}"),
        ({**GOOD, "varying": [{**ROW, "name": 3}]}, "texts and numbers that are not negative"),
        ({**GOOD, "varying": [{**ROW, "dim": -1}]}, "texts and numbers that are not negative"),
        ({**GOOD, "varying": [{**ROW, "dim": True}]}, "texts and numbers that are not negative"),
        ({**GOOD, "varying": [{**ROW, "small": 1}]}, "texts and numbers that are not negative"),
        ({**GOOD, "varying": [{**ROW, "seen": "48"}]}, "texts and numbers that are not negative"),
    ],
)
def test_a_foreign_record_is_refused(data: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        DynamicSources.from_data(data)


def test_an_unknown_torch_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_longer(self: Any) -> None:
        raise AttributeError("module 'torch._dynamo.pgo' has no attribute '_CODE_STATE'")

    monkeypatch.setattr("initopt.compile_cache.dynamic_shapes._Observer._add_frame_state", no_longer)
    with pytest.warns(UserWarning, match="initopt: this torch does not say which sizes vary"):
        assert found() == DynamicSources()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        end = watch(lambda sources: pytest.fail("told"))
    train([(8, 20), (5, 9)])
    end()
