"""Calls of parts, seen at a real step: nothing about the step changes, and nothing of the observer stays."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from initopt import Compile
from initopt.compile_cache.calls import Modes, Recorded, Seen, recording
from initopt.compile_cache.schema import SchemaError, of

pytestmark = pytest.mark.timeout(200)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        result: torch.Tensor = self.drop(self.norm(self.linear(x))) * scale
        return result


def part() -> Part:
    torch.manual_seed(0)
    made = Part()
    made.compile(backend="eager", dynamic=False)
    return made


def seen(*args: Any, grad: bool = True, training: bool = True, autocast: Any = (), **kwargs: Any) -> Seen:
    return Seen(of(args), of(kwargs), Modes(grad, training, autocast))


def trained(made: Part) -> list[Any]:
    torch.manual_seed(1)
    graphs = Compile.graphs()
    results = [made(torch.ones(3, 4)) for _ in range(3)]
    sum(result.sum() for result in results).backward()  # type: ignore[union-attr]
    state = [tensor.clone() for tensor in made.state_dict().values()]
    grads = [parameter.grad for parameter in made.parameters()]
    return [*results, *state, *grads, torch.get_rng_state(), torch.tensor(Compile.graphs() - graphs)]


def test_a_step_that_is_recorded_is_the_step_it_would_have_been() -> None:
    expected = trained(part())
    torch._dynamo.reset()
    made = part()
    names = set(vars(made))
    compiled = made._compiled_call_impl
    with recording({"part": made}) as found:
        results = trained(made)
        assert not made._forward_pre_hooks and not made._forward_hooks
    assert all(torch.equal(one, other) for one, other in zip(results, expected, strict=True))
    assert found == {"part": (seen(torch.ones(3, 4)),)}
    assert made._compiled_call_impl is compiled and set(vars(made)) == names
    # The code that was made while it was recorded serves the calls after it.
    with torch.compiler.set_stance("fail_on_recompile"):
        made(torch.ones(3, 4))


def test_each_different_call_is_kept_once_in_order() -> None:
    made = part()
    x = torch.ones(3, 4, requires_grad=True)
    with recording({"part": made}) as found:
        made(x)
        made(x=torch.ones(4, 3).T, scale=2.0)
        with torch.no_grad():
            made(x)
        with torch.autocast("cpu", torch.bfloat16):
            made(x)
        made.eval()
        made(x)
        made(x)
    assert found["part"] == (
        seen(x),
        seen(x=torch.ones(4, 3).T, scale=2.0),
        seen(x, grad=False),
        seen(x, autocast=(("cpu", "bfloat16"),)),
        seen(x, training=False),
    )
    for call in found["part"]:
        made.train(call.modes.training)
        again = call.make(torch.device("cpu"))
        assert again.modes is not None
        with torch.compiler.set_stance("fail_on_recompile"), again.modes.entered():
            made(*again.args, **again.kwargs)


def test_a_part_keeps_the_first_eight_of_its_calls() -> None:
    made = Part()
    made._compiled_call_impl = made._call_impl  # type: ignore[assignment]
    with recording({"part": made}) as found:
        for rows in range(2, 22):
            made(torch.ones(rows, 4))
    assert [call.args for call in found["part"]] == [of((torch.ones(rows, 4),)) for rows in range(2, 10)]


def test_what_can_not_be_described_runs_and_is_left_out() -> None:
    class Odd(nn.Module):
        def forward(self, x: torch.Tensor, unknown: Any) -> torch.Tensor:
            return x + 1

    odd = Odd()
    odd.compile(backend="eager")
    with recording({"odd": odd}) as found:
        assert odd(torch.zeros(1), {1, 2}) == 1
    assert not found


def test_a_part_inside_of_another_and_one_that_does_not_compile_are_left_alone() -> None:
    outer, plain = part(), Part()
    outer.linear.compile(backend="eager")
    inner = outer.linear._compiled_call_impl
    with recording({"inner": outer.linear, "outer": outer, "plain": plain}) as found:
        assert outer.linear._compiled_call_impl is inner and plain._compiled_call_impl is None
        outer(torch.ones(3, 4))
        plain(torch.ones(3, 4))
    assert list(found) == ["outer"]


def test_a_call_that_fails_fails_as_before_and_the_observer_goes() -> None:
    made = part()
    compiled = made._compiled_call_impl
    with pytest.raises(Exception, match="5"), recording({"part": made}) as found:
        made(torch.ones(3, 5))
    assert found["part"] == (seen(torch.ones(3, 5)),) and made._compiled_call_impl is compiled


def test_a_part_compiled_again_keeps_that() -> None:
    made = part()
    with recording({"part": made}):
        made.compile(backend="eager")
        again = made._compiled_call_impl
    assert made._compiled_call_impl is again


def recorded() -> Recorded:
    x = torch.ones(2, 4)
    calls = (seen(x, grad=False, autocast=(("cpu", "bfloat16"),)), seen(x=x))
    return Recorded(of({"x": x}), {"part": calls, "other": ()})


def test_what_was_recorded_is_read_again() -> None:
    for one in (recorded(), Recorded(None, {})):
        assert Recorded.from_data(json.loads(json.dumps(one.to_data()))) == one


def test_a_batch_that_can_not_be_described_is_left_out() -> None:
    calls = recorded().calls
    assert Recorded.of({"x": torch.ones(2, 4)}, calls) == recorded()
    assert Recorded.of({1, 2}, calls) == Recorded(None, calls)


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        ((), [], "it has not the entries initopt, format"),
        (("format",), 2, "no recorded calls of format 1"),
        (("initopt",), "sharding plan", "no recorded calls of format 1"),
        (("calls",), [], "the calls are not given by part"),
        (("calls", "part"), {}, "part: it is no list of at most 8 calls"),
        (("calls", "part"), [{}] * 9, "part: it is no list of at most 8 calls"),
        (("calls", "part", 0), {"args": 1}, r"part\[0\]: it has not the entries args"),
        (("calls", "part", 0, "args"), {"constant": 1}, r"part\[0\]: its arguments are no tuple and dict"),
        (("calls", "part", 0, "kwargs"), {"tuple": []}, r"part\[0\]: its arguments are no tuple and dict"),
        (("calls", "part", 0, "args", "tuple", 0), {"x": 1}, r"part\[0\].args\[0\]: 'x' is no kind"),
        (("calls", "part", 0, "modes", "grad"), 1, r"part\[0\]: its modes are true or false"),
        (("calls", "part", 0, "modes", "autocast"), [["cpu", "eval"]], r"part\[0\]: autocast is a list"),
        (("batch",), {"object": {"class": "os:system", "attributes": []}}, "batch: class 'os:system' is no"),
    ],
)
def test_what_was_not_recorded_is_refused(place: tuple[Any, ...], value: Any, words: str) -> None:
    data: Any = {"whole": recorded().to_data()}
    inner, last = data, "whole"
    for key in place:
        inner, last = inner[last], key
    inner[last] = value
    with pytest.raises(SchemaError, match=words):
        Recorded.from_data(data["whole"])


def test_all_calls_of_a_file_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("initopt.compile_cache.schema.MOST_BYTES", 64)
    with pytest.raises(SchemaError, match="the tensors take more than"):
        Recorded.from_data(recorded().to_data())
