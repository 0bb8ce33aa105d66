"""One rank works for all, on ranks that are processes and can be killed, or stopped."""

from __future__ import annotations

import faulthandler
import json
import os
import select
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from initopt.compile_cache import board, leader
from initopt.compile_cache.leader import one_for_all

LONG = 30.0
"""Seconds that something is waited for before the test fails."""


class Process:
    """A rank as a forked process: its pipe brings `works` when it leads, then its outcome."""

    def __init__(self, store: Callable[[], dist.Store], rank: int, *, held: bool) -> None:
        self._read, write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.setsid()
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                # Before the parent's patience ends, so that a rank that hangs says where.
                faulthandler.dump_traceback_later(LONG - 5, exit=True)
                self._run(write, store(), rank, held)
            finally:
                os._exit(1)
        os.close(write)

    def _run(self, write: int, store: dist.Store, rank: int, held: bool) -> None:
        def work(say: Callable[[str], None]) -> str:
            os.write(write, b'"works"\n')
            while held:
                signal.pause()
            return f"made by {rank}"

        end = one_for_all(store, rank=rank, topic="t", patience=LONG, work=work, use=lambda result: None)
        os.write(write, json.dumps([end.role, end.leader, end.why, end.result]).encode() + b"\n")

    def says(self) -> Any:
        text = b""
        while not text.endswith(b"\n"):
            assert select.select([self._read], [], [], LONG)[0], "the rank says nothing"
            more = os.read(self._read, 1)
            assert more, "the rank is gone"
            text += more
        return json.loads(text)

    def end(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self._read)


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Process]]:
    monkeypatch.setattr(board, "POLL", 0.005)
    monkeypatch.setattr(leader, "BEAT", 0.01)
    monkeypatch.setattr(leader, "SILENCE", 1.0)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    made: list[Process] = []

    def tcp() -> dist.Store:
        return dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)

    def start(rank: int, *, store: Callable[[], dist.Store] = tcp, held: bool = False) -> Process:
        made.append(Process(store, rank, held=held))
        return made[-1]

    yield start
    for each in made:
        each.end()


def test_many_processes_have_one_leader(process: Callable[..., Process], tmp_path: Path) -> None:
    # Eight that connect at once ask a resolver for this host's name at once, which a slow one takes many seconds for.
    ranks = [process(rank, store=lambda: dist.FileStore(str(tmp_path / "store"), -1)) for rank in range(8)]
    said = [rank.says() for rank in ranks]
    assert said.count("works") == 1
    led = said.index("works")
    said[led] = ranks[led].says()
    for rank, end in enumerate(said):
        assert end == ["led" if rank == led else "followed", led, "", f"made by {led}"]


def test_a_leader_that_is_killed_is_replaced(process: Callable[..., Process]) -> None:
    first = process(0, held=True)
    assert first.says() == "works"
    others = [process(1), process(2)]
    os.kill(first.pid, signal.SIGKILL)
    said = [other.says() for other in others]
    led = said.index("works")
    said[led] = others[led].says()
    why = said[led][2]
    assert why.startswith(f"the process of rank 0 (pid {first.pid} on ") and why.endswith(") is gone")
    assert said[led] == ["led", led + 1, why, f"made by {led + 1}"]
    assert said[1 - led] == ["followed", led + 1, why, f"made by {led + 1}"]


def test_a_leader_that_stands_still_is_replaced(process: Callable[..., Process]) -> None:
    first = process(0, held=True)
    assert first.says() == "works"
    os.kill(first.pid, signal.SIGSTOP)
    second = process(1)
    assert second.says() == "works"
    assert second.says() == ["led", 1, "rank 0 has said nothing for 1 s", "made by 1"]
