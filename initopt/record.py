"""What a rank does between process start and the end of its first training step, written down while it happens.

A recorded span and a simulated one are the same type, so that every view works on both. What goes wrong here costs the
record, never the job: it is said once, on the logger `initopt`, and recording stops. This file does not know the other
ranks (see `runs`) nor which calls are meetings (see `hooks`).
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import platform
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, cast, get_args, overload

from initopt.cores import cores
from initopt.imports import NOT_TO_BE_USED, SWITCH, Imported, ImportLine, recording
from initopt.own_cost import Spent
from initopt.process_tree import cpu_seconds
from initopt.unused import Unused, Watch

if TYPE_CHECKING:
    from io import FileIO

    from initopt.graph import Graph
    from initopt.hooks import Meeting

SpanKind = Literal["import", "step", "collective", "compile"]
Mode = Literal["stock", "serial", "overlap", "optimized"]

FIRST_STEP = "first_step"
"""The step that ends a start-up: the first optimizer step on real data."""

FORMAT = 1
"""The version of the files, in every header."""

_PATIENCE = 10.0
"""Seconds that a rank waits for the number of the run. Rank 0 gives it out as soon as it gets to `Recorder.agree`."""

_IMPORTED = time.perf_counter()


@dataclass(frozen=True, slots=True)
class Span:
    """Something with a start and an end, on one lane of one rank. Times are seconds.

    In a rank's file time zero is the start of that worker's process; in a loaded `Run` it is the earliest process start
    of all ranks. `wait` is the part of the span spent for ranks that came later (known once ranks are matched), `cpu`
    the CPU seconds of the thread. For a collective `step` is the step that issued it and `sequence` its number on its
    group; for a compile it is the step that this happened in, for a step inside another step the outer one. With
    `async_op` a collective's span covers only the call that handed it over, not the communication. `paused` is the part
    in which a step stood aside for one that forks. `digest`, `root`, `ranks`, `options` and `callers` of a collective
    are those of `hooks.Meeting`.
    """

    name: str
    start: float
    end: float
    rank: int = 0
    lane: str = "main"
    kind: SpanKind = "step"
    stage: str | None = None
    wait: float = 0.0
    cpu: float = 0.0
    step: str = ""
    op: str = ""
    group: str = ""
    sequence: int = -1
    bytes: int = 0
    call_site: str = ""
    error: str = ""
    async_op: bool = False
    paused: float = 0.0
    digest: str = ""
    root: int = -1
    ranks: tuple[int, ...] = ()
    options: str = ""
    callers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Begun:
    """A collective that has begun, at `start` seconds. If it ends, a `Span` follows on the same lane.

    If not, this is all that a rank leaves that was stopped while it waited for others.
    """

    op: str
    start: float
    group: str = ""
    sequence: int = -1
    call_site: str = ""
    step: str = ""
    lane: str = "main"
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Header:
    """Who recorded, where and with what. One per rank, the first line of its file.

    `process_start` is unix time in seconds; `zero` says where it is from: the kernel, or (where that can't be asked)
    the first import of this file. Ranks with the same `clock` read the same clock: it names the machine's boot. `mode`
    is `stock`, `serial`, `overlap` or (with `initopt.run --optimize`) `optimized`. `labels` go with every number made
    from this run (for example `emulated: reader latency 4 s`). `cores` are those that this process may run on,
    `host_cores` all that the system sees. `goal` is the step that ends the start-up by `initopt.run --until`, under its
    own name; empty where that is the first training step. `after_launcher` are the seconds that the process which
    launched the rank (torchrun, `initopt launch`) had run by `process_start`; 0 where that is not known.
    """

    rank: int
    world_size: int
    job: str
    mode: str
    host: str
    pid: int
    process_start: float
    cores: int
    labels: tuple[str, ...] = ()
    commit: str = ""
    versions: dict[str, str] | None = None
    format: int = FORMAT
    clock: str = ""
    zero: Literal["kernel", "import"] = "kernel"
    host_cores: int = 0
    goal: str = ""
    after_launcher: float = 0.0


@dataclass(frozen=True, slots=True)
class Digest:
    """A checksum that a rank left, to be compared with that of another run. `about` says of what."""

    name: str
    sha256: str
    rank: int = 0
    about: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Note:
    """A remark of the step `step`, for who reads the record: one sentence. `left_out` is as in `Optimized`."""

    text: str
    step: str = ""
    rank: int = 0
    left_out: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """The CPU seconds that a rank's process and all its descendants had used `at` seconds after its start.

    It is taken at the end of the first training step; where there is none, at the end of the start-up's last step, or
    when the record is closed. The last one of a record counts.
    """

    at: float
    cpu: float
    rank: int = 0


Cached = Literal["hit", "miss", "bypass", ""]
"""What a cache of the compiler did: it had all, it lacked something, it could not be used, it was not asked."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """One turn of torch's compiler: a frame that it traced and compiled, or tried to. Times are seconds.

    `name` is the function with its class (without it on Python 3.10), `place` its `file:line`, `compile_id` torch's own
    number (`0/1`: frame 0, for the second time). `start` and `end` are as in a `Span`; the stages exclude each other:
    `dynamo` is tracing and guards, `aot_autograd` the joint graph, its cases and its cache, `backend` inductor, and of
    that `code_gen` the code and its C++ compiler. They add up to a little less than `end - start`.

    `direction` says what was compiled: a backward graph mostly comes late, in a turn of its own. `operations` counts
    those of the graph that Dynamo made; 0 where it made none.

    `recompile_reason` is the guard that failed, in torch's words, where code for this frame was there already. `breaks`
    has a sentence for each graph break, `restarts` for each other time that tracing had to begin again. `failure` is
    empty where all went well.
    """

    name: str
    place: str
    start: float
    end: float
    compile_id: str = ""
    direction: Literal["forward", "backward", "both"] = "forward"
    operations: int = 0
    dynamo: float = 0.0
    aot_autograd: float = 0.0
    backend: float = 0.0
    code_gen: float = 0.0
    aot_autograd_cache: Cached = ""
    fx_graph_cache: Cached = ""
    recompile_reason: str = ""
    breaks: tuple[str, ...] = ()
    restarts: tuple[str, ...] = ()
    failure: str = ""
    rank: int = 0
    lane: str = "main"
    step: str = ""


@dataclass(frozen=True, slots=True)
class CompileCache:
    """How a rank came to its compiled code: who compiled, who waited for it, and what was found.

    A `leader` compiles for others, a `follower` uses what the leader made, `alone` is who shares with nobody. `leader`
    is the rank that led, -1 where none did. `waited` is in seconds. `hit` says whether the code was there before this
    start, in `files` with `bytes` together; `why` why it was not, or why this rank went its own way.
    """

    role: Literal["leader", "follower", "alone"]
    leader: int = -1
    waited: float = 0.0
    hit: bool = False
    files: int = 0
    bytes: int = 0
    why: str = ""
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Watched:
    """What was watched until the first batch was done, so that nothing found means something.

    `objects` are data loaders and process groups. `imports` are not recorded (`off`), timed, or watched in use. `used`
    says that INITOPT_IMPORTS asked for the last. `before` are the packages imported before imports were recorded.
    """

    objects: bool = False
    imports: Literal["off", "timed", "used"] = "off"
    used: bool = False
    before: tuple[str, ...] = ()
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Optimized:
    """What became of an optimization of `initopt.run --optimize`, in one place or in the whole start-up.

    `name` is that of `optimizations.TABLE`. `text` says what was done where it was `applied`, else why it was not, in
    words without a full stop. `place` is the script's `file:line`, empty where it is about no single one. `left_out`
    says how many meetings of ranks each rewrite of `comm_elim` left out.
    """

    name: str
    applied: bool
    text: str
    place: str = ""
    rank: int = 0
    left_out: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Advised:
    """What the script could do itself at `place` (`file:line`), since nobody else can prove that it may be done.

    `steps` are the seconds by which each step would then be shorter, from which what it saves is simulated; empty where
    that is not known.
    """

    text: str
    place: str
    steps: dict[str, float]
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Ended:
    """What ended a script: `ValueError at train.py:3: its message` or `exit code 3 at train.py:7`.

    `step` is the innermost one that this has left, empty where that has no name of its own; `at` the seconds from the
    start of the process.
    """

    error: str
    at: float
    step: str = ""


@dataclass(frozen=True, slots=True)
class Trailer:
    """The last line of a rank's file. `end` is in seconds, `own_cost` (what recording took) in CPU seconds.

    A garbage collection of all that the process has, which happens to begin while something is written, is not in it.
    `ended` is what has ended a script that `initopt.run` records before its last step, None where it came to its own
    end or that is not known.
    """

    rank: int
    end: float
    own_cost: float
    peak_rss: int
    ended: Ended | None = None


class Store(Protocol):
    """The four calls that the recorder makes on a `torch.distributed` store."""

    def set(self, key: str, value: str, /) -> None:
        """Give the key this value."""

    def get(self, key: str, /) -> bytes:
        """The key's value, waiting for it."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all keys have values."""

    def add(self, key: str, amount: int, /) -> int:
        """The counter's value after adding to it."""


def run_root(root: str | Path | None = None) -> Path:
    """Where runs are kept: `root`, else the environment variable INITOPT_ROOT, else `.initopt` where the job runs."""
    return Path(root if root is not None else os.environ.get("INITOPT_ROOT") or ".initopt")


def run_numbers(root: Path) -> list[int]:
    """The numbers of the runs under `root`, ascending. Empty if there is no such directory."""
    try:
        return sorted(int(entry.name) for entry in root.iterdir() if entry.name.isdigit())
    except FileNotFoundError:
        return []


class Recorder:
    """Writes what this rank does into one file of a numbered run.

    `with Recorder("dlrm", mode="stock") as recorder:` makes it the one that `step` records into, and closes it at the
    end. Everything may be called from any thread. `root`: see `run_root`. `keep`: that many runs stay, the oldest go.
    `labels` and `graph` are stored with the run.

    Raises ValueError for an unknown `mode` and for `keep` below 1; nothing else raises.
    """

    def __init__(
        self,
        job: str,
        *,
        mode: Mode,
        root: str | Path | None = None,
        keep: int = 20,
        labels: Iterable[str] = (),
        graph: Graph | None = None,
    ) -> None:
        entered = time.thread_time()
        if mode not in get_args(Mode):
            raise ValueError(f"mode is {mode!r}: it must be one of {', '.join(get_args(Mode))}")
        if keep < 1:
            raise ValueError(f"keep is {keep}: at least 1, the run that is being recorded, stays")
        self._zero, self._process_start, self._zero_from = _process_start()
        self._after_launcher = _after_launcher()
        self._job = job
        self._mode = mode
        self._end = FIRST_STEP
        self.root = run_root(root)
        self._keep = keep
        self._labels = (*labels, *_imported_once())
        self.graph = graph
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._where = threading.local()
        self._waiting: list[_Record] = []
        self._usage_written = False
        self._watched_written = False
        self._watch = Watch(self.step_here)
        self._imports = recording()
        if self._imports is not None:
            self._imports.step_here = lambda: (self.step_here(), self._lane())
            if self._imports.watched:
                self._labels += (NOT_TO_BE_USED,)
        self._file: FileIO | None = None
        self._run_key = ""
        self._store: Store | None = None
        self._stopped = False
        self._own_cost = 0.0
        self._calls: dict[str, int] = {}
        self._agreed = False
        self._before: list[Recorder | None] = []
        self._hooks: list[ExitStack] = []
        self.rank = 0
        self.world_size = 1
        self.path: Path | None = None
        """The directory of the run, once its number is known."""
        self._begin(entered)

    def _begin(self, entered: float) -> None:
        """Write what comes first: all that this process did until now is its imports."""
        self._write(Span("imports", 0.0, self.now(), kind="import", cpu=time.thread_time()), entered)

    def now(self) -> float:
        """Seconds since this process started."""
        return time.perf_counter() - self._zero

    def add(self, span: Span) -> None:
        """Record a span whose times are those of `now`."""
        self._write(span, time.thread_time())

    @contextmanager
    def span(self, name: str, *, lane: str | None = None, stage: str | None = None) -> Iterator[None]:
        """Record the block as a step. An exception leaves its type (see `_failure`) in the record and goes on.

        Without a `lane` it is the one that this thread is in: `main` for the main thread, else the thread's name.
        """
        entered = time.thread_time()
        with self.current_step(name, lane=lane) as outer:
            lane = self._lane()
            error = ""
            began = time.thread_time()
            start = time.perf_counter()
            try:
                yield
            except BaseException as raised:
                error = self._failure(raised)
                raise
            finally:
                end = time.perf_counter()
                ended = time.thread_time()
                span = Span(
                    name,
                    start - self._zero,
                    end - self._zero,
                    rank=self.rank,
                    lane=lane,
                    stage=stage,
                    cpu=ended - began,
                    step=outer,
                    error=error,
                )
                self._write(span, ended - (began - entered))

    def _failure(self, raised: BaseException) -> str:
        """What a record says of an exception that has left a step."""
        return type(raised).__name__

    @contextmanager
    def current_step(self, name: str, *, lane: str | None = None) -> Iterator[str]:
        """Say which step this thread is in, without recording one: collectives inside belong to it.

        Gives the step that the thread was in before, or "".
        """
        outer = self.step_here(), getattr(self._where, "lane", None)
        self._where.step = name
        self._where.lane = lane or outer[1]
        try:
            yield outer[0]
        finally:
            self._where.step, self._where.lane = outer

    @contextmanager
    def collectives(
        self, before: Callable[[str, str], None] | None = None, around: _Around | None = None
    ) -> Iterator[None]:
        """Record the meetings of this process until the block ends or the recorder is closed. Imports torch.

        What torch's compiler does meanwhile is recorded as well, from the moment on that something else imports it.

        `before` is called with the operation and the call site (`file:line`) of each, and may raise to prevent it.
        `around` is called with the meeting and the group that it was given: the call is made in what it returns.
        """
        from initopt.compile_cache.compile_events import watching
        from initopt.hooks import watched

        with ExitStack() as hooks:
            with self._fail_safe():
                hooks.enter_context(watched(_Meetings(self, before, around), self._calls))
                hooks.enter_context(watching(self._has_compiled))
                hooks.enter_context(self._watch.loaders())
            self._hooks.append(hooks)
            yield

    def agree(self, rank: int, world_size: int, store: Store | None = None) -> None:
        """Settle on the run's number with the other ranks, and write out what was recorded so far.

        Rank 0 takes the next free number and hands it on through `store`, which every rank must pass (one rank alone
        needs none). The others wait for it at most 10 s; if it comes later, their record is written when they close.
        Called by itself when the default group is made while `collectives` watches. A second call does nothing.
        """
        if self._silent() or self._agreed:
            return
        entered = time.thread_time()
        self._agreed = True
        with self._counted(entered), self._fail_safe():
            self.rank, self.world_size, self._store = rank, world_size, store
            if store is None:
                if world_size > 1:
                    raise ValueError(f"rank {rank} of {world_size} has no store to learn the number of the run from")
                self._open(self._new_run())
            else:
                attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
                # A second recorder of the same job must not read the first one's number.
                turn = store.add(f"initopt/{attempt}/turn/{rank}", 1)
                self._run_key = f"initopt/{attempt}/run/{turn}"
                if rank == 0:
                    number = ""
                    try:
                        number = self._new_run()
                    finally:
                        store.set(self._run_key, number)
                    self._open(number)
                else:
                    self._learn_number(store)

    def agree_by_itself(self) -> None:
        """Call `agree` with this process's default group, if it has one and nobody has called it yet."""
        distributed = getattr(sys.modules.get("torch"), "distributed", None)
        joined = getattr(distributed, "is_initialized", None)
        if self._agreed or joined is None or not joined():
            return
        with self._fail_safe():
            store = distributed.distributed_c10d._get_default_store()  # type: ignore[union-attr]
            self.agree(distributed.get_rank(), distributed.get_world_size(), store)  # type: ignore[union-attr]

    def digest(self, name: str, sha256: str, **about: Any) -> None:
        """Leave a checksum (hex) in the record, for example of the trained state. `about` must be JSON values."""
        self._write(Digest(name, sha256, about=about), time.thread_time())

    def note(self, text: str, *, step: str | None = None, left_out: Mapping[str, int] | None = None) -> None:
        """Leave a remark of `step`, or of the step that this thread is in.

        `left_out` says how many meetings of ranks each rewrite left out, where the remark is about them.
        """
        step = self.step_here() if step is None else step
        self._write(Note(text, step, left_out=tuple((left_out or {}).items())), time.thread_time())

    def compile_cache(self, found: CompileCache) -> None:
        """Leave how this rank came to its compiled code. Called again, the last one counts."""
        self._write(found, time.thread_time())

    def optimized(self, what: Optimized | Advised) -> None:
        """Leave what was optimized, or what could be."""
        self._write(what, time.thread_time())

    def started(self) -> None:
        """Say that the start-up is over, unless its last step follows: what is used from here on is training's."""
        if not self._silent():
            with self._counted(time.thread_time()), self._fail_safe(), self._lock:
                if not self._stopped:
                    self._put_usage()
                    self._put_imports()

    def close(self) -> None:
        """Take the hooks out and write the last line. What comes later is ignored. May be called twice."""
        if self._silent():
            return
        with self._fail_safe():
            for hooks in self._hooks:
                hooks.close()
            self.agree_by_itself()
            if self._file is None and self._store is not None:
                self._learn_number(self._store)
            elif self._file is None and int(os.environ.get("WORLD_SIZE", "1")) == 1:
                self.agree(0, 1)
            with self._lock:
                if self._stopped:
                    return
                if self._file is None and len(self._waiting) <= 1:
                    # Nothing but the imports: the job ended before it began, and says itself why.
                    self._put_imports()
                    self._stopped = True
                    return
                if self._file is None:
                    why = (
                        "rank 0 gave out no number for the run"
                        if self._store
                        else "the ranks have no process group yet"
                    )
                    raise RuntimeError(f"{why}, {len(self._waiting)} records are lost")
                entered = time.thread_time()
                if not self._usage_written:
                    self._put_usage()
                self._put_imports()
                self._own_cost += time.thread_time() - entered
                self._write_line(self._trailer())
                self._stopped = True
                self._file.close()

    def __enter__(self) -> Recorder:
        global _current
        self._before.append(_current)
        _current = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _current
        _current = self._before.pop()
        self.close()

    def _has_compiled(self, compiled: Compiled) -> None:
        """Write down a turn of the compiler, whose times are those of `time.perf_counter`, on the thread it was on."""
        entered = time.thread_time()
        compiled = replace(
            compiled,
            start=compiled.start - self._zero,
            end=compiled.end - self._zero,
            lane=self._lane(),
            step=self.step_here(),
        )
        span = Span(
            compiled.name,
            compiled.start,
            compiled.end,
            rank=self.rank,
            lane=compiled.lane,
            kind="compile",
            stage="compile",
            step=compiled.step,
            call_site=compiled.place,
            error=compiled.failure.partition(":")[0],
        )
        self._write(span, entered)
        self._write(compiled, time.thread_time())

    def step_here(self) -> str:
        """The name of the step that this thread is in, empty outside one."""
        step: str = getattr(self._where, "step", "")
        return step

    def _lane(self) -> str:
        lane: str | None = getattr(self._where, "lane", None)
        if lane is not None:
            return lane
        thread = threading.current_thread()
        return "main" if thread is threading.main_thread() else thread.name

    def _write(self, record: _Record, entered: float) -> None:
        """Write or keep a record; what it took since `entered` (`time.thread_time`) is the recorder's own cost."""
        if self._silent():
            return
        with self._counted(entered), self._fail_safe(), self._lock:
            if self._stopped:
                return
            self._put(record)
            if isinstance(record, Span) and record.kind == "step" and record.name == self._end and not record.error:
                self._put_usage()
                self._put_imports()
                for unused in self._watch.found() if self._watch.on else ():
                    if unused.begun:
                        unused = replace(unused, start=unused.start - self._zero, end=unused.end - self._zero)
                    self._put(unused)

    @contextmanager
    def _counted(self, entered: float) -> Iterator[None]:
        """What was used since `entered` (`time.thread_time`), and in the block, is the recorder's own cost."""
        spent = Spent(entered)
        try:
            with spent:
                yield
        finally:
            self._own_cost += spent.seconds

    def _put(self, record: _Record) -> None:
        if self._file is None:
            self._waiting.append(record)
        else:
            self._write_line(record)

    def _put_usage(self) -> None:
        self._usage_written = True
        self._put(Usage(self.now(), cpu_seconds()))

    def _put_imports(self) -> None:
        """Write down what was watched and what was imported in this start-up, and stop watching imports."""
        if self._watched_written:
            return
        self._watched_written = True
        imports = self._imports
        kind: Literal["off", "timed", "used"] = "off" if imports is None else "used" if imports.watched else "timed"
        wanted = os.environ.get(SWITCH) == "used"
        self._put(Watched(self._watch.on, kind, wanted, imports.before if imports is not None else ()))
        if imports is None:
            return
        found = imports.end()
        for one in found.spans:
            span = Span(
                f"import {one.package}",
                one.start - self._zero,
                one.end - self._zero,
                lane=one.lane,
                kind="import",
                cpu=one.cpu,
                step=one.step,
                call_site=one.line,
            )
            self._put(span)
        lines: list[_Record] = [*found.packages, *found.lines]
        for line in lines:
            self._put(line)
        self._own_cost += found.cost

    def _silent(self) -> bool:
        """Whether nothing is written any more. A forked process has this object, its lock perhaps held, but no part."""
        return self._stopped or os.getpid() != self._pid

    @contextmanager
    def _fail_safe(self) -> Iterator[None]:
        """An exception ends the recording, not the job."""
        try:
            yield
        except Exception as error:
            with self._lock:
                self._stopped = True
                self._waiting = []
                if self._file is not None:
                    self._file.close()
            place = self.path or self.root
            logging.getLogger("initopt").warning(
                "recording into %s stopped, the job goes on: %s: %s", place, type(error).__name__, error
            )

    def _learn_number(self, store: Store) -> None:
        deadline = time.perf_counter() + _PATIENCE
        # Asked again and again: a blocking wait would hold the store's lock, and other threads may need the store.
        while not store.check([self._run_key]):
            if time.perf_counter() > deadline:
                return
            time.sleep(0.002)
        number = store.get(self._run_key).decode()
        if number:
            self._open(number)
        else:
            # Rank 0 couldn't make the run, and has said so.
            self._stopped = True

    def _new_run(self) -> str:
        """Take the next free number: make its directory, point `latest` to it, let the oldest runs go."""
        self.root.mkdir(parents=True, exist_ok=True)
        last = max(run_numbers(self.root), default=0)
        while True:
            last += 1
            path = self.root / f"{last:04}"
            try:
                path.mkdir()
                break
            except FileExistsError:  # another job took it
                continue
        if self.graph is not None:
            (path / "graph.json").write_text(self.graph.to_json())
        link = self.root / f".latest.{os.getpid()}"
        link.unlink(missing_ok=True)
        link.symlink_to(path.name)
        link.replace(self.root / "latest")
        for number in run_numbers(self.root)[: -self._keep]:
            shutil.rmtree(self.root / f"{number:04}", ignore_errors=True)
        return path.name

    def _open(self, number: str) -> None:
        path = self.root / number
        path.mkdir(parents=True, exist_ok=True)  # the other hosts' file systems may be their own
        with self._lock:
            if self._stopped:
                return
            # Unbuffered: a line is on its way when `add` returns, whatever happens to the process then.
            self._file = (path / f"rank{self.rank:05}.jsonl").open("xb", buffering=0)
            self.path = path
            self._write_line(self._header())
            for record in self._waiting:
                self._write_line(record)
            self._waiting = []

    def _header(self) -> Header:
        return Header(
            rank=self.rank,
            world_size=self.world_size,
            job=self._job,
            mode=self._mode,
            host=platform.node(),
            pid=self._pid,
            process_start=self._process_start,
            cores=cores(),
            host_cores=os.cpu_count() or 1,
            labels=self._labels,
            commit=_commit(Path.cwd()),
            versions=_versions(),
            clock=_boot() or platform.node(),
            zero=self._zero_from,
            goal=self._end if self._end != FIRST_STEP else "",
            after_launcher=self._after_launcher,
        )

    def _trailer(self) -> Trailer:
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return Trailer(
            rank=self.rank,
            end=self.now(),
            own_cost=self._own_cost,
            peak_rss=peak if sys.platform == "darwin" else peak * 1024,
        )

    def _write_line(self, record: _Record | Header | Trailer) -> None:
        import msgspec

        if isinstance(record, Span):
            line = msgspec.json.encode(record if record.rank == self.rank else replace(record, rank=self.rank))
        else:
            if isinstance(record, _OF_A_RANK):
                record = replace(record, rank=self.rank)
            line = msgspec.json.encode({"kind": _LINE[type(record)], **msgspec.to_builtins(record)})
        assert self._file is not None
        if self._file.write(line + b"\n") != len(line) + 1:
            raise OSError("the disk is full")


@overload
def step(name: str, stage: str | None = None) -> NamedBlock: ...
@overload
def step(name: _Function) -> _Function: ...
def step(name: str | _Function, stage: str | None = None) -> NamedBlock | _Function:
    """Record a block, or every call of a function, as a step of the current recorder.

    `with step("features"):` names a block, `@step("features")` a function; `@step` takes the function's own name. The
    current recorder is the one whose `with` block is running, or that of `python -m initopt.run`, on whatever thread.
    Without one this does nothing. Raises TypeError for a function whose call does not do its work: a generator or an
    `async` one.
    """
    if isinstance(name, str):
        return NamedBlock(name, stage)
    return NamedBlock(name.__name__, stage)(name)


class NamedBlock(AbstractContextManager[None]):
    """What `step` gives: to be entered once, or put on a function."""

    def __init__(self, name: str, stage: str | None) -> None:
        self._name, self._stage = name, stage
        self._span: AbstractContextManager[None] = nullcontext()

    def __enter__(self) -> None:
        if _current is not None:
            self._span = _current.span(self._name, stage=self._stage)
        self._span.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._span.__exit__(kind, error, trace)

    def __call__(self, function: _Function) -> _Function:
        """The function, each call of which is a step."""
        if any(is_late(function) for is_late in _LATE):
            raise TypeError(
                f"{function.__qualname__} can't be the step {self._name!r}: a call of it returns before its work is "
                "done. Name the block that does the work, with `with initopt.step(...)`"
            )

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with NamedBlock(self._name, self._stage):
                return function(*args, **kwargs)

        return cast(_Function, call)


def current_recorder() -> Recorder | None:
    """The recorder that `step` records into, None where there is none."""
    return _current


_LATE = inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction
_Around = Callable[["Meeting", Any], AbstractContextManager[None]]
_Function = TypeVar("_Function", bound=Callable[..., Any])

_current: Recorder | None = None


@dataclass(frozen=True, slots=True)
class _Group:
    """A process group and the global ranks of its members."""

    name: str
    ranks: tuple[int, ...]


_OF_A_RANK = (
    Begun
    | Digest
    | Note
    | Usage
    | Compiled
    | CompileCache
    | Imported
    | ImportLine
    | Unused
    | Watched
    | Optimized
    | Advised
)

_Record = Span | _OF_A_RANK | _Group

_LINE = {
    Header: "header",
    Begun: "begun",
    Digest: "digest",
    Note: "note",
    Usage: "usage",
    Compiled: "compiled",
    CompileCache: "compile_cache",
    Imported: "imported",
    ImportLine: "import_line",
    Unused: "unused",
    Watched: "watched",
    Optimized: "optimized",
    Advised: "advised",
    _Group: "group",
    Trailer: "trailer",
}


class _Meetings:
    """Turns the meetings that the hooks see into spans of a recorder."""

    def __init__(self, recorder: Recorder, before: Callable[[str, str], None] | None, around: _Around | None) -> None:
        self._recorder = recorder
        self._before = before
        self._around = around

    def begins(self, op: str, call_site: str) -> None:
        if self._before is not None:
            self._before(op, call_site)

    def enters(self, meeting: Meeting) -> None:
        entered = time.thread_time()
        recorder = self._recorder
        if recorder._usage_written:  # the start-up is over
            return
        begun = Begun(
            op=meeting.op,
            start=meeting.start - recorder._zero,
            group=meeting.group,
            sequence=meeting.sequence,
            call_site=meeting.call_site,
            step=recorder.step_here(),
            lane=recorder._lane(),
        )
        recorder._write(begun, entered)

    def around(self, meeting: Meeting, group: Any) -> AbstractContextManager[None]:
        return nullcontext() if self._around is None else self._around(meeting, group)

    def reads_payloads(self) -> bool:
        # Training has no time for it.
        return not self._recorder._usage_written

    def met(self, meeting: Meeting) -> None:
        entered = time.thread_time()
        recorder = self._recorder
        span = Span(
            name=meeting.op,
            start=meeting.start - recorder._zero,
            end=meeting.end - recorder._zero,
            rank=recorder.rank,
            lane=recorder._lane(),
            kind="collective",
            cpu=meeting.cpu,
            step=recorder.step_here(),
            op=meeting.op,
            group=meeting.group,
            sequence=meeting.sequence,
            bytes=meeting.bytes,
            call_site=meeting.call_site,
            error=meeting.error,
            async_op=meeting.async_op,
            digest=meeting.digest,
            root=meeting.root,
            ranks=meeting.ranks,
            options=meeting.options,
            callers=meeting.callers,
        )
        recorder._write(span, entered - meeting.own)
        if meeting.op == "init_process_group" and not meeting.error:
            recorder.agree_by_itself()

    def group_made(self, group: Any, name: str, call_site: str) -> None:
        self._recorder._watch.group_made(group, name, call_site)

    def group_seen(self, name: str, ranks: tuple[int, ...]) -> None:
        self._recorder._write(_Group(name, ranks), time.thread_time())

    def spent(self, seconds: float) -> None:
        with self._recorder._lock:
            self._recorder._own_cost += seconds


def _launched() -> tuple[int, float]:
    """The process of `initopt launch` that this rank was forked from after so many seconds of imports, 0 if from none.

    Not for a restarted rank, which has not waited for the imports.
    """
    parent = sys.modules.get("initopt.launch.warm_parent")
    return getattr(parent, "FORKED_FROM", 0), getattr(parent, "IMPORT_SECONDS", 0.0)


def _imported_once() -> tuple[str, ...]:
    """A label for a rank that has not imported all by itself."""
    launcher, seconds = _launched()
    return (f"imported once for all ranks: {seconds:.1f} s",) if launcher and seconds else ()


def _process_start() -> tuple[float, float, Literal["kernel", "import"]]:
    """When this process was started: in seconds of `time.perf_counter`, in unix time, and who says so.

    The kernel counts in ticks, mostly of 10 ms. Ranks of one machine are still on one axis: all ask the same clock. A
    rank of `initopt launch` was started with the process that has imported for it.
    """
    # The closest of some readings: between two clocks a busy machine may stop the process for milliseconds.
    _, now, unix, since_boot = min(_read_clocks() for _ in range(5))
    try:
        launcher, _ = _launched()
        process = launcher if os.getppid() == launcher else os.getpid()
        age = since_boot - _started(process)
    except (OSError, ValueError, IndexError):
        age = -1.0
    if age >= now - _IMPORTED:
        return now - age, unix - age, "kernel"
    return _IMPORTED, unix - (now - _IMPORTED), "import"


_STARTS = 300.0
"""Seconds. A launcher that has run for longer has started ranks before, or waited for other hosts."""


def _after_launcher() -> float:
    """How long the process that launched this rank had run by `_process_start`, 0 where that can't be known."""
    # What `torch.distributed.elastic` sets for a rank that it starts, or starts anew.
    if os.environ.get("TORCHELASTIC_RESTART_COUNT") != "0":
        return 0.0
    try:
        imported, _ = _launched()
        first = imported if imported and os.getppid() == imported else os.getpid()
        before = _started(first) - _started(int(_stat(first)[1]))
        return before if 0.0 < before < _STARTS else 0.0
    except (OSError, ValueError, IndexError):
        return 0.0


def _started(process: int) -> float:
    """When a process was started, in seconds from the machine's boot."""
    return int(_stat(process)[19]) / os.sysconf("SC_CLK_TCK")


def _stat(process: int) -> list[str]:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()


def forked() -> None:
    """This process was forked just now from one that had imported this file: it is not older than that."""
    global _IMPORTED
    _IMPORTED = time.perf_counter()


def _read_clocks() -> tuple[float, float, float, float]:
    """How long the reading took, then `perf_counter`, unix time, and the seconds since the machine's boot (or 0)."""
    now = time.perf_counter()
    unix = time.time()
    since_boot = time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else 0.0
    return time.perf_counter() - now, now, unix, since_boot


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _commit(folder: Path) -> str:
    """The commit that the nearest git repository has checked out, or "". Read from its files: no process is forked."""
    for parent in (folder, *folder.parents):
        own = parent / ".git"
        try:
            if own.is_file():  # a worktree, or a submodule
                own = parent / own.read_text().strip().removeprefix("gitdir: ")
            head = (own / "HEAD").read_text().strip()
        except OSError:
            continue
        break
    else:
        return ""
    if not head.startswith("ref: "):
        return head
    ref = head.removeprefix("ref: ")
    common = own / "commondir"
    try:
        shared = own / common.read_text().strip() if common.exists() else own
        if (shared / ref).exists():
            return (shared / ref).read_text().strip()
        packed = (shared / "packed-refs").read_text().splitlines()
    except OSError:
        return ""
    return next((line.split()[0] for line in packed if line.endswith(f" {ref}")), "")


def _versions() -> dict[str, str]:
    """Of python and of what this process has imported: nothing is imported for this."""
    found = {"python": platform.python_version()}
    for name in ("torch", "torchrec", "fbgemm_gpu", "numpy", "initopt"):
        version = getattr(sys.modules.get(name), "__version__", None)
        if version is not None:
            found[name] = str(version)
    return found
