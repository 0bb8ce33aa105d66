"""What ranks compare before meetings are left out: each difference changes the text, nothing else does."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from initopt.comm_elim import assumed
from initopt.comm_elim.assumed import Dense


class Taken(nn.Linear):
    pass


class Sharder:
    module_type = Taken


def model(seed: int = 0, **changes: Any) -> nn.Module:
    torch.manual_seed(seed)
    made = nn.ModuleDict({"table": Taken(3, 2), "over": nn.Linear(**{"in_features": 2, "out_features": 1, **changes})})
    made["short"] = nn.Linear(2, 2, dtype=torch.bfloat16)
    made["scale"] = nn.ParameterList([nn.Parameter(torch.tensor(1.0))])
    return made


def test_values_of_dense_parameters_are_told_apart() -> None:
    one = Dense(model(), [Sharder()])
    assert (one.forms(), one.values()) == ((same := Dense(model(), [Sharder()])).forms(), same.values())
    assert Dense(model(1), [Sharder()]).values() != one.values()
    assert Dense(model(1), [Sharder()]).forms() == one.forms()
    assert "table" not in one.forms() and "scale.0: () torch.float32" in one.forms()


@pytest.mark.parametrize(
    "changes", [{"out_features": 3}, {"dtype": torch.float64}, {"bias": False}, {"device": "meta"}]
)
def test_forms_of_dense_parameters_are_told_apart(changes: Any) -> None:
    assert Dense(model(**changes), [Sharder()]).forms() != Dense(model(), [Sharder()]).forms()


def test_only_what_was_seen_is_covered() -> None:
    made = model(device="meta")
    dense = Dense(made, [Sharder()])
    named = dict(made.named_parameters())
    short = {name: one for name, one in named.items() if name.startswith("short")}
    assert dense.covers(short)
    assert not dense.covers({}) and not dense.covers(named)
    assert not dense.covers({"over.weight": named["over.weight"]})


@pytest.mark.parametrize(
    ("write", "changed"),
    [
        (lambda one: None, False),
        (lambda one: one.add_(1), True),
        # Written to, and the same as before; or elsewhere, with the same values.
        (lambda one: one.mul_(1), False),
        (lambda one: setattr(one, "data", one.data.clone()), False),
        (lambda one: setattr(one, "data", one.data + 1), True),
    ],
)
def test_a_write_is_noticed(write: Callable[[torch.Tensor], Any], changed: bool) -> None:
    made = model()
    dense = Dense(made, [Sharder()])
    with torch.no_grad():
        write(made["over"].weight)
    named = {name: one for name, one in made.named_parameters() if not name.startswith("table")}
    assert list(dense.changed(named)) == (["over.weight"] if changed else [])


def test_many_parameters_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    made = model()
    monkeypatch.setattr(assumed, "MOST", 10)
    dense = Dense(made, [Sharder()])
    assert dense.values() == "" and "too large to compare" in dense.forms()
    assert not dense.covers({"over.weight": made["over"].weight})


def test_variables_that_steer_a_start_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    before = assumed.environment()
    monkeypatch.setenv("TORCHREC_RESOLVED_POD_SIZE", "2")
    assert "TORCHREC_RESOLVED_POD_SIZE=2" in assumed.environment()
    monkeypatch.delenv("TORCHREC_RESOLVED_POD_SIZE")
    monkeypatch.setenv("RANK", "3")
    assert assumed.environment() == before


def test_versions_and_files_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = assumed.versions(model())
    assert f"torch {torch.__version__}" in text and "the model's file has sha256 " in text
    monkeypatch.setattr(torch, "__version__", "0.1")
    assert "torch 0.1" in assumed.versions(model())
    monkeypatch.undo()

    edited = tmp_path / "container.py"
    edited.write_text("# edited")
    monkeypatch.setattr(sys.modules[nn.ModuleDict.__module__], "__file__", str(edited))
    assert assumed.versions(model()) != text


def test_a_parameter_of_a_lazy_module_has_no_shape_yet() -> None:
    """It gets one with the first batch, after which a script calls `init_data_parallel` itself."""
    made = nn.ModuleDict({"late": nn.LazyLinear(1), "over": nn.Linear(2, 1)})
    dense = Dense(made, [])
    assert dense.forms().startswith("late.weight: a shape that is not known yet\nlate.bias: ")
    assert dense.shapes().startswith("number 0 has a shape that is not known yet\n")
    assert not dense.covers(dict(made.named_parameters()))
