"""Examples without data: what the model would pass its parts, with nothing of the model or its draws changed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from initopt import Call, Compile
from initopt.compile_cache.calls import Modes, Recorded, Seen, recording
from initopt.compile_cache.fast_batch import Examples, Twin, examples_for, loader_schema
from initopt.compile_cache.schema import KeyedJagged, Schema, Tensor, of
from tests.compile_cache.described import Sample

pytestmark = [
    pytest.mark.timeout(300),
    # Torch hides it while it compiles, but not from a test that takes warnings for errors.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Tower(nn.Module):
    """Buffers that a forward pass would move, a draw, gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.drop(self.norm(self.linear(x)))
        return result


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 1)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.linear(input)
        return result


class Model(nn.Module):
    """Two parts, the second of which takes what the first one makes, turned around, and a keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Tower()
        self.second = Last()
        self.seen: list[Any] = []
        self.fails = False
        self.scratch = torch.zeros(2)

    def forward(self, batch: Sample) -> torch.Tensor:
        self.seen.append(random.random())
        self.scratch += 1
        made = self.first(batch.x)
        if self.fails:
            made = made[: int(batch.x.sum())]
        result: torch.Tensor = self.second(input=made.T @ torch.ones(len(batch.x), 8)).sum()
        return result + torch.rand(()) * 0


def model() -> Model:
    torch.manual_seed(0)
    return Model()


def batch(rows: int = 8) -> Sample:
    return Sample(torch.ones(rows, 4), torch.ones(rows))


def parts(m: Any) -> Mapping[str, nn.Module]:
    return {"first": m.first, "second": m.second}


def described(examples: Examples) -> dict[str, Any]:
    return {
        name: [Seen(of(call.args), of(dict(call.kwargs)), call.modes or Modes(True, True)) for call in calls]
        for name, calls in examples.calls.items()
    }


def state(m: Model) -> list[Any]:
    tensors = [tensor.clone() for tensor in (*m.state_dict().values(), m.scratch)]
    return [*tensors, torch.get_rng_state(), torch.tensor(random.getstate()[1])]


def test_the_parts_get_what_the_model_would_pass_them_and_nothing_changes() -> None:
    m = model()
    m.register_forward_hook(lambda *_: pytest.fail("a hook of the model ran"))
    m.first.register_forward_pre_hook(lambda *_: pytest.fail("a hook of the model ran"))
    before = state(m)
    examples = examples_for(parts, m, CPU, batch=of(batch()))
    assert all(torch.equal(one, other) for one, other in zip(before, state(m), strict=True))
    assert not m.seen and all(parameter.grad is None for parameter in m.parameters())
    assert not m.first._forward_hooks and len(m.first._forward_pre_hooks) == 1
    assert examples.sources == {"first": "fast batch", "second": "fast batch"}

    m = model()
    for part in parts(m).values():
        part.compile(backend="eager", dynamic=False)
    with recording(parts(m)) as seen:
        m(batch())
    assert described(examples) == {name: list(calls) for name, calls in seen.items()}
    assert described(examples)["second"][0].kwargs.items[0] == Tensor((4, 8), (8, 1), "float32", requires_grad=True)


def test_tables_without_memory_and_a_part_in_evaluation_mode() -> None:
    m = model().to("meta")
    m.second.eval()
    examples = described(examples_for(parts, m, CPU, batch=of(batch())))
    assert [calls[0].modes for calls in examples.values()] == [Modes(True, True), Modes(True, False)]
    assert examples["first"][0].args.items == (Tensor.dense(8, 4),)


def test_each_part_takes_the_first_source_that_knows_it() -> None:
    m = model()
    mine = Call((torch.ones(1, 4),))
    seen = (Seen(of((torch.ones(8, 4),)), of({}), Modes(False, True)),)

    def sources(recorded: Recorded | None, known: Schema | None, user: Any = None) -> dict[str, str]:
        return dict(examples_for(parts, m, CPU, user=user, recorded=recorded, batch=known).sources)

    earlier = Recorded(of(batch()), {"first": seen})
    assert sources(None, None) == {}
    assert sources(earlier, None) == {"first": "recorded"}
    assert sources(earlier, of(batch())) == {"first": "recorded", "second": "fast batch"}
    assert sources(earlier, of(batch(9))) == {"first": "fast batch", "second": "fast batch"}
    assert sources(Recorded(None, earlier.calls), None) == {"first": "recorded"}
    assert sources(Recorded(None, earlier.calls), of(batch()))["first"] == "fast batch"
    assert sources(earlier, of(batch()), {"first": mine}) == {"first": "user", "second": "fast batch"}
    # Code for a mode in which the part is not warms nothing up.
    m.first.eval()
    assert sources(earlier, None) == {}
    assert examples_for(parts, m, CPU, user={"first": mine}).calls == {"first": (mine,)}


def test_a_recorded_batch_is_like_one_with_other_numbers_of_values() -> None:
    pytest.importorskip("torchrec")
    m = model()
    ids = {rows: KeyedJagged.of_keys("ab", 2, (rows, 0)) for rows in (3, 4)}
    earlier = Recorded(ids[3], {"first": (Seen(of((torch.ones(8, 4),)), of({}), Modes(True, True)),)})
    twin = Twin(None, problem="ValueError: not asked")
    with pytest.warns(UserWarning, match="ValueError: not asked"):
        examples = examples_for(parts, m, CPU, recorded=earlier, batch=ids[4], twin=twin)
    assert examples.sources == {"first": "recorded"}


def test_a_model_that_needs_data_keeps_the_examples_it_got_to() -> None:
    m = model()
    m.fails = True
    with pytest.warns(UserWarning, match="the model did not run without data") as caught:
        examples = examples_for(parts, m, CPU, batch=of(batch()))
    assert len(caught) == 1 and list(examples.calls) == ["first"]


def test_a_model_that_can_not_be_copied_has_one_warning() -> None:
    m = model()
    m.lock = __import__("threading").Lock()
    with pytest.warns(UserWarning, match=r"did not run without data \(TypeError: cannot pickle"):
        assert examples_for(parts, m, CPU, batch=of(batch())).calls == {}


def test_hooks_of_all_modules_do_not_see_the_copy() -> None:
    hook = nn.modules.module.register_module_forward_hook(lambda *_: pytest.fail("it ran"))
    try:
        assert "hooks of all modules" in Twin.of(model(), CPU).problem
    finally:
        hook.remove()


def test_a_copy_from_before_serves_a_model_that_has_changed() -> None:
    m = model()
    twin = Twin.of(m, CPU)
    m.forward = None  # type: ignore[assignment]
    assert examples_for(parts, m, CPU, batch=of(batch()), twin=twin).calls.keys() == {"first", "second"}


class Data:
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        return index


class Collate:
    def __call__(self, rows: list[int]) -> Sample:
        return batch(len(rows))

    def batch_schema(self, batch_size: int | None) -> Sample:
        assert batch_size is not None
        return batch(batch_size)


def test_a_loader_says_what_a_batch_will_be() -> None:
    loader: Any = DataLoader(Data(), batch_size=5, collate_fn=Collate())  # type: ignore[arg-type]
    for one in (loader, iter(loader)):
        assert loader_schema(one) == of(next(iter(loader))) == of(batch(5))
    described = Collate()
    described.batch_schema = lambda batch_size: of(batch(3))  # type: ignore[method-assign,assignment,return-value]
    assert loader_schema(described) == of(batch(3))
    assert loader_schema([1, 2]) is None and loader_schema(None) is None and loader_schema(DataLoader([1])) is None  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match=r"what the loader says a batch will be is no use \(AssertionError"):
        assert loader_schema(Collate()) is None


def test_a_random_data_set_of_torchrec_is_known() -> None:
    from torchrec.datasets.random import RandomRecDataset

    data = RandomRecDataset(["a", "b"], 4, hash_size=9, ids_per_features=[1, 3], num_dense=5, num_batches=2)
    for loader in (data, DataLoader(data, batch_size=None)):
        known = loader_schema(loader)
        assert known is not None and known.without_counts() == of(next(iter(data))).without_counts()
        assert known.make("cpu").sparse_features.length_per_key() == [4, 12]


def trained(m: Model, chosen: Compile | None) -> list[Any]:
    optimizer = torch.optim.Adam(m.parameters())
    if chosen is not None:
        assert chosen.warm_up(m, CPU) == 2
    warm = Compile.graphs()
    losses = []
    torch.manual_seed(3)
    for _ in range(3):
        optimizer.zero_grad()
        losses.append(m(batch()))
        losses[-1].backward()
        optimizer.step()
        assert chosen is None or Compile.graphs() == warm
    moments = [value for held in optimizer.state.values() for value in held.values()]
    grads = [parameter.grad for parameter in m.parameters()]
    return [*losses, *m.state_dict().values(), *moments, *grads, torch.get_rng_state()]


def test_training_after_a_fast_batch_is_the_same_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dropout, batch norm and Adam, forward and backward by inductor."""
    root: Path = tmp_path_factory.getbasetemp()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(root / "inductor"))
    stock = model()
    Compile(parts, dynamic=False).apply(stock)
    random.seed(2)
    expected = trained(stock, None)
    torch._dynamo.reset()

    m = model()
    chosen = Compile(parts, batch=lambda device: batch(), dynamic=False)
    chosen.apply(m)
    random.seed(2)
    found = trained(m, chosen)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert m.seen == stock.seen


