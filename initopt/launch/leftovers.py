"""What an import leaves behind that a forked process would lack or share: threads, timers, open files, devices, memory.

A fresh process has each of these for itself. A fork has no thread but its own and no timer, and an open file, a socket,
a device, a lock of the system or shared memory is one and the same in all of them.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

from initopt.process_tree import children

_HARMLESS = frozenset({"/dev/full", "/dev/null", "/dev/random", "/dev/urandom", "/dev/zero"})

SHIELDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD)
"""The signals of which the process that forks makes its own use. It gives a rank back what Python knows of them."""

_PATIENCE = 10.0
"""Seconds for a process that only ends. It may wait for ever for a lock of a thread that it lacks."""


@dataclass(frozen=True, slots=True)
class Traces:
    """What this process has at one moment, read from /proc. Raises OSError where there is none."""

    threads: int
    children: frozenset[int]
    files: Mapping[int, str]
    shared: frozenset[str]
    cuda: bool
    timers: bool
    handled: frozenset[str]

    @classmethod
    def now(cls) -> Traces:
        """As it is at this moment. Native threads that their library ends at a fork are ended, and don't count."""
        running = threads()
        if running > 1 and threading.active_count() == 1:
            # Numerical libraries (OpenBLAS) start threads when they are loaded, end them before a fork and start them
            # when they are needed. A fork is the only way to find out.
            _fork_for_trial()
            running = threads()
        return cls(
            running,
            frozenset(children()),
            dict(_open_files()),
            frozenset(_shared_memory()),
            _cuda(),
            _timers(),
            frozenset(_handled_natively()),
        )

    def since(self, before: Traces) -> list[str]:
        """One phrase for each thing that has come since, such as `started 2 threads`; empty if a fork is safe."""
        found = []
        more = self.threads - before.threads
        if more > 0:
            names = sorted(thread.name for thread in threading.enumerate() if thread is not threading.main_thread())
            named = f" ({', '.join(names[:3])})" if names else " (in native code)"
            found.append(f"started {_count(more, 'thread')}{named}")
        if self.cuda and not before.cuda:
            found.append("initialised CUDA")
        if self.timers and not before.timers:
            found.append("set a timer")
        if new_handlers := self.handled - before.handled:
            found.append(f"handles {', '.join(sorted(new_handlers))} in native code")
        if new := self.children - before.children:
            found.append(f"started {_count(len(new), 'process', 'processes')}")
        opened = sorted(path for file, path in self.files.items() if before.files.get(file) != path)
        if opened:
            found.append(f"left open {', '.join(map(_named, opened[:3]))}")
        if new_memory := self.shared - before.shared:
            found.append(f"made {_count(len(new_memory), 'block')} of memory that forked processes share")
        return found


def threads() -> int:
    """The threads of this process, those of native code among them. Raises OSError without /proc."""
    return len(os.listdir("/proc/self/task"))


def _fork_for_trial() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    ended = os.pidfd_open(child)
    if not select.select([ended], [], [], _PATIENCE)[0]:
        os.kill(child, signal.SIGKILL)
    os.close(ended)
    with suppress(ChildProcessError):  # a module has its own way with processes that end
        os.waitpid(child, 0)


def _open_files() -> Iterator[tuple[int, str]]:
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the listing's own
            path = os.readlink(f"/proc/self/fd/{name}")
            if path not in _HARMLESS:
                yield int(name), path


def _shared_memory() -> Iterator[str]:
    with open("/proc/self/maps") as maps:
        for line in maps:
            place, flags, *rest = line.split(maxsplit=5)
            if flags.endswith("s") and "w" in flags:
                yield f"{place} {rest[-1].strip()}"


def _cuda() -> bool:
    initialised = getattr(getattr(sys.modules.get("torch"), "cuda", None), "is_initialized", None)
    return initialised is not None and bool(initialised())


def _timers() -> bool:
    if any(signal.getitimer(which)[0] for which in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)):
        return True
    with suppress(OSError), open("/proc/self/timers") as timers:  # not in every kernel
        return bool(timers.read())
    return False


def _handled_natively() -> Iterator[str]:
    """The shielded signals that have a handler of which Python knows nothing."""
    with open("/proc/self/status") as status:
        caught = next(int(line.split()[1], 16) for line in status if line.startswith("SigCgt:"))
    for number in SHIELDED:
        if caught >> (number - 1) & 1 and not callable(signal.getsignal(number)):
            yield number.name


def _named(path: str) -> str:
    if path.startswith("socket:"):
        return "a socket"
    if path.startswith("pipe:"):
        return "a pipe"
    return path.removeprefix("anon_inode:").strip("[]") if path.startswith("anon_inode:") else path


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
