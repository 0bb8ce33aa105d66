"""`--optimize` without ranks: what is switched off, what fails, whose rendezvous it is, and how it is shown."""

from __future__ import annotations

import os
import sys
import threading
import traceback
import types
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from initopt import report
from initopt.advice import advice
from initopt.hooks import drop_own_frames
from initopt.optimizations import NAMES, enabled
from initopt.optimize import rendezvous as early
from initopt.optimize.applied import Optimizing
from initopt.optimize.loaders import Loaders
from initopt.optimize.rendezvous import EarlyStore
from initopt.optimize.saying import Saying
from initopt.record import Advised, Optimized
from initopt.runs import Run
from tests.synthetic import serial_spans, write_run


class Said(Saying):
    """Keeps what is said."""

    def __init__(self) -> None:
        self.all: list[Optimized | Advised] = []
        said = self.all

        class Kept:
            def optimized(self, what: Optimized | Advised) -> None:
                said.append(what)

        super().__init__(Kept, lambda: "train.py:7")  # type: ignore[arg-type]


def test_names_are_taken_away_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("INITOPT_DISABLE", raising=False)
    assert enabled(reversed(NAMES)) == NAMES
    monkeypatch.setenv("INITOPT_DISABLE", "plan, groups,compile")
    assert enabled(NAMES) == ("gc", "rendezvous", "eliminate", "fill-once", "failures", "patience", "order")
    said = Said()
    optimizing = Optimizing([name for name in NAMES if name != "eliminate"], "train.py", "", said, is_script=False)
    assert optimizing.instead("plan", len) is len
    assert optimizing.instead("dmp", len) is not len
    optimizing.trained()
    why = {one.name: one.text for one in said.all if isinstance(one, Optimized)}
    assert why["plan"] == why["compile"] == "INITOPT_DISABLE names it"
    assert why["eliminate"] == "--no-eliminate"
    optimizing.end()


def test_what_fails_costs_the_optimization_and_is_said_once_with_the_way_out() -> None:
    said = Said()
    told = "initopt: 'plan' of --optimize is left out here.*--no-plan switches it off"
    with pytest.warns(UserWarning, match=told), said.costs_only("plan"):
        raise OSError("no such disk")
    assert said.all == [Optimized("plan", False, "it failed with OSError: no such disk", "train.py:7")]


def test_the_frames_of_other_code_stay() -> None:
    def theirs() -> None:
        raise KeyError("x")

    here = os.path.dirname(__file__)
    try:
        theirs()
    except KeyError as raised:
        whole = traceback.extract_tb(raised.__traceback__)
        drop_own_frames(raised, here)
        # The innermost frame is in that folder: then it is that code's own error.
        assert traceback.extract_tb(raised.__traceback__) == whole
        drop_own_frames(raised, os.path.join(here, "nowhere"))
        assert traceback.extract_tb(raised.__traceback__) == whole


def test_another_torchrec_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    version = types.ModuleType("torchrec.version")
    version.__version__ = "1.8.0"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchrec.version", version)
    said = Said()
    optimizing = Optimizing(NAMES, "train.py", "", said, is_script=False)
    for event in ("plan", "dmp", "plan"):
        assert optimizing.instead(event, len) is len
    assert [(one.name, one.text) for one in said.all if isinstance(one, Optimized)] == [
        (name, "torchrec 1.8.0 is not what was tested (1.9.*)") for name in ("plan", "eliminate", "fill-once")
    ]


@pytest.fixture
def torchrun_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    server = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    names = ("127.0.0.1", str(server.port), "0", "1", "True")
    for name, value in zip(early._NAMES, names, strict=True):
        monkeypatch.setenv(name, value)
    yield server