@pytest.mark.parametrize(("dynamic", "graphs"), [(False, 2), (None, 1)])
def test_later_calls_are_warmed_up_where_shapes_are_static(
    dynamic: bool | None, graphs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "initopt.compile_cache.warmup._Backend.__init__",
        lambda self, *_: setattr(self, "_inductor", lambda graph, inputs: graph.forward),
    )
    monkeypatch.setattr("initopt.compile_cache.warmup.ask", lambda: None)
    m = model()
    chosen = Compile(parts, dynamic=dynamic)
    chosen.apply(m)
    with recording(parts(m)) as seen, torch.no_grad():
        m.first(torch.ones(8, 4))
        m.first(torch.ones(9, 4))
    torch._dynamo.reset()
    m = model()
    chosen.apply(m)
    examples = chosen.calls(m, CPU, recorded=Recorded(None, seen))
    assert len(examples.calls["first"]) == 2 and torch.is_grad_enabled()
    before = Compile.graphs()
    assert chosen.warm_up(m, CPU, examples) == graphs
    assert m.first.norm.num_batches_tracked == 0
    with torch.no_grad():
        m.first(torch.ones(8, 4))
        assert Compile.graphs() == before + graphs
        m.first(torch.ones(9, 4))
    assert Compile.graphs() == before + 2
