"""Descriptions: what can't be described or read is refused by its place, and no code of a file's choice runs."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from initopt.compile_cache.schema import Entries, Items, SchemaError, Tensor, from_data, of
from tests.compile_cache.described import Loud, Pair, Sample, Slotted

HERE = "tests.compile_cache.described"


def tensor(**changes: Any) -> dict[str, Any]:
    about = {"shape": [2], "stride": [1], "dtype": "float32", "device": "cpu", "requires_grad": False}
    return {"tensor": {**about, **changes}}


def keyed(**changes: Any) -> dict[str, Any]:
    lengths = tensor(dtype="int64")
    about = {"keys": ["a"], "stride": 2, "per_key": [2], "values": lengths, "lengths": lengths}
    return {"keyed_jagged": {**about, "weights": None, "offsets": None, **changes}}


def instance(path: Any, kind: str = "object", **attributes: Any) -> dict[str, Any]:
    items = [[name, {"constant": value}] for name, value in attributes.items()]
    return {kind: {"class": path, "attributes": items}}


def nested(depth: int) -> Any:
    data: Any = {"constant": 1}
    for _ in range(depth):
        data = {"list": [data]}
    return data


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (tensor(shape=[1 << 40], stride=[1]), "the tensors take more than 8 GiB"),
        (tensor(shape=[2, 2], stride=[1 << 40, 1]), "the tensors take more than 8 GiB"),
        (tensor(shape=[1 << 40], stride=[0]), "the tensors take more than 8 GiB"),
        ({"list": [tensor(shape=[1 << 29], stride=[1])] * 5}, r"\[4\]: the tensors take more than 8 GiB"),
        (tensor(shape=[1] * 33, stride=[1] * 33), "list of at most 32 numbers"),
        (tensor(shape=[-1]), "'-1' is no number"),
        (tensor(shape=[True]), "'True' is no number"),
        (tensor(shape=[1 << 60]), "is no number of things"),
        (tensor(stride=[1, 1]), "one stride per dimension"),
        (tensor(dtype="system"), "dtype 'system' is none of bfloat16, bool"),
        (tensor(dtype=["float32"]), "dtype and device are names"),
        (tensor(device="meta"), "device 'meta' is none of cpu"),
        (tensor(requires_grad=1), "requires_grad is true or false"),
        (tensor(dtype="int64", requires_grad=True), "a tensor of int64 has no gradient"),
        (tensor(more=1), "it has not the entries shape, stride"),
        (keyed(stride=3), "1 keys of 3 rows are not 2 rows"),
        (keyed(per_key=[1]), "its keys have 1 values, it has 2"),
        (keyed(per_key=[1, 1]), "it counts 2 keys and has 1"),
        (keyed(lengths=None), "it has neither lengths nor offsets"),
        (keyed(values=None), "its values are no tensor"),
        (keyed(lengths=tensor()), "its lengths are no integers"),
        (keyed(weights=tensor(shape=[3])), "not one weight per value"),
        (keyed(offsets={"constant": 1}), "its offsets are no tensor"),
        (instance("os:system"), "class 'os:system' is no"),
        (instance("posix:system"), "class 'posix:system' is not there"),
        (instance("subprocess:Popen", args="true"), "class 'subprocess:Popen' is no dataclass"),
        (instance(f"{HERE}:annotations.__class__"), "is not there"),
        (instance("wsgiref.handlers:SimpleHandler"), "of a module that is not imported"),
        (instance(f"{HERE}:Pair", x=1), "is a named tuple"),
        (instance(f"{HERE}:Sample", __class__=1), "an attribute has no plain name"),
        (instance(7), "a class is named by a text"),
        ({"named_tuple": {"class": f"{HERE}:Sample", "items": []}}, "has not 0 fields"),
        ({"named_tuple": {"class": f"{HERE}:Pair", "items": [{"constant": 1}]}}, "has not 1 fields"),
        (nested(33), "deeper than 32 levels"),
        ({"list": [{"constant": 1}] * 20_001}, "more than 20000 values"),
        ({"constant": float("nan")}, "JSON has no nan"),
        ({"constant": 1 << 80}, "longer than 64 bits"),
        ({"constant": []}, "list is no plain value"),
        ({"constant": "x" * 5_000}, "longer than 4096 characters"),
        ({"dict": [["a", {"constant": 1}], ["a", {"constant": 2}]]}, "two of its entries have one name"),
        ({"dict": {"a": {"constant": 1}}}, "its entries are no list"),
        ({"dict": [["a", {"list": [{"pickle": "gASV"}]}]]}, r"\['a'\]\[0\]: 'pickle' is no kind"),
        ({"tuple": 3}, "its items are no list"),
        ({}, "one key names its kind"),
        (None, "one key names its kind"),
    ],
)
def test_what_describes_nothing_is_refused(data: Any, words: str) -> None:
    with pytest.raises(SchemaError, match=words):
        from_data(data)


def test_a_file_makes_nothing_be_imported() -> None:
    assert "wsgiref.handlers" not in sys.modules
    with pytest.raises(SchemaError, match="not imported"):
        from_data(instance("wsgiref.handlers:SimpleHandler"))
    assert "wsgiref.handlers" not in sys.modules


def test_no_code_of_a_class_runs() -> None:
    made = from_data(instance(f"{HERE}:Loud", x=1, y=2)).make("cpu")
    assert type(made) is Loud and vars(made) == {"x": 1, "y": 2}
    assert of(made) == from_data(instance(f"{HERE}:Loud", x=1, y=2))


def test_a_jagged_tensor_is_not_made_of_attributes() -> None:
    import torchrec  # noqa: F401

    with pytest.raises(SchemaError, match="has a description of its own"):
        from_data(instance("torchrec.sparse.jagged_tensor:KeyedJaggedTensor", _keys=1))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (Sample(1, [torch.ones(2), object()]), r"^y\[1\]: class 'builtins:object' is no dataclass"),
        ({"a": Pair(1, float("inf"))}, r"^\['a'\]\.second: JSON has no inf"),
        ({1: 2}, "^the value: a key of the dict is no string"),
        (torch.ones(2, 2).to_sparse(), "^the value: a tensor of layout torch.sparse_coo"),
        (torch.ones(2, device="meta"), "^the value: device 'meta' is none of"),
        ([lambda: None], r"^\[0\]: class 'builtins:function' is not there"),
    ],
)
def test_what_can_not_be_described_is_named(value: Any, words: str) -> None:
    with pytest.raises(SchemaError, match=words):
        of(value)


def test_a_class_inside_of_a_function_can_not_be_found_again() -> None:
    class Local(Sample):
        pass

    with pytest.raises(SchemaError, match=r"<locals>.Local' is not there"):
        of(Local(1, 2))


def test_a_value_that_holds_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(SchemaError, match="deeper than 32 levels"):
        of(value)


def test_slots_and_tuples_keep_their_classes() -> None:
    made = of([Slotted(3), Pair((), "x")]).make("cpu")
    assert made == [Slotted(3), Pair((), "x")] and type(made[1]) is Pair


def test_true_is_not_one() -> None:
    assert len({of(True), of(1), of(1.0)}) == 3


def test_tensors_move_with_their_type_of_device() -> None:
    described = of((torch.ones(2), 3))
    moved = described.on("cuda")
    assert moved != described and moved.on("cpu") == described
    assert described.make("meta")[0].device.type == "cpu"


def test_a_description_reads_no_data() -> None:
    assert of(Sample(torch.ones(3, requires_grad=True), None)) == Entries(
        ("x", "y"), (Tensor((3,), (1,), "float32", requires_grad=True), of(None)), f"{HERE}:Sample"
    )
    assert of([torch.ones(2, 3).T]) == Items("list", (Tensor((3, 2), (1, 3), "float32"),))


def test_an_error_keeps_its_place_in_another_process() -> None:
    error = SchemaError(".x", "it is wrong")
    assert error.__reduce__() == (SchemaError, (".x", "it is wrong")) and str(error) == "x: it is wrong"


def test_the_file_needs_no_torch() -> None:
    code = "import sys, initopt.compile_cache.calls, initopt.compile_cache.fast_batch; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_keyed_data_of_the_tests_is_good() -> None:
    """So that each of the above fails for what it changes."""
    for data in (tensor(), keyed(), instance(f"{HERE}:Sample", x=1, y=2)):
        assert from_data(json.loads(json.dumps(data))).to_data() == data
