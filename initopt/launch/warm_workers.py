"""The agent's side: start the process that imports once, and have it fork ranks that look like `subprocess.Popen`."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from initopt.launch.first_imports import left_to_ranks
from initopt.launch.wire import receive, send
from initopt.process_tree import descendants, kill

_PATIENCE = 60.0
"""Seconds that a fork may take. The process that forks has nothing else to do."""

_AT_IMPORT = "OMP_NUM_THREADS"
"""What native code reads while it is imported, and torchrun may set for the ranks."""

_BEGIN = (
    f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r}); "
    "from initopt.launch.warm_parent import main; del sys.path[0]; main()"
)
"""What the process runs: this very initopt, wherever it is."""


class LaunchError(Exception):
    """The ranks can't be forked. The text says which module is in the way, or what else, and the way out."""


class _Gone(LaunchError):
    """The process that imports and forks has ended."""


class WarmWorkers:
    """Ranks of one host, forked from one process that has imported the modules that the program begins with.

    `words`: the command line of a rank: interpreter, `-u`, perhaps `-m`, script or module, arguments. `preload`: the
    modules to import instead of the program's own first imports, with commas between.
    """

    def __init__(self, words: Sequence[str], preload: str | None = None) -> None:
        self.words = tuple(words)
        self.preload = preload
        self._environment: dict[str, str] = {}
        self._step = -1, ""
        self._until: int | None = None
        self._left = ""
        self._refused = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._ready = False
        self._news: list[str] = []
        self._ranks: list[ForkedRank] = []

    def begin(self, environment: Mapping[str, str]) -> None:
        """Start to import, and don't wait for the end. `environment`: what the imports see. Raises LaunchError."""
        self.end()
        self._step = -1, ""
        self._environment = dict(environment)
        self._control, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [self.words[0], "-u", "-c", _BEGIN, str(theirs.fileno())],
                    env=self._environment,
                    pass_fds=[theirs.fileno()],
                )
        except OSError as error:
            raise LaunchError(f"{self.words[0]} can't be started ({error})") from error
        with suppress(BrokenPipeError):
            send(self._control, {"words": self.words, "preload": self.preload, "until": self._until})

    def wait(self) -> None:
        """Wait until the modules are imported, after which ranks can be forked. Raises LaunchError where they can't."""
        while not self._ready:
            got = self._hear()
            if "step" in got:
                self._step = got["step"]
                continue
            if got.get("refused"):
                raise self._refusal(got["refused"])
            at, step = self._step
            if how := got.get("left", ""):
                if at < 0 or self.preload is not None:
                    named = f"--preload: {step}" if step else f"process {self._pid}, which imports for the ranks,"
                    raise self._refusal(f"{named} {how}")
                got = {"failed": at, "rest": left_to_ranks(step, f" {how}", ())}
            if got["failed"] >= 0:
                if self._until is not None:
                    raise self._refusal(got["rest"])
                self._until, self._left = got["failed"], got["rest"]
                self.begin(self._environment)
                continue
            self._ready = True
            # Said when the first rank is there: what it says is not so if that is refused.
            self._news = [
                *filter(None, [self._left, got["rest"]]),
                f"imported once, for all ranks: {', '.join(dict.fromkeys(got['modules'])) or 'nothing'} "
                f"({got['seconds']:.1f} s, {got['cpu']:.2f} CPU seconds, process {self._pid})",
            ]

    def fork(self, environment: Mapping[str, str], stdout: int, stderr: int) -> ForkedRank:
        """Start a rank, once the modules are imported; they are imported again if the process that did so is gone.

        Raises LaunchError.
        """
        if self._refused:
            raise LaunchError(self._refused)
        rest = {name: text for name, text in os.environ.items() if name != _AT_IMPORT}
        at_import = {_AT_IMPORT: environment[_AT_IMPORT]} if _AT_IMPORT in environment else {}
        if self._process is None or environment.get(_AT_IMPORT) != self._environment.get(_AT_IMPORT):
            self.begin({**rest, **at_import})
        elif self._ready:
            with suppress(_Gone):
                return self._fork(environment, stdout, stderr)
            self.begin({**rest, **at_import})
        try:
            return self._fork(environment, stdout, stderr)
        except _Gone as gone:
            raise self._refusal(str(gone)) from gone

    def _fork(self, environment: Mapping[str, str], stdout: int, stderr: int) -> ForkedRank:
        self.wait()
        control = self._control
        assert control is not None
        with ExitStack() as files:
            mine, theirs = map(files.enter_context, socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            try:
                # Not those with a handler: a process that starts has none.
                ignored = [int(one) for one in signal.valid_signals() if signal.getsignal(one) is signal.SIG_IGN]
                send(control, [dict(environment), ignored], [theirs.fileno(), stdout, stderr])
            except OSError as error:
                raise _Gone(self._death()) from error
            theirs.close()
            if not select.select([mine], [], [], _PATIENCE)[0]:
                raise self._refusal(f"process {self._pid}, which forks the ranks, did not within {_PATIENCE:.0f} s")
            verdict, _, text = mine.recv(65536).decode().partition(" ")
            if verdict == "refused":
                raise LaunchError(text)
            if verdict == "":
                raise _Gone(self._death())
            for news in self._news:
                say(news)
            self._news.clear()
            if verdict != "started":
                # It was killed before it could say its number.
                return ForkedRank(self.words, 0, None, int(verdict))
            files.pop_all()
        rank = ForkedRank(self.words, int(text), mine)
        self._ranks.append(rank)
        return rank

    def _refusal(self, reason: str) -> LaunchError:
        """What to raise now, and for each rank from now on."""
        self._refused = reason
        return LaunchError(reason)

    def end(self) -> None:
        """Let the process that forks go, and with it ranks that it still has."""
        if self._process is not None and (self._refused or not self._ready):
            # It is importing, or hangs in a fork, and would not notice. Before the connection is closed: where it does
            # notice it ends, and what it has started is not known as its own any more.
            kill((*descendants(self._process.pid), self._process.pid))
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.wait()
        for rank in self._ranks:
            rank.poll(orphan=True)
        self._ranks.clear()
        self._process, self._control, self._ready = None, None, False
        self._news.clear()

    @property
    def _pid(self) -> int:
        return 0 if self._process is None else self._process.pid

    def _hear(self) -> dict[str, Any]:
        """What the process that imports says next, or how it left."""
        assert self._control is not None
        assert self._process is not None
        alive = os.pidfd_open(self._process.pid)
        # What it has started may hold the connection when it is gone itself.
        heard = select.select([self._control.fileno(), alive], [], [])[0]
        os.close(alive)
        got = receive(self._control) if self._control.fileno() in heard else None
        if got is not None:
            said: dict[str, Any] = got[0]
            return said
        return {"left": self._how_it_left()}

    def _how_it_left(self) -> str:
        assert self._process is not None
        try:
            code = self._process.wait(_PATIENCE / 10)
        except subprocess.TimeoutExpired:
            return "became another program, or waits"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def _death(self) -> str:
        return f"process {self._pid}, which forks the ranks, {self._how_it_left()}"


class ForkedRank:
    """A process that this one did not start, with the part of `subprocess.Popen` that torchelastic uses.

    `line` is the connection on which the process that forked it tells its exit code.
    """

    def __init__(
        self, words: Sequence[str], pid: int, line: socket.socket | None, returncode: int | None = None
    ) -> None:
        self.args = tuple(words)
        self.pid = pid
        self.returncode = returncode
        self._line = line
        # The number is its own for now: it is not waited for before the line is closed.
        self._alive = os.pidfd_open(pid) if line is not None else -1

    def poll(self, *, orphan: bool = False) -> int | None:
        """The exit code, negative for a signal, None while it runs.

        An `orphan` is ended if it runs: it may hold the line, so that its end does not show that nobody is there.
        """
        if self.returncode is None and self._line is not None:
            try:
                # Left where it is: a signal's handler may raise before the next line.
                text = self._line.recv(64, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            except BlockingIOError:
                if not orphan:
                    return None
                text = b""
            self.returncode = int(text) if text else self._end_orphan()
            self._line.close()
            os.close(self._alive)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end and give the exit code. Raises subprocess.TimeoutExpired after `timeout` seconds."""
        if self.poll() is None and self._line is not None:
            select.select([self._line], [], [], timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return code

    def _end_orphan(self) -> int:
        """The process that forked it is gone, and with it who could tell how it ends: it is ended here."""
        if not select.select([self._alive], [], [], 0)[0]:
            say(f"the process that forked the ranks is gone, so its rank {self.pid} is ended")
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            select.select([self._alive], [], [], _PATIENCE)
        return -signal.SIGKILL


def say(text: str) -> None:
    """Tell the user, on stderr."""
    print(f"initopt launch: {text}", file=sys.stderr, flush=True)