def asked(store: EarlyStore, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    return next(store.instead(distributed.rendezvous)(*args, **kwargs))


def test_a_connection_is_handed_over_once_to_who_asks_for_the_same(torchrun_store: Any) -> None:
    said = Said()
    store = EarlyStore(said)
    store.begin()
    store.begin()
    assert [one.name for one in threading.enumerate()].count("initopt-rendezvous") <= 1
    found, rank, size = asked(store, "env://", -1, -1, timeout=timedelta(seconds=5))
    assert (rank, size) == (0, 1)
    found.set("key", "value")
    assert torchrun_store.get("key") == b"value"
    again, *_ = asked(store, "env://", -1, -1)
    assert again is not found
    assert [one.applied for one in said.all if isinstance(one, Optimized)] == [True]


@pytest.mark.parametrize("other", ["address", "rank", "size", "environment"])
def test_another_rendezvous_is_torch_s(other: str, torchrun_store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    said = Said()
    store = EarlyStore(said)
    store.begin()
    url, rank, size = "env://", -1, -1
    if other == "address":
        url, rank, size = f"tcp://127.0.0.1:{os.environ['MASTER_PORT']}", 0, 1
    elif other == "rank":
        rank = 3
    elif other == "size":
        size = 2
    else:
        monkeypatch.setenv("RANK", "1")
    calls = []
    answer = iter([("torch's",)])
    assert next(store.instead(lambda *given, **more: calls.append(given) or answer)(url, rank, size)) == ("torch's",)
    assert calls == [(url, rank, size)]
    assert [one.text for one in said.all if isinstance(one, Optimized)] == [
        "the script's rendezvous is not the one that torchrun has set up"
    ]
    early._wait()


def test_an_address_that_no_rank_serves_is_named(
    torchrun_store: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(early, "SPEAK", 0.05)
    said = threading.Event()
    monkeypatch.setattr(early, "_say_nobody_serves", lambda url, say=early._say_nobody_serves: say(url) or said.set())

    def waiting(*_: Any, **__: Any) -> Iterator[Any]:
        said.wait()
        yield "store"

    store = EarlyStore(Said())
    url = "tcp://127.0.0.1:1"
    assert next(store.instead(waiting)(url, 0, 2)) == "store"
    assert capsys.readouterr().err.startswith(f"initopt: nothing has answered at {url} for 0.05 s. Under torchrun")
    # The job's own is served, by the agent.
    timers = []
    monkeypatch.setattr(threading.Timer, "start", lambda timer: timers.append(timer))
    own = f"tcp://127.0.0.1:{os.environ['MASTER_PORT']}"
    assert [next(store.instead(lambda *_: iter("s"))(one, 0, 2)) for one in (own, "file:///x", url)] == ["s"] * 3
    assert len(timers) == 1


def test_without_torchrun_s_store_nothing_is_connected(torchrun_store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    store = EarlyStore(Said())
    store.begin()
    assert not store._is_for("env://", -1, -1, {})


def test_a_loader_that_could_start_earlier_is_advice_only() -> None:
    said = Said()
    loaders = Loaders(said)

    class Iterator_:
        def __init__(self, dataset: Any) -> None:
            self._dataset = dataset

    rows = [torch.ones(1)]
    loader = torch.utils.data.DataLoader(rows, num_workers=1)  # type: ignore[arg-type,var-annotated]
    plain = torch.utils.data.DataLoader(rows)  # type: ignore[arg-type,var-annotated]
    for one in (loader, plain):
        loaders.made(one, 1.0)
        loaders.begins(one, 3.0)
        loaders.first_batch(Iterator_(rows), 0.5, "first_batch")
    (tip,) = said.all
    assert isinstance(tip, Advised)
    assert tip.place == "train.py:7"
    assert tip.steps == {"first_batch": 0.5}
    assert "DataLoader(..., generator=torch.Generator().manual_seed(seed))" in tip.text


def test_the_summary_says_what_was_done_and_what_was_not(tmp_path: Path) -> None:
    extra = [
        one
        for rank in (0, 1, 2)
        for one in (
            Optimized("plan", True, "every rank made the sharding plan", "train.py:12", rank),
            Optimized("eliminate", False, "Mine is not TorchRec's own", "train.py:20", rank),
            Advised("call iter() of this loader where it is made", "train.py:30", {"model": 1.0}, rank),
        )
    ]
    run = Run.load(write_run(tmp_path, serial_spans(), extra=extra))
    shown = report.summary(run, width=100)
    assert "Optimized  plan: every rank made the sharding plan (train.py:12)" in shown.plain
    assert "As it was  eliminate: Mine is not TorchRec's own (train.py:20)" in shown.plain
    assert shown.data["optimized"][0]["name"] == "plan"
    # One blank line before it, whether something precedes it or not.
    assert "\n\n\n" not in shown.plain
    bare = report.summary(replace(run, graph=None, usages={}), width=100).plain
    assert "\n\nOptimized" in bare and "\n\n\n" not in bare
    tips = [one for one in advice(run) if one.place == "train.py:30"]
    assert [one.saves for one in tips] == [pytest.approx(1.0)]
    assert f"train.py:30: ~{report.seconds(tips[0].saves or 0.0)}" in shown.plain
    json_tips = [one for one in shown.data["advice"] if one["place"] == "train.py:30"]
    assert json_tips[0]["saves"] == pytest.approx(1.0)
