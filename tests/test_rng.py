"""The ledger of generator states: what it brings back, and everything that makes it an empty one instead."""

from __future__ import annotations

import base64
import json
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from initopt import Startup, rng
from initopt.rng import Entry, Ledger


@pytest.fixture(autouse=True)
def _generators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("INITOPT_ROOT", str(tmp_path))
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    yield
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    numpy.random.set_state(states[2])


def file(root: Path) -> Path:
    return root / "ledger" / "job.rank0of1.json"


def run(draw: Callable[[], float], *, seed: int = 1, overlap: bool = True) -> tuple[list[str], list[float], bytes]:
    """Which steps ran in which order, what each drew, and where the generator stood in the end."""
    torch.manual_seed(seed)
    ran: list[str] = []
    start = Startup("job")

    def noted(name: str, value: float) -> float:
        ran.append(name)
        return value

    start.step(lambda: noted("model", torch.rand(1).item()), name="model", uses="rng")
    start.step(lambda: noted("loader", draw()), name="loader", uses=("rng", "fork"), lane="io:d", early=True)
    start.step(lambda loader: noted("head", torch.rand(1).item()), name="head", uses="rng")
    values = start.run(overlap=overlap)
    return ran, [values.model, values.loader, values.head], rng.cpu()


def from_torch() -> float:
    return torch.rand(1).item()


IN_TURN, AHEAD, AGAIN = ["model", "loader", "head"], ["loader", "model", "head"], ["loader", "model", "loader", "head"]


def test_an_early_step_draws_what_it_draws_in_its_turn() -> None:
    ran, *expected = run(from_torch, overlap=False)
    assert ran == IN_TURN
    for _ in range(2):
        ran, *found = run(from_torch)
        assert ran == AHEAD and found == expected


def test_another_seed_makes_the_ledger_stale() -> None:
    run(from_torch, seed=1)
    ran, *found = run(from_torch, seed=2)
    assert ran == IN_TURN
    assert found == list(run(from_torch, seed=2, overlap=False)[1:])
    assert run(from_torch, seed=2)[0] == AHEAD


def test_without_overlap_the_ledger_is_written_but_not_used() -> None:
    assert run(from_torch, overlap=False)[0] == IN_TURN
    assert run(from_torch, overlap=False)[0] == IN_TURN
    assert run(from_torch)[0] == AHEAD


def python_draw() -> float:
    return random.random()


def numpy_draw() -> float:
    return float(numpy.random.rand())


@pytest.mark.parametrize("draw", [python_draw, numpy_draw])
def test_a_step_that_draws_from_another_generator_waits_for_its_turn(draw: Callable[[], float], tmp_path: Path) -> None:
    for _ in range(2):
        assert run(draw)[0] == IN_TURN
    assert not file(tmp_path).exists()


def test_a_step_that_begins_to_draw_from_another_generator_is_run_again_and_forgotten(tmp_path: Path) -> None:
    run(from_torch)
    assert run(numpy_draw)[0] == AGAIN
    assert json.loads(file(tmp_path).read_text())["steps"] == {}
    assert run(numpy_draw)[0] == IN_TURN


