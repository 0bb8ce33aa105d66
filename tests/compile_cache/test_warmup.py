"""Compiling ahead from examples: the code is there at the first call, and nothing else has changed."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from initopt import Call, Compile, Startup, rng
from initopt.compile_cache.autotune import Kernel, Tuned, Winners
from initopt.compile_cache.cache import Ranks, Uncached
from initopt.compile_cache.known import Known
from initopt.compile_cache.warmup import _warming

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One cache for all tests of a session, so that the compiler of C++ runs once per graph."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "inductor"))
        yield


@pytest.fixture(autouse=True)
def _fresh_compiler(cache: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("INITOPT_ROOT", str(tmp_path))
    state = torch.get_rng_state()
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    torch.set_rng_state(state)


class Part(nn.Module):
    """Buffers that a forward pass would move, a draw, gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.norm(self.linear(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = Part()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(x).sum()


def model() -> Model:
    torch.manual_seed(0)
    return Model()


def compile(rows: int = 8, name: str = "part") -> Compile:
    return Compile(lambda m: {"part": m.part}, lambda device: {name: Call((torch.empty(rows, 4),))}, dynamic=False)


def trained(m: Model) -> dict[str, torch.Tensor]:
    m(torch.arange(32.0).reshape(8, 4)).backward()
    return {**m.state_dict(), **{f"grad {n}": p.grad for n, p in m.named_parameters()}, "rng": torch.get_rng_state()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_warm_up_leaves_nothing_but_code() -> None:
    stock = model()
    graphs = Compile.graphs()
    compile().apply(stock)
    assert Compile.graphs() == graphs
    expected = trained(stock)
    torch._dynamo.reset()

    m = model()
    chosen = compile()
    before = {**{name: t.clone() for name, t in m.state_dict().items()}, "rng": torch.get_rng_state()}
    python = random.getstate()
    chosen.apply(m)
    graphs = Compile.graphs()
    # On a lane, as a start-up does it.
    start = Startup("job")
    start.step(lambda: chosen.warm_up(m, torch.device("cpu")), name="warm_up", lane="io:compile", uses="compile")
    assert start.run().warm_up == 1
    assert Compile.graphs() == graphs + 1
    assert equal(before, {**m.state_dict(), "rng": torch.get_rng_state()})
    assert random.getstate() == python
    assert all(parameter.grad is None for parameter in m.parameters())
    # Backward included: what it would compile late is code of its own, not a graph.
    with torch.compiler.set_stance("fail_on_recompile"):
        found = trained(m)
    assert Compile.graphs() == graphs + 1
    assert equal(found, expected)


def test_an_example_that_does_not_match_costs_a_graph() -> None:
    m, chosen = model(), compile(rows=3)
    chosen.apply(m)
    before = Compile.graphs()
    with torch.no_grad():
        assert chosen.warm_up(m, torch.device("cpu")) == 1
        m(torch.ones(8, 4))
    assert Compile.graphs() == before + 2


def test_an_example_that_can_not_be_compiled_is_left_to_the_first_batch() -> None:
    m = model()
    chosen = Compile(lambda m: {"part": m.part}, lambda device: {"part": Call((torch.empty(8, 5),))}, dynamic=False)
    chosen.apply(m)
    with pytest.warns(UserWarning, match=r"part 'part' was not compiled ahead \(.*\); it compiles at the first batch"):
        assert chosen.warm_up(m, torch.device("cpu")) == 0
    assert m.part.norm.num_batches_tracked == 0


class Broken(Part):
    """Runs without being compiled, before or after something that is."""

    @torch._dynamo.disable  # type: ignore[misc]
    def eager(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.eager(x) + 1


@pytest.mark.parametrize("part", [nn.Sequential(Part()), nn.BatchNorm1d(4), nn.Dropout(), Broken()])
def test_what_is_not_compiled_does_not_run_either(part: nn.Module) -> None:
    m = model()
    m.part = part  # type: ignore[assignment]
    chosen = compile()
    chosen.apply(m)
    before = [*map(torch.clone, part.state_dict().values()), torch.get_rng_state()]
    with pytest.warns(
        UserWarning, match=r"part 'part' was not compiled ahead \((.*torch compiles nothing|.*Unsupported)"
    ):
        assert chosen.warm_up(m, torch.device("cpu")) == 0
    after = [*part.state_dict().values(), torch.get_rng_state()]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_an_example_for_a_part_that_is_none() -> None:
    with pytest.raises(ValueError, match="there is an example for 'prat', which is no part; the parts are part"):
        compile(name="prat").warm_up(model(), torch.device("cpu"))


def test_it_comes_in_pieces_with_words_on_each(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    monkeypatch.setattr("initopt.compile_cache.warmup.ask", lambda: events.append("?"))
    parts = {name: lambda name=name: events.append(name) for name in "abc"}
    pieces = Compile(lambda m: parts, lambda device: dict.fromkeys("abc", Call()))  # type: ignore[arg-type,return-value]
    said: list[str] = []
    pieces.warm_up(model(), torch.device("cpu"), between=lambda: events.append("|"), say=said.append)
    assert "".join(events) == "|?|a|b|c"
    assert said == ["looks what this CPU can do", "compiles 'a'", "compiles 'b'", "compiles 'c'"]


def test_the_compiler_finds_its_instruction_set_known_after_a_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import cpu_vec_isa

    cpu_vec_isa.valid_vec_isa_list.cache_clear()
    m = model()
    warmed = compile()
    warmed.apply(m)
    warmed.warm_up(m, torch.device("cpu"))
    cpu_vec_isa.valid_vec_isa_list.cache_clear()
    monkeypatch.setattr(cpu_vec_isa.VecISA, "check_build", lambda *_: pytest.fail("asked again"))
    assert cpu_vec_isa.pick_vec_isa()


def test_examples_that_fail_leave_all_to_the_first_batch() -> None:
    def fails(device: Any) -> dict[str, Call]:
        raise ValueError("no schema")

    m = model()
    warmed = Compile(lambda m: {"part": m.part}, fails)
    warmed.apply(m)
    with pytest.warns(UserWarning, match=r"nothing was compiled ahead.*ValueError: no schema"):
        assert warmed.warm_up(m, torch.device("cpu")) == 0


def test_without_examples_nothing_is_warmed_up() -> None:
    m = model()
    chosen = Compile(lambda m: {"part": m.part})
    chosen.apply(m)
    assert chosen.warm_up(m, torch.device("cpu")) == 0


def test_where_compiling_is_switched_off_the_example_does_not_run() -> None:
    m, chosen = model(), compile()
    chosen.apply(m)
    state = rng.cpu()
    with torch._dynamo.config.patch(disable=True):
        assert chosen.warm_up(m, torch.device("cpu")) == 0
    assert m.part.norm.num_batches_tracked == 0 and rng.cpu() == state


def test_the_generators_are_the_other_threads_own_while_one_warms_up() -> None:
    """The thread that warms up can't put them back, another one can, and afterwards all is as it was."""
    functions: list[Any] = [random.setstate, torch.random.set_rng_state, torch.set_rng_state, torch.cuda.set_rng_state]
    state = torch.get_rng_state()
    torch.rand(1)
    moved = rng.cpu()
    with _warming():
        torch.set_rng_state(state)
        assert rng.cpu() == moved
        thread = threading.Thread(target=torch.set_rng_state, args=(state,))
        thread.start()
        thread.join()
        assert rng.cpu() == state.numpy().tobytes()
    assert functions == [random.setstate, torch.random.set_rng_state, torch.set_rng_state, torch.cuda.set_rng_state]


@pytest.mark.parametrize("tuning", ["all", "recorded"])
def test_autotuning_is_cut_short_for_who_asks_and_learned_from_in_any_case(
    tuning: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Winners({"addmm": Kernel({"fast": 1.0}, "fast", 2.0)}, device="cpu")
    given: list[Winners | None] = []

    @contextmanager
    def pruned(winners: Winners | None) -> Iterator[Any]:
        given.append(winners)
        yield SimpleNamespace(tuned=(Tuned("addmm", 2, 1, 0.5, "fast"),), winners=lambda: found)

    monkeypatch.setattr("initopt.compile_cache.warmup.pruned", pruned)
    monkeypatch.setattr("initopt.compile_cache.warmup.ask", lambda: None)
    parts = {"a": lambda: None}
    chosen = Compile(lambda m: parts, lambda device: {"a": Call()}, tuning=tuning)  # type: ignore[arg-type,return-value]
    learned: dict[str, Any] = {}
    cache = Uncached(Ranks(None, 0, 1))
    cache.known = Known(winners=found)
    monkeypatch.setattr(cache, "learn", learned.__setitem__)
    chosen.warm_up(model(), torch.device("cpu"), cache=cache)
    assert given == [found if tuning == "recorded" else None]
    assert learned == {"winners": found.to_data()} and [one.winner for one in cache.tuned] == ["fast"]


def test_a_part_without_a_graph_that_changes_itself_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counting(nn.Module):
        seen = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen = self.seen + 1
            return x

    monkeypatch.setattr("initopt.compile_cache.warmup.ask", lambda: None)
    part = Counting()
    chosen = Compile(lambda m: {"part": part}, lambda device: {"part": Call((torch.ones(1),))})
    chosen.apply(part)
    with pytest.raises(RuntimeError, match=r"part 'part' has nothing that torch compiles, so it ran for real"):
        chosen.warm_up(part, torch.device("cpu"))
