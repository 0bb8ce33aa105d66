"""What is in a key: equal in two processes, and another one for everything that compiled code depends on."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from initopt.compile_cache import key as keys
from initopt.compile_cache.key import Key, key_of, model_digest

CPU = torch.device("cpu")

MODEL = """
import dataclasses
import torch
from torch import nn

@dataclasses.dataclass
class Sizes:
    names: frozenset
    rate: float = 0.1

class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.sizes = Sizes(frozenset({"some", "names", "in", "a", "set"}))
        self.activation = torch.relu

    def forward(self, x):
        return self.activation(self.linear(x))
"""

ASK = """
import torch
from initopt.compile_cache.key import key_of, model_digest
from model import Part
digest = model_digest({"a": Part(), "b": Part()})
key = key_of(digest, options={"mode": None, "dynamic": False}, device=torch.device("cpu"))
print(key.digest, key.model, key.host, *(f"{name}={value}" for name, value in key.parts.items()), sep="\\n")
"""


def fresh(folder: Path, **environment: str) -> list[str]:
    folder.mkdir(exist_ok=True)
    (folder / "model.py").write_text(MODEL)
    done = subprocess.run(
        [sys.executable, "-c", ASK],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(["", *sys.path]), **environment},
        text=True,
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_two_processes_have_one_key(tmp_path: Path) -> None:
    """Whatever orders their sets, and wherever their sources lie."""
    one = fresh(tmp_path / "here", PYTHONHASHSEED="1")
    assert one == fresh(tmp_path / "there", PYTHONHASHSEED="2")
    assert [len(digest) for digest in one[:3]] == [32, 32, 32]


def imported(path: Path, source: str) -> Any:
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("model_of_a_test", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["model_of_a_test"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def module(tmp_path: Path) -> Iterator[Any]:
    yield imported(tmp_path / "one.py", MODEL)
    del sys.modules["model_of_a_test"]


def key(part: nn.Module, **options: object) -> Key:
    return key_of(model_digest({"part": part}), options={"mode": None, **options}, device=CPU)


def changed(part: nn.Module, change: Callable[[Any], Any], **options: object) -> tuple[str, ...]:
    before = key(part)
    change(part)
    after = key(part, **options)
    assert (after.digest == before.digest) == (not after.differences(before.parts))
    return after.differences(before.parts)


@pytest.mark.parametrize(
    "change",
    [
        lambda part: setattr(part, "rate", 0.5),
        lambda part: setattr(part.sizes, "rate", 0.1 + 2**-55),
        lambda part: setattr(part, "activation", torch.tanh),
        lambda part: setattr(part, "activation", functools.partial(nn.functional.leaky_relu, negative_slope=0.2)),
        lambda part: setattr(part, "forward", part.linear.forward),
        lambda part: part.eval(),
        lambda part: part.linear.eval(),
        lambda part: part.double(),
        lambda part: part.linear.weight.requires_grad_(False),
        lambda part: setattr(part, "linear", nn.Linear(4, 4, bias=False)),
        lambda part: setattr(part, "linear", nn.Linear(4, 5)),
        lambda part: part.register_buffer("seen", torch.zeros(1)),
        lambda part: part.add_module("drop", nn.Dropout(0.5)),
    ],
)
def test_a_change_of_the_model_is_another_key(module: Any, change: Callable[[Any], Any]) -> None:
    part = module.Part()
    before = key(part)
    assert changed(part, change) == ("model",)
    assert key(part).model != before.model and key(part).host == before.host


@pytest.mark.parametrize(
    "change",
    [
        lambda part: part.linear.weight.data.fill_(3.0),
        lambda part: part.load_state_dict(part.state_dict()),
        lambda part: setattr(part.linear.weight, "grad", torch.ones(4, 4)),
        lambda part: part.compile(),
        lambda part: part.to("meta"),
    ],
)
def test_what_compiled_code_does_not_depend_on(module: Any, change: Callable[[Any], Any]) -> None:
    assert changed(module.Part(), change) == ()


def test_numbers_of_other_types_and_tied_weights_are_other_keys(module: Any) -> None:
    seen = set()
    for value in (1, 1.0, True, "1", None, (1,), [1], {1: 1}, {1}, torch.float32, torch.bfloat16, float("nan")):
        part = module.Part()
        part.value = value
        seen.add(key(part).model)
    assert len(seen) == 12
    tied, untied = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]), nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    tied[1].weight = tied[0].weight
    assert key(tied).model != key(untied).model


def test_another_source_of_a_class_or_its_base_is_another_key(tmp_path: Path) -> None:
    sources = [MODEL, MODEL.replace("return self", "return -self"), MODEL]
    models = [imported(tmp_path / f"{number}.py", source) for number, source in enumerate(sources)]
    found = []
    for model in models:
        sys.modules["model_of_a_test"] = model
        derived = type("Derived", (model.Part,), {"__module__": "nowhere"})
        found.append((key(model.Part()).model, key(derived()).model))
    del sys.modules["model_of_a_test"]
    assert found[0] == found[2]
    assert found[0][0] != found[1][0] and found[0][1] != found[1][1]


def test_what_counts_of_a_class_is_what_it_does_and_not_where_it_stands() -> None:
    """Without a file, too, as in a notebook."""

    def digest(body: str, *, before: str = "", name: str = "<cell>", **known: Any) -> str:
        source = f"{before}class Part(nn.Module):\n    scale = 2\n\n    def forward(self, x):\n        {body}\n"
        names: dict[str, Any] = {"nn": nn, "__name__": "cell", "functools": functools, **known}
        exec(compile(source, name, "exec"), names)
        return key(names["Part"]()).model

    plain = digest("return x + 1")
    assert digest("return x + 1", before="rate = 0.1  # of learning\n\n", name="elsewhere.py") == plain
    assert digest("# a remark\n        return x + 1") == plain
    wrapped = "def kept(f):\n    @functools.wraps(f)\n    def call(*a):\n        return f(*a)\n    return call\n"
    others = [
        digest("return x + 2"),
        digest("return x - 1"),
        digest("return [y + 1 for y in x]"),
        digest("return [y + 2 for y in x]"),
        digest("return 'a' in {'a', 'b', 'c'}"),
        digest("return 'a' in {'a', 'b', 'd'}"),
        digest("return x + 1\n\n    scale = 3"),
        digest("return x + 1\n\n    def extra(self, y=1):\n        return y"),
        digest("return x + 1\n\n    def extra(self, y=2):\n        return y"),
        digest("return x + 1\n\n    @property\n    def extra(self):\n        return 1"),
        digest("return x + 1\n\n    @staticmethod\n    def extra():\n        return 1"),
        digest("return x + 1\n\n    @kept\n    def extra(self):\n        return 1", before=wrapped),
        digest("return x + 1\n\n    @kept\n    def extra(self):\n        return 2", before=wrapped),
    ]
    assert len({plain, *others}) == 1 + len(others)


def test_options_settings_and_threads_are_parts(module: Any) -> None:
    part = module.Part()
    assert changed(part, lambda _: None, dynamic=True) == ("options",)
    with torch._inductor.config.patch(max_autotune=True, **{"triton.cudagraphs": True}):
        tuned = key(part)
    assert tuned.differences(key(part).parts) == ("inductor",)
    assert tuned.parts["inductor"].startswith("max_autotune=True, triton.cudagraphs=True ")
    # What Inductor does itself while it compiles.
    with torch._inductor.config.patch(max_autotune=torch._inductor.config.max_autotune):
        assert key(part) == key(part) and not key(part).differences(key(part).parts)
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    precision = torch.get_float32_matmul_precision()
    before = key(part)
    try:
        torch.set_num_threads(threads + 1)
        assert key(part).differences(before.parts) == ("threads",)
        torch.set_num_threads(threads)
        torch.set_default_dtype(torch.float64)
        assert key(part).differences(before.parts) == ("settings",)
        torch.set_default_dtype(dtype)
        torch.set_float32_matmul_precision("high")
        assert key(part).differences(before.parts) == ("settings",)
        torch.set_float32_matmul_precision(precision)
        torch.use_deterministic_algorithms(True)
        assert "settings" in key(part).differences(before.parts)
    finally:
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
        torch.set_float32_matmul_precision(precision)
        torch.use_deterministic_algorithms(False)
    assert key(part).digest == before.digest
    assert key(part).host == before.host


def test_the_host_is_in_the_key(monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    part = module.Part()
    before = key(part)
    assert "gpu" not in before.parts and before.parts["device"] == "cpu"
    assert torch.__version__ in before.parts["torch"]
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert key(part).differences(before.parts) == ("cpu",)
    monkeypatch.setattr(keys, "_compiler", lambda: "another one")
    other = key(part)
    assert other.differences(before.parts) == ("cpu", "compiler")
    assert other.host != before.host and other.model == before.model


def test_ranks_on_gpus_have_keys_of_their_own(monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    found = [
        key_of(model_digest({"part": module.Part()}), options={}, device=torch.device("cuda", index))
        for index in (0, 1)
    ]
    assert found[0].differences(found[1].parts) == ("device",)
    assert found[0].parts["gpu"].startswith("a GPU, capability 9.0, ")


@pytest.mark.parametrize(
    ("text", "like"),
    [
        ("vendor_id : A\nmodel : 1\nflags : b a\n\nvendor_id : A\nmodel : 1\nflags : a b\n", True),
        ("vendor_id : A\nmodel : 1\nflags : a\n", False),
        ("vendor_id : A\nmodel : 2\nflags : a b\n", False),
    ],
)
def test_the_cpu_counts_by_what_it_can_do(monkeypatch: pytest.MonkeyPatch, text: str, like: bool) -> None:
    def cpu(said: str) -> str:
        keys._cpu.cache_clear()
        monkeypatch.setattr(Path, "read_text", lambda path: said)
        return keys._cpu()

    try:
        assert (cpu(text) == cpu("processor : 0\nvendor_id : A\nmodel : 1\nflags : a b\n")) == like
    finally:
        keys._cpu.cache_clear()


def test_differences_are_named() -> None:
    one = Key({"cpu": "a", "threads": "1", "gpu": "x"})
    assert one.differences({"cpu": "b", "threads": "1", "new": ""}) == ("cpu", "gpu", "new")
    assert one.differences(dict(one.parts)) == ()
    assert Key(dict(reversed(one.parts.items()))).digest == one.digest
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.parts = {}  # type: ignore[misc]
