"""Checksums of what ranks put in: equal for equal bytes, different for others, and never a wrong "equal"."""

from __future__ import annotations

import pytest
import torch

from initopt.payload import SAMPLED, UNKNOWN, WHOLE, Checksum, bytes_in


def checksum(payload: object, *, values: bool = True) -> str:
    found = Checksum(values=values)
    found.add(payload)
    return found.text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_equal_bytes_are_equal_and_others_not(dtype: torch.dtype) -> None:
    one, other = torch.ones(8).to(dtype), torch.ones(8).to(dtype)
    assert checksum(one) == checksum(other) != checksum([one, other])
    other[3] = 0
    assert checksum(one) != checksum(other)


def test_type_and_shape_count() -> None:
    zeros = torch.zeros(8)
    assert len({checksum(zeros), checksum(zeros.view(2, 4)), checksum(zeros.to(torch.int32))}) == 3


def test_shapes_alone() -> None:
    assert checksum(torch.zeros(8), values=False) == checksum(torch.ones(8), values=False)
    assert checksum(torch.zeros(8), values=False) != checksum(torch.zeros(9), values=False)


def test_a_large_one_is_sampled_and_says_so() -> None:
    large = torch.zeros(WHOLE)
    assert checksum(large).startswith(SAMPLED)
    other = large.clone()
    other[-1] = 1.0
    assert checksum(large) != checksum(other)
    many = [torch.zeros(WHOLE // 16) for _ in range(64)]
    assert checksum(many).startswith(SAMPLED)


def test_nothing_is_nothing() -> None:
    assert checksum(None) == checksum([]) == checksum("text") == ""


@pytest.mark.parametrize(
    "tensor", [torch.zeros(4, 4).t()[1:], torch.zeros(4, device="meta"), torch.zeros(2, 2).to_sparse()]
)
def test_what_can_not_be_read_is_unknown(tensor: torch.Tensor) -> None:
    assert checksum([torch.zeros(1), tensor]) == UNKNOWN


def test_bytes() -> None:
    assert bytes_in([torch.zeros(4), torch.zeros(2, dtype=torch.int64)]) == 32
    assert bytes_in(None) == 0
