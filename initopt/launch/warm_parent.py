"""The process that imports a trainer's modules once and forks the ranks: one thread, no files, no devices of its own.

It is started as a fresh interpreter, so that what it forks is what a fresh interpreter would be. Python's own fork
server isn't used: what that forks is a child in `multiprocessing`'s eyes (no main process, the agent's resource tracker
and authentication key, /dev/null as its input, this process as its next fork server), and ends without a program's exit
handlers.

The agent's end of the connection says when to leave: when the agent is gone, so are the ranks.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from initopt import run
from initopt.launch import as_script, leaving
from initopt.launch.first_imports import import_first
from initopt.launch.leftovers import SHIELDED, threads
from initopt.launch.own_state import EnvironmentUse, Generators, tell_known
from initopt.launch.settings import Settings, changed_variables, make_at_imports
from initopt.launch.wire import receive, send

GRACE = 30.0
"""Seconds that ranks get to end by themselves when the agent is gone: torchelastic's own default."""

IMPORT_SECONDS = 0.0
"""How long the imports took before this process was forked, as a record of it must say; 0 where there were none."""

FORKED_FROM = 0
"""The process that this one was forked from and has waited for; 0 where it was not, or is a restart."""

_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)


def main() -> None:
    """Import what the first message names and fork a rank per request; goes on as a rank, never as the parent."""
    global FORKED_FROM, IMPORT_SECONDS
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    got = receive(control)
    if got is None:
        os._exit(1)
    plan = got[0]
    recorded = None
    with suppress(run.UsageError):  # the agent says so
        recorded = run.behind(plan["words"])
    words: list[str] = plan["words"] if recorded is None else recorded[1]
    as_script.prepare(words)
    script, module = as_script.program(words)
    began = time.monotonic()
    start = Settings.now()
    generators = Generators()
    handlers: dict[int, Any] = {number: signal.getsignal(number) for number in signal.valid_signals()}
    own = os.getpid()

    def tell(news: Any) -> None:
        if os.getpid() != own:
            os._exit(0)  # a module has forked, and this is not the one that it was forked from
        try:
            send(control, news)
        except OSError:
            os._exit(1)  # nobody is there

    with EnvironmentUse() as use, leaving.heard(lambda how: tell({"left": how})):
        found = import_first(
            script,
            module=module,
            preload=plan["preload"],
            until=plan["until"],
            use=use,
            begin=lambda at, step: tell({"step": [at, step]}),
        )
    generators.imported()
    seconds = time.monotonic() - began
    IMPORT_SECONDS = seconds if found.modules else 0.0
    told = {"modules": found.modules, "rest": found.rest, "refused": found.refused, "failed": found.failed}
    tell({**told, "seconds": seconds, "cpu": time.process_time()})
    if found.refused or found.failed >= 0:
        # The agent ends this process, and first what it has started.
        receive(control)
        os._exit(0)
    if recorded is not None:
        # Not by each rank: what a fresh one has by `sitecustomize`.
        import initopt.watched_run  # noqa: F401
        from initopt.optimize.applied import import_ahead

        import_ahead(recorded[0].optimize)
    # What is here already is not walked through again by each rank's garbage collector, which would copy its pages.
    gc.freeze()
    parent = _Parent(control, start, use, handlers)
    parent.fork_ranks()
    generators.fork()
    # A restart has not waited for the imports, nor has a rank of a job to which hosts have come, which counts none.
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0" and not parent.again:
        FORKED_FROM = own
    if "initopt.record" in sys.modules:
        from initopt.record import forked

        forked()
    if recorded is not None:
        _watch(recorded[0], words)
    make_at_imports(found.changes)
    as_script.run(words)


def _watch(options: run.Options, words: Sequence[str]) -> None:
    """Record this rank as `initopt.run` would have it recorded."""
    entered = time.thread_time()
    try:
        from initopt.watched_run import begin

        run.leave_word(options, words[2:], 0.0)
        begin(entered)
    except Exception as error:  # the job has no part in this
        print(f"initopt: this process is not recorded: {type(error).__name__}: {error}", file=sys.stderr)


@dataclass(frozen=True, slots=True)
class _Rank:
    """A rank that was forked, the connection to whoever waits for it, and a file that is readable when it has ended."""

    pid: int
    line: socket.socket
    ended: int


