"""Ranks of a start-up come together in the job's store before they meet in a collective, so that a wait can be left.

A gloo call that waits for another rank can't be left in torch 2.13: `abort` leaves it waiting. So who comes to a
meeting counts itself there first, and makes torch's call when all are there whom that call would wait for. Nothing is
changed about the call, its group or its timeout, and a rank that waits is in Python. Beside it a thread tells the
others what this rank is doing. What follows from that is decided elsewhere (`failures`, `patience`, `order`).

Wherever the counts may not be right the ranks make torch's calls at once, and count no more.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, replace
from datetime import timedelta
from types import TracebackType
from typing import Any

from initopt.failure import PeerFailed
from initopt.hooks import Meeting
from initopt.optimize import failures, order, patience
from initopt.optimize.failures import Failures, Silence
from initopt.optimize.patience import Patience
from initopt.optimize.saying import Saying
from initopt.optimize.statuses import Failed, Status, Waits, failed_from, failure_of, packed, unpacked
from initopt.optimize.together import Together
from initopt.own_lines import Own
from initopt.peers import attempt_of_job
from initopt.process_id import this_process
from initopt.store_connection import own_connection

NAMES = (failures.NAME, patience.NAME, order.NAME)

BEAT = 0.5
"""Seconds between two statuses of a rank. What the others should know at once is told at once."""
LOOK = 0.2
"""Seconds between two looks of a rank that waits, and a little more for each rank of the job."""
MOMENT = 2.0
"""Seconds that who makes a group of some ranks waits for all."""
FIRST = 1.0
"""Seconds that the first meeting waits for all ranks to say what they were started with."""
ANSWER = 10.0
"""Seconds that the store may take to answer."""
LARGEST = 256
"""Ranks. One store serves all of them, and with more it was not thought through."""

_FOR_ALL = frozenset(
    (
        *("barrier", "all_reduce", "all_reduce_coalesced", "all_gather", "all_gather_coalesced", "all_gather_object"),
        *("all_gather_into_tensor", "all_gather_single", "reduce_scatter", "reduce_scatter_single"),
        *("reduce_scatter_tensor", "_all_gather_base", "_reduce_scatter_base"),
        *("_verify_param_shape_across_processes", "_verify_params_across_processes", "new_group"),
    )
)
_FROM_ROOT = frozenset(
    (
        *("broadcast", "broadcast_object_list", "scatter", "scatter_object_list"),
        *("_sync_module_states", "_broadcast_coalesced"),
    )
)
_TO_ROOT = frozenset({"reduce", "gather", "gather_object"})
"""The calls that are counted: those that need all ranks, that need the root, and in which the root needs the others."""

_LIBRARY = frozenset({"dmp", "sharding_plan"})
"""Steps in which no code of the script's can make a rank wait for another one between two meetings."""

_MANY = 1 << 12
_LEFT, _ROOT, _CALL = 1 << 12, 1 << 24, 1 << 33
"""One number in the store says who has come to a meeting: how many, how many have left it, if its root is there, and
(by the sum of a digest of each one's call) whether all have come to the same."""


