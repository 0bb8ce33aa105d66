"""`rendezvous`: the connection to torchrun's store is made while the script still imports, and handed to its first use.

Only where the store is there already, since torchrun serves it: no port is opened, and no rank is waited for. It is
handed over to a rendezvous that asks for the same address, rank and number of ranks by `env://`; any other one is as
it was. The thread that connects imports nothing, and a fork waits until it is done. The wait for other ranks comes
later, when the process group is made, and stays there: its backend and timeout are not known before.

Under torchrun every rank is a client, whatever the address: a `tcp://` one of the script's own, which none of them
serves, is waited for in vain. Whether something else serves it can't be known, so that is only said.
"""

from __future__ import annotations

import os
import sys
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from initopt.optimize.saying import Saying

NAME = "rendezvous"

LIMIT = 10.0
"""Seconds that the connection may take. After that it is made as ever, when it is asked for."""

SPEAK = 2.0
"""Seconds that an address of the script's own gets to answer before it is said that no rank serves it."""

_NAMES = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE")

_under_way: threading.Thread | None = None


class EarlyStore:
    """The connection of this process, made at most once."""

    def __init__(self, saying: Saying) -> None:
        self._saying = saying
        self._pid = os.getpid()
        self._asked: tuple[str | None, ...] = ()
        self._store: Any = None
        self._taken = False

    def begin(self) -> None:
        """Begin to connect, if torchrun serves the store."""
        asked = _environment()
        host, port, rank, world_size, agent = asked
        if agent != "True" or not (host and port and rank and world_size) or self._asked:
            return
        # Looked up here: the thread is not to need any lock of the import system.
        make: Any = sys.modules["torch"].distributed.TCPStore
        about = dict(host_name=host, port=int(port), world_size=int(world_size), is_master=False)
        self._asked = asked

        def connect() -> None:
            try:
                self._store = make(**about, timeout=timedelta(seconds=LIMIT))
            except Exception:
                # Where it is asked for, torch says what is wrong.
                self._store = None

        global _under_way
        if _under_way is None:
            os.register_at_fork(before=_wait)
        _under_way = threading.Thread(target=connect, name="initopt-rendezvous", daemon=True)
        _under_way.start()

    def instead(self, function: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        """What is called in place of torch's `rendezvous`."""

        def rendezvous(url: str, rank: int = -1, world_size: int = -1, **kwargs: Any) -> Iterator[Any]:
            if not self._is_for(url, rank, world_size, kwargs):
                return _watched(url, function(url, rank, world_size, **kwargs))
            return self._handed_over(lambda: function(url, rank, world_size, **kwargs), **kwargs)

        return rendezvous

    def end(self) -> None:
        """Let go of a connection that nobody has asked for."""
        self._store = None

    def _is_for(self, url: str, rank: int, world_size: int, more: dict[str, Any]) -> bool:
        """Whether the connection is the one that would be made now, and nobody has it yet."""
        if os.getpid() != self._pid or not self._asked or self._taken:
            return False
        _, _, own_rank, size, _ = self._asked
        same = rank in (-1, int(own_rank or 0)) and world_size in (-1, int(size or 0))
        if url == "env://" and same and more.keys() <= {"timeout"} and _environment() == self._asked:
            return True
        self._saying.left(NAME, "the script's rendezvous is not the one that torchrun has set up")
        return False

    def _handed_over(
        self, otherwise: Callable[[], Iterator[Any]], timeout: timedelta = timedelta(minutes=30)
    ) -> Iterator[Any]:
        self._taken = True
        _wait()
        store, self._store = self._store, None
        if store is None:
            self._saying.left(NAME, f"the store did not answer within {LIMIT:g} s")
            yield from otherwise()
            return
        self._saying.applied(NAME, "the job's store was reached during the imports")
        # That of connecting was ours; torch's default is half an hour.
        store.set_timeout(timeout)
        yield store, int(self._asked[2] or 0), int(self._asked[3] or 0)
        yield from otherwise()


def _watched(url: str, found: Iterator[Any]) -> Iterator[Any]:
    """A rendezvous, with a word on stderr of rank 0 if it waits for what no rank does."""
    host, port, rank, _, agent = _environment()
    address = urllib.parse.urlsplit(url)
    of_its_own = address.scheme == "tcp" and address.netloc != f"{host}:{port}"
    timer = threading.Timer(SPEAK, _say_nobody_serves, [url])
    timer.daemon = True
    if agent == "True" and rank == "0" and of_its_own:
        timer.start()
    try:
        first = next(found)
    finally:
        timer.cancel()
    yield first
    yield from found


def _say_nobody_serves(url: str) -> None:
    print(
        f"initopt: nothing has answered at {url} for {SPEAK:g} s. Under torchrun no rank serves an address of the "
        "script's own: use init_method='env://', or take TORCHELASTIC_USE_AGENT_STORE out of os.environ before "
        "init_process_group",
        file=sys.stderr,
        flush=True,
    )


def _environment() -> tuple[str | None, ...]:
    return tuple(os.environ.get(name) for name in _NAMES)


def _wait() -> None:
    """Wait for a connection that is being made."""
    if _under_way is not None:
        _under_way.join(LIMIT)
