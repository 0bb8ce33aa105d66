"""Starts the ranks of one job as fresh processes, waits for them, and leaves none behind.

It plays torchrun's part for tests, with two differences: it never stops the other ranks when one fails (a test may
want to see them leave by themselves), and it finds descendants wherever they went, by a mark in their environment.
It needs /proc.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
MARK = "INITOPT_TEST_JOB"


@dataclass(frozen=True)
class RankOutput:
    """What one rank left: exit code (negative: the signal that ended it) and everything it wrote."""

    rank: int
    returncode: int
    stdout: str
    stderr: str


@dataclass(frozen=True)
class JobOutput:
    """What a job left. `seconds` is the wall time until its last rank ended or the limit was reached.

    `orphans` are the process ids that were still alive when all ranks had ended (after `grace` seconds for resource
    trackers and pools to leave by themselves); they have been killed since.
    """

    ranks: tuple[RankOutput, ...]
    seconds: float
    timed_out: bool
    orphans: tuple[int, ...]

    def check(self) -> JobOutput:
        """The job itself when every rank ended with 0 and left nothing, else AssertionError with what they wrote."""
        failed = [rank for rank in self.ranks if rank.returncode != 0]
        if failed or self.timed_out or self.orphans:
            state = "reached its time limit" if self.timed_out else "failed"
            texts = [f"--- rank {r.rank}, exit code {r.returncode}\n{r.stdout}\n{r.stderr}" for r in failed]
            raise AssertionError(
                "\n".join([f"the job {state} after {self.seconds:.1f} s, orphans {self.orphans}", *texts])
            )
        return self


def free_port() -> int:
    """A TCP port of this host that nothing listens on, and that no connection is given by the system."""
    while True:
        # Below those that the system hands out, to the other tests that run meanwhile among others.
        port = random.SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def marked(job: str) -> tuple[int, ...]:
    """The live processes that carry this job's mark, in whatever session or under whatever parent."""
    wanted = f"{MARK}={job}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:  # another user's, or gone meanwhile
            continue
    return tuple(sorted(found))


def launch(
    script_args: Sequence[str],
    ranks: int = 2,
    env: Mapping[str, str] | None = None,
    timeout: float = 120.0,
    *,
    grace: float = 2.0,
) -> JobOutput:
    """Run `python *script_args` once per rank, each in a session of its own, and wait for all.

    `env` is added to this process's environment and wins over what is set here (RANK, WORLD_SIZE, MASTER_PORT, one
    thread per process). After `timeout` seconds everything is killed. Never raises for a failing rank: see
    `JobOutput.check`.
    """
    job = uuid.uuid4().hex
    shared = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")])),
        MARK: job,
    }
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="initopt-job-") as folder:
        workers: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(ranks):
                # Not pipes: a rank that writes much would block, and so would we on an orphan that holds one open.
                with open(f"{folder}/out{rank}", "wb") as out, open(f"{folder}/err{rank}", "wb") as err:
                    workers.append(
                        subprocess.Popen(
                            [sys.executable, *script_args],
                            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank), **(env or {})},
                            stdin=subprocess.DEVNULL,
                            stdout=out,
                            stderr=err,
                            start_new_session=True,
                        )
                    )
            timed_out = not _wait(workers, start + timeout)
            seconds = time.monotonic() - start
            orphans = () if timed_out else remaining(job, grace)
        finally:
            _kill(job, workers)
        outputs = tuple(
            RankOutput(
                rank,
                worker.returncode,
                Path(f"{folder}/out{rank}").read_text(errors="replace"),
                Path(f"{folder}/err{rank}").read_text(errors="replace"),
            )
            for rank, worker in enumerate(workers)
        )
    return JobOutput(outputs, seconds, timed_out, orphans)


def _wait(workers: Sequence[subprocess.Popen[bytes]], deadline: float) -> bool:
    """Whether all ended before the deadline (monotonic seconds)."""
    for worker in workers:
        try:
            worker.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return False
    return True


def remaining(job: str, grace: float) -> tuple[int, ...]:
    """Those of them that have not ended after `grace` seconds: who was killed takes a moment."""
    deadline = time.monotonic() + grace
    while (left := marked(job)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def _kill(job: str, workers: Sequence[subprocess.Popen[bytes]]) -> None:
    # Until none is left: a process may have forked between the listing and the signal.
    while left := marked(job):
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.02)
    for worker in workers:
        worker.wait()