def test_an_accelerators_generator_is_not_in_the_ledger(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Setting it would start the accelerator before the fork."""
    read, gpu = rng.read, [0]
    monkeypatch.setattr(rng, "read", lambda: {**read(), "cuda:0": bytes(gpu)})

    def draw() -> float:
        gpu[0] += 1
        return from_torch()

    run(draw)
    assert not file(tmp_path).exists()
    run(from_torch)
    assert set(json.loads(file(tmp_path).read_text())["steps"]["loader"]) == {"before", "after"}
    assert run(from_torch)[0] == AHEAD


def change(path: Path, **fields: Any) -> None:
    content = json.loads(path.read_text())
    content["steps"]["loader"] |= fields
    path.write_text(json.dumps(content))


def shorter(path: Path) -> None:
    change(path, before=base64.b64encode(b"short").decode())


def invalid(path: Path) -> None:
    change(path, after=base64.b64encode(bytes(len(rng.cpu()))).decode())


def garbage(path: Path) -> None:
    change(path, before="???")


def no_text(path: Path) -> None:
    change(path, before=7)


def no_end(path: Path) -> None:
    content = json.loads(path.read_text())
    del content["steps"]["loader"]["after"]
    path.write_text(json.dumps(content))


def torn(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:1000])


def foreign(path: Path) -> None:
    path.write_text("[1, 2]")


def other_object(path: Path) -> None:
    path.write_text('{"steps": {}}')


def list_of_steps(path: Path) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | {"steps": []}))


def binary(path: Path) -> None:
    path.write_bytes(b"\x80\x04\xff")


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


SPOILT = [shorter, invalid, garbage, no_text, no_end, torn, foreign, other_object, list_of_steps, binary]


@pytest.mark.parametrize("spoil", SPOILT)
def test_a_spoilt_ledger_is_an_empty_one(spoil: Callable[[Path], None], tmp_path: Path) -> None:
    expected = run(from_torch)
    spoil(file(tmp_path))
    with pytest.warns(UserWarning, match=r"is not a readable ledger .*; this start-up runs without it") as warned:
        assert run(from_torch) == expected
    assert len(warned) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run(from_torch)[0] == AHEAD, "a new one was written"


def test_a_folder_in_the_ledgers_place_costs_the_ledger(tmp_path: Path) -> None:
    expected = run(from_torch)
    folder(file(tmp_path))
    with pytest.warns(UserWarning) as warned:
        assert run(from_torch) == expected
    assert sorted("readable" if "readable" in str(w.message) else "written" for w in warned) == ["readable", "written"]


def test_a_ledger_that_can_not_be_written_costs_one_warning(tmp_path: Path) -> None:
    (tmp_path / "ledger").write_text("not a folder")
    with pytest.warns(UserWarning) as warned:
        assert run(from_torch)[0] == IN_TURN
    assert [str(w.message).partition(" was not written")[0] for w in warned if "written" in str(w.message)] == [
        f"initopt: the ledger {file(tmp_path)}"
    ]


def test_an_edited_state_costs_time_only(tmp_path: Path) -> None:
    expected = run(from_torch)[1:]
    wrong = torch.Generator().manual_seed(99).get_state().numpy().tobytes()
    change(file(tmp_path), before=base64.b64encode(wrong).decode())
    ran, *found = run(from_torch)
    assert ran == AGAIN and found == list(expected)


def test_an_unchanged_ledger_is_not_written_again(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "a.json", "x")
    ledger.save()
    assert not ledger.path.exists()
    ledger["loader"] = Entry(rng.cpu(), rng.cpu())
    ledger.save()
    before = ledger.path.stat().st_ino
    again = Ledger(tmp_path / "a.json", "x")
    again.save()
    assert again.path.stat().st_ino == before
    assert again["loader"] == ledger["loader"]
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    del again["loader"]
    again.save()
    assert "loader" not in Ledger(tmp_path / "a.json", "x")


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_generator_is_set_whatever_the_default_device(device: str) -> None:
    state = rng.cpu()
    first = torch.rand(1).item()
    with torch.device(device), torch.inference_mode():
        rng.write(state)
    assert torch.rand(1).item() == first


def test_a_state_that_does_not_fit_is_refused() -> None:
    before = rng.cpu()
    for state in (b"", b"short", bytes(len(before))):
        with pytest.raises(ValueError, match="no state of torch's generator"):
            rng.write(state)
    assert rng.cpu() == before


def test_swapped_puts_the_generator_back_after_an_error() -> None:
    before = rng.cpu()
    other = torch.Generator().manual_seed(5).get_state().numpy().tobytes()
    with pytest.raises(KeyError), rng.swapped(other):
        assert rng.cpu() == other
        torch.rand(1)
        raise KeyError
    assert rng.cpu() == before


def test_digests_tell_states_apart() -> None:
    state = rng.read()
    assert rng.digest(state) == rng.digest(dict(reversed(state.items())))
    assert rng.digest(state) != rng.digest({**state, "cuda:0": b""})
    torch.rand(1)
    assert rng.digest(state) != rng.digest(rng.read())


def test_moved_looks_at_what_both_know() -> None:
    assert not rng.moved({}, {"cpu": b"1"})
    assert not rng.moved({"cpu": b"1"}, {"cpu": b"1", "cuda:0": b"2"})
    assert rng.moved({"cpu": b"1"}, {"cpu": b"2"})