class Arrivals:
    """What this process knows of who has come where. `on` names the optimizations that use it."""

    def __init__(self, on: Collection[str], together: Together, saying: Saying) -> None:
        self._on = on
        self._together = together
        self._saying = saying
        self._own = Own()
        self._pid = os.getpid()
        self._main = threading.main_thread().ident or 0
        self._lock = threading.Lock()
        self._here = threading.local()
        self._store: Any = None
        self._off = False
        self._alike: bool | None = None
        self._large = 0
        self._failing = 0
        self._was_left = False
        """Whether a step has failed here, so that others may have left a meeting."""
        self._counts: dict[str, int] = {}
        self._turns: dict[str, int] = {}
        self._status = Status()
        self._rank = 0
        self._world = 1
        self._news = threading.Event()
        self._over = threading.Event()
        self._beat: threading.Thread | None = None
        self._beats = 0
        self._line = ""

    # What the rank does

    def joined(self) -> None:
        """The default group was made: tell the others of this rank from now on."""
        distributed: Any = sys.modules["torch"].distributed
        self._rank, self._world = distributed.get_rank(), distributed.get_world_size()
        if self._store is not None or self._off or self._world == 1:
            return
        if self._world > LARGEST:
            self._leave_off(f"the job has {self._world} ranks, more than {LARGEST}")
            return
        # Private, as all ways to the store of the default group are.
        self._store = distributed.distributed_c10d._get_default_store()
        self._changed(since=time.time(), process=this_process())
        self._put(self._connection())
        self._beat = threading.Thread(target=self._run, name="initopt-arrivals", daemon=True)
        self._beat.start()

    def step_begins(self, name: str) -> None:
        """A step of the main thread begins."""
        turn = self._turns[name] = self._turns.get(name, 0) + 1
        self._failing = 0
        failed = tuple(one for one in self._status.failed if one.left[0] != name)
        self._changed(steps=(*self._status.steps, (name, turn)), since=time.time(), failed=failed)

    def step_ended(self, error: BaseException | None) -> None:
        """The innermost one has ended, perhaps with this error, which others may have to know of."""
        was = self._status
        failed = was.failed
        if error is not None:
            failed += (self._failure(error),)
            self._was_left = True
        # Not the exception, which would keep all its frames.
        self._failing = id(error) if error is not None else 0
        self._changed(steps=was.steps[:-1], since=time.time(), failed=failed, lost=was.lost or error is not None)
        if error is not None:
            self._news.set()

    def ends(self, error: BaseException | str) -> None:
        """The script ends with this error, or what is said of it: its rank comes to no meeting any more."""
        if self._store is None or self._off or os.getpid() != self._pid:
            return
        self._changed(failed=(replace(self._failure(error), for_good=True),))
        with suppress(Exception):
            self._put(self._connection())

    def _failure(self, error: BaseException | str) -> Failed:
        """The failure of the innermost step, with the cause of that in it which the error has come through."""
        found = failure_of(self._rank, self._status, error)
        if id(error) != self._failing or not self._status.failed:
            return found
        return replace(self._status.failed[-1], left=found.left)

    def over(self) -> None:
        """The start-up of this rank is over. Who waits for it goes on to torch's call."""
        self._over.set()
        self._news.set()
        store, self._store = self._store, None
        if store is None or os.getpid() != self._pid:
            return
        if self._beat is not None:
            self._beat.join(BEAT)
        self._changed(over=True)
        with suppress(Exception):
            self._put(self._connection(store))
        self._here = threading.local()

    def around(self, meeting: Meeting, group: Any) -> AbstractContextManager[None]:
        """What a call is made in. Entering it may raise instead of the call."""
        counted = meeting.op in _FOR_ALL or meeting.op in _FROM_ROOT or meeting.op in _TO_ROOT
        if self._store is None or self._off or not counted or os.getpid() != self._pid:
            return nullcontext()
        return _Around(self, meeting, group)

    # One meeting

    def come(self, meeting: Meeting, group: Any) -> None:
        """Come to a meeting, and wait for whom torch's call would wait for.

        Raises PeerFailed, Disagreement or RuntimeError where that is no use.
        """
        try:
            waits = self._waits(meeting, group)
        except Exception as error:  # private names of torch are among them
            self._leave_off(f"a meeting can't be looked at ({type(error).__name__}: {error})")
            return
        if waits is None:
            return
        self._failing = 0
        self._changed(lost=False)
        try:
            store = self._connection()
            raised: Exception | None = None
            again = True
            while again:
                waits, again = self._next(store, waits), False
                if waits.op == "new_group" and order.NAME in self._on and self._all_are_alike():
                    # Before this rank is counted, or the others would make theirs.
                    raised = order.same_group(store, waits, self._rank)
                if raised is None:
                    root = _ROOT if meeting.root == self._rank else 0
                    state = store.add(waits.key, 1 + root + _CALL * _code(waits))
                    if not _is_left(state) and waits.waits and self._all_are_alike():
                        raised, state = self._wait(store, waits, state)
                    if raised is None and _is_left(state) and not self._off:
                        raised = self._why_left(store, waits)
                        again = raised is None
        except Exception as error:
            # Mostly the store is gone: torch's own call goes well, or says what is wrong.
            self._leave_off(f"the others can't be asked ({type(error).__name__}: {error})")
            return
        if raised is not None:
            if hasattr(raised, "differences"):
                # What ranks do from here on is not the same.
                self._saying.applied(order.NAME, f"stopped: {raised}")
                self._leave_off("the meetings of the ranks differ")
            raise raised
        self._changed(calls=True)

    def gone(self) -> None:
        """The call has ended."""
        # A step that meets others goes on; between steps something else begins.
        self._changed(meeting=None, calls=False, since=self._status.since if self._status.steps else time.time())

    def _waits(self, meeting: Meeting, group: Any) -> Waits | None:
        distributed: Any = sys.modules["torch"].distributed
        makes_group = meeting.op == "new_group"
        if makes_group and not meeting.ranks:
            return None  # its members alone make it
        group = distributed.group.WORLD if group is None or makes_group else group
        if not isinstance(group, distributed.ProcessGroup) or distributed.get_backend(group) != "gloo":
            return None
        if (distributed.get_rank(), distributed.get_world_size()) != (self._rank, self._world):
            raise ValueError("another process group was made")
        members = tuple(distributed.get_process_group_ranks(group))
        if len(members) == 1 or self._rank not in members:
            return None
        name = meeting.op if makes_group else meeting.group
        key = f"{name}.{hashlib.sha256(repr(members).encode()).hexdigest()[:8]}"
        with self._lock:
            number = self._counts[key] = self._counts.get(key, 0) + 1
            counts = dict(self._counts)
            surely = meeting.op in _FOR_ALL and len(members) == self._world
            self._large += surely
        self._changed(counts=counts)
        steps = self._status.steps if threading.get_ident() == self._main else ()
        in_library = any(step in _LIBRARY for step, _ in steps)
        needs_all = meeting.op in _FOR_ALL or in_library
        is_root = meeting.root == self._rank
        from_root = not needs_all and meeting.op in _FROM_ROOT
        return Waits(
            key=f"{key}/{number}",
            group=key,
            number=number,
            op=meeting.op,
            words=order.words(meeting),
            place=meeting.call_site,
            members=members,
            needs=(meeting.root,) if from_root else members,
            large=self._large if surely else 0,
            waits=not meeting.async_op and (needs_all or is_root != from_root),
            # Private: nothing public tells a group's timeout.
            timeout=group._get_backend(sys.modules["torch"].device("cpu")).options._timeout.total_seconds(),
            made=meeting.ranks if makes_group and len(meeting.ranks) < self._world else (),
        )

    def _next(self, store: Any, waits: Waits) -> Waits:
        """The meeting that this rank comes to: not one that others have left since it had failed before.

        They did not wait for it, so what they come to next is what it comes to now.
        """
        while self._was_left and _is_left(store.add(waits.key, 0)):
            _, failed = self._left(store, waits)
            if failed is None or failed.rank != self._rank:
                break
            with self._lock:
                number = self._counts[waits.group] = waits.number + 1
                self._large += waits.large > 0
                counts, large = dict(self._counts), self._large if waits.large else 0
            waits = replace(waits, key=f"{waits.group}/{number}", number=number, large=large)
            self._changed(counts=counts)
        self._changed(meeting=waits)
        return waits

    def _all_are_alike(self) -> bool:
        if self._alike is None:
            until = time.monotonic() + FIRST
            while (alike := self._together.alike()) is None and time.monotonic() < until:
                time.sleep(0.005)
            self._alike = bool(alike)
            if not alike:
                self._leave_off("not all ranks were seen to be started alike, with --optimize")
        return self._alike and not self._off

    def _wait(self, store: Any, waits: Waits, state: int) -> tuple[Exception | None, int]:
        """Wait for the others; what to raise if they don't come, and who has come."""
        began = time.monotonic()
        look = _Look(self._rank, waits, self._on)
        looks_at = began + LOOK
        while not _complete(state, waits):
            if _is_left(state):
                return None, state
            now = time.monotonic()
            if waits.made and now > began + MOMENT:
                # They may come much later: these ranks make it without them. That all make the same is looked at where
                # they come at about the same time.
                break
            if now >= looks_at:
                looks_at = now + LOOK + 0.004 * self._world
                if not look.begun:
                    self._news.set()  # the others see that it waits
                raised = self._look(store, look, now - began)
                if self._off:
                    return None, state
                if raised is not None:
                    return (raised if self._leaves(store, waits, raised) else None), 0
            time.sleep(min(max((now - began) / 20, 0.0002), 0.01 + 0.0005 * self._world))
            state = store.add(waits.key, 0)
        waited = time.monotonic() - began
        if waited > waits.timeout and patience.NAME in self._on:
            late = f"{waited:.1f} s were waited before {waits.words}, whose timeout is {waits.timeout:g} s"
            self._saying.applied(patience.NAME, late)
        return None, state

    def _look(self, store: Any, look: _Look, waited: float) -> Exception | None:
        """See what the others are doing: what to raise, if anything. May leave off."""
        all_ = [unpacked(text) for text in store.multi_get([f"status/{rank}" for rank in range(self._world)])]
        all_[self._rank] = self._status if threading.get_ident() == self._main else self._status.but(steps=())
        if order.NAME in self._on and (differs := order.told(store)) is not None:
            return differs
        if any(one.off or (one.over and not one.ends) for one in all_):
            self._leave_off("another rank's start-up was over before, or that rank does not count any more")
            return None
        raised, why = look.sees(store, all_, waited)
        if why:
            self._leave_off(why)
        elif isinstance(raised, PeerFailed):
            self._saying.applied(failures.NAME, f"the wait for a rank that failed was left: {raised}")
        return raised

    def _leaves(self, store: Any, waits: Waits, why: Exception) -> bool:
        """Leave a meeting, unless the last rank has come meanwhile, and makes the call."""
        failed = failure_of(self._rank, self._status, why) if isinstance(why, PeerFailed) else None
        store.compare_set(f"{waits.key}/left", "", json.dumps([str(why), failed and asdict(failed)]))
        return not _complete(store.add(waits.key, _LEFT) - _LEFT, waits)

    def _left(self, store: Any, waits: Waits) -> tuple[str, Failed | None]:
        """Why a meeting was left by the first who did."""
        text, failed = json.loads(store.get(f"{waits.key}/left"))
        return text, failed_from(failed) if failed is not None else None

    def _why_left(self, store: Any, waits: Waits) -> Exception | None:
        """The error of those who have left a meeting, as that of this rank; None if they did not wait for it."""
        differs = order.told(store)
        if differs is not None:
            return differs
        text, failed = self._left(store, waits)
        if failed is not None:
            return failed.peer_error() if failed.rank != self._rank else None
        return RuntimeError(f"rank {self._rank} is too late in {waits.words}, which the others have left: {text}")

    # What the others are told

    def _changed(self, **changes: Any) -> None:
        with self._lock:
            self._status = self._status.but(**changes)

    def _connection(self, store: Any = None) -> Any:
        """This thread's own."""
        found = getattr(self._here, "store", None)
        if found is None:
            make: Any = sys.modules["torch"].distributed.PrefixStore
            own = own_connection(store or self._store, ANSWER)
            own.set_timeout(timedelta(seconds=ANSWER))
            found = self._here.store = make(f"initopt/{attempt_of_job()}/arrivals", own)
        return found

    def _put(self, store: Any) -> None:
        self._beats += 1
        with self._lock:
            status = self._status.but(beat=self._beats, line=self._line)
        store.set(f"status/{self._rank}", packed(status))

    def _run(self) -> None:
        """Say every now and then what this rank is doing."""
        try:
            store = self._connection()
            while not self._over.is_set():
                lines = self._own.of_thread(self._main)
                self._line = f"{lines[-1].file}:{lines[-1].number}" if lines else ""
                self._put(store)
                self._news.wait(BEAT)
                self._news.clear()
        except Exception as error:
            with suppress(Exception):
                self._leave_off(f"the others can't be told what this rank does ({type(error).__name__}: {error})")
                self._put(self._connection())

    def _leave_off(self, why: str) -> None:
        """Count no more, and tell the others."""
        if not self._off:
            self._off = True
            self._changed(off=True)
            self._news.set()
            for name in NAMES:
                if name in self._on:
                    self._saying.left(name, why)


