"""One rank does a piece of work, the others wait for its result and use it; nobody waits for ever.

The first to come leads, so that there is nothing to vote on. A leader that fails, falls silent or takes too long is
replaced once; when the second one is lost as well, every rank does the work itself, as it would have done anyway.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal

from initopt.compile_cache import board
from initopt.compile_cache.board import Board, StoreGone
from initopt.peers import describe
from initopt.process_id import is_gone, this_process

BEAT = 1.0
"""Seconds between two notes of a leader."""
SILENCE = 30.0
"""Seconds without a note after which a leader counts as lost. On the same host its process is looked at."""
TERMS = 2
"""How many ranks lead, one after the other, until each is on its own."""


@dataclass(frozen=True)
class Outcome:
    """How this rank came to its result.

    `leader` is the rank whose result was used (None: its own, made alone), `waited` the seconds that passed before this
    rank began to lead, to use a result, or to work alone. `why` says why it worked alone, why an earlier leader was
    replaced, or what became of this leader's result; empty where all went well.
    """

    role: Literal["led", "followed", "alone"]
    leader: int | None
    waited: float
    why: str = ""
    result: str = ""


def one_for_all(
    store: Any,
    *,
    rank: int,
    topic: str,
    patience: float,
    work: Callable[[Callable[[str], None]], str],
    use: Callable[[str], None],
    between: Callable[[], None] = lambda: None,
) -> Outcome:
    """Do `work` on one of the ranks that share a `topic`, and `use` its result on the others.

    `store` is a torch.distributed store that all ranks share; None: this rank has no others and leads. A `topic` is
    used once in an attempt of the job, and by ranks that can use each other's result.

    `work` gets a function that tells the others what it does ("compiles 'over'") and returns a short text. `use` gets
    that text; if it raises, this rank does the work itself. `between` is called while this rank waits, every
    `board.POLL` seconds.

    A leader that is not done within `patience` seconds is replaced, so a rank waits twice as long at the most. Its
    result still counts if it comes first. Whatever becomes of the store or of the others, this rank comes to a result.
    Raises what `between` raises, and what `work` raises on this rank: then the others have been told.
    """
    if store is None:
        return Outcome("led", rank, 0.0, result=work(_to_nobody))
    begun = time.monotonic()
    try:
        notes = Board(store, f"one/{topic}")
        turn = _wait(notes, rank, patience, between)
    except StoreGone as gone:
        turn = _Turn(why=f"the job's store no longer answers ({gone})")
    waited = time.monotonic() - begun

    if turn.leads:
        result, late = _lead(notes, turn, rank, work)
        return Outcome("led", rank, waited, _joined(turn.why, late), result)
    why = turn.why
    if turn.leader is not None:
        try:
            use(turn.result)
        except Exception as error:
            why = _joined(why, f"the result of rank {turn.leader} could not be used here ({describe(error)})")
        else:
            return Outcome("followed", turn.leader, waited, why, turn.result)
    return Outcome("alone", None, waited, why, work(_to_nobody))


def _to_nobody(text: str) -> None:
    pass


def _joined(*whys: str) -> str:
    return "; ".join(filter(None, whys))


@dataclass(frozen=True)
class _Turn:
    """What came of the wait: this rank leads in term `leads`, or there is the result of `leader`, or neither."""

    leads: int = 0
    leader: int | None = None
    result: str = ""
    why: str = ""


def _wait(notes: Board, rank: int, patience: float, between: Callable[[], None]) -> _Turn:
    why = ""
    for term in range(1, TERMS + 1):
        mine = {"rank": rank, "why": why, **this_process()}
        claim = json.loads(notes.claim(f"claim/{term}", json.dumps(mine)))
        if claim == mine:
            return _Turn(leads=term, why=why)
        found = _follow(notes, term, claim, rank, patience, between)
        if isinstance(found, _Turn):
            return found
        why = _joined(claim["why"], found)
    return _Turn(why=why)


def _follow(
    notes: Board, term: int, leader: dict[str, Any], rank: int, patience: float, between: Callable[[], None]
) -> _Turn | str:
    """Wait for a result; return it, or why there is no use in waiting for this leader any longer."""
    heard = look = time.monotonic()
    said: dict[str, Any] = {"beat": 0, "seconds": 0.0, "doing": ""}
    lost = ""
    while True:
        between()
        result = notes.read("result")
        if result is not None:
            found = json.loads(result)
            return _Turn(leader=found["leader"], result=found["text"], why=found["why"])
        # Only now: a leader that has just ended left its result before.
        if lost or notes.has(f"claim/{term + 1}"):
            return lost
        now = time.monotonic()
        if now >= look:
            look = now + BEAT
            note = json.loads(notes.read(f"said/{term}") or "{}")
            if note and note["beat"] != said["beat"]:
                said, heard = note, now
            seconds = said["seconds"] + now - heard
            lost = _lost(leader, said, seconds, now - heard, patience)
            if not lost and notes.line_is_due():
                _say(rank, leader["rank"], said["doing"], seconds, patience)
        if not lost:
            time.sleep(board.POLL)


def _lost(leader: dict[str, Any], said: dict[str, Any], seconds: float, silent: float, patience: float) -> str:
    """Say why this leader is to be replaced; empty if it is not."""
    who = f"rank {leader['rank']}"
    if "error" in said:
        return f"{who} failed ({said['error']})"
    if is_gone(leader):
        return f"the process of {who} (pid {leader['pid']} on {leader['host']}) is gone"
    if silent > SILENCE:
        return f"{who} has said nothing for {SILENCE:g} s"
    return f"{who} was not done after {patience:g} s" if seconds > patience else ""


def _say(rank: int, leader: int, doing: str, seconds: float, patience: float) -> None:
    which = f", which {doing}" if doing else ""
    text = f"initopt: rank {rank} waits for rank {leader}{which} ({seconds:.0f} s, until {patience:g} s)"
    print(text, file=sys.stderr, flush=True)


def _lead(notes: Board, turn: _Turn, rank: int, work: Callable[[Callable[[str], None]], str]) -> tuple[str, str]:
    """Do the work and hand its result on. Returns it, and why others don't use it (empty: they do)."""
    try:
        with _heard(notes, turn.leads) as say:
            result = work(say)
    except BaseException as error:
        with suppress(StoreGone):
            notes.write(f"said/{turn.leads}", json.dumps({"beat": -1, "seconds": 0.0, "error": describe(error)}))
        raise
    try:
        first = json.loads(notes.claim("result", json.dumps({"leader": rank, "text": result, "why": turn.why})))
    except StoreGone as gone:
        return result, f"the others were not told: the job's store no longer answers ({gone})"
    return result, "" if first["leader"] == rank else f"rank {first['leader']} was done sooner"


@contextmanager
def _heard(notes: Board, term: int) -> Iterator[Callable[[str], None]]:
    """Let the others hear what this rank does, from a thread of its own that ends with the context."""
    begun = time.monotonic()
    doing = ""
    over = threading.Event()

    def say(text: str) -> None:
        nonlocal doing
        doing = text

    def beat() -> None:
        number = 0
        with suppress(StoreGone):
            while not over.is_set():
                number += 1
                said = {"beat": number, "seconds": time.monotonic() - begun, "doing": doing}
                notes.write(f"said/{term}", json.dumps(said))
                over.wait(BEAT)

    thread = threading.Thread(target=beat, name="initopt-leader", daemon=True)
    thread.start()
    try:
        yield say
    finally:
        over.set()
        thread.join()