class _Parent:
    """Forks; `start` and `handlers` are the settings and what signals do, as they were before the imports."""

    def __init__(
        self,
        control: socket.socket,
        start: Settings,
        use: EnvironmentUse,
        handlers: Mapping[int, Any],
    ) -> None:
        self._control = control
        self._start = start
        self._use = use
        self._ranks: dict[int, _Rank] = {}
        self._forked: set[str] = set()
        self.again = False
        """In a rank: whether there was one in its place before."""
        self._handlers = handlers
        self._shielded: dict[int, Any] = {number: signal.getsignal(number) for number in SHIELDED}

    def fork_ranks(self) -> None:
        """Serve the agent. Returns in each rank; ends the process when the agent is gone."""
        # What is sent to a whole job reaches the ranks through the agent, as under torchrun. And no handler of a module
        # may take the exit code of a rank.
        for number in SHIELDED:
            signal.signal(number, signal.SIG_DFL if number == signal.SIGCHLD else signal.SIG_IGN)
        waiting = select.poll()
        waiting.register(self._control, select.POLLIN)
        while True:
            for file, _ in waiting.poll():
                if file == self._control.fileno():
                    got = receive(self._control)
                    if got is None:
                        self._end_ranks()
                        os._exit(0)
                    (environment, ignored), (line, *outputs) = got
                    if self._fork(environment, ignored, socket.socket(fileno=line), outputs, waiting):
                        return
                elif file in self._ranks:
                    rank = self._ranks[file]
                    if file == rank.ended:
                        with suppress(OSError):  # nobody waits for it
                            rank.line.send(str(_exit_code(rank.pid)).encode())
                        waiting.unregister(file)
                        # Its process id stays taken, so that nobody signals another, until the agent knows.
                        self._ranks[rank.line.fileno()] = self._ranks.pop(file)
                        waiting.register(rank.line, 0)
                    else:
                        waiting.unregister(file)
                        del self._ranks[file]
                        os.waitpid(rank.pid, 0)
                        os.close(rank.ended)
                        rank.line.close()

    def _fork(
        self,
        environment: dict[str, str],
        ignored: Sequence[int],
        line: socket.socket,
        outputs: list[int],
        waiting: select.poll,
    ) -> bool:
        """Fork a rank, or say why not. Whether this is the rank."""
        if reason := self._reason(environment):
            with suppress(OSError):
                line.send(f"refused {reason}".encode())
            pid = 0
        else:
            place = environment.get("LOCAL_RANK", "")
            self.again = place in self._forked
            self._forked.add(place)
            # A signal waits until its own handler is in place again.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, SHIELDED)
            pid = os.fork()
            if pid == 0:
                self._become_rank(environment, line, outputs)
                self._give_signals(ignored)
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
                line.send(f"started {os.getpid()}".encode())
                line.close()
                return True
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            rank = _Rank(pid, line, os.pidfd_open(pid))
            self._ranks[rank.ended] = rank
            waiting.register(rank.ended, select.POLLIN)
        for output in outputs:
            os.close(output)
        if pid == 0:
            line.close()
        return False

    def _reason(self, environment: Mapping[str, str]) -> str:
        if (running := threads()) != 1:
            return f"the process that forks the ranks has {running} threads"
        # Not what the agent has set just as the imports did.
        own = changed_variables(self._start.environment, environment) & changed_variables(os.environ, environment)
        for asked in self._use.reasons(own):
            return f"{asked}, which only a rank has: leave it out with --preload"
        return ""

    def _become_rank(self, environment: Mapping[str, str], line: socket.socket, outputs: list[int]) -> None:
        os.setsid()
        self._control.close()
        for rank in self._ranks.values():
            os.close(rank.ended)
            rank.line.close()
        for output, number in zip(outputs, (1, 2), strict=True):
            if output != number:
                os.dup2(output, number)
                os.close(output)
        replace(self._start, environment=environment).restore()
        tell_known(self._start.environment)

    def _give_signals(self, ignored: Sequence[int]) -> None:
        """Make signals do what imports set, or else what they do in a process that the agent starts."""
        for number, at_start in self._handlers.items():
            now = signal.getsignal(number)
            wanted = self._shielded.get(number, now)
            if wanted == at_start and number not in _IGNORED_BY_PYTHON:
                own = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
                wanted = signal.SIG_IGN if number in ignored else own
            if wanted not in (now, None):
                signal.signal(number, wanted)

    def _end_ranks(self) -> None:
        """End what is left of an agent that is gone, as the agent would have."""
        left = {rank.ended: rank.pid for file, rank in self._ranks.items() if file == rank.ended}
        deadline = time.monotonic() + GRACE
        for number in (signal.SIGTERM, signal.SIGKILL):
            for pid in left.values():
                with suppress(ProcessLookupError):
                    os.killpg(pid, number)
            while left and time.monotonic() < deadline:
                ended, _, _ = select.select(list(left), [], [], deadline - time.monotonic())
                for file in ended:
                    del left[file]


def _exit_code(pid: int) -> int:
    """The exit code of a process that has ended, negative for a signal. It stays to be waited for."""
    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert ended is not None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