class _Around(AbstractContextManager[None]):
    def __init__(self, arrivals: Arrivals, meeting: Meeting, group: Any) -> None:
        self._arrivals, self._meeting, self._group = arrivals, meeting, group

    def __enter__(self) -> None:
        try:
            self._arrivals.come(self._meeting, self._group)
        except BaseException:
            self._arrivals.gone()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._arrivals.gone()


class _Look:
    """What is known during one wait, from one look to the next."""

    def __init__(self, rank: int, waits: Waits, on: Collection[str]) -> None:
        self.begun = False
        self._rank = rank
        self._waits = waits
        self._on = on
        self._failures = Failures()
        self._silence = Silence()
        self._patience = Patience(rank, waits, longer=patience.NAME in on)
        self._still: dict[int, tuple[str, int]] = {}

    def sees(self, store: Any, all_: list[Status], waited: float) -> tuple[Exception | None, str]:
        """What to raise, or why to leave it to torch."""
        self.begun = True
        waits = self._waits
        # Who is in no group that is made is not needed for it.
        needs = waits.needs if not waits.made else waits.made if self._rank in waits.made else ()
        missing = {rank: all_[rank] for rank in needs if rank != self._rank and not all_[rank].came(waits)}
        raised: Exception | None = None
        if failures.NAME in self._on:
            raised = self._failures.among(all_[self._rank], missing)
        if raised is None and self._all_stand_still(all_):
            raised = order.crossed(store, all_) if order.NAME in self._on else None
            return raised, "" if raised else "all ranks wait, so that some have come elsewhere"
        silent = self._silence.of(missing) if raised is None else None
        if silent is not None:
            return None, f"rank {silent} says nothing any more"
        waiting = [rank for rank in waits.members if (one := all_[rank].meeting) is not None and one.key == waits.key]
        return raised or self._patience.is_over(missing, waited, speaks=waiting[:1] == [self._rank]), ""

    def _all_stand_still(self, all_: list[Status]) -> bool:
        """Whether every rank is in the same meeting as it was at an earlier look, and has said so twice since.

        Who waits for a rank that has failed is told sooner.
        """
        still = True
        for rank, status in enumerate(all_):
            meeting = status.meeting.key if status.meeting is not None else ""
            known, beat = self._still.setdefault(rank, (meeting, status.beat))
            if known != meeting:
                self._still[rank] = meeting, status.beat
            still &= bool(meeting) and known == meeting and (rank == self._rank or status.beat > beat + 1)
        return still


def _is_left(state: int) -> bool:
    return bool(state // _LEFT % _MANY)


def _complete(state: int, waits: Waits) -> bool:
    """Whether all those have come whom a meeting needs, and nobody has left it."""
    if _is_left(state):
        return False
    if waits.needs != waits.members:
        return bool(state // _ROOT % (_CALL // _ROOT))
    come = len(waits.members)
    return state % _MANY == come and state // _CALL == come * _code(waits)


def _code(waits: Waits) -> int:
    return int.from_bytes(hashlib.sha256(waits.words.encode()).digest()[:2], "big")
