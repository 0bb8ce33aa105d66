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

from initopt.launch.wire import receive, send

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
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._ready = False
        self._news: list[str] = []
        self._ranks: list[ForkedRank] = []

    def begin(self, environment: Mapping[str, str], until: int | None = None) -> None:
        """Start to import, and don't wait for the end. `environment`: what the imports see."""
        self.end()
        self._environment = dict(environment)
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [self.words[0], "-u", "-c", _BEGIN, str(theirs.fileno())],
                env=self._environment,
                pass_fds=[theirs.fileno()],
            )
        with suppress(BrokenPipeError):
            send(self._control, {"words": self.words, "preload": self.preload, "until": until})

    def fork(self, environment: Mapping[str, str], stdout: int, stderr: int) -> ForkedRank:
        """Start a rank, once the modules are imported; they are imported again if the process that did so is gone.

        Raises LaunchError.
        """
        rest = {name: text for name, text in os.environ.items() if name != _AT_IMPORT}
        at_import = {_AT_IMPORT: environment[_AT_IMPORT]} if _AT_IMPORT in environment else {}
        if self._process is None or environment.get(_AT_IMPORT) != self._environment.get(_AT_IMPORT):
            self.begin({**rest, **at_import})
        elif self._ready:
            with suppress(_Gone):
                return self._fork(environment, stdout, stderr)
            self.begin({**rest, **at_import})
        return self._fork(environment, stdout, stderr)

    def _fork(self, environment: Mapping[str, str], stdout: int, stderr: int) -> ForkedRank:
        control = self._wait_for_imports()
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
                raise LaunchError(f"process {self._pid}, which forks the ranks, did not within {_PATIENCE:.0f} s")
            verdict, _, text = mine.recv(65536).decode().partition(" ")
            if verdict == "refused":
                raise LaunchError(text)
            if verdict == "":
                raise _Gone(self._death())
            for news in self._news:
                _say(news)
            self._news.clear()
            if verdict != "started":
                # It was killed before it could say its number.
                return ForkedRank(self.words, 0, None, int(verdict))
            files.pop_all()
        rank = ForkedRank(self.words, int(text), mine)
        self._ranks.append(rank)
        return rank

    def end(self) -> None:
        """Let the process that forks go, and with it ranks that it still has."""
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            if not self._ready:
                self._process.kill()  # it is importing, and would not notice
            self._process.wait()
        for rank in self._ranks:
            rank.poll()
        self._ranks.clear()
        self._process, self._control, self._ready = None, None, False
        self._news.clear()

    @property
    def _pid(self) -> int:
        return 0 if self._process is None else self._process.pid

    def _wait_for_imports(self) -> socket.socket:
        """The connection to the process, which is ready to fork."""
        while True:
            assert self._control is not None
            if self._ready:
                return self._control
            got = receive(self._control)
            if got is None:
                raise _Gone(self._death())
            imported: dict[str, Any] = got[0]
            if imported["refused"]:
                raise LaunchError(imported["refused"])
            # Said when the first rank is there: what it says is not so if that is refused.
            if imported["rest"]:
                self._news.append(imported["rest"])
            if imported["failed"] >= 0:
                news = list(self._news)
                self.begin(self._environment, until=imported["failed"])
                self._news += news
                continue
            self._news.append(
                f"imported once, for all ranks: {', '.join(dict.fromkeys(imported['modules'])) or 'nothing'} "
                f"({imported['seconds']:.1f} s, {imported['cpu']:.2f} CPU seconds, process {self._pid})"
            )
            self._ready = True

    def _death(self) -> str:
        code = 0 if self._process is None else self._process.wait()
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        when = "forks the ranks" if self._ready else "imports the modules for the ranks"
        return f"process {self._pid}, which {when}, {how}; what it wrote stands above"


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

    def poll(self) -> int | None:
        """The exit code, negative for a signal, None while it runs."""
        if self.returncode is None and self._line is not None:
            try:
                # Left where it is: a signal's handler may raise before the next line.
                text = self._line.recv(64, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            except BlockingIOError:
                return None
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
            _say(f"the process that forked the ranks is gone, so its rank {self.pid} is ended")
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            select.select([self._alive], [], [], _PATIENCE)
        return -signal.SIGKILL


def _say(text: str) -> None:
    print(f"initopt launch: {text}", file=sys.stderr, flush=True)
