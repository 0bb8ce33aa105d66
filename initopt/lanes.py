"""Running a graph: one thread per lane, steps alone where they must be, and an end within bounds when one fails.

The order of the collectives is the graph's own (they form one chain on the lane `comms`), so it is equal on every rank
whatever the timing. The other lanes start the ready step that comes first in the graph's order.
"""

from __future__ import annotations

import datetime
import faulthandler
import heapq
import math
import os
import signal
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from initopt import rng, watchdog
from initopt.alarm import Alarm
from initopt.failure import PeerFailed, StepTimeout, doing, note
from initopt.graph import Graph, OrderError, Step
from initopt.helper_process import HelperProcess
from initopt.leaving import (
    Sigterm,
    Terminated,
    children_now,
    end_children,
    joined_distributed,
    leave_collectives,
    sockets_now,
)
from initopt.outcome import Outcome, peer_error
from initopt.peers import Failure, Peers, describe
from initopt.record import Recorder, Span
from initopt.thread_state import ThreadState

if TYPE_CHECKING:
    import pluggy

GRACE = 2.0
"""Seconds that running steps get to end by themselves after a failure, before the error is raised without them."""
REACH = 5.0
"""Seconds in which a rank that fails before it has joined the others tries to reach them."""
TICK = 0.25
"""Seconds between two looks at the steps' timeouts."""

_runs: Counter[str] = Counter()


@dataclass(frozen=True)
class Task:
    """The function of a step. `parameters` maps each parameter to the step or input that provides its value.

    `discard` is called with the step's value if the start-up fails.
    """

    function: Callable[..., Any]
    parameters: Mapping[str, str]
    discard: Callable[[Any], None] | None = None


class _Stopped(Exception):
    """A step was not begun, since the start-up is over."""


