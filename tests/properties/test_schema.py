"""Descriptions of values: what is made of one has that description, and JSON keeps it."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from initopt.compile_cache.schema import KeyedJagged, Schema, from_data, of
from tests.compile_cache.described import Pair, Sample

pytestmark = pytest.mark.timeout(200)

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.bool, torch.complex64, torch.uint8)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    made = torch.empty(shape, dtype=draw(st.sampled_from(DTYPES)))
    changed = draw(st.sampled_from(("plain", "transposed", "expanded", "sliced")))
    if changed == "transposed":
        made = made.permute(tuple(reversed(range(made.dim()))))
    elif changed == "expanded":
        made = made.unsqueeze(0).expand(2, *made.shape)
    elif changed == "sliced" and made.dim():
        made = made[::2]
    return made.detach().requires_grad_((made.is_floating_point() or made.is_complex()) and draw(st.booleans()))


@st.composite
def jagged(draw: st.DrawFn) -> Any:
    from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

    keys, rows = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    lengths = torch.tensor(draw(st.lists(st.integers(0, 4), min_size=keys * rows, max_size=keys * rows)))
    lengths = lengths.to(draw(st.sampled_from((torch.int32, torch.int64))))
    count = int(lengths.sum())
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]) if draw(st.booleans()) else None
    weights = torch.empty(count) if draw(st.booleans()) else None
    names = [f"key {number}" for number in range(keys)]
    if draw(st.booleans()):
        return JaggedTensor(torch.empty(count, 2), weights, lengths, offsets)
    if draw(st.booleans()):
        return KeyedTensor(names, [2] * keys, torch.empty(rows, 2 * keys))
    made = KeyedJaggedTensor(names, torch.empty(count, dtype=torch.int64), weights, lengths, offsets, rows)
    if draw(st.booleans()):
        made.length_per_key()
    return made


PLAIN = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
LEAVES = PLAIN | st.text(max_size=5).filter(lambda text: text.isprintable()) | tensors() | jagged()
VALUES = st.recursive(
    LEAVES,
    lambda parts: st.one_of(
        st.lists(parts, max_size=3),
        st.lists(parts, max_size=3).map(tuple),
        st.dictionaries(st.text("abc", max_size=2), parts, max_size=3),
        st.builds(Sample, parts, parts),
        st.builds(Pair, parts, parts),
    ),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(VALUES)
def test_a_value_made_of_a_description_has_it_and_json_keeps_it(value: Any) -> None:
    described = of(value)
    assert of(described.make("cpu")) == described
    assert from_data(json.loads(json.dumps(described.to_data()))) == described
    assert described.on("cpu") == described
    assert described.without_counts() == described.with_counts().without_counts()
    consistent(described.with_counts().make("cpu"))


def consistent(value: Any) -> None:
    """Every keyed jagged tensor in the value has as many values as its lengths say, in all and per key."""
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    if isinstance(value, (list, tuple)):
        for part in value:
            consistent(part)
    elif isinstance(value, (dict, Sample)):
        consistent(list((value if isinstance(value, dict) else vars(value)).values()))
    elif isinstance(value, KeyedJaggedTensor):
        counted = [int(part.sum()) for part in value.lengths().view(len(value.keys()), -1)]
        assert counted == value.length_per_key() and sum(counted) == value.values().numel()
        assert value.offsets().tolist() == [0, *value.lengths().cumsum(0).tolist()]


JSON = st.recursive(
    PLAIN | st.text(max_size=5),
    lambda parts: st.lists(parts, max_size=3) | st.dictionaries(st.text(max_size=3), parts, max_size=3),
)


@settings(max_examples=150, deadline=None)
@given(VALUES, st.data())
def test_edited_data_is_refused_or_describes_something(value: Any, data: st.DataObject) -> None:
    whole = json.loads(json.dumps(of(value).to_data()))
    place: Any = whole
    while isinstance(place, (dict, list)) and place:
        key = data.draw(st.sampled_from(sorted(place)) if isinstance(place, dict) else st.integers(0, len(place) - 1))
        if not isinstance(place[key], (dict, list)) or not place[key] or data.draw(st.booleans()):
            place[key] = data.draw(JSON)
            break
        place = place[key]
    try:
        read = from_data(whole)
    except ValueError as error:
        assert type(error).__name__ == "SchemaError"
    else:
        assert isinstance(read, Schema) and from_data(read.to_data()) == read


def test_counts_that_are_not_known_are_spread() -> None:
    described = KeyedJagged.of_keys("ab", 2, (3, 2))
    assert described.make("cpu").lengths().tolist() == [2, 1, 1, 1]
    unknown = KeyedJagged(described.keys, 2, described.values, lengths=described.lengths)
    assert unknown.make("cpu").length_per_key_or_none() is None
    assert unknown.with_counts() == described and unknown.without_counts() == described.without_counts()
