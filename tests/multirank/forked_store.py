"""A job's store that is served by a process of its own, so that it can be lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist


@contextmanager
def forked_store() -> Iterator[tuple[dist.TCPStore, int]]:
    """A connection to the store and the process id of its server, which is killed at the end."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(120)
            served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            os.write(write, str(served.port).encode())
            while True:
                signal.pause()
        finally:
            os._exit(1)
    try:
        os.close(write)
        port = int(os.read(read, 20))
        yield dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False), pid
    finally:
        os.close(read)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
