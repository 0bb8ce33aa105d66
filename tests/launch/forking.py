"""Runs a script as `python -u` does and as a rank that was forked, and hands back what came of both."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from initopt.launch.warm_workers import ForkedRank, WarmWorkers

LIMIT = 30.0


@dataclass(frozen=True)
class Ended:
    """What a process left: its exit code and what it wrote."""

    code: int
    out: str
    err: str


class Job:
    """Ranks of one program, each with files for its output."""

    def __init__(self, workers: WarmWorkers) -> None:
        self.workers = workers
        self.folder = tempfile.TemporaryDirectory(prefix="initopt-ranks-")
        self.ranks: list[ForkedRank] = []

    def rank(self, environment: Mapping[str, str] | None = None) -> ForkedRank:
        number = len(self.ranks)
        with open(f"{self.folder.name}/out{number}", "wb") as out, open(f"{self.folder.name}/err{number}", "wb") as err:
            variables = {**os.environ, "RANK": str(number), **(environment or {})}
            forked = self.workers.fork(variables, out.fileno(), err.fileno())
        self.ranks.append(forked)
        return forked

    def ended(self, number: int = 0) -> Ended:
        code = self.ranks[number].wait(LIMIT)
        out, err = (Path(f"{self.folder.name}/{name}{number}").read_text() for name in ("out", "err"))
        return Ended(code, out, err)


@contextmanager
def job(*words: str, preload: str | None = None) -> Iterator[Job]:
    """Ranks of `python -u *words`; none outlives the block."""
    made = Job(WarmWorkers((sys.executable, "-u", *words), preload))
    made.workers.begin(os.environ)
    try:
        yield made
    finally:
        for rank in made.ranks:
            if rank.poll() is None:
                os.killpg(rank.pid, 9)
                rank.wait(LIMIT)
        made.workers.end()
        made.folder.cleanup()


def both(*words: str, act: Callable[[int], None] = lambda pid: None) -> tuple[Ended, Ended]:
    """The program as `python -u` runs it, and as a forked rank. `act` is called with the process id of each."""
    return plain(words, act), forked(words, act)


def plain(words: Sequence[str], act: Callable[[int], None] = lambda pid: None) -> Ended:
    with subprocess.Popen(
        [sys.executable, "-u", *words],
        env={**os.environ, "RANK": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        act(process.pid)
        out, err = process.communicate(timeout=LIMIT)
    return Ended(process.returncode, out, err)


def forked(words: Sequence[str], act: Callable[[int], None] = lambda pid: None) -> Ended:
    with job(*words) as ranks:
        act(ranks.rank().pid)
        return ranks.ended()
