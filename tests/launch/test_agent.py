"""What `initopt launch` understands, and what it leaves to torchrun."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.elastic.multiprocessing.api as api

from initopt.launch import agent
from initopt.launch.warm_workers import LaunchError, WarmWorkers


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()


@pytest.fixture(autouse=True)
def begun(monkeypatch: pytest.MonkeyPatch) -> list[WarmWorkers]:
    """What was begun to be imported; nothing is."""
    found: list[WarmWorkers] = []

    def begin(workers: WarmWorkers, environment: Mapping[str, str]) -> None:
        workers._environment = dict(environment)
        found.append(workers)

    monkeypatch.setattr(WarmWorkers, "begin", begin)
    monkeypatch.setattr(WarmWorkers, "wait", lambda workers: None)
    return found


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--no-python"], "--no-python: a program that isn't Python has no imports to share: use torchrun"),
        (["--run-path"], "--run-path: a forked rank runs the script in its own process anyway: leave it out"),
        (["--numa-binding=node"], "--numa-binding: .*: use torchrun"),
        (["nofile.py"], "no such file: nofile.py"),
    ],
)
def test_what_makes_no_sense_is_refused(options: list[str], reason: str) -> None:
    with pytest.raises(LaunchError, match=reason):
        agent.launch([*options, "train.py"])


@pytest.mark.parametrize(
    ("place", "name", "value", "reason"),
    [
        (torch, "__version__", "3.0.0", r"torch 3\.0\.0 was not tested, only 2\.13\.\*"),
        (api, "get_subprocess_handler", None, "has no get_subprocess_handler"),
        (os, "pidfd_open", None, "forked ranks need Linux 5.3 or newer"),
        (WarmWorkers, "begin", lambda workers, environment: _refuse(), "odd started 1 thread"),
    ],
)
def test_a_host_that_can_t_fork_ranks_runs_them_as_torchrun_does(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    place: Any,
    name: str,
    value: object,
    reason: str,
) -> None:
    run, _, _ = agent._torch()
    seen: list[object] = []
    stock = api.get_subprocess_handler
    monkeypatch.setattr(run, "run", lambda chosen: seen.append(getattr(api, "get_subprocess_handler", stock)))
    if value is None:
        monkeypatch.delattr(place, name)
    else:
        monkeypatch.setattr(place, name, value)

    agent.launch(["--nproc-per-node=2", "train.py"])

    assert seen == [stock]
    (line,) = capfd.readouterr().err.splitlines()
    assert re.match(f"initopt launch: .*{reason}.*; ranks are started as by torchrun here", line)


def _refuse() -> None:
    raise LaunchError("odd started 1 thread")


def test_the_hosts_meet_beside_the_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    run, _, _ = agent._torch()
    order: list[str] = []
    monkeypatch.setattr(WarmWorkers, "begin", lambda workers, environment: order.append("import"))
    monkeypatch.setattr(WarmWorkers, "wait", lambda workers: order.append("imported"))
    monkeypatch.setattr(run, "run", lambda chosen: order.append("meet"))

    agent.launch(["train.py"])

    assert order == ["import", "meet"]


@pytest.mark.parametrize("refused", [True, False])
def test_a_rank_that_can_t_be_forked_is_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], refused: bool
) -> None:
    _, _, handler = agent._torch()
    workers = WarmWorkers(("python", "-u", "train.py"))
    monkeypatch.setattr(workers, "fork", lambda *_: _refuse() if refused else "forked")
    monkeypatch.setattr(handler, "_popen", lambda *_: "started")
    made = agent._handlers(handler, workers)
    ranks = [made(words[0], words[1:], {}, None, None, 0, None).proc for words in (workers.words, ("python", "-c"))]

    assert ranks == ["started" if refused else "forked", "started"]
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("initopt launch: torch starts ranks by another command here (python -c ...); ranks are")
    assert len(lines) == 1 + refused


def test_help_is_torchrun_s_and_ours(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        agent.launch(["--help"])
    assert left.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: initopt launch")
    assert text.splitlines()[2] == "torchrun with imports shared: ranks are forked from one process."
    assert "--preload MODULES" in text
    assert "--max-restarts" in text


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train.py"], ("train.py",)),
        (["--standalone", "--nproc-per-node", "2", "train.py", "--x", "-m"], ("train.py", "--x", "-m")),
        (["--nproc_per_node=2", "-m", "pkg.train", "word"], ("-m", "pkg.train", "word")),
        (["--rdzv-id", "7", "--max-restarts=3", "--module", "pkg.train"], ("-m", "pkg.train")),
        (["--preload", "torch,a", "-t", "3", "train.py", "--preload", "b"], ("train.py", "--preload", "b")),
    ],
)
def test_the_guess_is_what_torch_s_parser_says(
    begun: list[WarmWorkers], monkeypatch: pytest.MonkeyPatch, words: list[str], expected: tuple[str, ...]
) -> None:
    monkeypatch.delenv("PYTHON_EXEC", raising=False)
    run, _, _ = agent._torch()
    seen = []
    monkeypatch.setattr(run, "run", seen.append)

    agent.launch(words)

    (workers,) = begun
    assert workers.words == (sys.executable, "-u", *expected)
    assert workers.words == agent._command(seen[0])
    assert workers.preload == ("torch,a" if "torch,a" in words else None)


def test_threads_are_guessed_as_torchrun_sets_them(begun: list[WarmWorkers], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for words in (["--nproc-per-node", "2"], ["--nproc_per_node=gpu"], []):
        agent._guess([*words, "train.py"])
    assert [workers._environment.get("OMP_NUM_THREADS") for workers in begun] == ["1", "1", None]
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    agent._guess(["--nproc-per-node=2", "train.py"])
    assert begun[-1]._environment == dict(os.environ)


def test_handlers_are_torch_s_again(monkeypatch: pytest.MonkeyPatch) -> None:
    before = api.get_subprocess_handler
    run, _, _ = agent._torch()
    seen = []
    monkeypatch.setattr(run, "run", lambda chosen: seen.append(api.get_subprocess_handler))
    agent.launch(["train.py"])
    assert seen[0] is not before
    assert api.get_subprocess_handler is before