class Execution:
    """One run of a graph on this rank."""

    def __init__(
        self,
        graph: Graph,
        tasks: Mapping[str, Task],
        inputs: Mapping[str, Any],
        *,
        recorder: Recorder,
        timeout: float,
        plugins: pluggy.PluginManager,
        goes_on: bool = False,
    ) -> None:
        # By name: one rank may have run a start-up of its own before.
        _runs[graph.name] += 1
        self.graph = graph
        self.recorder = recorder
        self.values: dict[str, Any] = dict(inputs)
        self.rank = int(os.environ.get("RANK", "0"))
        self.turn = _runs[graph.name]
        """How many start-ups of this name this process has begun."""
        self._tasks = tasks
        self._timeout = timeout
        self._longest = max((step.timeout or timeout for step in graph.values()), default=timeout)
        self._plugins = plugins
        self._goes_on = goes_on
        self._children: set[int] = set()
        self._peers: Peers | None = None
        self._joined = False
        self._store: Any = None
        self._thread_state = ThreadState()
        self._caller = threading.current_thread()
        self._alarm = Alarm(self._ends_stuck)
        self._sigterm = Sigterm()
        self._order = {name: index for index, name in enumerate(graph.order())}
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._bell = threading.Lock()
        self._lane_changed: dict[str, threading.Condition] = {}
        self._ready: dict[str, list[tuple[int, str]]] = {}
        self._alone: list[str] = []
        self._missing = {name: len(graph.predecessors(name)) for name in graph}
        self._running: dict[str, float] = {}
        self._paused: dict[str, float] = {}
        self._here = threading.local()
        self._left = len(graph)
        self._over = False
        self._outcome = Outcome(graph.name, self.rank)
        self._hooks = ExitStack()
        self._hooking = threading.Lock()
        self._hooked = False
        self._threads: dict[str, threading.Thread] = {}
        self._helpers: dict[str, HelperProcess] = {}
        self._generators = rng.read()
        self._sockets_before: set[int] = set()
        self._serial = False

    # Running

    def overlapped(self) -> None:
        """Run every step on its lane. Raises StartupFailed."""
        children = self._children = children_now()
        self._sockets_before = sockets_now()
        with self._guarded(children):
            # Before the handler of SIGTERM is set and before there are lanes: a forked helper would inherit both.
            for lane, names in self.graph.lanes().items():
                if lane.startswith("process:"):
                    self._helpers[lane] = HelperProcess(lane, {name: self._tasks[name].function for name in names})
            self._join_by_itself()
            with self._sigterm.raised():
                with self._lock:
                    for name, missing in self._missing.items():
                        if not missing:
                            self._becomes_ready(name)
                self._coordinate()

    def serially(self) -> None:
        """Run the same steps one after the other, in the calling thread. Raises StartupFailed."""
        children = self._children = children_now()
        self._sockets_before = sockets_now()
        self._serial = True
        with self._guarded(children):
            self._join_by_itself()
            for name in self.graph.order():
                with self._lock:
                    if self._over:
                        break
                    self._running[name] = time.monotonic()
                self._run_step(name)

    def join(self, store: Any, rank: int, world_size: int) -> None:
        """Connect this start-up, and its record, to the other ranks' through `store`; a second call does nothing.

        Raises OrderError if their collectives differ.
        """
        with self._lock:
            if self._joined:
                return
            self._joined = True
        self.rank = self._outcome.rank = rank
        if world_size > 1:
            self._peers = self._peers_through(store, world_size)
            # Before anything waits for the others: one of them may have failed already.
            self._peers.start()
        self.recorder.agree(rank, world_size, store)
        if self._peers is None:
            return
        mine = self.graph.lanes().get("comms", ())
        theirs = self._peers.agree("comms", "\n".join(mine)).split("\n")
        for index, (here, there) in enumerate(zip([*mine, "nothing more"], [*theirs, "nothing more"], strict=False)):
            if here != there:
                raise OrderError(
                    f"rank {rank} and rank 0 don't hold the same collectives: as number {index + 1} of the lane comms "
                    f"rank {rank} has {here!r}, rank 0 {there!r}. Declare the same steps on every rank"
                )

    @contextmanager
    def alone(self, step: str) -> Iterator[None]:
        """Wait until no step but `step` runs, and let none start until the block ends."""
        if self._serial:
            yield
            return
        with self._lock:
            # Before the steps that fork: they wait for `step`, which runs.
            self._alone.insert(0, step)
        try:
            with self._lock:
                while not self._over and self._running.keys() != {step}:
                    self._changed.wait()
                if self._over:
                    raise _Stopped(step)
            yield
        finally:
            with self._lock:
                self._alone.remove(step)
                self._wake()

    def pause(self) -> None:
        """Let the steps that must run alone do so now, from a step that runs."""
        name = self._step_here()
        with self._lock:
            since = self._running.get(name)
            others = all(self.graph[other].pauses for other in self._running if other != name)
            if since is None or not self._alone or name in self._alone or not others:
                return
            self._running.pop(name)
            self._notify()
            stopped = time.monotonic()
            while self._alone and not self._over:
                self._changed.wait()
            paused = time.monotonic() - stopped
            self._paused[name] = self._paused.get(name, 0.0) + paused
            self._running[name] = since + paused
            if self._over:
                raise _Stopped(name)

    def _coordinate(self) -> None:
        # The steps that fork run here: torch's loader watches its workers by signals only from the main thread, and the
        # lanes' threads are started as late as their first step, so that most forks come before any of them.
        while True:
            with self._lock:
                self._check_timeouts()
                if self._over or not self._left:
                    self._over = True
                    self._wake()
                    return
                step = self._alone[0] if self._alone and not self._running else None
                if step is not None:
                    self._running[step] = time.monotonic()
            if step is None:
                # Not a condition, whose lock a signal that raises here could leave broken.
                self._bell.acquire(timeout=TICK)
                continue
            with self._sigterm.as_before():
                self._run_step(step)
            with self._lock:
                self._alone.remove(step)
                self._wake()

    def _lane(self, lane: str) -> None:
        changed, ready = self._lane_changed[lane], self._ready[lane]
        while True:
            with self._lock:
                while not self._over and (not ready or self._alone):
                    changed.wait()
                if self._over:
                    return
                name = heapq.heappop(ready)[1]
                self._running[name] = time.monotonic()
            try:
                self._run_step(name)
            except BaseException as error:
                # Not the step's own error, but a lane that dies in silence would hold up the start-up for good.
                self._step_failed(name, error)

    def _becomes_ready(self, name: str) -> None:
        step = self.graph[name]
        if "fork" in step.uses:
            self._alone.append(name)
            self._notify()
            return
        lane = step.lane
        if lane not in self._ready:
            self._ready[lane] = []
            self._lane_changed[lane] = threading.Condition(self._lock)
            self._threads[lane] = threading.Thread(target=self._lane, args=(lane,), name=f"initopt-{lane}", daemon=True)
            heapq.heappush(self._ready[lane], (self._order[name], name))
            self._threads[lane].start()
        else:
            heapq.heappush(self._ready[lane], (self._order[name], name))
            self._lane_changed[lane].notify()

    def _notify(self) -> None:
        self._changed.notify_all()
        if self._bell.locked():
            self._bell.release()

    def _wake(self) -> None:
        self._notify()
        for changed in self._lane_changed.values():
            changed.notify()

    # One step

    def _run_step(self, name: str) -> None:
        step = self.graph[name]
        if self._peers is not None:
            self._peers.tell()
        start, cpu = self.recorder.now(), time.thread_time()
        error: BaseException | None = None
        value: Any = None
        self._here.step = name
        try:
            with ExitStack() as stack:
                stack.enter_context(self.recorder.current_step(name, lane=step.lane))
                if threading.current_thread() is self._caller:
                    stack.enter_context(self._limited(name, step.timeout or self._timeout))
                if "rng" in step.uses:
                    self._check_generators(f"before {name!r}")
                if not self._serial and not {"rng", "fork", "compile"} & set(step.uses):
                    stack.enter_context(rng.watched(lambda function: self._refuse_draw(step, function)))
                stack.enter_context(self._lane_context(step.lane))
                value = self._thread_state.call(lambda: self._call(name))
                if "rng" in step.uses:
                    self._generators = rng.read()
                if step.lane == "comms":
                    self._join_by_itself()
                self._watch_collectives()
        except BaseException as raised:
            error = raised
        self._here.step = ""
        span = Span(
            name,
            start,
            self.recorder.now(),
            rank=self.rank,
            lane=step.lane,
            stage=step.stage,
            cpu=time.thread_time() - cpu,
            error=type(error).__name__ if error else "",
            call_site=step.call_site,
            paused=self._paused.get(name, 0.0),
        )
        self.recorder.add(span)
        if error is not None and not self._over:
            self.recorder.note(describe(error), step=name)
        try:
            self._plugins.hook.initopt_step_ended(span=span)
        except Exception as raised:
            note(raised, f"a plugin's initopt_step_ended raised this after step {name!r}")
            error = error or raised
        if error is not None:
            self._step_failed(name, error)
            return
        with self._lock:
            self._running.pop(name)
            self.values[name] = value
            self._left -= 1
            for edge in self.graph.successors(name):
                self._missing[edge.after] -= 1
                if not self._missing[edge.after] and not self._serial and not self._over:
                    self._becomes_ready(edge.after)
            if not self._running or not self._left or self._alone:
                self._notify()

    def _step_here(self) -> str:
        """The step that the calling thread runs, whatever spans it has named inside; empty elsewhere."""
        step: str = getattr(self._here, "step", "")
        return step

    def _call(self, name: str) -> Any:
        task = self._tasks[name]
        arguments = {parameter: self.values[source] for parameter, source in task.parameters.items()}
        helper = self._helpers.get(self.graph[name].lane)
        return helper.call(name, arguments) if helper is not None else task.function(**arguments)

    def _lane_context(self, lane: str) -> Any:
        context = self._plugins.hook.initopt_lane_context(lane=lane)
        if context is None and lane.startswith("cuda:"):
            raise RuntimeError(f"no installed plugin runs lane {lane!r}; the plugin 'cuda' of initopt does")
        return context or nullcontext()

    def _refuse_draw(self, step: Step, function: str) -> None:
        raise OrderError(
            f"step {step.name!r} ({step.call_site}) draws random numbers ({function}) and does not use 'rng', so the "
            "weights would depend on timing. Give it uses='rng'"
        )

    def _refuse_meeting(self, op: str, call_site: str) -> None:
        """Stop a collective off the lane `comms` before it begins: the other ranks may hold another one first."""
        step = self.graph.get(self._step_here())
        if step is not None and step.lane != "comms" and not self._serial:
            raise OrderError(
                f"step {step.name!r} ({step.call_site}) on lane {step.lane!r} calls {op} at {call_site}: ranks could "
                "meet in different orders. Set lane='comms'"
            )

    def _check_generators(self, when: str) -> None:
        """Find a draw by a step that does not hold `rng`: its place among the draws would depend on timing."""
        now = rng.read()
        if not rng.moved(self._generators, now):
            return
        suspects = [
            n for n in self.graph if (n in self.values or n in self._running) and "rng" not in self.graph[n].uses
        ]
        text = (
            f"random numbers were drawn {when}, by a step that does not use 'rng'. It is one of these: "
            f"{', '.join(suspects)}. Give uses='rng' to the one that draws"
        )
        if not self._serial:
            raise OrderError(f"{text}. Overlapped, the weights would depend on timing")
        warnings.warn(f"initopt: {text}; with overlap this is an error", stacklevel=2)
        self._generators = now

    def _watch_collectives(self) -> None:
        """Record meetings from the moment on that torch.distributed is there; a start-up without it stays without."""
        with self._hooking:
            if not self._hooked and "torch.distributed" in sys.modules and not self._over:
                self._hooked = True
                self._hooks.enter_context(self.recorder.collectives(before=self._refuse_meeting))

    def _join_by_itself(self) -> None:
        distributed = None if self._joined else joined_distributed()
        if distributed is not None:
            store = distributed.distributed_c10d._get_default_store()
            self.join(store, distributed.get_rank(), distributed.get_world_size())

    def _reached_late(self) -> Peers | None:
        """Connect to the others just to tell of a failure: this rank's start-up had not got so far as to join them."""
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        distributed: Any = getattr(sys.modules.get("torch"), "distributed", None)
        if world_size == 1 or not hasattr(distributed, "rendezvous"):
            return None
        with self._lock:
            joining, self._joined = self._joined, True
        if joining:
            # Another thread is about to be connected, or was it and met nobody.
            until = time.monotonic() + TICK
            while self._peers is None and time.monotonic() < until:
                time.sleep(0.01)
            return self._peers
        found: list[Peers] = []

        def connect() -> None:
            # Nobody may be there yet, or they meet elsewhere.
            with suppress(Exception):
                # Kept: on rank 0 it is the store itself, and serves the others.
                self._store, *_ = next(distributed.rendezvous("env://", timeout=datetime.timedelta(seconds=REACH)))
                found.append(self._peers_through(self._store, world_size))

        # Looking up a host or a port that does not answer may take longer than any timeout says.
        thread = threading.Thread(target=connect, name="initopt-late", daemon=True)
        thread.start()
        thread.join(2 * REACH)
        return found[0] if found else None

    def _peers_through(self, store: Any, world_size: int) -> Peers:
        return Peers(
            store,
            self.rank,
            world_size,
            startup=self.graph.name,
            turn=self.turn,
            status=self._status,
            failed=self._peer_failed,
        )

    # Failure

    def _status(self) -> tuple[str, float]:
        with self._lock:
            if not self._running:
                return "", 0.0
            # A rank that meets others is named by its collective step: that is where the others miss it.
            step = min(self._running, key=lambda name: (not self._holds_collectives(name), self._running[name]))
            return step, time.monotonic() - self._running[step]

    def _check_timeouts(self) -> None:
        now = time.monotonic()
        # A step that begins before the next look may have the longest limit of all.
        nearest = math.inf if self._running else self._longest
        for name, since in self._running.items():
            limit = self.graph[name].timeout or self._timeout
            nearest = min(nearest, since + limit - now)
            if now - since > limit and not self._over:
                self._fails(name, StepTimeout(name, limit), now - since)
        watchdog.put_off(nearest)

    def _stop(self) -> None:
        if not self._over:
            now = time.monotonic()
            self._outcome.was_running = {name: now - since for name, since in self._running.items()}
        self._over = True
        self._wake()

    def _step_failed(self, name: str, error: BaseException) -> None:
        with self._lock:
            elapsed = time.monotonic() - self._running.pop(name, time.monotonic())
            if not self._over:
                self._fails(name, error, elapsed)
            elif not self._is_echo(name, error):
                self._outcome.keep(name, error, elapsed)
            self._wake()

    def _fails(self, name: str, error: BaseException, elapsed: float) -> None:
        if isinstance(error, PeerFailed) and self._outcome.heard is not None:
            return
        self._outcome.fails(name, error, elapsed)
        self._stop()

    def _is_echo(self, name: str, error: BaseException) -> bool:
        """Whether a step that fails when the start-up is over does so for that reason: its meeting or helper ended."""
        own = self._outcome.own
        timed_out = own is not None and own.step == name
        ended = self._holds_collectives(name) or self.graph[name].lane.startswith("process:")
        return timed_out or ended or isinstance(error, _Stopped | PeerFailed)

    def _peer_failed(self, failure: Failure) -> None:
        with self._lock:
            if self._outcome.heard is not None:
                return
            self._outcome.heard = failure
            self._stop()
        leave_collectives(self._sockets_before)
        self._alarm.interrupt(peer_error(failure))

    @contextmanager
    def _guarded(self, children: set[int]) -> Iterator[None]:
        """Turn whatever ends a run early into one error, with nothing left running."""
        try:
            with self._hooks:
                self._watch_collectives()
                yield
            self._check_at_the_end()
        except BaseException as error:
            self._interrupted(error, children)
            raise
        finally:
            watchdog.stop()
            for helper in self._helpers.values():
                helper.close()
        if self._peers is not None and (self._outcome.errors or not self._goes_on):
            self._peers.stop()
        if self._outcome.bad:
            raise self._failed(children)
        for thread in self._threads.values():
            thread.join()
        if self._peers is not None and not self._goes_on:
            self._peers.end()

    def last_step(self, name: str, function: Callable[[], Any]) -> Any:
        """Run one step more, in the caller's thread, for a run that `goes_on`: the first training step.

        Another rank may fail when this one has done all its own steps. Raises StartupFailed as the run does;
        StopIteration is no failure.
        """
        value: Any = None
        ended: StopIteration | None = None
        with self._lock:
            self._over = self._outcome.heard is not None
            if not self._over:
                self._running[name] = time.monotonic()
        if self._peers is not None:
            self._peers.tell()
        try:
            if not self._over:
                with self._limited(name, self._timeout):
                    value = function()
        except StopIteration as error:
            ended = error
        except BaseException as error:
            self._step_failed(name, error)
        with self._lock:
            self._running.pop(name, None)
        if self._outcome.bad:
            raise self._failed(self._children)
        if self._peers is not None:
            self._peers.stop()
            self._peers.end()
        if ended is not None:
            raise ended
        return value

    @contextmanager
    def _limited(self, name: str, limit: float) -> Iterator[None]:
        """Bound a step that runs in the caller's thread, which can't look at the time meanwhile."""
        watchdog.put_off(limit)
        try:
            with self._alarm.limit(name, limit):
                yield
        finally:
            watchdog.stop()

    def _holds_collectives(self, name: str) -> bool:
        return name not in self.graph or self.graph[name].lane == "comms"

    def _check_at_the_end(self) -> None:
        if self._outcome.bad:
            return
        try:
            self._check_generators("after the last step that uses 'rng'")
        except OrderError as error:
            self._outcome.errors.append(error)
            self._outcome.own = Failure(self.rank, "", 0.0, describe(error))

    def _interrupted(self, error: BaseException, children: set[int]) -> None:
        """Leave on an error that is no step's: Ctrl-C, SIGTERM, a helper that could not be started."""
        outcome = self._outcome
        with self._lock:
            self._stop()
        outcome.note_what_ran(error)
        if isinstance(error, Terminated):
            self._ends_by_signal(children)
        if self._peers is not None:
            self._peers.stop()
            if outcome.heard is None:
                step, seconds = max(outcome.was_running.items(), key=lambda item: item[1], default=("", 0.0))
                text = describe(error)
                self._peers.announce(Failure(self.rank, step, seconds, text), look_for_cause=False)
        leave_collectives(self._sockets_before)
        known = len(outcome.errors)
        self._clean_up(children)
        for other in outcome.errors[known:]:
            note(error, f"while cleaning up: {type(other).__name__}: {other}")

    def _failed(self, children: set[int]) -> BaseException:
        outcome = self._outcome
        if self._peers is None and outcome.own is not None:
            self._peers = self._reached_late()
        meanwhile = ""
        if self._peers is not None:
            self._peers.stop()
            if outcome.heard is None and outcome.own is not None:
                step = outcome.own.step
                collective = bool(step) and self._holds_collectives(step)
                first = self._peers.announce(outcome.own, look_for_cause=collective)
                if first.rank != self.rank:
                    outcome.was_an_echo(first)
            failed = {outcome.first.rank} if outcome.first else set()
            meanwhile = doing(self._peers.statuses(), but={self.rank, *failed})
        leave_collectives(self._sockets_before)
        self._clean_up(children)
        return outcome.error(meanwhile)

    def _clean_up(self, children: set[int]) -> None:
        until = time.monotonic() + GRACE
        for thread in self._threads.values():
            thread.join(max(0.0, until - time.monotonic()))
        for name, task in self._tasks.items():
            if task.discard is not None and name in self.values:
                self._discard(name, task.discard)
        end_children(children_now() - children)

    def _discard(self, name: str, discard: Callable[[Any], None]) -> None:
        def inside() -> None:
            try:
                discard(self.values[name])
            except BaseException as error:
                note(error, f"while the value of step {name!r} was discarded")
                self._outcome.errors.append(error)

        # A failure must be told in time, also by a discard that hangs.
        thread = threading.Thread(target=inside, name=f"initopt-discard-{name}", daemon=True)
        thread.start()
        thread.join(GRACE)

    def _ends_stuck(self, step: str, limit: float, ended: threading.Event) -> None:
        """End the process for a step in the caller's thread that nothing can interrupt, after the others were told."""
        with self._lock:
            if not self._over:
                self._fails(step, StepTimeout(step, limit), limit)
        outcome = self._outcome
        why = describe(peer_error(outcome.heard) if outcome.heard is not None else StepTimeout(step, limit))
        if self._peers is not None and outcome.own is not None:
            self._peers.stop()
            self._peers.announce(outcome.own, look_for_cause=False)
        leave_collectives(self._sockets_before)
        if ended.wait(GRACE):
            return
        print(
            f"initopt: start-up {self.graph.name!r} failed: {why}. Rank {self.rank} is in step {step!r} and can't be "
            "interrupted, so its process ends. It stands here:",
            file=sys.stderr,
            flush=True,
        )
        faulthandler.dump_traceback(all_threads=True)
        end_children(children_now() - self._children)
        os._exit(1)

    def _ends_by_signal(self, children: set[int]) -> None:
        """Say what SIGTERM interrupted, then end by it, as the process would have without initopt."""
        step, seconds = self._status()
        text = f"initopt: start-up {self.graph.name!r} stopped by SIGTERM on rank {self.rank}"
        text += f" in step {step!r} after {seconds:.1f} s" if step else ""
        if self._peers is not None:
            cause = self._peers.cause()
            text += f"; {cause}" if cause is not None else ""
        print(text, file=sys.stderr, flush=True)
        self._clean_up(children)
        os.kill(os.getpid(), signal.SIGTERM)
