"""Run a command so that none of its processes outlives the call: not at its end, not at a timeout, not at an interrupt.

A launcher gives its workers process groups of their own, and a worker whose parent died belongs to nobody: neither the
command's group nor a walk over parents finds them all. So every process inherits a mark in its environment, and what
bears the mark is ended. A process that replaces its environment and leaves the group escapes, and without /proc only
the command's own group is found.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

MARK = "INITOPT_CONTAINED"
"""The environment variable that marks the processes of a call, after those of the calls that it is made in."""

GRACE = 6.0
"""Seconds that processes get to end by themselves. A data loader's worker takes up to 5 to see its parent gone."""

_POLL = 0.05


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a command ended. `code` is its exit code as `subprocess` gives it, or None when it was ended at its timeout.

    `left` are the command lines of processes that it left running and that had to be ended.
    """

    code: int | None
    left: tuple[str, ...] = ()


def run(command: Sequence[str], *, env: Mapping[str, str], log: Path, timeout: float) -> Outcome:
    """Run `command` with the environment `env`, output and errors into the file `log`, for at most `timeout` seconds.

    Returns when no process of it is left. Raises OSError when the command can't be started or the log can't be written,
    and TimeoutError when a process of it can't be ended; an exception that interrupts the wait goes on after the
    processes are ended. In the main thread SIGTERM and SIGHUP count as interrupts, too (they raise SystemExit).
    """
    mark = uuid.uuid4().hex
    process: subprocess.Popen[bytes] | None = None
    left: tuple[str, ...] = ()
    ended = False
    with _signals_interrupt(), log.open("wb") as output:
        try:
            process = subprocess.Popen(
                list(command),
                env={**env, MARK: f"{env.get(MARK, '')} {mark}".strip()},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout)
                ended = True
        finally:
            members = _Members(mark, process)
            if not ended:
                members.signal(signal.SIGTERM)
            if not members.gone_within(GRACE):
                left = tuple(_command_line(pid) for pid in members.pids())
                members.kill()
            if process is not None:
                # It has ended, perhaps since it was last looked at.
                process.poll()
    return Outcome(process.returncode, left) if ended else Outcome(None)


@contextmanager
def _signals_interrupt() -> Iterator[None]:
    """Make a request to end this process an exception, so that what it started is ended too."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(frozen=True, slots=True)
class _Members:
    """The living processes of one call: those that bear its mark and those in the command's own process group."""

    mark: str
    process: subprocess.Popen[bytes] | None

    def pids(self) -> list[int]:
        if self.process is not None:
            self.process.poll()  # reaped, it no longer counts
        group = None if self.process is None else self.process.pid
        if not Path("/proc/self/stat").exists():
            return [] if group is None or not _group_exists(group) else [group]
        return [
            int(entry.name)
            for entry in Path("/proc").glob("[0-9]*")
            if _is_living_member(entry, group) or _bears(entry, self.mark)
        ]

    def signal(self, number: int) -> None:
        if self.process is not None and self.process.poll() is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, number)
        for pid in self.pids():
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)

    def gone_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self.pids():
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL)
        return True

    def kill(self) -> None:
        deadline = time.monotonic() + GRACE
        while not self.gone_within(_POLL):
            if time.monotonic() >= deadline:
                raise TimeoutError(f"processes {self.pids()} don't end, not even by SIGKILL: end them by hand")
            self.signal(signal.SIGKILL)


def _is_living_member(entry: Path, group: int | None) -> bool:
    """Whether the process is in the group and more than a zombie, which nobody may ever reap where init doesn't."""
    try:
        # The name before the last bracket may hold spaces and brackets itself.
        state, _parent, process_group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
    except (OSError, ValueError):
        return False
    return int(process_group) == group and state not in "ZX"


def _bears(entry: Path, mark: str) -> bool:
    """Whether the process has the mark. The environment of a zombie is empty."""
    try:
        return mark.encode() in (entry / "environ").read_bytes()
    except OSError:
        return False


def _group_exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _command_line(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        words = []
    return b" ".join(words).decode(errors="replace").strip() or f"process {pid}"
