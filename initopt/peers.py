"""How the ranks of one start-up tell each other what they are doing and that one of them has failed.

Everything goes through the job's key-value store: no collective, and nothing that a rank stuck in a collective would
have to answer. Each rank writes a short status now and then and reads the one of its left neighbour, so the death of
a rank is seen by one rank and announced to all.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from initopt.failure import doing
from initopt.process_id import is_gone, this_process
from initopt.store_connection import own_connection

BEAT = 0.5
"""Seconds between two status writes of a rank."""
SILENCE = 60.0
"""Seconds of silence after which a rank on another host counts as lost. On the same host its process is looked at."""
CAUSE = 2.0
"""Seconds that a rank whose collective failed waits for a better explanation than its own error."""
PATIENCE = 30.0
"""Seconds in one step after which rank 0 says, and goes on saying, what each rank is doing."""
_NOW = "startup of rank 0"
ENDED = "ended"
"""The status of a rank whose start-up has ended."""
LONGEST = 4000
"""Characters of an error that the other ranks are told."""
ACKNOWLEDGE = 3.0
"""Seconds a failing rank stays to let the others read why, since it may be the one that serves the store."""


@dataclass(frozen=True)
class Failure:
    """The first failure of a start-up, as every rank hears of it. `elapsed` is seconds since the step began.

    Outside of any, where `step` is empty, that says nothing.
    """

    rank: int
    step: str
    elapsed: float
    error: str

    def __str__(self) -> str:
        where = f" in step {self.step!r} after {self.elapsed:.1f} s" if self.step else ""
        return f"rank {self.rank} failed{where}: {self.error}"


class Peers:
    """This rank's connection to the others during start-up.

    `store` is a torch.distributed store that all ranks share; a connection of its own is cloned from it, so that the
    trainer's waiting reads never hold up this one. A connection does one thing at a time, so nothing here waits inside
    the store either: what is not there yet is asked for again. `startup` is the name of the start-up, `turn` counts
    those of that name in this process. `status` returns what this rank is doing: the step and the seconds since it
    began.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        *,
        startup: str,
        turn: int,
        status: Callable[[], tuple[str, float]],
        failed: Callable[[Failure], None],
    ) -> None:
        from torch.distributed import PrefixStore

        self.rank = rank
        self.world_size = world_size
        # Ranks may differ in what they ran before, so that a count of all start-ups would not be the same.
        self._startup = f"{startup}.{turn}"
        self._job = PrefixStore(f"initopt/{attempt_of_job()}", own_connection(store))
        self._own = PrefixStore(self._startup, self._job)
        self._status = status
        self._failed = failed
        self._ended = threading.Event()
        self._over = threading.Event()
        self._news = threading.Event()
        self._beat = 0
        self._seen: dict[int, tuple[int, float]] = {}
        self._watch = threading.Thread(target=self._run, name="initopt-peers", daemon=True)

    def start(self) -> None:
        """Begin to write this rank's status and to watch for failures, on a thread of its own."""
        self._watch.start()

    def tell(self) -> None:
        """Let the others know at once that this rank's status has changed: a rank that is killed can't say it then."""
        self._news.set()

    def agree(self, key: str, value: str) -> str:
        """Return rank 0's value for `key`. Waits for rank 0 to say it; RuntimeError if the start-up fails meanwhile."""
        if self.rank == 0:
            self._job.set(_NOW, self._startup)
            self._own.set(key, value)
            return value
        speak = time.monotonic() + PATIENCE
        while not self._own.check([key]):
            if self._over.is_set() or self._ended.is_set():
                raise RuntimeError(f"the start-up was over before rank 0 said its {key!r}")
            if time.monotonic() > speak:
                speak += PATIENCE
                self._say_who_waits()
            time.sleep(0.01)
        return str(self._own.get(key).decode())

    def _say_who_waits(self) -> None:
        theirs = self._job.get(_NOW).decode() if self._job.check([_NOW]) else ""
        at = f"was last in start-up {theirs!r}: give both the same name if they are one" if theirs else "has begun none"
        text = f"initopt: rank {self.rank} waits in start-up {self._startup!r} for rank 0, which {at}"
        print(text, file=sys.stderr, flush=True)

    def announce(self, failure: Failure, *, look_for_cause: bool) -> Failure:
        """Tell all ranks of `failure`; return the first one announced, which may be another rank's.

        With `look_for_cause` (the step met other ranks, so its error may only be the echo of theirs) a lost process or
        another rank's failure is looked for first. Waits until the others have heard, up to a limit. Never raises.
        """
        try:
            first = (self.cause(patience=CAUSE) if look_for_cause else None) or failure
            first = self._publish(first)
            self._acknowledge(wait=True)
        except Exception:
            # The store went away with the rank that served it: there is nobody left to tell.
            return failure
        return first

    def cause(self, *, patience: float = 0.0) -> Failure | None:
        """Return another rank's failure, or a rank whose process is gone, if there is one within `patience` seconds."""
        until = time.monotonic() + patience
        while True:
            try:
                if self._own.check(["failure"]):
                    return Failure(**json.loads(self._own.get("failure")))
                for rank in range(self.world_size):
                    lost = self._lost(rank)
                    if lost is not None:
                        return lost
            except Exception:
                # As in `announce`: no store, no cause to be had.
                return None
            if time.monotonic() >= until:
                return None
            time.sleep(0.05)

    def statuses(self) -> dict[int, tuple[str, float]]:
        """What each rank was doing when it last said so: rank -> (step, seconds since it began). Never raises."""
        found: dict[int, tuple[str, float]] = {}
        try:
            for rank in range(self.world_size):
                said = self._said(rank)
                if said is not None:
                    found[rank] = (said["step"], said["seconds"] + max(0.0, time.time() - said["at"]))
        except Exception:
            # What was read before the store went away is still worth a line.
            return found
        return found

    def stop(self) -> None:
        """Stop watching: after this `failed` is not called any more."""
        self._ended.set()
        self._news.set()
        if self._watch.is_alive():
            # A limit, for a store that neither answers nor breaks off.
            self._watch.join(ACKNOWLEDGE)

    def end(self) -> None:
        """Say that this rank's start-up has ended well, after `stop`. Never raises."""
        # A store that went away now is no failure of this start-up.
        with suppress(Exception):
            self._write(ENDED)

    def _run(self) -> None:
        said_so = time.monotonic()
        try:
            while not self._ended.is_set():
                step, seconds = self._status()
                self._write(step, seconds)
                if self._own.check(["failure"]):
                    self._hear(Failure(**json.loads(self._own.get("failure"))))
                    return
                lost = self._lost((self.rank - 1) % self.world_size)
                if lost is not None:
                    self._hear(self._publish(lost))
                    return
                if self.rank == 0 and seconds > PATIENCE and time.monotonic() - said_so > PATIENCE:
                    said_so = time.monotonic()
                    others = doing(self.statuses(), but={self.rank})
                    print(f"initopt: rank 0 in {step!r} for {seconds:.0f} s; {others}", file=sys.stderr, flush=True)
                self._news.wait(BEAT)
                self._news.clear()
        except Exception as error:
            if not self._ended.is_set():
                text = f"the job's store no longer answers: rank 0 or its agent is gone ({error})"
                self._over.set()
                self._failed(Failure(0, "", 0.0, text))

    def _hear(self, failure: Failure) -> None:
        self._over.set()
        self._failed(failure)
        self._acknowledge(wait=False)

    def _publish(self, failure: Failure) -> Failure:
        said = self._own.compare_set("failure", "", json.dumps(asdict(failure)))
        return Failure(**json.loads(said))

    def _acknowledge(self, *, wait: bool) -> None:
        heard = self._own.add("heard", 1)
        until = time.monotonic() + ACKNOWLEDGE
        while wait and heard < self.world_size and time.monotonic() < until:
            time.sleep(0.05)
            heard = self._own.add("heard", 0)

    def _write(self, step: str, seconds: float = 0.0) -> None:
        self._beat += 1
        said = {"step": step, "seconds": seconds, "at": time.time(), "beat": self._beat, **this_process()}
        self._own.set(f"status/{self.rank}", json.dumps(said))

    def _said(self, rank: int) -> dict[str, Any] | None:
        key = f"status/{rank}"
        return json.loads(self._own.get(key)) if self._own.check([key]) else None

    def _lost(self, rank: int) -> Failure | None:
        said = self._said(rank) if rank != self.rank else None
        if said is None or said["step"] == ENDED:
            return None
        gone = is_gone(said)
        if gone is None:
            beat, since = self._seen.get(rank, (-1, 0.0))
            if beat != said["beat"]:
                self._seen[rank] = (said["beat"], time.monotonic())
            gone = beat == said["beat"] and time.monotonic() - since > SILENCE
        if not gone:
            return None
        elapsed = said["seconds"] + max(0.0, time.time() - said["at"])
        return Failure(rank, said["step"], elapsed, f"its process (pid {said['pid']} on {said['host']}) is gone")


def describe(error: BaseException) -> str:
    """An error in one line for the other ranks: its type and text, cut where the store would not take it."""
    try:
        text = str(error)
    except Exception:
        text = "(its text can't be made)"
    return f"{type(error).__name__}: {text}"[:LONGEST]


def attempt_of_job() -> str:
    """Name this attempt of the job alike on all its ranks: the elastic run and restart, where torchrun gives them."""
    return ".".join(
        os.environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_PORT")
    )
