"""Nothing that a command starts outlives the call, whichever way it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from initopt import contain

WORKER = "import time; time.sleep(600)"
LAUNCHER = f"""
import pathlib, subprocess, sys, time
worker = subprocess.Popen([sys.executable, "-c", {WORKER!r}], start_new_session=True)
path = pathlib.Path(sys.argv[1])
path.with_suffix(".new").write_text(str(worker.pid))
path.with_suffix(".new").rename(path)
exec(sys.argv[2])
"""
"""Starts a worker in a session of its own, as torchrun does, says its process id, and goes on as told."""


def launcher(pid_file: Path, then: str) -> list[str]:
    return [sys.executable, "-c", LAUNCHER, str(pid_file), then]


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def once(pid_file: Path, act: Callable[[], object]) -> threading.Thread:
    """Do something in a thread as soon as the launcher has written its worker's process id."""

    def wait_and_act() -> None:
        while not pid_file.exists():
            time.sleep(0.01)
        act()

    thread = threading.Thread(target=wait_and_act, daemon=True)
    thread.start()
    return thread


def test_code_and_output(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"]
    outcome = contain.run(command, env=os.environ, log=tmp_path / "log", timeout=60)
    assert outcome == contain.Outcome(3)
    assert sorted((tmp_path / "log").read_text().split()) == ["err", "out"]


def test_the_environment_is_the_given_one(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import os; print(os.environ['GIVEN'], 'HOME' in os.environ)"]
    contain.run(command, env={"GIVEN": "this"}, log=tmp_path / "log", timeout=60)
    assert (tmp_path / "log").read_text().split() == ["this", "False"]


@pytest.mark.parametrize(
    "then",
    [
        "pathlib.Path(sys.argv[1] + '.ready').touch(); time.sleep(600)",
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "pathlib.Path(sys.argv[1] + '.ready').touch(); time.sleep(600)",
    ],
    ids=["obeys", "ignores SIGTERM"],
)
def test_a_timeout_ends_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str) -> None:
    """The timeout comes as soon as the worker is there, in a session of its own."""
    pid_file = tmp_path / "pid"

    def wait(process: subprocess.Popen[bytes], timeout: float) -> int:
        while not (tmp_path / "pid.ready").exists() and process.poll() is None:
            time.sleep(0.01)
        raise subprocess.TimeoutExpired(process.args, timeout)

    monkeypatch.setattr(contain, "GRACE", 0.5)
    monkeypatch.setattr(subprocess.Popen, "wait", wait)
    outcome = contain.run(launcher(pid_file, then), env=os.environ, log=tmp_path / "log", timeout=60)
    assert outcome == contain.Outcome(None)
    assert not is_running(int(pid_file.read_text()))


def test_a_call_inside_a_call_belongs_to_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The outer call ends what the inner one started, even where the inner one is killed without a word."""
    monkeypatch.setattr(contain, "GRACE", 0.5)
    pid_file = tmp_path / "pid"
    inner = launcher(pid_file, "os.kill(os.getppid(), 9); time.sleep(600)")
    inner[2] = "import os" + inner[2]
    script = f"""
import os, pathlib
from initopt import contain
contain.run({inner!r}, env=os.environ, log=pathlib.Path({str(tmp_path / "inner")!r}), timeout=60)
"""
    env = {**os.environ, "PYTHONPATH": str(Path(contain.__file__).parents[1])}
    outcome = contain.run([sys.executable, "-c", script], env=env, log=tmp_path / "outer", timeout=60)
    assert outcome.code == -signal.SIGKILL
    assert len(outcome.left) == 2
    assert not is_running(int(pid_file.read_text()))


def test_the_timeout_is_kept(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    outcome = contain.run(command, env=os.environ, log=tmp_path / "log", timeout=0.1)
    assert outcome == contain.Outcome(None)


def test_what_a_finished_command_left_is_named_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contain, "GRACE", 0.2)
    pid_file = tmp_path / "pid"
    outcome = contain.run(launcher(pid_file, "sys.exit(0)"), env=os.environ, log=tmp_path / "log", timeout=60)
    assert outcome.code == 0
    (left,) = outcome.left
    assert WORKER in left
    assert not is_running(int(pid_file.read_text()))


def test_a_request_to_end_the_caller_ends_the_workers_first(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    before = signal.getsignal(signal.SIGTERM)
    thread = once(pid_file, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit) as interrupt:
        contain.run(launcher(pid_file, "time.sleep(600)"), env=os.environ, log=tmp_path / "log", timeout=60)
    thread.join()
    assert interrupt.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before
    assert not is_running(int(pid_file.read_text()))


def test_an_unknown_command_is_the_caller_s_to_explain(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no-such-command"):
        contain.run(["no-such-command"], env=os.environ, log=tmp_path / "log", timeout=60)


def test_other_processes_are_left_alone(tmp_path: Path) -> None:
    """Two calls at once: the end of one doesn't touch the workers of the other."""
    pid_file = tmp_path / "pid"
    results: list[contain.Outcome] = []
    thread = threading.Thread(
        target=lambda: results.append(
            contain.run(
                launcher(
                    pid_file,
                    f"""
while not pathlib.Path({str(tmp_path / "go")!r}).exists(): time.sleep(0.01)
worker.kill(); worker.wait(); sys.exit(7)""",
                ),
                env=os.environ,
                log=tmp_path / "log",
                timeout=60,
            )
        )
    )
    thread.start()
    once(pid_file, lambda: None).join()
    contain.run([sys.executable, "-c", ""], env=os.environ, log=tmp_path / "other", timeout=60)
    assert is_running(int(pid_file.read_text()))
    (tmp_path / "go").touch()
    thread.join()
    assert results == [contain.Outcome(7)]
