"""What a block of code asks torch for is seen, and comes out as without anyone watching."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from initopt.table_init.fills import Fill, make
from initopt.table_init.mersenne import claim
from initopt.table_init.watch import Watch


class Seen:
    """Makes the fills, and notes what it was told."""

    def __init__(self) -> None:
        self.settled: list[tuple[int, bool]] = []
        self.whole: list[int] = []
        self.touches = 0

    def settle(self, fills: Sequence[Fill], *, wanted: bool) -> None:
        self.settled.append((len(fills), wanted))
        make(fills, claim(sum(fill.draws for fill in fills)), 2)

    def skip(self, tensor: torch.Tensor, low: float, high: float) -> bool:
        raise AssertionError("there is no accelerator here")

    def overwritten(self, tensor: torch.Tensor) -> None:
        self.whole.append(tensor.numel())

    def touched(self, tensor: torch.Tensor) -> None:
        self.touches += 1


def no_grad(function: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
    def call(tensor: torch.Tensor) -> Any:
        with torch.no_grad():
            return function(tensor)

    return call


INITIALIZERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "uniform": partial(nn.init.uniform_, a=-0.5, b=0.5),
    "normal": partial(nn.init.normal_, mean=1.0, std=0.1),
    "kaiming_uniform": partial(nn.init.kaiming_uniform_, a=5**0.5),
    "kaiming_normal": nn.init.kaiming_normal_,
    "xavier_uniform": nn.init.xavier_uniform_,
    "xavier_normal": nn.init.xavier_normal_,
    "trunc_normal": partial(nn.init.trunc_normal_, std=0.02),
    "constant": partial(nn.init.constant_, val=0.5),
    "zeros": nn.init.zeros_,
    "ones": nn.init.ones_,
    "orthogonal": nn.init.orthogonal_,
    "sparse": partial(nn.init.sparse_, sparsity=0.5),
    "eye": nn.init.eye_,
    "data": lambda tensor: tensor.data.uniform_(-1, 1),
    "named arguments": no_grad(lambda tensor: tensor.uniform_(**{"from": -1, "to": 2})),
    "another generator": no_grad(lambda tensor: tensor.normal_(generator=torch.Generator().manual_seed(1))),
    "copied": no_grad(lambda tensor: tensor.copy_(torch.randn(tensor.shape))),
    "in two halves": no_grad(lambda tensor: (tensor[: len(tensor) // 2].normal_(), tensor[len(tensor) // 2 :].zero_())),
    "columns": no_grad(lambda tensor: tensor[:, ::2].uniform_()),
    "scaled": no_grad(lambda tensor: tensor.normal_().mul_(tensor.std())),
    "seeded": no_grad(lambda tensor: (torch.manual_seed(tensor.shape[0]), tensor.uniform_())),
    "by numpy": no_grad(lambda tensor: tensor.uniform_().numpy().__imul__(2)),
    "drawn before": no_grad(lambda tensor: tensor.uniform_(0, torch.rand(()).item())),
    "nothing": lambda tensor: None,
}


def run(initializers: Sequence[str], watch: Callable[[], Any] | None, dtype: torch.dtype) -> tuple[Any, ...]:
    torch.manual_seed(5)
    tables = [torch.zeros(rows, 24, dtype=dtype).requires_grad_() for rows in (64, 33)]
    for name in initializers:
        for table in tables:
            if watch is None:
                INITIALIZERS[name](table)
            else:
                with watch():
                    INITIALIZERS[name](table)
    return tables, torch.get_rng_state()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("name", INITIALIZERS)
def test_an_initializer_gives_what_it_gives(name: str, at_once: bool, dtype: torch.dtype) -> None:
    expected, end = run([name, "uniform"], None, dtype)
    seen = Seen()
    got, state = run([name, "uniform"], lambda: Watch(seen, at_once=at_once), dtype)
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one.detach().view(torch.uint8), other.detach().view(torch.uint8))
    assert torch.equal(state, end)


@pytest.mark.parametrize("name", ["uniform", "normal", "kaiming_uniform", "kaiming_normal", "xavier_uniform", "data"])
def test_fills_come_together_and_nothing_is_touched(name: str) -> None:
    seen, tables = Seen(), [torch.zeros(40, 8) for _ in range(3)]
    with Watch(seen):
        for table in tables:
            INITIALIZERS[name](table)
    assert seen.settled == [(3, False)]
    assert seen.whole == [320, 320, 320]
    assert seen.touches == 0


def test_of_code_that_is_not_known_each_comes_alone() -> None:
    seen, table = Seen(), torch.zeros(40, 8)
    with Watch(seen, at_once=True):
        table.uniform_()
        before = torch.get_rng_state()
        table.normal_()
    assert seen.settled == [(1, True), (1, True)]
    torch.set_rng_state(before)
    assert torch.equal(table, torch.zeros(40, 8).normal_())


def test_a_look_at_the_values_comes_after_the_fill() -> None:
    seen, table = Seen(), torch.zeros(40, 8)
    with Watch(seen):
        table.uniform_(1, 2)
        assert table[3:].sum() > 0
        assert seen.settled == [(1, True)]


def test_another_table_leaves_it_waiting() -> None:
    seen = Seen()
    first, second = torch.zeros(40, 8).split(20)
    with Watch(seen):
        first.uniform_(1, 2)
        assert second.data.shape == (20, 8)
        assert seen.settled == []
        assert first.data.shape == (20, 8)
        assert seen.settled == [(1, True)]


def test_what_torch_refuses_it_refuses_in_its_words() -> None:
    table = torch.zeros(40, 8, requires_grad=True)
    with Watch(Seen()):
        with pytest.raises(RuntimeError, match="in-place operation"):
            table.uniform_()
        with pytest.raises(RuntimeError, match=r"std|deviation"):
            table.detach().normal_(0, -1)
        with pytest.raises(RuntimeError, match="from"):
            table.detach().uniform_(1, 0)


def test_meta_tensors_have_no_memory_to_fill() -> None:
    seen = Seen()
    with Watch(seen):
        torch.empty(40, 8, device="meta").uniform_()
    assert seen.settled == []


def test_after_an_error_nothing_is_made() -> None:
    seen, table = Seen(), torch.zeros(40, 8)
    with pytest.raises(KeyError), Watch(seen):
        table.uniform_()
        raise KeyError
    assert seen.settled == []
